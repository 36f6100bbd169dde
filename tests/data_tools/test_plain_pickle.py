"""Plain values come out of a pickle, and nothing else does; the bytes are as Python's pickle writes them."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_tools.collecting.reasons import Refused
from data_tools.logs import plain_pickle
from data_tools.logs.plain_pickle import plain


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"\x80\x05N.", None),
        (b"\x80\x02\x88.", True),
        (b"\x80\x04K\x07.", 7),
        (b"\x80\x04\x95\x04\x00\x00\x00\x00\x00\x00\x00M\x00\x01.", 256),
        (b"\x80\x04\x95\x06\x00\x00\x00\x00\x00\x00\x00J\xff\xff\xff\xff.", -1),
        (b"\x80\x04\x95\x08\x00\x00\x00\x00\x00\x00\x00\x8a\x05\x00\x00\x00\x00\x01.", 2**32),
        (b"\x80\x04\x95\n\x00\x00\x00\x00\x00\x00\x00G\xbf\xe0\x00\x00\x00\x00\x00\x00.", -0.5),
        (b"\x80\x02X\x03\x00\x00\x00\xc3\xa9tq\x00.", "ét"),
        (b"\x80\x04\x95\x06\x00\x00\x00\x00\x00\x00\x00C\x02\x00\xff\x94.", b"\x00\xff"),
        (b"\x80\x02]q\x00(K\x01K\x02K\x03K\x04\x87q\x01e.", [1, (2, 3, 4)]),
        (b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00K\x01\x85\x94.", (1,)),
        (b"\x80\x04)\x94.", ()),
        (
            b"\x80\x02}q\x00(X\x01\x00\x00\x00aq\x01]q\x02h\x01aX\x01\x00\x00\x00bq\x03h\x03u.",
            {"a": ["a"], "b": "b"},
        ),
        (b"\x80\x02}q\x00X\x01\x00\x00\x00aq\x01(K\x01K\x02K\x03K\x04tq\x02s.", {"a": (1, 2, 3, 4)}),
    ],
)
def test_plain_values_are_read(data, value):
    read = plain(data)
    assert (read, type(read)) == (value, type(value))


HOSTILE = {
    "a call by name": b"\x80\x02cos\nsystem\nq\x00X\x04\x00\x00\x00trueq\x01\x85q\x02Rq\x03.",
    "a call by a name on the stack": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",
    "an instance": b"\x80\x02(X\x04\x00\x00\x00trueios\nsystem\n.",
    "an object": b"\x80\x02(cos\nsystem\nX\x04\x00\x00\x00trueo.",
    "a new object": b"\x80\x02ccollections\nOrderedDict\n)\x81.",
    "a state": b"\x80\x02}}b.",
    "an extension": b"\x80\x02\x82\x01.",
    "a persistent id": b"\x80\x02Pfile\n.",
    "a persistent id on the stack": b"\x80\x02K\x01Q.",
    "a set": b"\x80\x04\x8f.",
    "a buffer": b"\x80\x05\x97.",
    "protocol 0": b"cos\nsystem\n(S'true'\ntR.",
    "a list in itself": b"\x80\x02]q\x00h\x00a.",
    "a huge integer": b"\x80\x02\x8b\xff\xff\xff\x7f\x01.",
    "a size beyond the data": b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7fab.",
    "a key that is a tuple": b"\x80\x02}))s.",
    "no end": b"\x80\x02K\x01",
    "nothing on the stack": b"\x80\x02.",
    "two values": b"\x80\x02K\x01K\x02.",
    "a mark for a value": b"\x80\x02(.",
    "an odd number of fields": b"\x80\x02}(K\x01u.",
    "an unknown memory": b"\x80\x02h\x07.",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_whatever_is_no_plain_value_is_refused(what):
    with pytest.raises(Refused) as refused:
        plain(HOSTILE[what])
    assert refused.value.reason == "pickle_refused"


def test_a_list_repeated_over_and_over_is_refused_before_it_is_written_out():
    level = b"]q\x01(" + b"h\x00" * 10 + b"eq\x00"
    with pytest.raises(Refused, match="more values"):
        plain(b"\x80\x02(]q\x00" + level * 30 + b"t.")
    text = b"X\x00\x01\x00\x00" + b"a" * 256 + b"q\x00"
    with pytest.raises(Refused):
        plain(b"\x80\x02]q\x01(" + text + b"h\x00" * (plain_pickle.MAX_ITEMS + 1) + b"e.")


def test_a_memory_of_any_number_takes_no_room():
    assert plain(b"\x80\x02K\x01r\xff\xff\xff\xff.") == 1


@given(st.lists(st.sampled_from([bytes([code]) for code in plain_pickle._STEPS] + [b"\x00", b"\x01"])))
def test_no_sequence_of_instructions_does_anything_but_give_a_value_or_a_refusal(steps):
    with suppress(Refused):
        plain(b"\x80\x02" + b"".join(steps) + b".")
