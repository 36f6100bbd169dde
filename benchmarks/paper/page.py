"""The generated part of docs/paper.md: what was run, which findings held, and all rewards."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from statistics import fmean

from benchmarks.paper.findings import FINDINGS, Told, overall, told
from benchmarks.paper.found import Found, Place, Run
from benchmarks.paper.plan import ALGORITHMS, LEFT_OUT, REGIMES, cells
from benchmarks.paper.tasks import TASKS

FIRST = 4
"""Algorithms that the table of the best ones names."""


def page(results: Found, *, figures: str) -> str:
    """Markdown, `figures` being where the figures are, seen from the page."""
    return "\n".join(_lines(results, figures))


def _lines(results: Found, figures: str) -> Iterator[str]:
    yield from _what(results)
    yield from _findings(list(told(results)))
    yield from _best(results)
    for task in results.tasks:
        yield from _task(results, task, figures)
    yield ""


def _what(results: Found) -> Iterator[str]:
    facts = results.facts
    done, effort, size = facts["runs"], facts["effort"], facts["size"]
    spent = sum(run["cpu_seconds"] for run in done.values()) / 3600
    yield f"{len(done)} of {facts['planned']} runs are in, {spent:.1f} hours of a core."
    lacking = Counter(f"{cell.task}, {cell.regime}" for cell in cells() if cell.name not in done)
    if lacking:
        listed = "; ".join(f"{place}: {count}" for place, count in lacking.items())
        yield f"**Not run yet, so that what is said of these is not final: {listed}.**"
    yield ""
    yield (
        f"Each run is {effort['updates']} updates on {effort['groups']} prompts of {effort['responses']}"
        f" responses at a constant learning rate; the log of the offline regime has {size['log_prompts']}"
        f" prompts. Policies are judged on {size['evaluation_prompts']} prompts that nothing else has,"
        f" {size['judged']} samples each at temperature 1."
    )
    yield ""
    yield " ".join(LEFT_OUT.split())
    yield ""
    yield from _table(
        ("task", "seed", "parameters", "right", "mean reward of the base"),
        (
            (
                name,
                seed,
                f"{world['parameters']:,}",
                f"{world['judged']['right']:.3f}",
                f"{world['judged']['reward']:.3f}",
            )
            for key, world in facts["worlds"].items()
            for name, seed in [key.split("/")]
        ),
    )


def _findings(places: Sequence[Told]) -> Iterator[str]:
    by_code = {code: list(group) for code, group in groupby(places, key=lambda one: one.finding.code)}
    yield "### Findings"
    yield ""
    yield from _table(
        ("", "claim", "met by a seed if", "held", "not held", "cannot be told", "in all"),
        (
            (
                finding.code,
                finding.claim,
                finding.criterion,
                *(str(sum(p.word == word for p in own)) for word in ("held", "not held", "cannot be told")),
                f"**{overall(own)}**",
            )
            for finding in FINDINGS
            for own in [by_code.get(finding.code, [])]
        ),
    )
    yield "Place by place, numbers being means over seeds:"
    yield ""
    yield from _table(
        ("", "place", "measured", "seeds that meet it", ""),
        (
            (
                one.finding.code,
                one.place.name,
                f"{one.finding.numbers}: {', '.join(f'{n:.3f}' for n in one.numbers)}",
                f"{one.met} of {one.seeds}",
                one.word,
            )
            for one in places
        ),
    )


def _best(results: Found) -> Iterator[str]:
    yield "### The best of each place"
    yield ""
    rows = []
    for place in _places(results):
        ends = {name: _mean(place.of(name).values()) for name in ALGORITHMS if place.of(name)}
        first = sorted(ends, key=lambda name: -ends[name])[:FIRST]
        base = fmean(run.base for name in ends for run in place.of(name).values())
        ranked = ", ".join(f"{ALGORITHMS[name].short} {ends[name]:.3f}" for name in first)
        rows.append((place.task, place.regime, f"{base:.3f}", ranked))
    yield from _table(("task", "regime", "base", f"the {FIRST} highest at the end"), rows)


def _places(results: Found) -> Iterator[Place]:
    for task in results.tasks:
        yield from (place for regime in REGIMES if (place := results.place(task, regime)).runs)


def _task(results: Found, task: str, figures: str) -> Iterator[str]:
    places = [place for place in _places(results) if place.task == task]
    columns = [(place, rate) for place in places for rate in _rates(place)]
    yield f"### {task}: {TASKS[task].title}"
    yield ""
    yield f"![Reward over updates, by regime and algorithm]({figures}/{task}.svg)"
    yield ""
    yield "Rewards at the end: mean, lowest to highest seed. Bold is the better rate, which the curves show."
    yield ""
    yield from _table(
        ("algorithm", *(f"{place.regime}, {rate:g}" for place, rate in columns)),
        (
            (contender.title, *(_cell(place, name, rate) for place, rate in columns))
            for name, contender in ALGORITHMS.items()
            if any(place.of(name) for place in places)
        ),
    )


def _rates(place: Place) -> list[float]:
    return sorted({rate for rates in place.runs.values() for rate in rates})


def _cell(place: Place, name: str, rate: float) -> str:
    ends = [run.end for run in place.of(name, rate).values()]
    if not ends:
        return ""
    text = f"{fmean(ends):.3f}"
    if rate == place.rate(name):
        text = f"**{text}**"
    return f"{text} ({min(ends):.3f} to {max(ends):.3f})" if len(ends) > 1 else text


def _mean(runs: Iterator[Run] | Sequence[Run]) -> float:
    return fmean(run.end for run in runs)


def _table(head: Sequence[str], rows: Iterator[Sequence[str]] | Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""
