"""Memory: counted on fake tensors as on real ones, shared by ranks, held against what is free."""

import json
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, GPT2Config, Qwen3Config

from cli.main import rec
from data_tools.errors import ConfigError, NotEnoughMemory
from offline_rec.models.adapters import LoraSettings
from offline_rec.models.footprint import footprint
from offline_rec.models.heads import body_of
from offline_rec.models.policy import Policy, without_noise
from offline_rec.training import memory
from offline_rec.training.fit import fit
from tests import tiny
from tests.offline_rec.fitting import config, records, world

CPU = torch.device("cpu")
GIB = 1 << 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return world(tmp_path_factory.mktemp("world"))


def kept_for_real(model, shape):
    """Bytes that autograd keeps of a pass over real tensors; padded, so that the mask is a real one."""
    own = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    seen = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage
        return tensor

    ids = torch.zeros(shape, dtype=torch.long)
    mask = torch.ones_like(ids)
    mask[0, -1] = 0
    model.train()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        states = body_of(model)(input_ids=ids, attention_mask=mask, use_cache=False)[0]
    return sum(storage.nbytes() for storage in seen.values()) + states.nbytes


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("shape", [(4, 64), (2, 160)])
def test_what_is_kept_of_fake_tensors_is_what_is_kept_of_real_ones(tmp_path, family, shape):
    sizes = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    made = {
        "llama": lambda: tiny.model(99),
        "qwen3": lambda: AutoModelForCausalLM.from_config(
            Qwen3Config(**sizes, intermediate_size=64, num_key_value_heads=2, head_dim=8)
        ),
        "gpt2": lambda: AutoModelForCausalLM.from_config(
            GPT2Config(vocab_size=99, n_embd=32, n_layer=3, n_head=4)
        ),
    }
    model = made[family]()
    model.save_pretrained(tmp_path)
    without_noise(model)
    found = footprint(tmp_path, dtype=torch.float32, shape=shape)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.activations == pytest.approx(kept_for_real(model, shape), rel=0.03)


def test_of_an_adapted_model_the_matrices_alone_are_trained(folder):
    lora = LoraSettings(4, 8.0)
    policy = Policy.load(folder / "m", device="cpu", lora=lora)
    found = footprint(folder / "m", dtype=torch.float32, shape=(4, 64), lora=lora)
    trained = sum(p.numel() for p in policy.model.parameters() if p.requires_grad)
    assert (found.trained, found.head_is_trained) == (trained, False)
    assert found.activations == pytest.approx(kept_for_real(policy.model, (4, 64)), rel=0.03)
    whole = footprint(folder / "m", dtype=torch.float32, shape=(4, 64))
    assert whole.weights + 4 * trained == found.weights


def test_recomputing_keeps_less(folder):
    options = {"dtype": torch.float32, "shape": (4, 64)}
    full = footprint(folder / "m", **options)
    less = footprint(folder / "m", gradient_checkpointing=True, **options)
    assert less.activations < full.activations
    assert less.activations > 2 * 4 * 64 * 32 * 4  # the input of each of two layers


def test_a_configuration_that_changes_is_read_anew(tmp_path):
    for vocabulary in (99, 120):
        model = tiny.model(vocabulary)
        model.save_pretrained(tmp_path)
        found = footprint(tmp_path, dtype=torch.float32, shape=(0, 0))
        assert found.parameters == sum(p.numel() for p in model.parameters())


def test_the_parts_of_an_estimate_by_hand(folder):
    needs = memory.estimate(config(folder, dtype="bfloat16"), CPU, tokens=40, longest=20)
    p = sum(q.numel() for q in tiny.model(99 + 1).parameters())
    assert needs.parameters == needs.trained == p
    assert (needs.gradients, needs.copies, needs.optimizer) == (4 * p, 4 * p, 8 * p)
    assert needs.weights == pytest.approx(2 * p, rel=0.01)  # and a few buffers
    assert needs.logits == 4 * (2 * 40 * 100 + 100 * 32)
    assert needs.peak == needs.kept + needs.activations + needs.logits


@pytest.mark.parametrize(
    ("stage", "shared"),
    [
        (0, ()),
        (1, ("copies", "optimizer")),
        (2, ("copies", "optimizer", "gradients")),
        (3, ("copies", "optimizer", "gradients", "weights")),
    ],
)
def test_ranks_share_what_their_stage_says(folder, stage, shared):
    bf16 = config(folder, dtype="bfloat16")
    one = memory.estimate(bf16, CPU, tokens=40, longest=20)
    four = memory.estimate(bf16, CPU, tokens=40, longest=20, ranks=4, zero_stage=stage)
    for part in ("weights", "gradients", "copies", "optimizer", "activations", "logits"):
        expected = getattr(one, part) / (4 if part in shared else 1)
        assert getattr(four, part) == pytest.approx(expected, abs=1)


def test_a_step_smaller_than_the_budget_counts_as_it_is(folder):
    small = config(folder, tokens_per_micro_batch=1000)

    def most(groups, longest, largest_group):
        return memory.micro_batch_tokens(small, groups=groups, longest=longest, largest_group=largest_group)

    assert most(9, 10, 40) == 160  # of four groups
    assert most(2, 10, 40) == 80
    assert most(9, 10, 4000) == 1000
    assert most(9, 2000, 4000) == 2000


def test_a_fit_that_does_not_fit_stops_before_the_weights_are_read(folder, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1000)
    monkeypatch.setattr(Policy, "load", lambda *_, **__: pytest.fail("the weights were read"))
    with pytest.raises(NotEnoughMemory, match=r"needs about 0\.\d MiB of memory on cpu, 0\.0 MiB are free"):
        fit(config(folder, "small"))
    assert not (folder / "small").exists()


def test_activations_that_do_not_fit_stop_it_once_the_lengths_are_known(folder, monkeypatch):
    changed = config(folder, "wide")
    fixed = memory.estimate(changed, CPU, tokens=0).peak
    monkeypatch.setattr(memory, "free_bytes", lambda device: fixed + 1000)
    with pytest.raises(NotEnoughMemory, match=r"(?s)activations of \d+ tokens.*memory_check=false goes on"):
        fit(changed)
    assert not (folder / "wide").exists()
    told = fit(config(folder, "regardless", memory_check=False))
    monkeypatch.undo()
    assert records(told.out) == records(fit(changed).out)


def test_the_message_names_a_budget_that_would_fit(folder):
    changed = config(folder)
    needs = memory.estimate(changed, CPU, tokens=4000, longest=20)
    spare = needs.kept + needs.logits + needs.activations // 2
    assert "tokens_per_micro_batch=1999" in memory._way_out(needs, changed, spare=spare) or (
        "tokens_per_micro_batch=2000" in memory._way_out(needs, changed, spare=spare)
    )


def machine(root, *, available=None, groups=""):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {available} kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    return root


def group(folder, names, values):
    folder.mkdir(parents=True)
    for name, value in zip(names, values, strict=True):
        (folder / name).write_text(value)


V2 = ("memory.max", "memory.current", "memory.stat")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")


def test_free_is_what_the_machine_has_where_no_group_limits_it(tmp_path):
    root = machine(tmp_path, available=2048, groups="0::/a\n")
    group(root / "sys/fs/cgroup/a", V2, ("max\n", "5\n", "inactive_file 0\n"))
    assert memory.free_bytes(CPU, root) == 2 << 20


def test_free_is_what_the_tightest_control_group_leaves_beside_page_cache(tmp_path):
    root = machine(tmp_path, available=1 << 20, groups="0::/a/b\n")
    group(root / "sys/fs/cgroup/a", V2, ("7000", "5000", "anon 1\ninactive_file 500\n"))
    group(root / "sys/fs/cgroup/a/b", V2, ("max", "5000", "inactive_file 500\n"))
    assert memory.free_bytes(CPU, root) == 2500


def test_the_older_layout_of_control_groups_is_read_as_well(tmp_path):
    root = machine(tmp_path, available=1 << 20, groups="9:cpu,memory:/x\n0::/\n")
    group(root / "sys/fs/cgroup/memory/x", V1, ("9000", "4000", "total_inactive_file 1000\n"))
    group_without_limit = (str((1 << 63) - 4096), "4000", "total_inactive_file 0\n")
    for name, value in zip(V1, group_without_limit, strict=True):
        (root / "sys/fs/cgroup/memory" / name).write_text(value)
    assert memory.free_bytes(CPU, root) == 6000


def test_where_nothing_tells_nothing_is_refused(tmp_path, folder):
    assert memory.free_bytes(CPU, tmp_path / "no-proc") is None
    assert memory.free_bytes(torch.device("meta")) is None


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
        ),
        MemoryError("Unable to allocate 9 GiB"),
    ],
)
def test_the_end_of_memory_becomes_one_message_that_names_the_budget(folder, error, monkeypatch, tmp_path):
    def update(*_, **__):
        raise error

    monkeypatch.setattr("offline_rec.training.loop.update", update)
    with pytest.raises(NotEnoughMemory) as caught:
        fit(config(folder, f"oom-{type(error).__name__}", tokens_per_micro_batch=64))
    assert "out of memory at tokens_per_micro_batch=64" in caught.value.message
    assert "--resume --set tokens_per_micro_batch=32" in caught.value.hint
    monkeypatch.undo()
    again = config(folder, f"oom-{type(error).__name__}", tokens_per_micro_batch=32)
    assert fit(again, resume=True).model_step == 6


def test_another_runtime_error_stays_what_it_is(folder, monkeypatch):
    def update(*_, **__):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr("offline_rec.training.loop.update", update)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        fit(config(folder, "other-error"))


REAL_OOM = """
import resource, sys
from pathlib import Path
from data_tools.errors import NotEnoughMemory
from offline_rec.training import loop
from offline_rec.training.fit import fit
from tests.offline_rec.fitting import config
import torch

def update(*_, **__):
    torch.empty(1 << 44)

loop.update = update
try:
    fit(config(Path(sys.argv[1]), "real"))
except NotEnoughMemory as error:
    print(error)
"""


def test_what_torch_says_on_a_cpu_is_understood(folder):
    done = subprocess.run(
        [sys.executable, "-c", REAL_OOM, str(folder)], capture_output=True, text=True, timeout=120
    )
    assert "out of memory at tokens_per_micro_batch=16384" in done.stdout, done.stderr


def run(*arguments):
    return CliRunner().invoke(rec, list(map(str, arguments)))


def test_a_dry_run_tells_what_the_fit_does(folder, monkeypatch):
    line = ["fit", folder / "ds", "--model", folder / "m", "--out", folder / "planned", "--epochs", "2"]
    line += ["--groups-per-step", "4", "--device", "cpu"]
    monkeypatch.setattr(Policy, "load", lambda *_, **__: pytest.fail("the weights were read"))
    found = run(*line, "--dry-run", "--json")
    assert found.exit_code == 0, found.output
    facts = json.loads(found.stdout)
    text = run(*line, "--dry-run").stdout
    assert not (folder / "planned").exists()
    monkeypatch.undo()
    done = fit(config(folder, "planned", steps=None, epochs=2))
    assert (facts["rows"], facts["groups"], facts["steps"]) == (done.rows, done.groups, done.steps)
    snapshot = json.loads((done.out / "snapshot.json").read_text())
    assert facts["tokens"] == snapshot["n_tokens"]
    assert facts["longest"] == snapshot["longest"]
    assert facts["problem"] is None
    parts = facts["memory"]
    assert parts["peak"] == sum(
        parts[part] for part in ("weights", "gradients", "copies", "optimizer", "activations", "logits")
    )
    assert f"updates: {done.steps} of 4 groups, 2 passes" in text
    assert "optimizer" in text
    assert "free" in text


def test_a_dry_run_names_what_does_not_fit_and_what_is_scored_first(folder, monkeypatch):
    monkeypatch.setattr("offline_rec.training.memory.free_bytes", lambda device: 1000)
    line = ["fit", folder / "ds", "--model", folder / "m", "--out", folder / "n", "--device", "cpu"]
    found = run(*line, "--algorithm", "grpo", "--anchor", "start", "--dry-run")
    assert found.exit_code == 0, found.output
    assert "problem: the fit needs about" in found.stdout
    assert f"first: log-probs of all rows under {folder / 'm'}" in found.stdout


def test_a_dry_run_refuses_what_the_fit_would(folder):
    (folder / "taken").mkdir(exist_ok=True)
    (folder / "taken" / "file").touch()
    line = ["fit", folder / "ds", "--model", folder / "m", "--dry-run"]
    assert "exists already" in run(*line, "--out", folder / "taken").stderr
    assert run(*line, "--out", folder / "new", "--where", "nonsense = 1").exit_code == 2


def test_a_dry_run_of_a_resume_is_wrong_usage(folder):
    fit(config(folder, "begun", steps=1))
    result = run("fit", "--out", folder / "begun", "--resume", "--dry-run")
    assert result.exit_code == ConfigError.exit_code
    assert "--dry-run tells of a run that has not begun" in result.stderr
