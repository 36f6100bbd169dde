"""`rec stats`: what a dataset holds."""

from cli.options import command, dataset_argument, json_option
from cli.output import show


@command
@dataset_argument
@json_option
def stats(dataset: str, as_json: bool) -> None:
    """Show sizes, rewards, log-probs, policies, rejects.

    \b
        rec stats DATASET
        rec stats DATASET --json | jq .rewards

    Also group sizes, the share of groups whose rewards are all equal, lengths, and staleness.
    """
    import data_tools

    show(data_tools.open(dataset).stats(), as_json)
