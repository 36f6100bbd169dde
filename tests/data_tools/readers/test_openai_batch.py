"""Files of OpenAI's Batch API, joined by custom_id. Values by hand."""

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

from data_tools import readers
from tests.data_tools.logged import collected, lines, log_of, rejects_of, rollouts

CASES = Path(__file__).parents[2] / "cases"
NEAR = pytest.approx
INPUT, OUTPUT, ERRORS = (CASES / f"openai_batch_{part}.jsonl" for part in ("input", "output", "errors"))


def question(text, **asked):
    messages = [{"role": "user", "content": text}]
    return {
        "custom_id": "1",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": messages, **asked},
    }


def answer(text, **fields):
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    body = {"id": f"c-{text}", "object": "chat.completion", "created": 1764000000, "choices": [choice]}
    return {
        "id": "b1",
        "custom_id": "1",
        "response": {"status_code": 200, "body": body},
        "error": None,
        **fields,
    }


@pytest.mark.parametrize("path", [INPUT, OUTPUT, ERRORS])
def test_files_of_a_batch_are_told_by_content(path):
    assert readers.detect(log_of(path.read_bytes())).name == "openai-batch"


def test_outputs_find_their_requests_in_any_order(tmp_path):
    report = collected(tmp_path, OUTPUT, INPUT, ERRORS)
    assert (report.total.read, report.total.kept, report.total.rejected) == (5, 3, {"failed_call": 2})
    assert report.companions == {str(INPUT): f"requests of {OUTPUT}"}
    assert f"{INPUT}: requests of {OUTPUT}" in report.lines()
    first, second, third = rollouts(tmp_path)
    assert [row["response"] for row in (first, second, third)] == [
        "A spoon.", "Seven crates of 6 make 42 jars.", "An Allen key.",
    ]  # fmt: skip
    assert json.loads(first["prompt"]) == [
        {"role": "user", "content": "Name one tool that tightens a hex bolt."}
    ]
    assert first["group_id"] == third["group_id"] != second["group_id"]
    assert first["behavior_logprobs"] == NEAR([-0.076574, -0.683131])
    assert third["behavior_logprobs"] == NEAR([-0.011, -0.617557, -1.224115])
    assert [row["policy"] for row in (first, second)] == ["demo-model-2026-01-01"] * 2
    assert first["sampled_at"] == datetime(2025, 11, 24, 16, 1, tzinfo=UTC)
    assert second["sampled_at"] == datetime(2025, 11, 24, 16, 0, tzinfo=UTC)
    assert [row["temperature"] for row in (first, second, third)] == [1.0] * 3
    assert (first["response_ids"], first["reward"], first["policy_version"]) == (None, None, None)
    assert json.loads(first["extra"])["custom_id"] == "job-1-1"


def test_failed_lines_say_what_the_server_said(tmp_path):
    found = [(reject.row, reject.reason, reject.detail) for reject in rejects_of(ERRORS.read_bytes())]
    assert found == [(1, "failed_call", "invented error text"), (2, "failed_call", "invented expiry text")]


def test_outputs_alone_say_what_they_lack_and_inputs_alone_are_no_responses():
    found = {(reject.reason, reject.detail[:32]) for reject in rejects_of(OUTPUT.read_bytes())}
    assert found == {("no_prompt", "no request of this custom_id: co")}
    assert [reject.reason for reject in rejects_of(INPUT.read_bytes())] == ["no_response"] * 4


def test_a_folder_of_batches_joins_each_with_its_own_input(tmp_path):
    for name, asked, answered in [("a", "2+2=", "4"), ("b", "3+3=", "6")]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "input.jsonl").write_bytes(lines(question(asked)))
        (tmp_path / name / "output.jsonl").write_bytes(lines(answer(answered)))
    report = collected(tmp_path / "out", tmp_path / "a", tmp_path / "b")
    assert report.total.kept == 2
    assert report.companions == {
        f"{tmp_path}/{name}/input.jsonl": f"requests of {tmp_path}/{name}/output.jsonl" for name in "ab"
    }
    assert [
        (json.loads(row["prompt"])[0]["content"], row["response"]) for row in rollouts(tmp_path / "out")
    ] == [
        ("2+2=", "4"),
        ("3+3=", "6"),
    ]


def test_a_custom_id_of_two_requests_names_neither(tmp_path):
    (tmp_path / "input.jsonl").write_bytes(lines(question("2+2="), question("3+3=")))
    (tmp_path / "output.jsonl").write_bytes(lines(answer("4")))
    report = collected(tmp_path, tmp_path / "input.jsonl", tmp_path / "output.jsonl")
    assert report.total.rejected == {"bad_record": 1}
    (tmp_path / "input.jsonl").write_bytes(lines(question("2+2="), question("2+2=")))
    report = collected(tmp_path, tmp_path / "input.jsonl", tmp_path / "output.jsonl")
    assert report.total.kept == 1


def test_a_batch_of_several_choices_flags_what_is_missing(tmp_path):
    (tmp_path / "input.jsonl").write_bytes(lines(question("2+2=", n=2)))
    (tmp_path / "output.jsonl").write_bytes(lines(answer("4")))
    collected(tmp_path, tmp_path / "input.jsonl", tmp_path / "output.jsonl")
    [row] = rollouts(tmp_path)
    assert row["flags"] == ["incomplete_group"]


def test_collecting_a_batch_again_adds_nothing(tmp_path):
    for path in (INPUT, OUTPUT, ERRORS):
        shutil.copy(path, tmp_path)
    paths = [tmp_path / path.name for path in (ERRORS, INPUT, OUTPUT)]
    assert collected(tmp_path, *paths).total.kept == 3
    again = collected(tmp_path, *reversed(paths)).total
    assert (again.kept, again.duplicate, again.rejected) == (0, 3, {"failed_call": 2})
