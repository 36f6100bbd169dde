import json

import orjson
import pytest
import simdjson
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data_tools.collecting.columns import number_fields
from data_tools.logs.lines import LineBlock
from data_tools.logs.packed import Numbers, packed_record, unpacked
from data_tools.logs.records import json_block
from tests.data_tools.logged import rows_of

KINDS = number_fields()

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
lists = (
    st.lists(st.integers(-(2**70), 2**70), max_size=5)
    | st.lists(st.floats() | st.integers(-3, 3) | st.none() | st.booleans(), max_size=5)
    | st.lists(json_values, max_size=4)
)
names = st.sampled_from(["response_ids", "loss_mask", "logprobs", "behavior_logprobs", "prompt", "[", "x"])
objects = st.dictionaries(names, lists | json_values, max_size=5)


def packed(line):
    return packed_record(simdjson.Parser(), line, KINDS)


def as_packed(expected, record):
    """What orjson found, with the items of packed log-probs as the nearest floats."""
    return {
        name: [float(item) for item in value]
        if type(packed := record.get(name)) is Numbers and packed.kind == "d"
        else value
        for name, value in expected.items()
    }


@st.composite
def damaged_lines(draw):
    """A line of JSON, at most one of its bytes taken out, doubled or changed."""
    text = json.dumps(draw(objects), ensure_ascii=draw(st.booleans()))
    line = text.encode("utf-8", "surrogatepass")
    at = draw(st.integers(0, len(line)))
    put = draw(
        st.sampled_from([b"", b",", b"[", b"]", b'"', b"\\", b"\xff", b"\x00", b"0", b"-", b" ", b"}"])
    )
    return draw(st.sampled_from([line, line[:at] + put + line[at:], line[:at] + put + line[at + 1 :]]))


@settings(deadline=None, max_examples=200)
@given(damaged_lines())
@example(b'{"response_ids":[[1],2]}')
@example(b'{"response_ids":[[1,2],[]],"prompt":"["}')
@example(b'{"prompt":"\\u005b","response_ids":[[1],2]}')
@example(b'{"response_ids":[1],"x":{"response_ids":[[2],3]}}')
@example(b'{"response_ids":[1],"response_ids":[2]}')
@example(b'{"x":{"response_ids":[1]},"response\\u005fids":[[1],2]}')
@example(b'{"x":"response_ids","logprobs":[-1],"response\\u005fids":[[1],2]}')
@example(b'\xef\xbb\xbf{"response_ids":[1]}')
@example(b'{"logprobs":[-0,-0.0,1e-400,18446744073709551615]}')
def test_a_packed_record_holds_what_the_other_parser_finds(line):
    record = packed(line)
    if record is not None:
        expected = as_packed(orjson.loads(line), record)
        found = {name: unpacked(value) for name, value in record.items()}
        assert list(found) == list(expected)
        assert found == expected
        assert len(json.loads(line, object_pairs_hook=list)) == len(record), "no key stands there twice"


@settings(deadline=None)
@given(st.lists(damaged_lines(), max_size=6))
def test_packed_or_not_a_block_has_the_same_records_and_rejects(lines):
    block = LineBlock([line.replace(b"\n", b"") for line in lines])
    plain, fast = json_block(block), json_block(block, KINDS)
    assert (fast.rows, fast.contents, fast.rejects, fast.input_rows, fast.notes) == (
        (plain.rows, plain.contents, plain.rejects, plain.input_rows, plain.notes)
    )
    for seen, expected in zip(fast.records, plain.records, strict=True):
        if isinstance(seen, dict):
            found = {name: unpacked(value) for name, value in seen.items()}
            assert repr(found) == repr(as_packed(expected, seen))
        else:
            assert repr(seen) == repr(expected)


def test_ordinary_rows_are_packed_so_that_collect_is_fast():
    line = (
        b'{"prompt":"a [b] c","response_ids":[5,6],"logprobs":[-1.5,0],"loss_mask":[1,0],"extra":{"a":[1]}}'
    )
    record = packed(line)
    assert {name for name, value in record.items() if type(value) is Numbers} == {
        "response_ids",
        "logprobs",
        "loss_mask",
    }
    assert record["extra"] == {"a": [1]}


@pytest.mark.parametrize(
    "odd",
    [
        b'{"prompt":"a","response":"b","response_ids":[1,2],"logprobs":[-1,null]}',
        b'{"prompt":"a","response":"b","response_ids":[1,2]}',
        b'{"prompt":"a","response":"b","response_ids":null,"logprobs":null}',
        b'{"prompt":"a","response":"b","token_ids":[3,4],"response_ids":[1,2],"logprobs":[-1,-2]}',
        b'{"prompt":"a","response":"b","response_ids":[1,true],"logprobs":[-1,-2]}',
        b'{"prompt":"a","response":"b","response_ids":[1,2],"response_ids":[7,8],"logprobs":[-1,-2]}',
    ],
)
def test_rows_beside_an_odd_one_are_the_same(odd):
    good = b'{"prompt":"a","response":"b","response_ids":[1,2],"logprobs":[-1.5,-0.25]}'
    alone = {row["response_id"]: row for data in (good, odd) for row in rows_of(data + b"\n")}
    for data in (good + b"\n" + odd, odd + b"\n" + good):
        for row in rows_of(data):
            for name in ("response_ids", "behavior_logprobs", "extra", "flags"):
                values = [other[name] for other in alone.values()]
                assert row[name] in values
