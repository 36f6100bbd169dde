"""The page of a dataset: who sampled what, rewards, lengths, log-probs, rejects, and groups to read."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from data_tools.collecting.reasons import REASONS
from data_tools.shaping import Shaping
from data_tools.store.stats import dataset_stats
from offline_rec.reporting import groups
from offline_rec.reporting.blocks import Bar, Cell, Fact, Facts, Grid, Note, Page, Section, Table
from offline_rec.reporting.dataset_composition import composition
from offline_rec.reporting.dataset_measures import lengths, logprobs, rewards
from offline_rec.reporting.plain_text import name, number, plural, share, shortened, size
from offline_rec.reporting.scores import Scores, chosen_scores, sidecars

if TYPE_CHECKING:
    import duckdb

    from data_tools.store.dataset import StoredDataset

Progress = Callable[[str, int, int], None]

STAGES = ("facts", "charts", "groups")


def dataset_page(
    ds: "StoredDataset", *, count: int, seed: int, score: str | None, progress: Progress
) -> Page:
    """The page of a dataset with `count` groups; raises ConfigError if `score` names no scores."""
    scores = chosen_scores(ds, score)
    progress(STAGES[0], 0, len(STAGES))
    facts = dataset_stats(ds)
    with ds.connect() as con:
        progress(STAGES[1], 1, len(STAGES))
        sections = [
            Section("overview", "Overview", _overview(facts)),
            Section("composition", "Composition", composition(con, facts)),
            Section("rewards", "Rewards and groups", rewards(con, facts)),
            Section("lengths", "Lengths", lengths(con)),
            Section("logprobs", "Log-probs", logprobs(con, facts, scores)),
            Section("rejects", "Rejects and flags", _rejects(con, facts)),
        ]
        progress(STAGES[2], 2, len(STAGES))
        sections.append(Section("groups", "Groups to read", _browser(ds, con, count, seed, scores)))
    title = ds.path.rstrip("/").rsplit("/", 1)[-1]
    return Page(name(title), "dataset of logged responses", ds.path, sections)


def _overview(facts: dict[str, Any]) -> list[Any]:
    grouped, rewards, logprobs = facts["groups"], facts["rewards"], facts["logprobs"]
    rejects = sum(facts["rejects"].values())
    splits = {split: found["rows"] for split, found in facts["splits"].items()}
    policies = {row["policy"] for row in facts["policies"]}
    on_disk = sum(facts["bytes"].values())
    return [
        Facts(
            [
                Fact(
                    "Responses",
                    number(facts["rows"]),
                    f"in {plural(facts['batches'], 'batch')}, {size(on_disk)}",
                ),
                Fact("Prompts", number(facts["prompts"]), f"{number(grouped['count'])} groups"),
                Fact("Policies", number(len(policies)), "that sampled"),
                Fact("Mean reward", number(rewards["mean"]), _judged(rewards)),
                Fact(
                    "Groups that teach",
                    share(
                        None if grouped["zero_variance_share"] is None else 1 - grouped["zero_variance_share"]
                    ),
                    "of those with several rewards: not all are equal",
                ),
                Fact("With log-probs", share(logprobs["logprobs_share"]), "of the policy that sampled"),
                Fact("Held out", number(splits.get("holdout", 0)), "responses that no fit sees"),
                Fact("Rejects", number(rejects), "records that could not be used"),
            ]
        )
    ]


def _judged(rewards: dict[str, Any]) -> str:
    return f"{share(rewards['null_share'])} are not judged" if rewards["null"] else "all are judged"


def _rejects(con: "duckdb.DuckDBPyConnection", facts: dict[str, Any]) -> list[Any]:
    total = sum(facts["rejects"].values())
    blocks: list[Any] = []
    if total:
        found = con.execute(
            """SELECT reason, count(*) AS n, arg_min(detail, (source_file, source_row)),
                arg_min(source_file, (source_file, source_row)), min(source_row) FROM rejects
                GROUP BY reason ORDER BY n DESC, reason LIMIT 40"""
        ).fetchall()
        rows: list[list[Cell]] = [
            [
                name(reason),
                Bar(f"{n:,} ({share(n, total)})", n / total),
                REASONS.get(reason, "–"),
                shortened(str(detail or "–"), 160)[0],
            ]
            for reason, n, detail, *_ in found
        ]
        blocks.append(
            Table("Why were records rejected?", ["reason", "records", "meaning", "one of them"], rows)
        )
    else:
        blocks.append(Note("Nothing was rejected: every record of the logs became a response."))
    small = [
        _counts("How did responses end?", "finish reason", facts["finish_reasons"], facts["rows"]),
        _counts("What was noted about responses?", "flag", facts["flags"], facts["rows"]),
    ]
    return [*blocks, Grid(small)]


def _counts(question: str, what: str, counts: dict[str, int], total: int) -> Table:
    listed = list(counts.items())[:20]
    rows: list[list[Cell]] = [
        [name(key), Bar(f"{n:,} ({share(n, total)})", n / max(total, 1))] for key, n in listed
    ]
    return Table(
        question, [what, "responses"] if rows else (), rows, says="" if rows else "No response has any."
    )


def _browser(
    ds: "StoredDataset", con: "duckdb.DuckDBPyConnection", count: int, seed: int, scores: Scores | None
) -> list[Any]:
    kinds = _choice(ds, con, count, seed, scores)
    if not kinds:
        return [Note("There is no group to show." if count else "No group was asked for (--groups 0).")]
    rows = groups.rows_where(con, groups.in_list("group_id", list(kinds)))
    shaped = groups.shaped(con, Shaping(), list(kinds))
    view = groups.TokenView(scores.key if scores else None)
    told = (
        f"{plural(len(kinds), 'group')}, drawn by turns from the kinds of groups there are (seed {seed}). "
        "The advantage is the reward minus the mean of the group; a run's page has that run's own weights."
    )
    if scores is not None:
        told += f" Log-ratios are those of {scores.short} to the policy that sampled."
    return [Note(told), groups.browser(ds, rows, kinds, shaped, view)]


def _choice(
    ds: "StoredDataset", con: "duckdb.DuckDBPyConnection", count: int, seed: int, scores: Scores | None
) -> dict[str, str]:
    """Groups of every kind; where a policy was scored, half of them with its scores."""
    chosen: dict[str, str] = {}
    if scores is not None and count > 1:
        with sidecars(ds, [scores.key]) as scored:
            found = scored.execute(
                "SELECT response_id FROM scores_0 WHERE logprob IS NOT NULL "
                "ORDER BY md5($1 || response_id) LIMIT 500",
                [str(seed)],
            ).fetchall()
        ids = groups.in_list("response_id", [row[0] for row in found])
        condition = f"group_id IN (SELECT group_id FROM rollouts WHERE {ids})"
        chosen = groups.choose(con, count=count // 2, seed=seed, condition=condition)
    others = f"NOT ({groups.in_list('group_id', list(chosen))})"
    return chosen | groups.choose(con, count=count - len(chosen), seed=seed, condition=others)
