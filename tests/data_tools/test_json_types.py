import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_tools.collecting.json_types import MAX_FIELDS, NOTHING, merged, sql_type


def type_of(*values):
    kind = NOTHING
    for value in values:
        kind = merged(kind, value)
    return sql_type(kind)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, None], "BIGINT"),
        ([1, 2.5], "DOUBLE"),
        ([1, 2**63], "HUGEINT"),
        ([2**63, 0.5], "DOUBLE"),
        ([True, False], "BOOLEAN"),
        ([True, 1], "JSON"),
        (["2026-01-05", "12:00"], "VARCHAR"),
        (["a", 1], "JSON"),
        ([None], "JSON"),
        ([[]], "JSON[]"),
        ([[1], [2.5, None]], "DOUBLE[]"),
        ([[1, 2**64 - 1]], "HUGEINT[]"),
        ([[1, "a"]], "JSON[]"),
        ([[1], "a"], "JSON"),
        (["a", [1]], "JSON"),
        ([[[1], [2]], [[0.5]]], "DOUBLE[][]"),
        ([{"a": 1}, {"b": [True]}], 'STRUCT("a" BIGINT, "b" BOOLEAN[])'),
        ([{"a": 1}, 1], "JSON"),
        ([1, {"a": 1}], "JSON"),
        ([{"a": 1}, None, {"a": {"b": "x"}}], 'STRUCT("a" JSON)'),
        ([[{"role": "user"}, {"role": "tool", "n": 1}]], 'STRUCT("role" VARCHAR, "n" BIGINT)[]'),
        ([{"A": 1, "a": 2}], "JSON"),
        ([{"": 1}], "JSON"),
        ([{}], "JSON"),
        ([{'say "hi"': 1}], 'STRUCT("say ""hi""" BIGINT)'),
        ([{str(n): n for n in range(MAX_FIELDS + 1)}, {"later": 1}], "JSON"),
    ],
)
def test_the_type_of_a_field_is_what_all_its_values_are(values, kind):
    assert type_of(*values) == kind


SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text("ab")
)
NESTED = st.recursive(
    SCALARS, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text("ab"), x), max_leaves=6
)


@given(st.lists(NESTED, min_size=1, max_size=4), st.randoms())
def test_the_type_does_not_depend_on_the_order_of_records(values, random):
    shuffled = list(values)
    random.shuffle(shuffled)
    assert sorted(type_of(*shuffled)) == sorted(type_of(*values))
