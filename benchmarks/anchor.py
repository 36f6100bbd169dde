"""Log-probs of a reference computed once and kept, against a forward pass of it in every update.

    python benchmarks/anchor.py --rounds 5 --output benchmarks/results/anchor.json

Both sides make the update of `rec fit` with a KL term to the starting model, on the same logged groups, and
take turns in one process. `kept`: log-probs of the reference come with the rows, as a fit has them, which
computes them before its first step. `anew`: a second copy of the model computes them in the update, as
trainers do that keep none, with the same micro-batches, shared prompts and chunks of logits. Both must come
to the same weights. A ratio is that of two neighbours in a round.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from fit_step import LEARNING_RATE, SHAPES, Shape, facts, make_model, make_step, now, spread, token_budget

from offline_rec.data.packing import micro_batches
from offline_rec.data.ragged import IntArray, Ragged
from offline_rec.data.rows import Rows
from offline_rec.models.policy import Policy
from offline_rec.objectives.objective import objective
from offline_rec.training.engine import OptimizerSettings
from offline_rec.training.engines.plain import TorchEngine
from offline_rec.training.step import StepRows, update

SIDES = ("kept", "anew")
KL = 0.1


class Side:
    """Updates of one model; with `anew` a second one is asked for the reference in each."""

    def __init__(self, shape: Shape, groups: int, *, anew: bool) -> None:
        rows, indexed = make_step(shape, groups)
        self.policy, self.reference = Policy(make_model(shape), None), Policy(make_model(shape), None)
        self.engine = TorchEngine("cpu")
        self.policy.module = self.engine.prepare(self.policy.module, OptimizerSettings())
        self.objective = objective("rec-oneside-nois", kl_coef=KL)
        budget = token_budget(self.policy.model, rows, groups)
        batches = micro_batches(rows, budget, self.policy.sharing)
        began = now()
        rows = replace(rows, reference=self.score(rows, batches))
        self.scoring = now() - began
        self.facts = {"budget": budget, "micro_batches": len(batches)}
        self.rows = StepRows(1, rows, indexed, batches, "behavior", groups, int(rows.lengths.sum()), {})
        self.anew = anew
        if not anew:
            del self.reference

    def score(self, rows: Rows, batches: list[IntArray]) -> Ragged:
        """Log-probs of the reference, as `rec score` computes them."""
        values = [np.zeros(0, np.float32)] * len(rows)
        with torch.no_grad():
            for batch in batches:
                found = self.reference.logprobs(rows, batch).numpy()
                for row, logprobs in zip(batch.tolist(), found, strict=True):
                    values[row] = logprobs[: rows.response_ids.lengths[row]]
        return Ragged.from_lists(values, np.float32)

    def step(self) -> Any:
        """Seconds of one update."""
        began = now()
        step = self.rows
        if self.anew:
            step = replace(step, rows=replace(step.rows, reference=self.score(step.rows, list(step.batches))))
        update(self.engine, self.policy, self.objective, step, lr=LEARNING_RATE)
        return now() - began

    def weights(self) -> torch.Tensor:
        """All of them in one vector."""
        return torch.cat([p.detach().flatten() for p in self.policy.model.parameters()])


def measure(name: str, groups: int, rounds: int) -> dict[str, Any]:
    """Both sides of one shape, in turns; the order changes from round to round."""
    sides = {side: Side(SHAPES[name], groups, anew=side == "anew") for side in SIDES}
    seconds: dict[str, list[Any]] = {side: [] for side in SIDES}
    for number in range(rounds + 1):
        for side in SIDES if number % 2 else reversed(SIDES):
            took = sides[side].step()
            click.echo(f"{name}: {side} {took[0]:.2f} s, {took[1]:.2f} of CPU", err=True)
            if number:
                seconds[side].append(took)
    apart = float((sides["kept"].weights() - sides["anew"].weights()).abs().max())
    if apart > 1e-6:
        raise SystemExit(f"{name}: the sides come to weights that are {apart} apart")
    found: dict[str, Any] = {"groups": groups, **sides["kept"].facts, "weights_apart": apart}
    for at, kind in enumerate(("seconds", "cpu_seconds")):
        found[kind] = {side: [round(float(took[at]), 3) for took in seconds[side]] for side in SIDES}
        ratios = [a[at] / b[at] for a, b in zip(seconds["kept"], seconds["anew"], strict=True)]
        found[f"kept_of_anew_{kind}"] = spread(ratios)
    found["scoring_cpu_seconds"] = round(float(sides["kept"].scoring[1]), 3)
    return found


@click.command()
@click.option("--shape", "shapes", multiple=True, type=click.Choice(list(SHAPES)), help="All but tiny.")
@click.option("--groups", default=4, show_default=True, help="Groups of eight in an update.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print all figures.")
@click.option("--output", type=click.Path(path_type=Path), help="JSON file to write.")
def main(shapes: tuple[str, ...], groups: int, rounds: int, as_json: bool, output: Path | None) -> None:
    """Time updates with log-probs of the reference that are kept, and with such that are computed anew."""
    runs = {name: measure(name, groups, rounds) for name in shapes or [n for n in SHAPES if n != "tiny"]}
    found = {**facts(), "runs": runs}
    if as_json:
        click.echo(json.dumps(found, indent=1))
    else:
        for name, run in runs.items():
            ratio = run["kept_of_anew_cpu_seconds"]
            click.echo(f"{name}: {ratio['median']} of the CPU time ({ratio['least']} to {ratio['most']})")
    if output:
        output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
