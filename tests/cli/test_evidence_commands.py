"""`rec trace`, `rec diff`, `rec card` and `rec push`: what they print, and how they exit."""

import json

import pytest

from offline_rec.training.fit import fit
from tests.offline_rec.fitting import config, world


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = world(tmp_path_factory.mktemp("evidence"), groups=8)
    fit(config(folder, steps=2, eval_every=None))
    return folder


def test_a_step_and_a_row_are_traced(run, place, tmp_path):
    result = run("trace", place / "run", "--step", 1, "--limit", 2)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("update 1: 16 rows of total weight 16")
    assert "14 more rows are not shown: --limit 16 shows all" in result.stdout
    row = json.loads(run("trace", place / "run", "--step", 1, "--json").stdout)["rows"][0]["response_id"]
    told = run("trace", place / "run", "--row", row, "-o", tmp_path / "row.json")
    assert (told.exit_code, told.stdout) == (0, "")
    assert json.loads((tmp_path / "row.json").read_text())["first_step"] == 1
    (tmp_path / "ids").write_text(f"{row}\n")
    erased = run("trace", place / "run", "--erased", tmp_path / "ids")
    assert f"touched: {place / 'run' / 'model'}" in erased.stdout
    assert run("trace", place / "run", "--erased", "-", stdin=row).stdout.endswith(
        erased.stdout.split("\n", 1)[1]
    )
    assert run("trace", place / "run", "--erased", "-", stdin="").exit_code == 1


def test_wrong_usage_of_trace(run, place):
    assert run("trace", place / "run").exit_code == 2
    assert run("trace", place / "run", "--step", 1, "--row", "x").exit_code == 2
    assert run("trace", place / "run", place / "run", "--step", 1).exit_code == 2
    missing = run("trace", place / "run", "--step", 9)
    assert (missing.exit_code, missing.stderr.splitlines()[-1]) == (1, "hint: its updates are 1 to 2")


def test_two_selections_are_compared(run, dataset, tmp_path):
    result = run("diff", f"{dataset}@policy = 'old'", f"{dataset}@policy = 'new'")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"20 rows of {dataset}@policy = 'new' against 20 rows")
    assert "policy only on the first: old" in result.stdout
    file = tmp_path / "drift.json"
    assert run("diff", dataset, dataset, "-o", file).exit_code == 0
    assert json.loads(file.read_text()) == json.loads(run("diff", dataset, dataset, "--json").stdout)
    assert run("diff", f"{dataset}@nothing = 1", dataset).exit_code == 2
    assert run("diff", f"{dataset}@reward = 7", dataset).exit_code == 1


def test_a_card_is_written_printed_and_pushed_in_thought(run, dataset, place, tmp_path):
    printed = run("card", dataset, "-o", "-").stdout
    assert printed.startswith("---\npretty_name: dataset\n")
    assert not (dataset / "README.md").exists()
    assert run("card", dataset).stdout == f"{dataset / 'README.md'}\n"
    assert (dataset / "README.md").read_text() == printed
    assert run("card", place / "run", "-o", tmp_path / "card.md").exit_code == 0
    assert (tmp_path / "card.md").read_text() == (place / "run" / "model" / "README.md").read_text()
    told = run("push", place / "run", "lab/policy", "--dry-run", "--private")
    assert told.exit_code == 0, told.output
    assert "would be pushed to the model lab/policy (private)" in told.stdout
    assert "model.safetensors" in told.stdout
    facts = json.loads(run("push", dataset, "answers", "--dry-run", "--json").stdout)
    assert (facts["kind"], facts["pushed"]) == ("dataset", False)
    assert run("push", dataset, "no name", "--dry-run").exit_code == 2
