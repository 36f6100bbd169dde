"""The columns of a dataset's files, as Arrow schemas, and the version of the format.

One row of `rollouts` is one response. Everything that a later reader needs to trust a number is a column: who
sampled the response, how, when, with which token ids, and where in which log it stood.
"""

import pyarrow as pa

FORMAT_VERSION = 1

ROW_GROUP_ROWS = 4096
"""Rows of a Parquet row group: the unit that training reads at random, a few MB of token columns."""

ROLLOUTS = pa.schema(
    [
        pa.field("response_id", pa.string(), nullable=False),
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("prompt_hash", pa.string(), nullable=False),
        pa.field("trajectory_id", pa.string()),
        pa.field("turn", pa.int32()),
        # JSON text of chat messages exactly as logged, or a plain string (prompts.py tells them apart).
        pa.field("prompt", pa.string()),
        pa.field("tools", pa.string()),
        pa.field("response", pa.string()),
        pa.field("response_messages", pa.string()),
        pa.field("prompt_ids", pa.list_(pa.int32())),
        pa.field("response_ids", pa.list_(pa.int32())),
        pa.field("behavior_logprobs", pa.list_(pa.float32())),
        pa.field("loss_mask", pa.list_(pa.uint8())),
        pa.field("reward", pa.float64()),
        pa.field("policy", pa.string()),
        pa.field("policy_version", pa.int64()),
        pa.field("sampled_at", pa.timestamp("us", tz="UTC")),
        pa.field("temperature", pa.float32()),
        pa.field("top_p", pa.float32()),
        pa.field("top_k", pa.int32()),
        pa.field("logprob_kind", pa.string(), nullable=False),
        pa.field("finish_reason", pa.string()),
        pa.field("source_file", pa.string()),
        pa.field("source_row", pa.int64()),
        pa.field("flags", pa.list_(pa.string()), nullable=False),
        pa.field("extra", pa.string()),
        # Derived once at collect, so that statistics, shaping and packing never read a token column:
        pa.field("n_prompt_tokens", pa.int32()),
        pa.field("n_tokens", pa.int32()),
        pa.field("behavior_logprob", pa.float64()),
        # What near-identical prompts share (clusters.py); null where the writer knew of none.
        pa.field("prompt_cluster", pa.string()),
    ]
)
"""`n_prompt_tokens`, `n_tokens`: lengths of `prompt_ids`, `response_ids` (null without ids).
`behavior_logprob`: sum of `behavior_logprobs` where `loss_mask` is 1; null once one of those is missing,
so `behavior_logprob is not null` says "this row has usable log-probs"."""

TOKEN_COLUMNS = ("prompt_ids", "response_ids", "behavior_logprobs", "loss_mask")
"""The wide columns: never sorted, joined or scanned by statistics."""

REJECTS = pa.schema(
    [
        pa.field("source_file", pa.string()),
        pa.field("source_row", pa.int64()),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("detail", pa.string()),
        pa.field("raw", pa.string()),
    ]
)

REWARDS = pa.schema(
    [
        pa.field("response_id", pa.string(), nullable=False),
        pa.field("reward", pa.float64()),
        pa.field("source", pa.string(), nullable=False),
        pa.field("rewarded_at", pa.timestamp("us", tz="UTC"), nullable=False),
    ]
)

ERASED = pa.schema([pa.field("id_hash", pa.string(), nullable=False)])

# Sidecars are aligned with the rollouts file of the same name: same rows, same order.
TOKENS = pa.schema(
    [
        pa.field("response_id", pa.string(), nullable=False),
        pa.field("prompt_ids", pa.list_(pa.int32())),
        pa.field("response_ids", pa.list_(pa.int32())),
        pa.field("loss_mask", pa.list_(pa.uint8())),
        pa.field("n_prompt_tokens", pa.int32()),
        pa.field("n_tokens", pa.int32()),
    ]
)

LOGPROBS = pa.schema(
    [
        pa.field("response_id", pa.string(), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32())),
        pa.field("logprob", pa.float64()),
        pa.field("temperature", pa.float32()),
    ]
)
