"""`diff`: two selections of logged responses, compared by number, by mix and by prompt."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from data_tools.drift.mixes import LISTED, Mix, PromptMix, mix, prompt_mix
from data_tools.drift.numbers import FEWEST_PROMPTS, Number, number
from data_tools.drift.rows import MEASURES, MIXES, both
from data_tools.drift.sides import Side, side
from data_tools.store.guard import check_expression

if TYPE_CHECKING:
    import duckdb

CHARACTERS = 60
"""Of a prompt that stands as an example."""


@dataclass(frozen=True)
class DriftReport:
    """How the second selection differs from the first; every difference is second minus first."""

    first: str
    second: str
    where: str | None
    rows_first: int
    rows_second: int
    numbers: list[Number]
    mixes: list[Mix]
    prompts: PromptMix
    notes: list[str]

    def facts(self) -> dict[str, Any]:
        """Plain values, as JSON knows them."""
        return asdict(self)

    def table(self) -> list[dict[str, Any]]:
        """A record for each number, as it is shown."""
        return [
            {
                "measure": one.name,
                "first": one.first,
                "second": one.second,
                "difference": one.difference,
                "95 % interval": _interval(one.low, one.high),
                "Hedges' g": one.hedges_g,
                "Cliff's delta": one.cliffs_delta,
                "on the same prompts": one.same_prompts_difference,
                "its interval": _interval(one.same_prompts_low, one.same_prompts_high),
            }
            for one in self.numbers
        ]

    def mix_table(self) -> list[dict[str, Any]]:
        """A record for each mix, as it is shown."""
        distances = [(one.name, one.distance) for one in self.mixes] + [("prompt", self.prompts.distance)]
        return [
            {
                "mix": name,
                "total variation": one.total_variation,
                "by chance": one.total_variation_by_chance,
                "Jensen-Shannon, bits": one.jensen_shannon,
                "by chance, bits": one.jensen_shannon_by_chance,
            }
            for name, one in distances
        ]

    def lines(self) -> Iterator[str]:
        """What stands around the tables."""
        yield f"{self.rows_second:,} rows of {self.second} against {self.rows_first:,} rows of {self.first}"
        prompts = self.prompts
        yield f"prompts: {prompts.both:,} on both sides, {prompts.only_first:,} only on the first, " + (
            f"{prompts.only_second:,} only on the second"
        )
        for label, examples in (("first", prompts.examples_first), ("second", prompts.examples_second)):
            yield from (f"prompt only on the {label}: {example}" for example in examples)
        for one in self.mixes:
            for label, n, names in (
                ("first", one.n_only_first, one.only_first),
                ("second", one.n_only_second, one.only_second),
            ):
                if n:
                    more = f", and {n - LISTED:,} more" if n > LISTED else ""
                    yield f"{one.name} only on the {label}: {', '.join(names)}{more}"
        yield from (f"note: {note}" for note in self.notes)


def diff(first: str, second: str, *, where: str | None = None) -> DriftReport:
    """Compare what `DATASET` or `DATASET@SELECTION` (sides.py) names, on the rows that fulfil `where`.

    Raises ConfigError for a selection or condition that is none, DataError for a dataset that is not there
    or a side without rows.
    """
    if where is not None:
        check_expression(where, "--where", subqueries=True)
    sides = side(first), side(second)
    with both(*sides, where) as con:
        [(rows1, rows2)] = con.sql(
            "SELECT count(*) FILTER (NOT second), count(*) FILTER (second) FROM sides"
        ).fetchall()
        prompts = _with_texts(prompt_mix(con), sides)
        return DriftReport(
            first=first,
            second=second,
            where=where,
            rows_first=rows1,
            rows_second=rows2,
            numbers=[one for one in (number(con, name) for name in MEASURES) if one is not None],
            mixes=[each for each in (mix(con, name) for name in MIXES) if each is not None],
            prompts=prompts,
            notes=_notes(con),
        )


def _notes(con: "duckdb.DuckDBPyConnection") -> list[str]:
    query = (
        "SELECT list_sort(list(DISTINCT logprob_kind)) FROM sides WHERE logprob IS NOT NULL GROUP BY second"
    )
    kinds = [tuple(found) for (found,) in con.sql(query).fetchall()]
    notes = []
    if len(set(kinds)) > 1 or any(len(found) > 1 for found in kinds):
        notes.append(
            "log-probs are of several kinds (logprob_kind): their difference may be of the kind alone"
        )
    few = con.sql(
        "SELECT count(*) FROM (SELECT DISTINCT second, prompt FROM sides) GROUP BY second"
    ).fetchall()
    if min(n for (n,) in few) < FEWEST_PROMPTS:
        notes.append(f"a side has fewer than {FEWEST_PROMPTS} prompts: no interval")
    return notes


def _with_texts(prompts: PromptMix, sides: tuple[Side, Side]) -> PromptMix:
    """The same with the beginnings of example prompts in place of their hashes."""
    hashes = (prompts.examples_first, prompts.examples_second)
    texts = [_texts(one, names) for one, names in zip(sides, hashes, strict=True)]
    return PromptMix(**vars(prompts) | {"examples_first": texts[0], "examples_second": texts[1]})


def _texts(one: Side, hashes: list[str]) -> list[str]:
    if not hashes:
        return []
    query = f"""SELECT left(coalesce(any_value(prompt), prompt_hash), {CHARACTERS}) AS text FROM rollouts
        WHERE prompt_hash IN (SELECT unnest($hashes)) GROUP BY prompt_hash ORDER BY prompt_hash"""
    return [str(text) for text in one.dataset.sql(query, {"hashes": hashes})["text"].to_pylist()]


def _interval(low: float | None, high: float | None) -> str | None:
    return None if low is None or high is None else f"{low:.4g} to {high:.4g}"
