"""What the paper found, each with a criterion that was written down before any result was there.

A criterion is asked of every seed of every place (a task in a regime) that has the runs for it. Where all
seeds say yes it held there, where all say no it did not, and otherwise, or with one seed alone, it cannot be
told. Rewards are means over 500 prompts, four samples each, between 0 and 1.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from benchmarks.paper.found import Found, Place, Run

SAME = 0.05
"""Two rewards no farther apart than this are about the same."""
LITTLE = 0.02
"""A difference that is more than the noise of the samples, whose standard error is about 0.01."""
COLLAPSED = 0.5
"""A policy that earns less than this share of the base's reward has collapsed."""

Word = Literal["held", "not held", "cannot be told"]
Answer = tuple[bool, Sequence[float]]
"""Whether the criterion is met by one seed, and the rewards it was told from."""
Ask = Callable[[Found, Place], Mapping[int, Answer]]

OFF_POLICY = ("interval-20", "lag-10", "offline")
SAMPLED = ("interval-20", "lag-10")
EVERY = ("on-policy", *OFF_POLICY)
TWO_RATES = ("interval-20", "offline")


@dataclass(frozen=True)
class Finding:
    """What is claimed, when a seed meets it, where that is asked, and what the measured numbers are."""

    code: str
    claim: str
    criterion: str
    numbers: str
    regimes: tuple[str, ...]
    ask: Ask


@dataclass(frozen=True)
class Told:
    """What a place says of a finding: the mean over seeds of each of its numbers."""

    finding: Finding
    place: Place
    word: Word
    numbers: Sequence[float]
    seeds: int
    met: int


def told(results: Found) -> Iterator[Told]:
    """What every place says of every finding; places without the runs say nothing."""
    for finding in FINDINGS:
        for task in results.tasks:
            for regime in finding.regimes:
                place = results.place(task, regime)
                answers = finding.ask(results, place)
                if answers:
                    yield _told(finding, place, list(answers.values()))


def _told(finding: Finding, place: Place, answers: Sequence[Answer]) -> Told:
    met = sum(yes for yes, _ in answers)
    word: Word = "cannot be told"
    if len(answers) > 1 and met in (0, len(answers)):
        word = "held" if met else "not held"
    numbers = [fmean(values) for values in zip(*(values for _, values in answers), strict=True)]
    return Told(finding, place, word, numbers, len(answers), met)


def overall(places: Sequence[Told]) -> str:
    """One finding in all places: held, not held, held in some, or cannot be told."""
    held, failed = (sum(one.word == word for one in places) for word in ("held", "not held"))
    if not held + failed:
        return "cannot be told"
    if not held or not failed:
        return "held" if held else "not held"
    return "held in part"


def _paired(*runs: Mapping[int, Run]) -> Iterator[tuple[int, tuple[Run, ...]]]:
    """Runs of the seeds that all have."""
    for seed in sorted(set.intersection(*(set(one) for one in runs))):
        yield seed, tuple(one[seed] for one in runs)


def same_end(first: str, second: str) -> Ask:
    def ask(results: Found, place: Place) -> dict[int, Answer]:
        pairs = _paired(place.of(first), place.of(second))
        return {seed: (abs(a.end - b.end) <= SAME, (a.end, b.end)) for seed, (a, b) in pairs}

    return ask


def collapses(results: Found, place: Place) -> dict[int, Answer]:
    runs = place.of("reinforce", place.rate("oneside-nois"))
    return {seed: (run.end < COLLAPSED * run.base, (run.base, run.end)) for seed, run in runs.items()}


def keeps(algorithm: str) -> Ask:
    def ask(results: Found, place: Place) -> dict[int, Answer]:
        runs = place.of(algorithm)
        return {seed: (run.end >= run.base - LITTLE, (run.base, run.end)) for seed, run in runs.items()}

    return ask


def wide_is_faster(results: Found, place: Place) -> dict[int, Answer]:
    pairs = _paired(place.of("oneside-nois-wide"), place.of("oneside-nois"))
    return {
        seed: (wide.path >= narrow.path + LITTLE / 2, (wide.path, narrow.path))
        for seed, (wide, narrow) in pairs
    }


def wide_is_stable(results: Found, place: Place) -> dict[int, Answer]:
    pairs = _paired(place.of("oneside-nois-wide"), place.of("oneside-nois"))
    return {
        seed: (
            wide.end >= max(wide.best - SAME, narrow.end - LITTLE),
            (wide.best, wide.end, narrow.end),
        )
        for seed, (wide, narrow) in pairs
    }


def wide_trades(results: Found, place: Place) -> dict[int, Answer]:
    rate = place.rate("oneside-nois")
    pairs = _paired(place.of("oneside-nois-wide", rate), place.of("oneside-nois"))
    return {
        seed: (
            wide.at(0.25) > narrow.at(0.25) and wide.end < wide.best - SAME,
            (wide.at(0.25), narrow.at(0.25), wide.best, wide.end),
        )
        for seed, (wide, narrow) in pairs
    }


def width_is_not_rate(results: Found, place: Place) -> dict[int, Answer]:
    rates = sorted(place.runs.get("oneside-nois", {}))
    if len(rates) < 2:
        return {}
    pairs = _paired(place.of("oneside-nois-wide", rates[0]), place.of("oneside-nois", rates[-1]))
    return {seed: (wide.path > narrow.path, (wide.path, narrow.path)) for seed, (wide, narrow) in pairs}


def works(algorithm: str) -> Ask:
    def ask(results: Found, place: Place) -> dict[int, Answer]:
        pairs = _paired(place.of(algorithm), place.of("grpo"))
        return {
            seed: (own.gain >= LITTLE and own.end >= grpo.end - LITTLE, (own.base, own.end, grpo.end))
            for seed, (own, grpo) in pairs
        }

    return ask


def regularises(algorithm: str) -> Ask:
    def ask(results: Found, place: Place) -> dict[int, Answer]:
        pairs = _paired(place.of(algorithm), place.of("reinforce", place.rate(algorithm)))
        return {
            seed: (
                own.end >= own.base - LITTLE and own.end >= bare.end + 2 * SAME,
                (own.base, own.end, bare.end),
            )
            for seed, (own, bare) in pairs
        }

    return ask


def behind(algorithm: str, other: str) -> Ask:
    def ask(results: Found, place: Place) -> dict[int, Answer]:
        pairs = _paired(place.of(algorithm), place.of(other))
        return {seed: (a.end < b.end - LITTLE, (a.end, b.end)) for seed, (a, b) in pairs}

    return ask


REGULARISED = ("grpo", "oneside-nois", "oneside-nois-wide", "asymre", "red-weight")


def offline_is_harder(results: Found, place: Place) -> dict[int, Answer]:
    other = results.place(place.task, "interval-20")
    both = [name for name in REGULARISED if place.of(name) and other.of(name)]
    if not both:
        return {}
    pairs = _paired(*(where.of(name) for where in (place, other) for name in both))
    gains = {seed: [run.gain for run in runs] for seed, runs in pairs}
    means = {seed: (fmean(g[: len(both)]), fmean(g[len(both) :])) for seed, g in gains.items()}
    return {seed: (offline < interval, (offline, interval)) for seed, (offline, interval) in means.items()}


def collapses_on_policy(results: Found, place: Place) -> dict[int, Answer]:
    runs = place.of("reinforce")
    return {seed: (run.end < COLLAPSED * run.base, (run.base, run.end)) for seed, run in runs.items()}


PAPER = (
    *("grpo", "oneside-is", "oneside-nois", "oneside-is-wide", "oneside-nois-wide", "twoside-nois"),
    *("ring-nois", "opmd", "asymre", "red-drop", "red-weight"),
)


def beats_raft(results: Found, place: Place) -> dict[int, Answer]:
    raft = place.of("raft")
    ends = {name: fmean(run.end for run in place.of(name).values()) for name in PAPER if place.of(name)}
    if not raft or not ends:
        return {}
    pairs = _paired(place.of(max(ends, key=lambda name: ends[name])), raft)
    return {seed: (own.end >= other.end + LITTLE, (own.end, other.end)) for seed, (own, other) in pairs}


def both_beat_either(results: Found, place: Place) -> dict[int, Answer]:
    pairs = _paired(place.of("both"), place.of("oneside-nois-wide"), place.of("red-weight"))
    return {
        seed: (both.end >= max(mask.end, weight.end) + LITTLE / 2, (both.end, mask.end, weight.end))
        for seed, (both, mask, weight) in pairs
    }


FINDINGS = (
    Finding(
        "1a",
        "Importance weights are not essential: REC-OneSide-IS does as REC-OneSide-NoIS.",
        f"the ends differ by at most {SAME}",
        "IS, NoIS",
        OFF_POLICY,
        same_end("oneside-is", "oneside-nois"),
    ),
    Finding(
        "1b",
        "GRPO does as REC-OneSide-NoIS.",
        f"the ends differ by at most {SAME}",
        "GRPO, NoIS",
        OFF_POLICY,
        same_end("grpo", "oneside-nois"),
    ),
    Finding(
        "1c",
        "On-policy REC-OneSide-NoIS is REINFORCE, as all ratios are 1.",
        f"the ends differ by at most {SAME}",
        "NoIS, REINFORCE",
        ("on-policy",),
        same_end("oneside-nois", "reinforce"),
    ),
    Finding(
        "2a",
        "REINFORCE without a clip collapses off-policy.",
        f"at the better rate of REC-OneSide-NoIS it ends below {COLLAPSED} of the base",
        "base, end",
        OFF_POLICY,
        collapses,
    ),
    Finding(
        "2b",
        "The clip is what stabilises: REC-OneSide-NoIS 0.2/0.2 does not collapse.",
        f"it ends no more than {LITTLE} below the base",
        "base, end",
        OFF_POLICY,
        keeps("oneside-nois"),
    ),
    Finding(
        "3a",
        "A much wider clip (0.6/2.0) is faster where sampling goes on.",
        f"its mean reward on the way is higher by {LITTLE / 2} or more",
        "wide, narrow",
        SAMPLED,
        wide_is_faster,
    ),
    Finding(
        "3b",
        "And it is no less stable there.",
        f"it ends within {SAME} of its best, and no more than {LITTLE} below the narrow one",
        "best, end, end of narrow",
        SAMPLED,
        wide_is_stable,
    ),
    Finding(
        "3c",
        "Offline it trades stability for speed.",
        f"at the narrow one's better rate: ahead after a quarter, then ends more than {SAME} below its best",
        "wide and narrow after a quarter, best and end of wide",
        ("offline",),
        wide_trades,
    ),
    Finding(
        "3d",
        "A wider clip is not a larger learning rate.",
        "the wide one at 3e-4 has a higher mean reward on the way than the narrow one at 1e-3",
        "wide, narrow",
        TWO_RATES,
        width_is_not_rate,
    ),
    Finding(
        "4a",
        "RED-Drop works on- and off-policy, no worse than GRPO.",
        f"it gains {LITTLE} or more and ends no more than {LITTLE} below GRPO",
        "base, end, GRPO",
        EVERY,
        works("red-drop"),
    ),
    Finding(
        "4b",
        "RED-Weight works on- and off-policy, no worse than GRPO.",
        f"it gains {LITTLE} or more and ends no more than {LITTLE} below GRPO",
        "base, end, GRPO",
        EVERY,
        works("red-weight"),
    ),
    Finding(
        "5a",
        "OPMD is a regularised REINFORCE.",
        f"it ends no more than {LITTLE} below the base, and {2 * SAME} above REINFORCE at the same rate",
        "base, end, REINFORCE",
        TWO_RATES,
        regularises("opmd"),
    ),
    Finding(
        "5b",
        "AsymRE is a regularised REINFORCE.",
        f"it ends no more than {LITTLE} below the base, and {2 * SAME} above REINFORCE at the same rate",
        "base, end, REINFORCE",
        OFF_POLICY,
        regularises("asymre"),
    ),
    Finding(
        "5c",
        "OPMD is behind the wide clip (readings of the paper differ).",
        f"it ends more than {LITTLE} below",
        "OPMD, wide clip",
        TWO_RATES,
        behind("opmd", "oneside-nois-wide"),
    ),
    Finding(
        "6",
        "Offline is the hard case.",
        f"the mean gain of {', '.join(REGULARISED)} is smaller than with the interval of 20",
        "gain offline, gain with interval",
        ("offline",),
        offline_is_harder,
    ),
    Finding(
        "7",
        "REINFORCE collapses even on-policy (doubtful in the sources).",
        f"it ends below {COLLAPSED} of the base",
        "base, end",
        ("on-policy",),
        collapses_on_policy,
    ),
    Finding(
        "8",
        "Not of the paper: the best of its algorithms is ahead of RAFT, which imitates the right ones.",
        f"it ends {LITTLE} or more above",
        "best, RAFT",
        EVERY,
        beats_raft,
    ),
    Finding(
        "9",
        "Not of the paper: mask and weight together beat either alone.",
        f"together they end {LITTLE / 2} or more above the better one",
        "both, wide clip, RED-Weight",
        TWO_RATES,
        both_beat_either,
    ),
)
