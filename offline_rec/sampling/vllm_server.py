"""A vLLM server of one's own, on this machine's loopback: started, waited for, given new weights, ended.

vLLM may live in another environment, whose Python is named. The server ends with the process that started it,
also where that is killed.
"""

import contextlib
import logging
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import httpx2
import torch

from data_tools.errors import RecError
from offline_rec.models.loading import choose_device, choose_dtype
from offline_rec.models.policy import Policy
from offline_rec.sampling import keeper
from offline_rec.sampling.server_sampler import ServerSampler
from offline_rec.sampling.servers import Connection
from offline_rec.sampling.verify import update
from offline_rec.sampling.vocabulary import Vocabulary

log = logging.getLogger(__name__)

NAME = "policy"
"""What the model is called on a server of one's own."""

TAIL_LINES = 12
CAUSE = re.compile(r"(?:^|\] )(\w+(?:Error|Exception): .*)")


@dataclass(frozen=True)
class LaunchSettings:
    """How a server is started; `python` has vLLM installed, `arguments` are added to vLLM's own.

    `dtype` auto is bfloat16 on a GPU and float32 on a CPU. `wait`: seconds until the server must be ready.
    """

    python: str = sys.executable
    dtype: str = "auto"
    max_model_len: int | None = None
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    wait: float = 1200.0

    @property
    def precision(self) -> torch.dtype:
        """The type of the weights on the server."""
        return choose_dtype(self.dtype, choose_device())


class VLLMServer:
    """A server process of the model in a directory; `url` is where it listens."""

    def __init__(self, model: str | Path, settings: LaunchSettings) -> None:
        self.model = Path(model)
        self.settings = settings
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the server)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process that keeps the server, in whose session all of it runs; None while there is none."""
        return None if self._process is None else self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process has been started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process and wait until it answers; RecError with the end of its log if it does not."""
        self.start_process()
        end = time.monotonic() + self.settings.wait
        while not self._healthy():
            self.check()
            if time.monotonic() > end:
                self.stop()
                raise self._failed(f"is not ready after {self.settings.wait:.0f} s")
            time.sleep(0.2)

    def start_process(self) -> None:
        """Start the process, which answers only later."""
        environment = _environment(self.settings)
        self._log.truncate(0)
        self._process = subprocess.Popen(
            [sys.executable, keeper.__file__, *self.command()],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the one who started it, who then stops it
        )

    def stop(self) -> None:
        """End the process and all that it started."""
        process, self._process = self._process, None
        if process is None or process.stdin is None:
            return
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(2 * keeper.GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def close(self) -> None:
        """Stop, and forget the log."""
        self.stop()
        self._log.close()

    def restart(self, model: str | Path) -> None:
        """Stop, and start with another model at the same address."""
        self.stop()
        self.model = Path(model)
        self.start()

    def reload(self, model: str | Path) -> None:
        """Have the running server read other weights. What it then holds has to be verified."""
        self.model = Path(model)
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(self.model.absolute())}}
        self._post("/collective_rpc", call)
        # Keys and values of the old weights would go on being used for prompts that were seen before.
        if not self._post("/reset_prefix_cache").get("success", True):
            raise self._failed("does not let go of the keys and values of its old weights")

    def check(self) -> None:
        """Raise RecError with the end of its log if the process has ended."""
        if self._process is not None and (code := self._process.poll()) is not None:
            raise self._failed(f"has ended with exit code {code}")

    def command(self) -> list[str]:
        """The command that serves the model."""
        own: dict[str, Any] = {
            "--model": self.model.absolute(),
            "--served-model-name": NAME,
            "--host": "127.0.0.1",
            "--port": self.port,
            "--dtype": str(self.settings.precision).removeprefix("torch."),
            "--logprobs-mode": "processed_logprobs",
            "--generation-config": "vllm",  # the settings of a request hold, and no others
        }
        if self.settings.max_model_len is not None:
            own["--max-model-len"] = self.settings.max_model_len
        options = [str(part) for pair in own.items() for part in pair]
        # On a CPU a seeded request whose prompt is computed in parts ends vLLM 0.32: "does not use offset".
        on_cpu = [] if torch.cuda.is_available() else ["--enforce-eager", "--no-enable-chunked-prefill"]
        module = ["-m", "vllm.entrypoints.openai.api_server"]
        quiet = ["--disable-uvicorn-access-log"]
        return [self.settings.python, *module, *options, *quiet, *on_cpu, *self.settings.arguments]

    def _healthy(self) -> bool:
        try:
            return httpx2.get(f"{self.url}/health", trust_env=False, timeout=5).status_code == 200
        except httpx2.TransportError:
            return False

    def _post(self, path: str, body: Any = None) -> Any:
        try:
            answer = httpx2.post(self.url + path, json=body, trust_env=False, timeout=self.settings.wait)
        except httpx2.TransportError as error:
            raise self._failed(f"does not answer to {path}: {error}") from error
        if answer.status_code != 200:
            raise self._failed(f"answers {path} with HTTP {answer.status_code}: {answer.text[:300]}")
        return answer.json() if answer.content else {}

    def _failed(self, how: str) -> RecError:
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - (1 << 16)))
        lines = self._log.read().decode("utf-8", "replace").splitlines()
        cause = next((found[1] for line in lines if (found := CAUSE.search(line))), "")
        what = f"the vLLM server of {self.model} {how}{': ' if cause else ''}{cause}"
        told = "\n".join(f"  {line}" for line in lines[-TAIL_LINES:])
        return RecError(what, f"its log ends with:\n{told}" if told else "")


class LaunchedSampler(ServerSampler):
    """Samples a server that was launched, and can give it new weights."""

    def __init__(self, server: VLLMServer, connection: Connection, vocabulary: Vocabulary) -> None:
        self.server = server
        super().__init__(connection, vocabulary)

    @property
    def alive(self) -> bool:
        """Whether the server has not ended."""
        return self.server.running

    def update_weights(self, directory: str | Path, *, policy: Policy | None = None) -> None:
        """Go on with other weights, verified by a forward pass; without a restart where that does.

        `policy` are these weights, where they are in memory.
        """
        update(
            self,
            directory,
            reload=lambda: self.server.reload(directory),
            restart=lambda: self.server.restart(directory),
            policy=policy,
            dtype=self.server.settings.precision,
        )


@contextmanager
def launch(
    model: str | Path, settings: LaunchSettings | None = None, connection: Connection | None = None
) -> Iterator[LaunchedSampler]:
    """A sampler of a server of one's own while the block runs; `connection` says how it is used.

    Raises RecError with the end of the server's log if it does not start.
    """
    vocabulary = Vocabulary.load(model)
    server = VLLMServer(model, settings or LaunchSettings())
    try:
        server.start()
        given = connection or Connection([server.url])
        yield LaunchedSampler(
            server, replace(given, urls=[server.url], model=NAME, alive=server.check), vocabulary
        )
    finally:
        server.close()


def _environment(settings: LaunchSettings) -> dict[str, str]:
    """Variables of the server: nothing is fetched or told to anybody, and weights can be reloaded."""
    own = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "1"}
    # What vLLM in this process was told, or the modules of this environment, are nothing to another one.
    left = {"VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_DIST_IDENT"}
    if settings.python != sys.executable:
        left.add("PYTHONPATH")
    kept = {name: value for name, value in os.environ.items() if name not in left}
    return {**kept, **own, **settings.environment}


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port
