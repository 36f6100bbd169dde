"""`rec sql`: forms, files, pipes, and what is refused."""

import csv
import json

import pyarrow.parquet as pq
import pytest

COUNTS = "SELECT policy, count(*) AS n FROM rollouts GROUP BY policy ORDER BY policy"


def test_table_is_the_default(run, dataset):
    result = run("sql", dataset, COUNTS)
    assert [line.split() for line in result.stdout.splitlines() if "─" not in line] == [
        ["policy", "n"],
        ["new", "20"],
        ["old", "20"],
    ]


def test_csv(run, dataset):
    assert run("sql", dataset, COUNTS, "--format", "csv").stdout == "policy,n\nnew,20\nold,20\n"


def test_json_is_one_array_with_a_row_a_line(run, dataset):
    result = run("sql", dataset, COUNTS, "--json")
    assert json.loads(result.stdout) == [{"policy": "new", "n": 20}, {"policy": "old", "n": 20}]
    assert len(result.stdout.splitlines()) == 2


def test_no_rows_are_an_empty_array(run, dataset):
    assert json.loads(run("sql", dataset, "SELECT * FROM rollouts WHERE false", "--json").stdout) == []


def test_lists_are_json_text_in_csv(run, dataset):
    result = run("sql", dataset, "SELECT [1, 2] AS l, NULL AS n, true AS b", "--format", "csv")
    assert list(csv.reader(result.stdout.splitlines())) == [["l", "n", "b"], ["[1,2]", "", "True"]]


def test_the_ending_of_the_file_chooses_the_form(run, dataset, tmp_path):
    assert run("sql", dataset, COUNTS, "-o", tmp_path / "n.csv").stdout == ""
    assert (tmp_path / "n.csv").read_text() == "policy,n\nnew,20\nold,20\n"
    run("sql", dataset, COUNTS, "-o", tmp_path / "n.parquet")
    assert pq.read_table(tmp_path / "n.parquet").to_pydict() == {"policy": ["new", "old"], "n": [20, 20]}


def test_parquet_goes_through_a_pipe(shell, dataset, tmp_path):
    result = shell(f'rec sql {dataset} "{COUNTS}" --format parquet | cat > {tmp_path}/n.parquet')
    assert result.returncode == 0, result.stderr
    assert pq.read_table(tmp_path / "n.parquet").num_rows == 2


def test_a_type_that_parquet_does_not_know_is_named(run, dataset, tmp_path):
    result = run("sql", dataset, "SELECT INTERVAL 1 DAY AS wait", "-o", tmp_path / "x.parquet")
    assert result.exit_code == 2
    assert "wait month_day_nano_interval" in result.stderr
    assert not list(tmp_path.glob("x*"))


def test_a_failed_query_leaves_no_file(run, dataset, tmp_path):
    target = tmp_path / "out" / "x.csv"
    result = run(
        "sql", dataset, "SELECT CAST(response AS INT) + CAST(prompt AS INT) FROM rollouts", "-o", target
    )
    assert result.exit_code == 2
    assert not list(tmp_path.glob("out/*"))


def test_the_query_may_come_from_stdin_or_a_file(run, dataset, tmp_path):
    (tmp_path / "q.sql").write_text(COUNTS)
    assert (
        run("sql", dataset, "-", "--json", stdin=COUNTS).stdout
        == run("sql", dataset, tmp_path / "q.sql", "--json").stdout
    )


def test_a_long_table_is_cut_with_a_note(run, dataset):
    result = run("sql", dataset, "SELECT * FROM range(1001)")
    assert "only the first 1000 rows" in result.stderr
    assert (
        len(run("sql", dataset, "SELECT * FROM range(1001)", "--format", "csv").stdout.splitlines()) == 1002
    )


@pytest.mark.parametrize(
    "query",
    [
        "COPY rollouts TO '/tmp/x.csv'",
        "EXPLAIN ANALYZE COPY rollouts TO '/tmp/x.csv'",
        "ATTACH '/tmp/x.db'",
        "SELECT 1; SELECT 2",
        "SELECT * FROM read_text('/etc/passwd')",
        "SELECT nope FROM rollouts",
        "SELEC 1",
        "",
    ],
)
def test_anything_but_one_readable_select_is_wrong_usage(run, dataset, query):
    result = run("sql", dataset, query)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")


def test_a_directory_that_is_no_dataset_fails(run, tmp_path):
    result = run("sql", tmp_path, "SELECT 1")
    assert result.exit_code == 1
    assert "rec.json" in result.stderr
