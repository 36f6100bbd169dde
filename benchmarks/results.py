"""The figures of benchmarks/results/ as one page, RESULTS.md: what was measured, where, and beside what.

    python benchmarks/results.py

Every row is made from the JSON file that its script wrote; nothing is typed in.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
Found = dict[str, Any]
Row = tuple[str, str]
"""What was measured, and the figure."""

HEAD = """# What was measured

Made by `python benchmarks/results.py` from the JSON files in `benchmarks/results/`, which hold every run and
where it was made. Ratios are of sides that were measured in one run, in turns.
"""


def collect(found: Found) -> Iterator[Row]:
    first, last = found["sizes"]
    yield f"rows a second at {last['rows']:,} rows", f"{last['collect']['rows_per_second']:,}"
    yield "of the rows a second of bare DuckDB, schema given", f"{found['speed_of_bare_duckdb']:.2f}"
    yield f"peak memory, of that at {first['rows']:,} rows", f"{found['peak_memory_ratio']:.2f}"
    read = found["fit_read_of_token_columns"]
    yield "of the token columns read until the first step of a fit", f"{read:.2f}"


def ingest(found: Found) -> Iterator[Row]:
    for name in ("rows", "chat with log-probs"):
        one = found[name]
        yield f"{name}: rows a second, {one['log_mib']} MiB", f"{one['rows_per_second']['rec']:,}"
        yield f"{name}: peak memory, MiB", f"{one['peak_mib']['rec']:.0f}"
        for side, ratio in one["rec_is_faster_by"].items():
            yield f"{name}: times as fast as {side}", f"{ratio:.2f}"


def fit_step(found: Found) -> Iterator[Row]:
    for name, run in found["runs"].items():
        sides = run["sides"]
        yield f"{name}: useful tokens a second", f"{sides['rec']['useful_tokens_per_second']:,.0f}"
        for side in ("plain", "trl"):
            if side in sides:
                ratio = sides[side]["times_rec"]
                spread = f"{ratio['median']} ({ratio['least']} to {ratio['most']})"
                yield f"{name}: times as fast as {side}", spread
        for cut in run.get("peak_mib_of_other_cuts", ()):
            what = ", ".join(f"{key} {value}" for key, value in cut.items() if key != "peak_mib")
            yield f"{name}: peak memory of {what}, MiB", f"{cut['peak_mib']:,.0f}"


def fit_step_gpu(found: Found) -> Iterator[Row]:
    for name, run in found["runs"].items():
        sides = run["sides"]
        yield f"{name}: useful tokens a second", f"{sides['rec']['useful_tokens_per_second']:,.0f}"
        for side, one in sides.items():
            if side != "rec":
                ratio = one["times_rec"]
                spread = f"{ratio['median']} ({ratio['least']} to {ratio['most']})"
                yield f"{name}: time of {side}, of rec", spread
            if "logprobs_differ" in one:
                yield f"{name}: log-probs of {side} differ by, nat", f"{one['logprobs_differ']['most']:.1e}"
            if "peak_mib" in one:
                yield f"{name}: peak memory of side {side}, MiB", f"{one['peak_mib']:,.0f}"


def loss(found: Found) -> Iterator[Row]:
    for size in found["sizes"]:
        shape = f"{size['tokens']:,} tokens, width {size['hidden']}, vocabulary {size['vocabulary']:,}"
        for way, one in size["ways"].items():
            if way != "naive":
                yield f"{shape}: memory of {way}, of full logits", f"{one['memory_of_naive']:.3f}"
                yield f"{shape}: time of {way}, of full logits", f"{one['time_of_naive']:.2f}"


def ope(found: Found) -> Iterator[Row]:
    first, last = (size["held_out_rows"] for size in found["sizes"])
    for name, ratio in found["peak_memory_last_over_first"].items():
        yield f"{name}: peak memory at {last:,} held-out rows, of that at {first:,}", f"{ratio:.2f}"


def math_reward(found: Found) -> Iterator[Row]:
    for part in ("train", "test"):
        right, answers = (found[part][name] for name in ("right", "answers"))
        yield f"GSM8K {part}: answers right against themselves", f"{right} of {answers}"
    graded = found["example"]
    yield "GSM8K solutions: labels agreed with", f"{graded['agree']} of {graded['solutions']}"


def refresh(found: Found) -> Iterator[Row]:
    for side, ratio in found["ratios"].items():
        yield f"of the tokens a second of vLLM called directly: {side}", f"{ratio:.2f}"


def smollm2(found: Found) -> Iterator[Row]:
    log, exam = found["log"], found["exam"]
    yield f"mean reward of {log['responses']} logged responses", f"{log['mean_reward']:.3f}"
    yield (
        "logged and recomputed log-probs, largest difference",
        f"{log['verified']['largest_difference']:.1g}",
    )
    yield "fitted with", ", ".join(f"{name} {value}" for name, value in found["fit"].items())
    for when, one in zip(("before", "after"), exam["policies"], strict=True):
        of = f"accuracy on {one['prompts']} other prompts, {one['samples']} samples"
        yield f"{of}: {when}", _interval(one["accuracy"])
    for one in exam["differences"]:
        if one["measure"] == "accuracy":
            yield "paired difference", _interval(one)


def _interval(found: Found) -> str:
    return f"{found['value']:.3f} ({found['low']:.3f} to {found['high']:.3f})"


def rows(found: Found) -> Iterator[Row]:
    for way, one in found["ways"].items():
        yield f"{way}: rows a second", f"{one['rows_per_second']:,}"
        spread = f"{one['times_datasets']} ({one['least']} to {one['most']})"
        yield f"{way}: times as fast as datasets in torch format", spread


def scale(found: Found) -> Iterator[Row]:
    small, large = found["rows"]
    says = {
        "first_step_seconds": "seconds to the first step",
        "first_step_cpu_seconds": "CPU seconds to the first step",
        "rows_per_second": "rows a second",
        "peak_mib": "peak memory",
    }
    for name, what in says.items():
        if name in found["ratios"]:
            yield f"{what} at {large:,} rows, of those at {small:,}", f"{found['ratios'][name]:.2f}"
    waits = [one[str(large)].get("share_of_time_waited_for_data") for one in found["rounds"]]
    if None not in waits:
        yield f"share of time that steps wait for data at {large:,} rows", f"{max(waits):.4f}"


def anchor(found: Found) -> Iterator[Row]:
    for name, run in found["runs"].items():
        ratio = run["kept_of_anew_cpu_seconds"]
        spread = f"{ratio['median']} ({ratio['least']} to {ratio['most']})"
        yield f"{name}: CPU time of an update, of one with a reference forward", spread


PARTS: dict[str, Callable[[Found], Iterator[Row]]] = {
    "ingest": ingest,
    "collect": collect,
    "rows": rows,
    "scale": scale,
    "fit_step": fit_step,
    "fit_step_gpu": fit_step_gpu,
    "anchor": anchor,
    "loss": loss,
    "ope": ope,
    "math_reward": math_reward,
    "refresh": refresh,
    "smollm2": smollm2,
}
ELSEWHERE = {"smollm2": "examples/smollm2"}
"""Where a script is that is not in this folder."""


TITLES = {"fit_step_gpu": "fit_step.py --gpu"}
NOT_YET = "Not measured yet: this needs a GPU, and none was at hand."


def where(found: Found) -> str:
    """The machine and versions that a file names, in a line."""
    machine = found.get("machine", {})
    if not isinstance(machine, dict):
        machine = {name: value for name, value in found.items() if isinstance(value, str | int)}
    return ", ".join(f"{name} {value}" for name, value in machine.items())


def page() -> str:
    """RESULTS.md as it should be."""
    parts = [HEAD]
    for name, figures in PARTS.items():
        title = f"## `{ELSEWHERE.get(name) or 'benchmarks/' + TITLES.get(name, f'{name}.py')}`"
        path = FOLDER / "results" / f"{name}.json"
        if not path.exists():
            parts += [f"{title}\n\n{NOT_YET}\n"] if name in TITLES else []
            continue
        found = json.loads(path.read_text(encoding="utf-8"))
        lines = [title, "", where(found), "", "| what | measured |", "|---|---|"]
        lines += [f"| {what} | {figure} |" for what, figure in figures(found)]
        parts.append("\n".join(line for number, line in enumerate(lines) if line or lines[number - 1]) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    (FOLDER / "RESULTS.md").write_text(page(), encoding="utf-8")
