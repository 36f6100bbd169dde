"""A small log, the dataset made from it, and ways to run a command: in this process, or as a real one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from cli.main import rec

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def run():
    """Run a command in this process; the result has exit_code, stdout and stderr."""

    def invoke(*arguments, stdin=None):
        return CliRunner().invoke(rec, [str(argument) for argument in arguments], input=stdin)

    return invoke


@pytest.fixture
def shell():
    """Run a shell line in which `rec` is the command, as a process of its own."""

    def call(line):
        command = f'rec() {{ "{sys.executable}" -m cli.main "$@"; }}; {line}'
        return subprocess.run(
            ["bash", "-o", "pipefail", "-c", command], cwd=ROOT, capture_output=True, text=True
        )

    return call


@pytest.fixture
def log(tmp_path):
    """Ten prompts with four answers each; every other answer is right, every fifth is not judged."""
    path = tmp_path / "log.jsonl"
    rows = [
        {
            "group": i // 4,
            "prompt": f"{i // 4} + 1 =",
            "response": str(i // 4 + 1 + i % 2),
            "reward": None if i % 5 == 4 else 1 - i % 2,
            "policy": "old" if i < 20 else "new",
            "tier": "gold" if i % 3 else "free",
        }
        for i in range(40)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def dataset(run, log, tmp_path):
    """The dataset of the log."""
    path = tmp_path / "dataset"
    result = run("collect", log, "--into", path)
    assert result.exit_code == 0, result.output
    return path
