"""The reward of a multiple choice: 1 if the letter that a response settles on is the right one."""

import re
from typing import Any

from data_tools.errors import ConfigError
from data_tools.rewards.reward import NotJudged, Rule
from data_tools.rewards.text import against


def choice(column: str | None = None, letters: str = "ABCDEFGHIJ") -> Rule:
    """1 if the letter chosen is that of the answer, 0 if it is another one or there is none.

    Looked for, the last of each, in this order: `\\\\boxed{B}`; `answer is B`, `Answer: (B)`; a line that
    begins with `B)` or is `B` alone; `(B)`; a capital B by itself that is no word (A and I are words). An
    answer is a letter, `(B)`, or `B) the text`. ConfigError if `letters` holds anything but letters.
    """
    if not letters.isalpha() or not letters.isascii():
        raise ConfigError(f"reward choice: {letters!r} are no letters", "write them as letters=ABCD")
    some = letters.upper()
    # A small letter that goes on with a word is one: "the answer is a dog".
    either = rf"[{some}]|[{some.lower()}](?=[)\].:}}*$]|\s*$)"
    patterns = [re.compile(pattern.replace("X", either), flags) for pattern, flags in _FORMS]
    words = "".join(letter for letter in some if letter not in "AI")
    if words:
        patterns.append(re.compile(rf"(?<![\w'’])([{words}])(?![\w'’])"))

    def right(response: str, answers: list[Any]) -> bool:
        wanted = {_letter(answer, some) for answer in answers}
        return _chosen(response, patterns) in wanted

    return against(column, right)


_LETTER = r"[\s*_(\[{$\"']*(?:\\(?:text|mathrm|mathbf)\{)?[\s(]*(X)(?![\w'’])"
_FORMS = [
    (rf"\\boxed\{{{_LETTER}", re.ASCII | re.MULTILINE),
    (
        rf"(?i:\b(?:answer|choice|option)\b(?:\s+(?:is|would be|should be))?)\s*:?{_LETTER}",
        re.ASCII | re.MULTILINE,
    ),
    (r"^[\s*_(\[]*(X)(?:[)\].:*_]+(?:\s|$)|\s*$)", re.ASCII | re.MULTILINE),
    (r"\((X)\)", re.ASCII | re.MULTILINE),
]


def _chosen(response: str, patterns: list[re.Pattern[str]]) -> str | None:
    for pattern in patterns:
        found = pattern.findall(response)
        if found:
            return str(found[-1]).upper()
    return None


def _letter(answer: Any, letters: str) -> str:
    either = f"[{letters}{letters.lower()}]"
    match = re.fullmatch(rf"\s*[(\[]?({either})(?:[)\].:](?:\s.*)?)?\s*", str(answer), re.DOTALL)
    if match is None:
        raise NotJudged(f"the answer {str(answer)[:40]!r} is none of the letters {letters}")
    return match[1].upper()
