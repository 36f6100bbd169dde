"""A process that compares mathematical expressions with math-verify, started by math_answers.py.

A line of JSON in, `[seconds, answer, response]`; a line out, `[judgement, reason]`. It is a process of its
own because an expression such as 9^9^9^9 computes without end where no signal is heard: it can be killed.
It imports nothing of this package, so that it runs from wherever the package lies.
"""

import json
import logging
import signal
import sys
from types import FrameType


class _Expired(BaseException):
    """The time is over."""


def _expire(number: int, frame: FrameType | None) -> None:
    raise _Expired


def judge(answer: str, response: str) -> tuple[bool | None, str | None]:
    """Whether the response gives the answer; None, and why, where the answer holds nothing to compare."""
    from math_verify import parse, verify

    right = parse(answer, parsing_timeout=None)
    if not right:
        return None, f"no number or expression in the answer {answer[:60]!r}"
    given = parse(response, parsing_timeout=None)
    return bool(given) and verify(right, given, timeout_seconds=None), None


def main() -> None:
    """Answer line by line until the other side has gone."""
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, _expire)
    out = sys.stdout
    sys.stdout = sys.stderr  # nothing that a library prints may come between
    for line in sys.stdin:
        seconds, answer, response = json.loads(line)
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            told = judge(answer, response)
        except _Expired:
            told = None, f"took longer than {seconds:g} s"
        except Exception as error:
            told = None, f"{type(error).__name__}: {str(error)[:200]}"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        out.write(json.dumps(told) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
