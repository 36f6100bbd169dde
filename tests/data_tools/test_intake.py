"""What must not be stored is not in any file of the dataset, wherever in the log it stood."""

import json

import pyarrow.parquet as pq
import pytest

from data_tools.errors import ConfigError
from tests.data_tools.logged import collected, dataset, draw, lines, rollouts

EMAIL = "jane@example.com"


def log(folder, *records, data=b"", name="log.jsonl"):
    path = folder / name
    path.write_bytes(lines(*records) + data)
    return path


def stored(folder):
    """Every value of every file of the dataset, as text."""
    return "".join(
        str(pq.read_table(path).to_pylist()) for path in sorted((folder / "ds").rglob("*.parquet"))
    )


def test_nothing_written_holds_what_was_redacted(tmp_path):
    chat = [{"role": "user", "content": [{"type": "text", "text": f"I am {EMAIL}"}]}]
    function = {"name": "send", "arguments": json.dumps({"to": EMAIL})}
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    records = (
        draw(prompt=f"Write to {EMAIL}"),
        draw(response=f"Dear {EMAIL}"),
        draw(prompt=chat, tools=[{"type": "function", "function": {"name": EMAIL}}]),
        draw(response=call),
        draw(user=EMAIL, meta={"contacts": [EMAIL], EMAIL: 1}),
        draw(reward="1,5", note=EMAIL),
        draw(prompt=..., note=EMAIL),
        draw(policy_version=EMAIL),
    )
    torn = (
        f'{{"prompt": "{EMAIL}\n"a\\u0040b.com"\n'.encode()
        + b'{"x": "jane\\u0040example.com\\n4111111111111111'
    )
    report = collected(tmp_path, log(tmp_path, *records, data=torn), redact=True)
    assert report.total.kept == 6
    assert report.total.rejected == {"bad_reward": 1, "no_prompt": 1, "torn_line": 2, "not_an_object": 1}
    for secret in ("example.com", "b.com", "jane", "4111"):
        assert secret not in stored(tmp_path)
    assert report.total.redacted["email"] >= 12
    assert report.total.notes["redacted"] == 6
    assert "  1 card" not in report.lines()
    assert any("replaced: 1 card" in line for line in report.lines())


def test_a_changed_text_loses_its_ids_and_log_probs_and_no_other_does(tmp_path):
    source = log(
        tmp_path,
        draw(prompt_ids=[1, 2]),
        draw(prompt=f"for {EMAIL}", prompt_ids=[1, 3]),
        draw(response=f"to {EMAIL}"),
        draw(user=EMAIL),
    )
    collected(tmp_path, source, redact=True)
    untouched, prompt, response, extra = rollouts(tmp_path)
    assert (untouched["response_ids"], untouched["behavior_logprob"], untouched["flags"]) == (
        [7, 2],
        -0.75,
        [],
    )
    assert (extra["response_ids"], extra["behavior_logprob"], extra["flags"]) == ([7, 2], -0.75, ["redacted"])
    for row in (prompt, response):
        assert row["flags"] == ["redacted"]
        for column in ("prompt_ids", "response_ids", "behavior_logprobs", "behavior_logprob", "n_tokens"):
            assert row[column] is None
        assert row["reward"] == 1.0


def test_a_mask_that_loses_its_ids_refuses_the_row(tmp_path):
    source = log(tmp_path, draw(response=f"to {EMAIL}", loss_mask=[1, 0]))
    report = collected(tmp_path, source, redact=True)
    assert report.total.rejected == {"bad_mask": 1}
    assert EMAIL not in stored(tmp_path)


def test_ids_without_text_cannot_be_looked_through(tmp_path):
    source = log(tmp_path, draw(response=...), draw(prompt=..., prompt_ids=[1, 2]), draw(response=""), draw())
    report = collected(tmp_path, source, redact=True)
    assert report.total.rejected == {"not_redactable": 3}
    assert report.total.kept == 1


def test_siblings_stay_one_group_and_are_each_counted(tmp_path):
    prompt = f"Write to {EMAIL}"
    report = collected(
        tmp_path, log(tmp_path, *(draw(prompt=prompt, response=str(n)) for n in range(3))), redact=True
    )
    assert report.total.redacted == {"email": 3}
    assert len({row["group_id"] for row in rollouts(tmp_path)}) == 1
    assert {row["prompt"] for row in rollouts(tmp_path)} == {"Write to [EMAIL]"}


def test_collecting_again_with_redaction_adds_nothing(tmp_path):
    source = log(tmp_path, draw(prompt=EMAIL), data=b'{"torn\n')
    collected(tmp_path, source, redact=True)
    again = collected(tmp_path, source, redact=True)
    assert (again.total.kept, again.total.duplicate, again.batch) == (0, 1, None)


def test_rewards_see_what_will_be_stored(tmp_path):
    collected(
        tmp_path, log(tmp_path, draw(response=EMAIL)), redact=True, reward="(response = '[EMAIL]')::INT"
    )
    assert [row["reward"] for row in rollouts(tmp_path)] == [1.0]


def test_hashed_columns_still_tell_who_is_who_within_a_dataset_and_nowhere_else(tmp_path):
    records = [
        draw(user_id=user, meta={"session": {"id": user}}, episode_id=user) for user in ("7", 7, "8", None)
    ]
    names = ["user_id", "meta.session.id", "trajectory_id", "policy"]
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        collected(tmp_path / place, log(tmp_path, *records), hash_columns=names, policy="jane")
    columns = "extra->>'user_id' AS user, extra->>'$.meta.session.id' AS session, trajectory_id, policy"
    first, second = (rollouts(tmp_path / place, columns, "source_row") for place in ("a", "b"))
    users = [row["user"] for row in first]
    assert users[0] == users[1] != users[2]
    assert users[3] is None
    assert all(row["user"] == row["session"] == row["trajectory_id"] for row in first)
    assert not {row["user"] for row in first if row["user"]} & {row["user"] for row in second}
    assert all(len(row["policy"]) == 32 for row in first)


def test_responses_of_one_record_are_hashed_once(tmp_path):
    choice = {"message": {"role": "assistant", "content": "4"}, "finish_reason": "stop"}
    call = {
        "request": {"messages": [{"role": "user", "content": "2+2="}]},
        "response": {"choices": [choice | {"index": 0}, choice | {"index": 1}], "object": "chat.completion"},
        "meta": {"user": "jane"},
    }
    collected(tmp_path, log(tmp_path, call), hash_columns=["meta.user"])
    first, second = rollouts(tmp_path, "extra->>'$.meta.user' AS user")
    assert first == second
    assert len(first["user"]) == 32


def test_rejects_keep_no_text_where_columns_are_hashed(tmp_path):
    source = log(tmp_path, draw(user_id="jane"), draw(prompt=..., user_id="jane"), data=b'{"user_id": "jane"')
    collected(tmp_path, source, hash_columns=["user_id"])
    assert "jane" not in stored(tmp_path)
    found = dataset(tmp_path).sql("SELECT source_row, reason, raw FROM rejects ORDER BY ALL").to_pylist()
    assert [tuple(reject.values()) for reject in found] == [(2, "no_prompt", ""), (3, "torn_line", "")]


def test_a_name_that_no_record_has_is_an_error_and_nothing_is_stored(tmp_path):
    source = log(tmp_path, draw(user_id="jane"))
    with pytest.raises(ConfigError, match="no record has a field 'usr_id'") as error:
        collected(tmp_path, source, hash_columns=["usr_id"])
    assert error.value.hint == "did you mean user_id?"
    assert not dataset(tmp_path).batches()
    with pytest.raises(ConfigError, match="'prompt' cannot be hashed"):
        collected(tmp_path, source, hash_columns=["prompt"])


def test_long_responses_are_set_aside_whole(tmp_path):
    message = {"role": "assistant", "content": "x", "reasoning": "y" * 50}
    source = log(tmp_path, draw(response="é" * 10), draw(response="é" * 11), draw(response=message))
    report = collected(tmp_path, source, max_response_chars=10)
    assert report.total.rejected == {"too_long": 2}
    assert [row["response"] for row in rollouts(tmp_path)] == ["é" * 10]
    with pytest.raises(ConfigError, match="at least 1"):
        collected(tmp_path, source, max_response_chars=0)


def test_a_dry_run_needs_no_dataset(tmp_path):
    report = collected(
        tmp_path, log(tmp_path, draw(user=EMAIL)), redact=True, hash_columns=["user"], dry_run=True
    )
    assert report.total.kept == 1
    assert not (tmp_path / "ds").exists()
