import gzip
import json
import shutil
from pathlib import Path

import pytest
import zstandard

import data_tools
from data_tools.errors import ConfigError, DataError
from tests.data_tools.logged import adds_up, collected, dataset, draw, lines, rollouts

CASES = Path(__file__).parents[1] / "cases"

LOG = lines(*(draw(response=f"r{n}", reward=float(n), group=n // 2) for n in range(6)))


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "logs" / "a.jsonl"
    path.parent.mkdir()
    path.write_bytes(LOG)
    return path


def test_a_log_becomes_rows_with_their_lineage(tmp_path, log):
    report = collected(tmp_path, log, policy="p", policy_version=3)
    assert (report.total.read, report.total.kept) == (6, 6)
    rows = rollouts(tmp_path)
    assert [(row["source_file"], row["source_row"], row["reward"]) for row in rows] == [
        (str(log), n + 1, float(n)) for n in range(6)
    ]
    assert {(row["policy"], row["policy_version"]) for row in rows} == {("p", 3)}
    assert dataset(tmp_path).batches() == [report.batch]
    assert len({row["group_id"] for row in rows}) == 3
    assert len({row["response_id"] for row in rows}) == 6


def test_the_policy_of_the_log_goes_before_the_one_of_the_command(tmp_path, log):
    log.write_bytes(lines(draw(model="m", step=1), draw(response="3")))
    collected(tmp_path, log, policy="p", policy_version=3)
    assert [(row["policy"], row["policy_version"]) for row in rollouts(tmp_path)] == [("m", 1), ("p", 3)]


@pytest.mark.parametrize("case", ["rows", "calls"])
def test_what_the_user_knows_of_the_sampling_goes_before_the_log(tmp_path, log, case):
    rows = lines(draw(temperature=0.7), draw(response="3", temperature=1.0, logprob_kind="raw"))
    if case == "calls":
        rows = (CASES / "vllm_chat_return_token_ids.jsonl").read_bytes()
    log.write_bytes(rows)
    collected(tmp_path, log, logprob_kind="processed", temperature=0.5)
    found = rollouts(tmp_path, "temperature, logprob_kind, flags, behavior_logprob")
    assert {(row["temperature"], row["logprob_kind"]) for row in found} == {(0.5, "processed")}
    assert all(row["behavior_logprob"] is not None for row in found)
    with pytest.raises(ConfigError, match="no kind of log-probs named 'row'"):
        collected(tmp_path, log, logprob_kind="row")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda data: data, id="same"),
        pytest.param(gzip.compress, id="gz"),
        pytest.param(zstandard.compress, id="zst"),
        pytest.param(lambda data: data.replace(b"\n", b"\r\n"), id="CRLF"),
        pytest.param(lambda data: b"\xef\xbb\xbf" + data, id="BOM"),
    ],
)
def test_a_log_collected_again_adds_nothing_wherever_it_is_and_however_packed(tmp_path, log, change):
    collected(tmp_path, log)
    moved = tmp_path / "elsewhere"
    moved.write_bytes(change(LOG))
    report = collected(tmp_path, moved)
    assert (report.total.kept, report.total.duplicate, report.batch) == (0, 6, None)
    assert len(rollouts(tmp_path)) == 6


def test_a_grown_log_adds_only_what_is_new(tmp_path, log):
    collected(tmp_path, log)
    log.write_bytes(LOG + lines(draw(response="new"), draw(response="r0", reward=0.0, group=0)))
    report = collected(tmp_path, log)
    assert (report.total.kept, report.total.duplicate) == (2, 6)
    rows = rollouts(tmp_path)
    assert [row["source_row"] for row in rows] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert len({row["response_id"] for row in rows}) == 8
    assert rows[7]["group_id"] == rows[0]["group_id"]  # the new row joins the group that was there


def test_equal_samples_of_one_log_stay_distinct_draws(tmp_path, log):
    log.write_bytes(lines(*[draw()] * 5))
    assert collected(tmp_path, log).total.kept == 5
    assert len({row["response_id"] for row in rollouts(tmp_path)}) == 5
    log.write_bytes(lines(*[draw()] * 7))
    report = collected(tmp_path, log)
    assert (report.total.kept, report.total.duplicate) == (2, 5)
    assert len({row["response_id"] for row in rollouts(tmp_path)}) == 7


def test_the_same_log_twice_in_one_collect_counts_once(tmp_path, log):
    copy = log.with_name("copy.jsonl.gz")
    copy.write_bytes(gzip.compress(LOG + lines(draw(response="more"))))
    report = collected(tmp_path, log, copy)
    assert [(counts.kept, counts.duplicate) for counts in report.logs] == [(6, 0), (1, 6)]


def test_equal_rows_of_different_logs_are_different_draws(tmp_path, log):
    other = log.with_name("b.jsonl")
    other.write_bytes(lines(draw(response="first of another run")) + LOG)
    assert collected(tmp_path, log, other).total.kept == 13


def test_bare_group_keys_of_different_logs_do_not_meet_unless_they_share_a_run(tmp_path, log):
    other = log.with_name("b.jsonl")
    other.write_bytes(lines(draw(response="x", group=0)))
    collected(tmp_path, log, other)
    assert dataset(tmp_path).sql("SELECT count(*) AS n FROM groups").to_pylist() == [{"n": 4}]
    data_tools.collect([str(log), str(other)], tmp_path / "named", run="r")
    joined = data_tools.open(str(tmp_path / "named"))
    assert joined.sql("SELECT count(*) AS n FROM groups").to_pylist() == [{"n": 3}]


def test_rows_without_a_group_key_meet_by_prompt_across_logs(tmp_path, log):
    other = log.with_name("b.jsonl")
    log.write_bytes(lines(draw(), draw(prompt="2+2=")))
    other.write_bytes(lines(draw(response="3")))
    collected(tmp_path, log, other)
    assert [row["n"] for row in dataset(tmp_path).sql("SELECT n FROM groups ORDER BY n").to_pylist()] == [
        1,
        2,
    ]


def test_an_explicit_group_wins_over_prompts_that_differ_and_is_counted(tmp_path, troubles):
    report = collected(tmp_path, troubles / "A07_double_bos.jsonl")
    assert report.total.notes == {"several_prompts": 1, "repeated_first_token": 1}
    rows = rollouts(tmp_path)
    assert rows[0]["prompt_ids"] == [1, 1, 40, 41, 42]
    assert len({row["group_id"] for row in rows}) == 1


def test_an_id_that_the_log_gives_is_used(tmp_path, log):
    records = [
        draw(response_id="a"),
        draw(response_id="b"),
        draw(response_id="a"),
        draw(response_id="b", reward=0.0),
    ]
    log.write_bytes(lines(*records))
    report = collected(tmp_path, log)
    assert (report.total.kept, report.total.duplicate) == (2, 1)
    assert report.total.rejected == {"id_conflict": 1}
    assert report.logs[0].where["id_conflict"] == [4]
    rejects = dataset(tmp_path).sql("SELECT source_row, reason FROM rejects").to_pylist()
    assert rejects == [{"source_row": 4, "reason": "id_conflict"}]


def test_ids_of_different_runs_do_not_meet(tmp_path, log):
    log.write_bytes(lines(draw(response_id=1, run_id="x"), draw(response_id=1, run_id="y")))
    assert collected(tmp_path, log).total.kept == 2


def test_erased_rows_do_not_come_back(tmp_path, log):
    collected(tmp_path, log)
    dataset(tmp_path).delete("reward = 3")
    report = collected(tmp_path, log)
    assert (report.total.duplicate, report.total.rejected) == (5, {"erased": 1})
    assert len(rollouts(tmp_path)) == 5


def test_files_of_different_schemas_are_joined_whatever_their_order(tmp_path, troubles):
    folder = troubles / "A15_mixed_schema"
    collected(tmp_path, folder)
    names = sorted(folder.iterdir(), reverse=True)
    data_tools.collect([str(name) for name in names], tmp_path / "reversed")
    query = """SELECT prompt, response, reward, policy_version, extra->>'pred' AS pred, extra->>'k' AS k,
        extra->>'uid' AS uid FROM rollouts ORDER BY ALL"""
    rows = dataset(tmp_path).sql(query).to_pylist()
    assert rows == data_tools.open(str(tmp_path / "reversed")).sql(query).to_pylist()
    assert [tuple(row.values()) for row in rows] == [
        ("q1", "a", 1.0, 1, None, "1", None),
        ("q1", "a", 1.0, 1, None, "1", None),
        ("q1", "a", 1.0, 1, None, "1", None),
        ("q1", "b", 0.5, 2, "12", "1", None),
        ("q2", "c", None, 2, "12", None, "u_0_1"),
        ("q2", "d", 0.25, 3, None, None, None),
    ]


def test_rejects_are_kept_with_reason_and_beginning_but_only_once(tmp_path, troubles):
    log = troubles / "A09_torn_lines.jsonl"
    report = collected(tmp_path, log)
    assert (report.total.kept, report.total.rejected) == (3, {"torn_line": 3})
    assert report.logs[0].where == {"torn_line": [2, 4, 7]}
    assert collected(tmp_path, log).batch is None
    rejects = dataset(tmp_path).sql("SELECT source_row, reason, raw FROM rejects ORDER BY ALL").to_pylist()
    assert [(reject["source_row"], reject["reason"]) for reject in rejects] == [
        (2, "torn_line"),
        (4, "torn_line"),
        (7, "torn_line"),
    ]
    assert rejects[0]["raw"].startswith('{"example_id": 1, "prompt"')


def test_a_grown_log_adds_only_its_new_rejects(tmp_path, log):
    log.write_bytes(LOG + b'{"torn\n')
    collected(tmp_path, log)
    log.write_bytes(LOG + b'{"torn\n' + lines(draw(response="new"), draw(reward="1,5")))
    report = collected(tmp_path, log)
    assert (report.total.kept, report.total.rejected) == (1, {"torn_line": 1, "bad_reward": 1})
    rejects = dataset(tmp_path).sql("SELECT source_row, reason FROM rejects ORDER BY source_row").to_pylist()
    assert [tuple(reject.values()) for reject in rejects] == [(7, "torn_line"), (9, "bad_reward")]


def test_a_log_of_rejects_only_is_a_batch_without_rows(tmp_path, log):
    log.write_bytes(b'{"prompt": "torn\n')
    assert collected(tmp_path, log).batch is not None
    assert rollouts(tmp_path) == []
    assert len(dataset(tmp_path).sql("FROM rejects")) == 1


def test_strict_fails_on_the_first_reject_and_writes_nothing(tmp_path, troubles, log):
    collected(tmp_path, log)
    with pytest.raises(DataError, match=r"A09_torn_lines.jsonl, row 2: torn_line: breaks off at column 60"):
        collected(tmp_path, log, troubles / "A09_torn_lines.jsonl", strict=True)
    log.write_bytes(lines(draw(response_id="a"), draw(response_id="a", reward=0.0)))
    with pytest.raises(DataError, match=r"row 2: id_conflict"):
        collected(tmp_path, log, strict=True)
    assert len(dataset(tmp_path).batches()) == 1
    assert len(rollouts(tmp_path)) == 6


def every_file(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_dry_run_counts_and_writes_nothing(tmp_path, log, troubles):
    report = data_tools.collect([str(log)], tmp_path / "new", dry_run=True)
    assert (report.total.kept, report.batch) == (6, None)
    assert not (tmp_path / "new").exists()
    assert report.lines()[-1] == "dry run: nothing was written"
    collected(tmp_path, log)
    before = every_file(tmp_path / "ds")
    report = collected(tmp_path, log, troubles / "A09_torn_lines.jsonl", dry_run=True)
    assert (report.total.kept, report.total.duplicate, report.total.rejected.total()) == (3, 6, 3)
    assert every_file(tmp_path / "ds") == before


def test_an_error_in_a_later_log_leaves_the_dataset_as_it_was(tmp_path, log):
    collected(tmp_path, log)
    before = every_file(tmp_path / "ds")
    log.write_bytes(LOG + lines(draw(response="new")))
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 and nothing more")
    with pytest.raises(DataError, match=r"broken.parquet is a damaged Parquet file"):
        collected(tmp_path, log, broken)
    assert every_file(tmp_path / "ds") == before


def test_folders_globs_and_hidden_files(tmp_path, log):
    (log.parent / "deep" / "er").mkdir(parents=True)
    shutil.copy(log, log.parent / "deep" / "er" / "b.jsonl")
    (log.parent / ".hidden.jsonl").write_bytes(b"{")
    (log.parent / "notes.txt").write_bytes(b"not a log")
    (log.parent / "loop").symlink_to(log.parent)
    report = collected(tmp_path, log.parent)
    assert [Path(counts.source).name for counts in report.logs] == ["a.jsonl", "b.jsonl"]
    assert [Path(name).name for name in report.skipped] == ["notes.txt"]
    assert [len(collected(tmp_path, f"{log.parent}/**/*.jsonl", dry_run=True).logs)] == [2]


def test_an_open_dataset_can_be_collected_into(tmp_path, log):
    report = data_tools.collect([str(log)], data_tools.open(str(tmp_path / "ds"), create=True))
    assert adds_up(report)
    assert len(rollouts(tmp_path)) == 6


def test_the_report_tells_everything_as_text_and_as_json(tmp_path, troubles, log):
    report = collected(tmp_path, log, troubles / "A11_rewards_as_strings_and_bools.jsonl", dry_run=True)
    text = "\n".join(report.lines())
    assert "10 read, 9 kept, 0 duplicate, 1 rejected" in text
    assert "1 rejected bad_reward (row 9)" in text
    assert "4 reward_unreadable (row 5, 6, 7, ...)" in text
    assert "total: 16 read, 15 kept, 0 duplicate, 1 rejected" in text
    counts = json.loads(json.dumps(report.to_dict()))
    assert counts["total"]["rejected"] == {"bad_reward": 1}
    assert counts["logs"][1]["where"]["reward_unreadable"] == [5, 6, 7]


def test_progress_is_told(tmp_path, log):
    told = []
    collected(tmp_path, log, progress=lambda done, total=None, numbers=None: told.append(done))
    assert told == [6]


def test_a_new_dataset_takes_the_holdout_asked_for(tmp_path, log):
    collected(tmp_path, log, holdout=0.25)
    assert dataset(tmp_path).info.holdout == 0.25


def test_formats_and_selections_that_contradict_each_other_are_refused(tmp_path, log):
    with pytest.raises(ConfigError, match="cannot be used together"):
        collected(tmp_path, log, select="FROM source", map={"reward": "1"})
    with pytest.raises(ConfigError, match="no log format named 'rowz'"):
        collected(tmp_path, log, format="rowz")
