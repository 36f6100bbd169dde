"""`rec fit`: improve a policy on a dataset."""

import sys
import tempfile
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import click

from cli.options import DEBUG, F, command, json_option
from cli.output import show
from cli.progress import Bar, progress
from data_tools.errors import ConfigError, Interrupted
from offline_rec.config import CONFIG_FILE, FitConfig, Sql, fit_config, to_yaml
from offline_rec.training.engines.launch import follow_launcher, launch
from offline_rec.training.engines.place import LOST, LostRank, Place

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from offline_rec.training.fit import FitResult

FLAGS = (
    *("model", "out", "algorithm", "where", "group_by", "baseline", "scale", "drop", "weight", "keep"),
    *("anchor", "reference", "kl_coef", "retokenise", "steps", "epochs", "groups_per_step", "lr", "seed"),
    *("eval_every", "save_every", "max_kl", "min_ess", "device"),
)
"""Fields of the configuration that have a flag of their own; --set reaches all."""


def settings(names: tuple[str, ...]) -> Callable[[F], F]:
    """A flag for each field of the configuration, described by the field itself."""

    def decorate(function: F) -> F:
        for name in reversed(names):
            field = FitConfig.model_fields[name]
            switch = field.annotation is bool
            function = click.option(
                "--" + name.replace("_", "-"),
                name,
                help=_help(field),
                is_flag=switch,
                default=None,
                metavar=None if switch else NAMED.get(name) or _metavar(field.annotation),
            )(function)
        return function

    return decorate


NAMED = {"model": "MODEL", "out": "RUN", "algorithm": "NAME", "anchor": "NAME|MODEL", "reference": "MODEL"}
"""What stands for the value of a flag whose type does not say it."""


def _help(field: "FieldInfo") -> str:
    """The field's own description, and its default where it has one."""
    plain = field.is_required() or field.default is None or field.annotation is bool
    default = f"{field.default:g}" if isinstance(field.default, float) else field.default
    return f"{field.description}" if plain else f"{field.description}  [default: {default}]"


def _metavar(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return f"[{'|'.join(get_args(annotation))}]"
    parts = {annotation, *get_args(annotation)}
    return "X" if float in parts else "N" if int in parts else "SQL" if Sql in parts else "TEXT"


@command
@click.argument("dataset", metavar="[DATASET]", required=False)
@settings(FLAGS)
@click.option("--config", "file", metavar="FILE", help="YAML file with any fields of the configuration.")
@click.option(
    "--set",
    "overrides",
    metavar="KEY=VALUE",
    multiple=True,
    help="Any field, on top of the file; repeatable.",
)
@click.option("--processes", type=click.IntRange(min=1), metavar="N", help="Fit in N processes on the CPU.")
@click.option("--gpus", type=click.IntRange(min=1), metavar="N", help="Fit on N GPUs of this machine.")
@click.option(
    "--tracker",
    "trackers",
    metavar="NAME",
    multiple=True,
    help="Where metrics also go: tensorboard, wandb, mlflow or trackio; repeatable.",
)
@click.option("--resume", is_flag=True, help="Go on with the run in --out, as it was configured.")
@click.option(
    "--explain", is_flag=True, help="Print the shaping statement and what it selects; train nothing."
)
@click.option(
    "--dry-run",
    "dry",
    is_flag=True,
    help="Print what would be trained, and the memory it takes and that is free; train nothing.",
)
@click.option("--print-config", is_flag=True, help="Print the resolved configuration as YAML; train nothing.")
@json_option
def fit(
    file: str | None,
    overrides: tuple[str, ...],
    trackers: tuple[str, ...],
    *,
    processes: int | None,
    gpus: int | None,
    resume: bool,
    explain: bool,
    dry: bool,
    print_config: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Improve a policy on the groups of a dataset.

    \b
        rec fit DATASET --model MODEL --out RUN --algorithm rec-oneside-nois --epochs 2
        rec fit DATASET --model MODEL --out RUN --weight "red_weight(1)" --explain
        rec fit DATASET --model MODEL --out RUN --set lora_rank=16 --dry-run
        rec fit --out RUN --resume
        rec fit --config fit.yaml --set lr=1e-5 --set objective.epsilon_high=2
        rec fit DATASET --model MODEL --out RUN --gpus 8 --set zero_stage=3

    The result is a plain model directory, RUN/model. `rec sql RUN "SELECT * FROM metrics"` shows how it went.
    """
    given = [f"{name}={value}" for name, value in flags.items() if value is not None]
    config = fit_config(
        file or _own_config(flags["out"], resume),
        overrides=[*overrides, *given],
        flags={"trackers": trackers or None},
    )
    if print_config:
        click.echo(to_yaml(config), nl=False)
    elif explain:
        from offline_rec.training.explain import explain as explained

        found = explained(config)
        show(found.facts(), as_json) if as_json else click.echo(found.text())
    elif dry:
        _show_dry_run(config, resume=resume, as_json=as_json)
    elif processes or gpus:
        chosen = {"--processes": processes, "--gpus": gpus, "--device": flags["device"]}
        _check_one([name for name, value in chosen.items() if value])
        _launch(config, processes, gpus, resume=resume, as_json=as_json)
    else:
        _run(config, resume=resume, as_json=as_json)


def _check_one(given: list[str]) -> None:
    """The number of processes says which device they use."""
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} are both given", "give one of them")


def _run(config: FitConfig, *, resume: bool, as_json: bool) -> None:
    """Fit in this process: alone, or as one of several, the first of which speaks for all."""
    launched = follow_launcher()
    leads = Place.here().rank == 0
    from offline_rec.training.fit import fit as run  # torch loads here, not for --help or --explain

    try:
        with progress("fit", shown=leads) as bar:
            result = run(config, resume=resume, progress=partial(tell, bar))
    except LostRank as error:
        if launched:  # the launcher knows which one it was
            raise click.exceptions.Exit(LOST) from error
        raise
    except Interrupted as error:
        if not leads:
            raise click.exceptions.Exit(error.exit_code) from error
        raise
    if not leads:
        return
    if as_json:
        show(_facts(result), as_json)
    else:
        click.echo("\n".join(result.lines()))


def _launch(
    config: FitConfig, processes: int | None, gpus: int | None, *, resume: bool, as_json: bool
) -> None:
    """Run this command in several processes, with the configuration as it was resolved."""
    if Place.here().launched:
        raise ConfigError(
            "a launcher has started this process already (RANK is set)", "leave --processes and --gpus out"
        )
    config = config.model_copy(update={"device": "cuda" if gpus else "cpu"})
    flags = {"--resume": resume, "--json": as_json, "--debug": click.get_current_context().meta.get(DEBUG)}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(to_yaml(config))
        file.flush()
        command = [sys.executable, "-P", "-m", "cli.main", "fit", "--config", file.name]
        code = launch([*command, *(flag for flag, given in flags.items() if given)], processes or gpus or 1)
    if code:
        raise click.exceptions.Exit(code)


def _show_dry_run(config: FitConfig, *, resume: bool, as_json: bool) -> None:
    if resume:
        raise ConfigError("--dry-run tells of a run that has not begun", "leave --resume out, or --dry-run")
    from offline_rec.training.dry_run import dry_run

    with progress("dry run") as bar:
        found = dry_run(config, progress=partial(tell, bar))
    show(found.facts(), as_json) if as_json else click.echo(found.text())


def _own_config(out: str | None, resume: bool) -> Path | None:
    """The configuration of the run that is resumed; what is given beside it must agree with it."""
    if not (resume and out):
        return None
    file = Path(out) / CONFIG_FILE
    if not file.exists():
        raise ConfigError(f"{out} holds no run to resume", "leave --resume out to begin one")
    return file


NUMBERS = {
    "loss": "loss",
    "ratio_mean": "ratio",
    "kept_share": "kept",
    "ess_response": "ess",
    "kl_k3": "kl",
}
"""Fields of a record of metrics.jsonl that stand beside the bar, and their short names there."""


def tell(bar: Bar, event: dict[str, Any]) -> None:
    """Show an event of a fit or of a refresh."""
    if event["event"] == "note":
        bar.note(event["text"])
    elif event["event"] == "stage":
        bar.stage(event["stage"], event["done"], event["total"])
    else:
        shown = {short: event[name] for name, short in NUMBERS.items() if event.get(name) is not None}
        rate = event.get("timing", {}).get("tokens_per_second")
        bar.stage("fit", event["step"], event["total"])
        bar(event["step"], event["total"], shown | ({"tokens/s": rate} if rate else {}))


def _facts(result: "FitResult") -> dict[str, Any]:
    """What a fit came to, its paths as text."""
    facts = {field.name: getattr(result, field.name) for field in fields(result)}
    return {name: str(value) if isinstance(value, Path) else value for name, value in facts.items()}
