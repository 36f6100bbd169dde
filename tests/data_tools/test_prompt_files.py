"""Files of prompts: any kind of file, any usual name, and the first row that has none is named."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_tools.collecting.prompt_files import PromptRow, read_prompts
from data_tools.errors import DataError

ROWS = [{"question": "2+2?", "answer": "4"}, {"question": "3+3?", "answer": "6"}]
EXPECTED = [PromptRow("2+2?", None, {"answer": "4"}), PromptRow("3+3?", None, {"answer": "6"})]


def written(folder, kind):
    path = folder / f"prompts.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    elif kind == "csv":
        path.write_text("question,answer\n2+2?,4\n3+3?,6\n")
    elif kind == "json":
        path.write_text(json.dumps(ROWS, indent=1))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_every_kind_of_file_gives_the_same_prompts(tmp_path, kind):
    assert read_prompts(str(written(tmp_path, kind))) == EXPECTED


def lines(tmp_path, *records):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_a_prompt_is_text_or_messages_and_a_response_behind_them_is_left_out(tmp_path):
    asked = {"role": "user", "content": "2+2?"}
    tools = [{"type": "function", "function": {"name": "add"}}]
    path = lines(
        tmp_path,
        {"prompt": [asked], "tools": tools, "answers": ["4", "four"]},
        {"messages": [asked, {"role": "assistant", "content": "4"}]},
        {"prompt": "[1, 2]", "score": 1},
    )
    first, second, third = read_prompts(path)
    assert json.loads(first.prompt) == [asked]
    assert json.loads(first.tools) == tools
    assert first.fields == {"answers": ["4", "four"]}
    assert (json.loads(second.prompt), second.fields) == ([asked], {})
    assert (third.prompt, third.fields) == ("[1, 2]", {"score": 1})


def test_equal_rows_count_once(tmp_path):
    row = {"prompt": "q", "answer": 1}
    assert len(read_prompts(lines(tmp_path, row, row, row | {"answer": 2}))) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a"}\n{"text": "b"}\n', "prompts.jsonl:2 has no prompt"),
        ('{"prompt": "a"}\n{"prompt": ""}\n', "prompts.jsonl:2 has no prompt"),
        ('{"prompt": "a"}\n{"prompt"\n', "prompts.jsonl:2: "),
        ("", "is empty, not rows with prompts"),
    ],
)
def test_a_row_that_cannot_be_asked_is_an_error_that_names_it(tmp_path, content, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        read_prompts(str(path))


def test_a_file_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        read_prompts(str(tmp_path / "none.jsonl"))
