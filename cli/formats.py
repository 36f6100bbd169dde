"""`rec formats`: the log formats that are read."""

from dataclasses import asdict

from cli.options import command, json_option
from cli.output import show


@command
@json_option
def formats(as_json: bool) -> None:
    """List the log formats that are read, and what each carries.

    \b
        rec formats
        rec formats --json
    """
    from data_tools.readers import READERS

    rows = [{"format": reader.name, "log": reader.title, **asdict(reader.carries)} for reader in READERS]
    show(rows, as_json)
