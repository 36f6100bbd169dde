"""Collect at 100 thousand and a million rows: rows per second, peak memory, and the first step of a fit.

    python benchmarks/collect.py --rows 100000 --rows 1000000 --output benchmarks/results/collect.json

Every measurement is a process of its own, so that its peak memory is its own. Bare DuckDB (`read_json` with
the schema given, `COPY` to Parquet) runs on the same files: it neither checks nor hashes nor counts, and so
bounds what can be reached.
"""

import json
import tempfile
from dataclasses import asdict
from pathlib import Path

import click
from ingest import DUCKDB
from logs import COLUMNS, VOCABULARY, write_rows
from measuring import machine, measure, rec

from data_tools.schema import TOKEN_COLUMNS
from offline_rec.models.quiet import quiet


def token_columns_mib(dataset: Path) -> float:
    """Compressed size of the token columns of a dataset, from the footers of its files."""
    import pyarrow.parquet as pq

    total = 0
    for path in dataset.glob("rollouts/*.parquet"):
        footer = pq.ParquetFile(path).metadata
        for group in range(footer.num_row_groups):
            columns = [footer.row_group(group).column(i) for i in range(footer.num_columns)]
            total += sum(
                c.total_compressed_size for c in columns if c.path_in_schema.split(".")[0] in TOKEN_COLUMNS
            )
    return round(total / 2**20, 1)


def tiny_model(folder: Path, size: int = VOCABULARY) -> None:
    """A Llama of a few thousand parameters beside its embedding, over the vocabulary of the log."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<unk>": 1, "<eos>": 2, **{f"w{i}": i for i in range(3, size)}}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def run_size(folder: Path, model: Path, rows: int) -> dict[str, object]:
    """All measurements at one number of rows; the files are removed as soon as they are not needed."""
    log, dataset, run, bare = (
        folder / f"{name}-{rows}" for name in ("log.jsonl", "dataset", "run", "bare.parquet")
    )
    write_rows(log, rows, seed=rows)
    size = log.stat().st_size
    duckdb = measure(DUCKDB, str(log), str(bare), "zstd", str(COLUMNS))
    bare.unlink()
    collect = rec("collect", str(log), "--into", str(dataset))
    log.unlink()
    imports = measure("import offline_rec.training.loop, offline_rec.training.prepare")
    fit = rec(
        *("fit", str(dataset), "--model", str(model), "--out", str(run), "--algorithm", "rec-oneside-nois"),
        *("--steps", "1", "--groups-per-step", "8", "--eval-every", "null"),
    )
    return {
        "rows": rows,
        "log_mib": round(size / 2**20, 1),
        "collect": asdict(collect) | {"rows_per_second": round(rows / collect.seconds)},
        "duckdb": asdict(duckdb) | {"rows_per_second": round(rows / duckdb.seconds)},
        "fit_to_first_step": asdict(fit) | {"read_mib": round(fit.read_mib - imports.read_mib, 1)},
        "token_columns_mib": token_columns_mib(dataset),
    }


def report(result: dict[str, object]) -> str:
    collect, duckdb, fit = (result[key] for key in ("collect", "duckdb", "fit_to_first_step"))
    return (
        f"{result['rows']:>9} rows, {result['log_mib']} MiB of JSONL\n"
        f"  collect      {collect['rows_per_second']:>7} rows/s, peak {collect['peak_mib']} MiB\n"
        f"  bare DuckDB  {duckdb['rows_per_second']:>7} rows/s, peak {duckdb['peak_mib']} MiB\n"
        f"  fit          first step done after {fit['seconds']} s, peak {fit['peak_mib']} MiB, "
        f"read {fit['read_mib']} MiB of data and model; token columns are {result['token_columns_mib']} MiB"
    )


@click.command()
@click.option("--rows", "sizes", type=int, multiple=True, default=(100_000, 1_000_000), show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="JSON file for the result.")
@click.option(
    "--folder", type=click.Path(path_type=Path), help="Where the files are made (default: a temporary one)."
)
def main(sizes: tuple[int, ...], output: Path | None, folder: Path | None) -> None:
    """Measure `rec collect`, bare DuckDB and the start of `rec fit` on generated logs."""
    results = []
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        model = Path(work) / "model"
        with quiet():
            tiny_model(model)
        for rows in sizes:
            results.append(run_size(Path(work), model, rows))
            click.echo(report(results[-1]))
    first, last = results[0], results[-1]
    summary = {
        "peak_memory_ratio": round(last["collect"]["peak_mib"] / first["collect"]["peak_mib"], 3),
        "speed_of_bare_duckdb": round(
            last["collect"]["rows_per_second"] / last["duckdb"]["rows_per_second"], 3
        ),
        "fit_read_of_token_columns": round(
            last["fit_to_first_step"]["read_mib"] / last["token_columns_mib"], 3
        ),
    }
    click.echo(
        f"peak memory at {last['rows']} rows: {summary['peak_memory_ratio']} times that at {first['rows']}; "
        f"collect runs at {summary['speed_of_bare_duckdb']} of bare DuckDB's speed; "
        f"the fit read at most {summary['fit_read_of_token_columns']} of the token columns"
    )
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(
            json.dumps({"machine": machine("duckdb", "torch"), "sizes": results, **summary}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
