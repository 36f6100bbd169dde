"""What an algorithm needs of the data is told before training; anchors and references are scored once."""

import subprocess
import sys

import pyarrow as pa
import pytest

import data_tools
from data_tools.errors import ConfigError, DataError
from offline_rec.training.explain import explain
from offline_rec.training.fit import fit
from offline_rec.training.run_folder import begun
from tests import tiny
from tests.offline_rec.fitting import config, furthest, records, weights, world
from tests.offline_rec.logged import dataset, rows

TEXT = {"prompt_ids": None, "response_ids": None, "behavior_logprobs": None, "behavior_logprob": None}


@pytest.fixture(scope="module")
def textual(tmp_path_factory):
    """A log of text alone."""
    return world(tmp_path_factory.mktemp("textual"), columns=TEXT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return world(tmp_path_factory.mktemp("world"))


def sidecars(folder):
    scored = folder / "ds" / "logprobs"
    return sorted(path.name for path in scored.iterdir()) if scored.exists() else []


@pytest.mark.parametrize("algorithm", ["grpo", "rec-oneside-nois", "m2po", "opmd"])
def test_missing_logprobs_stop_before_training_with_the_count_and_three_ways_out(textual, algorithm):
    with pytest.raises(DataError) as caught:
        fit(config(textual, algorithm=algorithm))
    assert "48 of 48 rows have no log-probs" in caught.value.message
    for way in (f"rec score {textual / 'ds'}", "--anchor start", '--where "behavior_logprob is not null"'):
        assert way in caught.value.hint
    assert not (textual / "run").exists()


def test_logprobs_from_before_a_temperature_are_told_from_none(tmp_path):
    made = rows(12)
    for row in made[::3]:
        row |= {"behavior_logprob": None, "flags": ["raw_at_temperature"]}
    tiny.save(tmp_path / "m")
    dataset(tmp_path / "ds", made)
    with pytest.raises(
        DataError, match=r"16 of 48 rows have no log-probs that can be used \(16 have them from"
    ):
        fit(config(tmp_path))


def test_only_rows_that_would_be_trained_on_must_have_logprobs(tmp_path):
    made = rows(12)
    for row in made[1::4]:
        row |= {"behavior_logprobs": None, "behavior_logprob": None}
    tiny.save(tmp_path / "m")
    dataset(tmp_path / "ds", made)
    with pytest.raises(DataError, match="12 of 48 rows have no log-probs"):
        fit(config(tmp_path))
    done = fit(config(tmp_path, where="behavior_logprob is not null", baseline="global", steps=2))
    assert done.steps == 2
    assert fit(config(tmp_path, "kept", keep="behavior_logprob is not null", steps=2)).steps == 2


@pytest.mark.parametrize("algorithm", ["asymre", "raft", "sft"])
def test_text_is_enough_for_an_algorithm_without_ratios(textual, algorithm):
    done = fit(config(textual, algorithm, algorithm=algorithm, steps=3))
    last = records(done.out)[-1]
    assert "ratio_mean" not in last
    assert "value" not in last["heldout"]
    assert last["heldout"]["logprob"] < 0


def test_the_start_as_anchor_is_scored_once(textual):
    before = sidecars(textual)
    one = fit(config(textual, "start-1", anchor="start", algorithm="grpo"))
    scored = sidecars(textual)
    assert len(scored) == len(before) + 1
    assert records(one.out)[1]["ratio_mean"] == pytest.approx(1, abs=1e-5)
    events = []
    two = fit(config(textual, "start-2", anchor="start", algorithm="grpo"), progress=events.append)
    assert sidecars(textual) == scored
    assert furthest(weights(one.out), weights(two.out)) == 0


def test_the_start_as_anchor_equals_logged_logprobs_of_the_start(folder):
    logged = fit(config(folder, "logged"))
    scored = fit(config(folder, "scored", anchor="start"))
    assert furthest(weights(logged.out), weights(scored.out)) < 1e-4


def test_any_model_may_be_the_anchor(folder):
    tiny.save(folder / "other", seed=3)
    done = fit(config(folder, "anchored", anchor=str(folder / "other"), steps=1))
    assert records(done.out)[1]["kl_k3"] > 0.01
    with pytest.raises(ConfigError, match="neither behavior, start nor none, nor a model directory"):
        fit(config(folder, "refused", anchor="strat"))


def test_no_anchor_is_refused_where_ratios_are_needed(folder):
    with pytest.raises(ConfigError, match="rec-oneside-nois needs ratios, and anchor is none"):
        fit(config(folder, "refused", anchor="none"))
    done = fit(config(folder, "none", anchor="none", algorithm="raft", steps=1))
    assert "ratio_mean" not in records(done.out)[1]


def test_a_reference_holds_the_policy_back(folder):
    tiny.save(folder / "reference", seed=5)
    free = fit(config(folder, "free", algorithm="reinforce"))
    held = fit(config(folder, "held", algorithm="reinforce", kl_coef=1.0, kl_kind="k3"))
    apart = fit(
        config(folder, "apart", algorithm="reinforce", kl_coef=1.0, reference=str(folder / "reference"))
    )
    drift = [records(run.out)[-1]["heldout"]["kl"] for run in (free, held, apart)]
    assert drift[1] < drift[0] / 2
    assert drift[2] > drift[1]


def test_luffy_is_told_which_rows_an_expert_wrote(tmp_path):
    made = rows(12)
    for row in made[::4]:
        row |= {"behavior_logprobs": None, "behavior_logprob": None, "policy": "teacher"}
    tiny.save(tmp_path / "m")
    dataset(tmp_path / "ds", made)
    with pytest.raises(ConfigError, match=r"no row is said to be one\n.*shaping.expert"):
        fit(config(tmp_path, algorithm="luffy"))
    done = fit(config(tmp_path, algorithm="luffy", shaping={"expert": "policy = 'teacher'"}, steps=2))
    assert records(done.out)[1]["known_ratio_share"] < 1


def test_dro_takes_the_start_as_reference(folder):
    assert fit(config(folder, "dro", algorithm="dro", steps=2)).steps == 2


def test_retokenised_rows_count_as_rows_without_logprobs(folder):
    with pytest.raises(DataError, match="48 of 48 rows have no log-probs of ids made from text"):
        fit(config(folder, "retokenised", retokenise=True))
    assert fit(config(folder, "retokenised", retokenise=True, algorithm="raft", steps=2)).steps == 2


def test_greedy_rows_need_another_anchor(tmp_path):
    own = world(tmp_path, columns={"temperature": 0.0})
    with pytest.raises(DataError, match=r"\d+ because they were decoded greedily.*\n.*--anchor start"):
        fit(config(own))
    assert fit(config(own, anchor="start", steps=1)).left_out == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"where": "reward > 5"}, "where = 'reward > 5' matches none"),
        ({"where": "rewad > 5"}, "rewad"),
        ({"where": "'rewad'"}, "where = \"'rewad'\": Could not convert"),
        ({"where": "error('boom') is null"}, "where = .*: boom"),
        ({"where": "reward > 5 -- five"}, "where = 'reward > 5 -- five' matches none"),
        ({"weight": "-1"}, "weight"),
        ({"weight": "1e300"}, "weight = '1e300' is too large"),
        ({"priority": "0"}, "priority = '0' is 0 in all"),
        ({"weight": "0"}, "no row is left to train on: .* because their weight is 0"),
        ({"algorithm": "grop"}, "did you mean 'grpo'"),
        ({"objective": {"epsilon_lo": 0.1}}, "did you mean 'epsilon_low'"),
        ({"shaping": {"expret": "true"}}, "did you mean expert"),
        ({"baseline": "reward"}, "the advantage of all .* rows is 0"),
        ({"max_tokens": 2}, "no row is left to train on: .* because they have more tokens than max_tokens"),
        ({"model": "/nowhere"}, "no model directory at /nowhere"),
        ({"dataset": "/nowhere"}, "not a dataset"),
    ],
)
def test_what_cannot_be_fitted_is_refused_and_leaves_nothing(folder, changes, message):
    with pytest.raises((ConfigError, DataError), match=message):
        fit(config(folder, "refused").model_copy(update=changes))
    assert not (folder / "refused").exists()


def test_all_rows_may_be_one_group(folder):
    assert fit(config(folder, "one-group", group_by="'all'", steps=1, eval_every=None)).groups == 1


def test_of_two_that_begin_in_one_place_the_slower_is_refused_and_changes_nothing(folder):
    wanted = config(folder, "contested")
    with begun(wanted):
        (folder / "contested" / "index").mkdir()
        with pytest.raises(ConfigError, match="another process is writing"), begun(wanted):
            pass
        (folder / "contested" / "snapshot.json").write_text("{}")
    with pytest.raises(ConfigError, match="contested exists already"), begun(wanted):
        pass
    assert {path.name for path in (folder / "contested").iterdir()} == {
        "config.yaml",
        "index",
        "snapshot.json",
    }


def test_a_guard_that_cannot_measure_is_refused(textual):
    with pytest.raises(ConfigError, match="max_kl needs log-probs"):
        fit(config(textual, "guarded", algorithm="raft", max_kl=0.1))


def test_single_responses_learn_from_a_global_baseline(tmp_path):
    tiny.save(tmp_path / "m")
    made = rows(24, group=1)
    for i, row in enumerate(made):
        row["reward"] = i % 3
    dataset(tmp_path / "ds", made)
    with pytest.raises(DataError, match=r"advantage of all \d+ rows is 0\n.*global"):
        fit(config(tmp_path))
    assert fit(config(tmp_path, baseline="global", steps=2)).steps == 2


def test_later_rewards_belong_to_the_snapshot(tmp_path):
    own = world(tmp_path)
    fit(config(own, steps=2))
    ds = data_tools.open(str(own / "ds"))
    with ds.rewards_writer("test") as writer:
        writer.write(pa.table({"response_id": ["r0-1"], "reward": [1.0]}))
        writer.commit()
    with pytest.raises(DataError, match="has grown since this run began: 1 more files, such as rewards/"):
        fit(config(own, steps=4), resume=True)


def test_explain_shows_statement_counts_and_mass_without_torch(folder):
    weight = "red_weight(0.5) * staleness_halflife(5)"
    shown = explain(config(folder, weight=weight, where="policy_version >= 1"))
    assert shown.problem is None
    text = shown.text()
    for part in ("FROM rollouts", "staleness", "tiny", "algorithm rec-oneside-nois", "epsilon_low 0.2"):
        assert part in text
    assert shown.facts()["shaping"]["population"] > 0
    code = "import sys, offline_rec.training.explain; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_explain_names_what_would_stop_a_fit(textual):
    shown = explain(config(textual, algorithm="grpo"))
    assert "48 of 48 rows have no log-probs" in shown.problem
    assert "problem: " in shown.text()
