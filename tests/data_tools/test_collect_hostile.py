import gzip
import io
import json
import os
import sys
import threading
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_tools.errors import DataError
from tests.data_tools.logged import collected, draw, lines, rollouts

GOOD = lines(draw(), draw(response="3"))
PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + bytes(range(256))


def write(tmp_path, data, name="log"):
    path = tmp_path / name
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (PNG, "is not a log"),
        ('{"prompt": "a"}'.encode("utf-16"), "is UTF-16 text"),
        (b"words without any structure\n", "is not a log"),
        (b"SQLite format 3\x00" + bytes(100), "is not a log"),
        (b"PAR1", "damaged Parquet"),
        (b'{"alpha": 1}\n', "no known format has the fields alpha"),
    ],
)
def test_a_file_that_is_no_log_is_one_clear_error(tmp_path, data, message):
    with pytest.raises(DataError, match=message) as error:
        collected(tmp_path, write(tmp_path, data))
    assert error.value.hint
    assert "log" in error.value.message.split(":")[0] or "log" in error.value.message


def test_names_that_lead_nowhere_are_one_clear_error(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    (tmp_path / "broken").symlink_to(tmp_path / "gone")
    (tmp_path / "empty").mkdir()
    (tmp_path / "images").mkdir()
    write(tmp_path / "images", PNG)
    for name, message in {
        "nowhere.jsonl": "does not exist",
        "*.nothing": "no file matches",
        "a": "Too many levels of symbolic links",
        "broken": "a broken link",
        "empty": "holds no files",
        "images": "no log was found among 1 files",
    }.items():
        with pytest.raises(DataError, match=message):
            collected(tmp_path, tmp_path / name)
    with pytest.raises(DataError, match="no log was named"):
        collected(tmp_path)
    assert not (tmp_path / "ds").exists()


def test_an_unreadable_file_is_one_clear_error(tmp_path, monkeypatch):
    log = write(tmp_path, GOOD)
    log.chmod(0)
    if os.access(log, os.R_OK):  # the superuser reads everything
        pytest.skip("permissions do not bind this user")
    with pytest.raises(DataError, match="Permission denied"):
        collected(tmp_path, log)


def test_empty_files_are_named_and_nothing_is_written(tmp_path):
    report = collected(tmp_path, write(tmp_path, b""), write(tmp_path, gzip.compress(b"\n\n"), "packed"))
    assert list(report.skipped.values()) == ["the file is empty"] * 2
    assert report.batch is None


def test_tables_without_rows_are_named_as_empty_files_are(tmp_path):
    table = pa.table({"prompt": pa.array([], pa.string()), "response": pa.array([], pa.string())})
    pq.write_table(table, tmp_path / "none.parquet")
    report = collected(tmp_path, write(tmp_path, b"prompt,response\n"), tmp_path / "none.parquet")
    assert list(report.skipped.values()) == ["the table has no rows"] * 2


def test_a_log_of_which_nothing_can_be_read_says_why(tmp_path):
    with pytest.raises(DataError, match=r"row 2: not UTF-8 text\nis it UTF-8"):
        collected(tmp_path, write(tmp_path, "prompt,response\nété,ja\n".encode("latin-1")))
    with pytest.raises(DataError, match="row 2: 1 values for 2 columns"):
        collected(tmp_path, write(tmp_path, b"prompt,response\nhi\n"))


def test_a_torn_archive_keeps_what_came_before_and_counts_the_rest(tmp_path):
    data = lines(*(draw(response=f"{n * n}") for n in range(3000)))
    report = collected(tmp_path, write(tmp_path, gzip.compress(data)[:-2000]))
    assert report.total.rejected["torn_archive"] == 1
    assert 0 < report.total.kept < 3000
    assert collected(tmp_path, write(tmp_path, gzip.compress(data))).total.duplicate == report.total.kept


def test_torn_archives_of_tables(tmp_path):
    rows = "".join(f"p{n * n},r{n * n}\n" for n in range(3000))
    report = collected(tmp_path, write(tmp_path, gzip.compress(f"prompt,response\n{rows}".encode())[:-2000]))
    assert report.total.rejected["torn_archive"] == 1
    assert 0 < report.total.kept < 3000
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist([draw()] * 100), sink)
    with pytest.raises(DataError, match="the gz stream ends early"):
        collected(tmp_path, write(tmp_path, gzip.compress(sink.getvalue().to_pybytes())[:-20]))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": "a", "response": "\x00"}', "torn_line"),
        (b"\x00\x00\x00", "not_json"),
        (b'{"prompt": "a", "response": "\xff"}', "not_json"),
        (b'{"prompt": "a", "response": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "too_deep"),
        (b'{"prompt": "a", "response": "b", "deep": ' + b"[" * 300 + b"]" * 300 + b"}", "too_deep"),
        (
            b'{"prompt": [{"role": "user", "content": ' + b"[" * 400 + b"]" * 400 + b'}], "response": "b"}',
            "too_deep",
        ),
        (b'{"prompt": "a"}{"prompt": "b"}', "torn_line"),
        (b"{'prompt': 'a'}", "not_json"),
        (b"}{", "not_json"),
    ],
)
def test_a_hostile_line_is_a_counted_reject_between_good_ones(tmp_path, line, reason):
    first, second = GOOD.splitlines(keepends=True)
    report = collected(tmp_path, write(tmp_path, first + line + b"\n" + second))
    assert report.total.rejected == {reason: 1}
    assert report.logs[0].where[reason] == [2]
    assert [row["source_row"] for row in rollouts(tmp_path)] == [1, 3]


def test_numbers_beyond_every_type(tmp_path):
    line = (
        b'{"prompt": "a", "response": "b", "reward": 1e400, "step": 1e30, "temperature": -1e999, "n": 1e400}'
    )
    report = collected(tmp_path, write(tmp_path, GOOD + line))
    row = rollouts(tmp_path)[2]
    assert row["reward"] is row["policy_version"] is row["temperature"] is None
    assert report.total.notes == {"reward_unreadable": 1, "value_unreadable": 2}
    assert json.loads(row["extra"]) == {"n": None, "reward": None, "step": 1e30, "temperature": None}


def test_nul_characters_in_texts_stay(tmp_path):
    collected(tmp_path, write(tmp_path, lines(draw(response="a\0b", x="\0"))))
    assert rollouts(tmp_path)[0]["response"] == "a\0b"


def test_a_line_of_100_megabytes_is_read(tmp_path):
    with open(tmp_path / "log", "wb") as file:
        file.write(GOOD.splitlines(keepends=True)[0] + b'{"prompt": "a", "reward": 0.5, "response": "')
        for _ in range(100):
            file.write(b"x" * (1 << 20))
        file.write(b'"}\n')
    report = collected(tmp_path, tmp_path / "log", dry_run=True)
    assert (report.total.kept, report.total.read) == (2, 2)


def test_standard_input_is_read_once(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(gzip.compress(GOOD))))
    report = collected(tmp_path, "-")
    assert (report.total.kept, report.logs[0].source) == (2, "-")
    assert collected(tmp_path, write(tmp_path, GOOD)).total.duplicate == 2


def test_a_pipe_is_read_once(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(GOOD,))
    writer.start()
    assert collected(tmp_path, pipe).total.kept == 2
    writer.join()


def test_logs_behind_urls_are_read(tmp_path):
    import fsspec

    store = fsspec.filesystem("memory")
    store.pipe("/logs/a.jsonl", GOOD)
    store.pipe("/logs/deep/b.jsonl.gz", gzip.compress(lines(draw(response="first")) + GOOD))
    store.pipe("/logs/.hidden", b"{")
    try:
        assert collected(tmp_path, "memory://logs/a.jsonl").total.kept == 2
        report = collected(tmp_path, "memory://logs")
        assert (report.total.kept, report.total.duplicate) == (3, 2)
        assert [log.source for log in report.logs] == [
            "memory:///logs/a.jsonl",
            "memory:///logs/deep/b.jsonl.gz",
        ]
        assert len(collected(tmp_path, "memory://logs/**/*.gz", dry_run=True).logs) == 1
        with pytest.raises(DataError, match="memory:///nothing does not exist"):
            collected(tmp_path, "memory://nothing")
    finally:
        store.rm("/logs", recursive=True)


def test_parquet_of_odd_types_is_read_value_by_value(tmp_path):
    table = pa.table(
        {
            "prompt": pa.array(["a", None, "c"], pa.large_string()),
            "response": pa.array([1, 2, 3]),
            "reward": pa.array([True, None, False]),
            "response_ids": pa.array([[1.0], None, [2.5]]),
            "timestamp": pa.array([0, 1, 2], pa.timestamp("ns")),
            "when": pa.array([0, 1, 2], pa.time32("s")),
            "raw": pa.array([b"\xff", None, b"x"]),
            "nothing": pa.nulls(3),
        }
    )
    pq.write_table(table, tmp_path / "log")
    report = collected(tmp_path, tmp_path / "log")
    assert report.total.rejected == {"no_prompt": 1}
    first, second = rollouts(tmp_path)
    assert (first["response"], first["reward"], first["response_ids"]) == ("1", 1.0, [1])
    assert (second["response"], second["reward"], second["response_ids"]) == ("3", 0.0, None)
    assert json.loads(first["extra"]) == {"when": "00:00:00", "raw": "\\xff"}
