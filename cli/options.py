"""Options that several commands share, each defined once."""

import shlex
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click

from data_tools.errors import ConfigError, DataError

DEBUG = "cli.debug"
"""Key of the context's `meta` under which --debug is kept."""

F = TypeVar("F", bound=Callable[..., Any])


def _remember_debug(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta[DEBUG] = True


debug_option = click.option(
    "--debug",
    is_flag=True,
    expose_value=False,
    callback=_remember_debug,
    help="Show the traceback of an error.",
)


def command(function: F) -> click.Command:
    """A click command that also takes --debug, as every command does."""
    return click.command()(debug_option(function))


dataset_argument = click.argument("dataset", metavar="DATASET")

json_option = click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON.")

facts_output_option = click.option(
    "-o", "--output", metavar="FILE", help="Write the facts there, as JSON, instead of printing them."
)

model_option = click.option(
    "--model", required=True, metavar="MODEL", help="A Hugging Face model directory (weights and tokenizer)."
)

where_option = click.option("--where", metavar="SQL", help="Rows to use, as a condition over `rollouts`.")


SAMPLER_OPTIONS = (
    click.option(
        "--engine",
        type=click.Choice(["hf", "vllm", "server"]),
        help="What samples: transformers or vLLM in this process, or a server. [default: server where one is "
        "named or launched, else hf]",
    ),
    click.option(
        "--url", "urls", multiple=True, metavar="URL", help="An OpenAI-compatible server; may be repeated."
    ),
    click.option("--launch-vllm", "launch", is_flag=True, help="Start a vLLM server for this, and end it."),
    click.option(
        "--vllm-python",
        "python",
        metavar="PATH",
        help="The Python of the environment that has vLLM. [default: this one]",
    ),
    click.option(
        "--vllm-args",
        "arguments",
        metavar="ARGS",
        default="",
        help="Arguments of vLLM, as on its command line.",
    ),
    click.option(
        "--served-model", metavar="NAME", help="The model's name on the servers, if they have several."
    ),
    click.option(
        "--concurrency",
        type=click.IntRange(min=1),
        help="Requests that each server is given at once; with hf, responses.",
    ),
    click.option(
        "--dtype",
        default="auto",
        show_default=True,
        help="Type of the weights; auto: bfloat16 on a GPU, float32 on a CPU.",
    ),
    click.option(
        "--max-model-len", type=click.IntRange(min=1), help="Tokens of prompt and response for vLLM."
    ),
    click.option(
        "--seeded/--unseeded", default=True, help="Draw what can be drawn again; without, GPUs are faster."
    ),
    click.option(
        "--verify/--no-verify",
        default=True,
        help="Compare the engine's log-probs with a forward pass of the model first.",
    ),
    click.option("--temperature", type=float, default=1.0, show_default=True, help="0 is greedy."),
    click.option("--top-p", type=float, default=1.0, show_default=True),
    click.option("--top-k", type=int, default=0, show_default=True, help="0 keeps all tokens."),
    click.option(
        "--max-tokens", type=int, default=256, show_default=True, help="Longest response, its end included."
    ),
    click.option("--seed", type=int, default=0, show_default=True, help="Seed of the samples."),
)


def sampler_options(n: int) -> Callable[[F], F]:
    """Options of sampling, as `sampler` (SamplerSettings), `params` (SamplingParams) and `n`."""
    count = click.option(
        "-n", "--n", type=click.IntRange(min=1), default=n, show_default=True, help="Samples a prompt."
    )
    return lambda function: _with_sampler_options(function, (count, *SAMPLER_OPTIONS))


def _with_sampler_options(function: F, options: Sequence[Callable[[Any], Any]]) -> F:
    @wraps(function)
    def collected(**given: Any) -> Any:
        from offline_rec.sampling.choose import SamplerSettings
        from offline_rec.sampling.sampler import SamplingParams

        params = {name: given.pop(name) for name in ("temperature", "top_p", "top_k", "max_tokens", "seed")}
        names = ("engine", "urls", "launch", "python", "arguments", "served_model", "concurrency", "dtype")
        settings = {name: given.pop(name) for name in (*names, "max_model_len", "seeded", "verify")}
        settings["engine"] = settings["engine"] or (
            "server" if settings["urls"] or settings["launch"] else "hf"
        )
        settings["arguments"] = tuple(shlex.split(settings["arguments"]))
        return function(sampler=SamplerSettings(**settings), params=SamplingParams(**params), **given)

    decorated: Any = collected
    for option in reversed(options):
        decorated = option(decorated)
    decorated_function: F = decorated
    return decorated_function


def key_value(text: str, option: str) -> tuple[str, str]:
    """Split `KEY=VALUE` at the first equals sign; `ConfigError` names the option otherwise."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"{option} {text!r} is not KEY=VALUE", f"write {option} KEY=VALUE")
    return key.strip(), value


def text_or_file(value: str | None, suffix: str) -> str | None:
    """The text itself, the content of the file it names when it ends in `suffix`, or stdin for `-`."""
    if value is None:
        return None
    named = value == "-" or value.lower().endswith(suffix)
    where = "standard input" if value == "-" else value
    try:
        text = _read(value) if named else value
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8 text", "convert it with iconv") from error
    if not text.strip():
        raise ConfigError(f"{where} is empty" if named else "the SQL is empty", "write one SELECT")
    return text


def _read(name: str) -> str:
    return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")


def _some_text(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value is not None and not value.strip():
        raise ConfigError(f"{param.opts[0]} is empty", "leave it out, or say what the reward is")
    return value


def reward_option(help: str, *, required: bool = False) -> Callable[[F], F]:
    """--reward, spelt the same wherever responses are judged (docs/rewards.md)."""
    return click.option(
        "--reward", metavar="NAME|SQL|MODULE:FUNCTION", callback=_some_text, required=required, help=help
    )
