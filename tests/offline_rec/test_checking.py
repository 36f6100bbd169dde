"""`check` with a model: a clean dataset, and for each rule a dataset made to break it."""

import json
import shlex
from functools import cache

import numpy as np
import pyarrow as pa
import pytest
import torch

import data_tools
from cli.main import rec
from data_tools.checking import RULES as MODEL_FREE
from data_tools.errors import DataError
from data_tools.store.dataset import PolicyCard
from offline_rec.checking import RULES, check
from offline_rec.checking.temperature import Setting, explain, implied_temperature
from offline_rec.data.fingerprint import fingerprint
from offline_rec.models.policy import Policy
from offline_rec.models.saving import save_directory
from offline_rec.rewards import get
from offline_rec.sampling.hf_sampler import HFSampler
from offline_rec.sampling.sampled_rows import Task, sample_rows, write_jsonl
from offline_rec.sampling.sampler import Sample, SamplingParams
from tests import tiny
from tests.offline_rec import logged
from tests.offline_rec.drawn import by_plain_forward
from tests.offline_rec.logged import ids, tokenizer

EOS = 3
BOS = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The model that sampled all rows here, unless said otherwise."""
    return tiny.save(tmp_path_factory.mktemp("model"))


@cache
def sampler():
    return tiny.model(len(tokenizer()), seed=0)


def at_temperature(row, temperature):
    """The row with the log-probs that sampling at a temperature gives it."""
    prompt, response = row["prompt_ids"], row["response_ids"]
    with torch.no_grad():
        logits = sampler()(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    every = (logits / temperature).log_softmax(-1)
    return row | with_logprobs(every[torch.arange(len(response)), torch.tensor(response)].tolist())


def with_logprobs(values):
    return {
        "behavior_logprobs": values,
        "behavior_logprob": float(np.sum(np.float32(values), dtype=np.float64)),
    }


def dataset(path, change=lambda row: row, *, card=None, **columns):
    """Ten groups by the model; `change` is applied to every row of the first."""
    rows = [row | columns for row in logged.rows(10, seed=3)]
    rows = [change(row) if row["group_id"] == "g0" else row for row in rows]
    ds = logged.dataset(path, rows)
    facts = {"name": "tiny", "tokenizer": fingerprint(tokenizer())} | (card or {})
    ds.write_policy(PolicyCard(**facts))
    return ds


def everywhere(change):
    """A change of all rows instead of one group."""

    def make(path, **options):
        ds = logged.dataset(path, [change(row) for row in logged.rows(10, seed=3)])
        ds.write_policy(PolicyCard(name="tiny", tokenizer=fingerprint(tokenizer()), **options))
        return ds

    return make


def found(report, code):
    [finding] = [finding for finding in report.findings if finding.code == code]
    return finding


def test_a_dataset_of_the_models_own_samples_is_clean(tmp_path, model):
    report = check(dataset(tmp_path / "ds"), model)
    assert report.findings == []
    assert {record["rows"] for record in report.logprobs} == {12, 16}
    for record in report.logprobs:
        assert record["mean_difference"] == pytest.approx(0, abs=1e-5)
        assert record["p01"] == pytest.approx(0, abs=1e-4)
        assert record["implied_temperature"] == pytest.approx(1, rel=0.01)


def sampled(path, model, params, **columns):
    """A dataset of responses drawn by the model, as a user would collect it, some columns changed."""
    policy = Policy.load(model)
    rows = sample_rows(
        HFSampler(policy.model, policy.tokenizer),
        Task([f"{a}+1=" for a in range(12)], {"answers": [str(a + 1) for a in range(12)]}),
        4,
        params,
        reward=get("exact"),
        policy="tiny",
        policy_version=0,
    )
    rewards = np.arange(rows.num_rows) % 2  # an untrained model is never right
    changed = [row | {"reward": float(reward)} for row, reward in zip(rows.to_pylist(), rewards, strict=True)]
    changed = [row | {name: make(row) for name, make in columns.items()} for row in changed]
    write_jsonl(pa.Table.from_pylist(changed, rows.schema), path.with_suffix(".jsonl"))
    data_tools.collect([str(path.with_suffix(".jsonl"))], str(path))
    ds = data_tools.open(path)
    ds.write_policy(PolicyCard(name="tiny", model=str(model), tokenizer=fingerprint(policy.tokenizer)))
    return ds


def grave(report):
    """What is worse than a fact to know; that a tiny model rarely ends is none here."""
    codes = [finding.code for finding in report.findings if finding.severity != "info"]
    return [code for code in codes if code != "truncated"]


def by_hand(row, **params):
    """Log-probs of a row by a plain forward pass."""
    sample = Sample(row["prompt_ids"], row["response_ids"], [], "stop", "")
    return by_plain_forward(sampler(), sample, SamplingParams(**params))


def test_a_log_that_was_sampled_and_collected_here_is_clean(tmp_path, model):
    report = check(sampled(tmp_path / "ds", model, SamplingParams(0.8, max_tokens=400, seed=5)), model)
    assert grave(report) == []
    assert report.logprobs[0]["implied_temperature"] == pytest.approx(0.8, rel=0.01)


@pytest.mark.parametrize(
    "way",
    [{"top_p": 0.95}, {"top_k": 50}, {"temperature": 0.7, "top_p": 0.9}],
    ids=["top-p", "top-k", "cooler"],
)
def test_logprobs_of_cut_sampling_are_recomputed_with_the_cut(tmp_path, model, way):
    ds = sampled(tmp_path / "ds", model, SamplingParams(**way, max_tokens=60, seed=5))
    report = check(ds, model)
    assert grave(report) == []
    [record] = report.logprobs
    assert record["mean_difference"] < 1e-5
    assert max(-record["p01"], record["p99"]) < 1e-4
    assert record["outside_cut"] == 0
    assert record["implied_temperature"] == pytest.approx(way.get("temperature", 1), rel=0.01)
    lost = [
        np.subtract(row["behavior_logprobs"], by_hand(row, temperature=way.get("temperature", 1.0)))
        for row in ds.sql("SELECT * FROM rollouts").to_pylist()
    ]
    shown = f"too small by {np.concatenate(lost).mean():.3f} nats a token"
    assert shown in found(report, "cut_sampling").detail


def test_a_deep_cut_that_agrees_still_warns_of_its_ratios(tmp_path, model):
    ds = sampled(tmp_path / "ds", model, SamplingParams(top_p=0.5, max_tokens=60, seed=5))
    report = check(ds, model)
    assert grave(report) == ["cut_sampling"]
    assert report.logprobs[0]["mean_difference"] < 1e-5


def test_a_cut_that_was_not_the_one_of_sampling_is_told(tmp_path, model):
    ds = sampled(tmp_path / "ds", model, SamplingParams(max_tokens=60, seed=5), top_p=lambda row: 0.6)
    assert set(grave(check(ds, model))) == {"cut_sampling", "cut_differs"}


@pytest.mark.parametrize("kind", ["processed", "unknown"])
def test_a_temperature_that_cannot_be_counts_as_1(tmp_path, model, kind):
    params = SamplingParams(top_p=0.95, max_tokens=20, seed=5)
    columns = {"temperature": lambda row: -1.0, "logprob_kind": lambda row: kind}
    report = check(sampled(tmp_path / "ds", model, params, **columns), model)
    assert report.logprobs[0]["mean_difference"] < 0.1


@pytest.mark.parametrize(
    ("kind", "told"), [("raw", "raw_marked_processed"), ("processed", "processed_unmarked")]
)
def test_the_wrong_kind_of_logprobs_is_told_by_the_cut_alone(tmp_path, model, kind, told):
    params = SamplingParams(top_k=8, max_tokens=60, seed=5)
    columns = {"logprob_kind": lambda row: "unknown"}
    if kind == "raw":
        columns = {"behavior_logprobs": by_hand}
    report = check(sampled(tmp_path / "ds", model, params, **columns), model)
    assert told in grave(report)
    assert found(report, "cut_sampling").severity == "warning"


def text_only(row):
    keys = ("prompt_ids", "response_ids", "behavior_logprobs", "behavior_logprob")
    chat = json.dumps([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
    return row | dict.fromkeys(keys) | {"prompt": chat}


def prompt_ids(change):
    return lambda row: row | {"prompt_ids": change(row["prompt_ids"])}


def response(change):
    def changed(row):
        made = change(row["response_ids"])
        return row | {"response_ids": made} | with_logprobs([-1.0] * len(made))

    return changed


OTHER_TEMPLATE = fingerprint(tokenizer())[:16] + "0" * 16
WIDE = {"temperature": 0.5, "behavior_logprob": None, "flags": ["raw_at_temperature"]}

CASES = {
    "other_tokenizer": lambda path: dataset(path, card={"tokenizer": "0" * 32}),
    "other_template": lambda path: dataset(path, card={"tokenizer": OTHER_TEMPLATE}),
    "unknown_tokenizer": lambda path: dataset(path, card={"tokenizer": None}),
    "ids_outside_vocabulary": lambda path: dataset(path, response(lambda made: [*made[:-1], 5000])),
    "text_differs": lambda path: dataset(path, lambda row: row | {"response": "7" + row["response"]}),
    "roundtrip_differs": lambda path: dataset(path, response(lambda made: [BOS, *made])),
    "prompt_differs": lambda path: dataset(path, prompt_ids(lambda made: [*ids("Q: "), *made])),
    "bos_twice": lambda path: dataset(path, prompt_ids(lambda made: [BOS, BOS, *made])),
    "end_missing": lambda path: dataset(path, response(lambda made: made[:-1])),
    "end_after_cut": lambda path: dataset(path, lambda row: row | {"finish_reason": "length"}),
    "not_encodable": lambda path: dataset(path, text_only),
    "too_long": lambda path: dataset(path, prompt_ids(lambda made: made * 200)),
    "raw_marked_processed": everywhere(lambda row: row | {"temperature": 0.5}),
    "processed_unmarked": everywhere(
        lambda row: at_temperature(row, 0.5) | WIDE | {"logprob_kind": "unknown"}
    ),
    "temperature_differs": everywhere(lambda row: at_temperature(row, 0.5)),
    "other_policy": everywhere(lambda row: row | with_logprobs([-0.01] * len(row["response_ids"]))),
}
SOME = {"prompt_differs": "at token 0: the engine has 'Q' ':' ' ' [53, 30, 4], the text gives '4' '0' '+'"}


@pytest.mark.parametrize("code", CASES)
def test_a_rule_finds_the_rows_that_were_made_to_break_it(tmp_path, model, code):
    report = check(CASES[code](tmp_path / "ds"), model)
    finding = found(report, code)
    [rule] = [rule for rule in RULES if rule.code == code]
    whole = code in ("other_tokenizer", "other_template", "unknown_tokenizer") or "temp" in code
    whole = whole or code in ("raw_marked_processed", "processed_unmarked", "other_policy")
    assert (finding.count, finding.severity) == (40 if whole else 4, rule.severity)
    assert finding.detail
    if not whole:
        assert finding.rows == ["r0-0", "r0-1", "r0-2"]
    assert report.failed == any(other.severity == "error" for other in report.findings)


def test_every_rule_has_a_case():
    others = {
        "bos_missing",
        "stops_elsewhere",
        "sampler_disagrees",
        "cut_differs",
    }  # tests of their own, below
    assert {rule.code for rule in RULES} == CASES.keys() | others


def test_the_first_difference_of_a_prompt_is_shown(tmp_path, model):
    detail = found(check(CASES["prompt_differs"](tmp_path / "ds"), model), "prompt_differs").detail
    asked = tokenizer().convert_ids_to_tokens(logged.rows(1, seed=3)[0]["prompt_ids"][:3])
    shown = f"{ids('Q: ')}, the text gives {' '.join(map(repr, asked))}"
    assert detail.startswith("at token 0: the engine has 'Q' ':' ' ' " + shown)


def test_the_temperature_that_explains_the_logprobs_is_in_the_fix(tmp_path, model):
    report = check(CASES["temperature_differs"](tmp_path / "ds"), model)
    assert "--temperature 0.50 --logprob-kind processed" in found(report, "temperature_differs").fix
    for record in report.logprobs:
        assert record["implied_temperature"] == pytest.approx(0.5, rel=0.01)
        assert record["mean_difference"] > 0.5 > 0.05 > record["difference_there"]


def test_a_prompt_without_the_bos_that_the_tokenizer_gives_is_told(tmp_path):
    from offline_rec.demo.model import build_model, build_tokenizer

    fast = build_tokenizer()
    save_directory(build_model(fast, seed=0), fast, tmp_path / "model")
    own = fast("1+1=")["input_ids"]
    row = logged.rows(1)[0] | {
        "prompt": "1+1=",
        "response": "2",
        "response_ids": [*fast("2")["input_ids"][1:], 3],
    }
    rows = [
        row | {"response_id": f"r{i}", "prompt_ids": own[i % 2 :], "reward": float(i // 2)} for i in range(4)
    ]
    ds = logged.dataset(tmp_path / "ds", [row | with_logprobs([-1.0, -1.0]) for row in rows])
    finding = found(check(ds, tmp_path / "model"), "bos_missing")
    assert (finding.count, finding.rows) == (2, ["r1", "r3"])
    assert finding.detail.startswith("at token 0: the engine has '1'")


def test_a_model_that_does_not_stop_at_its_end_token_is_told(tmp_path):
    fast = tokenizer()
    other = tiny.model(len(fast))
    other.generation_config.eos_token_id = 7
    save_directory(other, fast, tmp_path / "model")
    finding = found(check(dataset(tmp_path / "ds"), tmp_path / "model"), "stops_elsewhere")
    assert "stops at [7], the end token is '<eos>' (3)" in finding.detail
    assert "c.eos_token_id = [7, 3]" in finding.fix


def test_a_card_that_names_the_wrong_model_is_an_error(tmp_path, model):
    other = tiny.save(tmp_path / "other", seed=9)
    ds = dataset(tmp_path / "ds", card={"model": str(other)})
    assert found(check(ds, other), "sampler_disagrees").count == 40
    ds.write_policy(PolicyCard(name="tiny", model=str(model), tokenizer=fingerprint(tokenizer())))
    report = check(ds, other)
    assert found(report, "other_policy").severity == "warning"
    assert not report.failed


def test_greedy_rows_and_rows_without_ids_are_not_compared(tmp_path, model):
    ds = everywhere(lambda row: row | {"temperature": 0.0, "behavior_logprob": None})(tmp_path / "ds")
    assert check(ds, model).logprobs == []


def test_a_sample_is_all_that_is_read_of_tokens(tmp_path, model):
    told = []
    ds = dataset(tmp_path / "ds")
    report = check(ds, model, sample=6, seed=1, progress=lambda done, total: told.append((done, total)))
    assert (report.rows, report.sampled, sum(record["rows"] for record in report.logprobs)) == (40, 6, 6)
    assert told[-1] == (6, 6)


def test_a_model_that_is_not_there_is_told(tmp_path):
    with pytest.raises(DataError, match="no model directory"):
        check(dataset(tmp_path / "ds"), tmp_path / "nothing")


@pytest.mark.parametrize("true", [0.25, 0.6, 0.95, 1.7])
def test_the_implied_temperature_is_the_one_of_the_smallest_gap(true):
    calls = []

    def gap(temperature):
        calls.append(temperature)
        return abs(np.log(temperature / true)) + 0.01

    assert implied_temperature(gap) == pytest.approx(true, rel=0.01)
    assert len(calls) < 40


def test_no_temperature_is_implied_where_all_explain_alike():
    found = explain(Setting("p", 0, "processed", 1.0), lambda temperature, cut: 0.001)
    assert (found.temperature, found.rule) == (None, None)


PLACEHOLDERS = {"dataset": "DS", "model": "MODEL", "temperature": "0.7", "context": "8", "stops": "[3]"}
PLACEHOLDERS |= {"flag": "x", "file": "x", "row": "x"}


@pytest.mark.parametrize("rule", [*MODEL_FREE, *RULES], ids=lambda rule: rule.code)
def test_every_fix_is_a_command_that_can_be_typed(rule):
    program, *arguments = shlex.split(rule.fix.format(**PLACEHOLDERS).replace("NUMBER", "3"))
    if program == "python":
        compile(arguments[1], "fix", "exec")
        return
    assert program == "rec"
    command = rec.get_command(None, arguments[0])
    command.make_context(arguments[0], arguments[1:])
