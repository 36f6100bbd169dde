"""The documentation, held to the code: its commands run, its links lead somewhere, its map is whole."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from cli.main import COMMANDS, rec
from tests import samples
from tests.generated import up_to_date

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROSE = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
BLOCK = re.compile(
    r"(?P<skip><!-- not run: [^>]+ -->\n+)?^```(?P<language>bash|console|python)\n(?P<text>.*?)^```$",
    re.M | re.S,
)
DEMO_SECONDS = 240
INSTALL = re.compile(r"^pip install [^&\n]+&& ", re.M)  # what runs this test is installed already


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    skipped: bool

    def command(self) -> list[str]:
        if self.language == "python":
            return [sys.executable, "-c", self.text]
        text = self.text
        if self.language == "console":
            text = "\n".join(line[2:] for line in text.splitlines() if line.startswith(("$ ", "> ")))
        return ["bash", "-euo", "pipefail", "-c", INSTALL.sub("", text)]

    def broken_promise(self, printed: str) -> str | None:
        """The first line that a console block shows and its commands did not print, in this order.

        `...` stands for anything; what is printed besides may be left out.
        """
        shown = self.text.splitlines() if self.language == "console" else []
        lines = iter(printed.splitlines())
        for line in shown:
            pattern = ".*".join(map(re.escape, line.strip().split("...")))
            if not line.startswith(("$ ", "> ")) and not any(
                re.fullmatch(pattern, one.strip()) for one in lines
            ):
                return line
        return None


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, m.start("text")), m["language"], m["text"], bool(m["skip"]))
        for m in BLOCK.finditer(text)
    ]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """One folder for all pages, so that a page may build on what the README made."""
    folder = tmp_path_factory.mktemp("docs")
    for name in ("docs", "examples"):
        (folder / name).symlink_to(ROOT / name)
    # The log that docs/collect.md names is public; an excerpt of it stands in.
    shutil.copy(ROOT / "tests" / "cases" / "gsm8k_excerpt.jsonl", folder / "example_model_solutions.jsonl")
    samples.write(folder)
    return folder


@pytest.mark.docs
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_runs_as_printed(page, workspace):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for block in blocks(page):
        if block.skipped:
            continue
        done = subprocess.run(
            block.command(),
            cwd=workspace,
            env={**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=1200,
        )
        told = f"{page.name}:{block.line}\n{block.text}\n{done.stdout}"
        assert done.returncode == 0, told
        assert block.broken_promise(done.stdout) is None, told


def test_output_that_a_page_shows_is_held_to_what_its_commands_print():
    shown = Block(ROOT / "README.md", 1, "console", "$ rec a\n4 kept, ...\n> --b\n1 rejected\n", False)
    assert shown.broken_promise("log: 1\n 4 kept, 0 rejected\n1 rejected\n") is None
    assert shown.broken_promise("1 rejected\n4 kept, 0 rejected\n") == "1 rejected"
    assert shown.broken_promise("5 kept, 0 rejected\n1 rejected\n") == "4 kept, ..."


@pytest.mark.docs
def test_the_demo_of_the_readme_keeps_its_promises(workspace):
    told = json.loads((workspace / "demo" / "results.json").read_text())
    fits, base = told["algorithms"], told["base"]
    print(
        f"the demo took {told['seconds']['total']} s; accuracy {base['accuracy']:.3f} of the base,", end=" "
    )
    print({name: round(fit["accuracy"], 3) for name, fit in fits.items()})
    regularised = ("rec-oneside-nois", "red-weight", "rec-oneside-nois + red_weight(1)")
    best = max((fits[name] for name in regularised), key=lambda fit: fit["accuracy"])
    assert best["accuracy"] >= base["accuracy"] + 0.15
    assert best["low"] > base["high"]
    assert fits["reinforce"]["accuracy"] < base["accuracy"]
    # What the log foretold is right wherever it says anything, and of what has run away it says nothing.
    foretold = {name: fit["ope"] for name, fit in fits.items()}
    assert foretold["reinforce"]["verdict"] == "not identifiable"
    assert foretold["rec-oneside-nois"]["verdict"] == "better"
    assert all(ope["agrees"] is not False for ope in foretold.values()), foretold
    assert told["seconds"]["total"] <= DEMO_SECONDS


def test_few_blocks_are_left_out():
    every = [block for page in PAGES for block in blocks(page)]
    assert every
    assert sum(block.skipped for block in every) <= len(every) // 4


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_the_code_tells_is_up_to_date(page):
    text = page.read_text(encoding="utf-8")
    assert up_to_date(text) == text, "run: python -m tests.generated"


@pytest.mark.parametrize("name", COMMANDS)
def test_command_has_help_with_an_example_and_stands_in_the_documentation(name):
    result = CliRunner().invoke(rec, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert f"rec {name}" in result.output.split("Options:")[0].split("\n", 1)[1]
    assert any(f"rec {name}" in page.read_text(encoding="utf-8") for page in PAGES)


def test_the_page_of_measurements_holds_the_figures_that_the_scripts_kept():
    path = ROOT / "benchmarks" / "results.py"
    spec = importlib.util.spec_from_file_location("results", path)
    results = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(results)
    assert (path.parent / "RESULTS.md").read_text(encoding="utf-8") == results.page(), (
        "run: python benchmarks/results.py"
    )
