"""`rec card`: the card of a run's model, or of a dataset."""

import click

from cli.options import command
from cli.output import write_text
from data_tools.errors import ConfigError


@command
@click.argument("path", metavar="RUN|DATASET")
@click.option("-o", "--output", metavar="FILE", help="Write it there instead of to its place; - prints it.")
def card(path: str, output: str | None) -> None:
    """Write the card of a run's model, or of a dataset, from what its files say now.

    \b
        rec card RUN
        rec card DATASET
        rec card RUN -o -

    A fit writes the card of its model itself: this one also tells what rec ope and rec eval found since. It
    is RUN/model/README.md, or DATASET/README.md; what you write below its last line is kept.
    """
    from offline_rec.cards.write import card as run

    made = run(path, write=output is None)
    if output is None:
        for one in made:
            click.echo(one.path)
        return
    if output == "-":
        click.echo(made[0].text, nl=False)
    elif len(output.rpartition("/")[2]) == 0:
        raise ConfigError(f"{output} is a folder", "name a file")
    else:
        write_text(made[0].text, output)
