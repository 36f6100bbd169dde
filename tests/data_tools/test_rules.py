import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_tools.collecting.ragged import Ragged
from tests.data_tools.logged import draw, lines, reason_of, rejects_of, row_of, rows_of


def test_usable_log_probs_have_a_sum():
    row = row_of(draw(behavior_logprobs=[-0.5, -0.25], temperature=1.0))
    assert row["behavior_logprob"] == -0.75
    assert row["n_tokens"] == 2
    assert row["logprob_kind"] == "unknown"
    assert row["flags"] == []


@pytest.mark.parametrize("missing", [None, math.nan, -math.inf, -9999.0, -10000, "x"])
def test_one_missing_log_prob_makes_the_row_unusable_and_the_others_stay(missing):
    row = row_of(draw(behavior_logprobs=[missing, -0.25]))
    assert row["behavior_logprobs"] == [None, -0.25]
    assert row["behavior_logprob"] is None
    assert row["flags"] == ["missing_logprobs"]


def test_zero_is_a_log_prob():
    assert row_of(draw(behavior_logprobs=[-0.5, 0.0]))["behavior_logprob"] == -0.5


@pytest.mark.parametrize("positive", [0.5, math.inf, "0.5"])
def test_a_positive_log_prob_is_missing_and_flagged(positive):
    row = row_of(draw(behavior_logprobs=[positive, -0.25]))
    assert row["behavior_logprobs"] == [None, -0.25]
    assert row["behavior_logprob"] is None
    assert row["flags"] == ["positive_logprobs"]


def test_rounding_above_zero_is_zero():
    row = row_of(draw(behavior_logprobs=[0.0005, -0.25]))
    assert row["behavior_logprobs"] == [0.0, -0.25]
    assert row["behavior_logprob"] == -0.25


@pytest.mark.parametrize("logprobs", [[-0.5], [-0.5, -0.25, -0.125]])
def test_log_probs_of_another_length_are_left_out(logprobs):
    row = row_of(draw(behavior_logprobs=logprobs))
    assert row["behavior_logprobs"] is None
    assert row["behavior_logprob"] is None
    assert row["flags"] == ["logprob_length"]
    assert row["reward"] == 1.0


def test_a_surplus_at_the_tail_is_cut_where_the_token_texts_say_so():
    tail = draw(
        response="one two",
        behavior_logprobs=[-0.5, -0.25, -4.0],
        logprob_tokens=["one", " two", "<|im_end|>"],
    )
    row = row_of(tail)
    assert row["behavior_logprobs"] == [-0.5, -0.25]
    assert row["flags"] == ["logprob_tail_cut"]
    front = tail | {"logprob_tokens": ["Ġ", "one", " two"]}
    assert row_of(front)["behavior_logprobs"] is None
    assert row_of(front)["flags"] == ["logprob_length"]


def test_log_probs_without_ids_are_kept_but_not_usable():
    row = row_of(draw(response_ids=...))
    assert row["behavior_logprobs"] == [-0.5, -0.25]
    assert row["n_tokens"] is None
    assert row["behavior_logprob"] is None
    assert row["flags"] == ["logprobs_without_ids"]


def test_ids_made_from_text_are_left_out_with_their_log_probs():
    row = row_of(draw(ids_source="retokenized", prompt_ids=[1, 5]))
    assert row["response_ids"] is row["prompt_ids"] is row["behavior_logprobs"] is None
    assert row["flags"] == ["retokenised"]
    assert row_of(draw(ids_source="Engine"))["behavior_logprob"] == -0.75


@pytest.mark.parametrize("ids", [[-1, 2], [7, 2**31], [7, 2**70], [7.5, 2], ["x", 2], [None, 2], [True, 2]])
def test_bad_ids_are_left_out_where_there_is_text_and_refused_where_there_is_none(ids):
    row = row_of(draw(response_ids=ids))
    assert row["response_ids"] is row["behavior_logprobs"] is None
    assert row["flags"] == ["bad_ids"]
    assert reason_of(draw(response_ids=ids, response=...)) == "bad_ids"
    row = row_of(draw(prompt_ids=ids))
    assert row["prompt_ids"] is None
    assert row["behavior_logprob"] == -0.75
    assert row["flags"] == ["bad_prompt_ids"]


def test_the_largest_id_is_an_id():
    assert row_of(draw(response_ids=[0, 2**31 - 1]))["response_ids"] == [0, 2**31 - 1]


def test_a_mask_selects_the_log_probs_that_count():
    row = row_of(draw(loss_mask=[1, 0], behavior_logprobs=[-0.5, None]))
    assert row["loss_mask"] == [1, 0]
    assert row["behavior_logprob"] == -0.5


def test_a_mask_over_prompt_and_response_is_cut_to_the_response():
    row = row_of(draw(prompt_ids=[1, 5, 6], loss_mask=[0, 0, 0, 1, 0]))
    assert row["loss_mask"] == [1, 0]
    assert reason_of(draw(prompt_ids=[1, 5, 6], loss_mask=[0, 1, 0, 1, 0])) == "bad_mask"


@pytest.mark.parametrize("mask", [[1], [1, 1, 1], [], [1, 2], [1, None], [1, 0.5], "11", 1])
def test_a_mask_that_does_not_fit_refuses_the_row(mask):
    assert reason_of(draw(loss_mask=mask)) == "bad_mask"


def test_a_mask_without_ids_is_left_out_only_where_it_says_nothing():
    no_ids = draw(response_ids=..., behavior_logprobs=...)
    row = row_of(no_ids | {"loss_mask": [1, 1, 1]})
    assert row["loss_mask"] is None
    assert row["flags"] == ["mask_without_ids"]
    assert reason_of(no_ids | {"loss_mask": [1, 0, 1]}) == "bad_mask"


def test_what_log_probs_mean_depends_on_kind_and_temperature():
    def usable(**values):
        row = row_of(draw(**values))
        return row["logprob_kind"], row["behavior_logprob"] is not None, row["flags"]

    assert usable(temperature=0.6, logprob_kind="processed") == ("processed", True, [])
    assert usable(temperature=0.6, logprobs_mode="processed_logprobs") == ("processed", True, [])
    assert usable(temperature=0.6, logprobs_mode="raw_logprobs") == ("raw", False, ["raw_at_temperature"])
    assert usable(temperature=0.6) == ("unknown", False, ["raw_at_temperature"])
    assert usable(temperature=1, logprob_kind="raw") == ("raw", True, [])
    assert usable(temperature=0, logprob_kind="processed") == ("processed", False, ["greedy"])
    assert usable(temperature=0.6, logprob_kind="odd") == ("unknown", False, ["raw_at_temperature"])
    row = row_of(draw(temperature=0.6))
    assert row["behavior_logprobs"] == [-0.5, -0.25]


@pytest.mark.parametrize(
    ("logged", "reason", "flags"),
    [
        ({"finish_reason": "stop"}, "stop", []),
        ({"finish_reason": "eos_token"}, "stop", []),
        ({"finish_reason": "length"}, "length", ["truncated"]),
        ({"stop_reason": "max_tokens"}, "length", ["truncated"]),
        ({"finish_reason": "content_filter"}, "filtered", []),
        ({"finish_reason": "tool_calls"}, "tool_calls", []),
        ({"is_truncated": True}, "length", ["truncated"]),
        ({"truncated": True, "finish_reason": "stop"}, "stop", ["truncated"]),
        ({"truncated": False}, None, []),
        ({}, None, []),
    ],
)
def test_finish_reasons_have_one_spelling(logged, reason, flags):
    row = row_of(draw(**logged))
    assert (row["finish_reason"], row["flags"]) == (reason, flags)


def test_a_row_needs_a_prompt_and_a_response_in_some_form():
    assert reason_of(draw(prompt=None)) == "no_prompt"
    assert reason_of(draw(prompt="")) == "no_prompt"
    assert reason_of(draw(response=None, response_ids=None)) == "no_response"
    assert row_of(draw(prompt=None, prompt_ids=[1, 5]))["prompt_ids"] == [1, 5]
    assert row_of(draw(response=None))["response_ids"] == [7, 2]
    assert row_of(draw(response="", response_ids=[]))["n_tokens"] == 0


def test_rows_without_a_prompt_text_are_told_apart_by_their_prompt_ids():
    rows = rows_of(lines(*(draw(prompt=None, prompt_ids=ids) for ids in ([1, 5], [1, 5], [1, 6]))))
    hashes = [row["prompt_hash"] for row in rows]
    assert hashes[0] == hashes[1] != hashes[2]


def test_the_first_token_twice_is_kept_and_flagged():
    row = row_of(draw(prompt_ids=[1, 1, 40]))
    assert row["prompt_ids"] == [1, 1, 40]
    assert row["flags"] == ["repeated_first_token"]
    assert row_of(draw(prompt_ids=[1]))["flags"] == []


def test_empty_keys_join_nothing():
    first, second = rows_of(lines(draw(group=""), draw(group="", prompt="2+2=")))
    assert first["group_id"] == first["prompt_hash"]
    assert first["group_id"] != second["group_id"]


def test_own_flags_stay_and_are_not_repeated():
    assert row_of(draw(flags=["mine", "greedy"], temperature=0))["flags"] == ["mine", "greedy"]


def test_a_refused_row_says_what_it_was():
    [reject] = rejects_of(lines(draw(), draw(reward="1,5", tier="gold")))
    assert (reject.row, reject.reason) == (2, "bad_reward")
    assert '"tier":"gold"' in reject.raw


RAGGED = st.lists(st.none() | st.lists(st.none() | st.integers(-3, 3), max_size=4), min_size=1, max_size=6)


@given(RAGGED, st.data())
def test_ragged_arithmetic_equals_plain_lists(lists, data):
    count = len(lists)
    ragged = Ragged.of(pa.array(lists, pa.list_(pa.int64())), count)
    assert ragged.arrow(pa.int32()).to_pylist() == lists
    negative = ~ragged.absent & (ragged.items < 0)
    assert ragged.any(negative).tolist() == [any(v is not None and v < 0 for v in row or []) for row in lists]
    sums = ragged.sum(np.where(ragged.absent, 0, ragged.items).astype(float))
    assert sums.tolist() == [sum(v or 0 for v in row or []) for row in lists]
    kept = np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    only = [row if keep else None for row, keep in zip(lists, kept, strict=True)]
    assert ragged.only(kept).arrow(pa.int32()).to_pylist() == only
    bounds = st.lists(st.integers(0, 5), min_size=count, max_size=count)
    first, last = np.array(data.draw(bounds)), np.array(data.draw(bounds))
    cut = [None if row is None else row[a:b] for row, a, b in zip(lists, first, last, strict=True)]
    assert ragged.cut(first, last).arrow(pa.int32()).to_pylist() == cut
