"""rLLM: episodes as its logger writes them, one indented file each, and as Episode.to_dict gives them.

Every step of a trajectory is a completion of its own. The episodes of a task are a group, agent by agent;
those of single files belong together by training step and epoch. No file names its run: --run can.
"""

from collections.abc import Iterator, Sequence
from os.path import dirname
from typing import Any

from data_tools.collecting.prompts import is_chat
from data_tools.collecting.reasons import Refused
from data_tools.logs.records import samples
from data_tools.readers.base import Carries, Log, Passed, RecordReader, Row, first_object, without
from data_tools.readers.sequences import compact

Object = dict[str, Any]

SUMMARY = {"num_episodes", "episode_files", "summary_stats"}

_OF_STEP = (
    "prompt_ids", "response_ids", "logprobs", "chat_completions", "model_response", "weight_version",
    "routing_matrices",
)  # fmt: skip
_TOO_LONG = "max_response_length_exceeded"


class RllmReader(RecordReader):
    """One record is one episode: trajectories of one or more agents."""

    name = "rllm"
    title = "rLLM episodes: files of its episode logger, JSON lines of Episode.to_dict"
    carries = Carries(
        prompt="yes",
        group="task and agent",
        reward="yes",
        ids="to_dict only",
        logprobs="to_dict only",
        version="weight version, else training step",
    )

    def detect(self, log: Log, samples: Sequence[Any]) -> bool:
        """Take a log whose first record has trajectories of steps, or the summary of a folder of them."""
        first = first_object(samples)
        return first.keys() >= SUMMARY or _is_episode(first)

    def plan(self, logs: Sequence[Log]) -> list[Log]:
        """Leave out the summary of a folder whose episodes are read."""
        summaries = {log for log in logs if first_object(samples(log)).keys() >= SUMMARY}
        first = {dirname(log.name): log for log in reversed(logs) if log not in summaries}
        for log in (log for log in logs if log in summaries):
            if dirname(log.name) in first:
                first[dirname(log.name)].companions["summary of the folder"] = log
        return [log for log in logs if log not in summaries or dirname(log.name) not in first]

    def rows(self, record: Any, log: Log) -> Iterator[Row]:
        """Yield the steps of an episode."""
        if isinstance(record, dict) and record.keys() >= SUMMARY:
            yield Passed("not_a_rollout")
            return
        trajectories = record.get("trajectories") if isinstance(record, dict) else None
        if not isinstance(trajectories, list):
            raise Refused("bad_record", "no episode: it has no list of trajectories")
        if not trajectories:
            yield Refused("no_response", "an episode without a trajectory")
        shared = _shared(record)
        for at, trajectory in enumerate(trajectories):
            if isinstance(trajectory, dict):
                yield from _steps(trajectory, shared, record)
            else:
                yield Refused(
                    "bad_record", f"trajectory {at + 1} is no object but {type(trajectory).__name__}"
                )


def _is_episode(record: Object) -> bool:
    found = record.get("trajectories")
    steps = isinstance(found, list) and any(isinstance(one, dict) and "steps" in one for one in found)
    return steps and bool({"episode_id", "id", "task"} & record.keys())


def _shared(record: Object) -> Object:
    """Columns of every step of an episode."""
    given = record.get("episode_id", record.get("id"))
    task = given.rpartition(":")[0] or given if isinstance(given, str) else record.get("task_hash")
    step, run = record.get("training_step"), None
    if step is not None:
        run = f"step {step}, epoch {record.get('epoch')}"
        task = task if record.get("task_hash") is None else f"{task}/{record['task_hash']}"
    elif "eval_idx" in record:
        run = "eval"
    return {
        "run": run,
        "group_id": task,
        "policy_version": step,
        "extra": without(record, "trajectories", "training_step"),
    }


def _steps(trajectory: Object, shared: Object, episode: Object) -> Iterator[Row]:
    steps = trajectory.get("steps")
    if not isinstance(steps, list) or not steps:
        yield Refused("no_response", "a trajectory without a list of steps")
        return
    name, group = trajectory.get("name"), shared["group_id"]
    own = without(trajectory, "steps", "task")
    cut = episode.get("termination_reason") == _TOO_LONG
    for turn, step in enumerate(steps):
        if not isinstance(step, dict):
            yield Refused("bad_record", f"step {turn + 1} is no object but {type(step).__name__}")
            continue
        reward = trajectory.get("reward")
        version = step.get("weight_version")
        rest = compact(
            {key: value for key, value in without(step, *_OF_STEP).items() if value not in ("", [], {})}
        )
        yield {
            **shared,
            **_texts(step),
            # Agents of one episode have prompts and rewards of their own.
            "group_id": group if group is None or name is None else f"{group}/{name}",
            "trajectory_id": trajectory.get("uid"),
            "turn": turn,
            "reward": step.get("reward") if reward is None else reward,
            "policy_version": shared["policy_version"] if version is None else version,
            "prompt_ids": step.get("prompt_ids") or None,
            "response_ids": step.get("response_ids") or None,
            "behavior_logprobs": step.get("logprobs") or None,
            "truncated": True if cut and turn == len(steps) - 1 else None,
            "extra": shared["extra"] | {"trajectory": own, "step": rest},
        }


def _texts(step: Object) -> Object:
    """What a step was asked and answered; its conversation may or may not end in the answer."""
    chat: Any = step.get("chat_completions")
    said = step.get("model_response")
    said = step.get("action") if said in (None, "") and isinstance(step.get("action"), str) else said
    if not is_chat(chat):
        return {"prompt": step.get("observation"), "response": said}
    if chat[-1]["role"] == "assistant":
        return {"prompt": chat[:-1], "response": [chat[-1]]}
    return {"prompt": chat, "response": said}
