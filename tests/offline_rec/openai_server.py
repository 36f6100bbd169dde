"""A server with the OpenAI API on a loopback port, before a real tiny model, that can be told to misbehave.

It samples by whole forward passes and plain softmax, without any code of the samplers.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

Behaviour = Callable[[int, dict[str, Any]], Any]
"""From the number of a request and its body to None (answer it) or a `(status, headers, text)`, which is sent
as it is; status 0 closes the connection in the middle of the answer. It may sleep first."""


@dataclass
class FakeServer:
    """`kind`: of which distribution log-probs are; `requests`: bodies of all completions asked for."""

    model: Any
    tokenizer: Any
    kind: str = "processed"
    behave: Behaviour = lambda number, body: None
    ids: bool = True
    shared_seeds: bool = False
    control: Callable[[str, Any], Any] | None = None
    port: int = 0
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    answered: int = 0
    busy: int = 0
    busiest: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        prompts = body["prompt"]
        if isinstance(prompts, str):
            prompts = [self.tokenizer(prompts)["input_ids"]]
        elif isinstance(prompts[0], int):
            prompts = [prompts]
        choices: list[dict[str, Any]] = []
        for ids in prompts:
            choices += self._sample(ids, body, len(choices))
        return {"choices": choices, "model": "policy"}

    @torch.no_grad()
    def _sample(self, prompt: list[int], body: dict[str, Any], first: int) -> list[dict[str, Any]]:
        n, ends = body.get("n", 1), set(body["stop_token_ids"])
        rows = torch.tensor([prompt] * n)
        given, tops = [], []
        with self.lock:
            noise = torch.Generator()
            noise.manual_seed(body["seed"]) if "seed" in body else noise.seed()
            for _ in range(body["max_tokens"]):
                logits = self.model(rows, use_cache=False).logits[:, -1].float()
                processed, shown = self._distributions(logits, body)
                token = torch.multinomial(processed.exp(), 1, generator=noise)
                if self.shared_seeds:
                    token = token[:1].expand(n, 1)
                given.append(shown.gather(1, token)[:, 0].tolist())
                tops.append(shown.topk(2)[0].tolist())
                rows = torch.cat([rows, token], 1)
        found = []
        for row in range(n):
            ids = rows[row, len(prompt) :].tolist()
            cut = next((at + 1 for at, i in enumerate(ids) if i in ends), len(ids))
            choice = {
                "index": first + row,
                "text": self.tokenizer.decode(ids[:cut]),
                "finish_reason": "stop" if ids[cut - 1] in ends else "length",
                "logprobs": {
                    "token_logprobs": [step[row] for step in given[:cut]],
                    "top_logprobs": [{str(k): x for k, x in enumerate(step[row])} for step in tops[:cut]],
                },
            }
            if self.ids:
                choice |= {"token_ids": ids[:cut], "prompt_token_ids": prompt}
            found.append(choice)
        return found

    def _distributions(self, logits: Any, body: dict[str, Any]) -> tuple[Any, Any]:
        """Log-probs that are drawn from, and those that are shown."""
        raw = torch.log_softmax(logits, -1)
        if body["temperature"] == 0:
            drawn = torch.full_like(raw, -1e4).scatter(1, raw.argmax(1, keepdim=True), 0.0)
            return drawn, raw
        tempered = torch.log_softmax(logits / body["temperature"], -1)
        order = tempered.argsort(dim=1, descending=True, stable=True)
        probability = tempered.exp().gather(1, order)
        rank = torch.arange(logits.shape[1])
        out = torch.zeros_like(probability, dtype=torch.bool)
        if body["top_k"] > 0:
            out |= rank >= body["top_k"]
            probability = probability.masked_fill(out, 0.0)
            probability = probability / probability.sum(1, keepdim=True)
        out |= (probability.cumsum(1) - probability >= body["top_p"]) & (rank > 0)
        processed = tempered.masked_fill(torch.zeros_like(out).scatter(1, order, out), -1e4)
        processed = torch.log_softmax(processed, -1)
        return processed, {"raw": raw, "tempered": tempered, "processed": processed}[self.kind]


@contextmanager
def serving(server: FakeServer) -> Iterator[FakeServer]:
    """The server while the block runs, at its `url`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            if self.path == "/health":
                return self.send(200, {}, "")
            if self.path != "/v1/models":
                return self.send(404, {}, "not found")
            card = {"id": "policy", "max_model_len": 512}
            return self.send(200, {}, json.dumps({"data": [card]}))

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            body = json.loads(data) if data else None
            if self.path != "/v1/completions" and server.control is not None:
                return self.send(*server.control(self.path, body))
            with server.lock:
                number = len(server.requests)
                server.requests.append(body)
                server.busy += 1
                server.busiest = max(server.busiest, server.busy)
            try:
                told = server.behave(number, body)
                if told is not None:
                    return self.send(*told)
                if body["temperature"] == 0 and body.get("n", 1) > 1:
                    return self.send(400, {}, "n must be 1 when using greedy sampling")
                self.send(200, {}, json.dumps(server.complete(body)))
                server.answered += 1
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True
            finally:
                with server.lock:
                    server.busy -= 1

        def send(self, status: int, headers: dict[str, str], text: str) -> None:
            data = text.encode()
            self.send_response(status or 200)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data) + (100 if status == 0 else 0)))
            self.end_headers()
            self.wfile.write(data)
            self.close_connection = status == 0

    httpd = ThreadingHTTPServer(("127.0.0.1", server.port), Handler)
    httpd.daemon_threads = True
    server.url = f"http://127.0.0.1:{httpd.server_address[1]}"
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()


def wait_until(true: Callable[[], bool], seconds: float = 5.0) -> bool:
    """Whether it becomes true in time."""
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.01)
    return true()
