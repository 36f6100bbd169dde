"""A dataset directory: batches of rollouts, what is kept beside them, and SQL over all of it."""

import contextlib
import json
import secrets
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from data_tools.errors import ConfigError, DataError
from data_tools.schema import FORMAT_VERSION
from data_tools.shaping.macros import prepare
from data_tools.store import views
from data_tools.store.batches import BatchWriter
from data_tools.store.connection import lock, open_duckdb
from data_tools.store.erased import ErasedIds, erased_files
from data_tools.store.queryable import Queryable
from data_tools.store.sidecars import Sidecar, SidecarKind
from data_tools.store.sql_errors import sql_errors
from data_tools.store.storage import Stamp, Storage
from data_tools.store.swaps import live_batches

if TYPE_CHECKING:
    import duckdb
    import pyarrow.parquet as pq

HOLDOUT = 0.1
"""Share of the prompts that training never sees, unless the creator of the dataset says otherwise."""


SALT = "rec"
"""What the split hashes prompts with: one for all, so that a log collected anew keeps its holdout."""


_VERSIONS: dict[Stamp | None, dict[str, int]] = {}
"""The newest version of each policy in batches that this process has read, whoever opens the dataset anew."""

MOST_KNOWN = 1 << 14


class DatasetInfo(BaseModel):
    """The content of rec.json."""

    format_version: int
    created: datetime
    holdout: float = Field(ge=0, lt=1)
    salt: str = SALT
    secret: str = ""
    """Random, of this dataset alone: what ids of people are hashed with."""
    split_by: Literal["prompt_cluster", "prompt_hash"] = "prompt_hash"
    """Column that the split goes by; fixed for good, as holdout and salt are."""


class PolicyCard(BaseModel):
    """The content of policies/<name>.json: the policy that sampled the responses, as far as it is known."""

    model_config = ConfigDict(extra="allow")

    name: str
    model: str | None = None
    revision: str | None = None
    tokenizer: str | None = None
    """Fingerprint of the tokenizer and its chat template."""
    template: str | None = None
    sampling: dict[str, Any] = Field(default_factory=dict)


class StoredDataset(Queryable):
    """The files of a dataset and the SQL over them; what is done with them stands in modules that take it."""

    def __init__(self, storage: Storage, info: DatasetInfo) -> None:
        super().__init__(storage)
        self.info = info
        self.newest: dict[str, int] = {}
        """Versions that staleness counts back from where it is not the newest in the dataset, by policy."""
        self._versions: dict[str, dict[str, int]] = {}

    def batches(self) -> list[str]:
        """Return the names of the committed batches in the order of their commits."""
        return live_batches(self.storage)

    def has_rejects(self) -> bool:
        """Return whether some batch has rejects."""
        return not set(self._stems("rejects")).isdisjoint(self.batches())

    def rollout_path(self, batch: str) -> str:
        """Return the path or URL of a batch's rollouts."""
        return self.storage.url(f"rollouts/{batch}.parquet")

    def parquet(self, batch: str) -> "pq.ParquetFile":
        """Open the rollouts of a batch, local or not."""
        return self.storage.parquet(f"rollouts/{batch}.parquet")

    def writer(self, name: str | None = None) -> BatchWriter:
        """Return a writer of one new batch; the name is given at the commit unless it is fixed here."""
        return BatchWriter(self.storage, name)

    def connect(self, now: datetime | None = None) -> "duckdb.DuckDBPyConnection":
        """Return a fresh connection with all views, that can read the dataset and nothing else.

        `now` fixes the moment that `age_days` counts back from; the default is the present.
        """
        batches = self.batches()
        kept = set(batches)
        rollouts = [self.rollout_path(batch) for batch in batches]
        rejects = [self._url("rejects", batch) for batch in self._stems("rejects") if batch in kept]
        rewards = [self._url("rewards", name) for name in self._stems("rewards")]
        erased = erased_files(self.storage)
        with contextlib.ExitStack() as stack, sql_errors(self.path):
            con = stack.enter_context(open_duckdb(self.storage))
            newest = self._newest_versions(con, batches)
            for statement in (
                views.split_macro(self.info.holdout, self.info.salt),
                *views.rollouts_view(
                    rollouts,
                    rewards,
                    newest=newest,
                    now=now or datetime.now(UTC),
                    split_by=self.info.split_by,
                ),
                views.GROUPS_VIEW,
                views.rejects_view(rejects),
                *views.policies_views(self._cards()),
                views.erased_view(erased),
            ):
                con.execute(statement)
            prepare(con)
            lock(con, [*rollouts, *rejects, *rewards, *erased])
            stack.pop_all()  # from here on the caller closes it
        return con

    def sidecar(self, kind: SidecarKind, key: str) -> Sidecar:
        """Return the files beside the rollouts of a kind, for one tokenizer or one set of weights."""
        return Sidecar(self.storage, kind, key)

    def erased(self) -> ErasedIds:
        """Return the set of the response ids that were deleted."""
        return ErasedIds(self.storage)

    def policies(self) -> dict[str, PolicyCard]:
        """Return the cards of the behaviour policies by name."""
        cards = (self._card(stem) for stem in self.storage.stems("policies", ".json"))
        return {card.name: card for card in cards}

    def write_policy(self, card: PolicyCard) -> None:
        """Write or replace a policy's card."""
        content = card.model_dump_json(indent=2, exclude_none=True).encode()
        self.storage.write(f"policies/{_file_stem(card.name)}.json", content + b"\n")

    def _newest_versions(self, con: "duckdb.DuckDBPyConnection", batches: list[str]) -> dict[str, int]:
        """Return the newest version of each policy; a batch is immutable, so each is read once."""
        new = [batch for batch in batches if batch not in self._versions]
        stamps = {batch: self.storage.stamp(f"rollouts/{batch}.parquet") for batch in new}
        self._versions.update((b, _VERSIONS[stamp]) for b, stamp in stamps.items() if stamp in _VERSIONS)
        unread = [batch for batch in new if batch not in self._versions]
        if unread:
            query = views.newest_versions_query([self.rollout_path(batch) for batch in unread])
            self._versions.update((batch, {}) for batch in unread)
            for batch, policy, version in con.execute(query).fetchall():
                self._versions[batch][policy] = version
            if len(_VERSIONS) > MOST_KNOWN:
                _VERSIONS.clear()
            _VERSIONS.update((stamps[batch], self._versions[batch]) for batch in unread if stamps[batch])
        newest: dict[str, int] = {}
        for policy, version in (item for batch in batches for item in self._versions[batch].items()):
            newest[policy] = max(version, newest.get(policy, version))
        return newest | self.newest

    def _card(self, stem: str) -> PolicyCard:
        name = f"policies/{stem}.json"
        try:
            return PolicyCard.model_validate_json(self.storage.read(name))
        except ValidationError as error:
            raise DataError(
                f"{self.storage.url(name)} is no policy card: {error.errors()[0]['msg']}",
                "mend or remove the file",
            ) from error

    def _cards(self) -> list[list[str | None]]:
        return [
            [card.name, card.model, card.revision, card.tokenizer, json.dumps(card.sampling)]
            for card in self.policies().values()
        ]

    def _stems(self, folder: str) -> list[str]:
        return self.storage.stems(folder, ".parquet")

    def _url(self, folder: str, stem: str) -> str:
        return self.storage.url(f"{folder}/{stem}.parquet")


def open_stored(storage: Storage, *, create: bool = False, holdout: float | None = None) -> StoredDataset:
    """Open the dataset in a storage; with `create` make an empty one where there is none."""
    where = storage.root
    if not storage.exists("rec.json"):
        if not create:
            raise DataError(
                f"{where} is not a dataset: it has no rec.json",
                f"make one with: rec collect LOGS --into {where}",
            )
        _create(storage, HOLDOUT if holdout is None else holdout)
    info = _read_info(storage)
    if holdout is not None and holdout != info.holdout:
        raise ConfigError(
            f"{where} was created with holdout {info.holdout:g}, not {holdout:g}",
            "the split of a dataset is fixed for good: leave holdout out, or start a new dataset",
        )
    return StoredDataset(storage, info)


def _create(storage: Storage, holdout: float) -> None:
    if not 0 <= holdout < 1:
        raise ConfigError(
            f"holdout must be at least 0 and below 1, got {holdout:g}", "0.1 keeps every tenth prompt out"
        )
    if storage.entries("") and not storage.exists("rec.json"):  # it may have been created this moment
        raise DataError(
            f"{storage.root} is not a dataset, and not empty", "choose a new or an empty directory"
        )
    info = DatasetInfo(
        format_version=FORMAT_VERSION,
        created=datetime.now(UTC),
        holdout=holdout,
        secret=secrets.token_hex(16),
        split_by="prompt_cluster",
    )
    try:
        storage.write("rec.json", info.model_dump_json(indent=2).encode() + b"\n", exclusive=True)
    except FileExistsError:
        return  # another process created it at the same moment; its secret holds


def _read_info(storage: Storage) -> DatasetInfo:
    where = storage.url("rec.json")
    try:
        content = json.loads(storage.read("rec.json"))
        version = int(content["format_version"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{where} cannot be read: {error}", "restore it from a copy; it holds how the dataset is split"
        ) from error
    if version > FORMAT_VERSION:
        raise DataError(
            f"{where} has format version {version}; this program reads up to {FORMAT_VERSION}",
            "upgrade with: pip install -U offline-rec",
        )
    try:
        return DatasetInfo.model_validate(content)
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise DataError(f"{where} cannot be read: {reason}", "restore it from a copy") from error


def _file_stem(name: str) -> str:
    """Return a policy's name as a file's stem: reversible, never hidden, safe in every store."""
    stem = quote(name, safe="")
    return "%2E" + stem[1:] if stem.startswith(".") else stem
