"""Parts of the documentation that the code itself tells: `python -m tests.generated` brings them up to date.

A part stands between `<!-- NAME -->` and `<!-- end of NAME -->`, NAME being a key of PARTS.
"""

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel

from benchmarks.paper.found import read
from benchmarks.paper.page import page as paper_page
from data_tools.checking import RULES as DATA_RULES
from data_tools.checking import Rule
from data_tools.collecting.columns import ALIASES, LOOSE
from data_tools.collecting.reasons import FLAGS, NOTES, REASONS
from offline_rec.checking import RULES as MODEL_RULES
from offline_rec.config import FitConfig, describe_fields
from offline_rec.evidence.estimators import ESTIMATORS
from offline_rec.evidence.logged import LEFT_OUT
from offline_rec.evidence.verdict import RULES as VERDICT_RULES
from offline_rec.looping.config import LoopConfig
from offline_rec.sampling.planner import COLUMNS, SCORE

ROOT = Path(__file__).parent.parent


def purpose(path: Path) -> str:
    """The first sentence of a module's docstring, which says what the file is."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.split(r"(?<=\.)\s", " ".join(text.split("\n\n")[0].split()), maxsplit=1)[0]


def package_map(package: str) -> str:
    """A line for each file of a package; packages below it speak through their `__init__.py`."""
    paths = sorted((ROOT / package).rglob("*.py"), key=lambda path: (path.parent, path.name))
    first = ROOT / package / "__init__.py"
    rows = [
        f"| `{path.relative_to(ROOT).as_posix()}` | {purpose(path)} |\n" for path in paths if path != first
    ]
    return f"\n| `{package}` | {purpose(first)} |\n|---|---|\n{''.join(rows)}"


def file_map() -> str:
    return "".join(map(package_map, ("cli", "offline_rec", "data_tools"))) + "\n"


def aliases() -> str:
    rows = [f"| `{column}` | {', '.join(f'`{name}`' for name in ALIASES[column])} |\n" for column in LOOSE]
    return f"| column | goes by |\n|---|---|\n{''.join(rows)}"


def codes(table: Mapping[str, str]) -> Callable[[], str]:
    return lambda: "".join(
        ["| code | meaning |\n|---|---|\n", *(f"| `{c}` | {m} |\n" for c, m in table.items())]
    )


def fields(model: type[BaseModel]) -> Callable[[], str]:
    rows = [f"| `{name}` | {default} | {meaning} |\n" for name, default, meaning in describe_fields(model)]
    return lambda: f"| field | default | meaning |\n|---|---|---|\n{''.join(rows)}"


def planner() -> str:
    rows = [f"| `{name}` | {meaning} |\n" for name, meaning in COLUMNS.items()]
    return f"The default score: `{SCORE}`\n\n| column | of a prompt |\n|---|---|\n{''.join(rows)}"


def findings(rules: Sequence[Rule]) -> Callable[[], str]:
    values = {"dataset": "DATASET", "model": "MODEL", "temperature": "T", "context": "N", "stops": "[ID]"}
    values |= {"flag": "FLAG", "file": "BATCH", "row": "ID"}
    rows = [f"| `{r.code}` | {r.severity} | {r.meaning} | `{r.fix.format(**values)}` |\n" for r in rules]
    return lambda: f"| code | severity | what is wrong | fix |\n|---|---|---|---|\n{''.join(rows)}"


def estimators() -> str:
    rows = [f"| `{e.name}` | {e.meaning} | {e.bias or 'unbiased'} |\n" for e in ESTIMATORS]
    return f"| estimate | is | biased by |\n|---|---|---|\n{''.join(rows)}"


def verdict_rules() -> str:
    rows = [f"| `{rule.code}` | {rule.breaks} | {rule.why} |\n" for rule in VERDICT_RULES]
    return f"| rule | broken by | because |\n|---|---|---|\n{''.join(rows)}"


def paper() -> str:
    """Which findings of the paper held, from the results that its runs left."""
    return paper_page(read(ROOT / "benchmarks" / "results" / "paper.json"), figures="paper")


PARTS: Mapping[str, Callable[[], str]] = {
    "map": file_map,
    "aliases": aliases,
    "reasons": codes(REASONS),
    "notes": codes(NOTES),
    "flags": codes(FLAGS),
    "left out of ope": codes(LEFT_OUT),
    "estimators": estimators,
    "verdict rules": verdict_rules,
    "fields": fields(FitConfig),
    "loop fields": fields(LoopConfig),
    "planner": planner,
    "findings": findings(DATA_RULES),
    "paper": paper,
    "findings with a model": findings(MODEL_RULES),
}


def up_to_date(text: str) -> str:
    """The text of a page with every generated part as it has to be."""
    for name, make in PARTS.items():
        place = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- end of {name} -->)", re.S)
        text = place.sub(lambda _, make=make: make(), text)
    return text


if __name__ == "__main__":
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        page.write_text(up_to_date(page.read_text(encoding="utf-8")), encoding="utf-8")
