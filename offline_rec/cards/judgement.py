"""What was found out about a policy after its fit: the parts of a card that reports beside the run give."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offline_rec.cards.data_sections import place
from offline_rec.cards.markdown import plain, table, text

OPE_FILE = "ope.json"
EVAL_FOLDER, EVAL_FILE = "eval", "eval.json"

Facts = dict[str, Any]


def off_policy(run: Path) -> str | None:
    """The latest report of `rec ope` on the run, None where there is none."""
    report = _read(run / OPE_FILE)
    if report is None:
        return None
    rows = []
    for judged in report["policies"]:
        told = judged["verdict"]["word"] != "not identifiable"
        rows.append(
            {
                "verdict": judged["verdict"]["word"],
                "because": judged["verdict"]["reason"],
                "estimate": _interval(judged["value"]) if told else "none",
                "gain over the log": _interval(judged["gain"]) if told else "none",
                "ESS": judged["diagnostics"]["ess"],
                "rows with prompts it was trained on": judged["trained_rows"],
            }
        )
    where = f", where {plain(report['where'])}" if report["where"] else ""
    data = (
        f"On {report['episodes']:,} responses to {report['prompts']:,} prompts of {place(report['dataset'])} "
        f"(split {report['split']}{where}), whose mean reward is {_interval(report['logged'])}; 95 % "
        "intervals over prompts."
    )
    return f"{text(data, characters=1000)}\n\n{table(rows)}"


def evaluations(run: Path) -> str | None:
    """The reports of `rec eval` that are kept in the run, oldest first, None where there is none."""
    folders = (run / EVAL_FOLDER).glob("*") if (run / EVAL_FOLDER).is_dir() else []
    numbered = sorted((path for path in folders if path.name.isdecimal()), key=lambda path: int(path.name))
    reports = [report for path in numbered if (report := _read(path / EVAL_FILE)) is not None]
    return "\n\n".join(map(_evaluation, reports)) or None


def _evaluation(report: Facts) -> str:
    asked = report["asked"]
    settings = ", ".join(f"{name} {plain(asked[name])}" for name in SETTINGS if asked.get(name) is not None)
    said = (
        f"{asked['samples']:,} samples a prompt to {asked['prompts']:,} prompts, reward "
        f"{plain(asked['reward'])}; {settings}; 95 % intervals over prompts."
    )
    rows = [
        {
            "policy": one["policy"],
            "accuracy": _interval(one["accuracy"]),
            "mean reward": _interval(one["mean_reward"]),
            "pass@k": ", ".join(f"{k}: {_interval(value)}" for k, value in one["pass_at"].items()) or "none",
            "not judged": one["unjudged"],
        }
        for one in report["policies"]
    ]
    differences = [
        {"policy": d["second"], "against": d["first"], "measure": d["measure"], "difference": _interval(d)}
        for d in report["differences"]
    ]
    body = f"{text(said, characters=1000)}\n\n{table(rows)}"
    return f"{body}\n\n{table(differences)}" if differences else body


SETTINGS = ("temperature", "top_p", "top_k", "max_tokens", "seed", "engine")
"""How an evaluation sampled, as its report names it."""


def _interval(found: Mapping[str, Any]) -> str:
    value, low, high = (found.get(name) for name in ("value", "low", "high"))
    if value is None:
        return "unknown"
    around = f" ({low:.4g} to {high:.4g})" if low is not None and high is not None else ""
    return f"{value:.4g}{around}"


def _read(path: Path) -> Facts | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
