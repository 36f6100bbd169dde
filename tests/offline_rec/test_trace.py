"""Lineage both ways, on real runs: against the files that they wrote, and over runs begun from each other."""

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import data_tools
from data_tools.errors import ConfigError, DataError
from offline_rec.tracing.erasure import trace_erased
from offline_rec.tracing.runs import TracedRun
from offline_rec.tracing.trace import trace
from offline_rec.training.fit import fit
from offline_rec.training.lineage import SCHEMA
from tests.offline_rec.fitting import config, lineage, world


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run of six updates of two of its eight groups, and two runs that began with its weights."""
    folder = world(tmp_path_factory.mktemp("trace"))
    fit(config(folder, keep_checkpoints=9, groups_per_step=2))
    short = {"steps": 1, "eval_every": None, "where": "group_id = 'g1'", "groups_per_step": 1}
    for step in (2, 6):
        start = folder / "run" / "checkpoints" / f"step-{step}" / "model"
        fit(config(folder, f"after-{step}", model=str(start), **short))
    return folder


def late_row(run):
    """A row of another group than g1 that was first used after update 2, and by which."""
    first = {}
    for step, row, *_ in lineage(run):
        first.setdefault(row, step)
    return next((row, step) for row, step in first.items() if step > 2 and not row.startswith("r1-"))


def test_a_row_is_followed_to_its_updates_and_the_weights_that_hold_it(place):
    run = place / "run"
    wanted = [row for row in lineage(run) if row[1] == "r1-0"]
    found = trace(run, row="r1-0")
    assert [(u["step"], u["weight"], u["mean_ratio"], u["kept_share"]) for u in found.uses] == [
        (step, weight, ratio, kept) for step, _, weight, ratio, kept in wanted
    ]
    assert {u["advantage"] for u in found.uses} == {0.75}  # one right answer among four
    assert (found.policy, found.policy_version, found.reward) == ("tiny", 1, 1.0)
    assert found.first_step == wanted[0][0]
    checkpoints = [run / "checkpoints" / f"step-{n}" for n in (2, 4, 6) if n >= wanted[0][0]]
    assert found.holding == [str(path) for path in [*checkpoints, run / "model"]]


def test_an_update_is_followed_to_its_rows(place):
    run = place / "run"
    wanted = {row[1]: row for row in lineage(run) if row[0] == 3}
    found = trace(run, step=3, limit=5)
    assert (found.n_rows, len(found.rows), found.weight) == (len(wanted), 5, float(len(wanted)))
    for row in found.rows:
        assert (row["weight"], row["mean_ratio"], row["kept_share"]) == wanted[row["response_id"]][2:]
        assert row["policy_version"] == int(row["response_id"].split("-")[0][1:]) % 3
    assert [abs(row["advantage"]) for row in found.rows] == [0.75] * 2 + [0.25] * 3
    assert sum(one["rows"] for one in found.policies) == len(wanted)
    assert f"{len(wanted) - 5} more rows are not shown" in "\n".join(found.lines())
    assert found.record["step"] == 3
    assert "timing" not in found.record
    assert [Path(path).name for path in found.holding] == ["step-4", "step-6", "model"]
    assert len(trace(run, step=3, limit=None).rows) == len(wanted)


def test_what_is_not_there_is_named_with_the_nearest(place):
    run = place / "run"
    with pytest.raises(DataError, match="used no row 'r1-9'") as error:
        trace(run, row="r1-9")
    assert error.value.hint.startswith("did you mean r1-")
    with pytest.raises(DataError, match="has no update 7") as error:
        trace(run, step=7)
    assert error.value.hint == "its updates are 1 to 6"
    with pytest.raises(DataError, match="does not exist"):
        trace(place / "none", step=1)
    with pytest.raises(DataError, match="is no run directory"):
        trace(place / "m", step=1)
    with pytest.raises(ConfigError):
        trace(run)


def test_a_row_that_no_update_used_is_told_with_the_reason(place):
    ds = data_tools.open(str(place / "ds"))
    held = ds.sql("SELECT response_id FROM rollouts WHERE split = 'holdout' LIMIT 1")["response_id"][
        0
    ].as_py()
    found = trace(place / "run", row=held)
    assert (found.n_uses, found.uses, found.holding) == (0, [], [])
    assert found.notes == ["its prompt is in the holdout split, which training never sees"]


def test_a_run_whose_dataset_and_index_are_gone_still_tells_its_lineage(place, tmp_path):
    shutil.copytree(place / "run", tmp_path / "run", ignore=shutil.ignore_patterns("index", "checkpoints"))
    told = (tmp_path / "run" / "config.yaml").read_text()
    (tmp_path / "run" / "config.yaml").write_text(told.replace(str(place / "ds"), str(tmp_path / "gone")))
    found = trace(tmp_path / "run", row="r1-0")
    assert found.n_uses == len([row for row in lineage(place / "run") if row[1] == "r1-0"])
    assert (found.uses[0]["advantage"], found.policy, found.reward) == (None, None, None)
    assert "is not there" in found.notes[0]
    assert trace(tmp_path / "run", step=1).rows[0]["policy"] is None


def test_erased_rows_name_the_weights_that_learned_from_them(place, tmp_path):
    run = place / "run"
    row, step = late_row(run)
    (tmp_path / "ids.txt").write_text(f"{row}\nnever seen\n")
    found = trace_erased([run, place / "after-2", place / "after-6"], tmp_path / "ids.txt")
    whole, before, after = found.runs
    assert (found.n_erased, whole.n_rows, whole.rows, whole.first_step) == (2, 1, [row], step)
    assert [Path(path).name for path in whole.touched] == [
        *(f"step-{n}" for n in (2, 4, 6) if n >= step), "model"
    ]  # fmt: skip
    assert [Path(path).name for path in whole.clean] == [f"step-{n}" for n in (2, 4, 6) if n < step]
    # A run that began before the row was used has nothing of it; one that began after has all of it.
    assert (before.touched, before.inherited) == ([], None)
    assert after.inherited == str(run / "checkpoints" / "step-6" / "model")
    assert after.touched
    assert not after.clean
    # The run that it began with need not be named.
    assert trace_erased([place / "after-6"], tmp_path / "ids.txt").runs[0] == after


def test_rows_that_delete_erased_are_known_by_their_hashes(place, tmp_path):
    shutil.copytree(place / "ds", tmp_path / "ds")
    ds = data_tools.open(str(tmp_path / "ds"))
    assert trace_erased([place / "run"], tmp_path / "ds").touched == []
    ds.delete("response_id IN ('r1-0', 'r1-1')")
    found = trace_erased([place / "run"], tmp_path / "ds")
    assert (found.n_erased, found.runs[0].n_rows, found.runs[0].rows) == (2, 2, ["r1-0", "r1-1"])
    assert str(place / "run" / "model") in found.touched


def test_parts_that_a_loop_has_not_joined_yet_are_read_from_its_rounds(tmp_path):
    def part(path, step, **more):
        path.parent.mkdir(parents=True)
        row = {"step": step, "response_id": f"r{step}", "weight": 1.0} | more
        schema = SCHEMA
        for name, kind in (("policy", pa.string()), ("policy_version", pa.int64())):
            schema = schema.append(pa.field(name, kind)) if more else schema
        pq.write_table(pa.Table.from_pylist([row], schema=schema), path)

    loop = tmp_path / "loop"
    for number in (1, 2):
        part(loop / "rounds" / f"0{number}" / "lineage" / f"{number}-0.parquet", number)
        (loop / "rounds" / f"0{number}" / "snapshot.json").write_text("{}")
        (loop / "rounds" / f"0{number}" / "checkpoints" / f"step-{number}").mkdir(parents=True)
    part(loop / "lineage" / "1-0.parquet", 1, policy="p", policy_version=0)
    (loop / "config.yaml").write_text("dataset: /none\nmodel: /none\n")
    found = trace(loop, row="r1")
    assert (found.n_uses, found.policy, found.policy_version) == (
        1,
        "p",
        0,
    )  # once, although two files hold it
    assert [Path(path).name for path in found.holding] == ["step-1", "step-2"]
    assert [Path(path).name for path in trace(loop, row="r2").holding] == ["step-2"]
    assert len(TracedRun(loop).fits) == 2
