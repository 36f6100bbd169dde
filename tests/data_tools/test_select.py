import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import data_tools
from data_tools.errors import ConfigError, DataError
from tests.data_tools.logged import collected, dataset, draw, lines, rollouts

GSM8K = (Path(__file__).parents[2] / "docs" / "gsm8k.sql").read_text(encoding="utf-8")


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(lines({"q": "1+1=", "a": "2", "s": 10}, {"q": "2+2=", "a": "5", "s": "1"}))
    return path


def test_gsm8k_solutions_become_four_responses_a_question(tmp_path):
    excerpt = Path(__file__).parents[1] / "cases" / "gsm8k_excerpt.jsonl"
    report = collected(tmp_path, excerpt, select=GSM8K)
    assert (report.total.input_rows, report.total.read, report.total.kept) == (8, 32, 32)
    ds = dataset(tmp_path)
    assert ds.sql("SELECT count(*) AS g, min(n) AS n FROM groups").to_pylist() == [{"g": 8, "n": 4}]
    records = [json.loads(line) for line in excerpt.read_text().splitlines()]
    for row in rollouts(tmp_path):
        record = records[row["source_row"] - 1]
        assert row["prompt"] == record["question"]
        assert row["response"] == record[row["policy"]]["solution"]
        assert row["reward"] == record[row["policy"]]["is_correct"]
        assert json.loads(row["extra"]) == {"ground_truth": record["ground_truth"]}
    assert collected(tmp_path, excerpt, select=GSM8K).total.duplicate == 32


def test_a_select_over_a_log_that_grew_adds_only_what_is_new(tmp_path, log):
    query = "SELECT q AS prompt, a AS response, s::DOUBLE / 10 AS reward FROM source"
    log.write_bytes(lines({"q": "1+1=", "a": "2", "s": 10}))
    collected(tmp_path, log, select=query)
    log.write_bytes(lines({"q": "1+1=", "a": "2", "s": 10}, {"q": "2+2=", "a": "5", "s": 0.5, "new": [1]}))
    report = collected(tmp_path, log, select=query)
    assert (report.total.kept, report.total.duplicate) == (1, 1)


def test_bad_lines_are_refused_by_number_before_the_select_sees_them(tmp_path, log):
    log.write_bytes(b'{"q": "a", "a": "b"}\n{"q": "torn\n\n[1]\n{"q": NaN, "q": "c", "a": "\\ud800"}\r\n')
    report = collected(tmp_path, log, select="SELECT q AS prompt, a AS response, source_row FROM source")
    assert report.total.rejected == {"torn_line": 1, "not_an_object": 1}
    assert report.logs[0].where == {"torn_line": [2], "not_an_object": [4]}
    assert [(row["prompt"], row["response"], row["source_row"]) for row in rollouts(tmp_path)] == [
        ("a", "b", 1),
        ("c", "\\ud800", 5),
    ]


def test_mapped_columns_go_before_named_ones_and_the_rest_is_found_by_name(tmp_path, log):
    log.write_bytes(lines(draw(score=8, question="other"), draw(response="3", score=2)))
    collected(
        tmp_path, log, map={"reward": "score / 10", "policy": "'p' || source_row", "prompt": "upper(prompt)"}
    )
    rows = rollouts(tmp_path)
    assert [(row["reward"], row["policy"], row["prompt"]) for row in rows] == [
        (0.8, "p1", "1+1="),
        (0.2, "p2", "1+1="),
    ]
    assert rows[0]["response_ids"] == [7, 2]
    assert json.loads(rows[0]["extra"]) == {"score": 8, "question": "other", "reward": 1.0, "prompt": "1+1="}


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_mapping_a_column_does_not_make_other_rows_of_a_log(tmp_path, kind):
    log = tmp_path / f"log.{kind}"
    records = [{"prompt": "a", "response": "b", "score": 5}, {"prompt": "a", "response": "c", "score": 6}]
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(records), log)
    elif kind == "csv":
        log.write_text("prompt,response,score\na,b,5\na,c,6\n")
    else:
        log.write_bytes(lines(*records))
    collected(tmp_path, log)
    report = collected(tmp_path, log, map={"reward": "score / 10"})
    assert (report.total.kept, report.total.duplicate) == (0, 2)
    report = data_tools.collect([str(log)], tmp_path / "new", map={"reward": "score::INT / 10"})
    assert report.total.kept == 2
    rows = data_tools.open(str(tmp_path / "new")).sql("SELECT reward FROM rollouts ORDER BY reward")
    assert rows.column("reward").to_pylist() == [0.5, 0.6]


def test_rows_that_a_select_sums_up_have_no_source_row(tmp_path, log):
    collected(tmp_path, log, select="SELECT 'all' AS prompt, string_agg(a, ' ') AS response FROM source")
    assert [(row["response"], row["source_row"]) for row in rollouts(tmp_path)] == [("2 5", None)]


def test_json_columns_are_values_and_messages(tmp_path, log):
    user = {"role": "user", "content": "hi"}
    log.write_bytes(
        lines({"p": "text", "r": "b"}, {"p": [user], "r": [{"role": "assistant", "content": "yo"}]})
    )
    collected(tmp_path, log, select="SELECT p AS prompt, r AS response, source_row FROM source")
    rows = rollouts(tmp_path)
    assert [row["prompt"] for row in rows] == ["text", '[{"role":"user","content":"hi"}]']
    assert [row["response"] for row in rows] == ["b", "yo"]


def test_a_field_named_source_row_does_not_hide_the_row_number(tmp_path, log):
    log.write_bytes(lines({"prompt": "a", "response": "b", "source_row": 77}))
    collected(tmp_path, log, select="SELECT * FROM source")
    assert [row["source_row"] for row in rollouts(tmp_path)] == [1]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("SELECT nothing FROM source", "nothing"),
        ("SELECT a::INT AS reward, q AS prompt, a AS response FROM (SELECT 'x' AS a, q FROM source)", "'x'"),
        ("SELECT * FROM read_text('/etc/passwd')", "read_text is refused"),
        ("SELECT * FROM '/etc/passwd'", "refused"),
        ("COPY source TO 'x'", "COPY.* is refused"),
        ("SELECT 1; SELECT 2", "2 statements"),
        ("SELEC", "syntax error"),
    ],
)
def test_a_query_that_fails_says_why_and_writes_nothing(tmp_path, log, query, message):
    with pytest.raises(ConfigError, match=message):
        collected(tmp_path, log, select=query)
    assert dataset(tmp_path).batches() == []


def test_a_wrong_column_names_the_fields_there_are(tmp_path, log):
    with pytest.raises(ConfigError, match="source has the fields: q, a, s, source_row"):
        collected(tmp_path, log, select="SELECT nothing FROM source")
    with pytest.raises(ConfigError, match="there is no column 'rewards'"):
        collected(tmp_path, log, map={"rewards": "s"})
    with pytest.raises(ConfigError, match="--map reward"):
        collected(tmp_path, log, map={"reward": "s) FROM source; DROP TABLE x; --"})


def test_only_tables_can_be_selected_from(tmp_path):
    image = tmp_path / "x.png"
    image.write_bytes(b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR")
    with pytest.raises(DataError, match="is not a log"):
        collected(tmp_path, image, select="FROM source")


def test_a_log_without_good_records_gives_its_rejects(tmp_path, log):
    log.write_bytes(b'{"torn\n')
    assert collected(tmp_path, log, select="FROM source").total.rejected == {"torn_line": 1}


def test_texts_that_look_like_something_else_stay_texts(tmp_path, log):
    texts = ["2026-01-05", "12:00:00", "A8098C1A-F86E-11DA-BD1A-00112444BE1E", "007", "0x10", "true"]
    for text in texts:
        log.write_bytes(lines({"prompt": text, "response": text, "x": text}))
        report = data_tools.collect([str(log)], tmp_path / text, map={"policy": "x"})
        assert report.total.kept == 1
        [row] = data_tools.open(str(tmp_path / text)).sql("FROM rollouts").to_pylist()
        assert [row["prompt"], row["response"], row["policy"]] == [text] * 3
        log.write_text(f"prompt,response,x\n{text},{text},5\n")
        report = data_tools.collect([str(log)], tmp_path / f"{text}.csv", map={"reward": "x / 10"})
        [row] = data_tools.open(str(tmp_path / f"{text}.csv")).sql("FROM rollouts").to_pylist()
        assert [row["prompt"], row["response"], row["reward"]] == [text, text, 0.5]


def test_fields_of_any_shape_can_be_selected(tmp_path, log):
    wide = {f"k{n}": n for n in range(1000)}
    log.write_bytes(
        lines(
            {
                "p": "a",
                "wide": wide,
                "cases": {"A": 1, "a": 2},
                "mixed": 1,
                "none": None,
                "": 1,
                "deep": {"x": [1]},
            },
            {"p": "b", "mixed": "z", "later": True, "deep": {"y": 2.5}},
        )
    )
    query = """SELECT p AS prompt, coalesce(wide->>'k7', 'x') || coalesce(mixed->>'$', '') AS response,
        cases->>'A' AS a, deep.y AS y, later FROM source"""
    collected(tmp_path, log, select=query)
    rows = rollouts(tmp_path, order="prompt")
    assert [row["response"] for row in rows] == ["71", "xz"]
    assert [json.loads(row["extra"]) for row in rows] == [{"a": "1"}, {"y": 2.5, "later": True}]


def test_fields_that_differ_in_case_only_are_one_clear_error(tmp_path, log):
    log.write_bytes(lines({"prompt": "a", "response": "b", "Reward": 1, "reward": 2}))
    with pytest.raises(DataError, match="SQL cannot tell the fields Reward and reward apart"):
        collected(tmp_path, log, map={"policy": "'p'"})
