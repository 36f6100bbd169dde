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

    show(asdict(data_tools.open(dataset).delete(where, dry_run=dry_run)), as_json)
