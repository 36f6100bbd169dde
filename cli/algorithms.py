"""`rec algorithms`: what --algorithm may name."""

import click

from cli.options import command, json_option
from cli.output import show

COLUMNS = ("name", "needs", "summary")


@command
@click.argument("name", required=False)
@json_option
def algorithms(name: str | None, as_json: bool) -> None:
    """List the algorithms and what each needs, or show one: formula, defaults, scope, source.

    \b
        rec algorithms
        rec algorithms rec-oneside-nois
        rec algorithms --json

    In a formula, A is the advantage, r the ratio of a token's probability now to that when it was sampled, s
    the geometric mean of r over the response, R their product, d = log R; [condition] is 1 where it holds,
    else 0.
    """
    from offline_rec.algorithms import algorithm, describe

    if name:
        algorithm(name)  # an unknown name is an error that names the nearest
        show(next(row for row in describe() if row["name"] == name), as_json)
    else:
        rows = describe() if as_json else [{c: row[c] for c in COLUMNS} for row in describe()]
        show(rows, as_json)
