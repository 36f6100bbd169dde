import json
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_tools.collecting.reasons import Refused
from data_tools.logs.jsontext import canonical, dump, parse


def refused(line):
    with pytest.raises(Refused) as error:
        parse(line, Counter())
    return error.value


def test_literals_that_json_lacks_are_read():
    value = parse(b'{"a": [NaN, Infinity, -Infinity, 1e400]}', Counter())["a"]
    assert math.isnan(value[0])
    assert value[1:] == [math.inf, -math.inf, math.inf]


def test_both_parsers_read_large_integers_alike():
    digits = b"123456789012345678901234567890"
    fast, tolerant = (
        parse(b'{"a": %b}' % digits, Counter()),
        parse(b'{"b": NaN, "a": %b}' % digits, Counter()),
    )
    assert fast["a"] == tolerant["a"] == float(digits)
    assert type(fast["a"]) is type(tolerant["a"]) is float


def test_half_a_surrogate_pair_is_escaped_and_counted():
    notes = Counter()
    assert parse(b'{"a": ["x\\ud800y"]}', notes) == {"a": ["x\\ud800y"]}
    assert notes == {"lone_surrogate": 1}


@pytest.mark.parametrize(
    ("line", "reason", "detail"),
    [
        (b'{"a": "q1', "torn_line", "breaks off at column 9"),
        (b'{"a": 1, "b', "torn_line", "breaks off at column 11"),
        (b'{"a": [1, 2', "torn_line", "breaks off"),
        (b'{"a": tru', "torn_line", "breaks off"),
        (b'{"a": [{"ro{"a": 2}', "torn_line", "another record begins at column 12"),
        (b'{"a": 1}{"a": 2}', "torn_line", "another record begins at column 9"),
        (b'{"a": 1} trailing words here', "torn_line", "more text behind the record at column 10"),
        (b'{"a": x, "b": "and more of this kind"}', "not_json", "column 7"),
        (b"hello world", "not_json", "column 1"),
        (b'{"a": "\xff"}', "not_json", "not UTF-8 text at byte 8"),
        (b'{"a": "\x00"}', "torn_line", "breaks off"),
        (b"[" * 5000 + b"]" * 5000, "too_deep", "nested"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(line, reason, detail):
    error = refused(line)
    assert error.reason == reason
    assert detail in error.detail


def test_nan_is_written_as_null_and_other_values_of_tables_as_text():
    assert dump({"a": math.nan, "b": b"x", 3: None}) == '{"a":null,"b":"x","3":null}'


def test_values_too_deep_to_write_are_refused():
    value = []
    for _ in range(400):
        value = [value]
    for write in (dump, canonical):
        with pytest.raises(Refused, match="too_deep"):
            write(value)


def test_canonical_text_does_not_depend_on_the_order_of_keys():
    assert canonical({"b": 1, "a": {"d": 2, "c": 3}}) == '{"a":{"c":3,"d":2},"b":1}'


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), JSON))
def test_the_tolerant_parser_agrees_with_the_fast_one(record):
    text = json.dumps(record)
    with_nan = text[:-1] + (", " if record else "") + '"\\u0000nan": NaN}'
    tolerant = parse(with_nan.encode(), Counter())
    tolerant.pop("\x00nan")
    expected = {key: value for key, value in parse(text.encode(), Counter()).items() if key != "\x00nan"}
    assert repr(tolerant) == repr(expected)
