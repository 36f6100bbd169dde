import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from data_tools.errors import ConfigError
from offline_rec.algorithms import ALGORITHMS, algorithm, describe, markdown
from offline_rec.objectives import importance, keep, parts, reductions, regularisers, scalars
from offline_rec.objectives.objective import Objective

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs" / "algorithms.md"

NAMES = [
    *("reinforce", "rec-oneside-nois", "rec-oneside-is", "rec-twoside-nois", "rec-twoside-is"),
    *(
        "rec-ring-nois",
        "rec-ring-is",
        "rec-gspo-nois",
        "rec-gspo-is",
        "grpo",
        "dr-grpo",
        "dapo",
        "gspo",
        "gmpo",
    ),
    *("cispo", "topr", "tis", "sapo", "m2po", "opmd", "opmd-token", "opmd-pairwise", "asymre", "red-drop"),
    *("red-weight", "red-weight-adaptive", "dro", "raft", "sft", "dft", "luffy"),
]

FUNCTIONS = {
    "keep": keep.KEEP,
    "importance": importance.IMPORTANCE,
    "regulariser": regularisers.REGULARISER,
    "kl_kind": regularisers.KL,
}


def test_table_holds_the_algorithms_that_are_promised():
    assert list(ALGORITHMS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_row_is_documented_and_makes_an_objective(name):
    row = algorithm(name)
    assert all((row.summary, row.formula, row.source))
    rule = Objective(name, row.composition)
    assert rule.scope == row.scope
    assert rule.needs <= row.needs


@pytest.mark.parametrize(
    ("name", "scope", "needs"),
    [
        ("reinforce", "token", "reward group"),
        ("rec-oneside-nois", "token", "reward group behavior_logprobs"),
        ("grpo", "token", "reward group behavior_logprobs"),
        ("cispo", "token", "reward group behavior_logprobs"),
        ("sapo", "token", "reward group behavior_logprobs"),
        ("luffy", "token", "reward group behavior_logprobs expert"),
        ("dft", "token", "reward"),
        ("raft", "token", "reward"),
        ("sft", "token", ""),
        ("asymre", "token", "reward group"),
        ("red-drop", "token", "reward group"),
        ("red-weight", "token", "reward group"),
        ("gspo", "sequence", "reward group behavior_logprobs"),
        ("gmpo", "sequence", "reward group behavior_logprobs"),
        ("topr", "sequence", "reward behavior_logprobs"),
        ("opmd", "sequence", "reward group behavior_logprobs"),
        ("dro", "sequence", "reward reference"),
        ("opmd-pairwise", "group", "reward group behavior_logprobs"),
        ("m2po", "step", "reward group behavior_logprobs"),
        ("red-weight-adaptive", "step", "reward group behavior_logprobs"),
    ],
)
def test_scope_and_needs(name, scope, needs):
    row = algorithm(name)
    assert row.scope == scope
    assert row.needs == set(needs.split())


@pytest.mark.parametrize(
    ("name", "defaults"),
    [
        ("rec-oneside-nois", {"epsilon_low": 0.2, "epsilon_high": 0.2}),
        (
            "rec-ring-nois",
            {"epsilon_low": 0.2, "epsilon_high": 0.2, "outer_low": 0.6, "outer_high": 2.0},
        ),
        ("rec-gspo-is", {"epsilon_low": 3e-4, "epsilon_high": 4e-4}),
        ("dapo", {"epsilon_low": 0.2, "epsilon_high": 0.28}),
        ("gmpo", {"log_clip_low": 0.4, "log_clip_high": 0.4}),
        ("cispo", {"epsilon_low": 1.0, "epsilon_high": 0.28}),
        ("tis", {"cap": 2.0}),
        ("sapo", {"tau_positive": 1.0, "tau_negative": 1.05}),
        ("m2po", {"budget": 0.04, "floor_low": 0.3, "floor_high": 0.5}),
        ("opmd-token", {"penalty": 0.1}),
        ("opmd", {"tau": 0.1}),
        ("dro", {"tau": 1.0}),
        ("red-weight-adaptive", {"epsilon_low": 0.2, "epsilon_high": 0.2, "min_temperature": 0.8}),
        ("luffy", {"gamma": 0.1, "length": 8192}),
        ("reinforce", {}),
    ],
)
def test_defaults(name, defaults):
    assert algorithm(name).defaults == defaults


def test_a_kl_term_asks_for_a_reference_only_when_it_is_on():
    assert "reference" not in algorithm("grpo").needs
    assert "reference" in algorithm("grpo").composition.changed(kl_coef=0.1).needs


def test_a_changed_part_brings_its_own_scope_needs_and_parameters():
    plain = algorithm("red-weight").composition
    masked = plain.changed(keep="one-side", epsilon_low=0.6, epsilon_high=2.0)
    assert (plain.scope, plain.needs) == ("token", set())
    assert masked.needs == {"behavior_logprobs"}
    assert masked.parameters["epsilon_high"] == 2.0
    assert masked.changed(keep="sequence-one-side").scope == "sequence"
    with pytest.raises(ConfigError):
        plain.changed(epsilon_low=0.6)
    back = masked.changed(keep="all").changed(keep="one-side")
    assert back.parameters["epsilon_high"] == 0.2


def test_parts_are_functions_with_the_parameters_that_the_catalogue_says():
    for choice, functions in FUNCTIONS.items():
        assert set(functions) == set(parts.CATALOGUE[choice])
        for name, function in functions.items():
            taken = [
                p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY
            ]
            assert sorted(taken) == sorted(parts.CATALOGUE[choice][name].parameters), name
    assert set(reductions.REDUCTION) == set(parts.REDUCTION)
    assert set(scalars.PENALTY) == {*parts.REGULARISER, *parts.KL}
    assert {pair[0] for pair in scalars.GAIN} <= set(parts.KEEP)
    assert {pair[1] for pair in scalars.GAIN} <= set(parts.IMPORTANCE)


def test_every_parameter_is_taken_by_some_part_and_its_default_is_in_its_range():
    taken = {
        name for choice in parts.CATALOGUE.values() for part in choice.values() for name in part.parameters
    }
    assert taken == set(parts.PARAMETERS)
    assert all(parameter.accepts(parameter.default) for parameter in parts.PARAMETERS.values())
    for row in ALGORITHMS.values():
        assert set(row.composition.changes) <= set(row.composition.parameters)


def test_no_code_asks_for_the_name_of_an_algorithm():
    for path in (ROOT / "offline_rec" / "objectives").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare | ast.Match):
                literals = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)}
                assert not literals & set(NAMES), path


def test_documentation_holds_the_table_as_it_is():
    text = DOCS.read_text(encoding="utf-8")
    assert text.split("<!-- generated -->\n")[1].strip() == markdown().strip()


def test_description_has_the_same_facts_for_every_row():
    rows = describe()
    assert len(rows) == len(NAMES)
    assert {tuple(row) for row in rows} == {tuple(rows[0])}


def test_table_and_package_load_without_torch():
    script = (
        "import sys, offline_rec, offline_rec.algorithms\n"
        "from offline_rec.algorithms import algorithm\n"
        "algorithm('m2po').composition.changed(budget=0.1)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
        "assert 'objective' in dir(offline_rec)\n"
        "assert callable(offline_rec.objective)\n"
        "assert 'torch' in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_unknown_public_names_are_attribute_errors():
    import offline_rec

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        offline_rec.nothing  # noqa: B018
