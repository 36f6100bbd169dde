"""`refresh` from servers that fail: what is said, and that no row is lost or doubled when it goes on."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import data_tools
from cli.main import rec
from data_tools.errors import DataError, RecError
from offline_rec import rewards
from offline_rec.models.policy import Policy
from offline_rec.sampling.choose import SamplerSettings
from offline_rec.sampling.refresh import journal_folder, refresh
from offline_rec.sampling.sampled_rows import Task
from offline_rec.sampling.sampler import SamplingParams
from offline_rec.sampling.servers import ServerFailed
from tests import tiny
from tests.offline_rec.openai_server import FakeServer, serving

N, COUNT = 2, 8
PARAMS = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=4, seed=4)
ROWS = """SELECT response_id, group_id, prompt, response, response_ids, reward, policy_version, extra
    FROM rollouts ORDER BY response_id"""
CUT = (0, {}, '{"choices": [')
TROUBLES = {
    "busy": ((429, {"Retry-After": "0"}, "slow down"), "HTTP 429: slow down"),
    "broken": ((500, {"Retry-After": "0"}, '{"error": "boom"}'), "HTTP 500: .*boom"),
    "cut": (CUT, "no connection"),
    "malformed": ((200, {}, '{"choices": [{"index": 0'), r"an answer that is not JSON: {\"choices\""),
    "not as asked": ((200, {}, '{"choices": [{"index": 0}, {"index": 1}]}'), "not as asked for"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny.save(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def served(model: Path) -> Callable[[], FakeServer]:
    policy = Policy.load(model, device="cpu")
    return lambda: FakeServer(policy.model, tiny.tokenizer())


@pytest.fixture
def ds(tmp_path: Path) -> Any:
    return data_tools.open(str(tmp_path / "ds"), create=True)


def run(ds: Any, model: Path, server: FakeServer, **options: Any) -> Any:
    task = Task([f"{i}+{i}=" for i in range(COUNT)], {"answers": [str(2 * i) for i in range(COUNT)]})
    settings = {"attempts": 2, "timeout": 20.0, "concurrency": 1, "verify": False}
    settings |= options.pop("settings", {})
    sampler = SamplerSettings("server", urls=(server.url,), **settings)
    given = {"n": N, "params": PARAMS, "reward": rewards.get("exact"), "sampler": sampler}
    given |= {} if options.get("resume") else {"prompts": task}
    return refresh(ds, model, **given | options)


def asked(server: FakeServer) -> list[Any]:
    """Prompts that samples were asked for, without the questions by which a server is examined."""
    return [body["prompt"] for body in server.requests if body["max_tokens"] == PARAMS.max_tokens]


def from_request(server: FakeServer, first: int, told: Any, until: int = 10**9) -> None:
    """Answer the requests for samples so from number `first` on; a function may sleep first."""

    def behave(number: int, body: Any) -> Any:
        mine = len(asked(server))  # with this one
        return told if body["max_tokens"] == PARAMS.max_tokens and first < mine <= until else None

    server.behave = behave


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Path, served: Any) -> Any:
    """The rows of a refresh with which nothing went wrong."""
    done = data_tools.open(str(tmp_path_factory.mktemp("whole") / "ds"), create=True)
    with serving(served()) as server:
        run(done, model, server, settings={"verify": True})
    return done.sql(ROWS)


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_server_that_fails_for_a_while_costs_no_row_and_doubles_none(
    ds: Any, model: Path, served: Any, whole: Any, trouble: str
) -> None:
    with serving(served()) as server:
        from_request(server, 2, TROUBLES[trouble][0], until=3)
        report = run(ds, model, server)
        assert len(asked(server)) == COUNT + 1
    assert (report.kept, report.duplicate, report.rejected) == (COUNT * N, 0, 0)
    assert ds.sql(ROWS).equals(whole)


@pytest.mark.parametrize("trouble", ["busy", "broken", "malformed"])
def test_a_server_that_goes_on_failing_is_named_and_the_refresh_resumed_from_another(
    ds: Any, model: Path, served: Any, whole: Any, trouble: str
) -> None:
    answer, said = TROUBLES[trouble]
    with serving(served()) as server:
        from_request(server, 3, answer)
        with pytest.raises(
            ServerFailed, match=f"(?s){server.url}/v1/completions: 2 attempts .*{said}"
        ) as told:
            run(ds, model, server)
    assert f"answers to 3 of {COUNT} prompts are kept: with --resume" in told.value.hint
    assert ds.sql(ROWS).num_rows == 0
    with serving(served()) as server:
        assert run(ds, model, server, resume=True).kept == COUNT * N
        assert len(asked(server)) == COUNT - 3
    assert ds.sql(ROWS).equals(whole)
    assert not journal_folder(ds, "m").exists()


def test_a_server_that_is_gone_in_the_middle_is_named(ds: Any, model: Path, served: Any, whole: Any) -> None:
    with serving(served()) as server:
        ended = False

        def behave(number: int, body: Any) -> Any:
            nonlocal ended
            ended = ended or len(asked(server)) > 5
            return CUT if ended else None

        server.behave = behave
        with pytest.raises(ServerFailed, match=r"no connection") as told:
            run(ds, model, server, settings={"concurrency": 3})
        url = server.url
    kept = int(told.value.hint.split("answers to ")[1].split()[0])
    assert 0 < kept < COUNT
    # Nobody listens there any more: still nothing is lost.
    with pytest.raises(ServerFailed, match=r"/v1/models: 2 attempts failed.*no connection"):
        run(ds, model, FakeServer(None, None, url=url), resume=True)
    with serving(served()) as server:
        run(ds, model, server, resume=True)
        assert len(asked(server)) == COUNT - kept
    assert ds.sql(ROWS).equals(whole)


def test_answers_that_come_too_late_are_not_counted_twice(
    ds: Any, model: Path, served: Any, whole: Any
) -> None:
    with serving(served()) as server:
        server.behave = lambda number, body: time.sleep(0.9) if len(asked(server)) in (2, 5) else None
        assert run(ds, model, server, settings={"timeout": 0.5}).kept == COUNT * N
        assert len(asked(server)) == COUNT + 2
    assert ds.sql(ROWS).equals(whole)


def test_a_server_that_stays_slow_is_named_and_the_refresh_resumed(
    ds: Any, model: Path, served: Any, whole: Any
) -> None:
    with serving(served()) as server:
        server.behave = lambda number, body: time.sleep(0.8) if len(asked(server)) > 4 else None
        with pytest.raises(ServerFailed, match=r"2 attempts failed .*no answer within 0\.4 s"):
            run(ds, model, server, settings={"timeout": 0.4})
        server.behave = lambda number, body: None
        run(ds, model, server, resume=True)
    assert ds.sql(ROWS).equals(whole)


def test_another_tokenizer_is_refused_at_the_start_and_when_it_goes_on(
    ds: Any, model: Path, served: Any, whole: Any
) -> None:
    other = FakeServer(served().model, tiny.tokenizer("".join(chr(c) for c in range(126, 31, -1)) + "\n"))
    with serving(other), pytest.raises(DataError, match="another tokenizer than the model's"):
        run(ds, model, other)
    assert not journal_folder(ds, "m").exists()
    with serving(served()) as server:
        from_request(server, 3, CUT)
        with pytest.raises(ServerFailed):
            run(ds, model, server)
    with serving(other), pytest.raises(DataError, match="another tokenizer than the model's") as told:
        run(ds, model, other, resume=True)
    assert "start the server with the directory" in told.value.hint
    assert f"answers to 3 of {COUNT}" in told.value.hint
    with serving(served()) as server:
        run(ds, model, server, resume=True)
    assert ds.sql(ROWS).equals(whole)


def test_other_weights_are_refused_when_it_goes_on(
    ds: Any, model: Path, served: Any, whole: Any, tmp_path: Path
) -> None:
    with serving(served()) as server:
        from_request(server, 3, CUT)
        with pytest.raises(ServerFailed):
            run(ds, model, server)
    other = Policy.load(tiny.save(tmp_path / "other", seed=1), device="cpu")
    with serving(FakeServer(other.model, tiny.tokenizer())) as wrong:
        with pytest.raises(RecError, match="does not draw from the weights that it should"):
            run(ds, model, wrong, settings={"verify": True}, resume=True)
        assert asked(wrong) == []
    with serving(served()) as server:
        run(ds, model, server, resume=True)
    assert ds.sql(ROWS).equals(whole)


def test_the_command_line_says_what_failed_and_goes_on(
    model: Path, served: Any, whole: Any, tmp_path: Path
) -> None:
    folder, prompts = tmp_path / "ds", tmp_path / "prompts.jsonl"
    asks = [{"prompt": f"{i}+{i}=", "answers": str(2 * i)} for i in range(COUNT)]
    prompts.write_text("".join(json.dumps(one) + "\n" for one in asks))
    options = "--reward exact -n 2 --temperature 0.7 --top-p 0.9 --max-tokens 4 --seed 4 --concurrency 1"
    command = ["refresh", str(folder), "--model", str(model), *options.split()]
    with serving(served()) as server:
        from_request(server, 3, (400, {}, "the engine has died"))
        failed = CliRunner().invoke(rec, [*command, "--prompts", str(prompts), "--url", server.url])
        assert failed.exit_code == 1
        assert "refuses the request: HTTP 400: the engine has died\nhint: " in failed.stderr
        assert f"answers to 3 of {COUNT} prompts are kept: with --resume" in failed.stderr
        server.behave = lambda number, body: None
        done = CliRunner().invoke(rec, [*command, "--resume", "--url", server.url])
        assert done.exit_code == 0, done.output
    assert data_tools.open(str(folder)).sql(ROWS).equals(whole)
