"""`rec ope`: is a policy better than the one that sampled the log?"""

from typing import Any

import click

from cli.options import command, json_option, where_option
from cli.output import print_records, printable, show
from cli.progress import progress


@command
@click.argument("policies", nargs=-1, required=True, metavar="RUN...")
@click.option("--data", required=True, metavar="DATASET", help="Dataset with the logged responses.")
@click.option(
    "--split",
    type=click.Choice(["holdout", "train", "all"]),
    default="holdout",
    show_default=True,
    help="Part of the dataset to judge on.",
)
@where_option
@click.option("--force", is_flag=True, help="Judge also on prompts that a policy was trained on; says so.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the draws behind the intervals.")
@json_option
def ope(policies: tuple[str, ...], data: str, *, as_json: bool, **options: Any) -> None:
    """Estimate from held-out logged responses what policies would earn.

    \b
        rec ope RUN --data DATASET
        rec ope RUN OTHER_RUN MODEL --data DATASET --where "policy = 'base'"

    RUN is a run directory of `rec fit`, or any model directory. Each gets an estimate with a 95 % interval,
    its gain over the log, and a verdict: better, worse, no difference, or not identifiable. Several are
    compared on the same rows. The report on a run is kept in RUN/ope.json.
    """
    import data_tools
    from offline_rec.evidence.ope import ope as run  # torch loads here, not for --help

    with progress("ope") as bar:
        report = run(data_tools.open(data), policies, progress=bar.stage, **options)
    if as_json:
        show(report.facts(), as_json)
        return
    first, *rest = map(printable, report.lines())
    click.echo(f"{first}\n")
    print_records(report.table())
    if report.comparisons:
        click.echo()
        print_records(report.compared())
    click.echo("\n" + "\n".join(rest))
