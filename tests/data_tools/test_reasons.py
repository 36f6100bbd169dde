import re
from pathlib import Path

import pytest

import data_tools
from data_tools.collecting.reasons import FLAGS, NOTES, REASONS, Notes, raw_text

SOURCES = [p for p in Path(data_tools.__file__).parent.rglob("*.py") if p.name != "reasons.py"]


@pytest.mark.parametrize("code", [*REASONS, *NOTES, *FLAGS])
def test_every_code_is_used(code):
    quoted = re.compile(rf"[\"']{code}[\"']")
    assert any(quoted.search(path.read_text(encoding="utf-8")) for path in SOURCES)


def test_a_code_has_one_meaning():
    assert not REASONS.keys() & NOTES.keys()
    # With text, bad ids are a flag; what a log's writer redacted is gone, what we redact is replaced.
    assert REASONS.keys() & FLAGS.keys() == {"bad_ids", "redacted"}
    assert not NOTES.keys() & FLAGS.keys()


def test_notes_count_all_and_remember_the_first_rows():
    notes = Notes()
    notes.add("a", [3, 4])
    notes.add("a", [None, 5, 6])
    notes.add("b", [], 7)
    other = Notes()
    other.merge(notes)
    other.merge(notes)
    assert other.counts == {"a": 10, "b": 14}
    assert notes.rows["a"] == [3, 4, 5]
    assert other.rows["a"] == [3, 4, 5]


def test_the_beginning_of_a_reject_is_readable_whatever_its_bytes_are():
    assert raw_text(b"a\xff\x00b") == "a\\xff\\x00b"
    assert raw_text("a\ud800") == "a\\ud800"
    assert len(raw_text(b"x" * 10**6)) == 2000
