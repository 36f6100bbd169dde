"""The figures of the trial, from what its commands left, as benchmarks/RESULTS.md takes them.

python examples/smollm2/figures.py . benchmarks/results/smollm2.json
"""

import json
import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import yaml

FIT = ("algorithm", "lora_rank", "lr", "epochs", "groups_per_step", "seed")
SAMPLED = ("responses", "mean_reward", "tokens", "verified")


def figures(folder: Path) -> dict[str, Any]:
    """What was asked and found, with where it was."""
    refreshed = json.loads((folder / "refresh.json").read_text(encoding="utf-8"))
    asked = yaml.safe_load((folder / "run" / "config.yaml").read_text(encoding="utf-8"))
    updates = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").open(encoding="utf-8")]
    exam = json.loads((folder / "exam" / "eval.json").read_text(encoding="utf-8"))
    return {
        "machine": {
            "date": datetime.now(UTC).date().isoformat(),
            "cores": os.cpu_count(),
            "machine": platform.machine(),
            **{name: version(name) for name in ("torch", "transformers", "peft")},
        },
        "log": {name: refreshed[name] for name in SAMPLED},
        "fit": {name: asked[name] for name in FIT} | {"steps": max(one.get("step", 0) for one in updates)},
        "exam": exam | {"asked": exam["asked"] | {"models": sorted(exam["asked"]["models"])}},
    }


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("output", type=click.Path(path_type=Path))
def main(folder: Path, output: Path) -> None:
    """Write the figures of the trial in FOLDER to OUTPUT."""
    output.write_text(json.dumps(figures(folder), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
