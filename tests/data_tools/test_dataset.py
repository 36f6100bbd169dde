import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import data_tools
from data_tools.errors import ConfigError, DataError
from data_tools.store.batches import fresh_name
from data_tools.store.storage import STALE_SECONDS
from tests.data_tools.rollout_rows import many, row, table


@pytest.fixture
def ds(tmp_path):
    return data_tools.open(str(tmp_path / "ds"), create=True)


def commit(ds, *rows):
    with ds.writer() as writer:
        writer.rollouts(table(rows))
        return writer.commit()


def files(ds):
    return sorted(str(path.relative_to(ds.path)) for path in Path(ds.path).rglob("*") if path.is_file())


def test_a_new_dataset_answers_every_view_with_no_rows(ds):
    for view in ("rollouts", "groups", "rejects", "policies"):
        assert ds.sql(f"SELECT * FROM {view}").num_rows == 0


def test_an_empty_dataset_has_the_columns_and_types_of_a_full_one(ds):
    empty = ds.sql("DESCRIBE rollouts").to_pylist()
    commit(ds, row("a"))
    assert ds.sql("DESCRIBE rollouts").to_pylist() == empty


def test_opening_what_is_no_dataset_says_how_to_make_one(tmp_path):
    with pytest.raises(DataError, match=r"is not a dataset.*\n.*rec collect"):
        data_tools.open(str(tmp_path))


def test_creating_over_foreign_files_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(DataError, match="not empty"):
        data_tools.open(str(tmp_path), create=True)


def test_creating_twice_keeps_the_secret(ds):
    assert data_tools.open(ds.path, create=True).info == ds.info


def test_two_datasets_split_prompts_alike_and_share_no_secret(tmp_path):
    one, two = (data_tools.open(tmp_path / name, create=True).info for name in ("one", "two"))
    assert one.salt == two.salt
    assert one.secret != two.secret
    assert len(one.secret) == 32


def test_another_holdout_than_that_of_the_creation_is_refused(ds):
    assert data_tools.open(ds.path, create=True, holdout=0.1).info == ds.info
    with pytest.raises(ConfigError, match=r"created with holdout 0\.1, not 0\.2"):
        data_tools.open(ds.path, create=True, holdout=0.2)


@pytest.mark.parametrize("holdout", [-0.1, 1.0, float("nan")])
def test_a_holdout_that_is_no_share_is_refused(tmp_path, holdout):
    with pytest.raises(ConfigError, match="holdout"):
        data_tools.open(str(tmp_path / "ds"), create=True, holdout=holdout)


def test_a_newer_format_version_is_refused_with_the_way_out(ds):
    info = Path(ds.path, "rec.json")
    info.write_text(json.dumps(json.loads(info.read_text()) | {"format_version": 2}))
    with pytest.raises(DataError, match=r"format version 2; this program reads up to 1\n.*pip install"):
        data_tools.open(ds.path)


def test_a_damaged_rec_json_is_a_readable_error(ds):
    Path(ds.path, "rec.json").write_text("{")
    with pytest.raises(DataError, match=r"rec\.json cannot be read"):
        data_tools.open(ds.path)


def test_a_batch_is_visible_after_its_commit_and_not_before(ds):
    with ds.writer() as writer:
        writer.rollouts(many(10))
        assert ds.batches() == []
        name = writer.commit()
    assert ds.batches() == [name]
    assert ds.sql("SELECT count(*) AS n FROM rollouts").to_pylist() == [{"n": 10}]


def test_a_writer_left_without_commit_leaves_no_file(ds):
    before = files(ds)
    with ds.writer() as writer:
        writer.rollouts(many(10))
        writer.rejects(pa.table({"reason": ["torn_line"]}))
    assert files(ds) == before


def test_a_writer_left_by_an_error_leaves_no_file(ds):
    before = files(ds)

    def fail_halfway():
        with ds.writer() as writer:
            writer.rollouts(many(10))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_halfway()
    assert files(ds) == before


def test_a_batch_of_rejects_alone_keeps_them(ds):
    with ds.writer() as writer:
        writer.rejects(pa.table({"source_file": ["a.jsonl"], "source_row": [7], "reason": ["torn_line"]}))
        name = writer.commit()
    assert ds.sql("SELECT source_row, reason, file FROM rejects").to_pylist() == [
        {"source_row": 7, "reason": "torn_line", "file": name}
    ]


def test_rejects_whose_rollouts_were_never_committed_stay_invisible(ds):
    with ds.writer() as writer:
        writer.rejects(pa.table({"reason": ["torn_line"]}))
        name = writer.commit()
    os.unlink(ds.rollout_path(name))
    assert ds.sql("SELECT * FROM rejects").num_rows == 0


def test_batches_are_listed_in_the_order_of_their_commits_even_if_the_clock_goes_back(ds):
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).strftime("%Y%m%dT%H%M%S%fZ")
    first = f"{tomorrow}-00000000"
    with ds.writer(first) as writer:
        writer.commit()
    second = commit(ds, row("a"))
    assert ds.batches() == [first, second]


def test_a_fresh_name_sorts_after_a_name_given_by_hand():
    assert fresh_name(["zebra"]) > "2"


def test_a_batch_name_is_never_used_twice(ds):
    with ds.writer("mine") as writer:
        writer.commit()
    with pytest.raises(DataError, match="'mine' exists already"):
        ds.writer("mine")


@pytest.mark.parametrize("name", ["../evil", ".hidden", "a b", "", "a/b", "a.parquet"])
def test_a_name_that_is_no_plain_stem_is_refused(ds, name):
    with pytest.raises(ConfigError, match="cannot be the name of a file"):
        ds.writer(name)


def test_an_old_leftover_of_a_killed_writer_is_swept_and_a_young_one_kept(ds):
    commit(ds, row("a"))
    old, young = (Path(ds.path, "rollouts", f".{name}.parquet.1234.tmp") for name in ("old", "young"))
    for path in (old, young):
        path.write_text("torn")
    os.utime(old, (0, young.stat().st_mtime - STALE_SECONDS - 60))
    ds.writer().discard()
    assert young.exists()
    assert not old.exists()
    assert len(ds.batches()) == 1


def test_an_unknown_column_names_the_known_ones(ds):
    with ds.writer() as writer, pytest.raises(DataError, match=r"unknown column 'rewrad'\n.*reward"):
        writer.rollouts(pa.table({"rewrad": [1.0]}))


def test_a_null_where_none_may_be_names_column_and_row(ds):
    rows = [row("a"), row("b") | {"group_id": None}]
    with ds.writer() as writer, pytest.raises(DataError, match="'group_id' is null in row 1"):
        writer.rollouts(pa.Table.from_pylist(rows))


def test_a_value_that_does_not_fit_its_type_is_refused(ds):
    given = table([row("a")]).drop_columns("turn").append_column("turn", pa.array([2**40]))
    with ds.writer() as writer, pytest.raises(DataError, match="'turn' is not int32"):
        writer.rollouts(given)


def test_columns_left_out_become_null(ds):
    given = table([row("a")]).select(["response_id", "group_id", "prompt_hash", "logprob_kind", "flags"])
    with ds.writer() as writer:
        writer.rollouts(given)
        writer.commit()
    assert ds.sql("SELECT prompt, response_ids, reward FROM rollouts").to_pylist() == [
        {"prompt": None, "response_ids": None, "reward": None}
    ]


def test_small_tables_are_gathered_into_whole_row_groups(ds):
    with ds.writer() as writer:
        for start in range(0, 5000, 50):
            writer.rollouts(many(50, start=start))
        name = writer.commit()
    metadata = ds.parquet(name).metadata
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [4096, 904]
    assert ds.parquet(name).read(["response_id"]).column(0).to_pylist() == [f"r{i}" for i in range(5000)]


def test_long_responses_close_a_row_group_early(ds, monkeypatch):
    monkeypatch.setattr("data_tools.store.parquet_writer.ROW_GROUP_BYTES", 1 << 20)
    with ds.writer() as writer:
        for i in range(40):
            writer.rollouts(table([row(f"r{i}", response_ids=list(range(25_000)))]))
        name = writer.commit()
    metadata = ds.parquet(name).metadata
    assert metadata.num_row_groups == 4
    assert metadata.num_rows == 40


def test_only_encodings_that_common_readers_know_are_written(ds):
    commit(ds, row("r", response_ids=[5, 6], behavior_logprobs=[-0.5, -0.25], loss_mask=[1, 0]))
    with pq.ParquetFile(f"{ds.path}/rollouts/{ds.batches()[0]}.parquet") as file:
        group = file.metadata.row_group(0)
        columns = [group.column(i) for i in range(group.num_columns)]
    split = {column.path_in_schema for column in columns if "BYTE_STREAM_SPLIT" in column.encodings}
    assert split == {"behavior_logprobs.list.element"}
    known = {"PLAIN", "RLE", "RLE_DICTIONARY", "BYTE_STREAM_SPLIT"}
    assert {encoding for column in columns for encoding in column.encodings} <= known
    assert {column.path_in_schema for column in columns if column.statistics is None} == {
        f"{name}.list.element"
        for name in ("prompt_ids", "response_ids", "behavior_logprobs", "loss_mask", "flags")
    }


def test_file_and_file_row_locate_a_row_in_its_batch(ds):
    with ds.writer() as writer:
        writer.rollouts(many(5))
        first = writer.commit()
    with ds.writer() as writer:
        writer.rollouts(many(5, start=5))
        second = writer.commit()
    found = ds.sql("SELECT response_id, file, file_row FROM rollouts ORDER BY file, file_row").to_pylist()
    for i, place in enumerate(found):
        assert place == {"response_id": f"r{i}", "file": (first, second)[i // 5], "file_row": i % 5}


def test_a_path_with_quotes_and_glob_characters_works(tmp_path):
    ds = data_tools.open(str(tmp_path / "it's [1] *?"), create=True)
    commit(ds, row("a"))
    assert ds.sql("SELECT response_id FROM rollouts").to_pylist() == [{"response_id": "a"}]
    assert ds.delete("true").rows == 1
    assert ds.compact().files_after == 1


def test_an_opened_dataset_outlives_a_change_of_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ds = data_tools.open("relative", create=True)
    commit(ds, row("a"))
    monkeypatch.chdir("/")
    assert len(ds.batches()) == 1


def test_policy_cards_come_back_whatever_the_name_holds(ds):
    for name in ("org/model-7b", ".hidden", "ü %2F", "../up"):
        ds.write_policy(
            data_tools.PolicyCard(name=name, model="m", sampling={"temperature": 0.7}, note="kept")
        )
    assert set(ds.policies()) == {"org/model-7b", ".hidden", "ü %2F", "../up"}
    assert ds.policies()[".hidden"].model_dump()["note"] == "kept"


def test_the_policies_view_joins_rows_and_cards(ds):
    ds.write_policy(data_tools.PolicyCard(name="carded", model="m'1", sampling={"temperature": 0.7}))
    commit(
        ds, row("a", policy="logged", policy_version=3), row("b", policy="logged", policy_version=5), row("c")
    )
    found = ds.sql(
        "SELECT policy, n, min_policy_version, max_policy_version, model, sampling->>'temperature' AS t"
        " FROM policies ORDER BY policy NULLS LAST"
    ).to_pylist()
    assert [tuple(r.values()) for r in found] == [
        ("carded", 0, None, None, "m'1", "0.7"),
        ("logged", 2, 3, 5, None, None),
        (None, 1, None, None, None, None),
    ]


def test_parameters_bind_by_place_and_by_name(ds):
    commit(ds, row("a"), row("b"))
    query = "SELECT count(*) AS n FROM rollouts WHERE response_id = "
    assert ds.sql(query + "?", ["a"]).to_pylist() == [{"n": 1}]
    assert ds.sql(query + "$id", {"id": "zz"}).to_pylist() == [{"n": 0}]


def test_a_reader_streams_in_batches(ds):
    with ds.writer() as writer:
        writer.rollouts(many(5000))
        writer.commit()
    sizes = [batch.num_rows for batch in ds.reader("SELECT response_id FROM rollouts", 1000)]
    assert sum(sizes) == 5000
    assert max(sizes) <= 2048  # DuckDB rounds up to its vectors


def test_a_wrong_column_is_a_readable_error(ds):
    with pytest.raises(ConfigError, match=r"rewrad(.|\n)*DESCRIBE rollouts"):
        ds.sql("SELECT rewrad FROM rollouts")


def test_an_error_in_the_middle_of_a_stream_is_a_readable_error(ds):
    commit(ds, row("a"))
    failing = "SELECT CASE WHEN range = 900000 THEN error('boom') ELSE range::VARCHAR END FROM range(1000000)"
    with pytest.raises(ConfigError, match="boom"):
        ds.reader(failing, 1000).read_all()


@pytest.mark.parametrize("damage", [lambda text: text[:-30], lambda text: b"no parquet", lambda text: b""])
def test_a_damaged_file_is_named(ds, damage):
    with ds.writer() as writer:
        writer.rollouts(many(5000))
        name = writer.commit()
    path = Path(ds.rollout_path(name))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=rf"{name}(.|\n)*damaged"):
        data_tools.open(ds.path).sql("SELECT response_ids FROM rollouts")


def test_a_damaged_file_is_named_by_what_writes_to_the_dataset(ds, tmp_path):
    for ids in ("ab", "cd"):
        commit(ds, *map(row, ids))
    path = Path(ds.rollout_path(ds.batches()[0]))
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    log = tmp_path / "log.jsonl"
    log.write_text('{"prompt": "p", "response": "r"}\n')
    for work in (ds.compact, lambda: ds.delete("response_id = 'a'"), lambda: ds.collect([str(log)])):
        with pytest.raises(DataError, match=rf"{path.name}(.|\n)*damaged"):
            work()
    path.write_bytes(whole)
    assert ds.sql("SELECT count(*) AS n FROM rollouts").to_pylist() == [{"n": 4}]


def test_a_file_of_another_kind_among_those_of_the_dataset_is_named(ds):
    commit(ds, row("a"))
    pq.write_table(pa.table({"other": [1]}), Path(ds.path) / "rollouts" / "zz.parquet")
    with pytest.raises(DataError, match=r"zz.parquet(.|\n)*remove it"):
        data_tools.open(ds.path).sql("SELECT count(reward) FROM rollouts")


def test_importing_the_library_loads_nothing_heavy_and_is_fast():
    code = (
        "import sys, time; start = time.perf_counter(); import data_tools; data_tools.open\n"
        "print(time.perf_counter() - start)\n"
        "print(*[m for m in ('torch', 'transformers', 'pyarrow', 'duckdb', 'pydantic') if m in sys.modules])"
    )
    seconds, heavy = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split("\n")[:2]
    assert float(seconds) < 0.2
    assert heavy == ""


def test_querying_a_dataset_never_imports_torch(ds):
    code = (
        f"import sys, data_tools; ds = data_tools.open({ds.path!r}); ds.stats(); ds.sql('FROM rollouts')\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "False False\n"
