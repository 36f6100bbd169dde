"""Values as text: what a cell, a JSON document and a progress bar show."""

import json
from datetime import UTC, datetime
from decimal import Decimal

import pytest

from cli.output import CELL_CHARACTERS, cell, format_table, print_facts, to_json
from cli.progress import progress


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, ""),
        (True, "True"),
        (3, "3"),
        (2.0, "2"),
        (0.123456789, "0.123457"),
        (Decimal("40"), "40"),
        (Decimal("0.5"), "0.5"),
        ([1, 2], "[1,2]"),
        ({"a": None}, '{"a":null}'),
        (b"\xaa\x01", "aa01"),
        (datetime(2026, 1, 2, tzinfo=UTC), "2026-01-02T00:00:00+00:00"),
        ("two\nlines", "two\\nlines"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("größer 你", "größer 你"),
    ],
)
def test_a_cell_is_one_printable_line(value, shown):
    assert cell(value) == shown


def test_a_long_cell_is_cut():
    assert len(cell("x" * 10_000)) == CELL_CHARACTERS
    assert cell("x" * 10_000).endswith("…")


def test_json_is_strict():
    document = to_json(
        {"nan": float("nan"), "inf": float("inf"), "sum": Decimal("7"), "huge": Decimal(2**70), 1: "x"}
    )
    assert json.loads(document) == {"nan": None, "inf": None, "sum": 7, "huge": float(2**70), "1": "x"}


def test_a_table_aligns_numbers_to_the_right_and_takes_markup_as_text():
    lines = format_table(["name", "n"], [["[bold]a[/bold]", 1], ["b", 100]]).splitlines()
    assert lines[0] == " name               n"
    assert lines[2] == " [bold]a[/bold]     1"
    assert lines[3] == " b                100"


def test_facts_show_a_line_each_then_blocks_then_tables(capsys):
    print_facts(
        {
            "reward": {"mean": 0.5, "min": None, "by_policy": {"a": 1, "b": 0}},
            "policies": [{"name": "a", "rows": 3}],
            "rows": 3,
            "split": {"train": 2, "holdout": 1},
            "flags": {},
        }
    )
    assert capsys.readouterr().out.splitlines() == [
        *("rows   3", "split  train 2, holdout 1", "flags  none", ""),
        *("reward", "  mean       0.5", "  min        none", "  by policy  a 1, b 0", ""),
        *("policies", " name   rows", " ───────────", " a         3"),
    ]


def test_progress_is_silent_without_a_terminal(capsys):
    with progress("working") as tick:
        tick(1, 2, {"loss": 0.5})
        tick(2)
    assert capsys.readouterr() == ("", "")
