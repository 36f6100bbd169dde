import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from data_tools.errors import ConfigError, DataError
from offline_rec.data.rows import Ragged, Rows
from offline_rec.models.policy import Policy
from tests import tiny

VOCABULARY = 100


def make_rows(prompts: list[list[int]], responses: list[list[int]], temperature: Any = 1.0) -> Rows:
    ids = Ragged.from_lists(responses, np.int32)
    return Rows(
        response_id=[f"r{i}" for i in range(len(prompts))],
        prompt_ids=Ragged.from_lists(prompts, np.int32),
        response_ids=ids,
        mask=Ragged.full(ids.lengths, 1, np.uint8),
        behavior=Ragged.full(ids.lengths, np.nan, np.float32),
        anchor=None,
        reference=None,
        temperature=np.broadcast_to(np.asarray(temperature, np.float32), len(prompts)).copy(),
    )


def random_rows(seed: int = 0, count: int = 6) -> Rows:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(4, VOCABULARY - 1, rng.integers(1, 12)).tolist() for _ in range(count)]
    responses = [rng.integers(4, VOCABULARY - 1, n).tolist() for n in rng.integers(0, 9, count)]
    return make_rows(prompts, responses, rng.uniform(0.5, 1.5, count))


def one_by_one(model: Any, rows: Rows) -> list[Tensor]:
    """Each row alone, unpadded, through the model's own logits."""
    done = []
    for i in range(len(rows)):
        prompt, response = (
            torch.tensor(ids[i].astype(np.int64)) for ids in (rows.prompt_ids, rows.response_ids)
        )
        logits = model(input_ids=torch.cat([prompt, response])[None]).logits[0] / float(rows.temperature[i])
        steps = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
        done.append(steps.gather(1, response[:, None])[:, 0])
    return done


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy(tiny.model(VOCABULARY), tiny.tokenizer())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model") / "tiny")


def assert_equal_one_by_one(policy: Policy, rows: Rows, tolerance: float = 1e-5) -> None:
    together = policy.logprobs(rows)
    for i, alone in enumerate(one_by_one(policy.model, rows)):
        torch.testing.assert_close(together[i, : len(alone)], alone, rtol=0, atol=tolerance)
        assert not together[i, len(alone) :].any()


def test_a_padded_batch_equals_its_rows_one_by_one(policy: Policy) -> None:
    rows = random_rows()
    assert_equal_one_by_one(policy, rows)
    assert policy.logprobs(rows).shape == (6, rows.response_ids.lengths.max())


def test_left_out_padding_care_would_be_noticed(policy: Policy) -> None:
    """Negative control: with padding in front and unmasked, values are off by far more than the tolerance."""
    rows = random_rows()
    alone = one_by_one(policy.model, rows)[0]
    ids = torch.tensor([0, 0, 0, *rows.prompt_ids[0], *rows.response_ids[0]])[None]
    steps = torch.log_softmax(policy.model(input_ids=ids).logits[0] / float(rows.temperature[0]), -1)
    wrong = steps[-len(alone) - 1 : -1].gather(1, ids[0, -len(alone) :, None])[:, 0]
    assert (wrong - alone).abs().max() > 0.1


def test_an_index_picks_and_orders_rows(policy: Policy) -> None:
    rows = random_rows()
    index = np.array([4, 1])
    every = policy.logprobs(rows)
    picked = policy.logprobs(rows, index)
    torch.testing.assert_close(picked, every[index, : picked.shape[1]], rtol=0, atol=1e-5)


def test_gradients_equal_those_of_rows_one_by_one() -> None:
    policy, rows = Policy(tiny.model(VOCABULARY), tiny.tokenizer()), random_rows(1)
    parameters = list(policy.model.parameters())
    together = torch.autograd.grad(policy.logprobs(rows).sum(), parameters)
    alone = torch.autograd.grad(torch.cat(one_by_one(policy.model, rows)).sum(), parameters)
    for ours, reference in zip(together, alone, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-4)


def test_gradient_checkpointing_changes_no_gradient_and_leaves_the_model_in_eval_mode() -> None:
    rows = random_rows(2)
    grads = []
    for checkpointing in (False, True):
        policy = Policy(tiny.model(VOCABULARY), tiny.tokenizer(), gradient_checkpointing=checkpointing)
        calls = count_calls(policy.model.model.layers[0].mlp)
        policy.logprobs(rows).sum().backward()
        assert len(calls) == (2 if checkpointing else 1)
        grads.append([p.grad for p in policy.model.parameters()])
        with torch.no_grad():
            policy.logprobs(rows)
        assert not policy.model.training
    for ours, reference in zip(*grads, strict=True):
        torch.testing.assert_close(ours, reference, rtol=0, atol=1e-6)


def count_calls(module: torch.nn.Module) -> list[int]:
    calls: list[int] = []
    module.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


def config_of(family: str, **extra: Any) -> Any:
    import transformers

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    tokens = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "initializer_range": 0.2}
    return getattr(transformers, family)(**sizes | heads | tokens | extra)


FAMILIES = {
    "qwen3": ("Qwen3Config", {"head_dim": 8, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2Config", {"head_dim": 8, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}),
    "granite": ("GraniteConfig", {"logits_scaling": 6.0}),
    "cohere": ("CohereConfig", {"logit_scale": 0.25}),
    "hyperclovax": ("HyperCLOVAXConfig", {"logits_scaling": 0.5}),
    "phi": ("PhiConfig", {}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt2": ("GPT2Config", {"n_positions": 64, "resid_pdrop": 0.5, "attn_pdrop": 0.5, "embd_pdrop": 0.5}),
    "opt": ("OPTConfig", {"ffn_dim": 48, "dropout": 0.5, "word_embed_proj_dim": 16}),
    "mamba": ("MambaConfig", {"state_size": 4}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_the_models_own_logits(family: str) -> None:
    from transformers import AutoModelForCausalLM

    name, extra = FAMILIES[family]
    torch.manual_seed(0)
    policy = Policy(AutoModelForCausalLM.from_config(config_of(name, **extra)).eval(), None)
    assert policy.token_model.rule is not None
    assert_equal_one_by_one(policy, random_rows(), tolerance=1e-4)
    policy.model.train()
    torch.testing.assert_close(policy.logprobs(random_rows()), policy.logprobs(random_rows()), rtol=0, atol=0)


def test_a_cap_on_attention_scores_is_kept(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = config_of("Gemma2Config", head_dim=8, query_pre_attn_scalar=1, attn_logit_softcapping=0.2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    ours, kept, left_out = (
        Policy(load(tmp_path), None)
        for load in (
            lambda path: Policy.load(path, device="cpu").model,
            lambda path: AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager"),
            lambda path: AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa"),
        )
    )
    rows = random_rows()
    with torch.no_grad():
        capped, reference, other = (one.logprobs(rows) for one in (ours, kept, left_out))
    torch.testing.assert_close(capped, reference, rtol=0, atol=1e-5)
    assert (capped - other).abs().max() > 0.1


def test_a_model_that_changes_its_logits_otherwise_falls_back_and_says_so(caplog: Any) -> None:
    class Odd(type(tiny.model(8))):  # type: ignore[misc]
        def forward(self, **inputs: Any) -> Any:
            out = super().forward(**inputs)
            out.logits = out.logits * torch.linspace(0.5, 2, out.logits.shape[-1])
            return out

    model = tiny.model(VOCABULARY)
    model.__class__ = Odd
    policy = Policy(model, tiny.tokenizer())
    assert policy.token_model.rule is None
    assert "whole logits are used" in caplog.text
    assert_equal_one_by_one(policy, random_rows())


def test_ids_outside_the_vocabulary_name_their_rows(policy: Policy) -> None:
    rows = make_rows([[5], [5, VOCABULARY], [5]], [[6], [6], [-1]])
    with pytest.raises(DataError, match=r"2 rows \(r1, r2\) hold token ids outside .* vocabulary of 100"):
        policy.logprobs(rows)


def test_sequences_beyond_the_context_name_their_rows(policy: Policy) -> None:
    rows = make_rows([[5], [5] * 500], [[6], [6] * 20])
    with pytest.raises(DataError, match=r"1 rows \(r1\) have up to 520 tokens, the context is 512"):
        policy.logprobs(rows)


def test_a_response_without_any_prompt_token_is_refused(policy: Policy) -> None:
    with pytest.raises(DataError, match="1 rows have an empty prompt: r1"):
        policy.logprobs(make_rows([[5], []], [[6], [6]]))


def test_padding_beside_logprobs_has_their_shape(policy: Policy) -> None:
    rows = random_rows()
    logprobs = policy.logprobs(rows)
    assert policy.pad(rows.mask).shape == logprobs.shape
    assert policy.pad(rows.mask).sum() == rows.response_ids.lengths.sum()
    assert policy.pad(rows.behavior, 20).shape == (6, 20)


def test_fingerprint_names_the_weights_not_the_file(tmp_path: Path, saved: Path) -> None:
    policy = Policy.load(saved, device="cpu")
    first = policy.fingerprint()
    policy.save(tmp_path / "again")
    assert Policy.load(tmp_path / "again", device="cpu").fingerprint() == first
    with torch.no_grad():
        policy.model.lm_head.weight[0, 0] += 1e-3
    assert policy.fingerprint() != first
    half = Policy(tiny.model(VOCABULARY).bfloat16(), None)
    full = Policy(tiny.model(VOCABULARY).bfloat16().float(), None)
    assert half.fingerprint() == full.fingerprint()


def test_a_saved_policy_is_a_plain_model_directory(tmp_path: Path, saved: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy = Policy.load(saved, device="cpu")
    policy.model.generation_config.temperature = 0.7  # without do_sample: some published models are like this
    for _ in range(2):  # the second save replaces the first
        policy.save(tmp_path / "model", facts={"steps": 3, "where": "a | b\nc"})
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert {
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "README.md",
    } <= names
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    card = (tmp_path / "model" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "| steps | 3 |\n| where | a \\| b c |" in card
    assert json.loads((tmp_path / "model" / "generation_config.json").read_text())["temperature"] == 0.7
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ids = AutoTokenizer.from_pretrained(tmp_path / "model")("1+1=", return_tensors="pt").input_ids
    torch.testing.assert_close(model(ids).logits, policy.model(ids).logits, rtol=0, atol=0)


def test_a_failed_save_leaves_the_old_directory(tmp_path: Path, saved: Path, monkeypatch: Any) -> None:
    policy = Policy.load(saved, device="cpu")
    policy.save(tmp_path / "model")
    monkeypatch.setattr(
        policy.tokenizer, "save_pretrained", lambda _: (_ for _ in ()).throw(OSError("disk full"))
    )
    with pytest.raises(OSError, match="disk full"):
        policy.save(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert Policy.load(tmp_path / "model", device="cpu")


def test_loading_prints_nothing(saved: Path) -> None:
    path = str(saved)
    script = f"from offline_rec.models.policy import Policy; Policy.load({path!r}).save({path + '-2'!r})"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=True,
    )
    assert (done.stdout, done.stderr) == ("", "")


def test_broken_directories_give_one_clear_error(tmp_path: Path, saved: Path) -> None:
    def broken(name: str, *remove: str) -> Path:
        path = tmp_path / name
        path.mkdir()
        for file in saved.iterdir():
            if not any(file.match(pattern) for pattern in remove):
                (path / file.name).write_bytes(file.read_bytes())
        return path

    cases = {
        "no model directory at": tmp_path / "nowhere",
        "holds no tokenizer": broken("tokens", "*token*", "*.jinja"),
        "has no config.json": broken("config", "config.json"),
        r"holds no weights \(\*.safetensors\)": broken("weights", "*.safetensors"),
    }
    pickled = broken("pickled", "*.safetensors")
    (pickled / "pytorch_model.bin").write_bytes(b"x")
    cases["pickled weights only"] = pickled
    torn = broken("torn")
    whole = (torn / "model.safetensors").read_bytes()
    (torn / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    cases["model in .* does not load"] = torn
    for message, path in cases.items():
        with pytest.raises(DataError, match=message):
            Policy.load(path, device="cpu")


def test_weights_that_are_missing_from_the_files_are_not_made_up(tmp_path: Path, saved: Path) -> None:
    from safetensors.torch import load_file, save_file

    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(saved / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match="1 weights of the model are not in its files: model"):
        Policy.load(tmp_path, device="cpu")


def test_weights_that_do_not_fit_the_configuration_are_named(
    tmp_path: Path, saved: Path, caplog: Any
) -> None:
    target = tmp_path / "other"
    shutil.copytree(saved, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"vocab_size": 50}))
    with pytest.raises(DataError, match=r"lm_head.weight is \(\d+, 32\), not \(50, 32\)"):
        Policy.load(target, device="cpu")
    (target / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    Policy.load(target, device="cpu")
    assert "9 weights in its files are no part of the model in config.json" in caplog.text
    assert "model.layers.1." in caplog.text


def test_code_that_a_model_brings_is_not_run(tmp_path: Path, saved: Path) -> None:
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((saved / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text("raise SystemExit('ran')")
    with pytest.raises(DataError, match="brings its own code, which is not run"):
        Policy.load(tmp_path, device="cpu")


def test_unknown_devices_and_dtypes_are_named() -> None:
    with pytest.raises(ConfigError, match="unknown device 'gpu'"):
        Policy.load(".", device="gpu")
    with pytest.raises(ConfigError, match="unknown dtype 'int8'"):
        Policy.load(".", device="cpu", dtype="int8")
