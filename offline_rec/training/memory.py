"""How much memory a fit takes, estimated before it begins, against how much is free.

Bytes a rank, with P trained parameters, N ranks and ZeRO stage z (0: each rank has all of everything):

    weights         as they lie in memory, frozen ones too                     / N from z = 3
    gradients       4 P: micro-batches are summed in float32                   / N from z = 2
    float32 copies  4 P of parameters in half precision                        / N from z = 1
    optimizer       8 P: the two moments of AdamW                              / N from z = 1
    activations     what autograd keeps of one micro-batch (models/footprint.py), and one layer's gradients
    logits          twice a chunk of the log-probs, and 4 bytes a parameter of a head that is trained
    update          what AdamW computes with: 4 P on a GPU, on a CPU 8 bytes a parameter of the largest one

The peak is the first four with either activations and logits, or the update. `benchmarks/memory.py` holds it
against measured peaks: 0.7 to 1.1 of them on a CPU, 1.0 to 1.3 where the allocator gives memory back.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from data_tools.errors import NotEnoughMemory, RecError
from offline_rec.config import FitConfig
from offline_rec.data.snapshot import FILE as SNAPSHOT_FILE
from offline_rec.models.adapters import LoraSettings
from offline_rec.models.footprint import Footprint, footprint
from offline_rec.models.loading import choose_dtype
from offline_rec.models.logprobs import CHUNK_ELEMENTS
from offline_rec.training.run_folder import as_begun

GIB = 1 << 30
UNKNOWN_LIMIT = 1 << 60
"""Control groups without a limit say so by a number that no machine has."""

GO_ON = "--set memory_check=false goes on regardless"


@dataclass(frozen=True)
class Estimate:
    """Bytes a rank by what they are for, as the module says; `tokens` are those of a micro-batch.

    `activations_known` is false where a model's own code could not be followed: they then count as 0.
    """

    parameters: int
    trained: int
    tokens: int
    weights: int
    gradients: int
    copies: int
    optimizer: int
    activations: int
    logits: int
    update: int
    activations_known: bool = True

    @property
    def kept(self) -> int:
        """What is there all the time."""
        return self.weights + self.gradients + self.copies + self.optimizer

    @property
    def peak(self) -> int:
        """The most that is there at once."""
        return self.kept + max(self.activations + self.logits, self.update)

    def rows(self) -> list[tuple[str, int]]:
        """The table: what for, and bytes."""
        return [
            ("weights", self.weights),
            ("gradients", self.gradients),
            ("float32 copies", self.copies),
            ("optimizer", self.optimizer),
            (f"activations of {self.tokens} tokens", self.activations),
            ("logits", self.logits),
            ("peak", self.peak),
        ]


def estimate(
    config: FitConfig,
    device: torch.device,
    *,
    tokens: int,
    longest: int = 0,
    ranks: int = 1,
    zero_stage: int = 0,
) -> Estimate | None:
    """What each of the `ranks` takes for micro-batches of `tokens` padded tokens in rows of `longest`.

    None where the model's configuration does not tell.
    """
    longest = max(1, min(longest or tokens, tokens))
    shape = (-(-tokens // longest), longest) if tokens else (0, 0)
    found = footprint(
        config.model,
        dtype=choose_dtype(config.dtype, device),
        shape=shape,
        lora=LoraSettings.of(config),
        quantise=config.quantise,
        gradient_checkpointing=config.gradient_checkpointing,
    )
    if found is None:
        return None

    def shared(size: int, from_stage: int) -> int:
        return -(-size // ranks) if zero_stage >= from_stage else size

    gpu = device.type == "cuda"
    return Estimate(
        parameters=found.parameters,
        trained=found.trained,
        tokens=tokens,
        weights=shared(found.weights, 3),
        gradients=shared(4 * found.trained, 2),
        copies=shared(4 * found.trained_half, 1),
        optimizer=shared(8 * found.trained, 1),
        activations=(found.activations or 0) + found.layer,
        logits=_logits(found, device, tokens) if tokens else 0,
        update=shared(4 * found.trained if gpu else 8 * found.largest, 1),
        activations_known=found.activations is not None,
    )


def _logits(found: Footprint, device: torch.device, tokens: int) -> int:
    elements = CHUNK_ELEMENTS.get(device.type, CHUNK_ELEMENTS["cuda"])
    chunk = min(max(elements // found.vocabulary, 16), tokens)
    head = found.vocabulary * found.width if found.head_is_trained else 0
    return 4 * (2 * chunk * found.vocabulary + head)


def micro_batch_tokens(config: FitConfig, *, groups: int, longest: int, largest_group: int) -> int:
    """Most tokens of a micro-batch: the budget, or all of a step; a row beyond the budget comes alone."""
    step = min(config.groups_per_step, groups) * largest_group
    return max(longest, min(config.token_budget, step))


def free_bytes(device: torch.device, root: Path = Path("/")) -> int | None:
    """Memory that this process can still take, None where that is not told.

    On a CPU the lesser of what the machine has available and what its control groups leave. `root`: of the
    file system.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    found = [size for size in (_available(root), *_left_by_groups(root)) if size is not None]
    return min(found, default=None)


def _available(root: Path) -> int | None:
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    sizes = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(sizes["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in sizes else None


def _left_by_groups(root: Path) -> Iterator[int]:
    """What each control group above this process leaves below its limit; page cache can be taken back."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        return
    for line in lines:
        _, names, inside = line.split(":", 2)
        if names == "":
            mount, files = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in names.split(","):
            mount = root / "sys/fs/cgroup/memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        path = Path(inside)
        for group in (path, *path.parents):
            left = _left(mount / str(group).lstrip("/"), *files)
            if left is not None:
                yield left


def _left(folder: Path, limit: str, usage: str, cache: str) -> int | None:
    try:
        most, used = (folder / limit).read_text().strip(), int((folder / usage).read_text())
        facts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if most == "max" or int(most) >= UNKNOWN_LIMIT:
        return None
    return max(int(most) - used + int(facts.get(cache, 0)), 0)


def check_memory(
    needs: Estimate, config: FitConfig, device: torch.device, *, ranks: int, held: int = 0
) -> None:
    """Raise `NotEnoughMemory` unless what is estimated is free, without `held` bytes that are taken already.

    The ranks of a machine share the memory of its CPU.
    """
    free = free_bytes(device)
    if not config.memory_check or free is None:
        return
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) if device.type == "cpu" else 1
    wanted = max(needs.peak - held, 0) * here
    if wanted <= free:
        return
    parts = ", ".join(f"{name} {readable(size)}" for name, size in needs.rows()[:-1] if size)
    shared = f" in {here} ranks" if here > 1 else ""
    raise NotEnoughMemory(
        f"the fit needs about {readable(wanted)} of memory on {device}{shared}, "
        f"{readable(free)} are free ({parts})",
        f"{_way_out(needs, config, spare=free // here + held)}; {GO_ON}",
    )


def _way_out(needs: Estimate, config: FitConfig, *, spare: int) -> str:
    """What to change: fewer tokens at a time where that is enough, else fewer numbers."""
    for_tokens = spare - needs.kept - needs.logits
    fits = int(needs.tokens * for_tokens / needs.activations) if needs.activations else 0
    if fits > 0:
        return f"--set tokens_per_micro_batch={fits} would fit, unless a row is longer"
    ways = [] if config.gradient_checkpointing or not needs.tokens else ["--set gradient_checkpointing=true"]
    ways += [] if config.lora_rank else ["--set lora_rank=16"]
    return " or ".join([*ways, "a smaller model"]) + " takes less"


@contextmanager
def memory_named(config: FitConfig) -> Iterator[None]:
    """Turn the end of memory, while it fits, into one message that names what decides it."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RecError) or not _is_out_of_memory(error):
            raise
        budget = as_begun(config).token_budget
        half = f"--set tokens_per_micro_batch={max(budget // 2, 1)}"
        begun = (Path(config.out) / SNAPSHOT_FILE).exists()
        again = f"rec fit --out {config.out} --resume {half}" if begun else half
        raise NotEnoughMemory(
            f"out of memory at tokens_per_micro_batch={budget}: {_first_line(error)}",
            f"fewer change nothing in the result: {again}",
        ) from error


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    told = str(error)
    return "DefaultCPUAllocator" in told or "not enough memory" in told


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].split(". ")[0]


def readable(size: int) -> str:
    """A size for people."""
    return f"{size / GIB:.1f} GiB" if size >= GIB // 10 else f"{size / (1 << 20):.1f} MiB"
