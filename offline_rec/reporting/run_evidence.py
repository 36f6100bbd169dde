"""What is known of a run's policy beyond its training: off-policy estimates and sampled evaluations."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from offline_rec.evidence.logged import LEFT_OUT
from offline_rec.reporting.blocks import Cell, Fact, Facts, Note, Span, Table
from offline_rec.reporting.plain_text import name, number, share, shortened, signed

if TYPE_CHECKING:
    import duckdb

    from data_tools.run_directory import RunDirectory

OPE_FILE = "ope.json"
NOT_TOLD = "not identifiable"


def read_ope(run: "RunDirectory") -> dict[str, Any] | None:
    """The report of `rec ope` that a run keeps, None if it has none that can be read."""
    if not run.storage.exists(OPE_FILE):
        return None
    try:
        found = json.loads(run.storage.read(OPE_FILE))
        return found if isinstance(found["policies"][0]["verdict"]["word"], str) else None
    except (ValueError, KeyError, TypeError, IndexError):
        return None


def estimated(ope: Mapping[str, Any] | None, where: str, dataset: str) -> list[Any]:
    """What the log tells of the policy before anybody deploys it."""
    if ope is None:
        return [Note("No off-policy estimate is kept in this run.", f"rec ope {where} --data {dataset}")]
    judged = ope["policies"][0]
    word, reason = judged["verdict"]["word"], judged["verdict"].get("reason", "")
    told, sizes = word != NOT_TOLD, judged.get("diagnostics", {})
    value, gain, logged = judged.get("value", {}), judged.get("gain", {}), ope.get("logged", {})
    facts = [
        Fact("Verdict", name(word), shortened(str(reason), 200)[0]),
        Fact("Estimate", number(value.get("value")) if told else "–", _interval(value) if told else ""),
        Fact("The log earned", number(logged.get("value")), _interval(logged)),
        Fact("Gain", signed(gain.get("value")) if told else "–", _interval(gain) if told else ""),
        Fact(
            "Effective responses",
            number(_rounded(sizes.get("ess"))),
            f"of {number(ope.get('episodes'))}: {share(sizes.get('ess_share'))}",
        ),
        Fact("Drift", number(sizes.get("kl_k3")), "KL in nats per token"),
    ]
    blocks: list[Any] = [Facts(facts), _estimates(judged, logged)]
    if judged.get("trained_rows"):
        blocks.append(
            Note(
                f"The policy was trained on the prompts of {number(judged['trained_rows'])} of these rows: "
                "this is how well it knows them, not what it would earn on others."
            )
        )
    left_out = [f"{number(n)} because {LEFT_OUT.get(why, why)}" for why, n in ope.get("left_out", {}).items()]
    if left_out:
        blocks.append(Note(f"Left out: {'; '.join(left_out)}."))
    return [*blocks, *(Note(f"{note}") for note in ope.get("notes", []))]


def _rounded(value: Any) -> int | None:
    return None if value is None else round(value)


def _interval(found: Mapping[str, Any]) -> str:
    if found.get("low") is None:
        return ""
    return f"95 %: {number(found['low'])} to {number(found['high'])}"


def _estimates(judged: Mapping[str, Any], logged: Mapping[str, Any]) -> Table:
    listed = judged.get("estimates", [])
    spans = _spans([one["value"] for one in listed], logged.get("value"))
    rows: list[list[Cell]] = [
        [name(one["name"]), span, signed(one["gain"]["value"]), name(one["bias"] or "unbiased", 60)]
        for one, span in zip(listed, spans, strict=True)
    ]
    rest = f"The dashed line is what the log earned, {number(logged.get('value'))}. "
    return Table(
        "Do the estimators agree?",
        ["estimator", "estimate with its 95 % interval", "gain", "biased by"],
        rows,
        (2,),
        rest + "Where they part, the weights are too uneven to tell; those without bias need the most data.",
    )


def _spans(values: Sequence[Mapping[str, Any]], zero: float | None) -> list[Cell]:
    """Intervals on one scale, which ends where the middle ones do: a wild one would flatten all others."""
    known = [v for v in values if None not in (v.get("value"), v.get("low"), v.get("high"))]
    if not known:
        return ["–" for _ in values]
    ends = sorted(v["high"] - v["low"] for v in known)
    usual = 3 * ends[len(ends) // 2]
    calm = [v for v in known if v["high"] - v["low"] <= usual] or known
    low = min([v["low"] for v in calm] + ([] if zero is None else [zero]))
    high = max([v["high"] for v in calm] + ([] if zero is None else [zero]))
    width = (high - low) or 1.0

    def place(x: float) -> float:
        return float(min(1.0, max(0.0, (x - low) / width)))

    return [
        Span(
            f"{number(v['value'])} ({number(v['low'])} to {number(v['high'])})",
            place(v["low"]),
            place(v["value"]),
            place(v["high"]),
            None if zero is None else place(zero),
        )
        if v in known
        else "–"
        for v in values
    ]


def evaluated(con: "duckdb.DuckDBPyConnection", where: str) -> list[Any]:
    """What samples of the policy earned, in the latest evaluation that the run keeps."""
    found = con.execute(
        """SELECT policy, compared_with, measure, k, value, low, high, evaluation FROM evaluations
            WHERE evaluation = (SELECT max(evaluation) FROM evaluations)
            ORDER BY compared_with IS NOT NULL, measure, k, policy LIMIT 60"""
    ).fetchall()
    if not found:
        return [Note("No evaluation is kept in this run.", f"rec eval {where} --prompts FILE --reward R")]
    blocks = []
    accuracy = {(row[0], row[1], row[4]) for row in found if row[2] == "accuracy"}
    # Where every reward is 0 or 1, the mean reward is the accuracy once more.
    found = [row for row in found if row[2] != "mean_reward" or (row[0], row[1], row[4]) not in accuracy]
    plain = [row for row in found if row[1] is None]
    paired = [row for row in found if row[1] is not None]
    for rows, question in ((plain, "What do its samples earn?"), (paired, "Is that more than others earn?")):
        if not rows:
            continue
        spans = _spans(
            [{"value": r[4], "low": r[5], "high": r[6]} for r in rows], 0.0 if rows is paired else None
        )
        named = [f"{r[0]} − {r[1]}" if r[1] is not None else f"{r[0]}" for r in rows]
        listed: list[list[Cell]] = [
            [name(who, 100), name(r[2] if r[3] is None else f"{r[2]} {r[3]}"), span]
            for who, r, span in zip(named, rows, spans, strict=True)
        ]
        blocks.append(Table(question, ["policy", "measure", "value with its 95 % interval"], listed))
    return [*blocks, Note(f"Evaluation {found[0][7]} of this run; sampled anew, so no estimate.")]
