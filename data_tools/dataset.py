"""A dataset as its users hold it: the files, the SQL, and a method for everything that is done with them."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from data_tools.store.dataset import StoredDataset

if TYPE_CHECKING:
    import pyarrow as pa

    from data_tools.checking import Report
    from data_tools.collecting.collect import CollectReport
    from data_tools.rewards.judging import JudgeReport
    from data_tools.rewards.later import RewardReport, RewardWriter
    from data_tools.shaping import Shaping
    from data_tools.store.compaction import CompactReport
    from data_tools.store.deletion import DeleteReport


class Dataset(StoredDataset):
    """An opened dataset; get one from `data_tools.open`."""

    def stats(self) -> dict[str, Any]:
        """Return the facts of `rec stats`, as JSON-able values (stats.py)."""
        from data_tools.store.stats import dataset_stats

        return dataset_stats(self)

    def check(self, **options: Any) -> "Report":
        """Look for what is wrong, as far as it can be told without a model (checking.check)."""
        from data_tools.checking import check

        return check(self, **options)

    def rewards_writer(self, source: str) -> "RewardWriter":
        """Return a writer of later rewards; `source` says who judged."""
        from data_tools.rewards.later import RewardWriter

        return RewardWriter(self.storage, source)

    def add_rewards(self, file: str, **options: Any) -> "RewardReport":
        """Append the rewards of a file (later_rewards.add_rewards)."""
        from data_tools.rewards.later import add_rewards

        return add_rewards(self, file, **options)

    def judge(self, definition: str | Callable[..., Any], **options: Any) -> "JudgeReport":
        """Judge rows by a rule and append the rewards (judging.judge)."""
        from data_tools.rewards.judging import judge

        return judge(self, definition, **options)

    def collect(self, sources: Sequence[str], **options: Any) -> "CollectReport":
        """Append what logs hold (collecting.collect)."""
        from data_tools.collecting.collect import collect

        return collect(sources, self, **options)

    def shape(self, shaping: "Shaping", **options: Any) -> "pa.RecordBatchReader":
        """Stream the shaped rows, each with its advantage and weight (shaping.shape)."""
        from data_tools.shaping import shape

        return shape(self, shaping, **options)

    def delete(self, where: str, *, dry_run: bool = False) -> "DeleteReport":
        """Erase the rows where an SQL condition holds from every file (deletion.delete)."""
        from data_tools.store.deletion import delete

        return delete(self, where, dry_run=dry_run)

    def compact(self) -> "CompactReport":
        """Rewrite the dataset as fewer, larger files with groups side by side (compaction.compact)."""
        from data_tools.store.compaction import compact

        return compact(self)
