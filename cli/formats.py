"""`rec formats`: the log formats that are read."""

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from cli.options import command, json_option
from cli.output import show

if TYPE_CHECKING:
    from data_tools.readers.base import Reader


@command
@click.argument("name", required=False)
@json_option
def formats(name: str | None, as_json: bool) -> None:
    """List the log formats that are read, or say what one of them carries.

    \b
        rec formats
        rec formats verl
        rec formats --json
    """
    from data_tools.readers import READERS, reader

    if name:
        show(_facts(reader(name)), as_json)
    elif as_json:
        show([_facts(known) for known in READERS], as_json)
    else:
        show([{"format": known.name, "log": known.title} for known in READERS], as_json)


def _facts(known: "Reader") -> dict[str, str]:
    return {"format": known.name, "log": known.title, **asdict(known.carries)}
