import json

import pytest

from data_tools.collecting.prompts import (
    canonical_json,
    canonical_prompt,
    parse_prompt,
    response_parts,
    split_conversation,
    text_of,
)

USER = {"role": "user", "content": "hi"}


def test_a_list_of_messages_is_a_chat_and_anything_else_is_text():
    assert parse_prompt(json.dumps([USER])) == [USER]
    for text in ("hi", "[1, 2]", "[]", '[{"content": "no role"}]', '{"role": "user"}', '[{"role": "user"'):
        assert parse_prompt(text) == text


@pytest.mark.parametrize(
    "other",
    [
        {"content": "hi", "role": "user"},
        {"role": "user", "content": "hi", "name": None, "tool_calls": []},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
    ],
)
def test_equal_prompts_have_one_canonical_form(other):
    assert canonical_prompt(json.dumps([other])) == canonical_prompt(json.dumps([USER]))


def test_different_prompts_have_different_canonical_forms():
    prompts = [
        "hi",
        json.dumps([USER]),
        json.dumps([USER, USER]),
        json.dumps([USER | {"role": "system"}]),
        json.dumps([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    ]
    assert len({canonical_prompt(prompt) for prompt in prompts}) == len(prompts)


def test_tool_arguments_are_equal_as_text_and_as_a_value():
    def call(arguments):
        function = {"name": "f", "arguments": arguments}
        return json.dumps([{"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}])

    assert canonical_prompt(call('{"n": 4, "a": 1}')) == canonical_prompt(call({"a": 1, "n": 4}))
    assert canonical_json('{"b": 1, "a": 2}') == canonical_json('{"a":2,"b":1}')
    assert canonical_json("no json") == "no json"


def test_text_of_nothing_is_nothing_and_not_the_word_none():
    assert text_of(None) is None
    assert text_of("None") == "None"
    assert text_of([{"type": "text", "text": "a"}, {"type": "image"}, "b"]) == "ab"


def test_response_begins_behind_the_last_turn_of_the_user():
    call, result, answer = {"role": "assistant"}, {"role": "tool"}, {"role": "assistant", "content": "4"}
    assert split_conversation([USER, call, result, answer]) == ([USER], [call, result, answer])
    assert split_conversation([USER, answer, USER, answer]) == ([USER, answer, USER], [answer])
    assert split_conversation([USER]) == ([USER], [])


def test_messages_are_kept_only_where_they_hold_more_than_text():
    assert response_parts([{"role": "assistant", "content": "a"}]) == ("a", None, [])
    assert response_parts({"role": "assistant", "content": "a", "tool_calls": []}) == ("a", None, [])
    text, messages, flags = response_parts([{"role": "assistant", "content": None, "reasoning": "hm"}])
    assert (text, flags) == ("", [])
    assert json.loads(messages) == [{"role": "assistant", "content": None, "reasoning": "hm"}]


def test_tool_arguments_become_text_and_broken_ones_are_flagged():
    def calling(arguments):
        return [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]

    def arguments_of(messages):
        return json.loads(messages)[0]["tool_calls"][0]["function"]["arguments"]

    assert arguments_of(response_parts(calling({"n": 4}))[1]) == '{"n":4}'
    _, messages, flags = response_parts(calling('{"n": 4'))
    assert arguments_of(messages) == '{"n": 4'
    assert flags == ["broken_tool_arguments"]


def test_what_is_no_message_has_no_parts():
    for value in ({"choices": []}, [1], [{"role": "user", "content": "x"}], 3, None):
        assert response_parts(value) == (None, None, [])


def test_parts_that_are_no_text_are_flagged():
    image = {"role": "assistant", "content": [{"type": "image_url"}, {"type": "text", "text": "see"}]}
    assert response_parts(image)[0] == "see"
    assert response_parts(image)[2] == ["multimodal"]
