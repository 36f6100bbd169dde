"""`rec demo`: the whole story on a tiny policy."""

import click

from cli.options import command, json_option
from cli.output import show
from cli.progress import progress


@command
@click.option("--out", required=True, metavar="DIR", help="Directory to make; it must not exist or be empty.")
@click.option("--seed", type=int, default=1, show_default=True)
@json_option
def demo(out: str, seed: int, as_json: bool) -> None:
    """Run the whole story offline, in minutes.

    \b
        rec demo --out demo --seed 1

    A tiny transformer is trained until it is half good at adding numbers; its own samples are the log. They
    are collected, five algorithms are fitted on them, and each policy is sampled on held-out prompts.
    """
    from offline_rec.demo.story import run  # torch loads here, not for --help

    with progress("demo") as bar:
        results = run(out, seed=seed, say=lambda line: click.echo(line, err=as_json), tick=bar.stage)
    if as_json:
        show(results, as_json)
