"""Sample logs for the how-to pages: those of `tests/cases`, with ids and log-probs of a tiny model."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import tiny

CASES = Path(__file__).parent / "cases"
ANSWERS = ("42", "Allen key")


def write(folder: Path) -> None:
    """The model `my-model`, and a log of each kind that a page names."""
    policy = Policy(tiny.save(folder / "my-model"))
    calls = vllm_calls(policy)
    _write_lines(folder / "vllm.jsonl", calls)
    unmarked = [{name: call[name] for name in call.keys() - {"logprobs_mode"}} for call in calls]
    _write_lines(folder / "unmarked.jsonl", unmarked)
    (folder / "nemo_rl").mkdir()
    _write_lines(folder / "nemo_rl" / "train_data_step1.jsonl", nemo_rl_step(policy))
    shutil.copy(CASES / "openai_chat_request_response_pairs.jsonl", folder / "texts.jsonl")
    shutil.copytree(CASES / "verl" / "verl_rollout_data_dir", folder / "rollout_data_dir")
    shutil.copytree(CASES / "trl" / "trl_completions", folder / "completions")
    (folder / "langfuse").mkdir()
    shutil.copy(CASES / "langfuse" / "observations_v2.jsonl", folder / "langfuse" / "observations.jsonl")
    shutil.copy(CASES / "langfuse_thumbs" / "scores.jsonl", folder / "langfuse" / "scores.jsonl")
    shutil.copy(CASES / "langfuse_thumbs" / "later.jsonl", folder / "later.jsonl")
    shutil.copytree(CASES / "litellm" / "litellm_s3", folder / "litellm_logs")
    (folder / "thumbs.csv").write_text("call_id,thumb\ncall-00,1\ncall-10,0\n")


class Policy:
    """What a server that samples from a model directory would log of given texts."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.model = AutoModelForCausalLM.from_pretrained(directory)

    def prompt(self, messages: list[dict[str, Any]]) -> list[int]:
        """Ids of a prompt."""
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self.ids(text)

    def ids(self, text: str) -> list[int]:
        """Ids of a text."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def response(self, text: str) -> list[int]:
        """Ids of a response that stopped by itself."""
        return [*self.ids(text), self.tokenizer.eos_token_id]

    @torch.no_grad()
    def logprobs(self, prompt: list[int], response: list[int], temperature: float = 1.0) -> list[float]:
        """Log-probs of the response's ids, after the temperature."""
        logits = self.model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        logprobs = torch.log_softmax(logits.double() / temperature, -1)
        return logprobs.gather(1, torch.tensor(response)[:, None])[:, 0].tolist()


def vllm_calls(policy: Policy) -> list[dict[str, Any]]:
    """Request and response, as vLLM answers with `return_token_ids` and `logprobs`."""
    requests = [line["request"] for line in _lines("openai_chat_request_response_pairs.jsonl")[:2]]
    responses = _lines("vllm_chat_return_token_ids.jsonl")
    calls = []
    for request, response, answer in zip(requests, responses, ANSWERS, strict=True):
        prompt = response["prompt_token_ids"] = policy.prompt(request["messages"])
        for choice in response["choices"]:
            ids = choice["token_ids"] = policy.response(choice["message"]["content"])
            values = policy.logprobs(prompt, ids, request["temperature"])
            choice["logprobs"]["content"] = [
                {"token": policy.tokenizer.decode([i]), "logprob": value, "bytes": None, "top_logprobs": []}
                for i, value in zip(ids, values, strict=True)
            ]
        asked = {**request, "return_token_ids": True}
        calls.append(
            {"request": asked, "response": response, "logprobs_mode": "processed_logprobs", "answer": answer}
        )
    return calls


def nemo_rl_step(policy: Policy) -> list[dict[str, Any]]:
    """A step of NeMo-RL, padded as it pads."""
    made = []
    records, texts = _lines("nemo_rl/train_data_step1.jsonl"), _lines("nemo_rl/val_data_step10.jsonl")
    for record, shown in zip(records, texts, strict=True):
        [[*prompt, answer]] = shown["content"]
        asked, said = policy.prompt(prompt), policy.response(answer["content"])
        length = len(asked) + len(said)
        logprobs = policy.logprobs(asked, said)
        rows = {
            "token_ids": asked + said + [0] * 8,
            "token_loss_mask": [0] * len(asked) + [1] * len(said) + [0] * 8,
            "generation_logprobs": [0.0] * len(asked) + logprobs + [0.0] * 8,
            "prev_logprobs": [0.0] * len(asked) + logprobs + [0.0] * 8,
            "advantages": [record["advantages"][0][0]] * (length + 8),
        }
        made.append({**record, **{name: [row] for name, row in rows.items()}, "input_lengths": [length]})
    return made


def _lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (CASES / name).read_text(encoding="utf-8").splitlines()]


def _write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
