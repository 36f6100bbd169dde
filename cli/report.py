"""`rec report`: a dataset or a run as one page to look at."""

import click

from cli.options import command, json_option
from cli.output import printable, show
from cli.progress import progress


@command
@click.argument("subject", metavar="DATASET|RUN")
@click.option("-o", "--output", required=True, metavar="FILE.html", help="The page to write.")
@click.option(
    "--groups", type=click.IntRange(min=0), default=20, show_default=True, help="Groups of responses to show."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the choice of groups.")
@click.option(
    "--score",
    metavar="KEY",
    help="Colour the tokens of a dataset by these scores: the beginning of a name in DATASET/logprobs.",
)
@json_option
def report(subject: str, output: str, *, groups: int, seed: int, score: str | None, as_json: bool) -> None:
    """Write one HTML page about a dataset or a run.

    \b
        rec report DATASET -o dataset.html
        rec report RUN -o run.html

    The page needs no network and no model: it opens from disk, in light and dark, and prints. Of a dataset it
    shows who sampled what, rewards, lengths, log-probs, rejects, and groups to read; of a run its curves, its
    rows, what it is worth, and what it changed. Texts of logs are shown, and never run.
    """
    from offline_rec.reporting.report import report as run

    with progress("report") as bar:
        made = run(subject, output, groups=groups, seed=seed, score=score, progress=bar.stage)
    if as_json:
        show(made.facts(), as_json)
    else:
        click.echo(f"{printable(made.path)}: {made.bytes / 1000:,.0f} kB about a {made.about}")
