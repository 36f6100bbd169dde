import gzip
from pathlib import Path

import pytest
import zstandard

from data_tools.logs.log import Log, TornArchive, kind_of
from tests.data_tools.logged import log_of

RECORD = b'{"a": 1}\n{"a": 2}\n'


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b'{"a": 1}\n{"a": 2}\n', "jsonl"),
        (b'{"a": 1}', "jsonl"),
        (b'{"a": 1}\r\n{"a": 2}\r\n', "jsonl"),
        (b'\xef\xbb\xbf{"a": 1}\n', "jsonl"),
        (b'\n\n{"a": 1}\n', "jsonl"),
        (b'{"a": "torn\n{"a": 2}\n', "jsonl"),
        (b'n": 1}\n{"a": 2}\n', "jsonl"),
        (b'[{"a": 1}, {"a": 2}]\n[{"a": 3}]\n', "jsonl"),
        (b'[{"a": 1}, {"a": 2}]\n', "json"),
        (b'[\n  {"a": 1},\n  {"a": 2}\n]\n', "json"),
        (b'[\n{"a": 1},\n{"a": 2}\n]\n', "json"),
        (b'{\n  "a": 1\n}\n', "json"),
        (b'[{"a": 1}, {"a": 2', "json"),
        (b"prompt,response\na,b\n", "csv"),
        (b"prompt\tresponse\na\tb\n", "csv"),
        (b'data: {"choices": []}\n\ndata: [DONE]\n', "sse"),
        (b"PAR1\x15\x04", "parquet"),
        (b"SQLite format 3\x00", "sqlite"),
        ('{"a": 1}'.encode("utf-16"), "utf16"),
        (b"", "empty"),
        (b" \n\n", "empty"),
        (b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR", "binary"),
        (b"just some words\n", "text"),
    ],
)
def test_kind_is_told_by_content(head, kind):
    assert kind_of(head) == kind


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_compression_is_told_by_content_and_several_members_are_read(pack):
    log = log_of(pack(RECORD) + pack(b'{"a": 3}\n'))
    assert b"".join(log.blocks()) == RECORD + b'{"a": 3}\n'
    assert log.kind == "jsonl"


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_torn_archive_raises_behind_its_good_bytes(pack):
    data = b"".join(b'{"a": %d}\n' % (n * n) for n in range(40_000))
    seen = []
    with pytest.raises(TornArchive, match="ends early"):
        seen.extend(log_of(pack(data)[:-20]).blocks())
    assert data.startswith(b"".join(seen))


def test_damaged_archive_raises_what_is_wrong():
    packed = bytearray(gzip.compress(RECORD * 1000))
    packed[15:20] = b"\xff" * 5
    with pytest.raises(TornArchive, match="damaged"):
        list(log_of(bytes(packed)).blocks())


def test_local_file_is_itself_or_an_unpacked_copy_that_goes_away(tmp_path):
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    plain.write_bytes(RECORD)
    packed.write_bytes(gzip.compress(RECORD))
    with Log.at(str(plain)).local_file() as path:
        assert path == str(plain)
    with Log.at(str(packed)).local_file() as path:
        copy = path
        assert Path(path).read_bytes() == RECORD
    assert not Path(copy).exists()
