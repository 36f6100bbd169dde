"""Options that several commands share, each defined once."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from data_tools.errors import ConfigError, DataError

DEBUG = "cli.debug"
"""Key of the context's `meta` under which --debug is kept."""

F = TypeVar("F", bound=Callable[..., Any])


def _remember_debug(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta[DEBUG] = True


debug_option = click.option(
    "--debug",
    is_flag=True,
    expose_value=False,
    callback=_remember_debug,
    help="Show the traceback of an error.",
)


def command(function: F) -> click.Command:
    """A click command that also takes --debug, as every command does."""
    return click.command()(debug_option(function))


dataset_argument = click.argument("dataset", metavar="DATASET")

json_option = click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON.")

model_option = click.option(
    "--model", required=True, metavar="MODEL", help="A Hugging Face model directory (weights and tokenizer)."
)

where_option = click.option("--where", metavar="SQL", help="Rows to use, as a condition over `rollouts`.")


def key_value(text: str, option: str) -> tuple[str, str]:
    """Split `KEY=VALUE` at the first equals sign; `ConfigError` names the option otherwise."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"{option} {text!r} is not KEY=VALUE", f"write {option} KEY=VALUE")
    return key.strip(), value


def text_or_file(value: str | None, suffix: str) -> str | None:
    """The text itself, the content of the file it names when it ends in `suffix`, or stdin for `-`."""
    if value is None:
        return None
    named = value == "-" or value.lower().endswith(suffix)
    where = "standard input" if value == "-" else value
    try:
        text = _read(value) if named else value
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8 text", "convert it with iconv") from error
    if not text.strip():
        raise ConfigError(f"{where} is empty" if named else "the SQL is empty", "write one SELECT")
    return text


def _read(name: str) -> str:
    return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")


def _some_text(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value is not None and not value.strip():
        raise ConfigError(f"{param.opts[0]} is empty", "leave it out, or say what the reward is")
    return value


def reward_option(help: str, *, required: bool = False) -> Callable[[F], F]:
    """--reward, spelt the same wherever responses are judged (docs/rewards.md)."""
    return click.option(
        "--reward", metavar="NAME|SQL|MODULE:FUNCTION", callback=_some_text, required=required, help=help
    )
