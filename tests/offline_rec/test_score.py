from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from data_tools.errors import ConfigError, DataError
from offline_rec.data.rows import RowStore
from offline_rec.data.tokens import prepare
from offline_rec.models import score as scoring
from offline_rec.models.policy import Policy
from offline_rec.models.score import score
from tests import tiny
from tests.offline_rec.test_tokens import dataset, engine_row, ids, text_row

TOKENIZER = tiny.tokenizer()


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy(tiny.model(len(TOKENIZER)), TOKENIZER)


def varied(first: int, count: int) -> list[dict[str, Any]]:
    return [
        engine_row(f"{n}+{n}=", "7" * (n % 4 + 1), temperature=0.5 + n % 2)
        for n in range(first, first + count)
    ]


def table(ds: Any, key: str, batch: int = 0) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = pq.read_table(
        ds.sidecar("logprobs", key).path(ds.batches()[batch])
    ).to_pydict()
    return columns


def alone(policy: Policy, ds: Any, row: int, batch: int = 0) -> np.ndarray[Any, Any]:
    rows = RowStore(ds).take(ds.batches()[batch : batch + 1], np.array([row]))
    with torch.no_grad():
        return policy.logprobs(rows)[0].numpy()


def test_every_row_gets_the_logprobs_of_the_policy_at_its_temperature(tmp_path: Path, policy: Policy) -> None:
    ds = dataset(tmp_path / "ds", varied(0, 9), varied(9, 4))
    seen: list[tuple[int, int]] = []
    report = score(ds, policy, token_budget=40, progress=lambda done, total: seen.append((done, total)))
    assert (report.rows, report.scored, report.kept, report.skipped) == (13, 13, 0, {})
    assert seen == [(9, 13), (13, 13)]
    assert report.key == policy.fingerprint()
    for batch, count in ((0, 9), (1, 4)):
        columns = table(ds, report.key, batch)
        assert columns["temperature"] == [0.5 + (n + 9 * batch) % 2 for n in range(count)]
        for row in range(count):
            values = columns["logprobs"][row]
            np.testing.assert_allclose(values, alone(policy, ds, row, batch), atol=1e-5)
            assert columns["logprob"][row] == pytest.approx(sum(values), abs=1e-6)
    rows = RowStore(ds, anchor_key=report.key).take(ds.batches()[:1] * 2, np.array([3, 8]))
    assert rows.anchor is not None
    assert np.isfinite(rows.anchor.values).all()
    assert sorted(p.name for p in (tmp_path / "ds" / "logprobs" / report.key).iterdir()) == [
        f"{name}.parquet" for name in ds.batches()
    ]


def test_the_sum_is_over_the_tokens_that_the_policy_produced(tmp_path: Path, policy: Policy) -> None:
    masked = engine_row(response="4", response_ids=ids("ab4"), loss_mask=[1, 0, 1])
    ds = dataset(tmp_path / "ds", [engine_row(), masked, engine_row(response="", response_ids=[])])
    columns = table(ds, score(ds, policy, where="response_id <> 'r0'").key)
    first, _, third = columns["logprobs"][1]
    assert columns["logprob"] == [None, pytest.approx(first + third, abs=1e-6), 0.0]
    assert columns["logprobs"][2] == []


def test_rows_outside_the_filter_stay_null_until_they_are_asked_for(tmp_path: Path, policy: Policy) -> None:
    ds = dataset(tmp_path / "ds", varied(0, 6), varied(6, 2))
    first = score(ds, policy, where="response_id IN ('r1', 'r4')")
    assert (first.rows, first.scored) == (2, 2)
    before = table(ds, first.key)
    assert [value is not None for value in before["logprobs"]] == [False, True, False, False, True, False]
    assert ds.sidecar("logprobs", first.key).missing() == ds.batches()[1:]

    second = score(ds, policy)
    assert (second.rows, second.scored, second.kept) == (8, 6, 2)
    after = table(ds, second.key)
    assert after["logprobs"][1] == before["logprobs"][1]
    assert None not in after["logprobs"] + after["logprob"] + after["temperature"]
    third = score(ds, policy)
    assert (third.scored, third.kept) == (0, 8)


def test_finished_pieces_survive_a_kill(tmp_path: Path, policy: Policy, monkeypatch: Any) -> None:
    monkeypatch.setattr(scoring, "PIECE_TOKENS", 20)
    ds = dataset(tmp_path / "ds", varied(0, 12))

    def die(done: int, total: int) -> None:
        if done >= 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(ds, policy, progress=die)
    key = policy.fingerprint()
    assert ds.sidecar("logprobs", key).missing() == ds.batches()
    assert ds.sql("SELECT count(*) FROM rollouts").column(0).to_pylist() == [12]

    report = score(ds, policy)
    assert 0 < report.kept < 12
    assert report.kept + report.scored == 12
    assert not (tmp_path / "ds" / "logprobs" / key / "_pieces").exists()
    whole = dataset(tmp_path / "whole", varied(0, 12))
    score(whole, policy)
    for ours, reference in zip(table(ds, key)["logprobs"], table(whole, key)["logprobs"], strict=True):
        np.testing.assert_allclose(ours, reference, atol=1e-6)


def test_pieces_of_batches_that_are_gone_are_swept(tmp_path: Path, policy: Policy, monkeypatch: Any) -> None:
    ds = dataset(tmp_path / "ds", varied(0, 2))
    folder = tmp_path / "ds" / "logprobs" / policy.fingerprint() / "_pieces"
    stray = folder / "gone.000000000000-000000000001.parquet"
    stray.parent.mkdir(parents=True)
    stray.write_bytes(b"")
    score(ds, policy)
    assert not stray.parent.exists()


def test_rows_that_cannot_be_scored_are_counted_by_reason(tmp_path: Path, policy: Policy) -> None:
    image = '[{"role": "user", "content": [{"type": "image_url"}]}]'
    ds = dataset(
        tmp_path / "ds",
        [
            engine_row(),
            text_row(image),
            engine_row(prompt_ids=[]),
            engine_row(response_ids=ids("2") * 600, response="2" * 600),
            text_row(),
        ],
    )
    report = score(ds, policy)
    assert report.skipped == {"no_ids": 1, "empty_prompt": 1, "too_long": 1}
    assert (report.rows, report.scored) == (5, 2)
    assert [value is not None for value in table(ds, report.key)["logprobs"]] == [
        True,
        False,
        False,
        False,
        True,
    ]


def test_ids_beyond_the_model_and_broken_weights_are_counted(tmp_path: Path) -> None:
    small = Policy(tiny.model(len(TOKENIZER) - 1), TOKENIZER)
    last = len(TOKENIZER) - 1
    ds = dataset(
        tmp_path / "ds", [engine_row(), engine_row(response_ids=[last], response=TOKENIZER.decode([last]))]
    )
    assert score(ds, small).skipped == {"outside_vocabulary": 1}
    broken = tiny.model(len(TOKENIZER))
    with torch.no_grad():
        broken.model.embed_tokens.weight[ids("2")] = torch.nan
    report = score(ds, Policy(broken, TOKENIZER))
    assert report.skipped == {"not_finite": 1}
    assert report.scored == 1


def test_scores_of_retokenised_rows_are_kept_apart(tmp_path: Path, policy: Policy) -> None:
    ds = dataset(tmp_path / "ds", [engine_row(response_ids=ids("2"), finish_reason="stop")])
    plain, text = score(ds, policy), score(ds, policy, retokenise=True)
    assert text.key == plain.key + "-retokenised"
    assert len(table(ds, plain.key)["logprobs"][0]) == 1
    assert len(table(ds, text.key)["logprobs"][0]) == 2


def test_scores_of_anothers_ids_are_kept_apart_and_need_its_vocabulary(
    tmp_path: Path, policy: Policy
) -> None:
    ds = dataset(tmp_path / "ds", [text_row('[{"role": "user", "content": "2+2="}]')])
    other = tiny.tokenizer()
    other.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    plan = prepare(ds, other)
    report = score(ds, policy, tokens=plan)
    assert report.key == f"{policy.fingerprint()}-{plan.key}"
    assert score(ds, policy).key == policy.fingerprint()
    assert table(ds, report.key)["logprob"] != table(ds, policy.fingerprint())["logprob"]
    with pytest.raises(DataError, match="the model to score has another tokenizer"):
        score(ds, Policy(tiny.model(99), tiny.tokenizer("abc")), tokens=plan)


def test_a_model_directory_is_loaded_and_a_bad_filter_is_named(tmp_path: Path) -> None:
    ds = dataset(tmp_path / "ds", varied(0, 2))
    model = tiny.save(tmp_path / "model")
    report = score(ds, model)
    assert report.scored == 2
    assert report.notes == [
        "policy 'p' names no tokenizer; its ids are used: 2 sampled rows decode to their text"
    ]
    with pytest.raises(ConfigError):
        score(ds, model, where="no_such_column = 1")
    with pytest.raises(DataError, match="no model directory"):
        score(ds, tmp_path / "nowhere")


def test_an_empty_dataset_has_nothing_to_score(tmp_path: Path, policy: Policy) -> None:
    ds = dataset(tmp_path / "ds")
    assert score(ds, policy).rows == 0
