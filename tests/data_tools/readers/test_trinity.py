"""Trinity-RFT's buffer and JSON lines. Values by hand from the samples; experience bytes written by hand."""

import json
import sqlite3
import struct
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_tools import readers
from data_tools.collecting.identity import Scope
from data_tools.collecting.pipeline import Settings, process
from data_tools.errors import DataError
from tests.data_tools.logged import collected, dataset, lines, log_of, rollouts, row_of, rows_of

CASES = Path(__file__).parents[2] / "cases" / "trinity"
NEAR = pytest.approx
EID = {"batch": 3, "task": 7, "run": 0, "step": 0, "suffix": "ff"}


def pickled(value):
    """A value as a pickle of protocol 2, without the frame around it."""
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, int):
        return b"J" + struct.pack("<i", value)
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if isinstance(value, str):
        return b"X" + struct.pack("<I", len(value.encode())) + value.encode()
    if isinstance(value, list):
        return b"](" + b"".join(map(pickled, value)) + b"e"
    return b"}(" + b"".join(pickled(key) + pickled(item) for key, item in value.items()) + b"u"


def tensors(**lists):
    """Lists of numbers as a safetensors file: floats, booleans, else 32-bit integers."""
    header, data = {}, b""
    for name, values in lists.items():
        kind = {float: "F32", bool: "BOOL", int: "I32"}[type(values[0])]
        raw = struct.pack(f"<{len(values)}{ {'F32': 'f', 'BOOL': '?', 'I32': 'i'}[kind] }", *values)
        place = [len(data), len(data) + len(raw)]
        header[f"0:{name}"] = {"dtype": kind, "shape": [len(values)], "data_offsets": place}
        data += raw
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def experience(meta=None, **lists):
    """The bytes of one experience."""
    items = (
        b"\x80\x02" + pickled({"version": 1, "num_items": 1, "items": [{"eid": EID} | (meta or {})]}) + b"."
    )
    return b"TRXP\x01" + struct.pack("<QQ", len(items), len(tensors(**lists))) + items + tensors(**lists)


def buffer(path, *blobs, reward=1.0):
    """A database with an experience for each blob."""
    with closing(sqlite3.connect(path)) as con, con:
        con.execute("CREATE TABLE b (id INTEGER PRIMARY KEY, task_id TEXT, reward FLOAT, consumed INTEGER)")
        con.execute("CREATE TABLE b_blob (id INTEGER PRIMARY KEY, experience_bytes BLOB)")
        for at, blob in enumerate(blobs, 1):
            con.execute("INSERT INTO b VALUES (?, '7', ?, 0)", [at, reward])
            con.execute("INSERT INTO b_blob VALUES (?, ?)", [at, blob])
    return path


def test_the_buffer_gives_texts_ids_log_probs_and_versions(tmp_path):
    report = collected(tmp_path, CASES / "trinity_buffer.db")
    assert (report.total.read, report.total.kept) == (4, 4)
    rows = rollouts(tmp_path)
    assert [row["response"] for row in rows] == [
        "Seven crates of 6 make 42 jars.",
        "7 plus 6 gives 13 jars.",
        "An Allen key.",
        "A spoon.",
    ]
    assert [row["reward"] for row in rows] == [1.0, 0.0, 1.0, 0.0]
    assert len({row["group_id"] for row in rows[:2]}) == len({row["group_id"] for row in rows[2:]}) == 1
    assert len({row["group_id"] for row in rows}) == 2
    last = rows[3]
    assert last["prompt"] == "Name one tool that tightens a hex bolt."
    assert last["prompt_ids"] == [1, 1536, 5865, 14124, 16017, 6664, 29275, 21070, 18620]
    assert last["response_ids"] == [5475, 20244, 2]
    assert last["behavior_logprobs"] == NEAR([-0.076574, -0.683131, -1.289689])
    assert (last["policy_version"], last["logprob_kind"], last["loss_mask"]) == (3, "unknown", None)
    assert (last["trajectory_id"], last["turn"]) == ("3/1/1", 0)
    assert last["sampled_at"] == datetime(2026, 1, 5, 9, 0, tzinfo=UTC)
    extra = json.loads(last["extra"])
    assert (extra["metrics"], extra["eid"]["suffix"], extra["consumed"]) == ({"accuracy": 0.0}, "ab11cd", 0)


def test_json_lines_give_texts_without_ids():
    rows = rows_of((CASES / "trinity_experience.jsonl").read_bytes())
    assert [row["reward"] for row in rows] == [1.0, 0.0, 1.0, 0.0]
    assert [len({row["group_id"] for row in part}) for part in (rows[:2], rows[2:], rows)] == [1, 1, 2]
    assert (rows[1]["response"], rows[1]["response_ids"], rows[1]["policy_version"]) == (
        "7 plus 6 gives 13 jars.",
        None,
        3,
    )
    assert json.loads(rows[1]["extra"])["info"] == {"model_version": 3, "model_version_drift": 0}


@pytest.mark.parametrize("name", ["trinity_buffer.db", "trinity_experience.jsonl"])
def test_collecting_again_adds_nothing_whatever_was_trained_on_since(tmp_path, name):
    copy = tmp_path / name
    copy.write_bytes((CASES / name).read_bytes())
    collected(tmp_path, copy)
    if name.endswith(".db"):
        with closing(sqlite3.connect(copy)) as con, con:
            con.execute("UPDATE math_buffer SET consumed = 1")
    again = collected(tmp_path, copy)
    assert (again.total.kept, again.total.duplicate) == (0, 4)


def test_a_buffer_is_only_read(tmp_path):
    path = buffer(tmp_path / "b.db", experience({"prompt_length": 1}, tokens=[1, 2, 3]))
    path.chmod(0o400)
    before = path.read_bytes()
    assert collected(tmp_path, path).total.kept == 1
    assert path.read_bytes() == before
    assert [found.name for found in tmp_path.iterdir() if found.name.startswith("b.db")] == ["b.db"]


def test_a_pickle_of_an_older_version_is_refused_and_never_loaded(tmp_path):
    older = b"\x80\x04ctrinity.common.experience\nExperience\n)\x81."
    hostile = b"\x80\x02cos\nsystem\nX\x12\x00\x00\x00touch " + b"x" * 12 + b"\x85R."
    inside = b"TRXP\x01" + struct.pack("<QQ", len(hostile), 8) + hostile + bytes(8)
    good = experience({"prompt_length": 1, "response_text": "ok", "prompt_text": "say ok"}, tokens=[1, 2])
    report = collected(tmp_path, buffer(tmp_path / "b.db", older, inside, b"TRXP", None, good))
    assert dict(report.total.rejected) == {"pickle_refused": 2, "bad_record": 1, "no_response": 1}
    assert report.total.kept == 1
    assert rollouts(tmp_path)[0]["response_ids"] == [2]
    rejects = dataset(tmp_path).sql("SELECT source_row, raw FROM rejects ORDER BY 1").to_pylist()
    assert [row["source_row"] for row in rejects] == [1, 2, 3, 4]
    assert '"task_id":"7"' in rejects[0]["raw"]


def test_one_table_of_older_versions_is_told_and_refused(tmp_path):
    with closing(sqlite3.connect(tmp_path / "old.db")) as con, con:
        con.execute("CREATE TABLE task (id INTEGER PRIMARY KEY, reward FLOAT, experience_bytes BLOB)")
        con.execute("INSERT INTO task VALUES (1, 1.0, ?)", [b"\x80\x04cx\ny\n."])
    report = collected(tmp_path, tmp_path / "old.db")
    assert dict(report.total.rejected) == {"pickle_refused": 1}


def test_a_row_or_its_bytes_without_the_other_is_counted(tmp_path):
    path = buffer(tmp_path / "b.db", experience({"prompt_length": 1}, tokens=[1, 2]), None)
    with closing(sqlite3.connect(path)) as con, con:
        con.execute("DELETE FROM b_blob WHERE id = 2")
        other = experience({"prompt_length": 1, "eid": EID | {"suffix": "gg"}}, tokens=[1, 3])
        con.execute("INSERT INTO b_blob VALUES (9, ?)", [other])
    report = collected(tmp_path, path)
    assert (report.total.read, report.total.kept) == (3, 2)
    assert [(row["source_row"], row["reward"]) for row in rollouts(tmp_path)] == [(1, 1.0), (9, None)]


def test_several_turns_in_one_experience_are_masked(tmp_path):
    messages = [
        {"role": "user", "content": "Look it up."},
        {"role": "assistant", "content": "look()"},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "It is 42."},
    ]
    made = experience(
        {"prompt_length": 2, "messages": messages, "truncate_status": "response_truncated"},
        tokens=[1, 2, 3, 4, 5, 6],
        logprobs=[-0.5, 0.0, 0.0, -0.25],
        action_mask=[True, False, False, True],
        advantages=[0.5, 0.5, 0.5, 0.5],
    )
    collected(tmp_path, buffer(tmp_path / "b.db", made))
    [row] = rollouts(tmp_path)
    assert json.loads(row["prompt"]) == messages[:1]
    assert json.loads(row["response_messages"]) == messages[1:]
    assert row["response"] == "It is 42."
    assert (row["prompt_ids"], row["response_ids"]) == ([1, 2], [3, 4, 5, 6])
    assert (row["loss_mask"], row["behavior_logprobs"]) == ([1, 0, 0, 1], [-0.5, None, None, -0.25])
    assert row["behavior_logprob"] == -0.75
    assert (row["finish_reason"], row["flags"]) == ("length", ["truncated"])
    assert json.loads(row["extra"])["advantages"] == 0.5


def test_a_preference_is_two_responses_without_a_reward(tmp_path):
    meta = {"prompt_length": 2, "prompt_text": "Pick."}
    made = experience(meta, tokens=[1, 2], chosen=[3], rejected=[4, 5])
    collected(tmp_path, buffer(tmp_path / "b.db", made, reward=None))
    rows = sorted(rollouts(tmp_path), key=lambda row: row["n_tokens"])
    assert [row["response_ids"] for row in rows] == [[3], [4, 5]]
    assert [json.loads(row["extra"])["preference"] for row in rows] == ["chosen", "rejected"]
    assert {row["group_id"] for row in rows} == {rows[0]["group_id"]}
    assert [row["reward"] for row in rows] == [None, None]


def test_a_conversation_of_json_lines_is_cut_before_its_answer():
    messages = [{"role": "user", "content": "Say ok."}, {"role": "assistant", "content": "ok"}]
    row = row_of({"eid": EID, "type": "multi_turn", "messages": messages, "response_text": "ok<end>"})
    assert (json.loads(row["prompt"]), row["response"]) == (messages[:1], "ok")
    assert (row["reward"], row["policy_version"]) == (None, None)


def test_another_database_is_no_buffer(tmp_path):
    with closing(sqlite3.connect(tmp_path / "x.db")) as con, con:
        con.execute("CREATE TABLE notes (id INTEGER, text TEXT)")
    with pytest.raises(DataError, match="sqlite"):
        collected(tmp_path, tmp_path / "x.db")


def test_plain_rows_with_an_id_are_no_experiences():
    found = readers.detect(log_of(lines({"prompt": "a", "response": "b", "eid": 3})))
    assert found is not None
    assert found.name == "rows"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_a_damaged_buffer_never_crashes_and_gives_no_number_of_its_own(data):
    raw = bytearray((CASES / "trinity_buffer.db").read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        raw[data.draw(st.integers(100, len(raw) - 1))] = data.draw(st.integers(0, 255))
    log = log_of(bytes(raw[: data.draw(st.integers(100, len(raw)))]))
    reader = readers.reader("trinity")
    if not reader.detect(log, ()):
        return
    with suppress(DataError):
        scope = Scope("trinity", reader.fingerprint(log), log.name)
        for chunk in reader.chunks(log):
            done = process(chunk, scope, Settings())
            assert len(done.rejects) + done.rows.table.num_rows == len(chunk.source_row) + len(chunk.rejects)
