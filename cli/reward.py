"""`rec reward`: rewards that come later than the responses."""

from dataclasses import asdict
from typing import Any

import click

from cli.options import command, dataset_argument, json_option, reward_option, where_option
from cli.output import show
from cli.progress import progress
from data_tools.errors import ConfigError


@command
@dataset_argument
@click.argument("file", required=False)
@click.option(
    "--id", "id_column", metavar="COLUMN", help="Column of FILE that names the row. [default: response_id]"
)
@click.option(
    "--value", "value_column", metavar="COLUMN", help="Column of FILE with the reward. [default: reward]"
)
@click.option(
    "--on", metavar="SQL", help="What the id is matched with, over `rollouts`. [default: response_id]"
)
@click.option("--nulls-retract", is_flag=True, default=None, help="An empty value takes a reward back.")
@reward_option("What judges the rows that are there.")
@where_option
@click.option("--source", metavar="NAME", help="Who judged; kept with each reward.")
@json_option
def reward(
    dataset: str,
    file: str | None,
    *,
    reward: str | None,
    where: str | None,
    source: str | None,
    as_json: bool,
    **matching: Any,
) -> None:
    """Add rewards to rows, from a file or by a rule.

    \b
        rec reward DATASET feedback.csv --id request --value stars --on "extra->>'request_id'"
        rec reward DATASET --reward "(response LIKE '%42%')::INT" --where "reward IS NULL"
        rec reward DATASET --reward "0.9*math + 0.1*regex(pattern='####')"

    FILE is CSV, JSON, JSONL or Parquet, or - for stdin. The latest reward of a row counts; earlier ones stay
    on record.
    """
    import data_tools

    ds = data_tools.open(dataset)
    if file is not None and reward is None:
        given = {name: value for name, value in matching.items() if value is not None}
        added = ds.add_rewards(file, source=source, **given)
        show(asdict(added), as_json) if as_json else click.echo("\n".join(added.lines()))
    elif file is None and reward is not None:
        with progress("judging") as bar:
            report = ds.judge(reward, where=where, source=source, progress=bar)
        show(asdict(report), as_json) if as_json else click.echo("\n".join(report.lines()))
    else:
        raise ConfigError("give either a FILE of rewards or a rule", "see rec reward --help")
