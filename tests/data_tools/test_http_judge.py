"""The reward `http`: a judge behind a real server on loopback, and servers that fail in every way."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from data_tools.errors import ConfigError
from data_tools.rewards.named import get


class Server:
    """Answers chat completions by a script: what `says` makes of the question is the reply."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.open = self.most_open = 0
        self.delay = 0.0
        self.failures: list[tuple[int, dict[str, str], bytes]] = []
        self.lock = threading.Lock()

    def reply(self, question: str) -> str:
        return f"It is fine.\nScore: {question.split('points=')[-1].split()[0]}"

    @property
    def texts(self) -> list[str]:
        return [request["messages"][0]["content"] for request in self.requests]


@contextmanager
def serving(server: Server) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with server.lock:
                server.requests.append(body)
                server.headers.append(dict(self.headers))
                server.open += 1
                server.most_open = max(server.most_open, server.open)
                failure = server.failures.pop(0) if server.failures else None
            time.sleep(server.delay)
            with server.lock:
                server.open -= 1
            content = {"choices": [{"message": {"content": server.reply(body["messages"][0]["content"])}}]}
            status, headers, answer = failure or (200, {}, json.dumps(content).encode())
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            with suppress(BrokenPipeError):  # it was not waited for
                self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            return None

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}/v1"
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()


def test_the_rubric_is_filled_in_and_the_score_scaled(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    server = Server()
    with serving(server) as url:
        judge = get(f"http(url='{url}', model=m, rubric='{{tier}}|{{prompt}}|{{response}}', key=JUDGE_KEY)")
        found = judge(
            ["points=10", "points=2.5", "points=0"], prompt=["a", "{tier}", "{x}"], tier=[1, 2, "b"]
        )
        assert found == [1.0, 0.25, 0.0]
    assert sorted(server.texts) == ["1|a|points=10", "2|{tier}|points=2.5", "b|{x}|points=0"]
    assert {request["model"] for request in server.requests} == {"m"}
    assert server.headers[0]["Authorization"] == "Bearer s3cret"


def test_the_rubric_of_its_own_shows_prompt_and_response():
    server = Server()
    with serving(server) as url:
        assert get("http", url=url, model="m")(["points=7"], prompt=["2+2?"]) == [0.7]
    assert "<request>\n2+2?\n</request>" in server.texts[0]
    assert "Authorization" not in server.headers[0]


def test_what_fails_for_a_while_is_asked_again_and_what_cannot_be_had_is_null():
    server = Server()
    server.failures = [
        (500, {}, b"boom"), (429, {"Retry-After": "0.01"}, b"slow down"), (200, {}, b"<html>"),
        (200, {}, b'{"choices": []}'),
    ]  # fmt: skip
    with serving(server) as url:
        judge = get("http", url=url, model="m", rubric="{response}", backoff=0.01, retries=4)
        assert judge(["points=5"]) == [0.5]
        assert len(server.requests) == 5
        server.failures = [(503, {}, b"gone")] * 5
        judged = judge.judge(["points=5"])
        assert (judged.rewards, judged.reasons) == ([None], ["HTTP 503: gone (asked 5 times)"])
        server.failures = [(401, {}, b"no key")]
        assert judge.judge(["points=5"]).reasons == ["HTTP 401: no key"]
        assert judge.judge(["points=11"]).reasons == ["the score 11 is not from 0 to 10"]
        assert "no score in the reply" in judge.judge(["points=none"]).reasons[0]
    judged = get("http", url=url, model="m", rubric="{response}", backoff=0.01, retries=1).judge(["points=5"])
    assert judged.rewards == [None]
    assert "refused" in judged.reasons[0]


def test_only_so_many_questions_are_open_and_answers_keep_their_order():
    server = Server()
    server.delay = 0.05
    with serving(server) as url:
        judge = get("http", url=url, model="m", rubric="{response}", concurrency=3)
        assert judge([f"points={n % 11}" for n in range(20)]) == [n % 11 / 10 for n in range(20)]
    assert 2 <= server.most_open <= 3


def test_a_slow_server_is_left_after_a_time():
    server = Server()
    server.delay = 0.5
    with serving(server) as url:
        judge = get("http", url=url, model="m", rubric="{response}", seconds=0.05, retries=0)
        judged = judge.judge(["points=5"])
    assert judged.rewards == [None]
    assert "timed out" in judged.reasons[0]


def test_a_redirect_is_not_followed():
    server, other = Server(), Server()
    with serving(other) as elsewhere, serving(server) as url:
        server.failures = [(307, {"Location": f"{elsewhere}/chat/completions"}, b"")]
        judged = get("http", url=url, model="m", rubric="{response}", retries=0).judge(["points=5"])
    assert judged.reasons[0].startswith("HTTP 307")
    assert other.requests == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "file:///etc/passwd"}, "no address"),
        ({"rubric": "is it good?"}, "never shows the response"),
        ({"score": "("}, "not a regular expression"),
        ({"score": "Score"}, "no group"),
        ({"top": 0}, "top > bottom"),
        ({"concurrency": 0}, "concurrency >= 1"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        get("http", **({"url": "http://127.0.0.1:9/v1", "model": "m"} | options))


def test_a_column_that_the_rubric_takes_and_nobody_gives_is_named():
    with pytest.raises(ConfigError, match="column 'gold'; given: prompt"):
        get("http", url="http://127.0.0.1:9/v1", model="m", rubric="{gold} {response}")(["a"], prompt=["q"])
