"""What the demo says: facts of the dataset, rows of a query, the table of results and where to look."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from offline_rec.sampling.evaluate import compare, summarise

if TYPE_CHECKING:
    import pyarrow as pa

    from offline_rec.demo.forecast import Forecast


def facts(stats: Mapping[str, Any]) -> Iterator[str]:
    """Some of the facts of `rec stats`, a line each."""
    groups, rewards = stats["groups"], stats["rewards"]
    yield f"{stats['rows']} responses in {groups['count']} groups, {stats['bytes']['rollouts']:,} bytes"
    equal = f"all rewards equal in {groups['zero_variance_share']:.0%} of groups"
    yield f"mean reward {rewards['mean']:.3f}; {equal}"
    yield f"log-probs on {stats['logprobs']['logprobs_share']:.0%} of responses"


def rows(table: "pa.Table") -> Iterator[str]:
    """A small result, aligned."""
    cells = [[_cell(value) for value in row.values()] for row in table.to_pylist()]
    return aligned([table.column_names, *cells])


def results(
    samples: Mapping[str, "pa.Table"],
    foretold: Mapping[str, "Forecast"],
    *,
    seed: int,
    seconds: Mapping[str, float],
    paths: Mapping[str, str],
) -> dict[str, Any]:
    """The content of results.json; the first of `samples` are those of the base policy.

    `accuracy` has a 95 % interval `low` to `high`; `gain` is the paired difference to the base, with its own.
    `ope` is what the log foretold, with what was `sampled` on the same held-out prompts.
    """
    base_name, *others = samples
    base = samples[base_name]
    return {
        "seed": seed,
        "base": _accuracy(base),
        "algorithms": {
            name: _accuracy(samples[name])
            | {"gain": asdict(compare(base, samples[name])), "ope": foretold[name].facts()}
            for name in others
        },
        "seconds": dict(seconds),
        "paths": dict(paths),
    }


def _accuracy(table: "pa.Table") -> dict[str, Any]:
    accuracy = summarise(table).accuracy
    return {"accuracy": accuracy.value, "low": accuracy.low, "high": accuracy.high}


def conclusion(results: Mapping[str, Any]) -> Iterator[str]:
    """The table of results, and the paths to look at."""
    table = [["policy", "accuracy", "95 % interval", "against base"]]
    for name, row in {"base": results["base"], **results["algorithms"]}.items():
        interval = f"{row['low']:.3f} to {row['high']:.3f}"
        table.append([name, f"{row['accuracy']:.3f}", interval, _points(row.get("gain"))])
    yield ""
    yield from aligned(table)
    yield "accuracy: the share of right answers; against base: the paired difference with its 95 % interval"
    yield ""
    yield from aligned(list(_foretold(results["algorithms"])))
    yield "foretold: accuracy on held-out prompts, told from the log alone; sampled: on the same prompts"
    yield ""
    yield from aligned([[name, path] for name, path in results["paths"].items()])
    yield f"\n{results['seconds']['total']:.0f} seconds in all"


def _foretold(algorithms: Mapping[str, Any]) -> Iterator[list[str]]:
    """The table of what the log foretold, beside what was sampled."""
    yield ["policy", "foretold", "95 % interval", "sampled", "95 % interval", "verdict"]
    for name, row in algorithms.items():
        ope, sampled = row["ope"], row["ope"]["sampled"]
        told = [f"{ope['value']:.3f}", f"{ope['low']:.3f} to {ope['high']:.3f}"]
        seen = [f"{sampled['value']:.3f}", f"{sampled['low']:.3f} to {sampled['high']:.3f}"]
        yield [name, *(told if ope["agrees"] is not None else ["-", "-"]), *seen, ope["verdict"]]


def _points(gain: Mapping[str, float] | None) -> str:
    if gain is None:
        return ""
    value, low, high = (100 * gain[key] for key in ("value", "low", "high"))
    return f"{value:+.1f} points ({low:+.1f} to {high:+.1f})"


def aligned(table: Sequence[Sequence[str]]) -> Iterator[str]:
    """Cells in columns, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _cell(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
