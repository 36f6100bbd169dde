"""`rec eval`: what models are worth, by sampling them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from cli.options import command, json_option, reward_option, sampler_options
from cli.output import print_records, printable, show
from cli.progress import progress
from data_tools.errors import ConfigError

if TYPE_CHECKING:
    from offline_rec.sampling.comparison import Comparison
    from offline_rec.sampling.sampled_rows import Task


@command
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@click.option("--prompts", metavar="FILE", help="The prompts, with columns that the reward takes.")
@click.option("--data", metavar="DATASET", help="Or the prompts of a dataset, each once.")
@click.option("--where", metavar="SQL", help="Rows of DATASET to take.  [default: split = 'holdout']")
@reward_option("What judges a response.", required=True)
@click.option("--pass-at", metavar="K,...", default="", help="Chance that one of K samples is correct.")
@click.option("--log", metavar="DATASET", help="Collect the samples into a dataset.")
@click.option("--out", metavar="DIR", help="Keep the results there.  [default: RUN/eval/N of every run]")
@sampler_options(n=1)
@json_option
def eval(
    models: tuple[str, ...],
    prompts: str | None,
    data: str | None,
    *,
    where: str | None,
    reward: str,
    n: int,
    pass_at: str,
    log: str | None,
    out: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Sample models on prompts and judge their responses.

    \b
        rec eval RUN --prompts test.jsonl --reward math
        rec eval BASE RUN --data DATASET --reward exact -n 8 --pass-at 1,8
        rec eval RUN --prompts test.jsonl --reward "0.9*math + 0.1*regex(pattern='boxed')" --log DATASET

    MODEL is a model directory or the run directory of a fit. All see the same prompts and share their noise;
    each is compared with the first. Intervals are 95 %, over prompts. With a run,
    rec sql RUN "SELECT * FROM evaluations" shows the results again.
    """
    from offline_rec.rewards import get

    judged = get(reward)  # a reward that cannot be is told before torch is loaded
    counts = _counts(pass_at)
    import data_tools
    from offline_rec.sampling.comparison import compare_models

    with progress("eval") as bar:
        report = compare_models(
            models,
            _task(prompts, data, where),
            judged,
            n=n,
            pass_at=counts,
            **options,
            out=out,
            log=None if log is None else data_tools.open(log, create=True),
            progress=bar.stage,
        )
    if as_json:
        show(report.facts(), as_json)
    else:
        _print(report)


def _counts(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"--pass-at {text!r} is no list of numbers", "write --pass-at 1,8") from None


def _task(prompts: str | None, data: str | None, where: str | None) -> "Task":
    import data_tools
    from offline_rec.sampling.tasks import dataset_task, file_task

    if (prompts is None) == (data is None):
        raise ConfigError("give either --prompts FILE or --data DATASET", "see rec eval --help")
    if data is not None:
        return dataset_task(data_tools.open(data), where)
    if where is not None:
        raise ConfigError("--where chooses rows of --data", "leave it out with --prompts")
    assert prompts is not None
    return file_task(prompts)


def _print(report: "Comparison") -> None:
    facts = report.facts()
    print_records([_line(policy) for policy in facts["policies"]])
    if facts["differences"]:
        click.echo("")
        print_records(
            [
                {"measure": d["measure"], "of": d["second"], "to": d["first"], **_interval("difference", d)}
                for d in facts["differences"]
            ]
        )
    for reason, count in report.reasons.items():
        click.echo(f"{count} not judged: {printable(reason)}")
    for folder in report.folders:
        click.echo(f"kept in {printable(folder)}")
    if report.collected is not None:
        click.echo(f"{report.collected} rows collected")


def _line(policy: Mapping[str, Any]) -> dict[str, Any]:
    line: dict[str, Any] = {"policy": policy["policy"], "prompts": policy["prompts"]}
    line |= {"samples": policy["samples"], **_interval("accuracy", policy["accuracy"])}
    line |= _interval("reward", policy["mean_reward"])
    for k, interval in policy["pass_at"].items():
        line |= _interval(f"pass@{k}", interval)
    return line | {"tokens": round(policy["mean_tokens"], 1), "cut": round(policy["cut_share"], 3)}


def _interval(name: str, interval: Mapping[str, float]) -> dict[str, str]:
    """A number, and where it lies in 95 of 100 cases."""
    value, low, high = (interval[part] for part in ("value", "low", "high"))
    return {name: f"{value:.3f} ({low:.3f} to {high:.3f})"}
