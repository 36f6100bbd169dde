"""The log formats: a registry of readers, asked in order whether a log is theirs."""

from collections.abc import Sequence
from difflib import get_close_matches

from data_tools.errors import ConfigError, DataError
from data_tools.logs.log import Log
from data_tools.logs.records import first_reject, samples
from data_tools.readers.areal import ArealReader
from data_tools.readers.base import Reader
from data_tools.readers.columnar import RollReader, SwiftReader
from data_tools.readers.helicone import HeliconeReader
from data_tools.readers.hf_sets import (
    Gsm8kSolutionsReader,
    HelpSteer2Reader,
    NuminaMathReader,
    OpenR1MathReader,
    UltraFeedbackReader,
)
from data_tools.readers.langfuse import LangfuseReader
from data_tools.readers.langsmith import LangSmithReader
from data_tools.readers.litellm import LiteLLMReader
from data_tools.readers.lm_eval import LmEvalReader
from data_tools.readers.nemo_rl import NemoRLReader
from data_tools.readers.openai import OpenAIReader
from data_tools.readers.openai_batch import BatchReader
from data_tools.readers.openai_finetune import FinetuneReader
from data_tools.readers.openai_stored import StoredReader
from data_tools.readers.openrlhf import OpenRLHFReader
from data_tools.readers.otel import OtelReader
from data_tools.readers.phoenix import PhoenixReader
from data_tools.readers.prime_rl import TokenExportReader
from data_tools.readers.rllm import RllmReader
from data_tools.readers.rows import RowsReader
from data_tools.readers.sglang import SglangReader
from data_tools.readers.skyrl import SkyRLReader
from data_tools.readers.streams import StreamReader
from data_tools.readers.tgi import TgiReader
from data_tools.readers.trinity import TrinityReader
from data_tools.readers.trl import TrlReader
from data_tools.readers.verifiers import VerifiersReader
from data_tools.readers.verifiers_traces import TracesReader
from data_tools.readers.verl import VerlReader
from data_tools.readers.vllm import VllmReader
from data_tools.readers.weave import WeaveReader

READERS: tuple[Reader, ...] = (
    TrinityReader(),
    TracesReader(),
    TokenExportReader(),
    VerifiersReader(),
    RllmReader(),
    LmEvalReader(),
    SglangReader(),
    TgiReader(),
    LiteLLMReader(),
    LangfuseReader(),
    StreamReader(),
    LangSmithReader(),
    WeaveReader(),
    HeliconeReader(),
    OtelReader(),
    PhoenixReader(),
    BatchReader(),
    FinetuneReader(),
    StoredReader(),
    VllmReader(),
    OpenAIReader(),
    VerlReader(),
    RollReader(),
    SwiftReader(),
    SkyRLReader(),
    TrlReader(),
    ArealReader(),
    NemoRLReader(),
    OpenR1MathReader(),
    NuminaMathReader(),
    UltraFeedbackReader(),
    HelpSteer2Reader(),
    Gsm8kSolutionsReader(),
    OpenRLHFReader(),
    RowsReader(),
)
"""The most particular format first; plain rows, which need only names that say what they are, last."""


def reader(name: str) -> Reader:
    """The reader of the format `name`; raises ConfigError that names the nearest one."""
    by_name = {reader.name: reader for reader in READERS}
    if name in by_name:
        return by_name[name]
    near = get_close_matches(name, by_name, 1)
    hint = f"did you mean {near[0]}?" if near else f"known formats: auto, {', '.join(by_name)}"
    raise ConfigError(f"there is no log format named {name!r}", hint)


def detect(log: Log) -> Reader | None:
    """The first reader that takes the log for its own; None if nobody does."""
    seen = samples(log)
    return next((reader for reader in READERS if reader.detect(log, seen)), None)


def unknown(log: Log) -> DataError:
    """The error for a log that no reader takes, with the fields that were seen."""
    if refused := first_reject(log):
        return DataError(
            f"{log.name}: none of its first records can be read, such as row {refused.row}: {refused.detail}",
            "is it UTF-8 text, and whole? else convert it with iconv, or copy it again",
        )
    fields = field_names(samples(log))
    if not fields:
        return DataError(f"{log.name} is not a log ({log.kind} content)", "rec formats lists what is read")
    shown = ", ".join(fields[:12]) + (", ..." if len(fields) > 12 else "")
    hint = "name the columns with --map COLUMN=SQL or --select; rec formats lists what is read by itself"
    return DataError(f"{log.name}: no known format has the fields {shown}", hint)


def field_names(seen: Sequence[object]) -> list[str]:
    """Names of the fields of some records, in the order seen."""
    return list(dict.fromkeys(key for record in seen if isinstance(record, dict) for key in record))
