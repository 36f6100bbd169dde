"""`push`: the model of a run, or a dataset, to a repository of the Hugging Face hub, as one commit."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_tools.errors import ConfigError, DataError, MissingExtra
from offline_rec.hub.contents import Contents, contents

REPO = re.compile(r"(?!.*(--|\.\.))[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")

HISTORY = (
    "what was removed is still in the history of the repository: HfApi.super_squash_history(REPO) forgets it"
)


@dataclass(frozen=True)
class PushReport:
    """What went, or would go, to a repository: its files with their sizes, what was removed, what stayed."""

    repo: str
    kind: str
    private: bool
    pushed: bool
    bytes: int
    files: list[dict[str, Any]]
    removed: list[str] = field(default_factory=list)
    stays: dict[str, str] = field(default_factory=dict)
    url: str | None = None

    def lines(self) -> Iterator[str]:
        """What stands around the table of files."""
        what = "pushed" if self.pushed else "would be pushed"
        seen = " (private)" if self.private else ""
        yield f"{len(self.files)} files, {self.bytes:,} bytes, {what} to the {self.kind} {self.repo}{seen}"
        yield from (f"removed there: {name}" for name in self.removed)
        if self.removed:
            yield f"note: {HISTORY}"
        yield from (f"stays here: {name}, {reason}" for name, reason in self.stays.items())
        if self.url:
            yield self.url


def push(
    path: str | Path,
    repo: str,
    *,
    private: bool = False,
    adapter: bool = False,
    dry_run: bool = False,
    api: Any = None,
) -> PushReport:
    """Push the model of a run, or a dataset, with a card of this moment; `dry_run` only tells what would go.

    Files of an older push that are no longer part of it are removed in the same commit. `api` is a
    `huggingface_hub.HfApi` with another endpoint or token than the user's own. Raises ConfigError for a
    name that is none, or a public repository where a private one is wanted, and DataError for what the hub
    refuses.
    """
    if not REPO.fullmatch(repo) or repo.endswith((".git", ".", "-")):
        raise ConfigError(f"{repo!r} is no name of a repository", "write OWNER/NAME, such as lab/answers")
    made = contents(path, adapter=adapter)
    report = PushReport(
        repo=repo,
        kind=made.kind,
        private=private,
        pushed=False,
        bytes=made.size,
        files=[{"file": item.name, "bytes": item.size} for item in made.items],
        stays=made.stays,
    )
    if dry_run:
        return report
    hub = _hub()
    with _told(repo):
        return _commit(hub, api or hub.HfApi(), made, report)


def _commit(hub: Any, api: Any, made: Contents, report: PushReport) -> PushReport:
    """Make the repository where there is none, and put everything there at once."""
    where = {"repo_id": report.repo, "repo_type": made.kind}
    api.create_repo(**where, private=report.private or None, exist_ok=True)
    if report.private and api.repo_info(**where).private is False:
        raise ConfigError(
            f"{report.repo} exists and is public", "make it private at the hub, or leave --private out"
        )
    removed = sorted(name for name in api.list_repo_files(**where) if made.replaces(name))
    operations = [
        hub.CommitOperationAdd(
            item.name, item.content if isinstance(item.content, bytes) else str(item.content)
        )
        for item in made.items
    ]
    operations += [hub.CommitOperationDelete(name) for name in removed]
    done = api.create_commit(**where, operations=operations, commit_message="Pushed by rec")
    url = getattr(done, "commit_url", None)
    return PushReport(**vars(report) | {"pushed": True, "removed": removed, "url": url})


def _hub() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise MissingExtra("huggingface_hub", "hub") from error
    return huggingface_hub


@contextmanager
def _told(repo: str) -> Iterator[None]:
    """Say in one line what the hub, or the way to it, refused."""
    import httpx2

    try:
        yield
    except (httpx2.HTTPError, OSError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        said = lines[-1] if lines else type(error).__name__
        raise DataError(f"{repo} could not be pushed: {said}", "log in with: hf auth login") from error
