"""Scores of responses: which of them is the reward, and those of a second file joined by id.

A dataset has one reward. Scores of one name are it; where there are several names, none is, and a rule of the
user's (`--reward NAME`) must choose: all are in `extra` under `scores`. The names are those of all logs that
are read together, so that a reward means the same in every row.
"""

import sqlite3
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import orjson

from data_tools.logs.jsontext import dump

CHOSEN, SEVERAL, DIFFER = "reward_of_score", "several_scores", "scores_differ"


class Level(IntEnum):
    """What a score is about: the response itself, or the trace it is in, alone or with other responses."""

    OWN = 0
    TRACE = 1
    SHARED = 2


@dataclass(frozen=True, slots=True)
class Score:
    """A judgement by its name. `value`: a number, or a label or anything else, which is never a reward.

    `of` is the id of the response, trace or span that it judges. Of scores with one `id` the latest counts.
    """

    name: str
    value: Any
    of: str = ""
    id: str | None = None
    at: str = ""
    level: Level = Level.OWN

    @property
    def is_number(self) -> bool:
        """Whether it can be a reward; a boolean can."""
        return isinstance(self.value, bool | int | float)


@dataclass(frozen=True, slots=True)
class Member:
    """A span of a trace. `is_root`: it stands for the whole trace, so its scores are those of the trace."""

    id: str
    trace: str | None = None
    is_response: bool = True
    is_root: bool = False


@dataclass(slots=True)
class Verdict:
    """What the scores of one response make of it."""

    reward: float | None = None
    shown: dict[str, Any] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class ScoreBook:
    """The scores of logs that are read together, by the id of what they judge.

    They lie in a temporary SQLite database on disk, which goes away with the object: look-ups by id are what
    an index is for. Memory is bounded by its cache of 32 MB.
    """

    def __init__(self) -> None:
        self.names: dict[Level, set[str]] = {Level.OWN: set(), Level.TRACE: set()}
        self.holds_any = False
        self._db = sqlite3.connect("")
        weakref.finalize(self, self._db.close)
        self._db.executescript(
            """PRAGMA synchronous = OFF; PRAGMA journal_mode = OFF; PRAGMA cache_size = -32000;
            CREATE TABLE scores (of_ TEXT, name TEXT, value TEXT, id TEXT, at TEXT);
            CREATE TABLE members (id TEXT, trace TEXT, is_response INT, is_root INT);"""
        )

    def name(self, score: Score) -> None:
        """Take note of the name of a score that stands in the record of its response."""
        if score.is_number:
            self.names[Level.OWN].add(score.name)

    def add(self, score: Score) -> None:
        """Keep a score that stands elsewhere than its response."""
        row = (score.of, score.name, dump(score.value), score.id, score.at)
        self._db.execute("INSERT INTO scores VALUES (?, ?, ?, ?, ?)", row)
        self.holds_any = True

    def add_member(self, member: Member) -> None:
        """Keep where a span is, so that scores find their responses."""
        row = (member.id, member.trace, member.is_response, member.is_root)
        self._db.execute("INSERT INTO members VALUES (?, ?, ?, ?)", row)

    def settle(self) -> None:
        """Join scores and members, once all of both are known."""
        self._db.executescript(_JOIN)
        query = f"SELECT DISTINCT min(level, 1), name FROM joined WHERE {_IS_NUMBER}"
        for level, name in self._db.execute(query):
            self.names[Level(level)].add(name)

    def scores_of(self, response: str) -> list[Score]:
        """The kept scores of a response."""
        if not self.holds_any:
            return []
        query = "SELECT name, value, level FROM joined WHERE response = ? ORDER BY level, name, value"
        found = self._db.execute(query, [response])
        return [Score(name, orjson.loads(value), level=Level(level)) for name, value, level in found]

    def is_joined(self, score: Score) -> bool:
        """Whether a kept score found a response."""
        query = "SELECT 1 FROM joined WHERE of_ = ? LIMIT 1"
        return self._db.execute(query, [score.of]).fetchone() is not None

    @property
    def level(self) -> Level:
        """Which scores the reward is among: those of the responses themselves, else those of whole traces."""
        return Level.OWN if self.names[Level.OWN] else Level.TRACE

    @property
    def reward_name(self) -> str | None:
        """The name of the scores that are the reward; None if there is no score, or several names."""
        names = self.names[self.level]
        return next(iter(names)) if len(names) == 1 else None

    def told_names(self) -> str:
        """The names of all scores that are numbers, in words."""
        return ", ".join(sorted(set().union(*self.names.values())))

    def verdict(self, scores: Iterable[Score]) -> Verdict:
        """What the scores of one response make of it."""
        made = Verdict()
        usable: list[Score] = []
        for score in scores:
            _show(made.shown, score)
            if score.is_number:
                usable.append(score)
        chosen = [s for s in usable if s.name == self.reward_name and min(s.level, Level.TRACE) == self.level]
        if not chosen:
            made.notes += [SEVERAL] if usable else []
        elif any(score.level is Level.SHARED for score in chosen):
            made.flags.append("shared_reward")
        elif len({float(score.value) for score in chosen}) > 1:
            made.notes.append(DIFFER)
        else:
            made.reward = chosen[0].value
            made.notes.append(CHOSEN)
        return made


def _show(shown: dict[str, Any], score: Score) -> None:
    """Add a score to those in `extra`: one value by itself, several of one name as a list."""
    if score.name not in shown:
        shown[score.name] = score.value
    elif isinstance(shown[score.name], list):
        shown[score.name].append(score.value)
    elif shown[score.name] != score.value:
        shown[score.name] = [shown[score.name], score.value]


_IS_NUMBER = "json_type(value) IN ('integer', 'real', 'true', 'false')"
_JOIN = """
CREATE TABLE latest AS SELECT of_, name, value FROM scores WHERE id IS NULL
UNION ALL SELECT of_, name, value FROM (
    SELECT *, row_number() OVER (PARTITION BY id ORDER BY at DESC, rowid DESC) AS age FROM scores
    WHERE id IS NOT NULL
) WHERE age = 1;
CREATE TABLE responses AS SELECT DISTINCT id, trace FROM members WHERE is_response;
CREATE INDEX responses_by_id ON responses (id);
CREATE INDEX responses_by_trace ON responses (trace);
CREATE TABLE roots (id TEXT PRIMARY KEY, trace TEXT);
INSERT OR IGNORE INTO roots SELECT id, trace FROM members WHERE is_root AND NOT is_response;
CREATE TABLE traces (trace TEXT PRIMARY KEY, size INT);
INSERT INTO traces SELECT trace, count(*) FROM responses WHERE trace IS NOT NULL GROUP BY trace;
CREATE TABLE joined AS SELECT l.of_, r.id AS response, l.name, l.value, 0 AS level
FROM latest l JOIN responses r ON r.id = l.of_;
CREATE INDEX joined_by_of ON joined (of_);
CREATE TABLE traced AS SELECT l.of_, l.name, l.value, coalesce(r.trace, l.of_) AS trace
FROM latest l LEFT JOIN roots r ON r.id = l.of_
WHERE NOT EXISTS (SELECT 1 FROM responses s WHERE s.id = l.of_);
INSERT INTO joined SELECT l.of_, r.id, l.name, l.value, CASE WHEN t.size = 1 THEN 1 ELSE 2 END
FROM traced l CROSS JOIN traces t ON t.trace = l.trace CROSS JOIN responses r ON r.trace = l.trace;
CREATE INDEX joined_by_response ON joined (response);
"""
"""CROSS JOIN is how SQLite is told the order of a join: each score looks its trace up by an index."""
