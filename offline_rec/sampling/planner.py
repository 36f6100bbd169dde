"""Which prompts deserve new samples, as one SELECT over the dataset whose numbers anybody can look at."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from data_tools.errors import ConfigError
from data_tools.store.guard import check_expression
from data_tools.store.sql_errors import sql_errors

if TYPE_CHECKING:
    from data_tools.store.dataset import StoredDataset

SCORE = "coalesce(1 - overlap, 0) + coalesce(spread, 0) + 0.5 * CAST(zero_variance AS INT) + 0.5 * traffic"
"""The default score, over the columns below."""

COLUMNS = {
    "n": "responses that the prompt has",
    "reward_mean": "their mean reward",
    "reward_std": "the standard deviation of their rewards",
    "zero_variance": "whether their rewards are all equal, so that they teach nothing",
    "ess": "effective share of its responses, (sum w)^2 / (n sum w^2), null without scores",
    "mean_ratio": "mean over them of w = pi / mu, model over sampler, null without scores",
    "overlap": "ess * min(1, mean_ratio): 1 if the model answers as they do, near 0 if it moved away",
    "spread": "reward_std over the largest of all prompts",
    "traffic": "share of all responses, over the largest of all prompts",
}
"""What the score of a prompt may use."""

_SCORES = pa.schema([("response_id", pa.string()), ("logprob", pa.float64())])


@dataclass(frozen=True)
class Budget:
    """So many new responses in all; `score`: DuckDB expression over COLUMNS, the highest go first."""

    responses: int
    score: str = SCORE

    def prompts(self, n: int) -> int:
        """How many prompts that pays for; ConfigError if none."""
        if self.responses < n:
            raise ConfigError(
                f"a budget of {self.responses} responses is less than the {n} of one prompt",
                "raise --budget, or lower --n",
            )
        return self.responses // n


def planner_statement(*, score: str = SCORE, where: str | None = None, limit: int | None = None) -> str:
    """The SELECT of prompts with their COLUMNS and `score`, best first.

    It reads `rollouts` and `scores(response_id, logprob)`, log-probs of the present policy.
    """
    if where is not None:
        check_expression(where, "--where", subqueries=True)
    check_expression(score, "the score")
    return f"""WITH rated AS (
    SELECT r.prompt_hash, r.prompt, r.response_id, r.reward,
        CASE WHEN s.logprob - r.behavior_logprob IS NOT NULL
            THEN greatest(-20, least(20, s.logprob - r.behavior_logprob)) END AS log_ratio
    FROM (SELECT * FROM rollouts WHERE prompt IS NOT NULL AND ({where or "true"}
    )) r LEFT JOIN scores s ON s.response_id = r.response_id),
asked AS (
    SELECT prompt_hash, arg_min(prompt, response_id) AS prompt, count(*) AS n,
        avg(reward) AS reward_mean, stddev_pop(reward) AS reward_std,
        coalesce(max(reward) - min(reward) <= 1e-9 * greatest(1, abs(max(reward))), false) AS zero_variance,
        pow(sum(exp(log_ratio)), 2) / sum(exp(2 * log_ratio)) / count(log_ratio) AS ess,
        avg(exp(log_ratio)) AS mean_ratio
    FROM rated GROUP BY prompt_hash),
compared AS (
    SELECT *, ess * least(1, mean_ratio) AS overlap,
        reward_std / nullif(max(reward_std) OVER (), 0) AS spread, n / max(n) OVER () AS traffic
    FROM asked)
SELECT *, CAST({score} AS DOUBLE) AS score
FROM compared ORDER BY score DESC NULLS LAST, prompt_hash{f" LIMIT {limit}" if limit is not None else ""}"""


def plan_prompts(
    ds: "StoredDataset",
    *,
    weights: str | None = None,
    score: str = SCORE,
    where: str | None = None,
    limit: int | None = None,
) -> pa.Table:
    """Run the statement. `weights`: fingerprint of the present policy, whose stored scores (`rec score`) tell
    how far it has moved from the rows; without any, `overlap` is null.
    """
    statement = planner_statement(score=score, where=where, limit=limit)
    with ds.connect() as con, sql_errors("the planner"):
        con.register("scores", _stored_scores(ds, weights))
        return con.sql(statement).to_arrow_table()


def planned_prompts(
    ds: "StoredDataset", model: str | Path, budget: Budget, *, n: int, where: str | None = None
) -> list[str]:
    """Hashes of the prompts that a budget is best spent on."""
    limit = budget.prompts(n)
    found = plan_prompts(ds, weights=scored_weights(ds, model), score=budget.score, where=where, limit=limit)
    hashes: list[str] = found["prompt_hash"].to_pylist()
    return hashes


def scored_weights(ds: "StoredDataset", model: str | Path) -> str | None:
    """The fingerprint of a model's weights; None where the dataset has no scores at all."""
    if not ds.storage.entries("logprobs"):
        return None
    from offline_rec.models.policy import Policy

    return Policy.load(model, device="cpu").fingerprint()


def _stored_scores(ds: "StoredDataset", weights: str | None) -> pa.Table:
    tables: list[Any] = [_SCORES.empty_table()]
    sidecar = None if weights is None else ds.sidecar("logprobs", weights)
    for batch in ds.batches():
        if sidecar is not None and sidecar.exists(batch):
            with sidecar.parquet(batch) as file:
                tables.append(file.read(_SCORES.names).cast(_SCORES))
    return pa.concat_tables(tables)
