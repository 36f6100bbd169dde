"""Starting the ranks of a fit on this machine, and ending all of them when one ends. No torch.

Ranks get the environment that torchrun gives. The launcher holds one end of a pipe: a rank that finds it
closed knows that the launcher has died, and stops too.
"""

import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import IO, Any

from data_tools.errors import DataError
from offline_rec.training.engines.place import LOST

LIFELINE = "REC_LIFELINE"
"""Names the file descriptor of the pipe in a rank's environment."""

POLL_SECONDS = 0.05
FAREWELL_SECONDS = 10.0
"""How long the other ranks may take to notice that one has gone, and again to end once they are told to."""

SIGNALS = (signal.SIGINT, signal.SIGTERM)
TAIL_LINES = 20


@dataclass
class _Rank:
    """A process, and where its stderr goes; rank 0 shows its own."""

    number: int
    process: subprocess.Popen[bytes]
    stderr: IO[bytes]
    ended_by_us: bool = False

    def told(self) -> str:
        """What it wrote last on stderr."""
        self.stderr.seek(0)
        text = self.stderr.read().decode(errors="replace")
        return "\n".join(text.strip().splitlines()[-TAIL_LINES:])


def launch(command: Sequence[str], count: int) -> int:
    """Run `command` in `count` processes; returns the exit code of rank 0, whose output is shown.

    SIGINT and SIGTERM are passed on to every rank. `DataError` names the rank that ended on its own and took
    the others with it.
    """
    lifeline, held = os.pipe()
    ranks: list[_Rank] = []
    try:
        with _passing_on(ranks):
            port = _free_port()
            for number in range(count):
                ranks.append(_start(command, number, count, port, lifeline))
            _wait(ranks)
    finally:
        for rank in ranks:
            if rank.process.poll() is None:
                rank.process.kill()
            rank.process.wait()
        os.close(held)
        os.close(lifeline)
    try:
        _blame(ranks)
    finally:
        for rank in ranks:
            rank.stderr.close()
    code = ranks[0].process.returncode
    return code if code >= 0 else 1


def follow_launcher() -> bool:
    """In a rank: stop when the launcher has died. Returns whether there is one."""
    descriptor = os.environ.pop(LIFELINE, None)
    if descriptor is None:
        return False

    def wait() -> None:
        os.read(int(descriptor), 1)
        os.kill(os.getpid(), signal.SIGTERM)  # saves the step, as Ctrl-C does
        time.sleep(6 * FAREWELL_SECONDS)
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="rec-lifeline").start()
    return True


def _start(command: Sequence[str], number: int, count: int, port: int, lifeline: int) -> _Rank:
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // count))}
    told = {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        LIFELINE: str(lifeline),
    }
    stderr = tempfile.TemporaryFile()  # noqa: SIM115  # closed by launch
    process = subprocess.Popen(
        list(command),
        env={**threads, **os.environ, **told},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL if number else None,
        stderr=stderr if number else None,
        pass_fds=(lifeline,),
        start_new_session=True,  # a terminal's Ctrl-C reaches ranks once, through the launcher
    )
    return _Rank(number, process, stderr)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def _passing_on(ranks: list[_Rank]) -> Iterator[None]:
    """Send signals on to the ranks; the third time, kill them."""
    received = 0

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received += 1
        for rank in ranks:
            if rank.process.poll() is None:
                rank.ended_by_us = True
                rank.process.send_signal(number if received < 3 else signal.SIGKILL)

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, pass_on) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(ranks: list[_Rank]) -> None:
    """Until all ranks have ended. After a failure the rest may end by itself, is told to, is killed."""
    failed_at: float | None = None
    orders = [signal.SIGTERM, signal.SIGKILL]
    while running := [rank for rank in ranks if rank.process.poll() is None]:
        time.sleep(POLL_SECONDS)
        if failed_at is None:
            failed_at = time.monotonic() if any(rank.process.poll() for rank in ranks) else None
        elif orders and time.monotonic() - failed_at > FAREWELL_SECONDS:
            order, failed_at = orders.pop(0), time.monotonic()
            for rank in running:
                rank.ended_by_us = True
                rank.process.send_signal(order)


def _blame(ranks: list[_Rank]) -> None:
    """Raise DataError for the rank to blame, unless rank 0 has said itself what is wrong."""
    failed = [rank for rank in ranks if rank.process.returncode not in (0, LOST) and not rank.ended_by_us]
    killed = [rank for rank in failed if rank.process.returncode < 0]
    if killed:
        first = killed[0]
        name = signal.Signals(-first.process.returncode).name
        raise DataError(
            f"rank {first.number} of {len(ranks)} was ended by {name}, and the others with it",
            "a kernel that is out of memory does that; go on with --resume",
        )
    if not failed:
        if ranks[0].process.returncode == LOST:
            raise DataError("the ranks lost each other", "go on with --resume")
        return
    if failed[0].number:
        told = failed[0].told()
        lines = [line for line in told.splitlines() if line.startswith(("error: ", "hint: "))]
        message, *hint = [line.split(": ", 1)[1] for line in lines] or [told or "it said nothing"]
        raise DataError(f"rank {failed[0].number}: {message}", *hint[:1])
