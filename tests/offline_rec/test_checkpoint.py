"""Checkpoints: whole or not there, verified tensor by tensor, the torn one skipped for the one before."""

import shutil

import pytest
import torch
from safetensors.torch import save_file

from offline_rec.training import checkpoint

SHAPES = {"a": (2, 3), "b": (4,)}


def write(root, step, *, tensors=None, shapes=None):
    staged = checkpoint.staging_folder(root, step)
    (staged / "model").mkdir()
    held = (
        tensors if tensors is not None else {name: torch.full(shape, step) for name, shape in SHAPES.items()}
    )
    save_file(held, staged / "model" / "model.safetensors")
    save_file({"exp_avg/a": torch.ones(2, 3), "step/a": torch.tensor(1.0)}, staged / "optimizer.safetensors")
    return checkpoint.commit(staged, step, {"step": step}, SHAPES if shapes is None else shapes)


def test_a_committed_checkpoint_is_whole_and_carries_its_state(tmp_path):
    folder = write(tmp_path, 7)
    assert folder.name == "step-7"
    assert checkpoint.verify(folder) is None
    assert checkpoint.read_state(folder) == {"step": 7}
    assert checkpoint.latest(tmp_path) == (folder, [])


def test_what_a_killed_writer_left_is_no_checkpoint(tmp_path):
    write(tmp_path, 1)
    staged = checkpoint.staging_folder(tmp_path, 2)
    (staged / "state.json").write_text("{")
    found, torn = checkpoint.latest(tmp_path)
    assert (found.name, torn) == ("step-1", [])
    checkpoint.prune(tmp_path, set(), 1)
    assert not staged.exists()


@pytest.mark.parametrize(
    "victim", ["model/model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]
)
@pytest.mark.parametrize("damage", ["cut", "removed", "emptied"])
def test_a_torn_checkpoint_is_skipped_for_the_one_before(tmp_path, victim, damage):
    write(tmp_path, 1)
    file = write(tmp_path, 2) / victim
    if damage == "removed":
        file.unlink()
    else:
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2] if damage == "cut" else b"")
    found, torn = checkpoint.latest(tmp_path)
    assert found.name == "step-1"
    assert len(torn) == 1
    assert torn[0].startswith("step-2: ")


def test_a_file_swapped_for_one_with_other_tensors_is_noticed(tmp_path):
    folder = write(tmp_path, 2)
    file = folder / "model" / "model.safetensors"
    save_file({"a": torch.zeros(3, 2), "b": torch.zeros(4)}, file)
    assert "tensors that were written" in checkpoint.verify(folder) or "bytes" in checkpoint.verify(folder)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a": torch.zeros(2, 3)}, "6 of 10 weights"),
        ({"a": torch.zeros(3, 2), "b": torch.zeros(4)}, r"a is \[3, 2\], not \[2, 3\]"),
        ({"a": torch.zeros(2, 3), "b": torch.zeros(4), "c": torch.zeros(0)}, "c is empty"),
    ],
)
def test_weights_unlike_the_model_are_not_committed(tmp_path, tensors, message):
    with pytest.raises(OSError, match=message):
        write(tmp_path, 3, tensors=tensors)
    assert checkpoint.latest(tmp_path) == (None, [])


def test_a_step_saved_again_replaces_the_first(tmp_path):
    write(tmp_path, 4)
    shutil.rmtree(tmp_path / "step-4" / "model")
    write(tmp_path, 4)
    assert checkpoint.latest(tmp_path)[0].name == "step-4"


def test_prune_keeps_the_last_and_the_best(tmp_path):
    for step in (10, 2, 30, 9):
        write(tmp_path, step)
    checkpoint.prune(tmp_path, {2}, 2)
    assert checkpoint.steps(tmp_path) == [2, 10, 30]
