"""The card of a dataset: what its files hold, as counts, names and settings; no row of it."""

import hashlib
import json
from typing import TYPE_CHECKING, Any

from data_tools.collecting.reasons import FLAGS, REASONS
from offline_rec.cards.data_sections import origin, place, reward_section, span_facts
from offline_rec.cards.markdown import card, facts, fenced, plain, sections, table
from offline_rec.cards.provenance import LISTED, provenance
from offline_rec.data.snapshot import source_files

if TYPE_CHECKING:
    import duckdb

    from data_tools.dataset import Dataset

SIZES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000, 1_000_000_000)
NAMES = ("n<1K", "1K<n<10K", "10K<n<100K", "100K<n<1M", "1M<n<10M", "10M<n<100M", "100M<n<1B", "1B<n<10B")

USAGE = """\
import data_tools

data_tools.open("PATH").sql("SELECT policy, count(*), avg(reward) FROM rollouts GROUP BY ALL")"""

_COUNTS = """SELECT count(*) AS rows,
    (SELECT count(*) FROM (SELECT DISTINCT prompt_hash FROM rollouts)) AS prompts,
    (SELECT count(*) FROM (SELECT DISTINCT group_id FROM rollouts)) AS groups,
    count(n_tokens) AS with_token_ids, sum(n_tokens)::BIGINT AS response_tokens,
    count(behavior_logprob) AS with_logprobs FROM rollouts"""

_SPLITS = "SELECT split, count(*) AS rows FROM rollouts GROUP BY split ORDER BY split DESC"


def data_card(ds: "Dataset") -> str:
    """The card of a dataset as it is at this moment: the same files give the same card."""
    files = source_files(ds)
    with ds.connect() as con:
        found = provenance(con)
        [counts] = _records(con, _COUNTS)
        splits = _records(con, _SPLITS)
        rejects = _reasons(con, "SELECT reason AS code FROM rejects", REASONS)
        flags = _reasons(con, "SELECT unnest(flags) AS code FROM rollouts", FLAGS)
        erased = con.sql("SELECT count(*) FROM (SELECT DISTINCT id_hash FROM _erased)").fetchall()[0][0]
    name = plain(place(ds.path) or ds.path)
    named = [[file.name, file.bytes, file.footer] for file in files]
    identity = hashlib.sha256(json.dumps(named).encode()).hexdigest()
    told = {
        **{name.replace("_", " "): value for name, value in counts.items()},
        **span_facts(found),
        "batches": len(ds.batches()),
        "rows by split": ", ".join(f"{one['split']} {one['rows']:,}" for one in splits) or None,
        "held out": f"{ds.info.holdout:g} of the prompts, by {ds.info.split_by}",
        "rows erased": erased or None,
        "created": ds.info.created.strftime("%Y-%m-%d %H:%M:%S UTC"),
        "format version": ds.info.format_version,
        "snapshot": identity,
        "licence": "unknown",
    }
    parts = {
        "Facts": facts(told),
        **origin(found),
        "Rewards": reward_section(found),
        "Left out when it was collected": table(rejects) or None,
        "Flags on rows": table(flags) or None,
        "Use": fenced(USAGE, "python"),
    }
    intro = (
        "Responses of language models that were already logged, as a dataset of `rec`: one row a response."
    )
    return card(_metadata(name, counts["rows"], identity), name, f"{intro}\n\n{sections(parts)}")


def _metadata(name: str, rows: int, identity: str) -> dict[str, Any]:
    return {
        "pretty_name": name,
        "task_categories": ["text-generation"],
        "size_categories": [NAMES[sum(rows >= size for size in SIZES)]],
        "tags": ["offline-rec"],
        "configs": [{"config_name": "default", "data_files": "rollouts/*.parquet"}],
        "rec": {"rows": rows, "snapshot": identity},
    }


def _reasons(con: "duckdb.DuckDBPyConnection", codes: str, meanings: dict[str, str]) -> list[dict[str, Any]]:
    query = (
        f"SELECT code, count(*) AS rows FROM ({codes}) GROUP BY code ORDER BY rows DESC, code LIMIT {LISTED}"
    )
    return [
        {"reason": code, "rows": rows, "meaning": meanings.get(code)}
        for code, rows in con.sql(query).fetchall()
    ]


def _records(con: "duckdb.DuckDBPyConnection", query: str) -> list[dict[str, Any]]:
    result = con.sql(query)
    return [dict(zip(result.columns, row, strict=True)) for row in result.fetchall()]
