"""What runs in a session of processes."""

from pathlib import Path


def processes(session: int) -> list[tuple[int, str]]:
    """Number and name of what still runs in a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().partition(") ")
        except OSError:
            continue
        state, _, _, its_session, *_ = rest.split()
        if int(its_session) == session and state != "Z":
            found.append((int(stat.parent.name), name))
    return found
