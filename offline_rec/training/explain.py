"""`rec fit --explain`: what a configuration would train on, and whether it could. Writes nothing."""

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from data_tools.errors import RecError
from data_tools.shaping import Explanation
from data_tools.shaping import explain as explain_shaping
from offline_rec.config import FitConfig
from offline_rec.training.plan import Plan, check_guards, check_logprobs, dataset_of, remarks


@dataclass(frozen=True)
class FitExplanation:
    """The shaping in numbers, the objective in use, and what a fit would say of the data.

    `problem` is the error, in its two lines, with which a fit would stop before training.
    """

    shaping: Explanation
    algorithm: str
    formula: str
    objective: dict[str, float]
    needs: list[str]
    anchor: str
    remarks: list[str]
    problem: str | None

    def text(self) -> str:
        """The statement, the row counts, the weight by policy and version, and what is worth knowing."""
        parameters = ", ".join(f"{name} {value:g}" for name, value in self.objective.items())
        lines = [
            self.shaping.text(),
            "",
            f"algorithm {self.algorithm}: {self.formula}",
            f"parameters: {parameters or 'none'}",
            f"needs: {', '.join(self.needs) or 'nothing'}",
            *(f"note: {remark}" for remark in self.remarks),
            *([f"problem: {self.problem}"] if self.problem else []),
        ]
        return "\n".join(lines)

    def facts(self) -> dict[str, Any]:
        """The same as JSON-able values."""
        return asdict(self) | {"shaping": self.shaping.model_dump(mode="json")}


def explain(config: FitConfig) -> FitExplanation:
    """Run the shaping and the checks of a fit; `ConfigError` or `DataError` where even that fails."""
    plan = Plan.of(config)
    ds = dataset_of(config)
    with ds.connect(datetime.now(UTC)) as con:
        shaping = explain_shaping(con, plan.shaping, split=config.split)
        problem = None
        try:
            check_logprobs(con, plan, config)
            check_guards(con, config)
        except RecError as error:
            problem = str(error)
        return FitExplanation(
            shaping=shaping,
            algorithm=plan.algorithm.name,
            formula=plan.algorithm.formula,
            objective=plan.composition.parameters,
            needs=sorted(plan.algorithm.data_needs | plan.composition.needs),
            anchor=config.anchor,
            remarks=remarks(con, plan, config),
            problem=problem,
        )
