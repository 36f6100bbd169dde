"""`rec loop`: rounds of sampling and fitting."""

from functools import partial

import click

from cli.fit import tell
from cli.options import command, json_option
from cli.output import show
from cli.progress import progress
from offline_rec.config import to_yaml
from offline_rec.looping.config import loop_config


@command
@click.argument("file", metavar="CONFIG")
@click.option(
    "--set",
    "overrides",
    metavar="KEY=VALUE",
    multiple=True,
    help="Any field, on top of the file; repeatable.",
)
@click.option("--resume", is_flag=True, help="Go on with the loop in its directory.")
@click.option("--print-config", is_flag=True, help="Print the resolved configuration as YAML; do nothing.")
@json_option
def loop(file: str, overrides: tuple[str, ...], *, resume: bool, print_config: bool, as_json: bool) -> None:
    """Improve a policy in rounds: sample it, fit it to the samples, sample it again.

    \b
        rec loop CONFIG.yaml
        rec loop CONFIG.yaml --set steps_per_round=20 --set fit.lr=1e-5
        rec loop CONFIG.yaml --resume

    `steps_per_round` and `lag` give any regime from on-policy to far off it; `offline` samples nothing. The
    result is a plain model directory; `rec sql OUT "SELECT * FROM lineage"` tells what each update saw.
    """
    config = loop_config(file, overrides=overrides)
    if print_config:
        click.echo(to_yaml(config), nl=False)
        return
    from offline_rec.looping.loop import loop as run  # torch loads here, not for --help

    with progress("loop") as bar:
        result = run(config, resume=resume, progress=partial(tell, bar))
    show(result.facts(), as_json) if as_json else click.echo("\n".join(result.lines()))
