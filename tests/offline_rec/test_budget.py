"""The size of micro-batches that a fit settles on: as few tokens as cost little; the memory that it saves."""

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from transformers import Qwen2Config

from cli.main import rec
from offline_rec.config import CONFIG_FILE, fit_config
from offline_rec.data.index import IndexCounts
from offline_rec.training import memory
from offline_rec.training.budget import SMALL_BYTES, settled
from offline_rec.training.fit import fit
from tests.offline_rec.fitting import Killed, config, killer, world

CPU = torch.device("cpu")
WIDE = Qwen2Config(
    vocab_size=32_000,
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=8,
    tie_word_embeddings=False,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """The configuration of a model of 52 million parameters; its weights are not needed."""
    path = tmp_path_factory.mktemp("wide")
    WIDE.save_pretrained(path)
    return path


def data(prompt, response, *, siblings=8, groups=4):
    rows = siblings * groups
    return IndexCounts(
        rows=rows,
        groups=groups,
        tokens=rows * (prompt + response),
        response_tokens=rows * response,
        longest=prompt + response,
        largest_group=siblings * (prompt + response),
    )


def budget(folder, counts, device=CPU, ranks=1, zero_stage=0, **fields):
    asked = config(folder, tokens_per_micro_batch=None, **fields)
    return settled(asked, device, counts, ranks=ranks, zero_stage=zero_stage).tokens_per_micro_batch


def test_activations_take_no_more_than_what_stays(folder, wide):
    asked = config(folder, model=str(wide))
    found = budget(folder, data(512, 64), model=str(wide))
    needs = memory.estimate(asked, CPU, tokens=found)
    assert found == 2048
    assert needs.activations <= needs.kept < memory.estimate(asked, CPU, tokens=2 * found).activations


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"gradient_checkpointing": True}, 4096),
        ({"lora_rank": 8}, 1024),  # of half a GiB, more than the frozen weights take
    ],
)
def test_what_is_kept_and_what_is_trained_decide(folder, wide, fields, expected):
    assert budget(folder, data(64, 64), model=str(wide), **fields) == expected


def test_ranks_that_share_their_state_have_smaller_micro_batches(folder, wide):
    assert budget(folder, data(64, 64), model=str(wide), ranks=4, zero_stage=3) == 1024


def test_a_prompt_is_not_computed_for_every_response_that_has_it(folder, wide):
    assert budget(folder, data(2000, 300), model=str(wide)) == 8192  # a group is 4400
    assert budget(folder, data(300, 3000), model=str(wide)) == 4096  # eight prompts, not a group of 24,300
    assert budget(folder, data(9000, 900), model=str(wide)) == 16_384


def test_a_tiny_model_and_a_gpu_keep_the_most(folder, wide):
    assert budget(folder, data(60, 60)) == 16_384
    assert budget(folder, data(512, 64), torch.device("cuda"), model=str(wide)) == 16_384
    (folder / "odd").mkdir()
    assert budget(folder, data(512, 64), model=str(folder / "odd")) == 16_384


def test_a_number_that_is_given_stays(folder, wide):
    given = config(folder, model=str(wide), tokens_per_micro_batch=77)
    assert settled(given, CPU, data(512, 64)) is given


def test_a_run_writes_what_it_settled_on_and_a_resume_keeps_it(folder, monkeypatch):
    monkeypatch.setattr("offline_rec.training.budget.LEAST", 16)
    monkeypatch.setattr("offline_rec.training.budget.SMALL_BYTES", 1)
    killed = config(folder, "settled", tokens_per_micro_batch=None, steps=2, save_every=1)
    with pytest.raises(Killed):
        fit(killed, progress=killer(2))
    number = fit_config(Path(killed.out) / CONFIG_FILE).tokens_per_micro_batch
    assert 16 <= number < 16_384
    monkeypatch.setattr("offline_rec.training.budget.SMALL_BYTES", SMALL_BYTES)
    again = fit(killed, resume=True)
    assert fit_config(again.out / CONFIG_FILE).tokens_per_micro_batch == number


def test_a_dry_run_tells_the_size_of_micro_batches(folder):
    line = ["fit", folder / "ds", "--model", folder / "m", "--out", folder / "planned", "--device", "cpu"]
    told = CliRunner().invoke(rec, [*map(str, line), "--dry-run"]).stdout
    assert "micro-batches: up to 16384 tokens" in told
