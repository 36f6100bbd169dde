"""The log that a refresh commits: its samples in the order of the prompts, judged part by part.

One that was cut off goes on behind its last whole part: a slow judge is not asked again.
"""

import hashlib
import os
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import orjson
import pyarrow as pa

from offline_rec.rewards import Reward
from offline_rec.sampling.journal import Journal
from offline_rec.sampling.sampled_rows import Task, append_jsonl, rows_of
from offline_rec.sampling.sampler import Sample, SamplingParams

JUDGED_TOGETHER = 64
"""Prompts whose samples are judged in one call: what a kill loses at most, and what is held in memory."""

JUDGE_FILE = "judge.txt"


class JudgedLog:
    """The judged samples of a journal; `rewards` and `tokens` are known once it is written."""

    def __init__(self, journal: Journal, params: SamplingParams, reward: Reward | None) -> None:
        self.journal = journal
        self.params = params
        self.reward = reward
        facts = journal.plan["facts"]
        self.policy, self.version, self.n = str(facts["policy"]), int(facts["version"]), int(facts["n"])
        self.path = journal.folder / f"{quote(self.policy, safe='')}-{self.version}.jsonl"
        self.rewards: list[float | None] = []
        self.tokens = 0

    def write(self, told: Callable[[int], None]) -> Path:
        """Judge what is not judged yet; `told` is called with the number of prompts that are."""
        total = len(self.journal.task.prompts)
        self._go_on()
        with self.path.open("ab") as file:
            for first in range(len(self.rewards) // self.n, total, JUDGED_TOGETHER):
                numbers = range(first, min(first + JUDGED_TOGETHER, total))
                append_jsonl(self._rows(numbers), file)
                file.flush()
                told(numbers[-1] + 1)
        return self.path

    def _go_on(self) -> None:
        """Keep the judged rows of whole prompts, if they were judged by the same reward."""
        judge = hashlib.sha256((self.reward.definition if self.reward else "").encode()).hexdigest()
        by = self.journal.folder / JUDGE_FILE
        if not (by.exists() and by.read_text() == judge):
            self.path.unlink(missing_ok=True)
            by.write_text(judge)
        self.path.touch()
        found: list[tuple[float | None, int]] = []
        whole = size = 0
        with self.path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                row = orjson.loads(line)
                found.append((row.get("reward"), len(row["response_ids"])))
                size += len(line)
                if len(found) % self.n == 0:
                    whole = size
        os.truncate(self.path, whole)
        del found[len(found) // self.n * self.n :]
        self.rewards = [reward for reward, _ in found]
        self.tokens = sum(tokens for _, tokens in found)

    def _rows(self, numbers: range) -> pa.Table:
        """Rows of some prompts, judged."""
        whole = self.journal.task
        part = slice(numbers[0], numbers[-1] + 1)
        task = Task(whole.prompts[part], {name: values[part] for name, values in whole.columns.items()})
        drawn = [self.journal.samples(number) for number in numbers]
        rows = rows_of(
            drawn,
            task,
            self.params,
            reward=self.reward,
            policy=self.policy,
            policy_version=self.version,
            sampled_at=datetime.fromisoformat(self.journal.plan["sampled_at"]),
        )
        self.rewards += rows["reward"].to_pylist()
        self.tokens += sum(len(sample.response_ids) for samples in drawn for sample in samples)
        # As one JSON text, what is known of a prompt keeps its values as they are, whatever their types.
        rows = rows.drop_columns(list(task.columns))
        for name, values in _own_columns(numbers, task, drawn).items():
            rows = rows.append_column(name, pa.array(values, pa.string()))
        return rows


def _own_columns(numbers: range, task: Task, drawn: list[list[Sample]]) -> dict[str, list[str]]:
    """Ids that depend on nothing but the plan, and what is known of each row's prompt."""
    places = [(place, turn) for place, samples in enumerate(drawn) for turn, _ in enumerate(samples)]
    known: list[dict[str, Any]] = [
        {name: values[place] for name, values in task.columns.items()} for place, _ in places
    ]
    return {
        "group_id": [str(numbers[place]) for place, _ in places],
        "response_id": [f"{numbers[place]}.{turn}" for place, turn in places],
        "extra": [orjson.dumps(facts).decode() for facts in known],
    }
