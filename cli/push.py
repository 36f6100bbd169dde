"""`rec push`: a model or a dataset to the Hugging Face hub."""

from dataclasses import asdict
from typing import Any

import click

from cli.options import command, json_option
from cli.output import print_records, printable, show


@command
@click.argument("path", metavar="RUN|DATASET")
@click.argument("repo", metavar="REPO")
@click.option(
    "--private", is_flag=True, help="Only you see the repository; refused where it is public already."
)
@click.option("--adapter", is_flag=True, help="The adapter of a fit of adapters, not the merged model.")
@click.option("--dry-run", is_flag=True, help="List what would be pushed; nothing leaves this machine.")
@json_option
def push(path: str, repo: str, *, as_json: bool, **options: Any) -> None:
    """Push the model of a run, or a dataset, to the Hugging Face hub, with its card.

    \b
        rec push RUN OWNER/NAME --dry-run
        rec push RUN OWNER/NAME --private
        rec push DATASET OWNER/NAME --private

    Of a run its model goes; of a dataset rollouts, rewards and policies. Rejects, hashes of erased rows and
    the dataset's secret stay here, as do checkpoints, lineage and samples. Needs offline-rec[hub].
    """
    from offline_rec.hub.push import push as run

    report = run(path, repo, **options)
    if as_json:
        show(asdict(report), as_json)
        return
    first, *rest = map(printable, report.lines())
    click.echo(f"{first}\n")
    print_records(report.files)
    click.echo()
    for line in rest:
        click.echo(line)
