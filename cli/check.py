"""`rec check`: the doctor."""

from typing import Any

import click

from cli.options import command, dataset_argument, json_option, where_option
from cli.output import print_records, printable, show
from cli.progress import progress


@command
@dataset_argument
@click.option("--model", metavar="MODEL", help="The model to fit, to check ids, texts and log-probs with.")
@click.option(
    "--sample",
    type=click.IntRange(min=1),
    default=512,
    show_default=True,
    metavar="N",
    help="Rows that are looked at token by token.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Which rows these are.")
@where_option
@json_option
def check(dataset: str, model: str | None, *, as_json: bool, **options: Any) -> None:
    """Say what is wrong with a dataset, and how to mend it.

    \b
        rec check DATASET
        rec check DATASET --model MODEL --sample 2000

    With a model also: whose token ids they are, whether texts give them again, and which temperature explains
    the logged log-probs. Exits with 1 if there is an error.
    """
    import data_tools
    from offline_rec.checking import check as run

    with progress("checking") as bar:
        report = run(data_tools.open(dataset), model, progress=bar, **options)
    if as_json:
        show(report.facts(), as_json)
    else:
        if report.logprobs:
            click.echo("recomputed minus logged log-probs")
            print_records(report.logprobs)
            click.echo()
        click.echo("\n".join(map(printable, report.lines())))
    if report.failed:
        raise click.exceptions.Exit(1)
