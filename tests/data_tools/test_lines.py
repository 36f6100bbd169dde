from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_tools.errors import DataError
from data_tools.logs import lines
from data_tools.logs.lines import Span, line_blocks, spans
from data_tools.logs.log import TornArchive


def all_lines(data, **options):
    return [
        (block.first + at, line)
        for block in line_blocks(data, **options)
        for at, line in enumerate(block.lines)
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_lines_and_numbers_do_not_depend_on_how_bytes_arrive(size):
    data = b"a\n\nbc\r\nd"
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    assert all_lines(pieces, block_bytes=1) == [(1, b"a"), (2, b""), (3, b"bc\r"), (4, b"d")]


def test_only_0x0a_ends_a_line():
    text = "x\u0085y\u2028z\u2029\x0b\x0c\x1c\rend".encode()
    assert all_lines([text + b"\n"]) == [(1, text), (2, b"")]


def test_byte_order_mark_at_the_start_is_no_part_of_the_first_line():
    assert all_lines([b"\xef\xbb", b"\xbfa\n\xef\xbb\xbfb"]) == [(1, b"a"), (2, b"\xef\xbb\xbfb")]


def test_line_over_the_limit_is_skipped_and_named_with_its_size():
    blocks = list(line_blocks([b"ab\n", b"c" * 6, b"c" * 6, b"\nde\n"], max_line_bytes=10))
    assert [line for block in blocks for line in block.lines] == [b"ab", b"", b"de", b""]
    assert {row: size for block in blocks for row, size in block.oversized.items()} == {2: 12}


def test_torn_archive_gives_what_came_before_and_says_so():
    def bytes_until_the_break():
        yield b"a\nb\nc"
        raise TornArchive("ends early")

    [block] = line_blocks(bytes_until_the_break())
    assert block.lines == [b"a", b"b", b"c"]
    assert block.torn == "ends early"


def test_blocks_stay_small():
    blocks = list(line_blocks((b"x" * 99 + b"\n" for _ in range(1000)), block_bytes=1000))
    assert max(len(block.lines) for block in blocks) <= 11


@given(
    st.lists(st.sampled_from([b"\n", b"a", b"\r", b'{"b": 1}', b"\xef\xbb\xbf", "\u2028".encode()])).map(
        b"".join
    ),
    st.integers(1, 9),
    st.integers(1, 30),
)
def test_lines_read_by_their_place_are_those_read_one_after_another(tmp_path_factory, data, piece, size):
    path = tmp_path_factory.getbasetemp() / "spans"
    path.write_bytes(data)
    places = list(spans(path, block_bytes=size, piece=piece))
    found = [
        (part.first + at, line) for part in map(Span.lines, places) for at, line in enumerate(part.lines)
    ]
    # What stands behind the last 0x0A of a span is the beginning of the next one, never a line of its own.
    assert [pair for pair in found if pair[1]] == [pair for pair in all_lines([data]) if pair[1]]
    assert [(place.begin, place.end) for place in places] == [
        *zip([0, *(place.end for place in places)], [place.end for place in places], strict=False)
    ]
    assert sum(place.end - place.begin for place in places) == len(data)
    assert all(data[place.end - 1 : place.end] == b"\n" for place in places[:-1])


def test_a_line_over_the_limit_is_skipped_in_a_span_too(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 10)
    path = tmp_path / "log"
    path.write_bytes(b"ab\n" + b"c" * 12 + b"\nde\n")
    blocks = [place.lines() for place in spans(path, block_bytes=1, piece=4)]
    assert [line for block in blocks for line in block.lines if line] == [b"ab", b"de"]
    assert {row: size for block in blocks for row, size in block.oversized.items()} == {2: 12}


def test_a_log_that_became_shorter_is_an_error_that_says_so(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"a\nb\n")
    [place] = spans(path)
    with pytest.raises(DataError, match="became shorter") as error:
        replace(place, end=9).lines()
    assert str(path) in error.value.message
