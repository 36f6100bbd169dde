"""Whatever happens to a log: no crash, every record counted, no number that was not logged."""

import copy
import json
import math
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_tools import readers
from data_tools.collecting.identity import Scope
from data_tools.collecting.pipeline import Settings, process
from data_tools.logs.records import fingerprint
from tests.data_tools.logged import log_of

CASES = Path(__file__).parents[2] / "cases"
CALLS = [
    "openai_chat_request_response_pairs.jsonl",
    "openai_completions_legacy.jsonl",
    "vllm_chat_return_token_ids.jsonl",
    "vllm_chat_tokens_as_token_ids.jsonl",
    "vllm_completions_return_token_ids.jsonl",
    *(f"troubles/{path.name}" for path in sorted((CASES / "troubles").glob("A0[346]_*.jsonl"))),
    "troubles/A02_echo_null_first_logprob.jsonl",
    "troubles/A13_n_choices.jsonl",
]
TRL_CHAT = "trl_completions_conversational"
RLLM_FILES = [str(path.relative_to(CASES)) for path in sorted((CASES / "rllm").rglob("episode_*.json"))]
FILES = {
    "openai": CALLS,
    "vllm": CALLS,
    "sglang": ["sglang_generate.jsonl", "sglang_generate_n2_array.jsonl"],
    "tgi": ["tgi_generate_details.jsonl"],
    "openai-batch": ["openai_batch_output.jsonl", "openai_batch_errors.jsonl", "openai_batch_input.jsonl"],
    "openai-finetune": [f"openai_finetune_{kind}.jsonl" for kind in ("sft", "preference", "reinforcement")],
    "openai-stored": ["openai_stored_completions_list.json"],
    "openrlhf": ["openrlhf_generate_vllm.jsonl", "openrlhf_rm_scored.jsonl"],
    "lm-eval": [f"lm_eval/samples_{task}_2026-01-05T12-00-00.000000.jsonl" for task in ("jars", "choice")],
    "trinity": ["trinity/trinity_experience.jsonl"],
    "verifiers": [
        f"verifiers/{name}/results.jsonl" for name in ("verifiers_eval", "verifiers_eval_state_columns")
    ],
    "verifiers-traces": ["prime_rl/rollouts/step_12/train/all/traces.jsonl"],
    "prime-rl-tokens": ["prime_rl/token_exports/step_12/rank_0.jsonl"],
    "rllm": ["rllm/rllm_episode_to_dict.jsonl", *RLLM_FILES],
    "verl": ["verl/verl_rollout_data_dir/2.jsonl", "verl/verl_validation_data_dir/20.jsonl"],
    "roll": ["roll/rollout_dump_data.step_3.jsonl"],
    "ms-swift": ["ms_swift/ms_swift_completions.jsonl"],
    "skyrl": ["skyrl/jars.jsonl"],
    "trl": [f"trl/{name}/completions_00010.parquet" for name in ("trl_completions", TRL_CHAT)],
    "areal": ["areal/5/10.jsonl", "areal/6/11.jsonl"],
    "nemo-rl": ["nemo_rl/train_data_step1.jsonl", "nemo_rl/val_data_step10.jsonl"],
    "openr1-math": ["hf_sets/hf_openr1_math_220k.parquet"],
    "numina-math": ["hf_sets/hf_numinamath_1_5.parquet"],
    "ultrafeedback": ["hf_sets/hf_ultrafeedback.jsonl"],
    "helpsteer2": ["hf_sets/hf_helpsteer2.jsonl"],
    "litellm": [
        "litellm/litellm_s3_batch.jsonl",
        "litellm/litellm_spend_logs.jsonl",
        "troubles/A12_retries_and_duplicates.jsonl",
    ],
    "langfuse": [f"langfuse/{name}.jsonl" for name in ("observations_v2", "scores", "traces_legacy")],
    "langsmith": ["langsmith/langsmith_runs.jsonl", "langsmith/langsmith_bulk_export.parquet"],
    "otel": [
        "otel/otel_genai_otlp.jsonl",
        "otel/otel_messages_otlp.jsonl",
        "otel/two_files/logs.jsonl",
        "otel/two_files/traces.jsonl",
    ],
    "weave": ["weave/weave_calls.jsonl"],
    "helicone": ["helicone/helicone_export.jsonl"],
    "phoenix": [
        "phoenix/openinference_spans_flat.jsonl",
        "phoenix/phoenix_spans_dataframe.parquet",
        "phoenix/phoenix_span_annotations.jsonl",
    ],
    "gsm8k-solutions": ["hf_sets/gsm8k_example_model_solutions.jsonl"],
}
"""Samples of each format, by the name of its reader."""

PASSED = ("not_a_call", "joined_score", "joined_message", "merged_filter")
"""Notes of records that are no response."""


def records_of(path):
    """The records of a sample, those of a table as objects."""
    if path.suffix == ".parquet":
        return json.loads(json.dumps(pq.read_table(path).to_pylist(), default=str))
    if path.suffix == ".json":
        return [json.loads(path.read_bytes())]
    return [json.loads(line) for line in path.read_bytes().splitlines()]


RECORDS = {
    name: [record for file in files for record in records_of(CASES / file)] for name, files in FILES.items()
}
# Some samples lack the requests, without which nothing is kept: they stand in other logs, or nowhere.
ASKED = {"text": "Say yes.", "inputs": "Say yes.", "sampling_params": {"temperature": 0.5}}
MESSAGES = [{"role": "user", "content": "Say yes."}]
for engine in ("sglang", "tgi"):
    RECORDS[engine] = [{"request": ASKED, "response": response} for response in RECORDS[engine]]
RECORDS["openai-batch"] = [{"request": {"messages": MESSAGES}, **line} for line in RECORDS["openai-batch"]]
RECORDS["openai-stored"] = [
    {**completion, "messages": MESSAGES} for page in RECORDS["openai-stored"] for completion in page["data"]
]
STRANGE = st.sampled_from(
    [
        None,
        True,
        0,
        -1,
        7,
        1.5,
        1e300,
        "",
        "x",
        "7",
        "-0.5",
        "[1]",
        '{"a": 1}',
        [],
        [None],
        [[1], "b"],
        {},
        {"role": 1},
    ]
)


def places(value, path=()):
    """Every path to a value inside a record."""
    children = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, child in children:
        yield (*path, key)
        yield from places(child, (*path, key))


def changed(record, path, change, strange):
    """The record with one value dropped, made null, retyped or cut."""
    record = copy.deepcopy(record)
    holder = record
    for key in path[:-1]:
        holder = holder[key]
    value = holder[path[-1]]
    if change == "drop":
        del holder[path[-1]]
    elif change == "cut" and isinstance(value, str | list):
        holder[path[-1]] = value[: len(value) // 2]
    elif change == "text":
        holder[path[-1]] = json.dumps(value)
    else:
        holder[path[-1]] = strange
    return record


@st.composite
def mutated(draw, name):
    record = draw(st.sampled_from(RECORDS[name]))
    for _ in range(draw(st.integers(1, 3))):
        # Few of the many places are structure; they are drawn as often as the long lists below them.
        depth = draw(st.integers(1, 7))
        found = [path for path in places(record) if len(path) <= depth]
        if not found:
            break
        change = draw(st.sampled_from(["drop", "null", "cut", "text", "retype"]))
        strange = None if change == "null" else draw(STRANGE)
        record = changed(record, draw(st.sampled_from(found)), change, strange)
    return record


def numbers(value):
    """Every number in a record, also in JSON text and written as text."""
    if isinstance(value, bool | int | float):
        yield float(value)
    elif isinstance(value, str):
        try:
            yield from numbers(json.loads(value))
        except ValueError:
            with suppress(ValueError):
                yield float(value)  # "1." is a number, though not in JSON
    elif isinstance(value, dict | list):
        for child in value.values() if isinstance(value, dict) else value:
            yield from numbers(child)


def as_float32(values):
    with np.errstate(over="ignore"):
        return set(np.array(list(values), np.float64).astype(np.float32).tolist())


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_mutated_records_are_counted_and_nothing_is_invented(name, data):
    records = data.draw(st.lists(mutated(name), min_size=1, max_size=3))
    log = log_of(b"".join(json.dumps(record).encode() + b"\n" for record in records))
    reader = readers.reader(name)
    scope = Scope(name, fingerprint(log), log.name)
    seen, input_rows, passed = [], 0, 0
    for chunk in reader.chunks(log):
        input_rows += chunk.input_rows
        read = len(chunk.source_row) + len(chunk.rejects)
        passed += sum(chunk.notes[note] for note in PASSED)
        done = process(chunk, scope, Settings())
        rows = done.rows.table.to_pylist()
        assert len(rows) + len(done.rejects) == read
        seen += [row["source_row"] for row in rows] + [reject.row for reject in done.rejects]
        for row in rows:
            check(row, records[row["source_row"] - 1], records)
    assert input_rows == len(records)
    assert len(set(range(1, len(records) + 1)) - set(seen)) <= passed  # no record vanishes


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_a_log_cut_anywhere_or_in_another_order_is_counted(name, data):
    records = data.draw(st.lists(st.sampled_from(RECORDS[name]), min_size=1, max_size=3))
    whole = b"".join(json.dumps(record).encode() + b"\n" for record in records)
    cut = whole[: data.draw(st.integers(1, len(whole)))]
    log = log_of(cut)
    input_rows = 0
    for chunk in readers.reader(name).chunks(log):
        input_rows += chunk.input_rows
        done = process(chunk, Scope(name, fingerprint(log), log.name), Settings())
        assert done.rows.table.num_rows + len(done.rejects) == len(chunk.source_row) + len(chunk.rejects)
        for row in done.rows.table.to_pylist():
            check(row, records[row["source_row"] - 1], records)
    assert input_rows == len([line for line in cut.split(b"\n") if line.strip()])


def check(row, record, records):
    logged = set(numbers(record))
    assert row["reward"] is None or row["reward"] in set(
        numbers(records)
    )  # scores may be records of their own
    values = [value for value in row["behavior_logprobs"] or () if value is not None]
    assert set(values) <= as_float32(logged) | {0.0 for value in logged if 0 < value <= 1e-3}
    assert all(math.isfinite(value) and value <= 0 for value in values)
    assert row["response"] is not None or row["response_ids"] is not None
    if row["behavior_logprob"] is not None:
        produced = row["loss_mask"] or [1] * len(row["response_ids"])
        pairs = zip(row["behavior_logprobs"], produced, strict=True)
        assert all(value is not None for value, own in pairs if own)
        text = json.dumps(record)
        assert all(str(token) in text for token in row["response_ids"])
