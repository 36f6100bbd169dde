"""verifiers from its version 1, and prime-rl's rollouts: traces.jsonl, one episode a line.

A trace is a graph of messages, each with the tokens it adds. Every path from the root to a sampled message
that no sampled one follows is a response: its turns, with tool results and user turns between them masked 0.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from data_tools.collecting.ids import digest
from data_tools.collecting.reasons import Refused
from data_tools.logs.jsontext import dump
from data_tools.readers.base import Carries, Log, RecordReader, Row, first_object, without
from data_tools.readers.sequences import compact, partial_mask, span
from data_tools.readers.verifiers import as_tools

Object = dict[str, Any]


class TracesReader(RecordReader):
    """One record is an episode: traces of one or more agents, whose rewards are their own."""

    name = "verifiers-traces"
    title = "verifiers v1 and prime-rl rollouts (traces.jsonl)"
    carries = Carries(
        prompt="yes",
        group="group id or task, and agent",
        reward="yes, weighted sum",
        ids="optional",
        logprobs="optional",
        version="policy at the start",
        time="yes",
    )

    def detect(self, log: Log, samples: Sequence[Any]) -> bool:
        """Take a log whose first record has traces with nodes."""
        traces = first_object(samples).get("traces")
        return isinstance(traces, list) and any(
            isinstance(trace, dict) and "nodes" in trace for trace in traces
        )

    def plan(self, logs: Sequence[Log]) -> list[Log]:
        """Leave out the `effective` rollouts of a step where `all` of them are there too."""
        found = {log.name: log for log in logs}
        for log in logs:
            folder, _, name = log.name.rpartition("/")
            whole = f"{folder.removesuffix('effective')}all/{name}"
            if folder.endswith("/effective") and whole in found:
                found[whole].companions["repeated rows"] = found.pop(log.name)
        return list(found.values())

    def rows(self, record: Any, log: Log) -> Iterator[Row]:
        """Yield the paths of each trace of an episode."""
        traces = record.get("traces") if isinstance(record, dict) else None
        if not isinstance(traces, list):
            raise Refused("bad_record", "no episode: it has no list of traces")
        if not traces:
            raise Refused("no_response", "an episode without a trace")
        shared = _shared(record)
        for at, trace in enumerate(traces):
            if isinstance(trace, dict):
                yield from _paths(trace, shared)
            else:
                yield Refused("bad_record", f"trace {at + 1} is no object but {type(trace).__name__}")


def _object(value: Any) -> Object:
    return value if isinstance(value, dict) else {}


def _shared(record: Object) -> Object:
    """Columns of every trace of an episode."""
    run, task = _object(record.get("run")), _object(record.get("task"))
    work = _object(run.get("work"))
    keys = (_object(record.get("group")).get("id"), task.get("key"), task.get("hash"))
    return {
        "run": run.get("id"),
        "group_id": next((key for key in keys if key is not None), None),
        "policy_version": _object(work.get("policy")).get("start"),
        "extra": without(record, "traces"),
    }


def _paths(trace: Object, shared: Object) -> Iterator[Row]:
    nodes = trace.get("nodes")
    nodes = nodes if isinstance(nodes, list) else []
    ends = _ends(nodes)
    if not ends:
        yield Refused("no_response", "a trace without a sampled message")
        return
    of_trace = _of_trace(trace, shared)
    calls = {call.get("node"): call for call in trace.get("calls") or () if isinstance(call, dict)}
    for place, end in enumerate(ends):
        path = _path(nodes, end)
        row = of_trace | _of_path([nodes[at] for at in path])
        row |= _sampling([calls.get(at, {}) for at in path if nodes[at].get("sampled")], row)
        row["finish_reason"] = row["finish_reason"] or nodes[end].get("finish_reason")
        row["flags"] = of_trace["flags"] + row["flags"]
        row["response_id"] = None if trace.get("id") is None else f"{trace['id']}/{end}"
        row["turn"] = place if len(ends) > 1 else None
        row["content"] = digest("trace", dump([row["prompt"], row["response"], row["reward"]]))
        advantages = [value for at in path for value in nodes[at].get("advantages") or ()]
        yield row | {"extra": of_trace["extra"] | compact({"advantages": advantages})}


def _ends(nodes: list[Any]) -> list[int]:
    """Sampled messages that no sampled one follows."""
    followed: set[Any] = set()
    ends = []
    for at in reversed(range(len(nodes))):
        if not isinstance(nodes[at], dict):
            raise Refused("bad_record", f"node {at + 1} is no object but {type(nodes[at]).__name__}")
        if nodes[at].get("sampled") is True and at not in followed:
            ends.append(at)
        if nodes[at].get("sampled") is True or at in followed:
            followed.add(nodes[at].get("parent"))
    return ends[::-1]


def _path(nodes: list[Object], end: int) -> list[int]:
    """Indexes of the messages from the root to `end`."""
    path: list[int] = [end]
    while (parent := nodes[path[-1]].get("parent")) is not None:
        if type(parent) is not int or not 0 <= parent < path[-1]:
            raise Refused("bad_record", f"node {path[-1] + 1} follows none before it")
        path.append(parent)
    return path[::-1]


def _of_trace(trace: Object, shared: Object) -> Object:
    agent = _object(trace.get("agent"))
    group = shared["group_id"]
    own = without(trace, "nodes", "tools", "calls", "task")
    return shared | {
        # Agents of one episode have prompts and rewards of their own.
        "group_id": group if group is None or agent.get("name") is None else f"{group}/{agent['name']}",
        "trajectory_id": trace.get("id"),
        "reward": _total(trace.get("rewards")),
        "tools": as_tools(trace.get("tools")),
        "flags": ["not_trained"] if agent.get("trainable") is False else [],
        "extra": shared["extra"] | {"trace": own},
    }


def _total(rewards: Any) -> float | None:
    """The sum of scores by their weights; None where one is missing: scoring did not come to its end."""
    if not isinstance(rewards, dict) or not rewards:
        return None
    total = 0.0
    for reward in rewards.values():
        score, weight = _object(reward).get("score"), _object(reward).get("weight", 1.0)
        if type(score) not in (int, float) or type(weight) not in (int, float):
            return None
        total += score * weight
    return total


def _of_path(path: list[Object]) -> Object:
    """Texts and tokens of a path that ends in a sampled message."""
    messages = [node.get("message") for node in path]
    first = next(at for at, node in enumerate(path) if node.get("sampled") is True)
    row = {
        "prompt": messages[:first],
        "response": messages[first:],
        "sampled_at": path[-1].get("timestamp"),
        "flags": [],
    }
    return row | _tokens(path)


def _tokens(path: list[Object]) -> Object:
    """Token columns of a path; none where a sampled message has no ids, or they are not told apart."""
    ids: list[Any] = []
    mask: list[Any] = []
    logprobs: list[Any] = []
    for node in path:
        own, marks = node.get("token_ids") or [], node.get("mask") or []
        if node.get("sampled") is True and not own:
            return {}
        if not marks and node.get("sampled") is not True:
            marks = [False] * len(own)
        if len(own) != len(marks) or not all(mark in (0, 1) for mark in set(marks)):
            return {"flags": ["bad_ids"]}
        ids += own
        mask += marks
        logprobs += _spread(node.get("logprobs") or [], marks)
    if 1 not in mask:
        return {"flags": ["bad_ids"]}
    where = span(mask)
    return {
        "prompt_ids": ids[: where.start],
        "response_ids": ids[where],
        "behavior_logprobs": logprobs[where],
        "loss_mask": partial_mask(mask[where]),
    }


def _spread(values: list[Any], mask: list[Any]) -> list[Any]:
    """The log-probs of a message's sampled tokens at the places of those; None elsewhere."""
    count = sum(mask)
    if len(values) != count or not count:
        return [None] * len(mask)
    if mask.index(1) == len(mask) - count:
        return [None] * (len(mask) - count) + values
    rest = iter(values)
    return [next(rest) if mark else None for mark in mask]


def _sampling(calls: list[Object], row: Object) -> Object:
    """Who sampled the turns of a path, and how."""
    sampling = [_object(call.get("sampling")) for call in calls]
    made: Object = {name: sampling[-1].get(name) for name in ("temperature", "top_p", "top_k")}
    made |= {"policy": calls[-1].get("model"), "finish_reason": calls[-1].get("finish_reason")}
    if any(said.get("temperature") != made["temperature"] for said in sampling):
        made |= {"behavior_logprobs": None, "flags": [*row["flags"], "mixed_sampling"]}
    return made
