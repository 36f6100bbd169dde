"""Drift between two selections, against values worked out by hand, brute force and simulation."""

import itertools
import json
import math

import numpy as np
import pyarrow as pa
import pytest

import data_tools
from data_tools.drift.mixes import divided_by_chance, mix, prompt_mix
from data_tools.drift.numbers import number, student
from data_tools.drift.sides import side
from data_tools.errors import ConfigError, DataError
from data_tools.store.connection import open_duckdb
from offline_rec.evidence.bootstrap import interval, resampled_means
from tests.data_tools.rollout_rows import row, table


def dataset(path, *batches):
    ds = data_tools.open(str(path), create=True, holdout=0.5)
    for rows in batches:
        with ds.writer() as writer:
            writer.rollouts(table(rows))
            writer.commit()
    return ds


def sides(rows):
    """The table that is compared, of (second, prompt, x, policy) rows; every row is a group of its own."""
    con = open_duckdb()
    columns = zip(*rows, strict=True)
    names = ("second", "prompt", "x", "policy")
    made = {name: list(values) for name, values in zip(names, columns, strict=True)}
    con.register("made", pa.table(made | {"grp": list(range(len(rows)))}))
    con.execute("CREATE TABLE sides AS FROM made")
    return con


def clustered(rng, prompts, shift=0.0, second=False, names="p"):
    """Four rows a prompt, that share half of their variance."""
    return [
        (second, f"{names}{p}", float(level + rng.normal() + shift), "a")
        for p, level in enumerate(rng.normal(size=prompts))
        for _ in range(4)
    ]


def selected(ds, selection):
    """How many rows a selection of a dataset is."""
    condition = side(f"{ds.path}@{selection}").condition
    return ds.sql(f"SELECT count(*) AS n FROM rollouts WHERE {condition}")["n"][0].as_py()


@pytest.fixture
def small(tmp_path):
    """Two prompts on both sides, one on each alone; the second policy earns more."""
    return dataset(
        tmp_path / "ds",
        [
            row("a", prompt="1", group_id="1a", policy="old", reward=0.0),
            row("b", prompt="1", group_id="1a", policy="old", reward=1.0),
            row("c", prompt="2", group_id="2a", policy="old", reward=0.0),
            row("d", prompt="3", group_id="3a", policy="old", reward=0.0),
        ],
        [
            row("e", prompt="1", group_id="1b", policy="new", reward=1.0),
            row("f", prompt="2", group_id="2b", policy="new", reward=1.0),
            row("g", prompt="2", group_id="2b", policy="new", reward=0.0),
            row("h", prompt="4", group_id="4b", policy="new", reward=1.0),
        ],
    )


def test_numbers_and_mixes_of_a_small_dataset_are_those_worked_out_by_hand(small):
    report = data_tools.diff(f"{small.path}@policy = 'old'", f"{small.path}@policy = 'new'")
    [reward] = [one for one in report.numbers if one.name == "reward"]
    assert (reward.first, reward.second, reward.difference) == (0.25, 0.75, 0.5)
    # Both variances are 0.25; d = 0.5 / 0.5, and 1 - 3/(4*6 - 1) for small samples.
    assert reward.hedges_g == pytest.approx(1 - 3 / 23)
    # Of 16 pairs the second has more in 9 and less in 1.
    assert reward.cliffs_delta == pytest.approx(8 / 16)
    assert (reward.same_prompts, reward.same_prompts_difference) == (2, 0.5)  # 1 - 0.5 and 0.5 - 0
    assert reward.low is None  # three prompts a side
    assert "a side has fewer than 10 prompts: no interval" in report.notes
    [policy] = [one for one in report.mixes if one.name == "policy"]
    assert (policy.distance.total_variation, policy.distance.jensen_shannon) == (1.0, pytest.approx(1.0))
    assert (policy.only_first, policy.only_second) == (["old"], ["new"])
    prompts = report.prompts
    assert (prompts.both, prompts.only_first, prompts.only_second) == (2, 1, 1)
    assert (prompts.rows_first_of_both, prompts.rows_second_of_both) == (3, 3)
    assert (prompts.examples_first, prompts.examples_second) == (["3"], ["4"])
    # Each side drew three prompts once: two of them are shared.
    assert prompts.distance.total_variation == pytest.approx(1 / 3)
    json.dumps(report.facts())


def test_the_same_rows_on_both_sides_differ_in_nothing():
    rng = np.random.default_rng(0)
    rows = clustered(rng, 40)
    con = sides([*rows, *((True, *rest) for _, *rest in rows)])
    same = number(con, "x")
    assert (same.difference, same.hedges_g, same.cliffs_delta) == (0, 0, 0)
    assert (same.low, same.high) == pytest.approx((0, 0), abs=1e-12)
    found = prompt_mix(con)
    assert found.distance.total_variation == found.distance.jensen_shannon == 0
    assert found.only_first == found.only_second == 0


def test_a_shift_is_found_with_its_size_and_an_interval_that_knows_of_prompts():
    rng = np.random.default_rng(1)
    first, second = clustered(rng, 150, names="a"), clustered(rng, 100, 0.7, True, names="b")
    found = number(sides([*first, *second]), "x")
    x1, x2 = (np.array([r[2] for r in rows]) for rows in (first, second))
    assert found.difference == pytest.approx(x2.mean() - x1.mean())
    pooled = math.sqrt((599 * x1.var(ddof=1) + 399 * x2.var(ddof=1)) / 998)
    assert found.hedges_g == pytest.approx((x2.mean() - x1.mean()) / pooled * (1 - 3 / (4 * 998 - 1)))
    greater = np.sign(x2[:, None] - x1[None, :]).mean()
    assert found.cliffs_delta == pytest.approx(greater)
    assert found.low < 0.7 < found.high
    # Drawing prompts again gives the same width; drawing rows, which is wrong here, a much smaller one.
    by_prompt = [
        resampled_means(x.reshape(-1, 4).mean(1)[:, None], seed=s)[:, 0] for s, x in ((1, x1), (2, x2))
    ]
    drawn = interval(found.difference, by_prompt[1] - by_prompt[0])
    assert found.high - found.low == pytest.approx(drawn.high - drawn.low, rel=0.1)
    by_row = 2 * 1.96 * math.sqrt(x1.var() / len(x1) + x2.var() / len(x2))
    assert found.high - found.low > 1.3 * by_row


def test_prompts_on_both_sides_are_paired():
    rng = np.random.default_rng(2)
    rows = clustered(rng, 60)
    moved = [(True, prompt, x + 0.1, policy) for _, prompt, x, policy in rows]
    found = number(sides([*rows, *moved]), "x")
    assert found.difference == pytest.approx(0.1)
    assert found.low == pytest.approx(0.1)
    assert found.same_prompts_difference == pytest.approx(0.1)


@pytest.mark.parametrize(("freedom", "quantile"), [(9, 2.262157), (19, 2.093024), (99, 1.984217)])
def test_quantiles_of_student(freedom, quantile):
    assert student(freedom) == pytest.approx(quantile, abs=1e-3)


def test_what_chance_alone_would_show_of_a_mix_is_what_a_random_division_of_prompts_shows():
    rng = np.random.default_rng(3)
    owners = [
        (f"p{p}", [(*"aab", "c" if p % 5 else "b")[i] for i in rng.integers(0, 4, 4)]) for p in range(80)
    ]
    seen, expected, bits, expected_bits = [], [], [], []
    for _ in range(12):
        rows = [
            (bool(s), p, 0.0, c)
            for (p, cs), s in zip(owners, rng.integers(0, 2, 80), strict=True)
            for c in cs
        ]
        distance = mix(sides(rows), "policy").distance
        seen.append(distance.total_variation)
        expected.append(distance.total_variation_by_chance)
        bits.append(distance.jensen_shannon)
        expected_bits.append(distance.jensen_shannon_by_chance)
    assert np.mean(expected) == pytest.approx(np.mean(seen), rel=0.2)
    assert np.mean(expected_bits) == pytest.approx(np.mean(bits), rel=0.4)


def test_what_chance_would_show_of_prompts_is_the_mean_over_all_divisions_of_their_draws():
    draws = [0, 0, 1, 1, 1, 2]  # the prompt of each draw
    n1, n2 = 4, 2
    tv = js = 0.0
    for labels in itertools.product((0, 1), repeat=len(draws)):
        chance = math.prod(n2 / 6 if label else n1 / 6 for label in labels)
        for prompt in range(3):
            x, y = (
                sum(d == prompt and label == side for d, label in zip(draws, labels, strict=True))
                for side in (0, 1)
            )
            p, q = x / n1, y / n2
            tv += chance * abs(p - q) / 2
            js += chance * sum(a * math.log2(2 * a / (p + q)) for a in (p, q) if a) / 2
    assert divided_by_chance([(1, 1), (2, 1), (3, 1)], n1, n2) == pytest.approx((tv, js))
    assert divided_by_chance([(1, 50)], 25, 25) == pytest.approx((1.0, 1.0))  # nothing can be told
    exact, normal = divided_by_chance([(2000, 1)], 1200, 900), divided_by_chance([(2001, 1)], 1200, 900)
    assert exact == pytest.approx(normal, rel=2e-2)


def test_a_selection_is_a_split_a_batch_a_span_a_run_or_a_condition(small, tmp_path):
    first, second = small.batches()
    run = tmp_path / "run"
    run.mkdir()
    (run / "snapshot.json").write_text(json.dumps({"files": [{"name": f"rollouts/{first}.parquet"}]}))
    for selection, rows in (
        (first, 4),
        (first[:8], 8),
        (f"{second}..", 4),
        (f"..{first}", 4),
        (f"..{second[:8]}", 8),
        (str(run), 4),
        ("reward = 1 -- right", 4),
    ):
        assert selected(small, selection) == rows, selection
    assert selected(small, "train") + selected(small, "holdout") == 8
    assert 0 < selected(small, "train") < 8
    assert data_tools.diff(small.path, small.path, where="policy = 'new'").rows_second == 4


def test_two_datasets_are_compared_whose_paths_may_hold_the_sign(small, tmp_path):
    other = dataset(tmp_path / "me@home", [row("z", prompt="9", reward=1.0)])
    report = data_tools.diff(small.path, f"{other.path}@reward = 1")
    assert (report.rows_first, report.rows_second, report.prompts.both) == (8, 1, 0)


def test_what_is_no_selection_is_named(small, tmp_path):
    for selection, error, words in (
        ("", ConfigError, "nothing is selected"),
        ("19990101", ConfigError, "has no batch"),
        ("19990101..19990102", ConfigError, "has no batch in"),
        ("nothing = 1", ConfigError, "nothing"),
        ("reward = 1; DROP TABLE x", ConfigError, "syntax error"),
        ("reward = 7", DataError, "selects no row"),
    ):
        with pytest.raises(error, match=words):
            data_tools.diff(small.path, f"{small.path}@{selection}")
    with pytest.raises(DataError, match="is not a dataset"):
        data_tools.diff(small.path, f"{tmp_path}/none@train")
    run = tmp_path / "run"
    run.mkdir()
    (run / "snapshot.json").write_text(json.dumps({"files": [{"name": "rollouts/gone.parquet"}]}))
    with pytest.raises(DataError, match="1 of the 1 batches"):
        data_tools.diff(small.path, f"{small.path}@{run}")
