"""Public sets of graded responses: groups in rows, known faults, references. Values by hand."""

import json
from pathlib import Path

import pytest

from data_tools import readers
from tests.data_tools.logged import collected, lines, log_of, reason_of, rollouts, row_of, rows_of

CASES = Path(__file__).parents[2] / "cases" / "hf_sets"
JARS = "A crate holds 6 jars. How many jars are in 7 crates?"
BOLT = "Name one tool that tightens a hex bolt."
SETS = {
    "hf_openr1_math_220k.parquet": ("openr1-math", 4),
    "hf_numinamath_1_5.parquet": ("numina-math", 2),
    "hf_ultrafeedback.jsonl": ("ultrafeedback", 4),
    "hf_helpsteer2.jsonl": ("helpsteer2", 4),
    "gsm8k_example_model_solutions.jsonl": ("gsm8k-solutions", 8),
}


def case(name):
    return (CASES / name).read_bytes()


@pytest.mark.parametrize("name", SETS)
def test_every_set_is_told_by_its_content_and_collected_once(tmp_path, name):
    assert readers.detect(log_of(case(name))).name == SETS[name][0]
    assert collected(tmp_path, CASES / name).total.kept == SETS[name][1]
    assert collected(tmp_path, CASES / name).total.kept == 0


def test_generations_of_a_problem_are_its_group():
    rows = rows_of(case("hf_openr1_math_220k.parquet"))
    assert [(row["prompt"], row["response"], row["reward"]) for row in rows] == [
        (JARS, "<think>\n6*7\n</think>\nSeven crates of 6 make 42 jars.", 1.0),
        (JARS, "<think>\n7+6 and so", 0.0),
        (BOLT, "An Allen key.", 1.0),
        (BOLT, "A spoon.", 0.0),
    ]
    groups = [row["group_id"] for row in rows]
    assert groups[0] == groups[1] != groups[2] == groups[3]
    assert [row["finish_reason"] for row in rows] == ["stop", "length", None, None]
    assert [row["flags"] for row in rows] == [[], ["truncated"], [], []]
    extra = json.loads(rows[1]["extra"])
    assert (extra["uuid"], extra["solution"], extra["is_reasoning_complete"]) == ("uu-0", "6*7", False)
    assert extra["messages"][1]["content"] == "Seven crates of 6 make 42 jars."
    assert "messages" not in json.loads(rows[2]["extra"])  # they are the problem and the first generation


def test_llama_judges_where_math_verify_did_not():
    record = {
        "problem": "q",
        "generations": ["a", "b", "c"],
        "correctness_math_verify": [False, None, None],
        "correctness_llama": [True, True, None],
    }
    assert [row["reward"] for row in rows_of(lines(record))] == [0.0, 1.0, None]
    del record["correctness_math_verify"]
    assert [row["reward"] for row in rows_of(lines(record))] == [1.0, 1.0, None]


def test_verdicts_of_another_length_are_nobodys():
    record = {"problem": "q", "generations": ["a", "b"], "correctness_math_verify": [True]}
    rows = rows_of(lines(record))
    assert [(row["reward"], row["flags"]) for row in rows] == [(None, ["column_length"])] * 2
    assert reason_of({**record, "generations": []}) == "no_response"


def test_a_reference_solution_is_flagged_and_has_no_reward():
    rows = rows_of(case("hf_numinamath_1_5.parquet"))
    assert [(row["prompt"], row["response"]) for row in rows] == [(JARS, "6*7=42"), (BOLT, "A hex key fits.")]
    assert [(row["reward"], row["flags"]) for row in rows] == [(None, ["reference"])] * 2
    assert [row["group_id"] for row in rows] == [row["prompt_hash"] for row in rows]
    assert json.loads(rows[1]["extra"])["solution_is_valid"] == "Problem not solved"


def test_completions_of_an_instruction_are_a_group_of_several_policies():
    rows = rows_of(case("hf_ultrafeedback.jsonl"))
    assert [(row["policy"], row["response"], row["reward"]) for row in rows] == [
        ("m-a", "Seven crates of 6 make 42 jars.", 8.5),
        ("m-b", "7 plus 6 gives 13 jars.", None),
        ("m-a", "An Allen key.", 9.0),
        ("m-b", "A spoon.", 2.0),
    ]
    assert json.loads(rows[0]["prompt"]) == [
        {"role": "system", "content": "Be exact."},
        {"role": "user", "content": JARS},
    ]
    groups = [row["group_id"] for row in rows]
    assert groups[0] == groups[1] != groups[2] == groups[3]
    extra = json.loads(rows[1]["extra"])
    assert (extra["fine-grained_score"], extra["overall_score"]) == (1.5, 10.0)
    assert extra["annotations"]["honesty"]["Rating"] == "N/A"
    assert [row["flags"] for row in rows] == [[], ["doubtful_reward"], [], []]


def test_a_ten_that_the_ratings_bear_out_counts():
    record = json.loads(case("hf_ultrafeedback.jsonl").splitlines()[0])
    record["completions"][1]["fine-grained_score"] = 4.5
    record["completions"][1]["custom_system_prompt"] = "Be kind."
    first, second = rows_of(lines(record))
    assert (second["reward"], second["flags"]) == (10.0, [])
    assert first["group_id"] == second["group_id"]
    assert first["prompt_hash"] != second["prompt_hash"]


def test_helpfulness_is_the_overall_rating():
    rows = rows_of(case("hf_helpsteer2.jsonl"))
    assert [row["reward"] for row in rows] == [4.0, 1.0, 4.0, 1.0]
    assert rows[0]["group_id"] == rows[1]["group_id"] != rows[2]["group_id"] == rows[3]["group_id"]
    assert json.loads(rows[1]["extra"]) == {"correctness": 0, "coherence": 4, "complexity": 1, "verbosity": 1}


def test_a_line_of_gsm8k_solutions_holds_an_answer_of_each_policy(tmp_path):
    rows = rows_of(case("gsm8k_example_model_solutions.jsonl"))
    assert [(row["policy"], row["reward"]) for row in rows[:4]] == [
        ("6b_finetuning", 1.0),
        ("6b_verification", 0.0),
        ("175b_finetuning", 1.0),
        ("175b_verification", 0.0),
    ]
    assert rows[5]["response"] == "A spoon.\nA: x"
    assert (rows[5]["prompt"], len({row["group_id"] for row in rows})) == (BOLT, 2)
    assert json.loads(rows[4]["extra"]) == {"ground_truth": "work shown\nA: allen key"}
    excerpt = CASES.parent / "gsm8k_excerpt.jsonl"
    report = collected(tmp_path, excerpt)
    assert report.logs[0].format == "gsm8k-solutions"
    assert report.total.kept == 4 * len(excerpt.read_bytes().splitlines())
    assert len({row["group_id"] for row in rollouts(tmp_path)}) == report.total.kept // 4


def test_a_question_without_solutions_has_no_response():
    first = json.loads(case("gsm8k_example_model_solutions.jsonl").splitlines()[0])
    data = lines(first, {"question": "q", "ground_truth": "1"})
    assert len(rows_of(data)) == 4
    assert (
        row_of({"question": "q", "ground_truth": "1", "m": {"solution": "a", "is_correct": None}})["reward"]
        is None
    )
