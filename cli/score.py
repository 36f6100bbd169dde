"""`rec score`: log-probs of a policy on the rows of a dataset."""

import click

from cli.options import command, dataset_argument, json_option, model_option, where_option
from cli.output import show
from cli.progress import progress


@command
@dataset_argument
@model_option
@where_option
@click.option(
    "--retokenise", is_flag=True, help="Make token ids from the text instead of using those logged."
)
@json_option
def score(dataset: str, model: str, where: str | None, retokenise: bool, as_json: bool) -> None:
    """Keep the log-probs of a model on the rows.

    \b
        rec score DATASET --model MODEL
        rec score DATASET --model MODEL --where "policy = 'old'"

    Interrupted, it goes on where it stopped; rows scored by the same weights are not scored again.
    """
    import data_tools
    from offline_rec.models.score import score as run  # torch loads here, not for --help

    with progress("scoring") as bar:
        report = run(data_tools.open(dataset), model, where=where, retokenise=retokenise, progress=bar)
    show(report.facts(), as_json)
