"""Whatever happens to a log, every record is counted, nothing crashes and no number is invented."""

import json
import math
import random
from contextlib import suppress

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_tools import readers
from data_tools.errors import DataError
from tests.data_tools.logged import collected, lines, log_of, processed, rollouts, table_of

ODD_NUMBERS = [-1, 0, 0.5, 2**31, 2**70, 1e308, math.nan, math.inf, -math.inf]
ODD_TEXTS = ["", "0.5", "True", "1,5", "N/A", "nan", "\ud800", "[1, 2]", "x\0"]
ODD_PAIRS = [[True, False], ["x", -0.5], [[1], -1], [None, "-0.25"], [{}, 0], ["nan", "-inf"], [False, -0.5]]
ODD_LISTS = [*ODD_PAIRS, [], [1], [0.5], ["1"], [None], [True], [[1]], [-9999.0, 0.25]]
ODD = st.sampled_from([None, True, False, {}, {"a": 1}, *ODD_NUMBERS, *ODD_TEXTS, *ODD_LISTS])


def good(n):
    return {
        "prompt": f"p{n // 3}",
        "response": f"r{n}",
        "response_ids": [n, n + 1],
        "behavior_logprobs": [-(n + 1) / 8, -0.5],
        "reward": n / 4,
        "loss_mask": [1, 0],
        "group": n // 3,
        "temperature": 1.0,
    }


@st.composite
def mutated_records(draw):
    """Good records with some fields dropped, set to null or to a value of another type, in another order."""
    records = [good(n) for n in range(draw(st.integers(1, 8)))]
    for record in records:
        for field in draw(st.lists(st.sampled_from(sorted(good(0))), max_size=3)):
            if draw(st.booleans()):
                record.pop(field, None)
            else:
                record[field] = draw(ODD)
    return draw(st.permutations(records))


@st.composite
def damaged_bytes(draw):
    """The lines of such records, cut, glued, with garbage between them or single bytes changed."""
    data = bytearray(lines(*draw(mutated_records())))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        match draw(st.sampled_from(["cut", "glue", "garbage", "byte"])):
            case "cut":
                del data[at:]
            case "glue":
                end = data.find(b"\n", at)
                del data[end : end + 1]
            case "garbage":
                data[at:at] = draw(st.binary(max_size=6))
            case "byte" if data:
                data[at] = draw(st.integers(0, 255))
    return bytes(data)


def read(data, *, tolerant=False):
    """(rows, rejects, notes) of a log that holds a record to start with, so that its format is known."""
    chunks = processed(lines(good(900)) + data, tolerant=tolerant)
    rejects = [(reject.row, reject.reason, reject.detail) for chunk in chunks for reject in chunk.rejects]
    return table_of(chunks), rejects, [chunk.notes for chunk in chunks]


def may_mean(value):
    """The numbers that a logged reward can stand for, by a reading of its own."""
    if isinstance(value, str):
        return {1.0} if value == "True" else {float(value)} if value == "0.5" else set()
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return {float(value)}
    return set()


def logprobs_of(record):
    """The log-probs that a record holds, by a reading of its own: numbers and texts of numbers, else None."""
    logged = record.get("behavior_logprobs")
    if not isinstance(logged, list):
        return [None] * 9
    texts = {"-0.25": -0.25}
    return [texts.get(v) if isinstance(v, str) else v if type(v) in (int, float) else None for v in logged]


@settings(deadline=None)
@given(mutated_records())
def test_mutated_records_are_all_counted_and_give_only_numbers_that_were_logged(records):
    table, rejects, _ = read(lines(*records))
    rows = [row for row in table.to_pylist() if row["source_row"] > 1]
    assert len(rows) + len(rejects) == len(records)
    assert sorted([row["source_row"] for row in rows] + [row for row, _, _ in rejects]) == list(
        range(2, len(records) + 2)
    )
    for row in rows:
        logged = records[row["source_row"] - 2]
        assert row["reward"] is None or row["reward"] in may_mean(logged.get("reward"))
        for value, given_value in zip(row["behavior_logprobs"] or [], logprobs_of(logged), strict=False):
            assert value is None or (value <= 0 and value == given_value)
        if row["behavior_logprob"] is not None:
            assert len(row["behavior_logprobs"]) == len(row["response_ids"])


@settings(deadline=None)
@given(damaged_bytes())
def test_damaged_bytes_never_crash_and_every_line_is_counted_once(data):
    table, rejects, _ = read(data)
    numbers = {n for n, line in enumerate((lines(good(900)) + data).split(b"\n"), 1) if line.strip()}
    rows = table.column("source_row").to_pylist()
    assert set(rows) | {row for row, _, _ in rejects} == numbers - empty_lists(data)
    table.validate(full=True)


def empty_lists(data):
    return {n for n, line in enumerate(data.split(b"\n"), 2) if line.strip().replace(b" ", b"") == b"[]"}


@settings(deadline=None)
@given(damaged_bytes())
def test_both_ways_of_reading_give_the_same_rows(data):
    fast, tolerant = read(data), read(data, tolerant=True)
    assert fast[0].equals(tolerant[0])
    assert fast[1:] == tolerant[1:]


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_told_to_be_some_kind_of_file_and_read_without_a_crash(data):
    log = log_of(data)
    with suppress(DataError):  # bytes that begin as a Parquet file and are none
        reader = readers.detect(log)
        if reader is None:
            assert readers.unknown(log).hint
        else:
            list(reader.chunks(log))


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=damaged_bytes(), grown=mutated_records())
def test_counts_add_up_and_collecting_again_keeps_only_what_is_new(tmp_path_factory, data, grown):
    folder = tmp_path_factory.mktemp("collect")
    log = folder / "log"
    log.write_bytes(lines(good(900)) + data + b"\n")
    first = collected(folder, log).total
    again = collected(folder, log).total
    assert (again.kept, again.duplicate, again.rejected) == (0, first.kept + first.duplicate, first.rejected)
    with log.open("ab") as file:
        file.write(lines(*grown))
    more = collected(folder, log).total
    assert more.duplicate == first.kept + first.duplicate
    ids = [row["response_id"] for row in rollouts(folder, "response_id")]
    assert len(ids) == len(set(ids)) == first.kept + more.kept


def test_ids_and_counts_do_not_depend_on_how_a_log_is_cut_into_blocks(monkeypatch):
    from data_tools.logs import lines as lines_module

    generator = random.Random(0)
    records = [good(generator.randrange(20)) | {"odd": generator.choice([1, "a", None])} for _ in range(200)]
    data = lines(*records) + b'{"torn": \n' + lines(*records[:50])
    whole, rejects, _ = read(data)
    monkeypatch.setattr(lines_module, "LINES_ROWS", 7)
    cut, cut_rejects, chunks = read(data)
    assert len(chunks) > 1
    assert cut.combine_chunks().equals(whole.combine_chunks())
    assert cut_rejects == rejects
    assert json.loads(whole.column("extra")[0].as_py() or "{}") == {}
