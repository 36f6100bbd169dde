"""What the reward `math` says of GSM8K: python benchmarks/math_reward.py FOLDER

FOLDER holds train.jsonl, test.jsonl and example_model_solutions.jsonl of github.com/openai/grade-school-math.
Every reference answer is judged against itself, and the solutions of four models against the labels that come
with them; those on which the two differ are listed.
"""

import argparse
import json
import time
from pathlib import Path

from offline_rec import rewards

MODELS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def references(folder: Path, name: str) -> dict:
    answers = [record["answer"] for record in records(folder / f"{name}.jsonl")]
    start = time.perf_counter()
    judged = rewards.get("math")(answers, answers=answers)
    return {
        "answers": len(answers),
        "right": sum(reward == 1.0 for reward in judged),
        "seconds": round(time.perf_counter() - start, 2),
    }


def solutions(folder: Path) -> dict:
    questions = records(folder / "example_model_solutions.jsonl")
    cases = [
        (number, question, question[model])
        for model in MODELS
        for number, question in enumerate(questions, 1)
    ]
    start = time.perf_counter()
    judged = rewards.get("math").judge(
        [solution["solution"] for _, _, solution in cases],
        answers=[question["ground_truth"] for _, question, _ in cases],
    )
    seconds = time.perf_counter() - start
    differ = [
        {
            "line": number,
            "truth": question["ground_truth"].splitlines()[-1],
            "solution": solution["solution"].splitlines()[-1:],
            "is_correct": solution["is_correct"],
            "reward": reward,
            "reason": reason,
        }
        for (number, question, solution), reward, reason in zip(
            cases, judged.rewards, judged.reasons, strict=True
        )
        if reward != float(solution["is_correct"])
    ]
    return {
        "solutions": len(cases),
        "agree": len(cases) - len(differ),
        "unjudged": judged.rewards.count(None),
        "seconds": round(seconds, 2),
        "differ": differ,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    told = {name: references(folder, name) for name in ("train", "test")} | {"example": solutions(folder)}
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
