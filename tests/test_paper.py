"""benchmarks/paper: its rewards, its plan, what a stopped run leaves, and its findings on made-up results."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.paper import world as world_module
from benchmarks.paper.findings import FINDINGS, overall, told
from benchmarks.paper.found import found
from benchmarks.paper.page import page
from benchmarks.paper.plan import ALGORITHMS, KEY, REGIMES, Cell, Effort, cells
from benchmarks.paper.publishing import gather, write_json
from benchmarks.paper.runner import Results, run
from benchmarks.paper.tasks import TASKS, addition_reward, chain_reward, parts_reward
from benchmarks.paper.world import Size, prepare
from data_tools.errors import ConfigError
from offline_rec.looping.config import loop_config
from offline_rec.looping.regime import Refresh, phases

ROOT = Path(__file__).parent.parent
TINY = Size(log_prompts=16, evaluation_prompts=8, development_prompts=8, pool=200, batch=16, check_every=2)


def test_rewards_are_what_a_reader_works_out():
    # 123 + 456 = 579, last digits first.
    assert addition_reward(["975", "579", ""], ["321+654="] * 3) == [1.0, 0.0, 0.0]
    # 4321 = 2160 + 2161 = 1 + 4320; 2160 + 2160 = 4320 has three of its digits.
    said = ["0612+1612", "1000+0234", "0612+0612", "0612", "612+1612", "0612+1612+"]
    assert parts_reward(said, ["1234="] * 6) == pytest.approx([1.0, 0.1 + 0.9 / 2160, 0.06, 0, 0, 0])
    # 123 + 456 + 789 = 1368: only what follows the last sign counts.
    said = ["321+654=9750+987=8631", "=8631", "8631", "321+654=9750+987=8632"]
    assert chain_reward(said, ["321+654+987="] * 4) == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("name", TASKS)
def test_what_a_base_policy_is_taught_is_right_and_of_the_told_lengths(name):
    from benchmarks.paper import tasks

    task, rng = TASKS[name], np.random.default_rng(0)
    prompts = [task.prompt(n) for n in (0, task.prompts - 1, *rng.integers(0, task.prompts, 50).tolist())]
    taught = [task.teach(prompt, rng) for prompt in prompts]
    judge = getattr(tasks, task.reward.rpartition(":")[2])
    assert min(judge(taught, prompts)) >= task.success
    assert {1 + len(prompt) for prompt in prompts} == {task.prompt_tokens}
    assert max(map(len, taught)) < task.max_tokens
    if name == "chain":
        assert min(map(len, taught)) >= 20


def test_the_plan_has_every_algorithm_where_it_was_asked_for_and_begins_with_the_demo():
    every = cells()
    assert len({cell.name for cell in every}) == len(every)
    have = {(c.task, c.regime, c.algorithm, c.seed) for c in every}
    for task in ("addition", "parts"):
        for seed in (1, 2, 3):
            assert {(task, r, a, seed) for r in ("offline", "interval-20") for a in ALGORITHMS} <= have
            assert {(task, "lag-10", a, seed) for a in KEY} <= have
            assert {(task, "on-policy", a, seed) for a in ("reinforce", "oneside-nois", "raft")} <= have
    hard = [c for c in every if c.task == "chain"]
    assert {c.regime for c in hard} == {"offline", "interval-20"}
    assert (len({c.algorithm for c in hard}), {c.seed for c in hard}) == (6, {1, 2})
    assert {(c.task, c.regime, c.seed) for c in every[: len(ALGORITHMS)]} == {("addition", "offline", 1)}
    assert [c.name for c in cells("parts/*/raft/*/2")] == [
        c.name for c in every if c in cells("parts/*/raft/*/2")
    ]


def pretend(results, cell):
    """A result that tells how often it was made."""
    with (results.out / "made.txt").open("a") as file:
        file.write(cell.name + "\n")
    if cell.algorithm == "sft":
        raise ValueError("no luck")
    base, end = {"reward": 0.5}, {"reward": 0.6, "right": 0.6}
    curve = [{"update": 0, "reward": 0.5}, {"update": 160, "reward": 0.6}]
    metrics = [{"update": 160, "kl_k3": 0.1, "kept_share_positive": 1, "kept_share_negative": 1}]
    spent = {"loop": 2.0, "judging": 1.0}
    return {
        "base": base,
        "end": end,
        "curve": curve,
        "metrics": metrics,
        "stopped": None,
        "cpu_seconds": spent,
    }


def test_a_run_does_what_is_missing_and_never_what_is_done(tmp_path):
    results = Results(tmp_path, Effort(), Size())
    some = cells("addition/offline/[rs]*/0.001/1")
    names = [cell.name for cell in some]
    assert run(results, some[:2], work=pretend, workers=2, say=str) == []
    said = []
    failed = run(results, some, work=pretend, workers=2, say=said.append)
    assert [cell.algorithm for cell in failed] == ["sft"]
    assert "no luck" in results.failure(failed[0]).read_text()
    assert any("0.500 -> 0.600" in line for line in said)
    made = (tmp_path / "made.txt").read_text().split()
    assert sorted(made) == sorted(names)
    # Only what failed is tried again, and nothing once the time is up.
    run(results, some, work=pretend, hours=0, say=str)
    assert (tmp_path / "made.txt").read_text().split() == made
    # A result of other settings is none.
    other = Results(tmp_path, Effort(updates=200), Size())
    assert other.missing(some) == some
    facts = gather(results)
    assert sorted(facts["runs"]) == sorted(set(names) - {failed[0].name})
    write_json(facts, tmp_path / "paper.json")
    text = page(found(facts), figures="figures")
    assert f"{len(names) - 1} of {len(cells())} runs are in" in text
    planned = len(cells("addition/offline/*"))
    assert (
        f"Not run yet, so that what is said of these is not final: addition, offline: {planned - 5};" in text
    )


def test_a_second_run_into_the_same_directory_is_refused(tmp_path):
    from benchmarks.paper.runner import _alone

    results = Results(tmp_path, Effort(), Size())
    with _alone(tmp_path), pytest.raises(ConfigError, match="another process"):
        run(results, cells("addition/offline/raft/0.001/1"), work=pretend, say=str)


def test_a_cell_judges_the_policy_on_its_way(tmp_path, monkeypatch):
    from benchmarks.paper.cell import run_cell

    easy = {"parts": replace(TASKS["parts"], target=0.0)}
    monkeypatch.setattr(world_module, "TASKS", easy)
    world = prepare(tmp_path / "worlds", "parts", 1, TINY)
    assert prepare(tmp_path / "worlds", "parts", 1, TINY).facts == world.facts  # made once
    effort = Effort(updates=4, groups=4, responses=4, watch_every=2, interval=2)
    for regime in ("offline", "interval-20"):
        cell = Cell("parts", regime, "oneside-nois", 1e-3, 1)
        result = run_cell(cell, effort, world, tmp_path / "scratch")
        assert [point["update"] for point in result["curve"]] == [0, 2, 4]
        assert result["curve"][-1]["reward"] == result["end"]["reward"]
        assert [record["update"] for record in result["metrics"]] == [1, 2, 4]
        assert not (tmp_path / "scratch").exists()


def results_of(place, **curves):
    """Made-up runs: an algorithm's rewards, the base's first; `_2` behind its name means the other rate."""
    runs = {}
    for name, rewards in curves.items():
        lr = "0.001" if name.endswith("_2") else "0.0003"
        algorithm = name.removesuffix("_2").replace("_", "-")
        for seed in (1, 2, 3):
            one = [reward + 0.001 * seed for reward in rewards]
            updates = [40 * number for number in range(len(one))]
            facts = {"updates": updates, "rewards": one, "base": one[0], "end": one[-1]}
            runs[f"{place}/{algorithm}/{lr}/{seed}"] = facts
    return runs


LOW, UP = (0.5, 0.1, 0.1, 0.1, 0.1), (0.5, 0.55, 0.6, 0.65, 0.7)
FAST, DIP = (0.5, 0.65, 0.68, 0.7, 0.72), (0.5, 0.62, 0.7, 0.6, 0.55)
LAG, OFF, ON = "addition/lag-10", "addition/offline", "addition/on-policy"


def wide(wide, narrow, **more):
    return {"oneside_nois_wide": wide, "oneside_nois": narrow, **more}


BOTH_WAYS = {
    "1a": (OFF, {"oneside_is": UP, "oneside_nois": FAST}, {"oneside_is": LOW, "oneside_nois": UP}),
    "1b": (LAG, {"grpo": UP, "oneside_nois": FAST}, {"grpo": DIP, "oneside_nois": UP}),
    "1c": (ON, {"oneside_nois": UP, "reinforce": UP}, {"oneside_nois": UP, "reinforce": LOW}),
    "2a": (OFF, {"reinforce": LOW, "oneside_nois": UP}, {"reinforce": DIP, "oneside_nois": UP}),
    "2b": (OFF, {"oneside_nois": UP}, {"oneside_nois": LOW}),
    "3a": (LAG, wide(FAST, UP), wide(UP, FAST)),
    "3b": (LAG, wide(FAST, UP), wide(DIP, UP)),
    "3c": (OFF, wide(DIP, UP), wide(FAST, UP)),
    "3d": (OFF, wide(FAST, UP, oneside_nois_2=UP), wide(UP, UP, oneside_nois_2=FAST)),
    "4a": (OFF, {"red_drop": UP, "grpo": UP}, {"red_drop": LOW, "grpo": UP}),
    "4b": (OFF, {"red_weight": FAST, "grpo": UP}, {"red_weight": DIP, "grpo": FAST}),
    "5a": (OFF, {"opmd": UP, "reinforce": LOW}, {"opmd": LOW, "reinforce": LOW}),
    "5b": (LAG, {"asymre": UP, "reinforce": LOW}, {"asymre": UP, "reinforce": UP}),
    "5c": (OFF, {"opmd": DIP, "oneside_nois_wide": UP}, {"opmd": UP, "oneside_nois_wide": UP}),
    "7": (ON, {"reinforce": LOW}, {"reinforce": UP}),
    "8": (OFF, {"red_weight": FAST, "grpo": LOW, "raft": UP}, {"red_weight": UP, "raft": UP}),
    "9": (OFF, wide(UP, UP, both=FAST, red_weight=UP), wide(UP, UP, both=UP, red_weight=FAST)),
}


@pytest.mark.parametrize("code", BOTH_WAYS)
def test_a_finding_holds_and_fails_by_its_criterion(code):
    place, yes, no = BOTH_WAYS[code]
    for curves, word in ((yes, "held"), (no, "not held")):
        answers = [
            one for one in told(found({"runs": results_of(place, **curves)})) if one.finding.code == code
        ]
        assert [one.word for one in answers] == [word]
        assert overall(answers) == word
        assert (answers[0].met, answers[0].seeds) == ((3, 3) if word == "held" else (0, 3))


def test_offline_is_compared_with_the_interval_of_the_same_task():
    for offline, interval, word in ((UP, FAST, "held"), (FAST, UP, "not held")):
        runs = results_of("parts/offline", grpo=offline) | results_of("parts/interval-20", grpo=interval)
        assert [t.word for t in told(found({"runs": runs})) if t.finding.code == "6"] == [word]


def test_seeds_that_disagree_and_a_seed_alone_tell_nothing():
    runs = results_of(OFF, oneside_nois=UP)
    name = f"{OFF}/oneside-nois/0.0003/1"
    mixed = runs | {name: runs[name] | {"end": 0.1}}
    for some in (mixed, {name: runs[name]}):
        answers = [one for one in told(found({"runs": some})) if one.finding.code == "2b"]
        assert [one.word for one in answers] == ["cannot be told"]
        assert overall(answers) == "cannot be told"
    assert set(BOTH_WAYS) | {"6"} == {finding.code for finding in FINDINGS}


def test_an_algorithm_is_judged_by_its_better_rate_of_those_run_with_all_seeds():
    runs = results_of(OFF, raft=UP, raft_2=FAST)
    assert found({"runs": runs}).place("addition", "offline").rate("raft") == 1e-3
    del runs[f"{OFF}/raft/0.001/3"]
    assert found({"runs": runs}).place("addition", "offline").rate("raft") == 3e-4


def test_figures_are_the_same_file_each_time(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks.paper.figures import draw

    results = found({"runs": results_of(OFF, reinforce=LOW, grpo=UP, raft=FAST, both=DIP)})
    for name in ("a.svg", "b.svg"):
        draw(results, "addition", tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert "REINFORCE" in (tmp_path / "a.svg").read_text()


def test_the_configurations_of_the_paper_itself_are_loops_with_its_settings():
    expected = {
        "on-policy": [1] * 100,
        "interval-20": [20] * 5,
        "lag-10": [11] + [1] * 89,
        "offline": [100],
    }
    assert set(expected) == set(REGIMES)
    for name, sampled in expected.items():
        config = loop_config(ROOT / "examples" / "paper" / f"{name}.yaml")
        assert (config.n, config.temperature, config.max_tokens, config.groups_per_step) == (8, 1, 1024, 96)
        assert (config.fit["lr"], config.steps, config.reward) == (1e-6, 100, "math")
        plan = phases(steps=config.steps, interval=config.steps_per_round, lag=config.lag)
        batches = [p.last - p.first + 1 for p in plan if isinstance(p, Refresh)]
        assert batches == sampled
