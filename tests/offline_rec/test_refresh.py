"""`refresh`: whole, verified batches of a new version; what is interrupted goes on without a row lost."""

import json
import multiprocessing
import os
import signal
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import data_tools
from data_tools.errors import ConfigError, DataError, RecError
from offline_rec import rewards
from offline_rec.models.policy import Policy
from offline_rec.rewards import Reward
from offline_rec.sampling import judged_log as judged_log_module
from offline_rec.sampling import refresh as refresh_module
from offline_rec.sampling.choose import SamplerSettings, open_sampler
from offline_rec.sampling.journal import Journal
from offline_rec.sampling.planner import Budget
from offline_rec.sampling.refresh import journal_folder, refresh
from offline_rec.sampling.sampled_rows import Task
from offline_rec.sampling.sampler import SamplingParams
from tests import tiny
from tests.offline_rec import logged
from tests.offline_rec.test_fit_resume import before

N = 3
PARAMS = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=5, seed=4)
CHAT = json.dumps([{"role": "user", "content": "three?"}])
NAMED = """SELECT response_id, group_id, prompt, response, response_ids, behavior_logprobs, reward, policy,
    policy_version, extra FROM rollouts WHERE policy = 'm' ORDER BY response_id"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """Eight prompts, one of them chat, with two logged answers each."""
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    asked = [CHAT, *(f"{i}+{i}=" for i in range(7))]
    rows = [
        {
            "prompt": prompt,
            "response": str(k),
            "reward": k,
            "answers": [str(2 * i), "x"],
            "latency": 7 * i + k,
        }
        for i, prompt in enumerate(asked)
        for k in range(2)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def made(folder: Path, log: Path):
    data_tools.collect([str(log)], str(folder))
    return data_tools.open(str(folder))


@pytest.fixture
def ds(tmp_path, log):
    return made(tmp_path / "ds", log)


def run(ds, model, **options):
    settings = {"n": N, "params": PARAMS, "reward": rewards.get("contains")}
    return refresh(ds, model, **settings | options)


def test_a_refresh_adds_a_group_to_every_prompt_with_all_that_a_fit_needs(ds, model):
    report = run(ds, model)
    assert (report.policy, report.version, report.prompts, report.responses) == ("m", 0, 8, 8 * N)
    assert (report.kept, report.duplicate, report.rejected) == (8 * N, 0, 0)
    rows = ds.sql("SELECT * FROM rollouts WHERE policy = 'm'").to_pylist()
    old = ds.sql("SELECT * FROM rollouts WHERE policy IS NULL").to_pylist()
    assert {row["prompt_hash"] for row in rows} == {row["prompt_hash"] for row in old}
    assert not {row["group_id"] for row in rows} & {row["group_id"] for row in old}
    sizes = ds.sql("SELECT n FROM groups WHERE max_policy_version = 0")["n"].to_pylist()
    assert sizes == [N] * 8
    for row in rows:
        assert (row["temperature"], row["top_k"], row["logprob_kind"]) == (
            pytest.approx(0.8),
            None,
            "processed",
        )
        assert row["finish_reason"] in ("stop", "length")
        assert len(row["behavior_logprobs"]) == len(row["response_ids"]) <= 5
        extra = json.loads(row["extra"])
        assert extra.keys() == {"answers"}  # not `latency`, which was that of another response
        assert row["reward"] == float(any(answer in row["response"] for answer in extra["answers"]))
    card = ds.policies()["m"]
    weights = Policy.load(model).fingerprint()
    assert card.model_extra["versions"] == {"0": {"weights": weights, "model": str(model)}}
    assert card.sampling["temperature"] == 0.8
    assert not (Path(ds.path) / ".refresh").exists()


def test_logged_log_probs_are_those_of_a_forward_pass(ds, model):
    run(ds, model, params=replace(PARAMS, temperature=1.0, top_p=1.0))
    plain = Policy.load(model, device="cpu").model
    rows = ds.sql("SELECT prompt_ids, response_ids, behavior_logprobs FROM rollouts WHERE policy = 'm'")
    for row in rows.to_pylist():
        expected = logged.logprobs(plain, row["prompt_ids"], row["response_ids"])
        assert row["behavior_logprobs"] == pytest.approx(expected, abs=1e-4)


def test_versions_count_up_for_each_policy_and_draw_new_numbers(ds, model):
    assert [run(ds, model).version for _ in range(2)] == [0, 1]
    assert run(ds, model, policy="other").version == 0
    assert run(ds, model, version=7).version == 7
    assert run(ds, model).version == 8
    drawn = ds.sql(f"SELECT list(response) AS r FROM ({NAMED}) GROUP BY policy_version")["r"].to_pylist()
    assert len({tuple(responses) for responses in drawn}) == 4
    assert set(ds.policies()["m"].model_extra["versions"]) == {"0", "1", "7", "8"}


def test_a_prompt_that_is_asked_twice_gets_other_responses(ds, model, monkeypatch):
    monkeypatch.setattr(refresh_module, "TOGETHER", 2 * N)
    report = run(ds, model, prompts=Task(["1+1=", "2+2=", "3+3=", "1+1="], {"answers": ["2", "4", "6", "2"]}))
    assert report.kept == 4 * N
    query = "SELECT list(response) AS r FROM rollouts WHERE prompt = '1+1=' AND policy = 'm'"
    both = ds.sql(f"{query} GROUP BY group_id")["r"].to_pylist()
    assert len(both) == 2
    assert not set(both[0]) & set(both[1])


def test_the_same_version_sampled_again_adds_nothing(ds, model):
    first = run(ds, model, version=3, where="policy IS NULL")
    again = run(ds, model, version=3, where="policy IS NULL")
    assert (first.kept, again.kept, again.duplicate) == (8 * N, 0, 8 * N)


def test_prompts_come_from_a_file_or_a_condition_or_a_budget(ds, model, tmp_path):
    file = tmp_path / "prompts.jsonl"
    asked = [
        {"prompt": [{"role": "user", "content": "hi"}], "answers": "a"},
        {"prompt": "2+2=", "answers": "4"},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in asked))
    assert run(ds, model, prompts=file).prompts == 2
    assert run(ds, model, where="prompt LIKE '%+%'").prompts == 7
    assert run(ds, model, budget=Budget(2 * N + 1)).prompts == 2
    with pytest.raises(ConfigError, match="give one of them"):
        run(ds, model, prompts=file, budget=Budget(9))
    with pytest.raises(DataError, match="no prompts"):
        run(ds, model, where="false")


def test_responses_of_other_weights_are_not_added(ds, model, tmp_path, monkeypatch):
    other = tiny.save(tmp_path / "other", seed=1)
    monkeypatch.setattr(refresh_module, "open_sampler", lambda model, settings: open_sampler(other, settings))
    files = sorted(path.name for path in Path(ds.path).rglob("*.*") if ".refresh" not in path.parts)
    with pytest.raises(DataError, match=r"not from the weights in .*differ by"):
        run(ds, model)
    assert sorted(p.name for p in Path(ds.path).rglob("*.*") if ".refresh" not in p.parts) == files
    assert ds.sql("SELECT count(*) AS n FROM rollouts WHERE policy = 'm'")["n"].to_pylist() == [0]
    monkeypatch.undo()
    assert run(ds, model).version == 0  # nothing is left to be resumed


def test_a_sampler_that_answers_some_prompts_only_adds_nothing_and_is_resumed(ds, model, monkeypatch):
    asked = []

    @contextmanager
    def lazy(model, settings):
        with open_sampler(model, SamplerSettings()) as sampler:
            full = sampler.stream

            def stream(prompts, n, params):
                asked.append(len(prompts))
                for number, samples in full(prompts, n, params):
                    if len(asked) > 1 or number < 3:
                        yield number, samples

            sampler.stream = stream
            yield sampler

    monkeypatch.setattr(refresh_module, "open_sampler", lazy)
    server = SamplerSettings(engine="server", urls=("http://127.0.0.1",))
    with pytest.raises(DataError, match="5 of 8 prompts were not answered"):
        run(ds, model, sampler=server)
    assert run(ds, model, sampler=server, resume=True).kept == 8 * N
    assert asked == [8, 5]


@pytest.mark.parametrize("wrong", ["model", "reward", "server"])
def test_a_refresh_that_could_not_begin_leaves_nothing_to_be_resumed(ds, model, tmp_path, wrong):
    options = {
        "model": {},
        "reward": {"reward": rewards.get("exact", column="nothing")},
        "server": {"sampler": SamplerSettings("server", urls=("http://127.0.0.1:1",), attempts=1)},
    }[wrong]
    with pytest.raises(RecError):
        refresh(ds, tmp_path / "none" if wrong == "model" else model, policy="m", n=N, **options)
    assert run(ds, model).kept == 8 * N


MOMENTS = {
    "before the first samples": lambda: before(Journal, "add"),
    "in the middle of sampling": lambda: before(Journal, "add", count=3),
    "in the middle of a line": lambda: before(Journal, "add", count=3, act=half_a_line),
    "before it is verified": lambda: before(refresh_module, "verify_samples"),
    "before it is judged": lambda: before(judged_log_module, "append_jsonl"),
    "while it is judged": lambda: before(judged_log_module, "append_jsonl", count=3),
    "before the batch": lambda: before(refresh_module._Refreshing, "collect"),
    "after the batch": lambda: before(Journal, "remove"),
}


def half_a_line(journal, found):
    with (journal.folder / "samples.jsonl").open("ab") as file:
        file.write(b'{"prompt":2,"samples":[{"prompt_ids":[4,')


def run_and_die(folder: str, model: str, moment: str) -> None:
    refresh_module.TOGETHER = 2 * N
    judged_log_module.JUDGED_TOGETHER = 2
    MOMENTS[moment]()
    run(data_tools.open(folder), Path(model))


@pytest.fixture(scope="module")
def processes():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.offline_rec.test_refresh"])
    return context


@pytest.fixture(scope="module")
def whole(tmp_path_factory, log, model):
    """A refresh that nothing interrupted."""
    done = made(tmp_path_factory.mktemp("whole") / "ds", log)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(refresh_module, "TOGETHER", 2 * N)
        run(done, model)
    return done.sql(NAMED)


@pytest.mark.parametrize("moment", MOMENTS)
def test_kill_9_at_any_moment_loses_and_doubles_nothing(ds, model, whole, processes, moment, monkeypatch):
    process = processes.Process(target=run_and_die, args=(ds.path, str(model), moment))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    committed = moment == "after the batch"
    assert ds.sql(NAMED).num_rows == (8 * N if committed else 0)
    with pytest.raises(ConfigError, match=r"is unfinished in .*\n.*--resume"):
        run(ds, model)
    with pytest.raises(ConfigError, match=r"n: 3 -> 2"):
        run(ds, model, n=2, resume=True)
    monkeypatch.setattr(refresh_module, "TOGETHER", 2 * N)
    report = run(ds, model, resume=True)
    assert (report.kept, report.duplicate) == ((0, 8 * N) if committed else (8 * N, 0))
    assert ds.sql(NAMED).equals(whole)
    assert not journal_folder(ds, "m").exists()
    with pytest.raises(ConfigError, match="no unfinished refresh"):
        run(ds, model, resume=True)


def test_a_resumed_refresh_samples_only_what_is_missing(ds, model, processes, monkeypatch):
    process = processes.Process(target=run_and_die, args=(ds.path, str(model), "in the middle of sampling"))
    process.start()
    process.join(120)
    asked = []
    original = refresh_module._Refreshing.sample_part
    monkeypatch.setattr(refresh_module, "TOGETHER", 2 * N)
    monkeypatch.setattr(
        refresh_module._Refreshing,
        "sample_part",
        lambda self, sampler, part, params: (asked.append(part), original(self, sampler, part, params)),
    )
    run(ds, model, resume=True)
    assert asked == [[4, 5], [6, 7]]


def test_a_judge_is_not_asked_again_for_what_it_has_judged(ds, model, whole, monkeypatch):
    monkeypatch.setattr(refresh_module, "TOGETHER", 2 * N)
    monkeypatch.setattr(judged_log_module, "JUDGED_TOGETHER", 3)
    asked, contains = [], rewards.get("contains")

    def rule(responses, columns):
        asked.append(len(responses))
        if len(asked) == 3:  # the first one is tried out
            raise RuntimeError("the judge is gone")
        return contains.rule(responses, columns)

    with pytest.raises(RuntimeError, match="the judge is gone"):
        run(ds, model, reward=Reward("slow", rule))
    log = journal_folder(ds, "m") / "m-0.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    assert len(lines) == 3 * N
    log.write_bytes(b"".join(lines[:-1]) + lines[-1][:20])  # a kill in the middle of a prompt, and of a line
    asked[:] = [0] * 3
    report = run(ds, model, reward=Reward("slow", rule), resume=True)
    assert asked[3:] == [1, 3 * N, 3 * N]
    assert ds.sql(NAMED).equals(whole)
    judged = whole["reward"].to_pylist()
    assert report.mean_reward == pytest.approx(sum(judged) / len(judged))


def test_another_judge_judges_all(ds, model, monkeypatch):
    monkeypatch.setattr(refresh_module._Refreshing, "write_card", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(ds, model, reward=rewards.get("regex", pattern="1"))
    monkeypatch.undo()
    report = run(ds, model, reward=rewards.get("regex", pattern="()"), resume=True)
    assert report.mean_reward == 1


def test_a_policy_keeps_its_tokenizer(ds, model, tmp_path):
    run(ds, model)
    other = tmp_path / "o"
    fast = tiny.tokenizer("0123456789+= abcdefghijklmnopqrstuvwxyz?")
    tiny.model(len(fast)).save_pretrained(other)
    fast.save_pretrained(other)
    with pytest.raises(ConfigError, match="another tokenizer"):
        run(ds, other, policy="m", where="prompt LIKE '%+%'")
    assert ds.sql("SELECT count(*) AS n FROM rollouts WHERE policy = 'm'")["n"].to_pylist() == [8 * N]


def test_a_process_that_refreshes_keeps_others_out(ds, model):
    folder = journal_folder(ds, "m")
    folder.mkdir(parents=True)
    with refresh_module.held(folder), pytest.raises(ConfigError, match="another process is writing"):
        run(ds, model)
    assert os.listdir(folder) == []
