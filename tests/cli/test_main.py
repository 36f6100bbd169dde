"""The group: help, version, and what an exception becomes."""

import click
import pytest

from cli.main import COMMANDS, describe, rec
from data_tools.errors import ConfigError, DataError


@pytest.fixture
def raising(monkeypatch, run):
    """Run a command that raises what it is given."""

    def call(error, *arguments):
        @click.command()
        def broken():
            raise error

        monkeypatch.setattr(type(rec), "get_command", lambda self, ctx, name: broken)
        return run(*arguments, "broken")

    return call


def test_help_lists_every_command(run):
    result = run("--help")
    assert result.exit_code == 0
    assert all(f"\n  {name} " in result.stdout for name in COMMANDS)


def test_version_is_that_of_the_distribution(run):
    assert run("--version").stdout.startswith("rec, version ")


def test_no_command_shows_the_help_and_counts_as_wrong_usage(run):
    result = run()
    assert result.exit_code == 2
    assert "Usage: rec" in result.output


def test_wrong_data_is_two_lines_and_exit_code_1(raising):
    result = raising(DataError("log.jsonl:3: no prompt", "map one with --map prompt=..."))
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == "error: log.jsonl:3: no prompt\nhint: map one with --map prompt=...\n"


def test_wrong_usage_is_exit_code_2(raising):
    assert raising(ConfigError("weight: no such column 'advantge'")).exit_code == 2


def test_unknown_option_names_the_near_one_and_the_help(run):
    result = run("sql", "DATASET", "SELECT 1", "--fromat", "csv")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[0].startswith("error: No such option '--fromat'. Did you mean")
    assert result.stderr.splitlines()[1] == "hint: rec sql --help"


def test_unknown_command_is_wrong_usage(run):
    result = run("ingest")
    assert result.exit_code == 2
    assert "No such command 'ingest'" in result.stderr


def test_an_unexpected_exception_is_one_line_with_its_type(raising):
    result = raising(ZeroDivisionError("division by zero\nsecond line"))
    assert result.exit_code == 1
    assert result.stderr.splitlines() == [
        "error: unexpected ZeroDivisionError: division by zero",
        "hint: the same command with --debug shows where it happened",
    ]


def test_debug_shows_the_traceback_too(raising):
    result = raising(ZeroDivisionError("division by zero"), "--debug")
    assert result.exit_code == 1
    assert "Traceback" in result.stderr
    assert "error: unexpected ZeroDivisionError" in result.stderr


def test_debug_may_stand_after_the_command(run, tmp_path):
    result = run("stats", tmp_path, "--debug")
    assert "Traceback" in result.stderr
    assert "error: " in result.stderr


def test_an_error_of_the_operating_system_names_the_file(raising):
    result = raising(PermissionError(13, "Permission denied", "/data/x"))
    assert result.stderr == "error: Permission denied: /data/x\n"


def test_a_full_disk_is_no_unexpected_error():
    assert (
        describe(OSError(28, "No space left on device", "a.parquet")).message
        == "No space left on device: a.parquet"
    )


def test_interrupting_says_so_without_a_traceback(raising):
    result = raising(KeyboardInterrupt())
    assert result.exit_code == 1
    assert result.stderr.strip() == "error: interrupted"


def test_an_error_cannot_colour_the_terminal(raising):
    result = raising(DataError("bad value '\x1b[31mred'"))
    assert result.stderr == "error: bad value '\\x1b[31mred'\n"


def test_a_reader_that_leaves_early_is_no_error(shell, dataset):
    result = shell(f'rec sql {dataset} "SELECT * FROM range(2000000)" --format csv | head -n 1')
    assert result.stdout == "range\n"
    assert result.stderr == ""


def test_a_process_exits_with_the_code_and_prints_to_stderr(shell, tmp_path):
    result = shell(f"rec stats {tmp_path / 'none'}")
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 2
