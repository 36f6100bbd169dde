import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_tools.collecting.reasons import Refused
from data_tools.logs.documents import elements
from data_tools.logs.log import TornArchive


def read(data, size=1 << 20):
    return list(elements(data[at : at + size] for at in range(0, len(data), size)))


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("size", [1, 5, 1000])
def test_elements_of_an_array_come_one_by_one_whatever_the_layout(indent, size):
    records = [{"a": 1, "b": [1, {"c": "é]}"}]}, {"a": 2}]
    assert read(json.dumps(records, indent=indent, ensure_ascii=False).encode(), size) == records


def test_indented_records_one_after_another_are_read():
    text = json.dumps({"a": 1}, indent=2) + "\n" + json.dumps({"a": 2}, indent=2) + "\n"
    assert read(text.encode(), 3) == [{"a": 1}, {"a": 2}]


def test_broken_element_is_refused_and_reading_resumes_at_the_next_record():
    found = read(b'[\n{"a": 1},\n{"a": },\n{"a": 3}\n]')
    assert found[0] == {"a": 1}
    assert isinstance(found[1], Refused)
    assert found[2] == {"a": 3}


def test_array_cut_in_the_middle_keeps_its_whole_elements():
    found = read(b'[{"a": 1}, {"a": 2}, {"a": "3')
    assert found[:2] == [{"a": 1}, {"a": 2}]
    assert [item.reason for item in found[2:]] == ["torn_line"]


def test_bare_values_bad_text_and_torn_archives_are_refused():
    def torn():
        yield b'[{"a": 1},'
        raise TornArchive("ends early")

    assert [item.reason for item in read(b'[1, "x"]')] == ["not_an_object", "not_an_object"]
    assert [item.reason for item in read(b'[{"a": "\xff"}]')] == ["not_json"]
    assert [getattr(item, "reason", item) for item in elements(torn())] == [{"a": 1}, "torn_archive"]


RECORDS = st.dictionaries(st.text(), st.integers(-(2**63), 2**63) | st.text() | st.lists(st.booleans()))


@given(st.lists(RECORDS), st.integers(1, 40))
def test_any_array_in_any_pieces_gives_its_elements(records, size):
    text = json.dumps(records, ensure_ascii=False).encode("utf-8", "surrogatepass")
    assert read(text, size) == records
