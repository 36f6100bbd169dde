"""Rejects that a dataset holds already, so that collecting a log again does not repeat them."""

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

import pyarrow as pa

from data_tools.collecting.reasons import Reject

if TYPE_CHECKING:
    from data_tools.store.batches import BatchWriter
    from data_tools.store.dataset import StoredDataset


class KnownRejects:
    """Rejects that the dataset holds: collecting a log again must not repeat them."""

    def __init__(self, dataset: "StoredDataset | None") -> None:
        self._dataset = dataset
        self._batches = dataset.batches() if dataset else []
        query = "SELECT DISTINCT source_file FROM rejects"
        some = dataset is not None and dataset.has_rejects()
        self._files = set(dataset.sql(query).column(0).to_pylist()) if dataset and some else set()

    def without(self, source: str, rejects: Sequence[Reject]) -> Sequence[Reject]:
        """Those of some rejects of a log that are new."""
        if not rejects or not self._dataset or source not in self._files:
            return rejects
        rows = [reject.row or 0 for reject in rejects]
        query = """SELECT source_row, reason FROM rejects
            WHERE source_file = ? AND coalesce(source_row, 0) BETWEEN ? AND ?"""
        known = self._dataset.sql(query, [source, min(rows), max(rows)])
        pairs = set(zip(*(column.to_pylist() for column in known.columns), strict=True))
        return [reject for reject in rejects if (reject.row, reject.reason) not in pairs]

    def without_those_since(self, writer: "BatchWriter") -> None:
        """Take out of a batch what others have committed since this was made."""
        if not self._dataset or self._dataset.batches() == self._batches or not writer.n_rejects:
            return
        renewed = KnownRejects(self._dataset)
        if renewed._files:
            writer.revise_rejects(renewed._filtered)

    def _filtered(self, table: pa.Table) -> pa.Table:
        """The new rows of a table of rejects."""
        rows = table.to_pylist()
        stays: list[bool] = []
        for source, some in groupby(rows, key=itemgetter("source_file")):
            rejects = [Reject(row["source_row"], row["reason"]) for row in some]
            fresh = set(map(id, self.without(source, rejects)))
            stays += [id(reject) in fresh for reject in rejects]
        return table.filter(pa.array(stays, pa.bool_()))
