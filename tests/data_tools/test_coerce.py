import math
from datetime import UTC, datetime

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_tools.collecting.coerce import NO_ID, NO_MASK, coerce
from data_tools.collecting.columns import LOOSE
from data_tools.collecting.fastpath import ARROW, typed
from data_tools.readers.base import Chunk


def one(kind, value, **options):
    made = coerce(kind, [value], **options)
    return made.values[0], dict(made.notes.counts), list(made.lost), [r.reason for r in made.refused.values()]


@pytest.mark.parametrize(
    ("logged", "reward", "notes"),
    [
        (1, 1.0, {}),
        (0.5, 0.5, {}),
        (True, 1.0, {}),
        (False, 0.0, {}),
        ("0.5", 0.5, {"reward_from_text": 1}),
        (" -3e-1 ", -0.3, {"reward_from_text": 1}),
        ("3", 3.0, {"reward_from_text": 1}),
        ("True", 1.0, {"reward_from_text": 1}),
        ("False", 0.0, {"reward_from_text": 1}),
        (None, None, {}),
        ("N/A", None, {"reward_unreadable": 1}),
        ("high", None, {"reward_unreadable": 1}),
        ("", None, {"reward_unreadable": 1}),
        ("1_000", None, {"reward_unreadable": 1}),
        ("np.True_", None, {"reward_unreadable": 1}),
        ("[0.2 0.8]", None, {"reward_unreadable": 1}),
        ("nan", None, {"reward_unreadable": 1}),
        (math.nan, None, {"reward_unreadable": 1}),
        (math.inf, None, {"reward_unreadable": 1}),
        ([0.0, 1.0], None, {"reward_unreadable": 1}),
        ([1.0], None, {"reward_unreadable": 1}),
        ({"score": 0.25}, None, {"reward_unreadable": 1}),
        (10**400, None, {"reward_unreadable": 1}),
    ],
)
def test_a_reward_is_read_only_where_it_can_mean_one_number(logged, reward, notes):
    value, counted, lost, refused = one("reward", logged)
    assert (value, counted, refused) == (reward, notes, [])
    assert bool(lost) == ("reward_unreadable" in notes)


@pytest.mark.parametrize("text", ["1,5", "1,000", "-3,25", "1,2,3"])
def test_a_reward_with_commas_refuses_the_row(text):
    assert one("reward", text) == (None, {}, [], ["bad_reward"])


def test_text_is_no_oddity_where_the_file_has_nothing_else():
    assert one("reward", "0.5", textual=True) == (0.5, {}, [], [])
    assert one("ids", "[1, 2]", textual=True) == ([1, 2], {}, [], [])


@pytest.mark.parametrize(
    ("logged", "ids", "notes"),
    [
        ([1, 2], [1, 2], {}),
        ([1.0, 2.0], [1, 2], {"id_from_float": 1}),
        (["1", "2"], [1, 2], {"id_from_text": 1}),
        ("[1, 2]", [1, 2], {}),
        ([-5, 3_000_000_000], [-5, 3_000_000_000], {}),
        ([1.5, "x", None, True, [1], 2**70], [NO_ID] * 6, {}),
        ([], [], {}),
        ({"a": 1}, None, {"value_unreadable": 1}),
        ("1 2 3", None, {"value_unreadable": 1}),
    ],
)
def test_token_ids(logged, ids, notes):
    assert one("ids", logged)[:2] == (ids, notes)


def test_a_log_prob_that_is_no_number_is_missing_and_never_zero():
    logged = [-0.5, 0, "-0.25", "NaN", None, "x", True, False, [1], "-Infinity"]
    value = one("logprobs", logged)[0]
    assert value[:3] == [-0.5, 0.0, -0.25]
    assert math.isnan(value[3])
    assert value[4:9] == [None] * 5
    assert value[9] == -math.inf


def test_a_mask_keeps_what_is_wrong_about_it_visible():
    assert one("mask", [1, 0, True, False, 1.0])[0] == [1, 0, 1, 0, 1]
    assert one("mask", [1, 2, None, "1", 0.5])[0] == [1, NO_MASK, NO_MASK, NO_MASK, NO_MASK]
    assert one("mask", "110")[0] == [NO_MASK]
    assert one("mask", 1)[0] == [NO_MASK]


NOON = datetime(2026, 1, 5, 12, 0, 0, 250_000, tzinfo=UTC)
MICROSECONDS = int(NOON.timestamp() * 1e6)


@pytest.mark.parametrize(
    "logged",
    [
        MICROSECONDS / 1e6,
        str(MICROSECONDS / 1e6),
        MICROSECONDS // 1000,
        MICROSECONDS,
        MICROSECONDS * 1000,
        "2026-01-05T12:00:00.250Z",
        "2026-01-05T13:00:00.25+01:00",
        "2026-01-05 12:00:00.250000",
        "2026-01-05T12:00:00.250000",
        NOON,
        NOON.replace(tzinfo=None),
    ],
)
def test_times_in_any_unit_and_zone_are_one_moment(logged):
    assert one("time", logged)[0] == MICROSECONDS


@pytest.mark.parametrize("logged", [0, 12.5, -1, 1e30, math.nan, math.inf, "yesterday", "", True, [1], {}])
def test_what_is_no_time_is_missing_and_counted(logged):
    assert one("time", logged)[:2] == (None, {"time_unreadable": 1})


@pytest.mark.parametrize(
    ("kind", "logged", "value"),
    [
        ("int64", 3, 3),
        ("int64", "2", 2),
        ("int64", 2.0, 2),
        ("int64", "2.0", 2),
        ("int64", 2.5, None),
        ("int64", "w000031", None),
        ("int64", True, None),
        ("int64", 2**63, None),
        ("int32", 2**31, None),
        ("int32", -(2**31), -(2**31)),
        ("float", "0.7", 0.7),
        ("float", True, None),
        ("float", math.nan, None),
        ("key", 3, "3"),
        ("key", 3.0, "3"),
        ("key", {"b": 1, "a": 2}, '{"a":2,"b":1}'),
        ("label", ["a"], None),
        ("label", {"type": "stop"}, None),
        ("text", 42, "42"),
        ("text", ["a"], None),
        ("prompt", [{"role": "user", "content": "x"}], '[{"role":"user","content":"x"}]'),
        ("prompt", ["a"], None),
        ("json", '{"a": 1}', '{"a": 1}'),
        ("json", [{"a": 1}], '[{"a":1}]'),
        ("json", "no json", None),
        ("bool", "true", True),
        ("bool", 0, False),
        ("bool", 2, None),
        ("texts", ["a", "b"], ["a", "b"]),
    ],
)
def test_other_kinds(kind, logged, value):
    read, _, lost, refused = one(kind, logged)
    assert read == value
    assert bool(lost) == (value is None)
    assert not refused


NUMBERS = st.integers(-(2**66), 2**66) | st.floats()
SCALARS = (
    st.none() | st.booleans() | NUMBERS | st.text(max_size=5) | st.sampled_from(["1", "1.0", "2026-01-05"])
)
VALUES = SCALARS | st.lists(SCALARS, max_size=4) | st.dictionaries(st.text(max_size=2), SCALARS, max_size=2)
COLUMNS = st.sampled_from(sorted(LOOSE))


@given(COLUMNS, st.lists(VALUES, min_size=1, max_size=5))
def test_a_column_read_at_once_equals_one_read_value_by_value(column, values):
    def read(tolerant):
        chunk = Chunk({column: values}, range(len(values)), [b"x"] * len(values))
        made = typed(chunk, tolerant=tolerant)
        refused = {row: why.args for row, why in made.refused.items()}
        return made.columns[column].to_pylist(), repr(made.extra), made.notes, refused

    assert repr(read(False)) == repr(read(True))


HOMOGENEOUS = st.sampled_from(
    [
        st.lists(st.integers(-5, 2**33), max_size=3),
        st.lists(st.booleans(), max_size=3),
        st.lists(st.floats() | st.sampled_from([0.0, 1.0]), max_size=3),
        st.lists(st.floats(max_value=1) | st.none() | st.booleans(), max_size=3),
        st.floats(),
        st.integers(-(2**31) - 5, 2**40),
        st.booleans(),
        st.text(max_size=3),
    ]
).flatmap(lambda values: st.lists(st.none() | values, min_size=1, max_size=5))


@given(COLUMNS, HOMOGENEOUS)
def test_a_clean_column_read_at_once_equals_one_read_value_by_value(column, values):
    test_a_column_read_at_once_equals_one_read_value_by_value.hypothesis.inner_test(column, values)


@given(COLUMNS, HOMOGENEOUS)
def test_an_arrow_column_equals_the_same_values_in_a_list(column, values):
    try:
        array = pa.array(values)
    except (pa.ArrowException, OverflowError):
        return

    def read(given, tolerant):
        made = typed(Chunk({column: given}, range(len(values)), [b"x"] * len(values)), tolerant=tolerant)
        return repr((made.columns[column].to_pylist(), made.extra, made.notes, list(made.refused)))

    assert read(array, False) == read(array.to_pylist(), True)
    assert (
        typed(Chunk({column: array}, range(len(values)), [b"x"] * len(values))).columns[column].type
        == ARROW[LOOSE[column]]
    )
