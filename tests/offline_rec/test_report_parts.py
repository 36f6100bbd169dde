"""What pages are made of: histograms by SQL, texts of tokens, advantages of chosen groups, charts."""

from pathlib import Path

import duckdb
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from data_tools.shaping import Shaping
from offline_rec.reporting import charts, groups, tokens
from offline_rec.reporting.histograms import chart, histogram
from offline_rec.reporting.plain_text import share, shortened
from tests.offline_rec import logged


def count(values: list[float], **options: int):
    with duckdb.connect() as con:
        con.execute("CREATE TABLE t AS SELECT unnest($1::DOUBLE[]) AS x", [values])
        return histogram(con, "SELECT x FROM t", **options)


def test_a_histogram_counts_as_numpy_does():
    values = np.random.default_rng(0).normal(size=4000)
    found = count(values.tolist())
    expected, _ = np.histogram(values, np.array(found.edges))
    assert found.totals == expected.tolist()
    assert (found.values, found.beyond, found.step) == (4000, 0, None)
    assert found.mean == pytest.approx(values.mean())


@pytest.mark.parametrize(
    ("values", "step", "labels"),
    [
        ([1.0, 2, 2, 4], 1.0, {"1": 1, "2": 2, "3": 0, "4": 1}),
        ([-1.0, -0.5, 0, 0], 0.5, {"−1": 1, "−0.500": 1, "0": 2}),
        ([0.0, 0.05, 1.0], 0.05, {"0": 1, "0.050": 1, "1": 1}),
    ],
)
def test_few_values_have_a_bar_each(values, step, labels):
    found = count(values)
    assert found.step == pytest.approx(step)
    told = {found.label(i): n for i, n in enumerate(found.totals)}
    assert {label: n for label, n in told.items() if n or label in labels} == labels


def test_a_long_tail_ends_the_axis_and_is_counted():
    found = count([float(i % 50) for i in range(10_000)] + [5000.0])
    assert found.edges[-1] < 60
    assert (found.beyond, sum(found.totals)) == (1, 10_000)
    assert "1 lie beyond the axis" in chart("how long?", found, x="tokens").says


def test_what_is_not_finite_is_no_value():
    assert count([float("nan"), float("inf")]) is None
    assert count([float("nan"), 2.0]).values == 1


def byte_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [], trainers.BpeTrainer(special_tokens=["<end>"], initial_alphabet=alphabet)
    )
    return tokenizer


def test_a_character_of_several_tokens_stands_at_its_last():
    tokenizer, text = byte_tokenizer(), "né 📧 ok"
    ids = [*tokenizer.encode(text).ids, 0]
    pieces = tokens.texts(tokenizer, ids, text)
    assert pieces == ["n", "", "é", " ", "", "", "", "📧", " ", "o", "k", "<end>"]


def test_a_tokenizer_that_gives_another_text_is_not_believed():
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("some text").ids
    assert tokens.texts(tokenizer, ids, "another text") is None
    assert tokens.texts(tokenizer, [10**9], "x") is None


def test_colours_grow_with_the_distance():
    ratios = [0.0, 0.1, -0.5, 1.5, -9.0, float("nan")]
    assert [tokens.ratio_token("x", r, -1.0).colour for r in ratios] == ["", "p1", "n2", "p3", "n4", ""]
    assert [tokens.surprise_token("x", p).colour for p in (-0.1, -2.0, -7.0)] == ["", "n2", "n4"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"baseline": "loo", "scale": "std"},
        {"baseline": "global"},
        {"weight": "exp(reward - max(reward) OVER ())"},
    ],
)
def test_chosen_groups_have_the_advantages_that_the_whole_dataset_gives_them(tmp_path: Path, fields):
    made = logged.rows(12)
    for row, reward in zip(made, np.random.default_rng(1).random(len(made)), strict=True):
        row["reward"] = float(reward)
    ds = logged.dataset(tmp_path / "ds", made)
    shaping = Shaping(**fields)
    every = {
        row["response_id"]: (row["advantage"], row["weight"])
        for batch in ds.shape(shaping, split="all")
        for row in batch.to_pylist()
    }
    with ds.connect() as con:
        found = groups.shaped(con, shaping, ["g2", "g7"])
    assert len(found) == 8
    for row, one in found.items():
        assert (one.advantage, one.weight) == pytest.approx(every[row])


def test_a_chart_takes_its_colours_from_the_page_and_shares_no_name_with_another():
    svgs = [charts.lines([charts.Line([1, 2, 3], [1.0, None, 2.5], dashed=True)], x="step") for _ in range(2)]
    for svg in svgs:
        assert "var(--s1)" in svg
        assert "#0101" not in svg
        assert "font-family" not in svg
    ids = [{part.split('"')[0] for part in svg.split(' id="')[1:]} for svg in svgs]
    assert ids[0]
    assert not ids[0] & ids[1]


def test_long_texts_keep_their_ends():
    text, left_out = shortened("a" * 900 + "b" * 900, 100)
    assert left_out == 1700
    assert text.startswith("a" * 75)
    assert text.endswith("b" * 25)
    assert "1,700 characters" in text


def test_shares_never_round_to_none_or_all():
    told = [share(*pair) for pair in ((0, 9), (9, 9), (1, 10**6), (10**6 - 1, 10**6), (1, 3), (1, 0))]
    assert told == ["0 %", "100 %", "0.0001 %", "> 99 %", "33.3 %", "–"]
