"""Adapters: a fit of them alone, exact at the start and on a resume, merged into a plain model in the end."""

import json
import multiprocessing
import signal

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import data_tools
from cli.main import rec
from data_tools.errors import ConfigError, DataError, MissingExtra
from offline_rec.config import fit_config
from offline_rec.models import policy as policy_module
from offline_rec.models.adapters import LoraSettings
from offline_rec.models.policy import Policy
from offline_rec.models.score import score
from offline_rec.training import checkpoint
from offline_rec.training.fit import fit
from tests import tiny
from tests.offline_rec.fitting import Killed, config, furthest, killer, lineage, records, weights, world
from tests.offline_rec.team import run_team
from tests.offline_rec.test_fit_resume import MOMENTS

peft = pytest.importorskip("peft")

LORA = {"lora_rank": 4, "lora_alpha": 8, "schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.1}
SETTINGS = LoraSettings(rank=4, alpha=8.0)
IDS = torch.arange(4, 40)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def whole(folder):
    return fit(config(folder, "whole", **LORA))


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def shaken(policy, seed=1):
    """The policy with matrices that are not zero."""
    torch.manual_seed(seed)
    for parameter in policy.model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.1)
    return policy


def rows_of(folder, n=6):
    from offline_rec.data.rows import RowStore

    ds = data_tools.open(str(folder / "ds"))
    table = ds.sql(f"SELECT file, file_row FROM rollouts ORDER BY file, file_row LIMIT {n}")
    return RowStore(ds, tokens_key=None).take(
        table.column("file").to_pylist(), table.column("file_row").to_numpy()
    )


def test_an_adapter_begins_as_its_base_bit_for_bit(folder):
    base = Policy.load(folder / "m", device="cpu")
    adapted = Policy.load(folder / "m", device="cpu", lora=SETTINGS)
    assert torch.equal(logits(adapted.model), logits(base.model))
    assert adapted.fingerprint() == base.fingerprint()
    shaken(adapted)
    assert not torch.allclose(logits(adapted.model), logits(base.model), atol=1e-2)
    assert adapted.fingerprint() != base.fingerprint()
    assert adapted.fingerprint(merged=False) == base.fingerprint()


def test_only_the_matrices_are_trained_and_they_depend_on_the_seed_alone(folder):
    torch.manual_seed(5)
    one = Policy.load(folder / "m", device="cpu", lora=SETTINGS)
    state = torch.get_rng_state()
    torch.manual_seed(6)
    other = Policy.load(folder / "m", device="cpu", lora=SETTINGS)
    trained = {n: p for n, p in one.model.named_parameters() if p.requires_grad}
    assert trained
    assert all(".lora_" in name and "lm_head" not in name for name in trained)
    assert sum(p.numel() for p in trained.values()) == sum(t.numel() for t in one.adapter.tensors().values())
    for (_, a), (_, b) in zip(one.model.named_parameters(), other.model.named_parameters(), strict=True):
        assert torch.equal(a, b)
    torch.manual_seed(5)
    assert torch.equal(torch.get_rng_state(), state), "attaching drew from the global generator"
    reseeded = Policy.load(folder / "m", device="cpu", lora=LoraSettings(4, 8.0, seed=1)).adapter.tensors()
    for matrix, drawn in one.adapter.tensors().items():
        bound = 1 / drawn.shape[1] ** 0.5  # Kaiming's, with a slope of sqrt(5)
        assert ".lora_B." in matrix or 0.9 * bound < drawn.abs().max() <= bound
        assert torch.equal(drawn, reseeded[matrix]) == (".lora_B." in matrix)


def test_log_probs_under_an_adapter_take_the_chunked_path_and_equal_a_plain_forward(folder, monkeypatch):
    calls = []
    real = policy_module.token_logprobs
    monkeypatch.setattr(policy_module, "token_logprobs", lambda *a, **k: calls.append(1) or real(*a, **k))
    policy = shaken(Policy.load(folder / "m", device="cpu", lora=SETTINGS))
    rows = rows_of(folder)
    found = policy.logprobs(rows)
    assert policy.token_model.rule is not None
    assert calls
    for i in range(len(rows.response_id)):
        ids = np.concatenate([rows.prompt_ids[i], rows.response_ids[i]]).astype(np.int64)
        n = len(rows.response_ids[i])
        with torch.no_grad():
            plain = policy.model(torch.from_numpy(ids)[None]).logits[0, -n - 1 : -1].double().log_softmax(-1)
        expected = plain[torch.arange(n), torch.from_numpy(ids[-n:])]
        torch.testing.assert_close(found[i, :n].double(), expected, rtol=0, atol=1e-5)


def test_the_gradient_of_the_matrices_is_that_of_the_merged_weight(folder):
    """dL/dB = s dL/dW A^T and dL/dA = s B^T dL/dW, with dL/dW from a plain model of the merged weights."""
    policy = shaken(Policy.load(folder / "m", device="cpu", lora=SETTINGS))
    rows = rows_of(folder)
    policy.logprobs(rows).sum().backward()
    plain = tiny.model(policy.vocabulary)
    policy.save(folder / "merged")
    plain.load_state_dict(load_file(folder / "merged" / "model.safetensors"))
    Policy(plain, policy.tokenizer).logprobs(rows).sum().backward()
    for name, layer in policy.model.named_modules():
        if not hasattr(layer, "lora_A"):
            continue
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        full, scale = plain.get_submodule(name).weight.grad, SETTINGS.alpha / SETTINGS.rank
        torch.testing.assert_close(b.grad, scale * full @ a.T, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(a.grad, scale * b.T @ full, rtol=1e-3, atol=1e-4)


def test_recomputed_activations_give_the_same_gradient(folder):
    rows = rows_of(folder)
    grads = []
    for recompute in (False, True):
        policy = Policy.load(folder / "m", device="cpu", lora=SETTINGS, gradient_checkpointing=recompute)
        shaken(policy).logprobs(rows).sum().backward()
        grads.append({n: p.grad for n, p in policy.model.named_parameters() if p.requires_grad})
    assert all(grad is not None and grad.abs().sum() > 0 for grad in grads[1].values())
    assert furthest(*grads) == 0


def test_a_fit_leaves_a_plain_model_and_an_adapter_that_agree(folder, whole):
    base = AutoModelForCausalLM.from_pretrained(folder / "m")
    merged = AutoModelForCausalLM.from_pretrained(whole.model)
    assert not [name for name in merged.state_dict() if "lora" in name or "base_layer" in name]
    opened = peft.AutoPeftModelForCausalLM.from_pretrained(whole.out / "adapter")
    torch.testing.assert_close(logits(merged), logits(opened), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits(merged), logits(base), atol=1e-2)
    theirs = peft.PeftModel.from_pretrained(base, whole.out / "adapter").merge_and_unload().state_dict()
    assert furthest(theirs, dict(merged.state_dict())) < 1e-6
    named = json.loads((whole.out / "adapter" / "adapter_config.json").read_text())
    assert named["base_model_name_or_path"] == str((folder / "m").resolve())


def test_checkpoints_hold_the_adapter_and_the_state_of_its_optimizer_only(whole):
    found = sorted((whole.out / "checkpoints").iterdir())[-1]
    assert {path.name for path in found.iterdir()} >= {"adapter", "optimizer.safetensors"}
    assert not (found / "model").exists()
    assert all(".lora_" in name for name in load_file(found / "optimizer.safetensors"))
    assert checkpoint.verify(found) is None


def same(one, other):
    return (
        furthest(weights(one), weights(other)) == 0
        and records(one) == records(other)
        and lineage(one) == lineage(other)
        and furthest(*(load_file(run / "adapter" / "adapter_model.safetensors") for run in (one, other))) == 0
    )


@pytest.mark.parametrize("step", [0, 1, 3, 5])
def test_a_crashed_fit_of_adapters_goes_on_to_the_same_end(folder, whole, step):
    changed = config(folder, f"crashed-{step}", **LORA)
    with pytest.raises(Killed):
        fit(changed, progress=killer(step))
    assert same(fit(changed, resume=True).out, whole.out)


def run_and_die(folder, out, moment):
    MOMENTS[moment]()
    fit(config(folder, out, **LORA))


@pytest.mark.parametrize("moment", ["in the middle of a checkpoint", "before the final model"])
def test_kill_9_changes_nothing_in_the_end(folder, whole, moment):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.offline_rec.test_lora"])
    out = f"killed {moment}"
    process = context.Process(target=run_and_die, args=(folder, out, moment))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    done = fit(config(folder, out, **LORA), resume=True)
    assert same(done.out, whole.out)
    assert not [path.name for path in done.out.rglob("*") if path.name.startswith(".")]


def test_two_ranks_fit_the_same_adapter_as_one(folder, whole):
    many = config(folder, "ranks", tokens_per_micro_batch=40, **LORA)
    run_team(2, lambda engine: fit(many, engine=engine))
    assert furthest(weights(folder / "ranks"), weights(whole.out)) < 1e-5


def test_ratios_to_the_start_reuse_the_scores_of_the_base(folder):
    ds = data_tools.open(str(folder / "ds"))
    key = score(ds, folder / "m").key
    done = fit(config(folder, "anchored", anchor="start", algorithm="grpo", steps=2, **LORA))
    snapshot = json.loads((done.out / "snapshot.json").read_text())
    assert snapshot["anchor_key"] == key
    assert records(done.out)[1]["ratio_mean"] == pytest.approx(1, abs=1e-5)


def test_a_resume_on_another_base_is_refused(tmp_path):
    own = world(tmp_path)
    with pytest.raises(Killed):
        fit(config(own, **LORA), progress=killer(3))
    tiny.save(own / "m", seed=7)
    with pytest.raises(DataError, match="other weights than when the run began"):
        fit(config(own, **LORA), resume=True)


def test_another_rank_is_another_run(folder, whole):
    with pytest.raises(ConfigError, match="lora_rank: 4 -> 8"):
        fit(config(folder, "whole", **LORA | {"lora_rank": 8}), resume=True)


def test_an_adapter_is_scored_as_the_model_it_merges_to(folder, whole):
    ds = data_tools.open(str(folder / "ds"))
    assert score(ds, whole.out / "adapter").key == score(ds, whole.model).key


def test_an_adapter_without_its_base_is_refused_with_the_way_out(folder, whole, tmp_path):
    import shutil

    moved = shutil.copytree(whole.out / "adapter", tmp_path / "adapter")
    file = moved / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": "some/hub-model"}))
    result = CliRunner().invoke(rec, ["score", str(folder / "ds"), "--model", str(moved)])
    assert result.exit_code == 1
    assert "some/hub-model, which is no local directory" in result.stderr
    assert "set base_model_name_or_path" in result.stderr


def test_an_adapter_of_another_model_is_refused_by_name(folder, whole, tmp_path):
    import shutil

    moved = shutil.copytree(whole.out / "adapter", tmp_path / "adapter")
    tensors = load_file(moved / "adapter_model.safetensors")
    first = min(tensors)
    save_file(tensors | {first: tensors[first][:1].contiguous()}, moved / "adapter_model.safetensors")
    with pytest.raises(DataError, match=r"does not fit the model: .*lora_A\.weight is"):
        Policy.load(moved, device="cpu")


def test_a_fit_of_adapters_does_not_start_from_an_adapter(folder, whole):
    with pytest.raises(ConfigError, match="is an adapter itself"):
        fit(
            config(folder, "twice", **LORA | {"lora_rank": 2}).model_copy(
                update={"model": str(whole.out / "adapter")}
            )
        )


@pytest.mark.parametrize(
    ("targets", "message"),
    [(("nothing",), "no adapter can be put on"), (("lm_head", "q_proj"), "names the output embeddings")],
)
def test_targets_that_cannot_be_are_refused(folder, targets, message):
    with pytest.raises(ConfigError, match=message):
        Policy.load(folder / "m", device="cpu", lora=LoraSettings(4, 8.0, targets))


def test_targets_choose_the_layers(folder):
    policy = Policy.load(folder / "m", device="cpu", lora=LoraSettings(4, 8.0, ("q_proj",)))
    assert {name.split(".")[-3] for name in policy.adapter.tensors()} == {"q_proj"}


def test_weights_that_lie_transposed_merge_as_well(folder, tmp_path):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=2, n_positions=64)).eval()
    model.save_pretrained(tmp_path / "gpt2")
    tiny.tokenizer().save_pretrained(tmp_path / "gpt2")
    policy = shaken(Policy.load(tmp_path / "gpt2", device="cpu", lora=SETTINGS))
    policy.save(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), logits(policy.model), rtol=1e-4, atol=1e-4)
    assert Policy(merged, None).fingerprint() == policy.fingerprint()


def test_rounding_needs_adapters():
    with pytest.raises(ConfigError, match="give lora_rank"):
        fit_config(flags={"dataset": "d", "model": "m", "out": "o", "quantise": "4bit"})


def test_without_bitsandbytes_rounding_names_the_extra(folder, monkeypatch):
    monkeypatch.setattr("offline_rec.models.loading.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"bitsandbytes is not installed\n.*offline-rec\[qlora\]"):
        fit(config(folder, "rounded", quantise="4bit", **LORA))
    assert not (folder / "rounded").exists()


def test_without_peft_adapters_name_the_extra(folder, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(MissingExtra, match=r"peft is not installed\n.*offline-rec\[lora\]"):
        fit(config(folder, "bare", **LORA))
    assert not (folder / "bare").exists()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_adapters_on_rounded_weights_resume_exactly_and_merge_into_these(folder, bits):
    pytest.importorskip("bitsandbytes")
    whole = fit(config(folder, f"rounded-{bits}", quantise=bits, **LORA))
    changed = config(folder, f"rounded-{bits}-again", quantise=bits, **LORA)
    with pytest.raises(Killed):
        fit(changed, progress=killer(3))
    assert same(fit(changed, resume=True).out, whole.out)
    fitted = Policy.load(folder / "m", device="cpu", lora=SETTINGS, quantise=bits)
    assert fitted.token_model.rule is not None
    fitted.adapter.load(whole.out / "adapter")
    base = AutoModelForCausalLM.from_pretrained(folder / "m").state_dict()
    merged = AutoModelForCausalLM.from_pretrained(whole.model)
    gap = (logits(merged) - logits(fitted.model)).abs().max()
    # 8bit rounds the activations too, which a plain model does not.
    assert gap < {"4bit": 1e-3, "8bit": 0.1}[bits] * logits(merged).abs().max()
    other = {name: (value - base[name]).abs().max() for name, value in merged.state_dict().items()}
    assert other["model.embed_tokens.weight"] == 0
    assert other["model.layers.0.self_attn.q_proj.weight"] > 0
