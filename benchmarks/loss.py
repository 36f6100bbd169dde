"""The loss over a large vocabulary: memory and time of a REC loss from hidden states to gradients, four ways.

    python benchmarks/loss.py --rounds 5 --output benchmarks/results/loss.json

`naive` is log softmax over all logits, `selective` the log-prob of the target minus a logsumexp of each
sequence, as trainers write it to keep one copy of the logits less. `recompute` and `one-pass` are this
library's. All take the same hidden states, head, targets and logged log-probs, and their losses and gradients
are compared. Every measurement is a process of its own on one thread; ways take turns. Time is that of the
processor, so that a busy machine disturbs it little; memory is the peak beyond the inputs.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from offline_rec.models.logprobs import Head, token_logprobs, weighted_logprobs
from offline_rec.objectives.objective import objective

OURS = ("recompute", "one-pass")
WAYS = ("naive", "selective", *OURS)
SEQUENCE = 512
EPSILON = 0.2


def clipped(logprobs: Tensor, given: dict[str, Tensor]) -> Tensor:
    """The loss of rec-oneside-nois, written down anew: its mean over tokens."""
    ratio, advantages = (logprobs.detach() - given["behavior"]).exp(), given["advantages"]
    keep = torch.where(advantages >= 0, ratio <= 1 + EPSILON, ratio >= 1 - EPSILON)
    return -(advantages * keep * logprobs).sum() / len(logprobs)


def naive(given: dict[str, Tensor]) -> Tensor:
    logits = given["hidden"] @ given["weight"].T
    return clipped(logits.log_softmax(-1).gather(1, given["targets"][:, None])[:, 0], given)


def selective(given: dict[str, Tensor]) -> Tensor:
    logits = (given["hidden"] @ given["weight"].T).view(-1, SEQUENCE, len(given["weight"]))
    chosen = logits.gather(-1, given["targets"].view(-1, SEQUENCE, 1))[..., 0]
    totals = torch.stack([torch.logsumexp(row, -1) for row in logits])
    return clipped((chosen - totals).flatten(), given)


def ours(given: dict[str, Tensor], way: str) -> Tensor:
    """One response a sequence, as a step has them."""
    chosen = objective("rec-oneside-nois", epsilon_low=EPSILON, epsilon_high=EPSILON)
    shape = -1, SEQUENCE
    behavior, advantages = given["behavior"].view(shape), given["advantages"].view(shape)[:, 0]
    mask = torch.ones_like(behavior)
    head, count = Head(given["weight"]), chosen.normalizer(mask)
    if way == "recompute":
        logprobs = token_logprobs(given["hidden"], given["targets"], head).view(shape)
        terms = chosen.terms(chosen.signals(logprobs, behavior, advantages, mask))
        return chosen.surrogate(terms.coefficients, logprobs, mask, count)
    blank = chosen.signals(torch.zeros_like(behavior), behavior, advantages, mask)
    return weighted_logprobs(given["hidden"], given["targets"], head, chosen.token_gradient(blank, count))[1]


def inputs(tokens: int, hidden: int, vocabulary: int) -> dict[str, Tensor]:
    """Random states and head; logged log-probs near those of the model, so that some tokens are clipped."""
    torch.manual_seed(0)
    return {
        "hidden": torch.randn(tokens, hidden).requires_grad_(),
        "weight": torch.empty(vocabulary, hidden).normal_(0, hidden**-0.5).requires_grad_(),
        "targets": torch.randint(vocabulary, (tokens,)),
        "behavior": torch.randn(tokens) - torch.tensor(float(vocabulary)).log() - 0.5,
        "advantages": torch.randn(tokens // SEQUENCE).repeat_interleave(SEQUENCE),
    }


def status(field: str) -> int:
    """Bytes that the system has counted for this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field + ":"))


def measure(way: str, tokens: int, hidden: int, vocabulary: int) -> dict[str, float]:
    """Loss and gradients in this process."""
    compute = {"naive": naive, "selective": selective}.get(way) or (lambda given: ours(given, way))
    torch.set_num_threads(1)
    compute(inputs(SEQUENCE, 8, 64)).backward()  # libraries are loaded, buffers made
    given = inputs(tokens, hidden, vocabulary)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before, start = status("VmRSS"), time.process_time()
    loss = compute(given)
    loss.backward()
    seconds = time.process_time() - start
    peak = status("VmHWM") - before
    sums = {name: given[name].grad.abs().sum(dtype=torch.float64).item() for name in ("hidden", "weight")}
    return {"seconds": seconds, "peak_mib": peak / 2**20, "loss": loss.item(), **sums}


def in_process(way: str, tokens: int, hidden: int, vocabulary: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", way, str(tokens), str(hidden), str(vocabulary)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def summary(runs: list[dict[str, float]]) -> dict[str, Any]:
    """Median and range of several runs, and their common results."""
    seconds = sorted(run["seconds"] for run in runs)
    return {
        "seconds": round(statistics.median(seconds), 2),
        "seconds_range": [round(seconds[0], 2), round(seconds[-1], 2)],
        "peak_mib": round(statistics.median(run["peak_mib"] for run in runs), 1),
        **{name: runs[0][name] for name in ("loss", "hidden", "weight")},
    }


def run_size(tokens: int, hidden: int, vocabulary: int, rounds: int) -> dict[str, Any]:
    """All ways in turn, then this library's at four times the tokens."""
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for way in WAYS if number % 2 == 0 else reversed(WAYS):
            runs[way].append(in_process(way, tokens, hidden, vocabulary))
            click.echo(f"  {way}: {runs[way][-1]}", err=True)
    found = {way: summary(several) for way, several in runs.items()}
    base = found["naive"]
    for way in WAYS:
        own = found[way]
        # Ratios of runs of one round: what disturbs a round disturbs all of it.
        times = [mine["seconds"] / its["seconds"] for mine, its in zip(runs[way], runs["naive"], strict=True)]
        own["time_of_naive"] = round(statistics.median(times), 3)
        own["memory_of_naive"] = round(own["peak_mib"] / base["peak_mib"], 4)
        own["difference"] = max(abs(own[k] / base[k] - 1) for k in ("loss", "hidden", "weight"))
    for way in OURS:
        longer = in_process(way, 4 * tokens, hidden, vocabulary)
        found[way]["peak_mib_at_four_times"] = round(longer["peak_mib"], 1)
        found[way]["growth"] = round(longer["peak_mib"] / found[way]["peak_mib"], 3)
    return {"tokens": tokens, "hidden": hidden, "vocabulary": vocabulary, "rounds": rounds, "ways": found}


def report(size: dict[str, Any]) -> str:
    lines = [f"{size['tokens']} tokens, hidden size {size['hidden']}, vocabulary {size['vocabulary']}"]
    for way, own in size["ways"].items():
        line = f"  {way:<10} {own['seconds']:>7} s ({own['time_of_naive']} of naive)"
        line += f", {own['peak_mib']:>7} MiB (1/{1 / own['memory_of_naive']:.1f})"
        line += f", differs by {own['difference']:.0e}"
        grows = f"; four times the tokens: {own['growth']} of the memory" if "growth" in own else ""
        lines.append(line + grows)
    return "\n".join(lines)


@click.command()
@click.option("--tokens", default=4096, show_default=True, help=f"A multiple of {SEQUENCE}.")
@click.option("--hidden", multiple=True, type=int, default=[256], show_default=True)
@click.option("--vocabulary", default=151_936, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="JSON file to write.")
@click.option("--one", nargs=4, hidden=True)
def main(
    tokens: int,
    hidden: tuple[int, ...],
    vocabulary: int,
    rounds: int,
    output: Path | None,
    one: tuple[str, str, str, str] | None,
) -> None:
    """Measure the four ways; the naive one takes three times all logits in memory."""
    if one:
        way, *numbers = one
        print(json.dumps(measure(way, *map(int, numbers))))
        return
    sizes = []
    for size in hidden:
        sizes.append(run_size(tokens, size, vocabulary, rounds))
        click.echo(report(sizes[-1]))
    if output:
        machine = {
            "cores": os.cpu_count(),
            "machine": platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        }
        output.write_text(json.dumps({"machine": machine, "sizes": sizes}, indent=2) + "\n")


if __name__ == "__main__":
    main()
