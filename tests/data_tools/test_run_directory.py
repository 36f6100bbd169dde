import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import data_tools
from data_tools.errors import ConfigError, DataError


@pytest.fixture
def run(tmp_path):
    (tmp_path / "config.yaml").write_text("algorithm: rec\n")
    return tmp_path


def test_metrics_and_lineage_answer_sql(run):
    records = [{"step": 1, "loss": 0.5, "timing": {"seconds": 1.5}}, {"step": 2, "loss": None, "kl": 0.1}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (run / "lineage").mkdir()
    pq.write_table(
        pa.table({"step": [1], "response_id": ["a"], "weight": [2.0]}), run / "lineage" / "1-0.parquet"
    )
    opened = data_tools.open(str(run))
    assert opened.sql(
        "SELECT step, loss, kl, timing.seconds AS s FROM metrics ORDER BY step"
    ).to_pylist() == [
        {"step": 1, "loss": 0.5, "kl": None, "s": 1.5},
        {"step": 2, "loss": None, "kl": 0.1, "s": None},
    ]
    assert opened.sql("SELECT response_id, weight FROM lineage").to_pylist() == [
        {"response_id": "a", "weight": 2.0}
    ]


def test_a_run_that_has_just_begun_has_empty_views(run):
    opened = data_tools.open(str(run))
    assert opened.sql("FROM metrics").num_rows == 0
    assert opened.sql("SELECT step, response_id, weight, mean_ratio, kept_share FROM lineage").num_rows == 0


def test_a_half_written_last_line_is_left_out(run):
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "lo')
    assert data_tools.open(str(run)).sql("SELECT step FROM metrics").to_pylist() == [{"step": 1}]


def test_a_column_that_appears_late_is_found(run):
    lines = [json.dumps({"step": i}) for i in range(30_000)] + [json.dumps({"step": 30_000, "late": 1.0})]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert data_tools.open(str(run)).sql("SELECT max(late) AS m FROM metrics").to_pylist() == [{"m": 1.0}]


def test_what_only_a_dataset_can_do_is_refused_by_name(run):
    opened = data_tools.open(str(run))
    for use in (lambda: opened.batches(), lambda: opened.stats(), lambda: opened.delete("true")):
        with pytest.raises(DataError, match="is the run directory of a fit, not a dataset"):
            use()
    assert not hasattr(opened, "no_such_thing")


def test_a_run_is_guarded_like_a_dataset(run):
    with pytest.raises(ConfigError):
        data_tools.open(str(run)).sql("COPY metrics TO 'x'")
    with pytest.raises(ConfigError):
        data_tools.open(str(run)).sql("SELECT * FROM read_text('/etc/passwd')")
