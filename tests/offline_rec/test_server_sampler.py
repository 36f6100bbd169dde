"""Sampling from a server: the right distribution through HTTP, and what servers do wrong."""

import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from data_tools.errors import ConfigError, DataError, RecError
from offline_rec.sampling.sampler import Prompt, SamplingParams
from offline_rec.sampling.server_sampler import ServerSampler
from offline_rec.sampling.servers import Connection, Patience, ServerFailed, root
from offline_rec.sampling.vocabulary import Vocabulary
from tests import tiny
from tests.offline_rec.drawn import assert_drawn_from, by_plain_forward
from tests.offline_rec.openai_server import FakeServer, serving, wait_until

PROMPTS = [f"{i}+{i * i}=" for i in range(12)]
PARAMS = SamplingParams(max_tokens=6, seed=3)
QUICK = Patience(timeout=5, attempts=4, pause=0.01)
PROBES = 5
"""Requests with which a server is examined."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny.tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Any:
    torch.set_num_threads(1)
    policy = tiny.model(len(tokenizer), seed=1)
    with torch.no_grad():
        policy.lm_head.weight[3] *= 3
    return policy


@pytest.fixture
def server(model: Any, tokenizer: Any) -> Iterator[FakeServer]:
    with serving(FakeServer(model, tokenizer)) as running:
        yield running


def sampler_of(*servers: FakeServer, **settings: Any) -> ServerSampler:
    connection = Connection([s.url for s in servers], **{"patience": QUICK, **settings})
    return ServerSampler(connection, Vocabulary.of(servers[0].model, servers[0].tokenizer))


def after_probes(*answers: Any) -> Any:
    """A behaviour that gives these answers, one each, to the first requests after a server was examined."""
    return lambda number, body: dict(enumerate(answers, PROBES)).get(number)


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 5}], ids=str)
def test_logprobs_are_those_of_a_forward_pass(server: FakeServer, changes: dict[str, float]) -> None:
    params = replace(PARAMS, **changes)
    samples = list(itertools.chain(*sampler_of(server).sample(PROMPTS, 4, params)))
    assert {s.finish_reason for s in samples} == {"stop", "length"}
    for sample in samples:
        np.testing.assert_allclose(sample.logprobs, by_plain_forward(server.model, sample, params), atol=1e-4)
        assert (sample.finish_reason == "stop") == (sample.response_ids[-1] == 3)
        assert sample.text == server.tokenizer.decode(sample.response_ids, skip_special_tokens=True)


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.7, "top_p": 0.9}], ids=str)
def test_frequencies_of_whole_responses_match_their_probabilities(changes: dict[str, float]) -> None:
    tokenizer = tiny.tokenizer("abc")
    model = tiny.model(len(tokenizer), seed=2, std=0.15)
    params = SamplingParams(max_tokens=3, seed=11, **changes)
    with serving(FakeServer(model, tokenizer)) as running:
        groups = sampler_of(running).sample(["ab"] * 10, 600, params)
    assert_drawn_from(model, list(itertools.chain(*groups)), params)


def test_prompts_come_in_any_order_and_results_in_theirs(server: FakeServer) -> None:
    first = server.tokenizer(PROMPTS[0])["input_ids"]

    def behave(number: int, body: Any) -> None:
        if body["prompt"] == first:
            wait_until(lambda: server.answered >= PROBES + 5)

    server.behave = behave
    order = []
    sampler = sampler_of(server, concurrency=3)
    for number, samples in sampler.stream(PROMPTS, 2, PARAMS):
        order.append(number)
        assert {server.tokenizer.decode(s.prompt_ids) for s in samples} == {PROMPTS[number]}
    assert sorted(order) == list(range(len(PROMPTS)))
    assert order[0] != 0
    seen: list[int] = []
    found = sampler.sample(PROMPTS, 2, PARAMS, progress=seen.append)
    assert [server.tokenizer.decode(group[0].prompt_ids) for group in found] == PROMPTS
    assert sum(seen) == 2 * len(PROMPTS)


def test_each_prompt_has_a_seed_of_its_own_that_skipping_others_does_not_change(server: FakeServer) -> None:
    sampler = sampler_of(server)
    prompts = ["1", "2", "1"]
    whole = {s["seed"] for s in (sampler.sample(prompts, 2, PARAMS), server.requests[PROBES:])[1]}
    assert len(whole) == 3
    del server.requests[:]
    assert [number for number, _ in sampler.stream(prompts, 2, PARAMS, skip={0, 1})] == [2]
    (request,) = server.requests
    assert request["seed"] in whole
    del server.requests[:]
    sampler.sample(["1"], 2, PARAMS)
    assert server.requests[0]["seed"] != request["seed"]


def test_requests_leave_nothing_to_the_defaults_of_the_server(server: FakeServer) -> None:
    sampler_of(server).sample([Prompt("?", ids=[10, 11])], 2, replace(PARAMS, temperature=0.5, top_p=0.9))
    asked = server.requests[-1]
    assert asked.pop("seed") >= 0
    assert asked == {
        "model": "policy",
        "prompt": [10, 11],
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "max_tokens": 6,
        "stop_token_ids": [3],
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logprobs": 0,
        "return_token_ids": True,
    }


def test_no_more_requests_than_asked_for_run_at_once(server: FakeServer) -> None:
    sampler = sampler_of(server, concurrency=3)
    server.behave = lambda number, body: wait_until(lambda: server.busiest >= 3) and time.sleep(0.05)
    sampler.sample(PROMPTS, 1, PARAMS)
    assert server.busiest == 3


BUSY = (429, {"Retry-After": "0"}, "slow down")
BROKEN = (500, {}, '{"error": "boom"}')
CUT = (0, {}, '{"choices": [')
NOT_JSON = (200, {}, "<html>gateway</html>")
NOT_ALL = (200, {}, '{"choices": []}')


@pytest.mark.parametrize("trouble", [BUSY, BROKEN, CUT, NOT_JSON, NOT_ALL], ids=lambda t: f"{t[0]} {t[2]}")
def test_failures_that_pass_lose_and_double_nothing(server: FakeServer, trouble: Any) -> None:
    server.behave = after_probes(trouble, None, trouble, trouble)
    streamed = list(sampler_of(server, concurrency=4).stream(PROMPTS, 3, PARAMS))
    assert sorted(number for number, _ in streamed) == list(range(len(PROMPTS)))
    assert all(len(samples) == 3 for _, samples in streamed)
    assert len(server.requests) == PROBES + len(PROMPTS) + 3


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        (BUSY, "HTTP 429: slow down"),
        (BROKEN, "HTTP 500: .*boom"),
        (NOT_JSON, "not JSON: <html>gateway"),
        (NOT_ALL, "0 choices for n = 2"),
        (CUT, "no connection"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_failures_that_stay_are_named_after_the_last_attempt(
    server: FakeServer, trouble: Any, said: str
) -> None:
    server.behave = lambda number, body: trouble if number >= PROBES + 4 else None
    finished: dict[int, Any] = {}
    stream = sampler_of(server, concurrency=2).stream(PROMPTS, 2, PARAMS)
    with pytest.raises(ServerFailed, match=f"(?s){server.url}/v1/completions: 4 attempts failed.*{said}"):
        finished.update(stream)
    assert len(finished) == 4


def test_a_pause_that_the_server_names_is_kept(server: FakeServer) -> None:
    times = []

    def behave(number: int, body: Any) -> Any:
        times.append(time.monotonic())
        return (503, {"Retry-After": "1"}, "loading") if number == PROBES else None

    server.behave = behave
    sampler_of(server).sample(["1"], 1, PARAMS)
    assert 1.0 <= times[PROBES + 1] - times[PROBES] < 3


def test_a_server_that_is_too_slow_is_asked_again_and_then_named(server: FakeServer) -> None:
    server.behave = lambda number, body: time.sleep(1.0 if number == PROBES else 0)
    patience = Patience(timeout=0.4, attempts=2, pause=0.01)
    assert len(sampler_of(server, patience=patience).sample(["1"], 1, PARAMS)[0]) == 1
    server.behave = lambda number, body: time.sleep(1.0)
    with pytest.raises(ServerFailed, match=r"2 attempts failed in 1 s; the last: no answer within 0\.4 s"):
        sampler_of(server, patience=patience)


def test_a_refused_request_is_an_error_at_once(server: FakeServer) -> None:
    sampler = sampler_of(server)
    server.behave = lambda number, body: (400, {}, '{"message": "prompt is too long"}')
    with pytest.raises(ServerFailed, match=r"refuses the request: HTTP 400: .*prompt is too long"):
        sampler.sample(["1"], 1, PARAMS)
    assert len(server.requests) == PROBES + 1
    server.behave = lambda number, body: (401, {}, "who are you")
    with pytest.raises(ServerFailed, match="REC_SERVER_KEY"):
        sampler.sample(["1"], 1, PARAMS)


def test_what_was_finished_when_a_server_dies_is_given_and_the_rest_can_be_had_later(
    model: Any, tokenizer: Any
) -> None:
    finished: dict[int, Any] = {}
    with serving(FakeServer(model, tokenizer)) as dying:
        dying.behave = lambda number, body: CUT if number >= PROBES + 5 else None
        stream = sampler_of(dying, concurrency=2).stream(PROMPTS, 2, PARAMS)
        with pytest.raises(ServerFailed, match="4 attempts failed"):
            finished.update(stream)
    assert 0 < len(finished) < len(PROMPTS)
    with serving(FakeServer(model, tokenizer)) as fresh:
        rest = dict(sampler_of(fresh).stream(PROMPTS, 2, PARAMS, skip=finished))
        assert sorted([*finished, *rest]) == list(range(len(PROMPTS)))
        uncut = sampler_of(fresh).sample(PROMPTS, 2, PARAMS)
    both = finished | rest
    assert [s.response_ids for i in range(len(PROMPTS)) for s in both[i]] == [
        s.response_ids for group in uncut for s in group
    ]


def test_another_server_takes_over_from_one_that_dies(model: Any, tokenizer: Any) -> None:
    first, second = FakeServer(model, tokenizer), FakeServer(model, tokenizer)
    with serving(first), serving(second):
        sampler = sampler_of(first, second, concurrency=2)
        first.behave = lambda number, body: CUT
        assert all(len(group) == 2 for group in sampler.sample(PROMPTS, 2, PARAMS))
        assert wait_until(lambda: second.answered == PROBES + len(PROMPTS))


def test_load_is_shared_by_servers(model: Any, tokenizer: Any) -> None:
    first, second = FakeServer(model, tokenizer), FakeServer(model, tokenizer)
    with serving(first), serving(second):
        sampler_of(first, second, concurrency=2).sample(PROMPTS, 2, PARAMS)
        assert min(first.answered, second.answered) > PROBES


def test_closing_the_stream_ends_the_requests(server: FakeServer) -> None:
    server.behave = lambda number, body: time.sleep(0.3 if number > PROBES else 0)
    stream = sampler_of(server, concurrency=2).stream(PROMPTS, 1, PARAMS)
    next(stream)
    stream.close()
    assert wait_until(lambda: server.busy == 0)
    asked = len(server.requests)
    time.sleep(0.1)
    assert len(server.requests) == asked < PROBES + len(PROMPTS)
    assert not any(thread.name.startswith("rec-") for thread in threading.enumerate())


def test_a_server_that_is_not_there_is_named() -> None:
    tokenizer = tiny.tokenizer("abc")
    vocabulary = Vocabulary.of(tiny.model(len(tokenizer)), tokenizer)
    with pytest.raises(ServerFailed, match=r"http://127\.0\.0\.1:9/v1/models: 4 attempts.*no connection"):
        ServerSampler(Connection(["127.0.0.1:9"], patience=QUICK), vocabulary)


def test_another_tokenizer_is_found_before_anything_is_sampled(model: Any, tokenizer: Any) -> None:
    other = tiny.tokenizer("".join(reversed([chr(c) for c in range(32, 127)])) + "\n")
    with (
        serving(FakeServer(model, other)) as running,
        pytest.raises(
            DataError, match=r"serves policy with another tokenizer.*token 0 of a text is \d+ there"
        ),
    ):
        ServerSampler(Connection([running.url], patience=QUICK), Vocabulary.of(model, tokenizer))


def test_a_server_without_token_ids_is_refused(server: FakeServer) -> None:
    server.ids = False
    with pytest.raises(ServerFailed, match="gives no token ids"):
        sampler_of(server)


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("processed", [{"temperature": 0.7, "top_p": 0.9}, {}], []),
        ("tempered", [{"temperature": 0.7}, {"temperature": 0.0}], [{"top_p": 0.9}, {"top_k": 4}]),
        ("raw", [{}, {"temperature": 0.0}], [{"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 4}]),
    ],
)
def test_logprobs_of_another_distribution_are_refused(
    server: FakeServer, kind: str, good: list[dict[str, float]], bad: list[dict[str, float]]
) -> None:
    server.kind = kind
    sampler = sampler_of(server)
    for changes in good:
        params = replace(PARAMS, **changes)
        sample, _ = sampler.sample(["1"], 2, params)[0]
        if params.temperature:
            expected = by_plain_forward(server.model, sample, params)
            np.testing.assert_allclose(sample.logprobs, expected, atol=1e-4)
        else:
            assert set(sample.logprobs) == {0.0}
    for changes in bad:
        with pytest.raises(ConfigError, match="not of the distribution drawn from"):
            sampler.sample(["1"], 1, replace(PARAMS, **changes))


def test_no_seed_is_sent_where_samples_of_one_seed_are_all_the_same(server: FakeServer) -> None:
    server.shared_seeds = True
    sampler_of(server).sample(["1"], 2, PARAMS)
    assert "seed" not in server.requests[-1]


def test_an_end_that_the_model_does_not_know_is_an_error(server: FakeServer) -> None:
    server.behave = after_probes(
        (
            200,
            {},
            '{"choices": [{"index": 0, "finish_reason": "stop", "token_ids": [9], '
            '"logprobs": {"token_logprobs": [-1.0]}}]}',
        ),
    )
    with pytest.raises(DataError, match="said to end by 'stop', but its last token is 9"):
        sampler_of(server).sample(["1"], 1, PARAMS)


def test_names_and_addresses_are_checked(server: FakeServer) -> None:
    with pytest.raises(ConfigError, match="does not serve gpt; it serves policy"):
        sampler_of(server, model="gpt")
    with pytest.raises(ConfigError, match="no server is named"):
        Connection([])
    assert root("host:8000/v1/") == "http://host:8000"
    assert root("https://host/base/v1") == "https://host/base"
    with pytest.raises(RecError, match="not the address"):
        root("ftp://host")


def test_a_prompt_that_leaves_no_room_is_refused_before_anything_is_sampled(server: FakeServer) -> None:
    with pytest.raises(DataError, match="512 positions"):
        sampler_of(server).sample(["1", "1" * 510], 1, PARAMS)
    assert len(server.requests) == PROBES
