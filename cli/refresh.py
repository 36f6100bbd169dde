"""`rec refresh`: new responses of the present policy to the prompts of a dataset."""

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from cli.fit import tell
from cli.options import (
    command,
    dataset_argument,
    json_option,
    key_value,
    model_option,
    reward_option,
    sampler_options,
    where_option,
)
from cli.output import show
from cli.progress import progress
from data_tools.errors import ConfigError

if TYPE_CHECKING:
    from offline_rec.rewards import Reward

SHOWN = 20
"""Prompts that --explain shows."""


@command
@dataset_argument
@model_option
@click.option(
    "--prompts", metavar="FILE", help="Prompts of a file (JSONL, CSV, Parquet), not of the dataset."
)
@where_option
@click.option(
    "--column",
    "columns",
    metavar="NAME=SQL",
    multiple=True,
    help="What the reward needs of a prompt, over `rollouts`; repeatable.  [default: answers, if there]",
)
@reward_option("What judges the responses.")
@click.option(
    "--policy", metavar="NAME", help="Name of the policy.  [default: that of the model's directory]"
)
@click.option("--version", type=click.IntRange(min=0), metavar="N", help="Its version.  [default: the next]")
@click.option(
    "--budget", type=click.IntRange(min=1), metavar="N", help="Responses in all, for the best prompts."
)
@click.option("--score", metavar="SQL", help="Which prompts are best for --budget; see --explain.")
@click.option("--resume", is_flag=True, help="Go on with an interrupted refresh of the policy.")
@click.option("--explain", is_flag=True, help="Print the planner's statement and scores; sample nothing.")
@sampler_options(n=8)
@json_option
def refresh(dataset: str, model: str, *, as_json: bool, explain: bool, **options: Any) -> None:
    """Sample the model on prompts and append its responses as a new version of the policy.

    \b
        rec refresh DATASET --model RUN/model --reward exact -n 8
        rec refresh DATASET --model RUN/model --reward exact --budget 800 --explain
        rec refresh DATASET --model RUN/model --reward exact --resume

    All of them are appended at once, with token ids and log-probs, when a few of them have turned out to have
    the log-probs that the model gives them.
    """
    if explain:
        _explain(dataset, model, options, as_json=as_json)
        return
    import data_tools
    from offline_rec.sampling.planner import SCORE, Budget
    from offline_rec.sampling.refresh import refresh as run

    if options["score"] and not options["budget"]:
        raise ConfigError("--score says what --budget is spent on", "give a --budget")
    budget = options["budget"]
    with progress("refresh") as bar:
        report = run(
            data_tools.open(dataset, create=bool(options["prompts"]) and not options["resume"]),
            model,
            prompts=options["prompts"],
            where=options["where"],
            columns=dict(key_value(text, "--column") for text in options["columns"]) or None,
            n=options["n"],
            params=options["params"],
            policy=options["policy"],
            version=options["version"],
            reward=_reward(options["reward"]),
            budget=None if budget is None else Budget(budget, options["score"] or SCORE),
            sampler=options["sampler"],
            resume=options["resume"],
            progress=partial(tell, bar),
        )
    show(report.facts(), as_json) if as_json else click.echo("\n".join(report.lines()))


def _reward(name: str | None) -> "Reward | None":
    from offline_rec import rewards

    return None if name is None else rewards.get(name)


def _explain(dataset: str, model: str, options: dict[str, Any], *, as_json: bool) -> None:
    import data_tools
    from offline_rec.sampling.planner import SCORE, Budget, plan_prompts, planner_statement, scored_weights

    ds, score, where = data_tools.open(dataset), options["score"] or SCORE, options["where"]
    chosen = None if options["budget"] is None else Budget(options["budget"]).prompts(options["n"])
    weights = scored_weights(ds, model)
    found = plan_prompts(
        ds, weights=weights, score=score, where=where, limit=SHOWN if chosen is None else chosen
    )
    rows = found.to_pylist()
    if as_json:
        show({"statement": planner_statement(score=score, where=where), "prompts": rows}, as_json)
        return
    click.echo(planner_statement(score=score, where=where))
    click.echo(f"\nscores of the model's log-probs: {weights or 'none; rec score makes them'}")
    names = [name for name in found.column_names if name not in ("prompt", "prompt_hash")]
    click.echo("  ".join(f"{name:>13}" for name in names) + "  prompt")
    for row in rows[:SHOWN]:
        click.echo("  ".join(f"{_short(row[name]):>13}" for name in names) + f"  {row['prompt'][:40]!r}")


def _short(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
