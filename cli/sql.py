"""`rec sql`: one SELECT over a dataset or a run."""

import click

from cli.options import command, dataset_argument, text_or_file
from cli.output import WRITERS, write_rows


@command
@dataset_argument
@click.argument("query")
@click.option("--format", "form", type=click.Choice([*WRITERS]), help="Form of the result; table by default.")
@click.option("--json", "form", flag_value="json", help="The same as --format json.")
@click.option("-o", "--output", metavar="FILE", help="Write there; the ending chooses the form.")
def sql(dataset: str, query: str, form: str | None, output: str | None) -> None:
    """Run one SELECT over a dataset, or over a run directory.

    \b
        rec sql DATASET "SELECT policy, avg(reward) FROM rollouts GROUP BY ALL"
        rec sql DATASET "DESCRIBE rollouts"
        rec sql RUN "SELECT step, loss FROM metrics" -o loss.csv

    A dataset has the views rollouts, groups, rejects and policies; a run has metrics and lineage. QUERY may
    also be a file that ends in .sql, or - for stdin.
    """
    import data_tools

    write_rows(data_tools.open(dataset).reader(text_or_file(query, ".sql") or ""), form, output)
