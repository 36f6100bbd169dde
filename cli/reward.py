"""`rec reward`: rewards that come later than the responses."""

import click

from cli.options import command, dataset_argument, json_option, where_option
from cli.output import show


@command
@dataset_argument
@click.argument("file", required=False)
@click.option(
    "--id", "id_column", default="response_id", show_default=True, help="Column of FILE that names the row."
)
@click.option(
    "--value", "value_column", default="reward", show_default=True, help="Column of FILE with the reward."
)
@click.option(
    "--reward", metavar="SQL|NAME|MODULE:FUNCTION", help="Judge existing rows by this rule instead."
)
@where_option
@click.option("--source", metavar="NAME", help="Who judged; kept with each reward.")
@json_option
def reward(dataset: str, file: str | None, as_json: bool, **options: object) -> None:
    """Add rewards to rows, from a file or by a rule.

    \b
        rec reward DATASET feedback.csv --id response_id --value thumbs
        rec reward DATASET --reward "(response LIKE '%42%')::INT" --where "reward IS NULL"
    """
    raise NotImplementedError
