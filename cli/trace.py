"""`rec trace`: which updates used a row, which rows made an update, and what has learned from erased rows."""

from typing import TYPE_CHECKING, Any

import click

from cli.options import command, facts_output_option, json_option
from cli.output import print_records, printable, show, write_facts
from data_tools.errors import ConfigError

if TYPE_CHECKING:
    from offline_rec.tracing.erasure import ErasureTrace
    from offline_rec.tracing.trace import RowTrace, StepTrace

LIMIT = 20


@command
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--row", metavar="ID", help="A response id: which updates used it?")
@click.option("--step", type=click.IntRange(min=0), metavar="N", help="An update: which rows made it?")
@click.option(
    "--erased",
    metavar="DATASET|FILE",
    help="Erased rows of a dataset, or a file (-) with a response id a line: what learned from them?",
)
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=LIMIT,
    show_default=True,
    help="Rows, or updates, to list; the others are counted.",
)
@facts_output_option
@json_option
def trace(
    runs: tuple[str, ...],
    *,
    row: str | None,
    step: int | None,
    erased: str | None,
    limit: int,
    output: str | None,
    as_json: bool,
) -> None:
    """Follow a row to the updates that used it, or an update to its rows.

    \b
        rec trace RUN --row ID
        rec trace RUN --step 20
        rec trace RUN OTHER_RUN --erased DATASET

    RUN is the run directory of a fit or of a loop. With --erased, the checkpoints and models that have
    learned from erased rows are named, also those of runs that began with weights of such a run.
    """
    from offline_rec.tracing.erasure import trace_erased
    from offline_rec.tracing.trace import trace as run

    if sum(given is not None for given in (row, step, erased)) != 1:
        raise ConfigError("say what to trace", "give one of --row ID, --step N and --erased DATASET")
    if erased is None and len(runs) > 1:
        raise ConfigError(
            f"{len(runs)} runs are named", "a row or a step is traced in one; --erased takes several"
        )
    found: Any = trace_erased(runs, erased) if erased else run(runs[0], row=row, step=step, limit=limit)
    if output is not None:
        write_facts(found.facts(), output)
    elif as_json:
        show(found.facts(), as_json)
    else:
        _print(found)


def _print(found: "RowTrace | StepTrace | ErasureTrace") -> None:
    first, *rest = map(printable, found.lines())
    click.echo(first)
    records = found.table()
    if records:
        click.echo()
        print_records(records)
        click.echo()
    for line in rest:
        click.echo(line)
