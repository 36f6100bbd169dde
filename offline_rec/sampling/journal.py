"""What a refresh has sampled so far, on the local disk: a kill loses at most what was being computed.

The folder holds `plan.json` (what is sampled, and how), `prompts.jsonl`, and `samples.jsonl` with a line for
each finished prompt. Nothing in it is part of the dataset.
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from data_tools.errors import ConfigError, DataError
from offline_rec.sampling.sampled_rows import Task
from offline_rec.sampling.sampler import Prompt, Sample

PLAN_FILE, PROMPTS_FILE, SAMPLES_FILE = "plan.json", "prompts.jsonl", "samples.jsonl"
WEIGHTS = ("*.safetensors", "config.json", "adapter_config.json", "generation_config.json", "tokenizer*.json")


class Journal:
    """The journal in a folder; `done` says at which byte the line of each finished prompt begins."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plan: dict[str, Any] = _read_json(folder / PLAN_FILE)
        self.task = read_task(folder / PROMPTS_FILE)
        self.done: dict[int, int] = {}
        self._file: BinaryIO | None = None

    @classmethod
    def begin(cls, folder: Path, plan: dict[str, Any], task: Task) -> "Journal":
        """Start one; the plan is written last, as the sign that the rest is whole."""
        for path in folder.iterdir():
            path.unlink()
        write_task(task, folder / PROMPTS_FILE)
        staged = folder / f"{PLAN_FILE}.tmp"
        with staged.open("wb") as file:
            file.write(orjson.dumps(plan, option=orjson.OPT_INDENT_2))
            _sync(file)
        os.replace(staged, folder / PLAN_FILE)
        return cls(folder)

    def __enter__(self) -> "Journal":
        """Read what is there, and forget a line that was written in part."""
        path = self.folder / SAMPLES_FILE
        path.touch()
        whole = 0
        with path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self.done[_number(line)] = whole
                whole += len(line)
        os.truncate(path, whole)
        self._file = path.open("ab")
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, found: Iterable[tuple[int, Sequence[Sample]]]) -> None:
        """Keep the samples of finished prompts."""
        assert self._file is not None
        for number, samples in found:
            self.done[number] = self._file.tell()
            self._file.write(_line(number, samples))
        self._file.flush()

    def samples(self, number: int) -> list[Sample]:
        """The samples of one finished prompt."""
        with (self.folder / SAMPLES_FILE).open("rb") as file:
            file.seek(self.done[number])
            record = orjson.loads(file.readline())
        return [Sample(**sample) for sample in record["samples"]]

    def missing(self, numbers: Iterable[int]) -> list[int]:
        """Those of the prompts that are not finished."""
        return [number for number in numbers if number not in self.done]

    def remove(self) -> None:
        """Take the journal away, the plan first: what is left of it by a kill is none any more."""
        self.__exit__()
        (self.folder / PLAN_FILE).unlink()
        shutil.rmtree(self.folder)
        with contextlib.suppress(OSError):  # another policy has a journal there
            self.folder.parent.rmdir()


def is_unfinished(folder: Path) -> bool:
    """Whether a refresh that was begun in the folder has not ended."""
    return (folder / PLAN_FILE).exists()


def check_begun(folder: Path, policy: str, *, resume: bool) -> None:
    """Raise ConfigError where there is nothing to resume, or something that another refresh has begun."""
    if resume and not is_unfinished(folder):
        raise ConfigError(f"there is no unfinished refresh of {policy}", "leave --resume out to begin one")
    if is_unfinished(folder) and not resume:
        raise ConfigError(
            f"a refresh of {policy} is unfinished in {folder}",
            f"go on with it by --resume, or give it up with: rm -r {folder}",
        )


def check_plan(stored: dict[str, Any], asked: dict[str, Any], folder: Path) -> None:
    """Raise ConfigError naming what is asked for now and differs from what the refresh began with."""
    changed = [
        f"{key}: {stored.get(key)!r} -> {asked[key]!r}" for key in asked if stored.get(key) != asked[key]
    ]
    if changed:
        raise ConfigError(
            f"another refresh was begun in {folder}: {'; '.join(changed)}",
            f"resume with its own settings, or give it up with: rm -r {folder}",
        )


def content_digest(model: str | Path) -> str:
    """32 hex digits over weights, configuration and tokenizer of a model directory; '' for any other name."""
    folder, digest = Path(model), hashlib.blake2b(digest_size=16)
    files = sorted({path for pattern in WEIGHTS for path in folder.glob(pattern)})
    for path in files:
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    return digest.hexdigest() if files else ""


def task_digest(task: Task) -> str:
    """32 hex digits over the prompts and what is known of each."""
    digest = hashlib.blake2b(digest_size=16)
    for number, prompt in enumerate(task.prompts):
        digest.update(orjson.dumps(_facts(task, number, prompt)))
    return digest.hexdigest()


def _facts(task: Task, number: int, prompt: str | Prompt) -> dict[str, Any]:
    given = prompt if isinstance(prompt, Prompt) else Prompt(prompt)
    known = {name: values[number] for name, values in task.columns.items()}
    return {"text": given.text, "tools": given.tools, "ids": _listed(given.ids), "columns": known}


def _line(number: int, samples: Sequence[Sample]) -> bytes:
    plain = [
        {
            "prompt_ids": _listed(sample.prompt_ids),
            "response_ids": _listed(sample.response_ids),
            "logprobs": [float(value) for value in sample.logprobs],
            "finish_reason": sample.finish_reason,
            "text": sample.text,
        }
        for sample in samples
    ]
    return orjson.dumps({"prompt": number, "samples": plain}, option=orjson.OPT_APPEND_NEWLINE)


def _number(line: bytes) -> int:
    """The prompt of a line, whose samples need not be parsed for it."""
    return int(line[len(b'{"prompt":') : line.index(b",")])


def _listed(ids: Sequence[int] | None) -> list[int] | None:
    return None if ids is None else [int(i) for i in ids]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}", f"remove {path.parent}") from error
    return found


def write_task(task: Task, path: Path) -> None:
    """Write prompts with what is known of each, a line a prompt, flushed to disk."""
    with path.open("wb") as file:
        for number, prompt in enumerate(task.prompts):
            file.write(orjson.dumps(_facts(task, number, prompt), option=orjson.OPT_APPEND_NEWLINE))
        _sync(file)


def read_task(path: Path) -> Task:
    """What `write_task` wrote."""
    lines = [orjson.loads(line) for line in _lines(path)]
    names = list(lines[0]["columns"]) if lines else []
    return Task(
        [Prompt(line["text"], line["tools"], line["ids"]) for line in lines],
        {name: [line["columns"][name] for line in lines] for name in names},
    )


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from file


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
