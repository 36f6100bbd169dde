"""Why a record was refused, changed or flagged: every code that a collect report counts, with its meaning."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

REASONS = {
    "not_json": "the line is not JSON (or not UTF-8 text)",
    "torn_line": "the line breaks off, or holds a broken record and another: a writer was killed and resumed",
    "line_too_long": "the line is longer than 1 GiB",
    "too_deep": "the record is nested too deeply to be stored",
    "damaged_database": "the SQLite database is damaged from here on; what came before was read",
    "pickle_refused": "a pickle that holds more than plain values (an object of an older version of the "
    "trainer, or worse): no class is ever loaded from a log",
    "torn_stream": "the stream of pieces breaks off before the response ends, or lost a piece on the way",
    "torn_archive": "the compressed log breaks off here; what came before was read",
    "not_an_object": "the record is a bare number, text or list, not an object with fields",
    "bad_csv": "the row does not have one value per column of the CSV header, or its quotes are broken",
    "bad_record": "the record does not have the shape of its format",
    "no_prompt": "neither a prompt text, messages nor prompt ids",
    "no_response": "neither a response text, message nor response ids",
    "bad_reward": "the reward is a text that could mean several numbers, such as '1,5'",
    "bad_ids": "the token ids are no ids (fractions, negative, beyond int32) and there is no text instead",
    "too_long": "the response is longer than --max-response-chars allows",
    "not_redactable": "token ids without their text, which --redact cannot look through",
    "bad_mask": "the loss mask does not fit the response ids, so which tokens the policy produced is unknown",
    "id_conflict": "another record of this log gave the same response id with other content",
    "erased": "the response was deleted from this dataset by `rec delete`",
    "not_sampled": "the task scores given texts (a log-likelihood task): no response was sampled",
    "failed_call": "the call failed, so there is no response",
    "cache_hit": "the response came from a cache: no draw of its own",
    "truncated_by_proxy": "the log's writer cut the middle out of a long text: what is left is no response",
    "redacted": "the log's writer took the text out",
    "deleted": "the log says that the record was deleted",
    "unmatched_score": "a score of something that is no response collected with it: add it later with "
    "`rec reward`",
    "unmatched_message": "a message of a model call whose span was not collected with it: collect spans and "
    "log records in one command",
}
"""Reject codes: the record is not in the dataset; `rejects` holds its file, row, reason and beginning."""

NOTES = {
    "reward_from_text": "a reward written as text was read as a number",
    "reward_unreadable": "the reward is no number (a word, a list, NaN, infinite): stored as missing, "
    "what was logged is in `extra`",
    "reward_failed": "the reward rule raised an error, or gave no number: the reward is missing",
    "reward_absent": "the record has no field of the name that was given as the reward: it is missing",
    "id_from_text": "token ids written as text were read as integers",
    "id_from_float": "token ids written as floats without a fraction were read as integers",
    "value_unreadable": "a value does not fit its column: stored as missing, what was logged is in `extra`",
    "logprob_rounded": "a log-prob a little above 0 (at most 0.001, rounding of the engine) was set to 0",
    "duplicate_key": "the record names a field twice; the last value counts",
    "lone_surrogate": "half a surrogate pair in a text was escaped",
    "time_unreadable": "the time of sampling is no time since 1973; stored as missing",
    "several_rewards": "several columns are rewards and none is their total: the reward is missing until "
    "--reward names one, or combines them (they are in `extra`)",
    "reward_at_token": "a reward per token with one at the last token alone: that one is the reward",
    "reward_of_score": "the reward is the score of this name",
    "several_scores": "scores of several names: those that are not the reward are in `extra` under "
    "`scores`, and `--reward NAME` takes one of them",
    "scores_differ": "several values of one score differ: the reward is missing, all of them are in `extra`",
    "not_a_call": "the record is no model call (a span of a tool, a chain, an event): it was passed over",
    "joined_score": "a score was joined to its response",
    "joined_message": "a message in a log record was joined to the span of its call",
    "not_a_rollout": "the record is a summary or metadata of rollouts, none itself: it was passed over",
    "unfinished_export": "the folder has no STABLE file yet: more may be written, so collect it again later",
    "merged_filter": "the record holds responses of another record again, judged under another filter: its "
    "scores are in `extra` there",
    "several_prompts": "a group, by the log's own key, holds prompts that differ; the key wins",
}
"""Note codes: the row is in the dataset, but something about it was changed, converted or left out."""

FLAGS = {
    "redacted": "personal data was replaced; where it stood in prompt, tools or response, ids and log-probs "
    "are of another text: left out",
    "truncated": "the response was cut at the length limit",
    "retokenised": "the ids were made from text, not by the engine: ids and log-probs are left out",
    "bad_ids": "the response ids are no ids; ids and log-probs are left out, the text stays",
    "bad_prompt_ids": "the prompt ids are no ids; they are left out, the text stays",
    "missing_logprobs": "some log-probs are null, NaN, infinite or a floor (<= -9999): no usable log-probs",
    "positive_logprobs": "some log-probs are above 0, which no probability has; those are stored as missing",
    "logprob_length": "not one log-prob per response id, and no safe way to cut: log-probs are left out",
    "logprob_tail_cut": "surplus log-probs behind the last response id (a trimmed stop token) were cut",
    "logprobs_without_ids": "log-probs without response ids: kept, but of no use as behaviour log-probs",
    "raw_at_temperature": "log-probs not known to be processed at a temperature other than 1",
    "greedy": "temperature 0: the response was not sampled, so its log-probs are no sampling probabilities",
    "repeated_first_token": "the prompt begins with the same token twice (two BOS?); kept as logged",
    "unscored": "the log says 0 where nothing was scored: the reward is missing",
    "not_trained": "an agent that the log says is not trained took part: these are not the policy's tokens",
    "mixed_sampling": "turns of one response were sampled at different temperatures: no log-probs",
    "multimodal": "the messages hold parts that are no text",
    "broken_tool_arguments": "the arguments of a tool call are no JSON; kept as logged",
    "incomplete_group": "fewer responses than the request asked for",
    "shared_reward": "one reward for several responses: it is none of theirs and stays in `extra`",
    "doubtful_reward": "the reward is contradicted by the record, a known fault of the data: it is missing",
    "reference": "the response is a reference solution, no draw of a policy",
    "no_special_tokens": "the texts were decoded without special tokens, so chat markers are lost: encoding "
    "them again does not give what the policy saw",
    "column_length": "a column of the record is not as long as the others, so its values belong to no row: "
    "left out",
    "mask_without_ids": "a loss mask of ones without response ids was left out",
}
"""Flags that collect sets on rows; each is counted as a note too."""

RAW_CHARS = 2000
"""How much of a refused record is kept: enough to see what it was."""


@dataclass(frozen=True, slots=True)
class Reject:
    """A record that cannot be used: its line or row from 1, why (a key of REASONS) and how it begins."""

    row: int | None
    reason: str
    detail: str = ""
    raw: str = ""


class Refused(Exception):
    """A record, or one response of it, that cannot become a row.

    `reason` is a key of REASONS; `detail` says what was found.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def at(self, row: int | None, raw: bytes | str = b"") -> Reject:
        """The reject of the record at `row`."""
        return Reject(row, self.reason, raw_text(self.detail), raw_text(raw))


def raw_text(raw: bytes | str) -> str:
    """The beginning of a refused record, readable whatever its bytes are."""
    if isinstance(raw, str):
        raw = raw[:RAW_CHARS].encode("utf-8", "backslashreplace")
    return raw[: 4 * RAW_CHARS].decode("utf-8", "backslashreplace").replace("\x00", "\\x00")[:RAW_CHARS]


EXAMPLES = 3
"""How many rows are named per code."""


@dataclass(slots=True)
class Notes:
    """Codes with how often they were counted and the first rows where (any numbering, one per object).

    `details` says of the first case what a code leaves open, such as an error.
    """

    counts: Counter[str] = field(default_factory=Counter)
    rows: dict[str, list[int]] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)

    def add(self, code: str, rows: Iterable[int | None], count: int | None = None, detail: str = "") -> None:
        """Count a code at some rows; `count` where it is not their number."""
        listed = list(rows)
        if detail:
            self.details.setdefault(code, detail)
        self.counts[code] += len(listed) if count is None else count
        known = self.rows.setdefault(code, [])
        known += [row for row in listed if row is not None][: EXAMPLES - len(known)]

    def merge(self, other: "Notes") -> None:
        """Add the counts and rows of another object with the same numbering."""
        for code, count in other.counts.items():
            self.add(code, other.rows.get(code, ()), count, other.details.get(code, ""))

    def drop(self, code: str) -> None:
        """Forget a code."""
        for known in (self.counts, self.rows, self.details):
            known.pop(code, None)
