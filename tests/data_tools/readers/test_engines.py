"""Responses in the own form of SGLang and TGI, alone and with their requests. Values by hand."""

import json
from pathlib import Path

import pytest

from data_tools import readers
from tests.data_tools.logged import collected, lines, log_of, rejects_of, rollouts, row_of, rows_of

CASES = Path(__file__).parents[2] / "cases"
NEAR = pytest.approx
CRATES = "A crate holds 6 jars. How many jars are in 7 crates?"


def records(name):
    return [json.loads(line) for line in (CASES / name).read_bytes().splitlines()]


def asked(response, **sampling):
    return {"request": {"text": CRATES, "sampling_params": sampling}, "response": response}


def logged():
    """The responses of the sample with the request of each, whose prompt the sample lacks."""
    return [
        asked(response, temperature=0.6, top_p=0.9, top_k=20) for response in records("sglang_generate.jsonl")
    ]


def test_sglang_gives_ids_log_probs_of_the_sampling_temperature_and_how_it_ended():
    first, second, *_ = rows_of(lines(*logged()))
    assert (first["prompt"], first["response"]) == (CRATES, "Seven crates of 6 make 42 jars.")
    assert first["response_ids"] == [17040, 13359, 11999, 16572, 5347, 9805, 19715, 2]
    assert first["behavior_logprobs"] == NEAR(
        [-0.011, -0.617557, -1.224115, -0.240508, -0.847066, -1.453623, -0.470016, -1.076574]
    )
    assert first["behavior_logprob"] == NEAR(-5.940459)
    assert (first["logprob_kind"], first["temperature"]) == ("processed", NEAR(0.6))
    assert (first["top_p"], first["top_k"], first["finish_reason"], first["flags"]) == (
        NEAR(0.9),
        20,
        "stop",
        [],
    )
    assert json.loads(first["extra"])["finish_reason"] == {"type": "stop", "matched": 2}
    assert second["response_ids"] == [12346, 14252, 16572, 27855, 20014, 19715]
    assert (second["finish_reason"], second["flags"]) == ("length", ["truncated"])
    assert first["group_id"] == second["group_id"]


def test_sglang_versions_are_numbers_the_oldest_where_weights_changed_and_none_by_default():
    rows = rows_of(lines(*logged()))
    assert [row["policy_version"] for row in rows] == [31, 31, None, 31]
    assert json.loads(rows[3]["extra"])["weight_versions"][1] == {"version": "w000032", "start": 2, "end": 3}
    assert json.loads(rows[2]["extra"])["weight_version"] == "default"


def test_an_aborted_call_is_a_failure_unless_it_had_begun_to_answer():
    [reject] = rejects_of(lines(*logged()))
    assert (reject.row, reject.reason, reject.detail) == (5, "failed_call", "Aborted")
    begun = logged()[4]
    begun["response"] |= {"text": "Seven", "output_ids": [17040]}
    row = row_of(begun)
    assert (row["response"], row["finish_reason"], row["behavior_logprobs"]) == ("Seven", "abort", None)


def test_sglang_responses_alone_are_told_apart_by_what_they_lack():
    data = (CASES / "sglang_generate.jsonl").read_bytes()
    assert readers.detect(log_of(data)).name == "sglang"
    found = [(reject.row, reject.reason) for reject in rejects_of(data)]
    assert found == [
        (1, "no_prompt"),
        (2, "no_prompt"),
        (3, "no_prompt"),
        (4, "no_prompt"),
        (5, "failed_call"),
    ]
    data = (CASES / "sglang_generate_n2_array.jsonl").read_bytes()
    assert readers.detect(log_of(data)).name == "sglang"
    assert [(reject.row, reject.reason) for reject in rejects_of(data)] == [
        (line, "no_prompt") for line in (1, 1, 2, 2)
    ]


def test_the_array_of_one_request_is_one_group_and_a_missing_response_is_flagged():
    first, second = records("sglang_generate_n2_array.jsonl")
    rows = rows_of(lines(asked(first, n=2), asked(second, n=3)))
    assert [row["response"] for row in rows] == [
        "Seven crates of 6 make 42 jars.", "7 plus 6 gives 13 jars.", "An Allen key.", "A spoon.",
    ]  # fmt: skip
    assert rows[1]["behavior_logprobs"] == NEAR(
        [-0.076574, -0.683131, -1.289689, -0.306082, -0.912639, -1.519197, -0.53559]
    )
    assert len({row["response_id"] for row in rows}) == 4
    assert ["incomplete_group" in row["flags"] for row in rows] == [False, False, True, True]


def test_the_prompts_of_one_request_are_groups_of_their_own():
    first, second = records("sglang_generate_n2_array.jsonl")
    request = {"input_ids": [[1, 5], [1, 6]], "sampling_params": {"n": 2}}
    rows = rows_of(lines({"request": request, "response": [*first, *second]}))
    assert [row["prompt_ids"] for row in rows] == [[1, 5], [1, 5], [1, 6], [1, 6]]


def test_log_probs_of_the_whole_prompt_give_its_ids_and_those_of_a_part_do_not():
    record = records("sglang_generate.jsonl")[0]
    record["meta_info"]["prompt_tokens"] = 4
    row = row_of(record)
    assert (row["prompt"], row["prompt_ids"]) == (None, [1, 5475, 7157, 4437])
    record["meta_info"]["prompt_tokens"] = 5
    assert [reject.reason for reject in rejects_of(lines(record))] == ["no_prompt"]


def test_a_log_that_says_what_its_log_probs_are_is_believed():
    row = row_of(logged()[0] | {"logprob_kind": "raw"})
    assert (row["logprob_kind"], row["behavior_logprob"]) == ("raw", None)
    assert "raw_at_temperature" in row["flags"]
    assert row_of(asked(records("sglang_generate.jsonl")[0], temperature=0))["flags"] == ["greedy"]


def test_ids_that_differ_from_those_of_the_log_probs_cost_the_log_probs():
    record = logged()[0]
    record["response"]["output_ids"][3] = 9
    row = row_of(record)
    assert (row["response_ids"][3], row["behavior_logprobs"], row["flags"]) == (9, None, ["logprob_length"])


def test_a_piece_of_a_stream_is_no_response():
    record = logged()[0]
    record["response"]["meta_info"]["finish_reason"] = None
    [reject] = rejects_of(lines(record))
    assert (reject.reason, reject.detail[:24]) == ("bad_record", "a piece of a stream, not")


def test_tgi_gives_every_sequence_of_best_of_with_the_ids_of_its_prompt():
    rows = rows_of((CASES / "tgi_generate_details.jsonl").read_bytes())
    assert [(row["source_row"], row["response"], row["finish_reason"]) for row in rows] == [
        (1, "Seven crates of 6 make 42 jars.", "stop"),
        (1, "7 plus 6 gives 13 jars.", "length"),
        (2, "An Allen key.", "stop"),
        (2, "A spoon.", "stop"),
    ]
    assert [row["prompt_ids"] for row in rows] == [[1, 5475, 7157]] * 2 + [[1, 1536, 5865]] * 2
    assert rows[0]["group_id"] == rows[1]["group_id"] != rows[2]["group_id"] == rows[3]["group_id"]
    assert rows[0]["response_ids"] == [17040, 13359, 11999, 16572, 5347, 9805, 19715, 2]
    assert rows[3]["response_ids"] == [5475, 20244, 2]
    assert rows[3]["behavior_logprobs"] == NEAR([-0.076574, -0.683131, -0.765098])
    assert [row["logprob_kind"] for row in rows] == ["processed"] * 4
    assert [json.loads(row["extra"])["seed"] for row in rows] == [5, 6, 5, 6]
    assert json.loads(rows[0]["extra"])["finish_reason"] == "eos_token"
    assert [(row["temperature"], row["policy_version"], row["sampled_at"]) for row in rows] == [
        (None,) * 3
    ] * 4
    [reject] = rejects_of((CASES / "tgi_generate_details.jsonl").read_bytes())
    assert (reject.row, reject.reason) == (3, "no_prompt")


def test_tgi_requests_name_prompt_and_parameters():
    record = records("tgi_generate_details.jsonl")[1]
    request = {"inputs": "Name one tool.", "parameters": {"temperature": 0.8, "top_p": 0.95, "best_of": 2}}
    for row in rows_of(lines({"request": request, "response": record})):
        assert (row["prompt"], row["temperature"], row["top_p"]) == ("Name one tool.", NEAR(0.8), NEAR(0.95))


def alone():
    details = dict(records("tgi_generate_details.jsonl")[1]["details"])
    del details["best_of_sequences"]
    return details


def test_a_sequence_without_a_seed_was_not_sampled():
    details = alone()
    row = row_of(
        {"inputs": "Name one tool.", "generated_text": "An Allen key.", "details": {**details, "seed": None}}
    )
    assert (row["prompt"], row["temperature"], row["flags"]) == ("Name one tool.", 0.0, ["greedy"])


def test_a_full_text_of_tgi_is_cut_behind_its_prompt():
    details = alone()
    request = {"inputs": "Name one tool. ", "parameters": {"return_full_text": True}}
    text = "Name one tool. An Allen key."
    row = row_of({"request": request, "response": {"generated_text": text, "details": details}})
    assert (row["response"], row["behavior_logprob"]) == ("An Allen key.", NEAR(-2.552197))


@pytest.mark.parametrize("name", ["sglang", "tgi"])
def test_collecting_responses_of_an_engine_again_adds_nothing(tmp_path, name):
    log = tmp_path / "log.jsonl"
    log.write_bytes(
        lines(*logged()) if name == "sglang" else (CASES / "tgi_generate_details.jsonl").read_bytes()
    )
    assert collected(tmp_path, log).total.kept == 4
    again = collected(tmp_path, log).total
    assert (again.kept, again.duplicate) == (0, 4)
    assert len(rollouts(tmp_path)) == 4
