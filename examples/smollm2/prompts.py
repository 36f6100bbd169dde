"""Sums of two numbers under 30, in words: prompts to sample, and an exam of other prompts.

    python examples/smollm2/prompts.py train.jsonl exam.jsonl

No sum is in both files, the other way round neither. The model is shown two sums before the one it is asked.
"""

import json
import random
from pathlib import Path

import click

ONES = [
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven"),
    *("twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
]
SHOWN = ((21, 3), (15, 12))


def word(number: int) -> str:
    """A number under 30 in words."""
    tens, ones = divmod(number, 10)
    if tens < 2:
        return ONES[number]
    return "twenty" if ones == 0 else f"twenty-{ONES[ones]}"


def question(a: int, b: int) -> dict[str, str]:
    """The message that asks for a sum."""
    return {"role": "user", "content": f"What is {word(a)} plus {word(b)}?"}


def prompt(a: int, b: int) -> list[dict[str, str]]:
    """Messages that end with the question."""
    messages = [{"role": "system", "content": "You add numbers."}]
    for shown in SHOWN:
        answer = f"{shown[0]} + {shown[1]} = {sum(shown)}"
        messages += [question(*shown), {"role": "assistant", "content": answer}]
    return [*messages, question(a, b)]


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--count", default=100, show_default=True, help="Prompts of each file.")
@click.option("--seed", default=0, show_default=True)
def main(files: tuple[Path, ...], count: int, seed: int) -> None:
    """Write prompts with their answers to FILES, each sum once."""
    chance = random.Random(seed)
    sums = [(a, b) for a in range(1, 30) for b in range(1, a + 1) if (a, b) not in SHOWN]
    chance.shuffle(sums)
    sums = [chance.choice([(a, b), (b, a)]) for a, b in sums]
    for number, file in enumerate(files):
        part = sums[number * count : (number + 1) * count]
        lines = [json.dumps({"prompt": prompt(a, b), "answers": str(a + b)}) for a, b in part]
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
