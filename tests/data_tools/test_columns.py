from collections import Counter

from data_tools.collecting.columns import ALIASES, LOOSE, candidates, is_response, names_of, pick
from data_tools.schema import ROLLOUTS


def test_every_name_belongs_to_one_column():
    names = Counter(name for column in LOOSE for name in names_of(column))
    assert [name for name, count in names.items() if count > 1] == []
    assert ALIASES.keys() == LOOSE.keys()


def test_every_column_that_a_log_can_hold_is_a_loose_column():
    made = {
        "prompt_hash",
        "prompt_cluster",
        "source_file",
        "source_row",
        "extra",
        "n_prompt_tokens",
        "n_tokens",
        "behavior_logprob",
    }
    assert set(ROLLOUTS.names) - made <= LOOSE.keys()


def test_the_own_name_goes_before_aliases_and_a_mapped_one_before_all():
    found = candidates(["score", "map:reward", "reward", "tier"])
    assert found == {"reward": ["map:reward", "reward", "score"]}


def test_the_first_field_with_a_value_is_picked():
    names = candidates(["prompt", "question"])["prompt"]
    assert pick({"prompt": "a", "question": "b"}, names, "prompt") == "prompt"
    assert pick({"prompt": None, "question": "b"}, names, "prompt") == "question"
    assert pick({"prompt": None, "question": None}, names, "prompt") == "prompt"
    assert pick({}, names, "prompt") is None


def test_a_reward_that_is_present_and_null_is_not_replaced_by_another_field():
    names = candidates(["reward", "score"])["reward"]
    assert pick({"reward": None, "score": 1.0}, names, "reward") == "reward"
    assert pick({"score": 1.0}, names, "reward") == "score"


def test_a_response_needs_a_prompt_and_an_answer_or_a_conversation():
    assert is_response(["question", "completion"])
    assert is_response(["prompt_token_ids", "token_ids"])
    assert is_response(["messages", "reward"])
    assert not is_response(["prompt", "reward"])
    assert not is_response(["response", "reward"])
