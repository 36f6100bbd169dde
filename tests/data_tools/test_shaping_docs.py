"""The page about shaping, held to the code: its examples run, its numbers and names are right."""

import re
from datetime import datetime
from pathlib import Path

import pytest

import data_tools
from data_tools.shaping import BASELINES, DROPS, MACROS, SCALES, Shaping, shape
from tests.data_tools.rollout_rows import row, table
from tests.data_tools.shaping_cases import rewards, shaped

PAGE = (Path(__file__).parents[2] / "docs" / "shaping.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```sql\n-- (\w+)\n(.*?)\n```$", PAGE, re.M | re.S)
WORKED = re.search(r"<!-- worked example -->\n\n.*?\n\|[-|]+\|\n(.*?)\n\n", PAGE, re.S)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Rows that every example of the page finds something in."""
    extra = '{"intent": "i", "template": "t", "tier": "gold"}'
    known = {"policy": "qwen-a", "policy_version": 1, "extra": extra, "sampled_at": datetime(2026, 1, 1)}
    rows = [
        row(f"r{i}", reward=float(i % 5 > 2), group_id=f"g{i // 6}", behavior_logprob=-1.0, **known)
        for i in range(24)
    ]
    ds = data_tools.open(str(tmp_path_factory.mktemp("shaping") / "ds"), create=True, holdout=0.0)
    with ds.writer() as writer:
        writer.rollouts(table(rows))
        writer.commit()
    return ds


@pytest.mark.parametrize(
    ("field", "text"), EXAMPLES, ids=[f"{field}: {text[:40]}" for field, text in EXAMPLES]
)
def test_example_of_the_page_shapes_rows(field, text, dataset):
    assert shape(dataset, Shaping(**{field: text})).read_all().num_rows > 0


def test_every_field_that_takes_an_expression_has_an_example():
    assert {field for field, _ in EXAMPLES} >= {
        *("where", "group_by", "baseline", "scale", "drop", "advantage", "weight", "keep", "priority")
    }


def test_worked_example_shows_the_advantages_of_every_baseline():
    cells = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in WORKED[1].splitlines()]
    assert [name for name, *_ in cells] == list(BASELINES)
    for name, *expected in cells:
        found = shaped([*rewards(0, 0, 1, 3), *rewards(2, group="s")], baseline=name)
        assert [r["advantage"] for r in found.values()] == pytest.approx(
            [float(x) for x in expected], abs=5e-5
        )


def test_page_names_every_field_preset_and_macro():
    for name in (*Shaping.model_fields, *BASELINES, *SCALES, *DROPS):
        assert f"`{name}`" in PAGE or f"= {name}`" in PAGE, name
    for name, macro in MACROS.items():
        assert re.search(rf"`{name}\({macro.parameter}\)`", PAGE, re.I), name
