"""Rewards, groups, lengths and log-probs of a dataset, as charts."""

from typing import TYPE_CHECKING, Any

from offline_rec.reporting import charts, histograms
from offline_rec.reporting.blocks import Bar, Cell, Chart, Grid, Note, Table
from offline_rec.reporting.dataset_composition import missing
from offline_rec.reporting.plain_text import name, number, share
from offline_rec.reporting.scores import Scores

if TYPE_CHECKING:
    import duckdb


def rewards(con: "duckdb.DuckDBPyConnection", facts: dict[str, Any]) -> list[Any]:
    """Rewards, group sizes, and how hard prompts are."""
    rewards = histograms.histogram(con, "SELECT reward AS x FROM rollouts")
    if rewards is None:
        return [Note("No response has a reward yet.", "rec reward DATASET --reward ...")]
    sizes = histograms.histogram(con, "SELECT n AS x FROM groups")
    means = histograms.histogram(con, "SELECT reward_mean AS x FROM groups WHERE n_rewarded > 1")
    grouped = facts["groups"]
    equal, comparable = number(grouped["zero_variance"]), number(grouped["comparable"])
    told = (
        f"In {equal} of {comparable} groups with several rewards "
        f"({share(grouped['zero_variance_share'])}) all "
        "are equal: with the mean of the group as the baseline, nothing is learned from them."
    )
    single = f"{number(grouped['single'])} of {number(grouped['count'])} groups hold a single response."
    blocks: list[Any] = [histograms.chart("How are rewards distributed?", rewards, x="reward")]
    if sizes is not None:
        question = "How many responses does a prompt have?"
        blocks.append(histograms.chart(question, sizes, x="responses in a group", y="groups", says=single))
    question = "How hard are the prompts?"
    if means is None:
        blocks.append(missing(question, "No group has several rewards."))
    else:
        blocks.append(histograms.chart(question, means, x="mean reward of a group", y="groups", says=told))
    return [Grid(blocks)]


def lengths(con: "duckdb.DuckDBPyConnection") -> list[Any]:
    """Lengths of responses and prompts, and the reward over length."""
    tokens = histograms.histogram(con, "SELECT n_tokens AS x FROM rollouts")
    unit, column = ("tokens", "n_tokens") if tokens is not None else ("characters", "length(response)")
    responses = tokens or histograms.histogram(con, f"SELECT {column} AS x FROM rollouts")
    if responses is None:
        return [Note("There is no text and no token id to measure.")]
    blocks: list[Any] = [histograms.chart("How long are responses?", responses, x=f"{unit} of a response")]
    prompts = histograms.histogram(con, "SELECT n_prompt_tokens AS x FROM rollouts") or histograms.histogram(
        con, "SELECT length(prompt) AS x FROM rollouts"
    )
    prompt_unit = "tokens" if tokens is not None else "characters"
    if prompts is not None:
        blocks.append(histograms.chart("How long are prompts?", prompts, x=f"{prompt_unit} of a prompt"))
    return [Grid([*blocks, *_reward_by_length(con, column, unit)])]


def _reward_by_length(con: "duckdb.DuckDBPyConnection", column: str, unit: str) -> list[Any]:
    """Mean reward with its standard error, over tenths of the responses by length."""
    found = con.execute(
        f"""WITH edges AS (SELECT approx_quantile({column}, [0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9]) AS q
            FROM rollouts WHERE reward IS NOT NULL),
        binned AS (SELECT {column} AS x, reward AS r,
            len(list_filter(q, lambda edge: edge < {column})) AS bin FROM rollouts, edges
            WHERE reward IS NOT NULL AND {column} IS NOT NULL)
        SELECT avg(x), avg(r), coalesce(stddev_samp(r) / sqrt(count(*)), 0), count(*)
        FROM binned GROUP BY bin ORDER BY 1"""
    ).fetchall()
    question = "Are longer responses better?"
    if len(found) < 2:
        return [missing(question, "All judged responses are about as long.")]
    x, mean, error = ([row[i] for row in found] for i in range(3))
    low, high = ([m + sign * 2 * e for m, e in zip(mean, error, strict=True)] for sign in (-1, 1))
    svg = charts.lines(
        [charts.Line(x, mean, 1, low, high, points=True)],
        x=f"{unit} of a response",
        y="mean reward",
        says=question,
    )
    rows = [[number(a), number(b), f"{n:,}"] for a, b, _, n in found]
    numbers = Table("", [f"mean {unit}", "mean reward", "responses"], rows, (0, 1, 2))
    return [
        Chart(
            question,
            svg,
            (),
            "Up to ten parts of the responses by length; the band is two standard errors.",
            numbers,
        )
    ]


def logprobs(con: "duckdb.DuckDBPyConnection", facts: dict[str, Any], scores: Scores | None) -> list[Any]:
    """Who logged log-probs, and what they are."""
    found = con.execute(
        """SELECT policy, logprob_kind, count(*) AS n, count(n_tokens) AS ids,
            count(behavior_logprob) AS logged, min(temperature), max(temperature) FROM rollouts
            GROUP BY policy, logprob_kind ORDER BY n DESC, policy, logprob_kind LIMIT 40"""
    ).fetchall()
    rows: list[list[Cell]] = [
        [name(policy), kind, f"{n:,}", share(ids, n), Bar(share(logged, n), logged / n), _range(cold, hot)]
        for policy, kind, n, ids, logged, cold, hot in found
    ]
    columns = ["policy", "kind", "responses", "with token ids", "with log-probs", "temperature"]
    table = Table("Which responses have log-probs of the policy that sampled them?", columns, rows, (2, 3))
    per_token = histograms.histogram(
        con,
        "SELECT behavior_logprob / n_tokens AS x FROM rollouts WHERE n_tokens > 0",
    )
    blocks: list[Any] = [table]
    if per_token is None:
        blocks.append(
            Note(
                "None has log-probs: ratios need those of a policy that is at hand.",
                "rec score DATASET --model M",
            )
        )
    else:
        question = "How likely were the responses?"
        told = "Mean log-prob of a token under the policy that sampled it; 0 is certain."
        blocks.append(
            Grid([histograms.chart(question, per_token, x="mean log-prob of a token (nats)", says=told)])
        )
    if scores is not None:
        blocks.append(
            Note(f"Scores of other policies are kept too; {scores.short} cover {scores.rows:,} responses.")
        )
    return blocks


def _range(low: float | None, high: float | None) -> str:
    return number(low) if low == high else f"{number(low)} to {number(high)}"
