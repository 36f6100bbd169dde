"""The reward of mathematics: 1 if a response comes to the same number or expression as the answer.

Of both sides the final answer is taken, and those are compared: plain numbers right here, everything else by
math-verify (extra `math`) in a process that can be killed. On plain numbers both judge alike.
"""

import atexit
import json
import os
import re
import select
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from data_tools.errors import ConfigError, MissingExtra
from data_tools.rewards.reward import Columns, NotJudged, Rule
from data_tools.rewards.text import answer_column, answers_of

SECONDS = 5.0
"""How long one comparison may take, unless told."""

_GRACE = 2.0
_START_SECONDS = 120.0
_WORKER = Path(__file__).with_name("math_worker.py")

_NUMBER = re.compile(r"\$?(-?)([1-9]\d{0,2}(?:,\d{3})+|\d+)(\.\d+)?\s*\.?", re.ASCII)
_BRACES = re.compile(r"\\f?boxed\s*\{|\\[\\{}]|[{}]")
_MARKED = re.compile(r"####[ \t]*(.+)")
_STATED = re.compile(
    r"^[ \t*_#]*(?:(?:a|answer|final answer)[*_]*[ \t]?:|"
    r"(?:so |thus,? |therefore,? )?the (?:final )?answer is:?)[*_ \t]*(\S.*)$",
    re.IGNORECASE | re.MULTILINE,
)


def math(column: str | None = None, seconds: float = SECONDS) -> Rule:
    """1 if the final answer of the response equals that of the answer, as numbers or expressions do.

    `column` (`answers`, else `answer`) holds an answer, a list of right ones, or whole solutions. The final
    answer is the last `\\\\boxed{}`, else what follows the last `####`, else the last line that begins with
    `A:`, `Answer:` or `The answer is`, else what math-verify finds in the text. A response without one gets
    0; an answer without one, or a comparison that takes longer than `seconds`, is not judged.
    Raises MissingExtra without math-verify.
    """
    if seconds <= 0:
        raise ConfigError(f"reward math: seconds must be positive, got {seconds}")
    if find_spec("math_verify") is None:
        raise MissingExtra("math-verify", "math")

    def judge(responses: list[str], columns: Columns) -> Sequence[Any]:
        answers = columns[answer_column(column, columns)]
        return [
            _verdict(response, answers_of(answer), seconds)
            for response, answer in zip(responses, answers, strict=True)
        ]

    return judge


def final_answer(text: str) -> str | None:
    """What a text says that its answer is; None where nothing marks it."""
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed
    marked = _MARKED.findall(text)
    if marked:
        return str(marked[-1]).strip()
    stated = _STATED.findall(text)
    return str(stated[-1]).strip() if stated else None


def _last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{}` whose braces close."""
    last: tuple[int, int] | None = None
    opened: list[int | None] = []
    for match in _BRACES.finditer(text):
        if match[0].endswith("{") and match[0] != "\\{":
            opened.append(match.end() if len(match[0]) > 1 else None)
        elif match[0] == "}" and opened:
            start = opened.pop()
            if start is not None and (last is None or start > last[0]):
                last = start, match.start()
    return None if last is None else text[slice(*last)].strip()


def plain_number(text: str) -> Decimal | None:
    """The value of a plain number, thousands apart by commas or not; None for anything else."""
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        return None
    return Decimal(f"{match[1]}{match[2].replace(',', '')}{match[3] or ''}")


def _verdict(response: str, answers: list[Any], seconds: float) -> Any:
    """1 if one of the answers is right; without that, the first failure of a comparison."""
    if not answers:
        return None
    failed: NotJudged | None = None
    for answer in map(str, answers):
        try:
            if _equal(answer, response, seconds):
                return 1.0
        except NotJudged as error:
            failed = failed or error
    return failed or 0.0


def _equal(answer: str, response: str, seconds: float) -> bool:
    wanted, given = final_answer(answer) or answer, final_answer(response)
    numbers = plain_number(wanted), plain_number(given or response)
    if None not in numbers:
        if numbers[0] == numbers[1]:
            return True
        if all(number == number.to_integral_value() for number in numbers if number is not None):
            return False
    return _worker.equal(_as_latex(wanted), _as_latex(response if given is None else given), seconds)


def _as_latex(answer: str) -> str:
    """An answer so that math-verify takes all of it as one expression, unless it is in words or marked."""
    answer = answer.rstrip(" .")
    in_words = re.search(r"[^\W\d_]{3}|\n", re.sub(r"\\[A-Za-z]+", "", answer))
    return answer if in_words or "$" in answer.replace("\\$", "") else f"\\boxed{{{answer}}}"


class _Worker:
    """The process that compares, started when first needed and again after it was killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._answered = False
        self._others: list[subprocess.Popen[bytes]] = []

    def equal(self, answer: str, response: str, seconds: float) -> bool:
        """Whether the two are equal; NotJudged, with the reason, where that cannot be said."""
        with self._lock:
            process = self._running()
            try:
                line = self._ask(process, json.dumps([seconds, answer, response]), seconds)
            except OSError as error:
                self.end()
                raise NotJudged(f"the process that compares has ended: {error}") from error
            except BaseException:
                self.end()  # an answer that comes later must not be taken for that of the next question
                raise
        verdict, reason = json.loads(line)
        if reason is not None:
            raise NotJudged(reason)
        return bool(verdict)

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.end()
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self._answered = False
        return self._process

    def _ask(self, process: "subprocess.Popen[bytes]", question: str, seconds: float) -> bytes:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(question.encode() + b"\n")
        process.stdin.flush()
        # The first question also waits for its imports.
        patience = seconds + _GRACE + (0 if self._answered else _START_SECONDS)
        ready, _, _ = select.select([process.stdout], [], [], patience)
        if not ready:
            self.end()
            raise NotJudged(f"took longer than {seconds:g} s")
        line = process.stdout.readline()
        if not line:
            self.end()
            raise NotJudged("the process that compares has ended")
        self._answered = True
        return line

    def forget(self) -> None:
        """In a fork: the process is its parent's, and so may be whoever holds the lock."""
        self._lock = threading.Lock()
        if self._process is not None:
            self._others.append(self._process)
            self._process = None

    def end(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


_worker = _Worker()
atexit.register(_worker.end)
os.register_at_fork(after_in_child=_worker.forget)
