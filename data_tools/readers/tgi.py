"""Logs of TGI (text-generation-inference): /generate with details.

`details.prefill` are the ids of the whole prompt where `decoder_input_details` was asked for. Log-probs are
those after temperature, top-k and top-p. Special tokens are among the tokens, but not in the text.
"""

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

from data_tools.collecting.reasons import Refused
from data_tools.readers.base import Carries, Log, RecordReader, Values
from data_tools.readers.exchange import Object
from data_tools.readers.native import NativeForm
from data_tools.readers.token_logprobs import TokenLogprobs, known_ids

_GREEDY = "greedy"
"""Only a response that was sampled has a seed."""

_PARTS = itemgetter("id", "logprob", "text")
NOT_KEPT = ("tokens", "prefill", "best_of_sequences", "top_tokens")


def _choices(response: Object) -> list[Object]:
    """The response that was returned, then the others of `best_of`, all of one prompt."""
    details = response.get("details")
    details = details if isinstance(details, dict) else {}
    others = details.get("best_of_sequences")
    sequences = [{**details, "generated_text": response.get("generated_text")}]
    sequences += others if isinstance(others, list) else []
    prompt = _ids(details.get("prefill"))
    return [_choice(sequence, prompt) if isinstance(sequence, dict) else sequence for sequence in sequences]


def _choice(sequence: Object, prompt: list[int] | None) -> Object:
    choice = {name: value for name, value in sequence.items() if name not in (*NOT_KEPT, "generated_text")}
    choice |= {"text": sequence.get("generated_text"), "prompt_token_ids": prompt}
    choice[_GREEDY] = "seed" in sequence and sequence["seed"] is None
    tokens = _parts(sequence.get("tokens"))
    if tokens:
        ids, values, texts = map(list, zip(*tokens, strict=True))
        choice["logprobs"] = TokenLogprobs.of(values, texts, ids)
    return choice


def _ids(tokens: Any) -> list[int] | None:
    return known_ids([item for item, _, _ in _parts(tokens)])


def _parts(tokens: Any) -> list[tuple[Any, Any, Any]]:
    """Id, log-prob and text of tokens, None where one lacks them."""
    if not isinstance(tokens, list):
        return []
    try:
        return list(map(_PARTS, tokens))
    except (KeyError, TypeError):
        objects = [token if isinstance(token, dict) else {} for token in tokens]
        return [(token.get("id"), token.get("logprob"), token.get("text")) for token in objects]


FORM = NativeForm(
    mark="generated_text",
    fields=frozenset({"generated_text", "details"}),
    prompts=("inputs",),
    choices=_choices,
)


class TgiReader(RecordReader):
    """One record is a response of /generate, alone or with its request; `best_of` makes it several."""

    name = "tgi"
    title = "TGI /generate with details, request and response (JSONL, JSON, Parquet)"
    carries = Carries(
        prompt="ids if asked for, or from the request",
        group="responses of a call, else equal prompts",
        reward="field beside the call",
        ids="yes",
        logprobs="yes, after temperature, top-k and top-p",
    )

    def detect(self, log: Log, samples: Sequence[Any]) -> bool:
        """Take a log with a response whose details list tokens or say how it ended."""
        return any(
            isinstance(response.get("details"), dict)
            and {"tokens", "generated_tokens"} & response["details"].keys()
            for sample in samples
            for response in FORM.responses(sample)
        )

    def rows(self, record: Any, log: Log) -> Iterator[Values | Refused]:
        """Yield the responses of a record."""
        for row in FORM.rows(record):
            yield row if isinstance(row, Refused) else _finished(dict(row))


def _finished(row: Object) -> Object:
    """A row whose greedy choice is said as temperature 0, and whose text is what was generated alone."""
    extra = row["extra"]
    if extra.pop(_GREEDY, False) is True and row["temperature"] in (None, 1):
        row["temperature"] = 0.0
    prompt, text = row["prompt"], row["response"]
    if extra.get("return_full_text") is True and isinstance(prompt, str) and isinstance(text, str):
        row["response"] = text.removeprefix(prompt)
    return row
