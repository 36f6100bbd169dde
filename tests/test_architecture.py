"""The shape of the code, checked: who may import whom, how long things may be, and what may never be used."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ("data_tools", "offline_rec", "cli")  # each may import itself and those before it
SOURCES = sorted(path.relative_to(ROOT) for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))
EVERY_FILE = sorted(
    path.relative_to(ROOT)
    for folder in (*LAYERS, "tests", "benchmarks", "examples")
    for path in (ROOT / folder).rglob("*.py")
)
PICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_POSITIONAL = 5
MAX_NESTING = 3

TREES = {path: ast.parse((ROOT / path).read_text(encoding="utf-8")) for path in EVERY_FILE}


def imported_modules(nodes: Iterator[ast.AST]) -> set[str]:
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import hides its layer"
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """A Triton kernel takes a pointer or a number for each thing that it needs, and nothing by name."""
    return any(ast.unparse(decorator) == "triton.jit" for decorator in function.decorator_list)


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def nesting(node: ast.AST, *, is_elif: bool = False) -> int:
    """The deepest chain of block statements below a node: `elif` continues `if`, a function starts anew."""
    blocks = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)
    own = int(isinstance(node, blocks) and not is_elif)
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        continues = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        deepest = max(deepest, nesting(child, is_elif=continues))
    return own + deepest


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_imports_point_down(path):
    own = LAYERS.index(path.parts[0])
    used = {module.split(".")[0] for module in imported_modules(ast.walk(TREES[path]))}
    assert not {name for name in used if name in LAYERS and LAYERS.index(name) > own}
    assert not used & {"tests", "benchmarks"}


@pytest.mark.parametrize("path", [p for p in SOURCES if p.parts[0] == "data_tools"], ids=str)
def test_data_tools_knows_no_torch(path):
    used = {module.split(".")[0] for module in imported_modules(ast.walk(TREES[path]))}
    assert not used & {"torch", "transformers", "deepspeed", "vllm"}


def test_modules_do_not_import_each_other_in_a_circle():
    names = {".".join(path.with_suffix("").parts).removesuffix(".__init__"): path for path in SOURCES}
    graph = {}
    for name, path in names.items():
        nodes = (node for node in TREES[path].body if isinstance(node, ast.Import | ast.ImportFrom))
        graph[name] = imported_modules(nodes) & names.keys() - {name}
    list(TopologicalSorter(graph).static_order())  # CycleError names the circle


@pytest.mark.parametrize("path", EVERY_FILE, ids=str)
def test_nothing_that_unpickles_is_used(path):
    tree = TREES[path]
    assert not {module.split(".")[0] for module in imported_modules(ast.walk(tree))} & PICKLES
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        assert ast.unparse(call.func) not in {"torch.load", "torch.save"}, f"line {call.lineno}"
        assert not any(k.arg == "allow_pickle" for k in call.keywords), f"line {call.lineno}"


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_files_and_functions_stay_small(path):
    assert len((ROOT / path).read_text(encoding="utf-8").splitlines()) <= MAX_FILE_LINES
    for function in functions(TREES[path]):
        lines = function.end_lineno - function.lineno + 1
        assert lines <= MAX_FUNCTION_LINES, f"{function.name}: {lines} lines"


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_functions_are_flat_and_take_few_positional_arguments(path):
    for function in functions(TREES[path]):
        depth = max(nesting(statement) for statement in function.body)
        assert depth <= MAX_NESTING, f"{function.name}: blocks {depth} deep"
        arguments = [
            a.arg for a in (*function.args.posonlyargs, *function.args.args) if a.arg not in ("self", "cls")
        ]
        assert is_kernel(function) or len(arguments) <= MAX_POSITIONAL, (
            f"{function.name}: {len(arguments)} positional parameters"
        )


def test_no_module_is_a_drawer_of_odds_and_ends():
    assert not {path.stem for path in SOURCES} & {"utils", "util", "helpers", "helper", "misc", "common"}


LIGHT = {
    "every --help": """
from click.testing import CliRunner
from cli.main import COMMANDS, rec
for arguments in ([], *([name] for name in COMMANDS)):
    result = CliRunner().invoke(rec, [*arguments, "--help"])
    assert result.exit_code == 0, result.output
""",
    "the configuration": "from offline_rec.config import FitConfig",
    "the data tools": "import data_tools; data_tools.open, data_tools.collect, data_tools.Shaping",
    "the commands over data": """
import json, pathlib, tempfile
from click.testing import CliRunner
from cli.main import rec
folder = pathlib.Path(tempfile.mkdtemp())
log = folder / "log.jsonl"
log.write_text(json.dumps({"prompt": "1+1=", "response": "2", "reward": 1}) + "\\n")
for arguments in (
    ["collect", str(log), "--into", str(folder / "ds")],
    ["sql", str(folder / "ds"), "select count(*) from rollouts"],
    ["stats", str(folder / "ds")],
    ["algorithms"],
    ["formats"],
):
    result = CliRunner().invoke(rec, arguments)
    assert result.exit_code == 0, (arguments, result.output)
""",
}


@pytest.mark.parametrize("what", LIGHT)
def test_starts_without_torch(what):
    script = LIGHT[what] + "\nimport sys\nassert not {'torch', 'transformers'} & set(sys.modules)\n"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
