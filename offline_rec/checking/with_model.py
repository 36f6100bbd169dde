"""The order of the checks with a model: its tokenizer against the cards, texts against ids, log-probs."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_tools.checking import Findings, Sample, checked_rows
from offline_rec.checking.differences import compare_logprobs
from offline_rec.checking.rules import (
    OTHER_TEMPLATE,
    OTHER_TOKENIZER,
    STOPS_ELSEWHERE,
    TOO_LONG,
    UNKNOWN_TOKENIZER,
)
from offline_rec.checking.texts import compare_texts
from offline_rec.data.encoding import Encoder
from offline_rec.data.fingerprint import fingerprint, same_vocabulary
from offline_rec.models.policy import Policy

if TYPE_CHECKING:
    import duckdb


def check_with_model(
    sample: Sample,
    model: str | Path,
    findings: Findings,
    *,
    where: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """Note what the model finds in the sampled rows; the records of `Report.logprobs`."""
    policy = Policy.load(model)
    encoder = Encoder(policy.tokenizer)
    _stops(policy, encoder, findings)
    if not len(sample):
        return []
    with checked_rows(sample.dataset, where) as con:
        _tokenizers(con, sample, policy, findings)
        _lengths(con, sample.total, policy, findings)
    compare_texts(sample, encoder, policy.vocabulary, findings)
    return compare_logprobs(sample, policy, findings, samplers=_samplers(sample, model), progress=progress)


def _stops(policy: Policy, encoder: Encoder, findings: Findings) -> None:
    """Whether sampling with the saved model ends where its own texts end."""
    end = encoder.end_of_text if policy.tokenizer.chat_template is None else encoder.end_of_turn
    known = getattr(policy.model, "generation_config", None) or policy.model.config
    stops = known.eos_token_id if isinstance(known.eos_token_id, list) else [known.eos_token_id]
    if end is None or end in stops:
        return
    detail = f"it stops at {stops}, the end token is {policy.tokenizer.convert_ids_to_tokens(end)!r} ({end})"
    listed = [*(stop for stop in stops if stop is not None), end]
    findings.add(STOPS_ELSEWHERE, 1, [], of=1, detail=detail, stops=listed)


def _tokenizers(con: "duckdb.DuckDBPyConnection", sample: Sample, policy: Policy, findings: Findings) -> None:
    """The tokenizer that each policy's card names, against the model's."""
    own = fingerprint(policy.tokenizer)
    cards = sample.dataset.policies()
    query = """SELECT policy, count(*), min(response_id, 3) FROM checked WHERE n_tokens IS NOT NULL
        GROUP BY policy ORDER BY policy"""
    for name, count, rows in con.sql(query).fetchall():
        card = cards.get(name)
        known = None if card is None else card.tokenizer
        if known == own:
            continue
        rule = UNKNOWN_TOKENIZER
        if known is not None:
            rule = OTHER_TEMPLATE if same_vocabulary(known, own) else OTHER_TOKENIZER
        detail = f"policy {name!r}: fingerprint {known or 'unknown'}, the model's is {own}"
        findings.add(rule, count, rows, of=sample.total, detail=detail)


def _lengths(con: "duckdb.DuckDBPyConnection", total: int, policy: Policy, findings: Findings) -> None:
    if policy.context is None:
        return
    query = f"""SELECT count(*), min(response_id, 3), max(n_prompt_tokens + n_tokens) FROM checked
        WHERE n_prompt_tokens + n_tokens > {policy.context}"""
    [(count, rows, longest)] = con.sql(query).fetchall()
    detail = f"up to {longest} tokens, the context is {policy.context}"
    findings.add(TOO_LONG, count, rows, of=total, detail=detail, context=policy.context)


def _samplers(sample: Sample, model: str | Path) -> set[str]:
    """Policies whose card names the directory of this model."""
    here = Path(model).resolve()
    cards = sample.dataset.policies().values()
    return {card.name for card in cards if card.model is not None and Path(card.model).resolve() == here}
