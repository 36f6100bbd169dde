"""Sampling beside the fit: the refreshes of a loop in a process of their own, which ends with the loop.

`python -m offline_rec.looping.beside FD` is that process. Over the socket it is told where the loop lies,
then the numbers of the phases to do, and it answers with the events of each; all of it as lines of JSON.
"""

import json
import os
import queue
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import data_tools
from data_tools.errors import ConfigError, DataError, RecError
from offline_rec.config import CONFIG_FILE
from offline_rec.looping.config import LoopConfig, loop_config
from offline_rec.looping.layout import Layout
from offline_rec.looping.refreshing import Refreshing
from offline_rec.sampling.refresh import Progress

GRACE = 15.0
"""Seconds that an idle process is given to end its engine."""

Line = dict[str, Any]


class Beside:
    """The process that samples beside the fit, as the loop sees it; `close` ends it, and what it is at."""

    def __init__(self, config: LoopConfig, tell: Progress) -> None:
        self.config = config
        self.tell = tell
        self.pending: int | None = None
        self._channel: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: queue.SimpleQueue[Line | None] = queue.SimpleQueue()

    def begin(self, number: int) -> None:
        """Have the batches of a phase sampled, after those before."""
        self.wait()
        if self._channel is None:
            self._start()
        assert self._channel is not None
        self.pending = number
        _send(self._channel, {"phase": number})

    def wait(self) -> None:
        """Return when the phase that is under way is done; RecError if it failed, or the process has gone."""
        while self.pending is not None:
            answer = self._answers.get()
            if answer is None:
                raise self._gone()
            if answer["event"] == "done":
                self.pending = None
            elif answer["event"] == "failed":
                raise {"data": DataError, "config": ConfigError}.get(answer["kind"], RecError)(
                    answer["message"], answer["hint"]
                )
            else:
                self.tell(answer)

    def close(self) -> None:
        """End the process and all that it started."""
        if self._process is None or self._channel is None:
            return
        process, self._process = self._process, None
        # At this it ends by itself, at once if it is at something.
        with suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        self._channel.close()
        try:
            process.wait(2 * GRACE)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _start(self) -> None:
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._process = start(theirs, self.config.sampler_devices)
        threading.Thread(target=_listen, args=(self._channel, self._answers), daemon=True).start()
        _send(self._channel, {"loop": self.config.out, "threads": torch.get_num_threads()})

    def _gone(self) -> RecError:
        code = None
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            code = self._process.wait()
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        return RecError(
            f"the process that samples beside the fit has ended ({how}); what it had sampled is kept",
            f"go on with: rec loop {shlex.quote(str(Path(self.config.out) / CONFIG_FILE))} --resume",
        )


def start(channel: socket.socket, devices: str | None) -> "subprocess.Popen[bytes]":
    """Start the process at the other end of a channel."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = devices
    number = channel.fileno()
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "offline_rec.looping.beside", str(number)],
        pass_fds=[number],
        stdin=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,  # Ctrl-C is for the loop, which then ends this
    )


def serve(channel: socket.socket) -> None:
    """Do the phases that are asked for until the other side is gone, at which this process ends."""
    asked: queue.SimpleQueue[Line | None] = queue.SimpleQueue()
    busy = threading.Event()
    busy.set()
    threading.Thread(target=_end_with, args=(channel, asked, busy), daemon=True).start()
    told = asked.get()
    if told is None:
        return
    torch.set_num_threads(told["threads"])
    layout = Layout.of(loop_config(Path(told["loop"]) / CONFIG_FILE))
    refreshing = None
    try:
        while True:
            busy.clear()
            request = asked.get()
            if request is None:
                break
            busy.set()
            refreshing = refreshing or Refreshing(
                layout, data_tools.open(layout.config.dataset), lambda event: _send(channel, event)
            )
            _send(channel, _outcome(refreshing, request["phase"]))
    finally:
        if refreshing is not None:
            refreshing.close()


def _outcome(refreshing: Refreshing, number: int) -> Line:
    """Do a phase, and say how it went."""
    try:
        refreshing.begin(number)
    except RecError as error:
        kinds = (("config", ConfigError), ("data", DataError))
        kind = next((name for name, known in kinds if isinstance(error, known)), "other")
        return {"event": "failed", "kind": kind, "message": error.message, "hint": error.hint}
    except Exception as error:
        traceback.print_exc()
        told = f"sampling beside the fit failed: {type(error).__name__}: {error}"
        return {"event": "failed", "kind": "other", "message": told, "hint": "the traceback is above"}
    return {"event": "done"}


def _end_with(channel: socket.socket, asked: "queue.SimpleQueue[Line | None]", busy: threading.Event) -> None:
    """Pass on what is asked; when the other side is gone, end all that runs here."""
    _listen(channel, asked)
    if not busy.is_set():
        time.sleep(GRACE)
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _listen(channel: socket.socket, into: "queue.SimpleQueue[Line | None]") -> None:
    """Put every line into a queue, and None when the other side is gone."""
    with suppress(OSError, ValueError), channel.makefile("rb") as lines:
        for line in lines:
            into.put(json.loads(line))
    into.put(None)


def _send(channel: socket.socket, line: Line) -> None:
    with suppress(OSError):  # that the other side is gone is seen where it is listened to
        channel.sendall(json.dumps(line).encode() + b"\n")


if __name__ == "__main__":
    own = int(sys.argv[1])
    os.set_inheritable(own, False)
    serve(socket.socket(fileno=own))
