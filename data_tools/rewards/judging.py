"""Judges rows that a dataset holds already by a rule; the rewards are kept as all later rewards are."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from data_tools.collecting.reasons import NOTES, Notes
from data_tools.rewards.later import RewardWriter
from data_tools.rewards.rules import reward_rule
from data_tools.schema import ROLLOUTS, TOKEN_COLUMNS
from data_tools.store.guard import check_expression

if TYPE_CHECKING:
    from data_tools.store.dataset import StoredDataset

BATCH_ROWS = 4096
_DESCRIPTION = 200


@dataclass(slots=True)
class JudgeReport:
    """What became of the rows: `rows` == `rewarded` + `unchanged` + `not_judged`.

    `unchanged` rows have that reward already, `not_judged` rows got none and keep what they have. `notes`
    counts what went wrong by its code (reasons.NOTES), `details` says of the first case what it was.
    """

    rows: int = 0
    rewarded: int = 0
    unchanged: int = 0
    not_judged: int = 0
    notes: dict[str, int] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """The report as text, a line a fact."""
        shown = [
            f"{self.rows} judged: {self.rewarded} rewards are new, {self.unchanged} unchanged, "
            f"{self.not_judged} not judged"
        ]
        for code, count in sorted(self.notes.items()):
            detail = f" ({self.details[code]})" if code in self.details else ""
            shown.append(f"  {count} {code}: {NOTES.get(code, '')}{detail}")
        return shown


def judge(
    dataset: "StoredDataset",
    definition: str | Callable[..., Any],
    *,
    where: str | None = None,
    source: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> JudgeReport:
    """Judge the rows `where` (an SQL condition over `rollouts`; all by default) by a rule (reward_rules.py).

    `source` says who judged: the rule. `progress` is told rows done and rows in all. A row for which the rule
    gives nothing keeps the reward it has.
    """
    if where is not None:
        check_expression(where, "--where", subqueries=True)
    rule = reward_rule(definition)
    condition = f"WHERE ({where}\n)" if where else ""
    columns = ", ".join(f'"{name}"' for name in _columns(definition))
    total = dataset.sql(f"SELECT count(*) AS n FROM rollouts {condition}").column("n")[0].as_py()
    report, notes = JudgeReport(), Notes()
    named = getattr(definition, "name", None) or getattr(definition, "__qualname__", definition)
    with RewardWriter(dataset.storage, source or str(named)[:_DESCRIPTION]) as writer:
        for batch in dataset.reader(f"SELECT {columns} FROM rollouts {condition}", BATCH_ROWS):
            table = pa.Table.from_batches([batch])
            verdicts = rule(table)
            notes.merge(verdicts.notes)
            writer.write(_changed(table, verdicts.rewards, report))
            if progress is not None:
                progress(report.rows, total)
        rule.finish()
        writer.commit()
    report.notes, report.details = dict(notes.counts), dict(notes.details)
    return report


def _columns(definition: str | Callable[..., Any]) -> list[str]:
    """The columns to read: the wide ones only for a rule that may look at them."""
    return [
        name
        for name in ROLLOUTS.names
        if name not in TOKEN_COLUMNS
        or not isinstance(definition, str)
        or name in definition
        or ":" in definition
    ]


def _changed(table: pa.Table, rewards: pa.Array, report: JudgeReport) -> pa.Table:
    """The rows whose reward is another one now, counted."""
    before = table.column("reward").combine_chunks()
    given = pc.is_valid(rewards)
    same = pc.fill_null(pc.equal(before, rewards), False)
    change = pc.and_(given, pc.invert(same))
    report.rows += table.num_rows
    report.rewarded += pc.sum(change, min_count=0).as_py()
    report.unchanged += pc.sum(same, min_count=0).as_py()
    report.not_judged += table.num_rows - pc.sum(given, min_count=0).as_py()
    named = pa.table({"response_id": table.column("response_id"), "reward": rewards})
    return named.filter(change)
