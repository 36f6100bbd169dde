"""Public sets of graded responses, as published on the Hugging Face Hub and on GitHub."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from data_tools.readers.base import Carries, Log, RecordReader, Refused, Values, first_object, without

Object = dict[str, Any]


class OpenR1MathReader(RecordReader):
    """open-r1/OpenR1-Math-220k: a record is a problem with its generations, checked one by one.

    A generation's reward is the verdict of Math-Verify, or of Llama where there is none.
    """

    name = "openr1-math"
    title = "OpenR1-Math-220k: a problem and its generations in a row (Parquet, JSONL)"
    carries = Carries(prompt="text", group="the row", reward="correctness")
    names: ClassVar[Mapping[str, str]] = {"prompt": "problem", "response": "generations", "group_id": "uuid"}

    def detect(self, log: Log, samples: Sequence[Any]) -> bool:
        """Take a log whose first record has generations and verdicts on them."""
        first = first_object(samples)
        judged = {"correctness_math_verify", "correctness_llama"} & first.keys()
        return "problem" in first and isinstance(first.get("generations"), list) and bool(judged)

    def rows(self, record: Any, log: Log) -> Iterator[Values | Refused]:
        """Yield the generations of a problem."""
        texts = record.get("generations")
        if not isinstance(texts, list) or not texts:
            raise Refused("no_response", "no generations")
        lists = {name: record.get(name) for name in _PER_GENERATION}
        items = {name: values for name, values in lists.items() if _fits(values, len(texts))}
        odd = any(values is not None and name not in items for name, values in lists.items())
        rest = without(record, "problem", "generations", *_PER_GENERATION, *_repeated(record, texts))
        for at, text in enumerate(texts):
            own = {name: values[at] for name, values in items.items() if values[at] is not None}
            verdict = own.get("correctness_math_verify", own.get("correctness_llama"))
            yield {
                "prompt": record.get("problem"),
                "response": text,
                "group_id": record.get("uuid"),
                "reward": verdict,
                "finish_reason": own.pop("finish_reasons", None),
                "flags": ["column_length"] if odd else [],
                "extra": {**rest, **own},
            }


_PER_GENERATION = (
    "correctness_math_verify", "correctness_llama", "finish_reasons", "is_reasoning_complete",
)  # fmt: skip


def _fits(values: Any, count: int) -> bool:
    return isinstance(values, list) and len(values) == count


def _repeated(record: Object, texts: Sequence[Any]) -> list[str]:
    """The field `messages`, where all it holds is the problem and one of the generations."""
    messages = record.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return []
    known = [record.get("problem"), *texts]
    return ["messages"] if all(message.get("content") in known for message in messages) else []


class NuminaMathReader(RecordReader):
    """AI-MO/NuminaMath-1.5: a record is a problem with one reference solution, which no policy sampled."""

    name = "numina-math"
    title = "NuminaMath-1.5: a problem and its reference solution in a row (Parquet, JSONL)"
    carries = Carries(prompt="text", group="no: one reference solution")
    names: ClassVar[Mapping[str, str]] = {"prompt": "problem", "response": "solution"}

    def detect(self, log: Log, samples: Sequence[Any]) -> bool:
        """Take a log whose first record has a solution and says whether it is valid."""
        return first_object(samples).keys() >= {
            "problem",
            "solution",
            "problem_is_valid",
            "solution_is_valid",
        }

    def rows(self, record: Any, log: Log) -> Iterator[Values | Refused]:
        """Yield the solution of a problem."""
        yield {
            "prompt": record.get("problem"),
            "response": record.get("solution"),
            "flags": ["reference"],
            "extra": without(record, "problem", "solution"),
        }


class UltraFeedbackReader(RecordReader):
    """openbmb/UltraFeedback: a record is an instruction with completions of several models, scored by GPT-4.

    Each completion has its own system prompt, so the prompts within a group differ. The reward is
    `overall_score`. In early rows a score of 1 was written as 10; a 10 that the fine-grained ratings (1 to 5)
    do not bear out is therefore missing.
    """

    name = "ultrafeedback"
    title = "UltraFeedback: an instruction and its completions in a row (JSONL, Parquet)"
    carries = Carries(prompt="messages", group="the row", reward="overall_score")
    names: ClassVar[Mapping[str, str]] = {"policy": "model", "reward": "overall_score"}

    def detect(self, log: Log, samples: Sequence[Any]) -> bool:
        """Take a log whose first record has an instruction and annotated completions."""
        first = first_object(samples)
        completions = first.get("completions")
        if "instruction" not in first or not isinstance(completions, list):
            return False
        return {"response", "annotations"} <= first_object(completions).keys()

    def rows(self, record: Any, log: Log) -> Iterator[Values | Refused]:
        """Yield the completions of an instruction."""
        completions, instruction = record.get("completions"), record.get("instruction")
        if not isinstance(completions, list) or not completions:
            raise Refused("no_response", "no completions")
        rest = without(record, "completions", "instruction")
        for completion in completions:
            if not isinstance(completion, dict):
                yield Refused("bad_record", "a completion that is no object")
                continue
            score, flags = completion.get("overall_score"), []
            extra = {**rest, **without(completion, *_OF_COMPLETION)}
            if score == _OVERFLOWN and not _is_borne_out(completion.get("fine-grained_score")):
                extra, score, flags = {**extra, "overall_score": score}, None, ["doubtful_reward"]
            yield {
                "prompt": _messages(completion.get("custom_system_prompt"), instruction),
                "response": completion.get("response"),
                "policy": completion.get("model"),
                "group_id": instruction if isinstance(instruction, str) else None,
                "reward": score,
                "flags": flags,
                "extra": extra,
            }


_OF_COMPLETION = ("custom_system_prompt", "response", "model", "overall_score")
_OVERFLOWN = 10
_GOOD = 4


def _is_borne_out(rating: Any) -> bool:
    return isinstance(rating, int | float) and not isinstance(rating, bool) and rating >= _GOOD


def _messages(system: Any, instruction: Any) -> list[Object] | None:
    if not isinstance(instruction, str):
        return None
    asked = [{"role": "user", "content": instruction}]
    return [{"role": "system", "content": system}, *asked] if isinstance(system, str) and system else asked


class HelpSteer2Reader(RecordReader):
    """nvidia/HelpSteer2: a record is a response rated in five ways; `helpfulness` is the overall rating."""

    name = "helpsteer2"
    title = "HelpSteer2: rated responses, two to a prompt (JSONL, Parquet)"
    carries = Carries(prompt="text", group="equal prompts", reward="helpfulness")
    names: ClassVar[Mapping[str, str]] = {"reward": "helpfulness"}

    def detect(self, log: Log, samples: Sequence[Any]) -> bool:
        """Take a log whose first record has the five ratings."""
        return first_object(samples).keys() >= {"prompt", "response", "helpfulness", *_RATINGS}

    def rows(self, record: Any, log: Log) -> Iterator[Values | Refused]:
        """Yield the response of a record."""
        yield {
            "prompt": record.get("prompt"),
            "response": record.get("response"),
            "reward": record.get("helpfulness"),
            "extra": without(record, "prompt", "response", "helpfulness"),
        }


_RATINGS = ("correctness", "coherence", "complexity", "verbosity")


class Gsm8kSolutionsReader(RecordReader):
    """example_model_solutions.jsonl of grade-school-math: a question a record, answered by four policies."""

    name = "gsm8k-solutions"
    title = "GSM8K example_model_solutions.jsonl: a question and the answers of four models in a line"
    carries = Carries(prompt="text", group="the row (equal questions)", reward="is_correct")
    names: ClassVar[Mapping[str, str]] = {
        "prompt": "question",
        "response": "solution",
        "reward": "is_correct",
    }

    def detect(self, log: Log, samples: Sequence[Any]) -> bool:
        """Take a log whose first record has solutions that are judged."""
        first = first_object(samples)
        return {"question", "ground_truth"} <= first.keys() and any(map(_is_solution, first.values()))

    def rows(self, record: Any, log: Log) -> Iterator[Values | Refused]:
        """Yield the solutions of a question; the name of a solution is the policy that wrote it."""
        solutions = {name: value for name, value in record.items() if _is_solution(value)}
        if not solutions:
            raise Refused("no_response", "no solutions")
        rest = without(record, "question", *solutions)
        for policy, solution in solutions.items():
            yield {
                "prompt": record.get("question"),
                "response": solution["solution"],
                "policy": policy,
                "reward": solution.get("is_correct"),
                "extra": {**rest, **without(solution, "solution", "is_correct")},
            }


def _is_solution(value: Any) -> bool:
    return isinstance(value, dict) and "solution" in value and "is_correct" in value
