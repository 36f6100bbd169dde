"""Several HTTP servers of one model as one: bounded load, and requests that fail are sent again.

A request goes to the server with the fewest of them, and after a failure to another one where there is one.
What may pass (no connection, a timeout, 429, 5xx, an answer that is cut or malformed) is tried again after a
pause that doubles, or that the server names; any other refusal is an error at once.
"""

import asyncio
import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from ipaddress import ip_address
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx2
import orjson

from data_tools.errors import ConfigError, RecError

T = TypeVar("T")

PASSING = frozenset({408, 409, 425, 429})
LONGEST_PAUSE = 30.0
LONGEST_NAMED_PAUSE = 300.0
SHOWN = 300


class ServerFailed(RecError):
    """A server that gave no usable answer: names it, and what it said last."""


class Malformed(Exception):
    """An answer that is not what was asked for; another try may give it."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for a server: `timeout` seconds for an answer, `attempts` in all.

    The pause after the first failure is about `pause` seconds, and doubles from then on.
    """

    timeout: float = 600.0
    attempts: int = 8
    pause: float = 0.5

    def __post_init__(self) -> None:
        if self.timeout <= 0 or self.attempts < 1 or self.pause < 0:
            raise ConfigError(f"{self}: the timeout must be positive, and there must be an attempt")


class _Failure(Exception):
    """An attempt that failed, and how long the server asks to wait."""

    def __init__(self, what: str, pause: float | None = None) -> None:
        super().__init__(what)
        self.pause = pause


class _Server:
    """One server: what it is doing, and until when it is left alone."""

    def __init__(self, url: str, key: str | None, patience: Patience) -> None:
        self.url = root(url)
        self.load = 0
        self.resting = 0.0
        local = is_local(self.url)
        self.client = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx2.Timeout(patience.timeout, connect=min(10.0, patience.timeout), pool=None),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=30.0),
            verify=self.url.startswith("https:"),
            # A proxy of the environment knows nothing of this machine's own ports.
            trust_env=not local,
        )


class Servers:
    """The servers of a connection, open within `async with`, in one event loop."""

    def __init__(self, connection: "Connection") -> None:
        self.patience = connection.patience
        self._servers = [_Server(url, connection.key, self.patience) for url in connection.urls]
        self._alive = connection.alive

    async def __aenter__(self) -> "Servers":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(server.client.aclose() for server in self._servers))

    async def ask(self, path: str, body: Any, read: Callable[[Any], T]) -> T:
        """What `read` makes of the JSON answer to `body`, or to a GET if that is None.

        Raises ServerFailed when no attempt is left, or a server refuses; `read` may raise Malformed.
        """
        started, failed = time.monotonic(), None
        for attempt in itertools.count(1):
            server = self._choose(failed)
            await self._rest(server)
            server.load += 1
            try:
                return await self._try(server, path, body, read)
            except _Failure as error:
                failed, failure = server, error
            finally:
                server.load -= 1
            if self._alive is not None:
                self._alive()
            if attempt >= self.patience.attempts:
                waited = time.monotonic() - started
                raise ServerFailed(
                    f"{server.url}{path}: {attempt} attempts failed in {waited:.0f} s; the last: {failure}",
                    "see the server's log, then run the command again",
                )
            self._leave_alone(server, attempt, failure.pause)
        raise AssertionError("attempts end")

    async def _try(self, server: _Server, path: str, body: Any, read: Callable[[Any], T]) -> T:
        url = server.url + path
        try:
            if body is None:
                answer = await server.client.get(url)
            else:
                kind = {"Content-Type": "application/json"}
                answer = await server.client.post(url, content=orjson.dumps(body), headers=kind)
        except httpx2.TimeoutException as error:
            raise _Failure(f"no answer within {self.patience.timeout:g} s") from error
        except httpx2.TransportError as error:
            raise _Failure(f"no connection ({type(error).__name__}: {error})".replace(": )", ")")) from error
        said = _shortened(answer.text)
        if answer.status_code in PASSING or answer.status_code >= 500:
            raise _Failure(f"HTTP {answer.status_code}: {said}", _named_pause(answer))
        if answer.status_code >= 300:
            raise ServerFailed(
                f"{url} refuses the request: HTTP {answer.status_code}: {said}", _hint(answer.status_code)
            )
        try:
            return read(orjson.loads(answer.content))
        except orjson.JSONDecodeError as error:
            raise _Failure(f"an answer that is not JSON: {said}") from error
        except (Malformed, KeyError, TypeError, IndexError) as error:
            raise _Failure(f"an answer that is not as asked for ({error}): {said}") from error

    def _choose(self, failed: _Server | None) -> _Server:
        now = time.monotonic()
        return min(self._servers, key=lambda s: (s.resting > now, s is failed, s.load))

    async def _rest(self, server: _Server) -> None:
        pause = server.resting - time.monotonic()
        if pause > 0:
            await asyncio.sleep(pause)

    def _leave_alone(self, server: _Server, attempt: int, named: float | None) -> None:
        pause = min(self.patience.pause * 2 ** (attempt - 1), LONGEST_PAUSE) * random.uniform(0.5, 1.0)
        if named is not None:
            # Not all at once when the pause is over.
            pause = min(named, LONGEST_NAMED_PAUSE) + random.uniform(0.0, min(pause, 1.0))
        server.resting = max(server.resting, time.monotonic() + pause)


@dataclass(frozen=True)
class Connection:
    """Which servers, and how they are used.

    `model` is the name that they serve it under (None: they serve one only), `concurrency` the requests that
    each is given at once, `key` what they ask as a password. Without `seeded` the servers draw their own
    noise, which a GPU does faster, and nothing can be drawn again. `alive` raises RecError once there is no
    use in asking again.
    """

    urls: Sequence[str]
    model: str | None = None
    concurrency: int | None = None
    key: str | None = None
    patience: Patience = field(default_factory=Patience)
    seeded: bool = True
    alive: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        if not self.urls:
            raise ConfigError("no server is named", "give its address with --url http://HOST:PORT")
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"concurrency must be at least 1, got {self.concurrency}")

    def open(self) -> Servers:
        """The servers, to be used in one event loop."""
        return Servers(self)


def in_thread(work: Callable[[], Any]) -> Any:
    """What a coroutine gives, run to its end in a thread of its own: the caller may be in an event loop."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(asyncio.run(work()))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, name="rec-request", daemon=True)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def root(url: str) -> str:
    """The address of a server without the path of its API; ConfigError if it is none."""
    parts = urlsplit(url if "//" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url!r} is not the address of a server", "write it as http://HOST:PORT")
    path = parts.path.rstrip("/").removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc}{path}"


def is_local(url: str) -> bool:
    """Whether a server is on this machine's own loopback."""
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _named_pause(answer: httpx2.Response) -> float | None:
    """Seconds that the server asks to wait: a number, or a date."""
    value = answer.headers.get("Retry-After", "").strip()
    if not value:
        return None
    if value.isdecimal():
        return float(value)
    try:
        return max(parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    except ValueError:
        return None


def _hint(status: int) -> str:
    if status in (401, 403):
        return "give its key in the environment variable REC_SERVER_KEY"
    if status == 404:
        return "is it an OpenAI-compatible server, and the model's name one that it serves?"
    return "see the server's log for what it was asked"


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else f"{line[:SHOWN]}..."
