"""`rec`: commands that load on use; the one place where an exception becomes a message and an exit code."""

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import click
from click.exceptions import NoArgsIsHelpError

from cli.options import DEBUG, debug_option
from cli.output import printable
from data_tools.errors import RecError

COMMANDS = {
    "collect": "cli.collect:collect",
    "formats": "cli.formats:formats",
    "sql": "cli.sql:sql",
    "stats": "cli.stats:stats",
    "check": "cli.check:check",
    "reward": "cli.reward:reward",
    "score": "cli.score:score",
    "delete": "cli.delete:delete",
    "compact": "cli.compact:compact",
    "algorithms": "cli.algorithms:algorithms",
    "fit": "cli.fit:fit",
    "eval": "cli.eval:eval",
    "ope": "cli.ope:ope",
    "trace": "cli.trace:trace",
    "diff": "cli.diff:diff",
    "card": "cli.card:card",
    "push": "cli.push:push",
    "report": "cli.report:report",
    "refresh": "cli.refresh:refresh",
    "loop": "cli.loop:loop",
    "demo": "cli.demo:demo",
}
"""Where each command lives, in the order in which a user meets them."""


class Failure(click.ClickException):
    """What a command raised, as the lines that the user reads; the exception itself is the cause."""

    def __init__(self, message: str, hint: str = "", exit_code: int = 1) -> None:
        super().__init__(message)
        self.hint = hint
        self.exit_code = exit_code  # type: ignore[misc]  # a class variable in click


def describe(error: Exception) -> Failure:
    """The message, hint and exit code that stand for an exception."""
    if isinstance(error, RecError):
        return Failure(error.message, error.hint, error.exit_code)
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        return Failure(f"{error.strerror}{where}")
    first_line = (str(error).strip().splitlines() or ["no message"])[0]
    return Failure(
        f"unexpected {type(error).__name__}: {first_line}",
        "the same command with --debug shows where it happened",
    )


class LazyGroup(click.Group):
    """Imports a command's module when that command runs, and turns what it raises into one or two lines."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, name = COMMANDS[cmd_name].split(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.Abort, click.exceptions.Exit, BrokenPipeError):
            raise
        except Exception as error:
            if ctx.meta.get(DEBUG):
                traceback.print_exc()
            raise describe(error) from error

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        extra = {"prog_name": "rec", **extra}
        call = partial(super().main, *args, standalone_mode=False, **extra)
        return exit_with_code(call) if standalone_mode else call()


def exit_with_code(call: Callable[[], Any]) -> NoReturn:
    """Run a command and leave the process: 0 it worked, 1 it failed, 2 it was used wrongly."""
    try:
        code = call() or 0
        sys.stdout.flush()
    except NoArgsIsHelpError as error:
        code = error.exit_code
        error.show()
    except click.ClickException as error:
        code = error.exit_code
        report(error)
    except click.Abort:
        code = 1
        click.echo("error: interrupted", err=True)
    except BrokenPipeError:
        code = 1
        # Whoever read stdout has left (`| head`); Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def report(error: click.ClickException) -> None:
    """`error: what and where`, then `hint: what to do`, on stderr."""
    lines = [printable(line) for line in error.format_message().splitlines()]
    click.echo("\n".join([f"error: {lines[0] if lines else 'no message'}", *lines[1:]]), err=True)
    hint = getattr(error, "hint", "")
    if isinstance(error, click.UsageError) and error.ctx is not None:
        hint = f"{error.ctx.command_path} --help"
    if hint:
        click.echo(f"hint: {hint}", err=True)


@click.group(
    cls=LazyGroup, context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]}
)
@click.version_option(package_name="offline-rec", prog_name="rec")
@debug_option
def rec() -> None:
    """Improve a language model from responses that were already logged.

    \b
        rec collect logs/*.jsonl --into DATASET
        rec stats DATASET
        rec fit DATASET --model MODEL --out RUN --algorithm rec-oneside-nois
    """


def main() -> None:
    """Entry point of the `rec` script."""
    rec()


if __name__ == "__main__":
    main()
