"""What the tests of `loop` share: a small task, and the examples of the documentation on it."""

import json
from pathlib import Path

import yaml

import data_tools
from offline_rec.demo.model import build_model, build_tokenizer
from offline_rec.demo.task import split
from offline_rec.looping.config import LoopConfig, loop_config

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "loops"
ROWS = """SELECT response_id, group_id, prompt, response, response_ids, behavior_logprobs, reward,
    policy_version, extra FROM rollouts ORDER BY response_id"""
SIZE = ("n=2", "fit.groups_per_step=3", "fit.device=cpu")


def world(folder: Path) -> Path:
    """The demo's task and an untrained model of its kind, with prompts in a file and a log in a dataset."""
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder / "base")
    build_model(tokenizer, seed=1).save_pretrained(folder / "base")
    problems = split(1, evaluation=10, log=12, development=10).log
    asked = zip(problems.prompts(), problems.answers(), strict=True)
    log = [
        {"prompt": prompt, "answers": answer, "response": answer if k else "1", "reward": k}
        | {"policy": "base", "policy_version": 0, "temperature": 1.0, "logprob_kind": "processed"}
        for prompt, answer in asked
        for k in range(2)
    ]
    file = folder / "log.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in log))
    data_tools.collect([str(file)], str(folder / "dataset"))
    prompts = [{"prompt": row["prompt"], "answers": row["answers"]} for row in log[::2]]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    return folder


def example(name: str, world: Path, folder: Path, *overrides: str) -> LoopConfig:
    """An example of the documentation, in small and in other places."""
    given = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    paths = {"model": world / "base", "out": folder / "run"}
    if given.get("offline"):
        paths["dataset"] = world / "dataset"
    else:
        paths |= {"prompts": world / "dataset", "dataset": folder / "ds"}
    places = [f"{key}={value}" for key, value in paths.items()]
    return loop_config(EXAMPLES / f"{name}.yaml", overrides=[*places, *SIZE, *overrides])


SIGNAL = ("reward=regex", "reward_options.pattern=(1|3|5|7|9)$")
"""A reward that an untrained model sometimes gets."""
