"""What the card of a loop's model tells besides that of a fit: the regime, the sampler, the versions."""

from pathlib import Path
from typing import Any

import yaml

import data_tools
from data_tools.errors import DataError
from offline_rec.cards.data_sections import place
from offline_rec.cards.markdown import facts, table
from offline_rec.config import CONFIG_FILE
from offline_rec.training.metrics import read_metrics

ROUNDS = "rounds"
SHOWN = (
    *("rounds", "steps_per_round", "lag", "replay", "replay_weight", "offline", "n", "temperature", "top_p"),
    *("top_k", "max_tokens", "policy", "where"),
)
"""Fields of the configuration that say how a loop sampled."""

VERSIONS = """SELECT policy, policy_version AS version, count(DISTINCT response_id) AS rows,
        min(step) AS first_update, max(step) AS last_update
    FROM lineage GROUP BY policy, policy_version ORDER BY policy_version DESC, policy"""
LISTED = 20


def is_loop(run: Path) -> bool:
    """Whether a run directory is that of a loop."""
    return (run / ROUNDS).is_dir()


def fit_of_loop(run: Path, updates: int | None) -> Path:
    """The fit that the model of a loop is from: the last that made an update up to there."""
    fits = [path for path in (run / ROUNDS).glob("*") if (path / CONFIG_FILE).exists()]
    dated = [(first, path) for path in fits if (first := _first_step(path)) is not None]
    before = [pair for pair in dated if updates is None or pair[0] <= max(updates, 1)]
    if not before:
        raise DataError(f"{run} has no round that made an update", "end a round first: rec loop --resume")
    return max(before)[1]


def loop_sections(run: Path) -> dict[str, str | None]:
    """The sections about the rounds of a loop."""
    config = _config(run)
    told: dict[str, Any] = {name.replace("_", " "): config.get(name) for name in SHOWN}
    told["prompts"] = place(config.get("prompts")) or "those of the dataset"
    told["reward"] = reward_of(run)
    told["data, below"] = "that of the last round"
    lineage = any((run / "lineage").glob("*.parquet"))
    found = data_tools.open(run).sql(f"{VERSIONS} LIMIT {LISTED}").to_pylist() if lineage else []
    named = [one for one in found if one["policy"] is not None]
    return {"Rounds": facts(told), "Versions that the updates saw": table(named) or None}


def reward_of(run: Path) -> str | None:
    """The reward of a loop with its options, as it is spelt elsewhere; None where it has none."""
    config = _config(run)
    options = ", ".join(f"{name}={value!r}" for name, value in (config.get("reward_options") or {}).items())
    return f"{config['reward']}({options})" if config.get("reward") and options else config.get("reward")


def _first_step(fit: Path) -> int | None:
    # Not lineage: a fit that a guard ended before its first checkpoint has none.
    return min((record["step"] for record in read_metrics(fit)), default=None)


def _config(run: Path) -> dict[str, Any]:
    loaded = yaml.safe_load((run / CONFIG_FILE).read_text(encoding="utf-8"))
    return loaded if isinstance(loaded, dict) else {}
