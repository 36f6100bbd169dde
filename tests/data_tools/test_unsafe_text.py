"""Lone surrogates and control characters, in every place where a log may hold text."""

import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from cli.main import rec
from tests.data_tools.logged import collected, dataset, draw, lines, rollouts

UNSAFE = "a\ud800b\x00c\x1b[31md\x85e\u2028f\u202eg\x7f"
SAFE = UNSAFE.replace("\ud800", "\\ud800")
PLACES = {
    "prompt": ({"prompt": UNSAFE}, lambda row: row["prompt"]),
    "a message": (
        {"prompt": [{"role": "user", "content": UNSAFE}]},
        lambda row: read(row["prompt"])[0]["content"],
    ),
    "a role": ({"prompt": [{"role": UNSAFE, "content": "x"}]}, lambda row: read(row["prompt"])[0]["role"]),
    "tools": ({"tools": [{"name": UNSAFE}]}, lambda row: read(row["tools"])[0]["name"]),
    "response": ({"response": UNSAFE}, lambda row: row["response"]),
    "the text of a message": (
        {"response": {"role": "assistant", "content": UNSAFE, "x": 1}},
        lambda row: row["response"],
    ),
    "response_messages": (
        {"response": {"role": "assistant", "content": "2", "reasoning": UNSAFE}},
        lambda row: read(row["response_messages"])[0]["reasoning"],
    ),
    "policy": ({"policy": UNSAFE}, lambda row: row["policy"]),
    "trajectory_id": ({"trajectory_id": UNSAFE}, lambda row: row["trajectory_id"]),
    "finish_reason": ({"finish_reason": UNSAFE}, lambda row: row["finish_reason"]),
    "flags": ({"flags": [UNSAFE]}, lambda row: row["flags"][0]),
    "extra": ({"note": {"deep": [UNSAFE]}}, lambda row: read(row["extra"])["note"]["deep"][0]),
    "a key of extra": ({UNSAFE: 1}, lambda row: next(iter(read(row["extra"])))),
    "group_id": ({"group_id": UNSAFE}, lambda row: SAFE),
    "response_id": ({"response_id": UNSAFE}, lambda row: SAFE),
    "run": ({"run": UNSAFE, "group_id": 1}, lambda row: SAFE),
}


def read(text):
    return json.loads(text)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("redact", [False, True])
def test_text_is_stored_as_it_is_but_for_half_a_surrogate_pair_which_is_escaped(tmp_path, place, redact):
    values, found = PLACES[place]
    log = tmp_path / "log.jsonl"
    log.write_bytes(lines(draw(**values)))
    report = collected(tmp_path, log, redact=redact)
    assert report.total.kept == 1
    assert report.total.notes["lone_surrogate"] == 1
    [row] = rollouts(tmp_path)
    assert found(row) == SAFE
    assert collected(tmp_path, log, redact=redact).total.duplicate == 1


def test_bytes_of_tables_that_are_no_text_are_escaped_too(tmp_path):
    columns = {
        "prompt": [b"a\xffb"],
        "response": [b"\xed\xa0\x80\x00"],
        "policy": [b"\xfe"],
        "note": [b"\xfd"],
    }
    pq.write_table(pa.table({name: pa.array(values) for name, values in columns.items()}), tmp_path / "log")
    collected(tmp_path, tmp_path / "log")
    [row] = rollouts(tmp_path)
    assert row["prompt"] == "a\\udcffb"
    assert row["response"] == "\\udced\\udca0\\udc80\x00"
    assert row["policy"] == "\\udcfe"
    assert read(row["extra"]) == {"note": "\\xfd"}


def test_a_file_may_have_any_name(tmp_path):
    path = os.fsencode(tmp_path) + b"/\xff\x1b[31m.jsonl"
    with open(path, "wb") as file:
        file.write(lines(draw()) + b'{"torn')
    report = collected(tmp_path, os.fsdecode(path))
    assert report.total.kept == report.total.rejected["torn_line"] == 1
    [row] = rollouts(tmp_path)
    assert row["source_file"].endswith("/\\udcff\x1b[31m.jsonl")
    assert dataset(tmp_path).sql("SELECT source_file FROM rejects").to_pylist() == [
        {"source_file": row["source_file"]}
    ]


def test_nothing_of_it_reaches_a_terminal_unescaped(tmp_path):
    log = tmp_path / "\x1b[31m.jsonl"
    log.write_bytes(lines(draw(prompt=UNSAFE, response=UNSAFE, note=UNSAFE), draw(prompt=..., note=UNSAFE)))
    told = ""
    for arguments in (
        ("collect", str(log), "--into", str(tmp_path / "ds"), "--reward", UNSAFE.replace("\ud800", "")),
        ("collect", str(log), "--into", str(tmp_path / "ds")),
        ("sql", str(tmp_path / "ds"), "SELECT * FROM rollouts"),
        ("sql", str(tmp_path / "ds"), "SELECT * FROM rejects"),
        ("check", str(tmp_path / "ds")),
    ):
        told += CliRunner().invoke(rec, arguments).output
    assert "\\x1b[31m.jsonl" in told
    assert not set(told) & set("\x00\x1b\x85\u2028\u202e\x7f")
