import contextlib
from pathlib import Path

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import data_tools
from data_tools.errors import ConfigError
from data_tools.store.guard import check_expression, check_select
from tests.data_tools.rollout_rows import many


@pytest.fixture(scope="module")
def ds(tmp_path_factory):
    ds = data_tools.open(str(tmp_path_factory.mktemp("guard") / "ds"), create=True)
    with ds.writer() as writer:
        writer.rollouts(many(8))
        writer.commit()
    return ds


ALLOWED = [
    "SELECT 1",
    "SELECT count(*) FROM rollouts;",
    "FROM rollouts",
    "FROM rollouts SELECT reward LIMIT 1",
    "TABLE rollouts",
    "VALUES (1), (2)",
    "SELECT 1 -- ; COPY rollouts TO 'x'",
    "/* ; DROP VIEW rollouts */ SELECT 1",
    "WITH a AS (SELECT reward FROM rollouts), b AS (FROM a) SELECT * FROM b",
    "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t WHERE n < 5) SELECT * FROM t",
    "SELECT 1 UNION BY NAME SELECT 2",
    "DESCRIBE rollouts",
    "DESCRIBE SELECT reward FROM rollouts",
    "SUMMARIZE rollouts",
    "SUMMARIZE SELECT reward FROM rollouts",
    "SHOW TABLES",
    "EXPLAIN SELECT reward FROM rollouts",
    "EXPLAIN ANALYZE SELECT reward FROM rollouts",
    "EXPLAIN (FORMAT json) SELECT reward FROM rollouts",
    "EXPLAIN (ANALYZE, FORMAT json) SELECT reward FROM rollouts",
    "explain /* ü */ analyze select 'copy' from rollouts",
    "EXPLAIN (SELECT 1)",
    "PIVOT rollouts ON group_id USING count(*)",
    "PIVOT (SELECT group_id, reward, n_tokens FROM rollouts) ON group_id USING avg(reward) GROUP BY n_tokens",
    "WITH p AS (PIVOT rollouts ON group_id USING count(*)) SELECT * FROM p",
    "SELECT * FROM (PIVOT rollouts ON group_id USING count(*))",
    "PIVOT rollouts ON group_id IN ('g0', 'g1') USING count(*)",
    "UNPIVOT (SELECT reward, n_tokens FROM rollouts) ON COLUMNS(*)",
    "SELECT * FROM range(3), generate_series(1, 2), unnest([1, 2])",
    "SELECT key FROM json_each('{\"a\": 1}')",
    "SELECT * FROM information_schema.tables",
    "SELECT copy.reward AS delete FROM rollouts AS copy",
    "SELECT list_transform([1, 2], lambda x: x + 1)",
    "SELECT reward, rank() OVER (PARTITION BY group_id ORDER BY reward) FROM rollouts QUALIFY reward > 0",
    "SELECT extra->>'tier' FROM rollouts WHERE response ILIKE '%/etc/passwd.csv%'",
]


@pytest.mark.parametrize("query", ALLOWED)
def test_a_select_in_any_form_runs(ds, query):
    rows = ds.sql(query).num_rows
    assert query.startswith("EXPLAIN ANALYZE") or ds.reader(query).read_all().num_rows == rows


REFUSED = [
    "",
    "  -- nothing",
    ";",
    "SELECT 1; SELECT 2",
    "SELECT 1;; DROP VIEW rollouts",
    "SELECT 1\0; COPY (SELECT 1) TO 'x'",
    "COPY rollouts TO '{out}'",
    "COPY (SELECT 1) TO '{out}' (FORMAT parquet)",
    "ATTACH '{out}'",
    "DETACH memory",
    "INSTALL httpfs",
    "LOAD httpfs",
    "FORCE INSTALL httpfs",
    "UPDATE EXTENSIONS",
    "SET memory_limit = '1GB'",
    "SET VARIABLE a = 1",
    "RESET memory_limit",
    "PRAGMA version",
    "PRAGMA database_list",
    "CALL pragma_version()",
    "USE memory",
    "BEGIN",
    "CHECKPOINT",
    "VACUUM",
    "CREATE TABLE t AS SELECT 1",
    "CREATE OR REPLACE VIEW rollouts AS SELECT 1",
    "CREATE MACRO m(a) AS a",
    "CREATE SECRET s (TYPE s3)",
    "INSERT INTO rollouts VALUES (1)",
    "DELETE FROM rollouts",
    "UPDATE rollouts SET reward = 1",
    "TRUNCATE rollouts",
    "MERGE INTO rollouts USING groups ON true WHEN MATCHED THEN DELETE",
    "DROP VIEW rollouts",
    "ALTER VIEW rollouts RENAME TO x",
    "COMMENT ON VIEW rollouts IS 'x'",
    "PREPARE p AS SELECT 1",
    "EXECUTE p",
    "EXPORT DATABASE '{out}'",
    "IMPORT DATABASE '{out}'",
    "EXPLAIN COPY (SELECT 1) TO '{out}'",
    "EXPLAIN ANALYZE COPY (SELECT 1) TO '{out}'",
    "EXPLAIN (ANALYZE) COPY (SELECT 1) TO '{out}'",
    "EXPLAIN (ANALYZE, FORMAT json) COPY (SELECT 1) TO '{out}'",
    "EXPLAIN /* SELECT */ ANALYZE /* SELECT */ COPY (SELECT 1) TO '{out}'",
    "EXPLAIN ANALYZE CREATE TABLE t AS SELECT 1",
    "EXPLAIN ANALYZE WITH x AS (COPY (SELECT 1) TO '{out}') SELECT * FROM x",
    "WITH x AS (COPY (SELECT 1) TO '{out}') SELECT * FROM x",
    "WITH x AS (SELECT 1), y AS (COPY x TO '{out}') SELECT * FROM x",
    "SELECT * FROM (WITH x AS (COPY (SELECT 1) TO '{out}') SELECT * FROM x)",
    "SELECT (WITH x AS (COPY (SELECT 1) TO '{out}') SELECT count(*) FROM x)",
    "SELECT 1 UNION ALL (WITH x AS (COPY (SELECT 1) TO '{out}') SELECT count(*) FROM x)",
    "DESCRIBE (WITH x AS (COPY (SELECT 1) TO '{out}') SELECT * FROM x)",
    "SUMMARIZE (WITH x AS (COPY (SELECT 1) TO '{out}') SELECT * FROM x)",
    "WITH x AS (COPY (SELECT 1) TO '{out}') PIVOT x ON Count USING count(*)",
    "PIVOT (WITH x AS (COPY (SELECT 1) TO '{out}') FROM x) ON Count USING count(*)",
    "WITH x AS (INSERT INTO rollouts VALUES (1) RETURNING *) SELECT * FROM x",
    "WITH x AS (DELETE FROM rollouts RETURNING *) SELECT * FROM x",
    "SELECT * FROM read_text('/etc/passwd')",
    "SELECT * FROM Read_Text('/etc/passwd')",
    "SELECT * FROM \"read_text\"('/etc/passwd')",
    "SELECT * FROM main.read_text('/etc/passwd')",
    "SELECT * FROM system.main.read_text('/etc/passwd')",
    "SELECT (SELECT content FROM read_text('/etc/passwd'))",
    "SELECT * FROM rollouts WHERE EXISTS (FROM read_csv('/etc/passwd'))",
    "SELECT * FROM read_blob('/etc/passwd')",
    "SELECT * FROM read_csv('/etc/passwd')",
    "SELECT * FROM read_parquet('{out}')",
    "SELECT * FROM glob('/etc/*')",
    "SELECT * FROM sniff_csv('/etc/passwd')",
    "SELECT * FROM '/etc/passwd'",
    "SELECT * FROM 'secret.csv'",
    'SELECT * FROM "secret.parquet"',
    "DESCRIBE 'secret.csv'",
    "SUMMARIZE 'secret.csv'",
    "PIVOT read_csv('/etc/passwd') ON column0 USING count(*)",
    "PIVOT \"read_csv\"('/etc/passwd') ON column0 USING count(*)",
    "PIVOT 'secret.csv' ON a USING count(*)",
    'PIVOT "secret.csv" ON a USING count(*)',
    "SELECT * FROM query('SELECT 1')",
    "SELECT * FROM query_table('rollouts')",
    "PIVOT query('SELECT 1 AS a') ON a USING count(*)",
    "SELECT getenv('HOME')",
    "SELECT ('HOME').getenv()",
    "SELECT current_setting('temp_directory')",
    "SELECT json_execute_serialized_sql(json_serialize_sql('SELECT 1'))",
    "SELECT * FROM json_execute_serialized_sql(json_serialize_sql('SELECT 1'))",
    "SELECT * FROM duckdb_settings()",
    "SELECT * FROM duckdb_secrets()",
    "SELECT * FROM arrow_scan(1, 2, 3)",
    "SELECT * FROM enable_logging()",
    "SELECT * FROM force_checkpoint()",
    "SELECT write_log('x')",
    "SELEKT 1",
    "SELECT",
]


@pytest.mark.parametrize("query", REFUSED)
def test_anything_else_is_refused_in_one_line_and_touches_nothing(ds, tmp_path, monkeypatch, query):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret.csv").write_text("a\n1\n")
    out = Path(ds.path, "rollouts", "planted.parquet")
    with pytest.raises(ConfigError) as refusal:
        ds.sql(query.replace("{out}", str(out)))
    assert "\n" not in refusal.value.message
    assert not out.exists()
    assert ds.sql("SELECT count(*) AS n FROM rollouts").to_pylist() == [{"n": 8}]


BEHIND_THE_GUARD = [
    "SELECT * FROM read_text('/etc/passwd')",
    "SELECT * FROM glob('/etc/*')",
    "SELECT * FROM read_text('{ds}/rec.json')",
    "COPY (SELECT 1) TO '{ds}/rollouts/planted.parquet'",
    "COPY (SELECT 1) TO '/tmp/planted.parquet'",
    "ATTACH '{ds}/planted.db'",
    "INSTALL httpfs",
    "LOAD '{ds}/x.duckdb_extension'",
    "SET enable_external_access = true",
    "SET memory_limit = '100GB'",
    "SELECT * FROM local_variable",
]


@pytest.mark.parametrize("query", BEHIND_THE_GUARD)
def test_the_connection_itself_refuses_files_and_settings(ds, query):
    local_variable = many(1)
    with ds.connect() as con, pytest.raises(duckdb.Error):
        con.execute(query.replace("{ds}", ds.path)).fetchall()
    assert local_variable.num_rows == 1
    assert not Path(ds.path, "rollouts", "planted.parquet").exists()


def test_the_statement_comes_back_as_it_was_written():
    assert check_select("EXPLAIN ANALYZE SELECT 1;") == "EXPLAIN ANALYZE SELECT 1;"


def test_deep_nesting_is_an_error_and_no_crash():
    for query in ("SELECT " + "(" * 20_000 + "1" + ")" * 20_000, "SELECT " + "+".join(["1"] * 20_000)):
        with pytest.raises(ConfigError):
            check_select(query)


@pytest.mark.parametrize(
    "text",
    [
        "reward",
        "reward > 0 -- a comment",
        "/* a */ 1",
        "CASE WHEN reward > 0 THEN 1 ELSE 0 END",
        "avg(reward) OVER (PARTITION BY group_id)",
        "extra->>'a' = ')'",
        "(1) + (2)",
        "reward IN (1, 2)",
        "$$ ; $$",
    ],
)
def test_an_expression_passes(text):
    assert check_expression(text, "weight") == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1, 2",
        "1) AS a, (2",
        "1) FROM rollouts --",
        "1) WHERE (true",
        "1) ORDER BY (1",
        "1) LIMIT (1",
        "1) UNION SELECT (2",
        "true) OR (true",
        "least(1) + (2",
        "1); SELECT (2",
        "1); DROP VIEW rollouts; --",
        "1) GROUP BY (1",
        "1) HAVING (true",
        "1) QUALIFY (true",
        "1) USING SAMPLE (1",
        "(SELECT 1)",
        "EXISTS (FROM rollouts)",
        "reward IN (SELECT 1)",
        "getenv('HOME')",
        "SELECT 1",
        "reward >",
    ],
)
def test_what_is_no_plain_expression_is_refused_by_the_name_of_its_field(text):
    with pytest.raises(ConfigError):
        check_expression(text, "weight")


def test_a_subquery_passes_where_it_is_asked_for_but_not_a_file():
    check_expression("response_id IN (SELECT 'a')", "--where", subqueries=True)
    with pytest.raises(ConfigError, match="read_text"):
        check_expression("EXISTS (FROM read_text('/etc/passwd'))", "--where", subqueries=True)


WORDS = st.sampled_from(
    [
        *(
            "SELECT",
            "FROM",
            "WITH",
            "x",
            "AS",
            "(",
            ")",
            "COPY",
            "TO",
            "'f'",
            "1",
            ",",
            ";",
            "--",
            "\n",
            "/*",
            "*/",
        ),
        *(
            "EXPLAIN",
            "ANALYZE",
            "PIVOT",
            "ON",
            "USING",
            "count(*)",
            "DELETE",
            "INSERT",
            "INTO",
            "RETURNING",
            "*",
        ),
        *("DESCRIBE", "read_text('/etc/passwd')", "query('SELECT 1')", "$$", '"', "UNION", "ü", "t"),
    ]
)


@settings(max_examples=100, deadline=None)
@given(st.lists(WORDS, min_size=1, max_size=12).map(" ".join))
def test_whatever_passes_changes_nothing(query):
    with duckdb.connect() as con:
        con.execute("CREATE TABLE t AS SELECT 1 AS x; CREATE TABLE x AS SELECT 2 AS t")
        con.execute("SET enable_external_access = false")
        try:
            statement = check_select(query, con)
        except ConfigError:
            return
        with contextlib.suppress(duckdb.Error):
            con.execute(statement).fetchall()
        assert con.execute("SELECT * FROM t, x").fetchall() == [(1, 2)]
