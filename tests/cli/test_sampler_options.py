"""The options of sampling become settings."""

from typing import Any

import click
import pytest
from click.testing import CliRunner

from cli.options import sampler_options
from data_tools.errors import ConfigError
from offline_rec.sampling.choose import SamplerSettings
from offline_rec.sampling.sampler import SamplingParams


def given_by(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    @click.command()
    @click.option("--model")
    @sampler_options(n=8)
    def command(**given: Any) -> None:
        found.update(given)

    result = CliRunner().invoke(command, arguments, catch_exceptions=True)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return found


def test_without_options_the_embedded_engine_samples_as_ever() -> None:
    assert given_by() == {"model": None, "n": 8, "sampler": SamplerSettings(), "params": SamplingParams()}


def test_a_server_that_is_named_or_launched_is_the_engine() -> None:
    found = given_by("--url", "http://a", "--url", "http://b", "--concurrency", "4", "-n", "2", "--unseeded")
    assert found["sampler"] == SamplerSettings(
        "server", urls=("http://a", "http://b"), concurrency=4, seeded=False
    )
    launched = given_by(
        "--launch-vllm", "--vllm-python", "/p", "--vllm-args", "--max-num-seqs 32", "--model", "m"
    )
    assert launched["model"] == "m"
    assert launched["sampler"] == SamplerSettings(
        "server", launch=True, python="/p", arguments=("--max-num-seqs", "32")
    )


def test_how_tokens_are_drawn_is_checked_on_the_spot() -> None:
    found = given_by("--temperature", "0.7", "--top-p", "0.9", "--top-k", "5", "--max-tokens", "9")
    assert found["params"] == SamplingParams(0.7, 0.9, 5, 9)
    with pytest.raises(ConfigError, match="top_p must be"):
        given_by("--top-p", "2")
    with pytest.raises(ConfigError, match="asks no server"):
        given_by("--engine", "hf", "--url", "http://a")
