"""Writes one Parquet file of a dataset: schema enforced, memory bounded, invisible until published."""

import contextlib
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from data_tools.errors import DataError
from data_tools.schema import ROW_GROUP_ROWS, TOKEN_COLUMNS
from data_tools.store.storage import Storage, discard, write_error

if TYPE_CHECKING:
    import pyarrow.parquet as pq

ROW_GROUP_BYTES = 64 << 20
"""Long responses close a row group before ROW_GROUP_ROWS, so that one is never more than this in memory."""

_NEVER_REPEATED = frozenset({*TOKEN_COLUMNS, "logprobs", "response_id", "id_hash", "response", "raw"})


def _is_list(field: pa.Field) -> bool:
    return bool(pa.types.is_list(field.type))


def _logprobs(schema: pa.Schema) -> list[str]:
    """Lists of floats, a tenth smaller byte by byte. Ids would be, too, but few programs read that."""
    return [f"{f.name}.list.element" for f in schema if _is_list(f) and f.type.value_type == pa.float32()]


def conform(table: "pa.Table | pa.RecordBatch", schema: pa.Schema, what: str) -> pa.Table:
    """Return `table` with exactly the columns and types of `schema`; absent nullable columns become null.

    Raises DataError for an unknown column, a missing required one, a null where none may be, or a value that
    does not fit its type. `what` names the table in the message.
    """
    if isinstance(table, pa.RecordBatch):
        table = pa.Table.from_batches([table])
    unknown = sorted(set(table.column_names) - set(schema.names))
    if unknown:
        raise DataError(
            f"{what}: unknown column {unknown[0]!r}", f"the columns are: {', '.join(schema.names)}"
        )
    return pa.Table.from_arrays([_column(table, field, what) for field in schema], schema=schema)


def _column(table: pa.Table, field: pa.Field, what: str) -> "pa.ChunkedArray | pa.Array":
    if field.name not in table.column_names:
        if not field.nullable:
            raise DataError(f"{what}: column {field.name!r} is missing", "every row needs a value there")
        return pa.nulls(table.num_rows, field.type)
    column = table.column(field.name)
    if column.null_count and not field.nullable:
        row = pc.index(pc.is_null(column), True).as_py()
        raise DataError(
            f"{what}: column {field.name!r} is null in row {row}", "every row needs a value there"
        )
    if column.type == field.type:
        return column
    try:
        return column.cast(field.type)
    except pa.ArrowException as error:
        raise DataError(
            f"{what}: column {field.name!r} is not {field.type}: {error}", "cast it first"
        ) from error


class ParquetFileWriter:
    """Appends tables to a staged file in row groups of ROW_GROUP_ROWS rows, zstd, then publishes or discards
    it.
    """

    def __init__(self, storage: Storage, name: str, schema: pa.Schema) -> None:
        self.storage, self.name, self.schema = storage, name, schema
        self.rows = 0
        self.staged = storage.staging_path(name)
        self._writer: pq.ParquetWriter | None = None
        self._waiting: list[pa.Table] = []
        self._waiting_rows = self._waiting_bytes = 0

    def write(self, table: "pa.Table | pa.RecordBatch") -> None:
        """Append rows."""
        table = conform(table, self.schema, self.name)
        for start in range(0, table.num_rows, ROW_GROUP_ROWS):
            part = table.slice(start, ROW_GROUP_ROWS)
            self._waiting.append(part)
            self._waiting_rows += part.num_rows
            self._waiting_bytes += part.nbytes
            if self._waiting_rows >= ROW_GROUP_ROWS or self._waiting_bytes >= ROW_GROUP_BYTES:
                self._flush(final=False)
        self.rows += table.num_rows

    def finish(self) -> None:
        """Write what is buffered and the footer; nothing can be appended afterwards."""
        self._flush(final=True)
        with self._disk_errors():
            self._open().close()

    def publish(self, name: str | None = None, *, exclusive: bool = False) -> None:
        """Make the finished file visible, as `name` where the final name was not known before.

        With `exclusive` a file that is there already is a DataError.
        """
        target = name or self.name
        try:
            self.storage.publish(self.staged, target, exclusive=exclusive)
        except FileExistsError as error:
            raise DataError(f"{self.storage.url(target)} exists already", "choose another name") from error
        except OSError as error:
            raise write_error(self.storage.url(target), error) from error

    def discard(self) -> None:
        """Forget the file."""
        self._waiting.clear()
        if self._writer is not None:
            with contextlib.suppress(OSError, pa.ArrowException):  # a full disk fails to close, too
                self._writer.close()
        discard(self.staged)

    def _open(self) -> "pq.ParquetWriter":
        if self._writer is None:
            import pyarrow.parquet as pq

            columns = [name for name in self.schema.names if name not in _NEVER_REPEATED]
            with self._disk_errors():
                self._writer = pq.ParquetWriter(
                    self.staged,
                    self.schema,
                    compression="zstd",
                    use_dictionary=columns,
                    use_byte_stream_split=_logprobs(self.schema),
                    write_statistics=[field.name for field in self.schema if not _is_list(field)],
                    write_page_index=False,
                )
        return self._writer

    def _flush(self, *, final: bool) -> None:
        if not self._waiting_rows:
            return
        table = pa.concat_tables(self._waiting)
        full = table.num_rows if final else self._complete(table)
        with self._disk_errors():
            self._open().write_table(table.slice(0, full), row_group_size=ROW_GROUP_ROWS)
        rest = table.slice(full)
        self._waiting, self._waiting_rows, self._waiting_bytes = [rest], rest.num_rows, rest.nbytes

    def _complete(self, table: pa.Table) -> int:
        """Rows that make up whole row groups; all of them where bytes, not rows, closed the group."""
        rows: int = table.num_rows
        return rows if self._waiting_bytes >= ROW_GROUP_BYTES else rows - rows % ROW_GROUP_ROWS

    @contextlib.contextmanager
    def _disk_errors(self) -> "contextlib.Generator[None]":  # type: ignore[name-defined]
        try:
            yield
        except OSError as error:
            raise write_error(self.staged, error) from error
