import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from data_tools import readers
from data_tools.errors import ConfigError
from tests.data_tools.logged import draw, lines, log_of, rejects_of, row_of, rows_of

KEPT = {
    "prompt": "1+1=",
    "response": "2",
    "response_ids": [7, 2],
    "behavior_logprobs": [-0.5, -0.25],
    "reward": 1.0,
}


def kept(row):
    return {key: row[key] for key in KEPT}


@pytest.mark.parametrize(
    "record",
    [
        KEPT,
        {
            "question": "1+1=",
            "completion": "2",
            "completion_ids": [7, 2],
            "logprobs": [-0.5, -0.25],
            "score": "1",
        },
        {
            "input": "1+1=",
            "output": "2",
            "token_ids": [7, 2],
            "old_log_probs": [-0.5, -0.25],
            "is_correct": True,
        },
    ],
)
def test_fields_are_found_by_their_own_and_by_well_known_names(record):
    assert kept(row_of(record)) == KEPT


def test_all_other_fields_go_to_extra_also_an_alias_that_lost():
    row = row_of(draw(score=3, tier="gold", meta={"a": [1]}, nothing=None))
    assert row["reward"] == 1.0
    assert json.loads(row["extra"]) == {"score": 3, "tier": "gold", "meta": {"a": [1]}, "nothing": None}
    assert row_of(draw())["extra"] is None


def test_what_the_log_calls_extra_is_merged():
    assert json.loads(row_of(draw(extra={"k": 1}, j=2))["extra"]) == {"k": 1, "j": 2}
    assert json.loads(row_of(draw(extra='{"k": 1}'))["extra"]) == {"k": 1}
    assert json.loads(row_of(draw(extra="words"))["extra"]) == {"extra": "words"}
    assert row_of(draw(extra=None))["extra"] is None


def test_what_could_not_be_read_stays_in_extra_under_its_own_name():
    row = row_of(draw(reward=..., score="N/A", step="late"))
    assert row["reward"] is row["policy_version"] is None
    assert json.loads(row["extra"]) == {"score": "N/A", "step": "late"}


def test_rows_of_one_block_may_use_different_names():
    first, second, third = rows_of(
        lines(draw(), draw(prompt=..., question="2+2="), draw(prompt=None, question="3+3="))
    )
    assert [first["prompt"], second["prompt"], third["prompt"]] == ["1+1=", "2+2=", "3+3="]
    assert json.loads(third["extra"]) == {"prompt": None}


def test_chat_prompts_and_responses():
    user, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
    row = row_of(draw(prompt=[user], response=[answer]))
    assert (json.loads(row["prompt"]), row["response"], row["response_messages"]) == ([user], "yo", None)
    row = row_of({"messages": [user, answer], "reward": 1})
    assert (json.loads(row["prompt"]), row["response"]) == ([user], "yo")
    row = row_of({"messages": [user], "completion": "yo"})
    assert (json.loads(row["prompt"]), row["response"]) == ([user], "yo")


def test_a_conversation_with_tool_calls_loses_no_turn(troubles):
    calls, dicts, word, broken = rows_of((troubles / "A08_tool_calls_null_content.jsonl").read_bytes())
    for row, turns in ((calls, 3), (dicts, 3), (broken, 1)):
        assert len(json.loads(row["prompt"])) == 1
        assert len(json.loads(row["response_messages"])) == turns
    assert [calls["response"], dicts["response"], word["response"]] == ["Windy.", "", "None"]
    assert word["response_messages"] is None
    first = json.loads(dicts["response_messages"])[0]
    assert first["tool_calls"][0]["function"]["arguments"] == '{"n":4}'
    assert "content" not in first
    assert broken["flags"] == ["broken_tool_arguments"]
    assert calls["prompt_hash"] == dicts["prompt_hash"] == word["prompt_hash"]


def test_a_response_of_unknown_shape_is_no_response():
    assert [
        reject.reason for reject in rejects_of(lines(draw(response={"choices": []}, response_ids=...)))
    ] == ["no_response"]


def test_lines_that_are_no_records_are_refused_by_their_number(troubles):
    data = (troubles / "A09_torn_lines.jsonl").read_bytes()
    assert [row["source_row"] for row in rows_of(data)] == [1, 3, 6]
    assert [(reject.row, reject.reason) for reject in rejects_of(data)] == [
        (2, "torn_line"),
        (4, "torn_line"),
        (7, "torn_line"),
    ]
    found = rejects_of(lines(draw()) + b'3\n"word"\n[3, {}]\n')
    assert [(reject.row, reject.reason) for reject in found] == [
        (2, "not_an_object"),
        (3, "not_an_object"),
        (4, "not_an_object"),
        (4, "no_prompt"),
    ]


def test_separators_within_a_text_stay(troubles):
    rows = rows_of((troubles / "A10_unicode_line_separators.jsonl").read_bytes())
    assert [row["response"] for row in rows] == [
        "line\u0085next",
        "line\u2028next",
        "line\u2029next",
        "line\x0b\x0c\x1cnext",
        "line\r\nnext",
    ]


def test_an_array_gives_the_same_rows_as_lines_and_on_one_line_too():
    records = [draw(response=str(n)) for n in range(3)]
    wanted = [(row["response"], row["reward"]) for row in rows_of(lines(*records))]
    for text in (json.dumps(records), json.dumps(records, indent=1), json.dumps(records) + "\n[]\n"):
        assert [(row["response"], row["reward"]) for row in rows_of(text.encode())] == wanted


def test_ids_do_not_depend_on_the_layout_of_an_array():
    records = [draw(response=str(n)) for n in range(3)]
    ids = [
        [row["response_id"] for row in rows_of(text.encode())]
        for text in (json.dumps(records), json.dumps(records, indent=1), json.dumps(records) + "\n[]\n")
    ]
    assert ids[0] == ids[1] == ids[2]


@pytest.mark.parametrize(
    "pack", [gzip.compress, zstandard.compress, lambda data: data.replace(b"\n", b"\r\n")]
)
def test_ids_do_not_depend_on_compression_or_line_ends(pack):
    data = lines(draw(), draw(response="3"))
    assert [row["response_id"] for row in rows_of(pack(data))] == [
        row["response_id"] for row in rows_of(data)
    ]


def parquet(records, **types):
    table = pa.Table.from_pylist(records)
    for name, kind in types.items():
        at = table.schema.get_field_index(name)
        table = table.set_column(at, name, table.column(name).cast(kind))
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=2)
    return sink.getvalue().to_pybytes()


def test_parquet_gives_the_rows_that_lines_give():
    records = [draw(response=str(n), tier="gold" if n else None, meta={"a": n}) for n in range(5)]
    from_lines, from_parquet = rows_of(lines(*records)), rows_of(parquet(records))
    assert [kept(row) for row in from_parquet] == [kept(row) for row in from_lines]
    assert [row["source_row"] for row in from_parquet] == [1, 2, 3, 4, 5]
    assert [json.loads(row["extra"]) for row in from_parquet] == [
        {"meta": {"a": n}} | ({"tier": "gold"} if n else {}) for n in range(5)
    ]


def test_parquet_ids_do_not_depend_on_the_width_of_types_or_on_columns_of_nulls():
    records = [draw(response=str(n), step=n) for n in range(3)]
    wide = rows_of(parquet(records))
    narrow = rows_of(
        parquet(
            records,
            step=pa.int8(),
            response_ids=pa.large_list(pa.int16()),
            prompt=pa.dictionary(pa.int8(), pa.string()),
        )
    )
    more = rows_of(parquet([{"later": None, **record} for record in records]))
    ids = [row["response_id"] for row in wide]
    assert [row["response_id"] for row in narrow] == [row["response_id"] for row in more] == ids
    assert len(set(ids)) == 3


def test_parquet_messages_become_json():
    user = {"role": "user", "content": "hi"}
    [row] = rows_of(parquet([{"prompt": [user], "completion": [{"role": "assistant", "content": "yo"}]}]))
    assert (json.loads(row["prompt"]), row["response"]) == ([user], "yo")


def test_csv_values_are_read_from_text():
    data = b'prompt,response,reward,response_ids,tier\n"1+1=\nnow",2,0.5,"[7, 2]",gold\n2+2=,4,,,\n'
    first, second = rows_of(data)
    assert (first["prompt"], first["reward"], first["response_ids"]) == ("1+1=\nnow", 0.5, [7, 2])
    assert (second["reward"], second["response_ids"], second["source_row"]) == (None, None, 4)
    assert json.loads(first["extra"]) == {"tier": "gold"}


def test_broken_csv_rows_are_refused_by_their_line():
    data = b'prompt;response\na;b\nc\nd;e;f\ng;"h" i\nj;k\n\xff;x\n'
    assert [row["response"] for row in rows_of(data)] == ["b", "k"]
    assert [(reject.row, reject.reason) for reject in rejects_of(data)] == [
        (3, "bad_csv"),
        (4, "bad_csv"),
        (5, "bad_csv"),
        (7, "bad_csv"),
    ]


def test_a_header_may_span_lines_in_quotes():
    [row] = rows_of(b'prompt,response,"tier\nof"\na,b,gold\n')
    assert (row["response"], row["source_row"], json.loads(row["extra"])) == ("b", 3, {"tier\nof": "gold"})


@pytest.mark.parametrize(
    "header", [b"\r;", b"prompt,response\ra,b\rc,d", b'"prompt"x,response', b'"prompt,response']
)
def test_below_a_header_that_is_no_csv_every_row_is_refused(header):
    from data_tools.logs.records import blocks

    data = header + b"\n" + b"a,b\n" * 3
    refused = [item for block in blocks(log_of(data)) for item in block.rejects]
    assert refused[0].row == 1
    assert {item.reason for item in refused} == {"bad_csv"}
    assert readers.detect(log_of(data)) is None


def test_a_field_written_twice_is_counted_and_the_last_one_counts():
    from tests.data_tools.logged import processed

    data = b'{"prompt": "a", "response": "b", "reward": 1, "reward": 0}\n'
    [chunk] = processed(
        data + b'{"prompt": "a", "response": "say \\"reward\\": or \\"reward\\":", "reward": 1}\n'
    )
    assert chunk.rows.table.column("reward").to_pylist() == [0.0, 1.0]
    assert chunk.notes.counts == {"duplicate_key": 1}


def test_logs_that_nobody_knows_are_named_with_their_fields():
    error = readers.unknown(log_of(b'{"alpha": 1, "beta": 2}\n'))
    assert "no known format has the fields alpha, beta" in error.message
    assert "--map" in error.hint
    assert "is not a log (text content)" in readers.unknown(log_of(b"words\n")).message


def test_an_unknown_format_names_the_nearest_one():
    with pytest.raises(ConfigError, match="did you mean rows"):
        readers.reader("row")
