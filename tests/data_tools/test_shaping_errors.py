"""What a user reads when a shaping cannot be: which field, which rows, and what to do."""

import pytest

from data_tools.errors import ConfigError, DataError
from data_tools.shaping import Shaping, compile, shape, validate
from tests.data_tools.shaping_cases import connect, rewards, row, shaped


def error_of(kind, rows, **fields):
    with pytest.raises(kind) as caught:
        shaped(rows, **fields)
    return caught.value


@pytest.mark.parametrize(
    ("fields", "message", "hint"),
    [
        ({"where": "rewrd > 0"}, "where = 'rewrd > 0': Referenced column \"rewrd\" not found", "reward?"),
        ({"baseline": "meen"}, "baseline = 'meen'", "did you mean mean?"),
        ({"scale": "stdd"}, "scale = 'stdd'", "did you mean std?"),
        ({"drop": "ballance"}, "drop = 'ballance'", "did you mean balance?"),
        ({"group_by": "promt_hash"}, "group_by = 'promt_hash'", "prompt_hash?"),
        ({"expert": "polcy = 'a'"}, "expert = ", "did you mean policy?"),
        ({"weight": "red_wieght(1)"}, "weight = 'red_wieght(1)'", "did you mean red_weight(t)?"),
        ({"weight": "red_weight(1, 2, 3)"}, "weight = ", "red_weight(t, advantage)"),
        ({"weight": "flor(reward)"}, "weight = 'flor(reward)'", 'Did you mean "floor"?'),
        ({"weight": "avg(reward)"}, "weight = 'avg(reward)'", "over (partition by group_key)"),
        ({"where": "avg(reward) > 1"}, "where = ", "over (partition by group_key)"),
        (
            {"where": "advantage > 0"},
            "where = ",
            "advantage is only known in drop, advantage, weight, keep, priority",
        ),
        ({"baseline": "weight"}, "baseline = ", "weight is only known in keep, priority"),
        ({"keep": "extra->>'n' > 2"}, "keep = ", "explicit cast"),
        ({"weight": "policy"}, "weight = 'policy'", ""),
        ({"weight": "red_weight(0)"}, "weight = 'red_weight(0)': red_weight(t): t must be above 0", ""),
        ({"weight": "staleness_halflife(-1)"}, "k must be above 0", ""),
        ({"priority": "nothing_like_it"}, "priority = ", "DESCRIBE rollouts"),
        ({"where": "policy = 'p'", "weight": "wait"}, "weight = 'wait'", "weight"),
    ],
)
def test_bad_sql_names_the_field_and_the_nearest_name(fields, message, hint):
    error = error_of(ConfigError, [row("a", 1.0, policy="p", extra="{}", staleness=1)], **fields)
    assert message in error.message.replace("\n", " ") or message in str(error)
    assert hint in str(error)
    assert len(str(error).splitlines()) <= 3


@pytest.mark.parametrize(
    ("field", "text", "message"),
    [
        ("weight", "1, 2", "not one expression"),
        ("weight", "1 AS w", "not one expression"),
        ("weight", "1) + (2", "syntax error"),
        ("weight", "red_weight(1", "syntax error"),
        ("weight", "1; DROP TABLE rollouts", "SELECT"),
        ("where", "true ORDER BY reward", "not one expression"),
        ("where", "reward FROM rollouts", "not one expression"),
        ("where", "*", "not one expression"),
        ("where", "COLUMNS('reward') > 1", "star has no meaning"),
        ("where", "response_id = ?", "parameter has no meaning"),
        ("where", "response_id IN (FROM 'ids.parquet')", "ids.parquet"),
        ("where", "response_id IN (SELECT content FROM read_text('/etc/passwd'))", "read_text"),
        ("where", "getenv('HOME') = ''", "getenv"),
        ("keep", "random() < 0.5", "random differs from run to run"),
        ("where", "sampled_at > now() - INTERVAL 1 DAY", "now differs from run to run"),
        ("where", "sampled_at > current_date", "current_date differs from run to run"),
        ("weight", "len(response_ids)", "response_ids is a token column"),
        ("where", "1 IN (SELECT len(r.loss_mask) FROM rollouts r)", "loss_mask is a token column"),
    ],
)
def test_fields_take_one_repeatable_expression_over_scalar_columns(field, text, message):
    with pytest.raises(ConfigError, match=field) as caught:
        compile(Shaping(**{field: text}))
    assert message in str(caught.value)


def test_where_that_matches_nothing_counts_the_rows_of_every_split_with_and_without_it():
    rows = [row("a", 1.0, policy="x"), row("b", 1.0, policy="x"), row("c", 1.0, policy="y", split="holdout")]
    error = error_of(DataError, rows, where="policy = 'y'")
    assert error.message == "where = \"policy = 'y'\" matches none of the 2 rows of split train"
    assert error.hint == "rows by split: holdout 1, train 2; of them match holdout 1, train 0"


def test_nothing_left_says_which_field_left_nothing():
    assert "no rollouts" in error_of(DataError, []).message
    assert error_of(DataError, [row("a", 1.0, split="holdout")]).message == "split train has no rows"
    assert "none of the 2 rows has a reward" in error_of(DataError, [row("a"), row("b")]).message
    assert "drop = 'zero-variance'" in error_of(DataError, rewards(1, 1), drop="zero-variance").message
    assert (
        "keep = 'advantage > 9' leaves none of 2 rows"
        in error_of(DataError, rewards(0, 1), keep="advantage > 9").message
    )


@pytest.mark.parametrize(
    ("fields", "message", "hint"),
    [
        (
            {"weight": "advantage"},
            "weight = 'advantage' is not a finite number of at least 0 in 1 row: g0 (-0.5)",
            "least",
        ),
        ({"weight": "red_weight(1e-4)"}, "g1 (inf)", "least(red_weight(1e-4), 10)"),
        ({"weight": "ln(-reward)"}, "in 2 rows: g0 (-inf), g1 (nan)", "keep"),
        (
            {"weight": "staleness_halflife(5)"},
            "in 2 rows: g0 (null), g1 (null)",
            "where staleness is not null",
        ),
        ({"weight": "age_halflife(5)"}, "g0 (null)", "coalesce(age_days, ...)"),
        (
            {"priority": "-reward"},
            "priority = '-reward' is not a finite number of at least 0 in 1 row: g1 (-1)",
            "",
        ),
        (
            {"baseline": "(extra->>'value')::double"},
            "is not a finite number in 2 rows: g0 (null)",
            "extra is null there",
        ),
        ({"scale": "0"}, "is not a finite number in 2 rows: g0 (-inf)", "scale = '0'"),
        (
            {"weight": "1e39"},
            "weight = '1e39' is too large to train with (beyond 3.4e+38) in 2 rows",
            "least",
        ),
        ({"shift": "-1e308"}, "the advantage is too large to train with (beyond 3.4e+38)", "baseline"),
        ({"unrewarded": "keep"}, "the advantage is not a finite number in 1 row: g2 (null)", "advantage = 1"),
    ],
)
def test_number_that_training_cannot_use_names_its_rows(fields, message, hint):
    error = error_of(DataError, rewards(0, 1, None), **fields)
    assert message in error.message
    assert hint in error.hint


def test_rows_that_keep_leaves_out_need_no_weight():
    rows = [row("a", 1.0, staleness=1), row("b", 0.0)]
    found = shaped(rows, weight="staleness_halflife(1)", keep="staleness is not null")
    assert [r["weight"] for r in found.values()] == [0.5]


def test_only_some_of_many_wrong_rows_are_named():
    error = error_of(DataError, [row(f"r{i}", float(i)) for i in range(40)], weight="-1 - reward")
    assert "in 40 rows: r0 (-1), r1 (-2), r10 (-11), r11 (-12), r12 (-13), ..." in error.message


def test_wrong_weight_in_a_later_batch_of_the_stream_is_found():
    with connect([row(f"r{i:04}", float(i)) for i in range(5000)]) as con:
        stream = shape(con, Shaping(weight="4000 - reward"), rows_per_batch=2048)
        with pytest.raises(DataError, match=r"r4001 \(-1\)"):
            stream.read_all()


def test_validate_raises_what_shape_would():
    with connect(rewards(0, 1)) as con:
        validate(con, Shaping())
        with pytest.raises(DataError, match="weight = '-1'"):
            validate(con, Shaping(weight="-1"))


def test_row_without_a_group_key_is_named_instead_of_joining_others():
    rows = [row("a", 1.0, extra='{"intent": "x"}'), row("b", 0.0, extra="{}")]
    error = error_of(DataError, rows, group_by="extra->>'intent'")
    assert error.message == "group_by = \"extra->>'intent'\" is null for the response b"
    assert "coalesce(extra->>'intent', response_id)" in error.hint
    assert len(shaped(rows, group_by="coalesce(extra->>'intent', response_id)")) == 2


def test_last_turn_must_be_one_row_where_it_matters():
    rows = [row("a", 1.0, trajectory_id="t"), row("b", 0.0, trajectory_id="t")]
    assert (
        "trajectory 't' has two rewards at its last turn: responses a and b"
        in error_of(DataError, rows).message
    )
    assert len(shaped([r | {"reward": 1.0} for r in rows])) == 2


def test_unknown_field_names_the_nearest():
    with pytest.raises(ConfigError, match=r"'wieght'\ndid you mean weight\?"):
        Shaping.parse({"wieght": "1"})
    with pytest.raises(ConfigError, match="tau = 0"):
        Shaping.parse({"tau": 0})


def test_value_that_cannot_be_converted_names_the_field():
    rows = [row("a", 1.0, extra='{"w": "2"}'), row("b", 0.0, extra='{"w": "many"}')]
    error = error_of(ConfigError, rows, weight="(extra->>'w')::double")
    assert error.message.startswith("weight = \"(extra->>'w')::double\": Could not convert string 'many'")


def test_wrong_value_in_the_middle_of_a_stream_names_the_field():
    rows = [row(f"r{i:04}", float(i), extra=f'{{"w": "{i if i < 3000 else "many"}"}}') for i in range(4000)]
    with connect(rows) as con, pytest.raises(ConfigError, match="weight = "):
        shape(con, Shaping(weight="(extra->>'w')::double"), rows_per_batch=2048).read_all()
