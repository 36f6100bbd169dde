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
        yield f"tokens a second {side}, of vLLM called directly", f"{ratio:.2f}"


PARTS: dict[str, Callable[[Found], Iterator[Row]]] = {
    "ingest": ingest,
    "collect": collect,
    "fit_step": fit_step,
    "fit_step_gpu": fit_step_gpu,
    "loss": loss,
    "ope": ope,
    "math_reward": math_reward,
    "refresh": refresh,
}


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
    for name, rows in PARTS.items():
        title = f"## `benchmarks/{TITLES.get(name, f'{name}.py')}`"
        path = FOLDER / "results" / f"{name}.json"
        if name in TITLES and not path.exists():
            parts.append(f"{title}\n\n{NOT_YET}\n")
            continue
        found = json.loads(path.read_text(encoding="utf-8"))
        lines = [title, "", where(found), "", "| what | measured |", "|---|---|"]
        lines += [f"| {what} | {figure} |" for what, figure in rows(found)]
        parts.append("\n".join(line for number, line in enumerate(lines) if line or lines[number - 1]) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    (FOLDER / "RESULTS.md").write_text(page(), encoding="utf-8")
