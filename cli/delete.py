"""`rec delete`: erasure of rows."""

from dataclasses import asdict

import click

from cli.options import command, dataset_argument, json_option
from cli.output import show


@command
@dataset_argument
@click.option("--where", required=True, metavar="SQL", help="Rows to erase, as a condition over `rollouts`.")
@click.option("--dry-run", is_flag=True, help="Count the rows, erase nothing.")
@json_option
def delete(dataset: str, where: str, dry_run: bool, as_json: bool) -> None:
    """Erase rows from every file of a dataset.

    \b
        rec delete DATASET --where "extra->>'user' = 'u-17'" --dry-run
        rec delete DATASET --where "extra->>'user' = 'u-17'"

    Only hashes of the rows' ids are kept, so that a later collect does not bring them back.
    """
    import data_tools

    report = data_tools.open(dataset).delete(where, dry_run=dry_run)
    if as_json:
        show(asdict(report), as_json)
    elif not report.rows:
        click.echo("0 rows: the condition is true for none, nothing is erased")
    else:
        what = "would be erased from" if dry_run else "erased from"
        click.echo(
            f"{report.rows} rows {what} {report.batches} batches, and from all that is kept beside them"
        )
