"""Near-identical prompts are one cluster, and a cluster is never parted by the split."""

import json

import pyarrow.parquet as pq
import pytest

import data_tools
from data_tools.collecting.clusters import normalised, prompt_cluster
from data_tools.collecting.prompts import canonical_prompt
from tests.data_tools.logged import collected, dataset, draw, lines, rollouts
from tests.data_tools.rollout_rows import row, table


def chat(*turns, **more):
    roles = ("user", "assistant")
    return json.dumps([{"role": roles[n % 2], "content": turn} | more for n, turn in enumerate(turns)])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is 2+2?", "what is 2 + 2"),
        ("Hello, world!", "hello world"),
        ("a\r\n\tb ", "a b"),
        ("“Yes”, he said…", '"yes" he said'),
        ("e\u0301te\u0301", "ÉTÉ"),
        ("\u200bhidden\ufeff", "hidden"),
        ("ﬁve ½", "five 1⁄2"),
        ("well—then", "well-then"),
        ("What is 2+2?", chat("what is 2+2")),
        (chat("Hi!", "Hello.", "bye"), chat("hi", "hello", "Bye!")),
        (chat("x"), json.dumps([{"content": [{"type": "text", "text": "X"}], "role": "user", "weight": 1}])),
    ],
)
def test_spellings_of_one_prompt_are_one_cluster(one, other):
    assert prompt_cluster(one) == prompt_cluster(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("321+654=", "321+655="),
        ("2+2=", "2-2="),
        ("1.5", "15"),
        ("a b", "ab"),
        ("((", "()"),
        ("??", "!!"),
        ("😀", "😃"),
        ("the cat", "the cats"),
        (chat("a", "b", "c"), chat("a", "b")),
        (chat("ab", "c", "d"), chat("a", "bc", "d")),
        (chat("hi"), json.dumps([{"role": "system", "content": "hi"}])),
        (chat("x"), json.dumps([{"role": "system", "content": "s"}, {"role": "user", "content": "x"}])),
    ],
)
def test_prompts_that_ask_for_something_else_are_not(one, other):
    assert prompt_cluster(one) != prompt_cluster(other)


def test_ids_of_tool_calls_are_drawn_anew_and_do_not_part_prompts():
    def prompt(drawn, city):
        call = {
            "id": drawn,
            "type": "function",
            "function": {"name": "w", "arguments": f'{{"city": "{city}"}}'},
        }
        return json.dumps(
            [
                {"role": "user", "content": "weather?"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": drawn, "content": "sunny"},
            ]
        )

    assert prompt_cluster(prompt("call_1", "Rome")) == prompt_cluster(prompt("call_2", "Rome"))
    assert prompt_cluster(prompt("call_1", "Rome")) != prompt_cluster(prompt("call_1", "Oslo"))


def test_normalising_twice_changes_nothing_more_for_ordinary_text():
    for text in ("What, is 2 + 2?", "ＦＵＬＬ width", "x² ≤ 4, so…", "...", ""):
        assert normalised(normalised(text)) == normalised(text)


def test_equal_prompts_are_one_cluster_because_it_is_a_function_of_their_canonical_form():
    prompt = '[{"role":"user","content":[{"type":"text","text":"Hi"}],"name":null}]'
    assert prompt_cluster(prompt) == prompt_cluster(canonical_prompt(prompt))


def test_near_identical_prompts_of_different_logs_land_on_one_side(tmp_path):
    spellings = ("Add {} and {}.", "add  {} AND {}", "“Add {} and {}!”")
    for log, spelling in enumerate(spellings):
        path = tmp_path / f"{log}.jsonl"
        path.write_bytes(lines(*(draw(prompt=spelling.format(n, n * 7)) for n in range(60))))
        collected(tmp_path, path, holdout=0.5)
    found = (
        dataset(tmp_path)
        .sql("""SELECT count(DISTINCT split) AS sides, count(DISTINCT prompt_hash) AS prompts,
        any_value(split) AS split FROM rollouts GROUP BY prompt_cluster""")
        .to_pylist()
    )
    assert [(one["sides"], one["prompts"]) for one in found] == [(1, 3)] * 60
    assert {one["split"] for one in found} == {"train", "holdout"}


def test_the_share_of_the_holdout_is_kept_for_prompts_that_differ_in_digits_alone(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_bytes(lines(*(draw(prompt=f"{n}+{n + 1}=") for n in range(3000))))
    collected(tmp_path, log, holdout=0.2)
    [(held,)] = [
        tuple(r.values()) for r in rollouts(tmp_path, "avg((split = 'holdout')::INT) AS held", "ALL")
    ]
    assert 0.2 - 4 * (0.16 / 3000) ** 0.5 < held < 0.2 + 4 * (0.16 / 3000) ** 0.5


def test_a_prompt_of_ids_alone_is_a_cluster_by_itself(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_bytes(lines(draw(prompt=..., prompt_ids=[1, 2]), draw(prompt=..., prompt_ids=[1, 3])))
    collected(tmp_path, log)
    found = rollouts(tmp_path, "prompt_hash, prompt_cluster")
    assert [r["prompt_cluster"] for r in found] == [r["prompt_hash"] for r in found]


@pytest.fixture
def old(tmp_path):
    """A dataset from before there were clusters: no such column, and a split by the hash of the prompt."""
    ds = data_tools.open(str(tmp_path / "ds"), create=True, holdout=0.5)
    for batch in range(2):
        with ds.writer() as writer:
            writer.rollouts(table([row(f"{batch}-{n}", prompt=f"{n} ?") for n in range(40)]))
            writer.commit()
    for path in (tmp_path / "ds" / "rollouts").iterdir():
        pq.write_table(pq.read_table(path).drop_columns(["prompt_cluster"]), path)
    info = json.loads((tmp_path / "ds" / "rec.json").read_text())
    del info["split_by"]
    (tmp_path / "ds" / "rec.json").write_text(json.dumps(info))
    return tmp_path


def test_an_old_dataset_opens_and_goes_on_splitting_by_the_hash(old):
    ds = dataset(old)
    sides = {
        r["prompt_hash"]: r["split"] for r in ds.sql("SELECT prompt_hash, split FROM rollouts").to_pylist()
    }
    assert len(sides) == 40
    assert ds.sql("SELECT count(*) AS n FROM rollouts WHERE prompt_cluster = prompt_hash").to_pylist() == [
        {"n": 80}
    ]
    log = old / "log.jsonl"
    log.write_bytes(lines(draw(prompt="1 ?"), draw(prompt="1?")))
    collected(old, log)
    ds = dataset(old)
    ds.delete("response_id = '0-3'")
    ds.compact()
    assert ds.sql("SELECT count(*) AS n FROM rollouts").to_pylist() == [{"n": 81}]
    for found in ds.sql("SELECT prompt_hash, split FROM rollouts").to_pylist():
        assert sides.setdefault(found["prompt_hash"], found["split"]) == found["split"]
    assert ds.stats()
