"""From a configuration to a loop that is ready to go: checks, data, policy, objective, engine."""

import math
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from data_tools import shaping as shapings
from data_tools.errors import ConfigError, DataError
from data_tools.shaping.blame import sql_errors_named
from offline_rec.config import FitConfig
from offline_rec.data.index import Index, IndexCounts
from offline_rec.data.order import Order
from offline_rec.data.rows import RowStore
from offline_rec.data.snapshot import Snapshot
from offline_rec.models.adapters import MERGE, LoraSettings, is_adapter
from offline_rec.models.policy import Policy
from offline_rec.objectives.objective import Objective
from offline_rec.training import checkpoint
from offline_rec.training.budget import settled
from offline_rec.training.engine import Engine, OptimizerSettings
from offline_rec.training.engines.choose import stage_of
from offline_rec.training.heldout import HeldOut
from offline_rec.training.loop import CHECKPOINTS, Progress, Run
from offline_rec.training.memory import check_memory, estimate, micro_batch_tokens
from offline_rec.training.plan import Plan, check_guards, check_logprobs, dataset_of
from offline_rec.training.reader import StepSource
from offline_rec.training.run_data import HOLDOUT, TRAIN, RunData, batch_name, is_rollouts, write_run_data
from offline_rec.training.run_folder import as_begun, check_folder, write_config

if TYPE_CHECKING:
    from data_tools.dataset import Dataset

FIELD_OF_ANCHOR = {"behavior": "behavior", "none": None}
"""Field of `Rows` that holds the anchor's log-probs; those of a scored policy are in `anchor`."""


def prepare(
    config: FitConfig, engine: Engine, *, resume: bool, progress: Progress
) -> tuple[Run, Path | None]:
    """A run that is ready, and the checkpoint that it goes on from, if any.

    What can be told without loading the model is checked before; a run that is refused leaves nothing behind.
    """
    plan = Plan.of(config)
    folder = Path(config.out)
    continued = _continued(config)
    lead(engine, partial(check_folder, config, resume=resume))
    config = as_begun(config)
    ds = dataset_of(config)
    snapshot = Snapshot.read(folder) if resume else None
    found = None
    if snapshot is None:
        lead(engine, partial(check_data, ds, plan, config))
    else:
        found = _checkpoint(folder, progress)
        if snapshot.check(ds, may_grow=config.on_new_data == "ignore"):
            progress(note("the dataset has grown; this run goes on with the rows that it began with"))
    fits = partial(_check_memory, engine=engine)
    lead(engine, partial(fits, config))
    policy = _load(config, found or continued, engine)
    if snapshot is None:
        data = RunData(config, plan, ds, policy.tokenizer, policy.context, progress)
        ranks, stage = engine.world_size, stage_of(config, engine.world_size)
        settle = partial(settled, config, engine.device, ranks=ranks, zero_stage=stage)
        lead(engine, partial(write_run_data, data, policy, settle, fits))
        snapshot, config = _written(folder), as_begun(config)
    else:
        lead(engine, partial(fits, config, snapshot))
        base_is_read = found is None or policy.adapter is not None
        if base_is_read and policy.fingerprint(merged=False) != snapshot.model:
            raise DataError(
                f"{config.model} has other weights than when the run began",
                "start a new run with another --out",
            )
        lead(engine, partial(write_config, config))
    run = _assemble(config, plan, ds, policy=policy, snapshot=snapshot, engine=engine)
    return run, found


def note(text: str) -> dict[str, Any]:
    """A progress event that is text to read."""
    return {"event": "note", "text": text}


def lead(engine: Engine, work: Callable[[], None]) -> None:
    """Have rank 0 do what is done once; all ranks wait for it, or fail with it."""
    failure: Exception | None = None
    if engine.rank == 0:
        try:
            work()
        except Exception as error:
            failure = error
    failed = engine.all_reduce_sum(torch.tensor(float(failure is not None)))
    if failure is not None:
        raise failure
    if float(failed):
        raise DataError("rank 0 could not prepare the run", "its own message says why")


def check_data(ds: "Dataset", plan: Plan, config: FitConfig) -> None:
    """Refuse what can be told to be wrong of the data without a model."""
    with ds.connect(datetime.now(UTC)) as con:
        shapings.prepare(con)
        with sql_errors_named(con, plan.shaping, config.split):
            con.execute(f"EXPLAIN {plan.statement(config)}")
            con.execute(f"SELECT count(*) FROM rollouts WHERE {plan.row_filter or 'true'}")
        check_logprobs(con, plan, config)
        check_guards(con, config)


def _checkpoint(folder: Path, progress: Progress) -> Path | None:
    found, torn = checkpoint.latest(folder / CHECKPOINTS)
    for problem in torn:
        progress(note(f"checkpoint skipped, {problem}"))
    return found


def _continued(config: FitConfig) -> Path | None:
    """The checkpoint of another run that this one begins with, whole."""
    if config.continue_from is None:
        return None
    folder = Path(config.continue_from)
    problem = checkpoint.verify(folder)
    if problem is not None:
        raise ConfigError(
            f"continue_from={folder} is no whole checkpoint: {problem}", "name RUN/checkpoints/step-N"
        )
    return folder


def _started(config: FitConfig) -> tuple[Path | None, int]:
    """The checkpoint of another run that is continued, and its updates."""
    if config.continue_from is None:
        return None, 0
    folder = Path(config.continue_from)
    return folder, int(checkpoint.read_state(folder)["step"])


def _load(config: FitConfig, found: Path | None, engine: Engine) -> Policy:
    """The policy as it starts or, from a checkpoint, goes on: its model, or its adapter on the start."""
    lora = LoraSettings.of(config)
    if lora is not None and is_adapter(config.model):
        raise ConfigError(f"{config.model} is an adapter itself", MERGE)
    policy = Policy.load(
        found / checkpoint.MODEL_FOLDER if found and lora is None else config.model,
        device=str(engine.device),
        dtype=config.dtype,
        gradient_checkpointing=config.gradient_checkpointing,
        lora=lora,
        quantise=config.quantise,
        kernels=config.kernels,
    )
    if found and policy.adapter is not None:
        policy.adapter.load(found / checkpoint.ADAPTER_FOLDER)
    return policy


def _check_memory(config: FitConfig, data: IndexCounts | Snapshot | None = None, *, engine: Engine) -> None:
    """Refuse a fit that takes more memory than is free; without `data`, before the weights are read."""
    if not config.memory_check:
        return
    longest, tokens = 0, 0
    if data is not None:
        longest, most = data.longest, data.largest_group
        tokens = micro_batch_tokens(config, groups=data.groups, longest=longest, largest_group=most)
    ranks = engine.world_size
    stage = stage_of(config, ranks)
    needs = estimate(config, engine.device, tokens=tokens, longest=longest, ranks=ranks, zero_stage=stage)
    if needs is not None:
        held = needs.weights if data is not None else 0
        check_memory(needs, config, engine.device, ranks=ranks, held=held)


def _written(folder: Path) -> Snapshot:
    snapshot = Snapshot.read(folder)
    if snapshot is None:
        raise DataError(f"{folder} holds no snapshot", "all ranks must see the same run directory")
    return snapshot


def length(config: FitConfig, n_groups: int) -> tuple[int, int, int]:
    """Groups of a step, number of steps, and groups that are visited in all of them."""
    groups_per_step = min(config.groups_per_step, n_groups)
    epochs = config.epochs or 1
    steps = config.steps or math.ceil(epochs * n_groups / groups_per_step)
    return groups_per_step, steps, steps * groups_per_step if config.steps else math.ceil(epochs * n_groups)


def _assemble(
    config: FitConfig, plan: Plan, ds: "Dataset", *, policy: Policy, snapshot: Snapshot, engine: Engine
) -> Run:
    policy.module = engine.prepare(policy.module, OptimizerSettings.of(config))
    anchor = FIELD_OF_ANCHOR.get(config.anchor, "anchor")
    open_rows = partial(
        RowStore,
        ds,
        tokens_key=snapshot.tokens_key,
        retokenise=config.retokenise,
        anchor_key=snapshot.anchor_key,
        batches=[batch_name(file) for file in snapshot.files if is_rollouts(file)],
    )
    folder = Path(config.out)
    index = Index(folder / TRAIN)
    groups_per_step, steps, visits = length(config, index.n_groups)
    continued, first = _started(config)
    source = StepSource(
        index=index,
        order=Order(
            index.block_first(),
            snapshot=snapshot.hash,
            seed=config.seed,
            window=config.shuffle_blocks,
            priority=None if plan.shaping.priority is None else index.priorities(),
        ),
        store=open_rows(reference_key=snapshot.reference_key, cache_blocks=config.shuffle_blocks + 1),
        groups_per_step=groups_per_step,
        n_groups=visits,
        token_budget=config.token_budget,
        sharing=policy.sharing,
        rank=engine.rank,
        world_size=engine.world_size,
        anchor=anchor,
        first_step=first,
    )
    heldout = None
    if snapshot.holdout["groups"] and config.eval_every is not None:
        heldout = HeldOut.choose(
            Index(folder / HOLDOUT),
            open_rows(cache_bytes=0),
            count=config.eval_groups,
            seed=config.seed,
            anchor=anchor,
            logged=config.anchor == "behavior",
        )
    objective = Objective(plan.algorithm.name, plan.composition)
    return Run(
        config=config,
        folder=folder,
        snapshot=snapshot,
        policy=policy,
        objective=objective,
        engine=engine,
        source=source,
        heldout=heldout,
        total_steps=first + steps,
        continued=continued,
        first_step=first,
    )
