"""Three tasks for a policy of a hundred thousand parameters; every number has its last digit first.

- `addition`, that of the demo: one right answer, reward 1 or 0.
- `parts`: two numbers that sum to the one asked for. Thousands of right answers, of which the more even ones
  earn up to ten times as much, and wrong ones earn a little for every digit of their sum that is right: to
  imitate what was right makes answers right, but not even.
- `chain`: two additions, with the first one written down. 22 tokens, of which only the last four are judged.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

RIGHT = 0.1
"""What a right answer of `parts` earns that is as uneven as can be."""
DIGIT = 0.02
"""What each right digit of a wrong sum earns there."""


def backwards(number: int, width: int = 0) -> str:
    """Its digits, the last one first, with zeros up to a width."""
    return f"{number:0{width}d}"[::-1]


def forwards(digits: str) -> int:
    return int(digits[::-1])


@dataclass(frozen=True)
class Task:
    """Prompts by number, a right response to each as the base policy is taught it, and how one is judged.

    `reward` is what a loop takes; `success`: the reward from which a response counts as right. `teach` draws
    one of the right responses.
    """

    name: str
    title: str
    reward: str
    success: float
    prompts: int
    prompt_tokens: int
    max_tokens: int
    prompt: Callable[[int], str]
    teach: Callable[[str, np.random.Generator], str]
    target: float = 0.45
    hidden: int = 64
    layers: int = 2

    @property
    def recipe(self) -> dict[str, object]:
        """What a base policy of the task depends on; `form` rises when a function here changes."""
        fields = ("name", "success", "prompts", "max_tokens", "target", "hidden", "layers")
        return {"form": 1} | {field: getattr(self, field) for field in fields}


def addition_prompt(number: int) -> str:
    return f"{backwards(100 + number // 900)}+{backwards(100 + number % 900)}="


def addition_answer(prompt: str, rng: np.random.Generator | None = None) -> str:
    first, second = prompt.rstrip("=").split("+")
    return backwards(forwards(first) + forwards(second))


def addition_reward(responses: Sequence[str], prompt: Sequence[str]) -> list[float]:
    """1 for the sum, as a text."""
    return [float(said == addition_answer(asked)) for said, asked in zip(responses, prompt, strict=True)]


def parts_prompt(number: int) -> str:
    return f"{backwards(1000 + number)}="


def parts_answer(prompt: str, rng: np.random.Generator) -> str:
    total = forwards(prompt.rstrip("="))
    first = int(rng.integers(1, total))
    return f"{backwards(first, 4)}+{backwards(total - first, 4)}"


def parts_reward(responses: Sequence[str], prompt: Sequence[str]) -> list[float]:
    """What two numbers of four digits earn: 0.1 to 1 if they sum to the one asked for, up to 0.08 if not."""
    return [_parts(said, asked) for said, asked in zip(responses, prompt, strict=True)]


def _parts(said: str, asked: str) -> float:
    if not re.fullmatch("[0-9]{4}[+][0-9]{4}", said):
        return 0.0
    first, second = map(forwards, said.split("+"))
    total = forwards(asked.rstrip("="))
    if first + second == total:
        return RIGHT + (1 - RIGHT) * min(first, second) / (total // 2)
    found = backwards(first + second, 4)
    return DIGIT * sum(a == b for a, b in zip(found, backwards(total, 4), strict=False))


def chain_prompt(number: int) -> str:
    first, rest = divmod(number, 900 * 900)
    return "+".join(backwards(100 + n) for n in (first, *divmod(rest, 900))) + "="


def chain_answer(prompt: str, rng: np.random.Generator | None = None) -> str:
    first, second, third = prompt.rstrip("=").split("+")
    between = forwards(first) + forwards(second)
    last = backwards(between + forwards(third), 4)
    return f"{first}+{second}={backwards(between, 4)}+{third}={last}"


def chain_reward(responses: Sequence[str], prompt: Sequence[str]) -> list[float]:
    """1 if what follows the last `=` is the sum of all three, whatever was written before."""
    return [
        float(said.rpartition("=")[2] == chain_answer(asked).rpartition("=")[2] and "=" in said)
        for said, asked in zip(responses, prompt, strict=True)
    ]


def _reward(name: str) -> str:
    return f"benchmarks.paper.tasks:{name}_reward"


TASKS = {
    task.name: task
    for task in (
        Task(
            "addition",
            "three-digit addition, one right answer",
            _reward("addition"),
            success=1.0,
            prompts=900**2,
            prompt_tokens=9,
            max_tokens=8,
            prompt=addition_prompt,
            teach=addition_answer,
        ),
        Task(
            "parts",
            "two numbers with a given sum, many right answers, graded",
            _reward("parts"),
            success=RIGHT,
            prompts=9000,
            prompt_tokens=6,
            max_tokens=12,
            prompt=parts_prompt,
            teach=parts_answer,
        ),
        Task(
            "chain",
            "two additions with a scratch-pad of 22 tokens",
            _reward("chain"),
            success=1.0,
            prompts=900**3,
            prompt_tokens=13,
            max_tokens=24,
            prompt=chain_prompt,
            teach=chain_answer,
        ),
    )
}
