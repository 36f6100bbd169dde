"""The index of a run: which rows are trained on, by group, with advantage and weight; scalars only, on disk.

`rows.arrow` holds a row per response, the rows of a group side by side, groups in the order of their first
row in the dataset. `groups.arrow` says where a group lies and in which row group of the dataset it begins.
Both are written as a stream and read through a memory map: no memory grows with the dataset.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from data_tools.errors import DataError
from data_tools.schema import ROW_GROUP_ROWS
from data_tools.shaping.checks import LARGEST
from data_tools.store.views import literal
from offline_rec.data.admission import LEFT_OUT, Admission, floats, integers
from offline_rec.data.order import Floats, Ints, shuffled
from offline_rec.data.passes import Sharing, cost_of, plan

if TYPE_CHECKING:
    import duckdb

ROWS_FILE = "rows.arrow"
GROUPS_FILE = "groups.arrow"
CHUNK_ROWS = 65_536
FILE_SHIFT = 2**40
HOME = "home"
"""Of a group: code of the batch times `FILE_SHIFT`, plus the row in it, of the group's first row."""

ROWS = pa.schema(
    [
        pa.field("response_id", pa.string()),
        pa.field("file", pa.int32()),
        pa.field("file_row", pa.int64()),
        pa.field("group", pa.int64()),
        pa.field("advantage", pa.float64()),
        pa.field("weight", pa.float64()),
        pa.field("expert", pa.bool_()),
        pa.field("reward", pa.float64()),
        pa.field("n_tokens", pa.int32()),
    ]
)
CONTENT = ("response_id", "group", "advantage", "weight", "n_tokens")
"""What makes two indexes the same to a fit, wherever the rows lie."""

GROUPS = pa.schema(
    [
        pa.field("start", pa.int64()),
        pa.field("rows", pa.int32()),
        pa.field("tokens", pa.int64()),
        pa.field("row_group", pa.int64()),
        pa.field("priority", pa.float64()),
    ]
)


class UnusableNumber(DataError):
    """An advantage, weight or priority that is null, not finite or negative where it must not be."""


@dataclass
class IndexCounts:
    """What the index holds, `signal` rows of it with an advantage other than 0, and what it left out.

    `visited` rows have a priority above 0. `longest` and `largest_group`: tokens of the longest row, and of
    the group that has most. `digest`: a hash of every row's id, group, advantage, weight and length, in the
    order of the index.
    """

    rows: int = 0
    groups: int = 0
    tokens: int = 0
    response_tokens: int = 0
    signal: int = 0
    visited: int = 0
    longest: int = 0
    largest_group: int = 0
    digest: str = ""
    left_out: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LEFT_OUT, 0))


def home_of(batches: Sequence[str]) -> str:
    """`HOME` as a statistic of a group, of rows that have `file` and `file_row`."""
    named = ", ".join(literal(name) for name in batches)
    return f"min((list_position([{named}], file) - 1) * {FILE_SHIFT} + file_row) OVER grp"


def build_index(
    con: "duckdb.DuckDBPyConnection",
    statement: str,
    folder: Path,
    *,
    admission: Admission,
    priority: str = "1.0",
    homes: bool = False,
) -> IndexCounts:
    """Run the shaping statement once and write what it keeps to `folder`.

    `statement` yields a row per response, under `homes` with the column `HOME`, which is else found here in a
    window of its own. `priority` is the column or number that says how often a row's group is visited.
    `UnusableNumber` names rows whose advantage, weight or priority cannot be used.
    """
    codes = "SELECT unnest($names) AS file, unnest(range(len($names))) AS code"
    con.execute(f"CREATE OR REPLACE TEMP TABLE _codes AS {codes}", {"names": list(admission.batches)})
    # Most rows have no mask, which takes no reading; what is 0 everywhere is rare.
    masked = "false" if admission.retokenise else "coalesce(n_tokens > 0 AND list_max(loss_mask) = 0, false)"
    con.execute(f"CREATE OR REPLACE TEMP TABLE _masked AS SELECT file, file_row FROM rollouts WHERE {masked}")
    home = (
        ""
        if homes
        else f", min(c.code * {FILE_SHIFT} + s.file_row) OVER (PARTITION BY s.group_key) AS {HOME}"
    )
    query = f"""
        WITH shaped AS ({statement}), placed AS (
            SELECT s.* REPLACE (CAST(c.code AS INTEGER) AS file), m.file IS NOT NULL AS masked{home}
            FROM shaped s JOIN _codes c ON c.file = s.file
                LEFT JOIN _masked m ON m.file = s.file AND m.file_row = s.file_row)
        SELECT response_id, file, file_row, home, advantage, weight, {priority} AS priority, expert, reward,
            temperature, n_prompt_tokens, n_tokens, masked
        FROM placed ORDER BY home, file, file_row"""
    folder.mkdir(parents=True, exist_ok=True)
    with _IndexWriter(folder, admission) as writer:
        for batch in con.sql(query).to_arrow_reader(CHUNK_ROWS):
            writer.add(batch)
    return writer.counts


class _IndexWriter:
    """Streams shaped rows, sorted by group, into the two files; holds back only the last group."""

    def __init__(self, folder: Path, admission: Admission) -> None:
        self.counts = IndexCounts()
        self._admission = admission
        self._rows = pa.ipc.new_file(folder / ROWS_FILE, ROWS)
        self._groups = pa.ipc.new_file(folder / GROUPS_FILE, GROUPS)
        self._home = -1
        self._open: dict[str, Any] | None = None
        self._digests = {name: hashlib.sha256() for name in CONTENT}

    def __enter__(self) -> "_IndexWriter":
        return self

    def __exit__(self, *_: object) -> None:
        if self._open is not None:
            self._write_groups({name: np.array([value]) for name, value in self._open.items()})
        self._rows.close()
        self._groups.close()
        together = "".join(digest.hexdigest() for digest in self._digests.values())
        self.counts.digest = hashlib.sha256(together.encode()).hexdigest()

    def add(self, batch: pa.RecordBatch) -> None:
        """Take the next rows."""
        for name, least in (("advantage", -np.inf), ("weight", 0.0), ("priority", 0.0)):
            values = floats(batch, name)
            _refuse(batch, name, ~(np.abs(values) <= LARGEST) | (values < least))
        prompt, response = self._admission.token_counts(batch)
        reasons = self._admission.reasons(batch, prompt, response)
        counted = np.bincount(reasons, minlength=len(LEFT_OUT) + 1)[1:]
        for name, count in zip(LEFT_OUT, counted, strict=True):
            self.counts.left_out[name] += int(count)
        stays = reasons == 0
        if stays.any():
            self._write(batch.filter(pa.array(stays)), prompt[stays], response[stays])

    def _write(self, rows: pa.RecordBatch, prompt: Ints, response: Ints) -> None:
        homes = integers(rows, "home")
        new = np.diff(homes, prepend=self._home) != 0
        ordinal = self.counts.groups + np.cumsum(new) - 1
        columns = {name: rows.column(name) for name in ("response_id", "file", "file_row")}
        columns |= {name: rows.column(name) for name in ("advantage", "weight", "expert", "reward")}
        columns |= {"group": pa.array(ordinal), "n_tokens": pa.array(response.astype(np.int32))}
        written = pa.record_batch([columns[f.name].cast(f.type) for f in ROWS], schema=ROWS)
        self._rows.write(written)
        self._note_content(written)
        self._note_groups(homes, new, tokens=prompt + response, priority=floats(rows, "priority"))
        self._home = int(homes[-1])
        self.counts.groups += int(new.sum())
        self.counts.rows += len(rows)
        self.counts.signal += int(np.count_nonzero(floats(rows, "advantage")))
        self.counts.visited += int(np.count_nonzero(floats(rows, "priority")))
        self.counts.tokens += int((prompt + response).sum())
        self.counts.response_tokens += int(response.sum())
        self.counts.longest = max(self.counts.longest, int((prompt + response).max()))

    def _note_content(self, rows: pa.RecordBatch) -> None:
        """Column by column, so that the digest does not depend on how the rows came in batches."""
        for name, digest in self._digests.items():
            column = rows.column(name)
            if pa.types.is_string(column.type):
                lines = pc.binary_join_element_wise(column, "\n", "")
                digest.update(lines.buffers()[2].slice(0, pc.sum(pc.binary_length(lines)).as_py()))
            else:
                digest.update(column.to_numpy(zero_copy_only=False).tobytes())

    def _note_groups(self, homes: Ints, new: NDArray[np.bool_], *, tokens: Ints, priority: Floats) -> None:
        """Sum up the groups of these rows; the last one may go on in the next rows."""
        starts = np.flatnonzero(new)
        if self._open is not None and not new[0]:
            starts = np.concatenate([[0], starts])
        found: dict[str, NDArray[Any]] = {
            "start": self.counts.rows + starts,
            "rows": np.diff(starts, append=len(homes)),
            "tokens": np.add.reduceat(tokens, starts),
            "home": homes[starts],
            "priority": np.add.reduceat(priority, starts),
        }
        if self._open is not None:
            if new[0]:
                found = {name: np.append([self._open[name]], values) for name, values in found.items()}
            else:
                found["start"][0] = self._open["start"]
                for name in ("rows", "tokens", "priority"):
                    found[name][0] += self._open[name]
        self._open = {name: values[-1] for name, values in found.items()}
        self._write_groups({name: values[:-1] for name, values in found.items()})

    def _write_groups(self, found: dict[str, NDArray[Any]]) -> None:
        if not len(found["start"]):
            return
        columns = {
            "start": found["start"],
            "rows": found["rows"].astype(np.int32),
            "tokens": found["tokens"],
            "row_group": found["home"] // FILE_SHIFT * FILE_SHIFT
            + found["home"] % FILE_SHIFT // ROW_GROUP_ROWS,
            "priority": found["priority"] / found["rows"],
        }
        arrays = [pa.array(columns[f.name], f.type) for f in GROUPS]
        self.counts.largest_group = max(self.counts.largest_group, int(found["tokens"].max()))
        self._groups.write(pa.record_batch(arrays, schema=GROUPS))


@dataclass(frozen=True)
class IndexedRows:
    """Rows of some groups, those of a group side by side; entry i of every field belongs to row i.

    `group` numbers the groups asked for, so that a group asked for twice is two.
    """

    response_id: list[str]
    file: Ints
    file_row: Ints
    group: Ints
    advantage: Floats
    weight: Floats
    expert: NDArray[np.bool_]
    reward: Floats

    def __len__(self) -> int:
        return len(self.response_id)


class Index:
    """A built index, memory-mapped."""

    def __init__(self, folder: Path) -> None:
        self._rows = _mapped(folder / ROWS_FILE)
        self._groups = _mapped(folder / GROUPS_FILE)
        self.n_rows = self._rows.num_rows
        self.n_groups = self._groups.num_rows

    def block_first(self) -> Ints:
        """The first group of every block and the number of groups, [blocks + 1].

        A block is the groups that begin in one row group of the dataset; small neighbours are one block, so
        that a dataset of many small batches is shuffled as well as one of few large ones.
        """
        kept: list[int] = []
        begun = -ROW_GROUP_ROWS
        for first, row in zip(*self._row_groups(), strict=True):
            if row - begun >= ROW_GROUP_ROWS // 2:
                kept.append(first)
                begun = row
        return np.array([*kept, self.n_groups], np.int64)

    def draw(self, count: int, seed: int, *, row_groups: int) -> Ints:
        """At most `count` groups, the same for a seed, ascending; of as few row groups as will do, but of
        `row_groups` if there are so many: a row group is what has to be read for one of its groups.
        """
        first = np.array([*self._row_groups()[0], self.n_groups], np.int64)
        order = shuffled(len(first) - 1, seed, 1)
        enough = int(np.searchsorted(np.cumsum(np.diff(first)[order]), count)) + 1
        chosen = np.sort(order[: max(enough, row_groups)])
        near = np.concatenate([np.zeros(0, np.int64), *(np.arange(first[i], first[i + 1]) for i in chosen)])
        drawn: Ints = np.sort(near[shuffled(len(near), seed)[:count]])
        return drawn

    def _row_groups(self) -> tuple[list[int], list[int]]:
        """The first group, and its first row, of every run of groups that begin in one row group."""
        last, before, firsts, rows = -1, 0, [], []
        for chunk in self._groups.select(["row_group", "start"]).to_batches():
            at = np.flatnonzero(np.diff(integers(chunk, "row_group"), prepend=last))
            firsts += (at + before).tolist()
            rows += integers(chunk, "start")[at].tolist()
            last, before = chunk.column("row_group")[-1].as_py(), before + len(chunk)
        return firsts, rows

    def priorities(self) -> Floats:
        """Priority of every group, [groups]."""
        priorities: Floats = self._groups.column("priority").to_numpy().astype(np.float64)
        return priorities

    def tokens(self, groups: Ints) -> Ints:
        """Tokens of prompts and responses of each group."""
        tokens: Ints = self._of_groups(groups).column("tokens").to_numpy().astype(np.int64)
        return tokens

    def work(self, groups: Ints, sharing: Sharing) -> Floats:
        """What each group costs to compute, in tokens that attend to nothing.

        The rows of a group are taken to have prompts of one length, and one prompt where prompts are shared.
        """
        found = self._of_groups(groups)
        work = np.zeros(len(groups))
        for i, (start, rows, tokens) in enumerate(
            zip(*(found.column(name).to_pylist() for name in ("start", "rows", "tokens")), strict=True)
        ):
            response = self._rows.column("n_tokens").slice(start, rows).to_numpy().astype(np.int64)
            prompt = np.full(rows, (tokens - response.sum()) // rows)
            same = np.zeros(rows, np.int64) if sharing.once else np.arange(rows)
            work[i] = cost_of(plan(prompt, response, same, sharing), replace(sharing.costs, launch=0.0))
        return work

    def take(self, groups: Ints) -> IndexedRows:
        """The rows of these groups, in the order asked."""
        found = self._of_groups(groups)
        starts, counts = found.column("start").to_pylist(), found.column("rows").to_pylist()
        # Slices and not `take`, which would join all chunks of the mapped column in memory.
        parts = [self._rows.slice(start, count) for start, count in zip(starts, counts, strict=True)]
        rows = pa.concat_tables(parts) if parts else self._rows.slice(0, 0)
        numbers = {name: rows.column(name).to_numpy() for name in ("advantage", "weight", "reward")}
        return IndexedRows(
            response_id=rows.column("response_id").to_pylist(),
            file=rows.column("file").to_numpy().astype(np.int64),
            file_row=rows.column("file_row").to_numpy().astype(np.int64),
            group=np.repeat(np.arange(len(groups)), counts),
            expert=rows.column("expert").to_numpy().astype(bool),
            **{name: values.astype(np.float64) for name, values in numbers.items()},
        )

    def _of_groups(self, groups: Ints) -> pa.Table:
        parts = [self._groups.slice(int(group), 1) for group in groups]
        return pa.concat_tables(parts) if parts else self._groups.slice(0, 0)


def _mapped(path: Path) -> pa.Table:
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


def _refuse(rows: pa.RecordBatch, name: str, bad: NDArray[np.bool_]) -> None:
    if bad.any():
        names = rows.column("response_id").filter(pa.array(bad))[:3].to_pylist()
        raise UnusableNumber(
            f"{name} is not a number that can be used in {int(bad.sum())} rows, such as {', '.join(names)}",
            f"look at them with `rec sql`, and mend the {name} expression or filter them out",
        )
