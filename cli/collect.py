"""`rec collect`: logs into a dataset."""

import os
from typing import Any

import click

from cli.options import command, json_option, key_value, reward_option, text_or_file
from cli.output import printable, show
from cli.progress import progress

MOST_WORKERS = 8
"""Reading and writing the files themselves keeps up with no more."""


@command
@click.argument("sources", nargs=-1, required=True)
@click.option("--into", required=True, metavar="DATASET", help="The dataset; it is made if there is none.")
@click.option(
    "--format", default="auto", show_default=True, help="Format of the logs; `rec formats` lists them."
)
@click.option(
    "--select", metavar="SQL|FILE.sql", help="One SELECT over `source` whose columns are dataset columns."
)
@click.option(
    "--map", "mapping", metavar="COLUMN=SQL", multiple=True, help="One column as an expression; repeatable."
)
@reward_option("What judges a row, whatever the log says.")
@click.option(
    "--policy", metavar="NAME", help="Policy that sampled the responses, where the log does not say."
)
@click.option(
    "--policy-version",
    type=click.IntRange(0, 2**63 - 1),
    metavar="N",
    help="Its version, where the log does not say.",
)
@click.option(
    "--logprob-kind",
    type=click.Choice(["raw", "processed"]),
    help="Whether log-probs are from before or after temperature and top-p, whatever the log says.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(0),
    metavar="T",
    help="Temperature that responses were sampled at, whatever the log says.",
)
@click.option(
    "--run",
    metavar="NAME",
    help="Run that the log belongs to: its ids and group keys are apart from others'.",
)
@click.option(
    "--group-size",
    type=click.IntRange(2),
    metavar="N",
    help="Every N responses in a row are a group, where the log names none.",
)
@click.option(
    "--holdout", type=float, metavar="SHARE", help="Share of prompts never trained on; for a new dataset."
)
@click.option("--redact", is_flag=True, help="Replace personal data before anything is written.")
@click.option(
    "--hash-columns", metavar="NAME,...", help="Fields of `extra`, or columns, kept as salted hashes."
)
@click.option("--max-response-chars", type=click.IntRange(1), metavar="N", help="Set longer responses aside.")
@click.option("--dry-run", is_flag=True, help="Read and count, write nothing.")
@click.option("--strict", is_flag=True, help="Write nothing unless every row can be used.")
@click.option(
    "--workers",
    type=click.IntRange(1),
    metavar="N",
    help=f"Processes that read large logs of lines.  [default: the cores, at most {MOST_WORKERS}]",
)
@json_option
def collect(
    sources: tuple[str, ...],
    into: str,
    *,
    select: str | None,
    mapping: tuple[str, ...],
    hash_columns: str | None,
    workers: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Read logs into a dataset.

    \b
        rec collect logs/*.jsonl.gz --into DATASET --policy my-model --policy-version 3
        rec collect log.parquet --into DATASET --map reward="score / 10" --map response=answer
        rec collect log.jsonl --into DATASET --select query.sql
        rec collect traffic/ --into DATASET --redact --hash-columns user_id,metadata.session
        rec collect log.jsonl --into DATASET --reward "(response LIKE '%' || (extra->>'gold'))::INT"

    SOURCES are files, folders, globs, URLs, hf:OWNER/NAME, or - for stdin. What was collected before is not
    collected again. A row that cannot be used is kept with its reason:
    rec sql DATASET "SELECT reason, count(*) FROM rejects GROUP BY ALL"
    """
    import data_tools

    with progress("collecting") as bar:
        report = data_tools.collect(
            sources,
            into,
            select=text_or_file(select, ".sql"),
            map=dict(key_value(text, "--map") for text in mapping),
            hash_columns=[name.strip() for name in (hash_columns or "").split(",") if name.strip()],
            workers=workers or min(os.cpu_count() or 1, MOST_WORKERS),
            progress=bar,
            **options,
        )
    if as_json:
        show(report.to_dict(), as_json)
    else:
        click.echo("\n".join(map(printable, report.lines())))
