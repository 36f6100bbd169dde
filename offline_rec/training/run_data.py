"""What a run keeps of its data, made once: token ids, index, log-probs of fixed policies, snapshot."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.dataset as pads

from data_tools import shaping as shapings
from data_tools.errors import DataError
from data_tools.shaping.blame import sql_errors_named
from data_tools.shaping.checks import any_turns, check_trajectories, invalid_rows, nothing_left
from data_tools.shaping.statement import keeps_groups_whole, stages, with_stages
from data_tools.store.views import literal
from offline_rec.cards.provenance import provenance
from offline_rec.config import FitConfig
from offline_rec.data.admission import LEFT_OUT, Admission
from offline_rec.data.index import HOME, ROWS_FILE, IndexCounts, UnusableNumber, build_index, home_of
from offline_rec.data.rows import RowStore
from offline_rec.data.snapshot import Snapshot, SourceFile, source_files, source_names
from offline_rec.data.tokens import TokenPlan
from offline_rec.data.tokens import prepare as prepare_tokens
from offline_rec.models.policy import Policy
from offline_rec.models.score import score
from offline_rec.models.sharing import beyond_window
from offline_rec.training.plan import Plan, remarks
from offline_rec.training.run_folder import begun, write_config

if TYPE_CHECKING:
    import duckdb

    from data_tools.dataset import Dataset
    from data_tools.shaping import Shaping, Split

Progress = Callable[[dict[str, Any]], None]
TRAIN, HOLDOUT = "index/train", "index/holdout"
ATTEMPTS = 5


@dataclass(frozen=True)
class RunData:
    """What the data of a run is made from; of the model its tokenizer and its context."""

    config: FitConfig
    plan: Plan
    ds: "Dataset"
    tokenizer: Any
    context: int | None
    progress: Progress

    def ticks(self, stage: str) -> Callable[[int, int], None]:
        """A callback of rows done and rows in all."""
        return lambda done, total: self.progress(
            {"event": "stage", "stage": stage, "done": done, "total": total}
        )


def write_run_data(
    run: RunData,
    policy: Policy,
    settle: Callable[[IndexCounts], FitConfig],
    fits: Callable[[FitConfig, IndexCounts], None],
) -> None:
    """Write index and snapshot to the run directory; the snapshot last, as the sign that all is whole.

    `settle` gives the configuration once it is known what the index holds, which `fits` may refuse.
    """
    now = datetime.now(UTC)
    config, plan = run.config, run.plan
    with begun(config), steady_connection(run.ds, now) as (con, files):
        tokens = make_tokens(run, con)
        notes = [*tokens.notes, *remarks(con, plan, config)]
        train, heldout = index_rows(run, con, files, tokens)
        config = settle(train)
        write_config(config)
        fits(config, train)
        run = replace(run, config=config)
        windowed = beyond_window(policy.sharing, train.longest)
        notes += [windowed] if windowed else []
        Snapshot(
            files=files,
            now=now.isoformat(),
            split=config.split,
            sql=plan.statement(config),
            rows=train.rows,
            groups=train.groups,
            n_tokens=train.tokens,
            index=train.digest,
            left_out={reason: count for reason, count in train.left_out.items() if count},
            holdout={"rows": heldout.rows, "groups": heldout.groups},
            model=policy.fingerprint(merged=False),
            tokens_key=tokens.key,
            anchor_key=_anchor_key(run, policy, tokens),
            reference_key=_reference_key(run, policy, tokens),
            notes=notes,
            longest=train.longest,
            largest_group=train.largest_group,
            provenance=_provenance(con, Path(config.out) / TRAIN, files),
        ).write(Path(config.out))


def _provenance(con: "duckdb.DuckDBPyConnection", index: Path, files: Sequence[SourceFile]) -> dict[str, Any]:
    """Where the rows of an index come from, for the card of the model; looks into no other files."""
    con.register("_index", pads.dataset(str(index / ROWS_FILE), format="arrow"))
    codes = con.execute("SELECT DISTINCT file FROM _index ORDER BY file").fetchall()
    batches = [batch_name(file) for file in files if is_rollouts(file)]
    named = ", ".join(literal(batches[code]) for (code,) in codes)
    some = 0 < len(codes) < len(batches)
    rows = f"(FROM rollouts WHERE file IN ({named}))" if some else "rollouts"
    return provenance(con, f"(FROM {rows} SEMI JOIN _index USING (response_id))")


def make_tokens(run: RunData, con: "duckdb.DuckDBPyConnection") -> TokenPlan:
    """The token ids that a run uses, made where they are missing."""
    return prepare_tokens(
        run.ds,
        run.tokenizer,
        retokenise=run.config.retokenise,
        where=run.plan.row_filter,
        seed=run.config.seed,
        progress=run.ticks("token ids"),
        con=con,
    )


def index_rows(
    run: RunData, con: "duckdb.DuckDBPyConnection", files: list[SourceFile], tokens: TokenPlan
) -> tuple[IndexCounts, IndexCounts]:
    """Index the rows to train on, and those to measure on, below the run directory."""
    config, plan = run.config, run.plan
    run.progress({"event": "stage", "stage": "index", "done": 0, "total": None})
    admission = _admission(run, tokens, [batch_name(file) for file in files if is_rollouts(file)])
    train = _index(run, con, (plan.shaping, config.split), TRAIN, admission)
    _check_signal(train, plan.shaping, may_be_flat=config.no_signal == "train")
    heldout = IndexCounts()
    if config.eval_every is not None and config.split == "train":
        heldout = _index(run, con, (plan.judging, "holdout"), HOLDOUT, admission, may_be_empty=True)
    return train, heldout


@contextmanager
def steady_connection(
    ds: "Dataset", now: datetime
) -> Iterator[tuple["duckdb.DuckDBPyConnection", list[SourceFile]]]:
    """A connection ready for shaping, and exactly the files that it reads."""
    for _ in range(ATTEMPTS):
        files = source_files(ds)
        with ds.connect(now) as con:
            # A batch that another process committed in between is in the views, and not in the list.
            if [file.name for file in files] == source_names(ds):
                shapings.prepare(con)
                yield con, files
                return
    raise DataError(f"{ds.path} changes too often to be read", "wait for the writers, then run again")


def is_rollouts(file: SourceFile) -> bool:
    """Whether a file holds rollouts, not rewards."""
    return file.name.startswith("rollouts/")


def batch_name(file: SourceFile) -> str:
    """The batch of a file of rollouts."""
    return file.name.removeprefix("rollouts/").removesuffix(".parquet")


def _admission(run: RunData, tokens: TokenPlan, batches: list[str]) -> Admission:
    """Rows beyond the model's context are left out whatever the configuration says."""
    limits = [limit for limit in (run.config.max_tokens, run.context) if limit is not None]
    store = RowStore(run.ds, tokens_key=tokens.key, retokenise=tokens.retokenise, batches=batches)
    return Admission(
        batches=batches,
        max_tokens=min(limits, default=None),
        needs_ratio=run.plan.needs_logprobs and run.config.anchor == "behavior",
        lengths=store.lengths,
        retokenise=tokens.retokenise,
    )


def _index(
    run: RunData,
    con: "duckdb.DuckDBPyConnection",
    selection: tuple["Shaping", "Split"],
    folder: str,
    admission: Admission,
    *,
    may_be_empty: bool = False,
) -> IndexCounts:
    """Index the rows that a shaping keeps of a split; errors name the field or the rows to blame."""
    shaping, split = selection
    # Not `compile`, whose order by group is not the one that is needed here, and costs a sort.
    with sql_errors_named(con, shaping, split):
        turns = any_turns(con)
        if turns:
            check_trajectories(con, shaping, split)
        also = {HOME: home_of(admission.batches)} if keeps_groups_whole(shaping, turns=turns) else {}
        chain = stages(shaping, split, turns=turns, also=also)
        try:
            counts = build_index(
                con,
                with_stages(chain, f"SELECT {', '.join([*shapings.COLUMNS, *also])} FROM final WHERE kept"),
                Path(run.config.out) / folder,
                admission=admission,
                priority="1.0" if shaping.priority is None else "priority",
                homes=bool(also),
            )
        except UnusableNumber as error:
            raise invalid_rows(con, shaping, split) from error
        if not counts.rows and not may_be_empty:
            raise _all_left_out(counts) or nothing_left(con, shaping, split)
    return counts


def _all_left_out(counts: IndexCounts) -> DataError | None:
    """The error where shaping kept rows and none of them can be trained on."""
    reasons = {reason: count for reason, count in counts.left_out.items() if count}
    if not reasons:
        return None
    said = "; ".join(f"{count} because {LEFT_OUT[reason]}" for reason, count in reasons.items())
    way = "ratios to the start need none: --anchor start" if "temperature_0" in reasons else "see --explain"
    return DataError(f"no row is left to train on: {said}", way)


def _check_signal(counts: IndexCounts, shaping: "Shaping", *, may_be_flat: bool) -> None:
    if not counts.signal and not may_be_flat:
        raise DataError(
            f"there is nothing to learn: the advantage of all {counts.rows} rows is 0",
            "groups of one response need a baseline such as global; in all others the rewards are equal",
        )
    if not counts.visited:
        raise DataError(
            f"priority = {shaping.priority!r} is 0 in all {counts.rows} rows, so that none is ever visited",
            "give a number above 0 to the rows whose groups should be",
        )


def _anchor_key(run: RunData, policy: Policy, tokens: TokenPlan) -> str | None:
    """The sidecar of the anchor's log-probs, complete; None where logged ones are used, or none at all."""
    anchor = run.config.anchor
    if anchor in ("behavior", "none"):
        return None
    fixed = policy if anchor == "start" else _fixed(run, policy, anchor)
    return _scored(run, tokens, fixed, "anchor log-probs")


def _reference_key(run: RunData, policy: Policy, tokens: TokenPlan) -> str | None:
    if not run.plan.needs_reference:
        return None
    named = run.config.reference
    return _scored(run, tokens, _fixed(run, policy, named) if named else policy, "reference log-probs")


def _fixed(run: RunData, policy: Policy, model: str) -> Policy:
    """Another policy, beside that which is fitted."""
    return Policy.load(model, device=str(policy.device), dtype=run.config.dtype)


def _scored(run: RunData, tokens: TokenPlan, policy: Policy, stage: str) -> str:
    """Score the population once with a fixed policy, into the dataset; what is there already is kept."""
    report = score(
        run.ds,
        policy,
        where=run.plan.row_filter,
        tokens=tokens,
        token_budget=run.config.token_budget,
        progress=run.ticks(stage),
    )
    return report.key
