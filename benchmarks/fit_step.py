"""One update of one model on one log: `rec`, a plain Hugging Face loop, and TRL's GRPOTrainer.

    python benchmarks/fit_step.py --rounds 5 --output benchmarks/results/fit_step.json

TRL 1.16.0 and its `datasets` are needed for its side (`pip install trl==1.16.0`); `--side` leaves sides out.
Sides take turns in one process, so that whatever else the machine does meets all of them; a ratio is that of
two neighbours in a round, of seconds on the clock and of CPU seconds. Peak memory is measured in a process of
its own for each side.

plain: rows padded on the right, whole logits, log_softmax, gather; the loss of `rec-oneside-nois`; AdamW.
trl: completions come through its rollout hook, and the time of its generation step (hook, decoding, rewards)
is left out. It takes logged log-probs only with vLLM: on this path they are given to the hook and not used,
so its ratios are 1. Gradient checkpointing is off on all sides; each clips its gradient at norm 1.

    python benchmarks/fit_step.py --gpu --output benchmarks/results/fit_step_gpu.json

On a GPU: a model of half a billion parameters in bfloat16, `rec` with and without the kernels that
`FitConfig.kernels` names, and the plain loop; how far log-probs are from those without them is told too.
Figures of the processor are then those of the thread that launches work. Memory is that of the GPU.
"""

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import click
import numpy as np
import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from offline_rec.config import FitConfig
from offline_rec.data.index import IndexCounts, IndexedRows
from offline_rec.data.packing import micro_batches
from offline_rec.data.passes import fill_of, plan_rows
from offline_rec.data.ragged import Ragged
from offline_rec.data.rows import Rows
from offline_rec.models.policy import Policy
from offline_rec.models.quiet import quiet
from offline_rec.objectives.objective import objective
from offline_rec.training.budget import settled
from offline_rec.training.engine import OptimizerSettings
from offline_rec.training.engines.plain import TorchEngine
from offline_rec.training.step import StepRows, update

SIBLINGS = 8
LEARNING_RATE = 1e-6
BUDGET: int | None = None
"""Tokens of a micro-batch of `rec`; None is what a fit on a CPU settles on, --budget takes another."""
DEVICE, DTYPE = "cpu", torch.float32
SIDES = ("rec", "plain", "trl")
KERNELS = {"rec+flex": ["flex"], "rec+triton": ["triton"], "rec+flex+triton": ["flex", "triton"]}
GPU_SIDES = ("rec", *KERNELS, "plain")


def now() -> Any:
    """Seconds on the clock, and those this process has computed, which grow less with other load."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return np.array([time.perf_counter(), time.process_time()])


@dataclass(frozen=True)
class Shape:
    """Tokens of the prompt, mean tokens of a response and their log-normal spread; sizes of the model."""

    prompt: int
    response: int
    sigma: float = 0.0
    width: int = 512
    layers: int = 6
    vocabulary: int = 32_000
    heads: int = 8
    key_heads: int = 8
    inner: int | None = None
    tied: bool = False


SHAPES = {
    "prompt 512, response 64": Shape(512, 64),
    "prompt 64, log-normal responses of mean 256": Shape(64, 256, 0.8),
    "tiny": Shape(96, 12, width=64, layers=2, vocabulary=500),
}
HALF_A_BILLION = {"width": 896, "layers": 24, "heads": 14, "key_heads": 2, "inner": 4864}
HALF_A_BILLION |= {"vocabulary": 151_936, "tied": True}
GPU_SHAPES = {
    "0.5B, prompt 512, response 64": Shape(512, 64, **HALF_A_BILLION),
    "0.5B, prompt 64, log-normal responses of mean 256": Shape(64, 256, 0.8, **HALF_A_BILLION),
}
ALL_SHAPES = SHAPES | GPU_SHAPES


def make_model(shape: Shape) -> Any:
    """A Qwen2 with random weights, the same ones each time."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.inner or shape.width * 11 // 4,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=shape.tied,
    )
    with torch.device(DEVICE):
        return Qwen2ForCausalLM(config).to(DTYPE).eval()


def make_step(shape: Shape, groups: int) -> tuple[Rows, IndexedRows]:
    """Random logged groups; log-probs near those of random weights, advantages of mean 0 in each group."""
    draw = np.random.default_rng(0)
    count = groups * SIBLINGS
    mean = np.log(shape.response) - shape.sigma**2 / 2
    lengths = np.clip(draw.lognormal(mean, shape.sigma, count).round().astype(np.int64), 4, 2048)
    prompts = np.repeat(draw.integers(4, shape.vocabulary, (groups, shape.prompt)), SIBLINGS, axis=0)
    responses = Ragged.from_lists([draw.integers(4, shape.vocabulary, n) for n in lengths], np.int32)
    logged = -np.log(shape.vocabulary) + draw.normal(0, 0.1, len(responses.values))
    reward = draw.integers(0, 2, (groups, SIBLINGS)).astype(np.float64)
    reward[:, 0], reward[:, 1] = 0, 1
    names = [f"r{i}" for i in range(count)]
    rows = Rows(
        response_id=names,
        prompt_ids=Ragged.from_lists(list(prompts), np.int32),
        response_ids=responses,
        mask=Ragged.full(lengths, 1, np.uint8),
        behavior=Ragged(logged.astype(np.float32), responses.offsets),
        anchor=None,
        reference=None,
        temperature=np.ones(count, np.float32),
    )
    indexed = IndexedRows(
        response_id=names,
        file=np.zeros(count, np.int64),
        file_row=np.arange(count),
        group=np.arange(count) // SIBLINGS,
        advantage=(reward - reward.mean(1, keepdims=True)).ravel(),
        weight=np.ones(count),
        expert=np.zeros(count, np.bool_),
        reward=reward.ravel(),
    )
    return rows, indexed


def on_device(array: Any) -> torch.Tensor:
    """An array as a tensor where the models are."""
    return torch.from_numpy(array).to(DEVICE)


def token_budget(model: Any, rows: Rows, groups: int) -> int:
    """What a fit of this model on these rows settles on."""
    lengths = rows.lengths
    data = IndexCounts(
        rows=len(rows),
        groups=groups,
        tokens=int(lengths.sum()),
        response_tokens=int(rows.response_ids.lengths.sum()),
        longest=int(lengths.max()),
        largest_group=int(lengths.reshape(groups, -1).sum(1).max()),
    )
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        config = FitConfig(dataset="", model=folder, out="", tokens_per_micro_batch=BUDGET)
        return settled(config, torch.device(DEVICE), data).token_budget


class RecSide:
    """The update of `rec fit`."""

    def __init__(self, shape: Shape, groups: int, _: int, kernels: Sequence[str] = ()) -> None:
        rows, indexed = make_step(shape, groups)
        self.policy = Policy(make_model(shape), None, kernels=kernels)
        self.engine = TorchEngine(DEVICE)
        self.policy.module = self.engine.prepare(self.policy.module, OptimizerSettings())
        self.objective = objective("rec-oneside-nois")
        budget = token_budget(self.policy.model, rows, groups)
        batches = micro_batches(rows, budget, self.policy.sharing)
        passes = [one for batch in batches for one in plan_rows(rows.select(batch), self.policy.sharing)]
        self.facts = {
            "budget": budget,
            "micro_batches": len(batches),
            "passes": len(passes),
            "fill": round(fill_of(passes), 4),
        }
        if kernels:
            self.facts["packs"] = self.policy.sharing.packs
        with torch.no_grad():
            self.logprobs = self.policy.logprobs(rows, np.arange(SIBLINGS)).cpu()
        self.rows = StepRows(1, rows, indexed, batches, "behavior", groups, int(rows.lengths.sum()), {})

    def step(self) -> Any:
        """Seconds of one update."""
        began = now()
        update(self.engine, self.policy, self.objective, self.rows, lr=LEARNING_RATE)
        return now() - began


class PlainSide:
    """The loop that is written first: pad, logits of all positions, log_softmax, gather."""

    def __init__(self, shape: Shape, groups: int, batch_rows: int) -> None:
        self.rows, self.indexed = make_step(shape, groups)
        self.model = make_model(shape)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
        self.batches = np.split(np.arange(len(self.rows)), range(batch_rows, len(self.rows), batch_rows))
        self.facts = {"rows_in_a_micro_batch": batch_rows}

    def step(self) -> Any:
        """Seconds of one update."""
        began = now()
        tokens = int(self.rows.response_ids.lengths.sum())
        for batch in self.batches:
            self._loss(batch, tokens).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return now() - began

    def _loss(self, batch: Any, tokens: int) -> torch.Tensor:
        rows = self.rows.select(batch)
        texts = [np.concatenate([rows.prompt_ids[i], rows.response_ids[i]]) for i in range(len(rows))]
        ids = on_device(Ragged.from_lists(texts, np.int64).pad(int(rows.lengths.max())))
        column = torch.arange(ids.shape[1], device=DEVICE)
        real = column < on_device(rows.lengths)[:, None]
        answer = (real & (column >= on_device(rows.prompt_ids.lengths)[:, None]))[:, 1:]
        logits = self.model(input_ids=ids, attention_mask=real.long(), use_cache=False).logits
        logprobs = torch.log_softmax(logits[:, :-1].float(), -1).gather(2, ids[:, 1:, None])[..., 0]
        old = torch.zeros_like(logprobs).masked_scatter(answer, on_device(rows.behavior.values))
        advantage = on_device(self.indexed.advantage[batch]).float()[:, None]
        ratio = (logprobs.detach() - old).exp()
        kept = torch.where(advantage >= 0, ratio <= 1.2, ratio >= 0.8) & answer
        return -(logprobs * advantage * kept).sum() / tokens


class TrlSide:
    """GRPOTrainer in a thread of its own, that makes one step whenever it is told to."""

    def __init__(self, shape: Shape, groups: int, batch_rows: int) -> None:
        self.rows, self.indexed = make_step(shape, groups)
        self.excluded = self.seconds = np.zeros(2)
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.failure: BaseException | None = None
        with quiet():
            self.trainer = self._trainer(shape, groups, batch_rows)
        generate = self.trainer._generate_and_score_completions

        def timed(inputs: Any) -> Any:
            began = now()
            made = generate(inputs)
            self.excluded = self.excluded + now() - began
            return made

        self.trainer._generate_and_score_completions = timed
        self.facts = {"rows_in_a_micro_batch": batch_rows, "trl": importlib.metadata.version("trl")}
        threading.Thread(target=self._run, daemon=True).start()

    def step(self) -> Any:
        """Seconds of one update, without the generation step."""
        self.go.release()
        self.done.acquire()
        if self.failure is not None:
            raise self.failure
        return self.seconds

    def _run(self) -> None:
        # Not in silence, which one thread at a time may have: this one goes on while others load models.
        try:
            self.trainer.train()
        except BaseException as error:
            self.failure = error
            self.done.release()

    def _trainer(self, shape: Shape, groups: int, batch_rows: int) -> Any:
        from datasets import Dataset
        from transformers import TrainerCallback
        from trl import GRPOConfig, GRPOTrainer

        side = self

        class Turns(TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                side.go.acquire()
                side.excluded, side.began = np.zeros(2), now()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                side.seconds = now() - side.began - side.excluded
                side.done.release()

        settings = GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            per_device_train_batch_size=batch_rows,
            gradient_accumulation_steps=groups * SIBLINGS // batch_rows,
            num_generations=SIBLINGS,
            max_completion_length=2048,
            max_steps=1000,
            beta=0.0,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        return GRPOTrainer(
            model=make_model(shape),
            args=settings,
            reward_funcs=self._reward,
            train_dataset=Dataset.from_dict({"prompt": [f"t{i}" for i in range(groups)]}),
            processing_class=make_tokenizer(shape.vocabulary),
            rollout_func=self._rollout,
            callbacks=[Turns()],
        )

    def _rollout(self, prompts: list[str], _: Any) -> dict[str, Any]:
        """The logged responses of the groups that are asked for, in order."""
        seen: dict[str, int] = {}
        chosen = []
        for prompt in prompts:
            chosen.append(int(prompt[1:]) * SIBLINGS + seen.get(prompt, 0) % SIBLINGS)
            seen[prompt] = seen.get(prompt, 0) + 1
        rows = self.rows.select(np.array(chosen))
        columns = {
            "prompt_ids": rows.prompt_ids,
            "completion_ids": rows.response_ids,
            "logprobs": rows.behavior,
        }
        return {name: [column[i].tolist() for i in range(len(rows))] for name, column in columns.items()}

    def _reward(self, completions: list[Any], **_: Any) -> list[float]:
        return [float(i % 2) for i in range(len(completions))]


def make_tokenizer(vocabulary: int) -> Any:
    """A token for each id, so that TRL can decode what it is given."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<eos>", "<unk>", *(f"t{i}" for i in range(vocabulary - 3))]
    core = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, **special)


MAKERS: dict[str, Callable[[Shape, int, int], Any]] = {"rec": RecSide, "plain": PlainSide, "trl": TrlSide}
MAKERS |= {side: partial(RecSide, kernels=kernels) for side, kernels in KERNELS.items()}


def peak_mib(side: str, name: str, groups: int, batch_rows: int) -> float:
    """The most memory that a process of its own holds in two updates of one side."""
    sizes = {"--groups": groups, "--batch-rows": batch_rows}
    sizes |= {} if BUDGET is None else {"--budget": BUDGET}
    options = [*(str(part) for pair in sizes.items() for part in pair), "--one", side, name]
    options += ["--gpu"] if DEVICE == "cuda" else []
    done = subprocess.run([sys.executable, __file__, *options], check=True, capture_output=True, text=True)
    return float(done.stdout.splitlines()[-1])


def own_peak_mib() -> float:
    """The most memory that this process has held."""
    if DEVICE == "cuda":
        return round(torch.cuda.max_memory_allocated() / 2**20, 1)
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return round(int(fields["VmHWM"].split()[0]) / 2**10, 1)


def measure(name: str, sides: tuple[str, ...], groups: int, batch_rows: int, rounds: int) -> dict[str, Any]:
    """All sides of one shape, in turns."""
    made = {side: MAKERS[side](ALL_SHAPES[name], groups, batch_rows) for side in sides}
    seconds: dict[str, list[Any]] = {side: [] for side in sides}
    for number in range(rounds + 1):
        for side in sides:
            took = made[side].step()
            click.echo(
                f"{name}: {side} {took[0]:.2f} s, {took[1]:.2f} of CPU{'' if number else ' (warm-up)'}",
                err=True,
            )
            if number:
                seconds[side].append(took)
    shape = ALL_SHAPES[name]
    tokens = int(make_step(shape, groups)[0].lengths.sum())
    found: dict[str, Any] = {"shape": asdict(shape), "groups": groups, "tokens": tokens, "sides": {}}
    for side in sides:
        clock, cpu = np.round(np.array(seconds[side]).T, 3)
        found["sides"][side] = {
            **made[side].facts,
            "seconds": clock.tolist(),
            "cpu_seconds": cpu.tolist(),
            "useful_tokens_per_second": round(tokens / float(np.median(clock)), 1),
        }
        if side != "rec":
            for at, kind in enumerate(("times_rec", "times_rec_cpu")):
                ratios = [a[at] / b[at] for a, b in zip(seconds[side], seconds["rec"], strict=True)]
                found["sides"][side][kind] = spread(ratios)
        if side in KERNELS:
            apart = (made[side].logprobs - made["rec"].logprobs).abs()
            apart = apart[made["rec"].logprobs != 0]
            differ = {"most": float(apart.max()), "mean": float(apart.mean())}
            found["sides"][side]["logprobs_differ"] = differ
    return found


def spread(ratios: list[float]) -> dict[str, float]:
    """Median and extremes."""
    values = {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
    return {key: round(value, 2) for key, value in values.items()}


def facts() -> dict[str, Any]:
    """Where and with what this was measured."""
    names = ("torch", "transformers", "trl", "triton")
    found = {d.name: d.version for d in importlib.metadata.distributions() if d.name in names}
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    if DEVICE == "cuda":
        machine |= {"gpu": torch.cuda.get_device_name(), "date": datetime.now(UTC).date().isoformat()}
    return {**machine, "python": platform.python_version(), **found}


@click.command()
@click.option("--shape", "shapes", multiple=True, type=click.Choice(list(ALL_SHAPES)), help="All but tiny.")
@click.option("--side", "sides", multiple=True, type=click.Choice(list(MAKERS)), help="All of the device.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--groups", default=4, show_default=True, help="Groups of eight in an update.")
@click.option("--gpu", is_flag=True, help="A larger model on a GPU, with and without kernels.")
@click.option("--batch-rows", default=SIBLINGS, show_default=True, help="Rows of a micro-batch, but for rec.")
@click.option("--budget", type=int, help="Tokens of a micro-batch of rec; default: as a fit has it.")
@click.option("--memory/--no-memory", default=True, help="Measure peak memory too.")
@click.option("--output", type=click.Path(dir_okay=False), help="JSON file to write.")
@click.option("--one", nargs=2, hidden=True)
def main(
    shapes: tuple[str, ...],
    sides: tuple[str, ...],
    rounds: int,
    groups: int,
    gpu: bool,
    batch_rows: int,
    budget: int | None,
    memory: bool,
    output: str | None,
    one: tuple[str, str] | None,
) -> None:
    """Time an update of each side, and its peak memory."""
    global BUDGET, DEVICE, DTYPE
    BUDGET = budget
    if gpu and not torch.cuda.is_available():
        raise click.UsageError("torch sees no GPU")
    if gpu:
        DEVICE, DTYPE = "cuda", torch.bfloat16
    if one:
        side = MAKERS[one[0]](ALL_SHAPES[one[1]], groups, batch_rows)
        side.step()
        side.step()
        click.echo(own_peak_mib())
        return
    every = GPU_SIDES if gpu else SIDES
    order = tuple(side for side in every if side in (sides or every) or side == "rec")
    runs = {}
    for name in shapes or [name for name in (GPU_SHAPES if gpu else SHAPES) if name != "tiny"]:
        runs[name] = measure(name, order, groups, batch_rows, rounds)
        for side in order if memory else ():
            runs[name]["sides"][side]["peak_mib"] = peak_mib(side, name, groups, batch_rows)
        click.echo(json.dumps(runs[name], indent=1))
    if output:
        with open(output, "w", encoding="utf-8") as file:
            json.dump({**facts(), "runs": runs}, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
