"""The page of a run: its curves, its rows, what is known of its policy, and what that policy changed."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import data_tools
from data_tools.errors import RecError
from data_tools.store.views import literal
from offline_rec.config import CONFIG_FILE, FitConfig, fit_config, read_yaml
from offline_rec.data.snapshot import Snapshot
from offline_rec.reporting import groups, run_changes, run_curves, run_evidence, run_rows
from offline_rec.reporting.blocks import Fact, Facts, Folded, Note, Page, Section, Table
from offline_rec.reporting.plain_text import name, number, plural, shortened
from offline_rec.reporting.run_changes import Change
from offline_rec.training.plan import Plan

if TYPE_CHECKING:
    import duckdb

    from data_tools.run_directory import RunDirectory
    from data_tools.store.dataset import StoredDataset

Progress = Callable[[str, int, int], None]

STAGES = ("curves", "rows", "changes", "groups")
SAMPLE = 500
"""Scored responses among whose groups those on the page are chosen."""

PATHS = ("dataset", "model", "out")


def run_page(run: "RunDirectory", *, count: int, seed: int, progress: Progress) -> Page:
    """The page of a run with `count` groups of its dataset."""
    folder = Path(run.path)
    config, snapshot = _config(folder), _snapshot(folder)
    named = _named_dataset(folder)
    ds = _dataset(named)
    ope = run_evidence.read_ope(run)
    where, dataset = shlex.quote(run.path), "DATASET" if named is None else shlex.quote(named)
    progress(STAGES[0], 0, len(STAGES))
    with run.connect() as con:
        sections = [
            Section("overview", "Overview", _overview(con, config, snapshot)),
            Section("ope", "What would it earn?", run_evidence.estimated(ope, where, dataset)),
            Section("evaluation", "Sampled evaluation", run_evidence.evaluated(con, where)),
            Section("heldout", "Held-out rows", run_curves.held_out(con)),
            Section("training", "Training", run_curves.training(con)),
        ]
    progress(STAGES[1], 1, len(STAGES))
    sections.append(Section("rows", "What it learned from", run_rows.trained_rows(run, ds)))
    progress(STAGES[2], 2, len(STAGES))
    change = _change(ope, ds, snapshot)
    sections.append(
        Section("changes", "What changed", run_changes.changed(change, where, dataset, listed=count > 0))
    )
    progress(STAGES[3], 3, len(STAGES))
    sections.append(Section("groups", "Groups to read", _browser(run, change, ds, config, (count, seed))))
    sections.append(Section("settings", "Settings", _settings(run, config, snapshot)))
    algorithm = "a loop" if config is None else config.algorithm
    return Page(name(folder.name), f"run of {algorithm}", run.path, sections)


def _config(folder: Path) -> FitConfig | None:
    try:
        return fit_config(folder / CONFIG_FILE)
    except (RecError, OSError):
        return None


def _named_dataset(folder: Path) -> str | None:
    """The dataset of a fit, or of a loop, whose configuration is another one."""
    try:
        named = read_yaml(folder / CONFIG_FILE).get("dataset")
    except RecError:
        return None
    return named if isinstance(named, str) else None


def _snapshot(folder: Path) -> Snapshot | None:
    try:
        return Snapshot.read(folder)
    except (RecError, OSError):
        return None


def _dataset(path: Any) -> "StoredDataset | None":
    if not isinstance(path, str):
        return None
    try:
        return data_tools.open(path)
    except RecError:
        return None


def _change(
    ope: dict[str, Any] | None, ds: "StoredDataset | None", snapshot: Snapshot | None
) -> Change | None:
    """The scores that `rec ope` left of the run's policy, in the dataset that it judged on."""
    if ope is None:
        return None
    judged = _dataset(ope.get("dataset")) or ds
    end = ope["policies"][0].get("weights")
    if judged is None or not isinstance(end, str):
        return None
    return Change.of(judged, end=end, start=None if snapshot is None else snapshot.model or None)


def _overview(
    con: "duckdb.DuckDBPyConnection", config: FitConfig | None, snapshot: Snapshot | None
) -> list[Any]:
    steps, skipped, stopped, seconds = con.execute(
        f"""SELECT coalesce(max(step), 0), count(*) FILTER (j->>'$.skipped' = 'true'), max(j->>'$.stopped'),
            sum(TRY_CAST(j->>'$.timing.seconds' AS DOUBLE)) FROM {run_curves.RECORDS}"""
    ).fetchall()[0]
    facts = [Fact("Steps", number(steps), f"{number(skipped)} skipped as not finite")]
    if config is not None:
        facts.insert(0, Fact("Algorithm", name(config.algorithm), f"learning rate {config.lr:g}"))
        facts.append(Fact("Started from", name(Path(config.model).name), name(config.model, 200)))
        facts.append(Fact("Data", name(Path(config.dataset).name), name(config.dataset, 200)))
    if snapshot is not None:
        facts.append(Fact("Rows", number(snapshot.rows), f"in {plural(snapshot.groups, 'group')}"))
        facts.append(Fact("Tokens", number(snapshot.n_tokens), "of responses"))
    if seconds is not None:
        facts.append(Fact("Time", _duration(seconds), "spent in steps"))
    blocks: list[Any] = [Facts(facts)]
    if stopped is not None:
        blocks.append(Note(f"The run was stopped: {shortened(stopped, 300)[0]}."))
    if snapshot is not None:
        left = [f"{number(n)} {reason.replace('_', ' ')}" for reason, n in snapshot.left_out.items()]
        blocks += [Note(f"Rows left out: {', '.join(left)}.")] if left else []
        blocks += [Note(note) for note in snapshot.notes]
    return blocks


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _browser(
    run: "RunDirectory",
    change: Change | None,
    ds: "StoredDataset | None",
    config: FitConfig | None,
    choice: tuple[int, int],
) -> list[Any]:
    count, seed = choice
    source = change.ds if change is not None else ds
    if source is None:
        return [Note("The dataset of the run is not there, so there are no texts to show.")]
    if not count:
        return [Note("No group was asked for (--groups 0).")]
    ids = change.sample(seed, SAMPLE) if change is not None else _trained(run, seed)
    with source.connect() as con:
        some = f"group_id IN (SELECT group_id FROM rollouts WHERE {groups.in_list('response_id', ids)})"
        kinds = groups.choose(con, count=count, seed=seed, condition=some)
        if not kinds:
            return [Note("None of the rows of the run is in its dataset any more.")]
        rows = groups.rows_where(con, groups.in_list("group_id", list(kinds)))
        shaped = _shaped(con, config, list(kinds))
    models = [] if config is None else [config.model]
    view = groups.TokenView(models=models) if change is None else change.view
    told = f"{plural(len(kinds), 'group')}, drawn by turns from the kinds of groups there are (seed {seed})"
    told += ", of those that the policy was scored on." if change is not None else ", of those trained on."
    if shaped:
        told += " Advantage and weight are what the run's own shaping gives them."
    return [Note(told), groups.browser(source, rows, kinds, shaped, view)]


def _trained(run: "RunDirectory", seed: int) -> list[str]:
    query = f"""SELECT DISTINCT response_id FROM lineage
        ORDER BY md5({literal(str(seed))} || response_id) LIMIT {SAMPLE}"""
    ids: list[str] = run.sql(query).column(0).to_pylist()
    return ids


def _shaped(
    con: "duckdb.DuckDBPyConnection", config: FitConfig | None, kinds: list[str]
) -> dict[str, groups.Shaped]:
    """What the run's shaping makes of the groups; nothing where it cannot be run on them any more."""
    if config is None:
        return {}
    try:
        return groups.shaped(con, Plan.of(config).shaping, kinds)
    except RecError:
        return {}


def _settings(run: "RunDirectory", config: FitConfig | None, snapshot: Snapshot | None) -> list[Any]:
    blocks: list[Any] = []
    if config is not None:
        usual = {name: field.default for name, field in FitConfig.model_fields.items()}
        own = {k: v for k, v in config.model_dump().items() if k in PATHS or v != usual.get(k)}
        rows = [[key, shortened(f"{value}", 300)[0]] for key, value in own.items()]
        blocks.append(
            Table("What was set?", ["setting", "value"], rows, says="All others have their defaults.")
        )
    if run.storage.exists(CONFIG_FILE):
        text = run.storage.read(CONFIG_FILE).decode("utf-8", "replace")
        blocks.append(Folded("The whole configuration", text))
    if snapshot is not None:
        blocks.append(Folded("The SQL that chose, weighed and ordered the rows", snapshot.sql))
    return blocks or [Note("The run has no configuration yet.")]
