from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import data_tools
from data_tools import PolicyCard
from data_tools.errors import DataError
from offline_rec.data import tokens
from offline_rec.data.rows import RowStore
from offline_rec.data.tokens import fingerprint, prepare
from tests import tiny
from tests.offline_rec.datasets import rollouts

TOKENIZER = tiny.tokenizer()


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text)["input_ids"])


def dataset(path: Path, *batches: list[dict[str, Any]]) -> Any:
    ds = data_tools.open(str(path), create=True)
    first = 0
    for rows in batches:
        with ds.writer() as writer:
            writer.rollouts(rollouts([{"response_id": f"r{first + i}"} | row for i, row in enumerate(rows)]))
            writer.commit()
        first += len(rows)
    return ds


def engine_row(prompt: str = "1+1=", response: str = "2", **columns: Any) -> dict[str, Any]:
    made = {"prompt_ids": ids(prompt), "response_ids": [*ids(response), TOKENIZER.eos_token_id]}
    return {"prompt": prompt, "response": response, "policy": "p"} | made | columns


def text_row(prompt: str = "2+2=", response: str = "4") -> dict[str, Any]:
    return {"prompt": prompt, "response": response, "finish_reason": "stop"}


def take_all(ds: Any, plan: Any) -> Any:
    located = ds.sql("SELECT file, file_row FROM rollouts ORDER BY file, file_row")
    store = RowStore(ds, tokens_key=plan.key, retokenise=plan.retokenise)
    return store.take(located.column("file").to_pylist(), located.column("file_row").to_numpy(), strict=False)


def test_text_rows_get_ids_once_beside_their_rollouts(tmp_path: Path, monkeypatch: Any) -> None:
    ds = dataset(tmp_path / "ds", [text_row(), text_row("3+3=", "6")], [engine_row()])
    seen: list[tuple[int, int]] = []
    plan = prepare(ds, TOKENIZER, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(2, 2)]
    assert [path.name for path in (tmp_path / "ds" / "tokens").iterdir()] == [fingerprint(TOKENIZER)]
    rows = take_all(ds, plan)
    assert [TOKENIZER.decode(rows.prompt_ids[i]) for i in range(3)] == ["2+2=", "3+3=", "1+1="]
    assert [TOKENIZER.decode(rows.response_ids[i]) for i in range(3)] == ["4<eos>", "6<eos>", "2<eos>"]

    monkeypatch.setattr(tokens, "Encoder", None)  # a second call has nothing to encode
    assert prepare(ds, TOKENIZER).key == plan.key


def test_another_batch_in_the_place_of_one_that_needed_no_ids_gets_its_own(tmp_path: Path) -> None:
    ds = dataset(tmp_path / "ds")
    for made, encoded in ((engine_row(), []), (text_row(), ["one"])):
        with ds.writer("one") as writer:
            writer.rollouts(rollouts([{"response_id": "r"} | made]))
            writer.commit()
        prepare(ds, TOKENIZER)
        assert [path.stem for path in tmp_path.glob("ds/tokens/*/*.parquet")] == encoded
        ds.storage.remove("rollouts/one.parquet")


def test_a_killed_call_goes_on_with_the_batches_that_are_missing(tmp_path: Path) -> None:
    ds = dataset(tmp_path / "ds", [text_row()], [text_row("3+3=", "6")])

    def die(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(ds, TOKENIZER, progress=die)
    folder = tmp_path / "ds" / "tokens" / fingerprint(TOKENIZER)
    assert [path.stem for path in folder.iterdir()] == ds.batches()[:1]
    seen: list[tuple[int, int]] = []
    prepare(ds, TOKENIZER, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 1)]
    assert [path.stem for path in sorted(folder.iterdir())] == ds.batches()


def test_rows_stay_aligned_where_encoding_goes_in_several_pieces(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(tokens, "ENCODED_AT_ONCE", 3)
    ds = dataset(tmp_path / "ds", [text_row(f"{n}=", "x" * (n % 4)) for n in range(10)])
    rows = take_all(ds, prepare(ds, TOKENIZER))
    assert [TOKENIZER.decode(rows.prompt_ids[i]) for i in range(10)] == [f"{n}=" for n in range(10)]
    assert rows.response_ids.lengths.tolist() == [n % 4 + 1 for n in range(10)]


def test_rows_that_cannot_be_encoded_are_counted_and_have_no_length(tmp_path: Path) -> None:
    image = '[{"role": "user", "content": [{"type": "image_url"}]}]'
    ds = dataset(tmp_path / "ds", [text_row(), text_row(image)])
    plan = prepare(ds, TOKENIZER)
    assert plan.counts["multimodal"] == 1
    assert plan.notes == ["1 rows have no ids: a message holds parts that are no text"]
    lengths = RowStore(ds, tokens_key=plan.key).lengths(ds.batches() * 2, np.arange(2))
    assert [n.tolist() for n in lengths] == [[4, -1], [2, -1]]
    sidecar = pq.read_table(ds.sidecar("tokens", plan.key).path(ds.batches()[0]))
    assert sidecar.column("response_id").to_pylist() == ["r0", "r1"]
    assert sidecar.column("response_ids").to_pylist()[1] is None


def test_only_rows_whose_ids_are_made_from_text_are_spoken_of(tmp_path: Path) -> None:
    unstated = text_row() | {"finish_reason": None}
    ds = dataset(tmp_path / "ds", [engine_row() | {"response": None}, unstated, text_row(), unstated])
    notes = prepare(ds, TOKENIZER).notes[1:]
    assert notes == ["2 texts give no finish reason; they count as complete"]


def test_engine_ids_of_the_same_tokenizer_are_used_without_a_note(tmp_path: Path) -> None:
    ds = dataset(tmp_path / "ds", [engine_row(response="another text than its ids", response_ids=ids("7"))])
    ds.write_policy(PolicyCard(name="p", tokenizer=fingerprint(TOKENIZER)))
    plan = prepare(ds, TOKENIZER)
    assert plan.notes == []
    assert not (tmp_path / "ds" / "tokens").exists()
    assert take_all(ds, plan).response_ids.values.tolist() == ids("7")


def test_engine_ids_of_another_tokenizer_are_refused_unless_retokenised(tmp_path: Path) -> None:
    ds = dataset(tmp_path / "ds", [engine_row(behavior_logprobs=[-0.5, -0.5])] * 2)
    ds.write_policy(PolicyCard(name="p", tokenizer="0" * 32))
    with pytest.raises(
        DataError, match=r"2 rows of policy 'p' hold ids of another tokenizer \(00000000"
    ) as caught:
        prepare(ds, TOKENIZER)
    assert "--retokenise" in caught.value.hint

    plan = prepare(ds, TOKENIZER, retokenise=True)
    rows = take_all(ds, plan)
    assert TOKENIZER.decode(rows.response_ids[0]) == "2<eos>"
    assert np.isnan(rows.behavior.values).all()


def test_engine_ids_under_another_chat_template_are_used_with_a_note(tmp_path: Path) -> None:
    ds = dataset(tmp_path / "ds", [engine_row()])
    ds.write_policy(PolicyCard(name="p", tokenizer=fingerprint(TOKENIZER)[:16] + "0" * 16))
    assert prepare(ds, TOKENIZER).notes == [
        "policy 'p' used another chat template; its ids are used as logged"
    ]


def test_a_filter_leaves_the_policies_out_of_the_check(tmp_path: Path) -> None:
    ds = dataset(tmp_path / "ds", [engine_row(), engine_row(policy="q")])
    ds.write_policy(PolicyCard(name="p", tokenizer="0" * 32))
    assert len(prepare(ds, TOKENIZER, where="policy <> 'p'").notes) == 1


@pytest.mark.parametrize("policy", ["p", None])
def test_unknown_tokenizers_are_verified_on_a_sample_and_noted(tmp_path: Path, policy: str | None) -> None:
    cut = engine_row(response="2<eos>")
    stopped = engine_row(response="2", response_ids=ids("2\n\n"))
    parsed = engine_row(response="4", response_ids=ids("so 4!"), response_messages='{"role": "assistant"}')
    turns = engine_row(response="4", response_ids=ids("ab4"), loss_mask=[1, 0, 1])
    no_text = engine_row() | {"response": None}
    rows = [row | {"policy": policy} for row in (engine_row(), cut, stopped, parsed, turns, no_text)]
    (note,) = prepare(dataset(tmp_path / "ds", rows), TOKENIZER).notes
    name = "policy 'p'" if policy else "rows without a policy"
    assert note == f"{name} names no tokenizer; its ids are used: 6 sampled rows decode to their text"


def test_unknown_tokenizers_whose_rows_disagree_are_refused_with_counts(tmp_path: Path) -> None:
    outside = engine_row(response_ids=[5, 1000])
    other = engine_row(response="2", response_ids=ids("3"))
    empty = engine_row(response="", response_ids=ids("3"))
    ds = dataset(tmp_path / "ds", [engine_row(), outside, other, empty])
    message = "of 4 sampled rows 1 have ids outside the vocabulary and 2 decode to another text (r1, "
    with pytest.raises(DataError, match="policy 'p' names no tokenizer") as caught:
        prepare(ds, TOKENIZER)
    assert message in caught.value.message
    assert "--retokenise" in caught.value.hint
    assert not (tmp_path / "ds" / "tokens").exists()
