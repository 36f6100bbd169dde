"""`rec diff`: how two selections of logged responses differ."""

import click

from cli.options import command, facts_output_option, json_option, where_option
from cli.output import print_records, printable, show, write_facts


@command
@click.argument("first", metavar="DATASET[@SELECTION]")
@click.argument("second", metavar="DATASET[@SELECTION]")
@where_option
@facts_output_option
@json_option
def diff(first: str, second: str, where: str | None, output: str | None, as_json: bool) -> None:
    """Compare two selections, snapshots or datasets: rewards, lengths, log-probs, policies, prompts.

    \b
        rec diff DATASET@train DATASET@holdout
        rec diff "DATASET@policy_version = 3" "DATASET@policy_version = 4"
        rec diff DATASET@RUN DATASET
        rec diff DATASET@..20261031 DATASET@20261101..

    A SELECTION is a split (train, holdout), a batch or the beginning of its name, a span of batches, a run
    directory (the batches that it read) or a condition. Differences are second minus first.
    """
    import data_tools

    report = data_tools.diff(first, second, where=where)
    if output is not None:
        write_facts(report.facts(), output)
        return
    if as_json:
        show(report.facts(), as_json)
        return
    head, *rest = map(printable, report.lines())
    click.echo(f"{head}\n")
    if report.numbers:
        print_records(report.table())
        click.echo()
    print_records(report.mix_table())
    click.echo("\n" + "\n".join(rest))
