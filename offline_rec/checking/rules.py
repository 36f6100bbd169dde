"""What is looked for with a model, each with its fix; known without torch."""

from data_tools.checking import Rule
from data_tools.checking.findings import SAMPLED

_FIT = "rec fit {dataset} --model {model} --out RUN"
_OTHER_MODEL = "rec check {dataset} --model MODEL_THAT_SAMPLED"
_COLLECT = "rec collect LOGS --into NEW"

OTHER_TOKENIZER = Rule(
    "other_tokenizer",
    "error",
    "the token ids were logged with another tokenizer than the model's",
    f"{_FIT} --retokenise",
)
OTHER_TEMPLATE = Rule(
    "other_template",
    "warning",
    "the policy sampled with another chat template than the model's: its ids are used, new prompts differ",
    f"{_FIT} --retokenise",
)
UNKNOWN_TOKENIZER = Rule(
    "unknown_tokenizer",
    "info",
    "no policy card names the tokenizer of these ids; the sampled rows are all that is known of it",
    'rec sql {dataset} "SELECT policy, tokenizer FROM policies"',
)
OUTSIDE = Rule(
    "ids_outside_vocabulary",
    "error",
    "token ids are beyond the model's vocabulary",
    f"{_FIT} --retokenise",
    SAMPLED,
)
TEXT_DIFFERS = Rule(
    "text_differs",
    "error",
    "the response ids decode to another text than the one logged",
    f"{_FIT} --retokenise",
    SAMPLED,
)
RETOKENISED = Rule(
    "roundtrip_differs",
    "info",
    "the text gives other response ids than the engine sampled (usual for a few rows: a text has several"
    " spellings in tokens); it matters with --retokenise alone",
    f"{_FIT}",
    SAMPLED,
)
PROMPT_DIFFERS = Rule(
    "prompt_differs",
    "warning",
    "the prompt, rendered and encoded by the model's template and tokenizer, is not what the engine saw",
    f"{_FIT} --retokenise",
    SAMPLED,
)
BOS_MISSING = Rule(
    "bos_missing",
    "warning",
    "the engine's prompt lacks the beginning-of-sequence token that the model's tokenizer or template gives",
    f"{_FIT} --retokenise",
    SAMPLED,
)
BOS_TWICE = Rule(
    "bos_twice",
    "warning",
    "the engine's prompt begins with two beginning-of-sequence tokens: the template wrote one, and the"
    " tokenizer another",
    f"{_FIT} --retokenise",
    SAMPLED,
)
END_MISSING = Rule(
    "end_missing",
    "warning",
    "the response stopped by itself, but its ids lack the end token (the engine cut it off, or a stop string"
    " ended it): a policy fitted to them does not learn to stop",
    f"{_FIT} --retokenise",
    SAMPLED,
)
END_AFTER_CUT = Rule(
    "end_after_cut",
    "warning",
    "the response was cut at the length limit, yet its ids end in an end token that nobody sampled",
    f"{_FIT} --where \"finish_reason IS DISTINCT FROM 'length'\"",
    SAMPLED,
)
NOT_ENCODABLE = Rule(
    "not_encodable",
    "warning",
    "the row has no token ids, and its text gives none",
    f'{_FIT} --where "n_tokens IS NOT NULL"',
    SAMPLED,
)
TOO_LONG = Rule(
    "too_long",
    "warning",
    "prompt and response together exceed the model's context",
    f'{_FIT} --where "n_prompt_tokens + n_tokens <= {{context}}"',
)
STOPS_ELSEWHERE = Rule(
    "stops_elsewhere",
    "warning",
    "the model's generation config does not stop at the end token of its tokenizer or template",
    'python -c "from transformers import GenerationConfig as C; c = C.from_pretrained({model!r});'
    ' c.eos_token_id = {stops}; c.save_pretrained({model!r})"',
    "models",
)
RAW = Rule(
    "raw_marked_processed",
    "error",
    "the log-probs are said to be those after temperature, top-p and top-k, but are those before",
    f"{_COLLECT} --logprob-kind raw",
    SAMPLED,
)
PROCESSED = Rule(
    "processed_unmarked",
    "warning",
    "the log-probs are those after temperature, top-p and top-k, which the log does not say: they go unused",
    f"{_COLLECT} --logprob-kind processed",
    SAMPLED,
)
TEMPERATURE = Rule(
    "temperature_differs",
    "error",
    "another temperature than the logged one explains the log-probs",
    f"{_COLLECT} --temperature {{temperature}} --logprob-kind processed",
    SAMPLED,
)
CUT_DIFFERS = Rule(
    "cut_differs",
    "warning",
    "tokens were logged that the logged top-p or top-k would not have drawn: it was another cut, or none",
    f"{_COLLECT} --map top_p=SQL --map top_k=SQL",
    SAMPLED,
)
OTHER_POLICY = Rule(
    "other_policy",
    "warning",
    "the log-probs are not this model's at any temperature: another policy or version sampled, which is fine"
    " if you know it, or the prompt was another one",
    _OTHER_MODEL,
    SAMPLED,
)
SAMPLER_DISAGREES = Rule(
    "sampler_disagrees",
    "error",
    "the policy card says that this very model sampled, but the log-probs are not its own",
    _OTHER_MODEL,
    SAMPLED,
)

RULES: tuple[Rule, ...] = (
    *(OTHER_TOKENIZER, OTHER_TEMPLATE, UNKNOWN_TOKENIZER, OUTSIDE, TEXT_DIFFERS, RETOKENISED),
    *(PROMPT_DIFFERS, BOS_MISSING, BOS_TWICE, END_MISSING, END_AFTER_CUT, NOT_ENCODABLE, TOO_LONG),
    *(STOPS_ELSEWHERE, RAW, PROCESSED, TEMPERATURE, CUT_DIFFERS, OTHER_POLICY, SAMPLER_DISAGREES),
)
"""All that is looked for with a model, in the order in which it is looked for."""
