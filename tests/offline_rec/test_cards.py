"""Cards: facts and nothing else, the same each time, whatever a log has written into names."""

import json
import re
import shutil

import pytest
import yaml

import data_tools
from data_tools.errors import ConfigError, DataError
from offline_rec.cards import markdown
from offline_rec.cards.data_sections import place as shown_place
from offline_rec.cards.write import card
from offline_rec.training.fit import fit
from tests import tiny
from tests.offline_rec import logged
from tests.offline_rec.fitting import Killed, config, killer, records

NASTY = (
    "a|b`c`<script>alert(1)</script>\n---\n# *x* [l](http://e.vil) ![i](x) @me {{7*7}} 'q' \"d\" \u202e \x07"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A dataset of a policy with a name that no one should have, and a run on it."""
    folder = tmp_path_factory.mktemp("cards")
    tiny.save(folder / "m")
    rows = logged.rows(12, policy=NASTY, source_file=f"/home/someone/{NASTY}.jsonl")
    logged.dataset(folder / "ds", rows, batches=2)
    fit(config(folder, weight="CASE WHEN extra = '```' THEN 2 ELSE 1 END"))
    return folder


def front(text):
    return yaml.safe_load(markdown._FRONT.match(text)[1])


def facts(text):
    """The two-column tables of a card."""
    rows = re.findall(r"^\| ([^|]*?) \| ((?:[^|]|\\\|)*) \|$", text, re.M)
    return {name.replace("\\", ""): value.replace("\\", "") for name, value in rows}


def test_the_card_of_a_fit_tells_its_numbers(place):
    run = place / "run"
    text = (run / "model" / "README.md").read_text()
    last = records(run)[-1]
    snapshot = json.loads((run / "snapshot.json").read_text())
    told = facts(text)
    assert told["updates"] == "6"
    assert told["algorithm"] == "rec-oneside-nois"
    assert told["epsilon_low"] == "0.2"
    assert told["lr"] == "0.003"
    assert told["snapshot"] == snapshot["hash"]
    assert told["rows trained on"] == str(snapshot["rows"])
    assert told["KL to the anchor"] == f"{last['heldout']['kl']:.6g}"
    assert told["tokens in these updates"] == str(int(sum(r.get("tokens", 0) for r in records(run))))
    assert snapshot["sql"] in text
    assert "weight: CASE WHEN extra = '```' THEN 2 ELSE 1 END" in text
    assert front(text)["rec"] == {"algorithm": "rec-oneside-nois", "updates": 6, "snapshot": snapshot["hash"]}
    rewards = snapshot["provenance"]["rewards"]
    assert (rewards["judged"], rewards["mean"], rewards["max"]) == (snapshot["rows"], 0.25, 1.0)
    assert "| unknown |" in text  # who sampled, as the log does not tell


def test_cards_are_what_the_hub_reads(place):
    hub = pytest.importorskip("huggingface_hub")
    for text, kind in (
        ((place / "run" / "model" / "README.md").read_text(), hub.ModelCard),
        (card(place / "ds", write=False)[0].text, hub.DatasetCard),
    ):
        loaded = kind(text)
        assert loaded.data.to_dict() == front(text)
        assert loaded.text.lstrip().startswith(markdown.BEGIN)
    assert loaded.data.size_categories == ["n<1K"]


def test_what_a_log_wrote_is_text_in_a_card(place):
    for text in (
        (place / "run" / "model" / "README.md").read_text(),
        card(place / "ds", write=False)[0].text,
    ):
        body = text.split("---\n", 2)[2]
        outside = re.sub(r"^(`{3,})\w*\n.*?^\1$", "", body, flags=re.M | re.S)
        assert "<script" not in outside
        assert "@me" not in outside
        assert "http://" not in outside
        assert not re.search(r"[\x00-\x08\u202e]", text)
        tables = [line for line in outside.splitlines() if line.startswith("|")]
        assert any("alert" in line for line in tables)
        for line in tables:  # no value adds a column or a line
            assert not re.search(r"(?<!\\)[`\[*]", line), line
        policies = [line for line in tables if "0 to 2" in line]
        assert [len(re.findall(r"(?<!\\)\|", line)) for line in policies] == [8]
        assert "/home/someone" not in text
        assert "---\n#" not in body


def test_a_text_is_shown_as_it_is():
    assert markdown.text("a_b|c") == "a\\_b\\|c"
    assert markdown.text("&amp; <b>") == "&amp;amp; &lt;b&gt;"
    assert markdown.text("x" * 400).endswith("x…")
    assert markdown.text(None) == "unknown"
    assert markdown.text(1234567) == "1,234,567"
    assert markdown.fenced("a\n````\nb").startswith("`````\n")
    assert shown_place("/home/me/runs/m/") == "m"
    assert shown_place("s3://key:secret@bucket/logs?token=1") == "s3://bucket/logs"
    assert shown_place("/c/models--Qwen--Qwen2.5-1.5B/snapshots/abc") == "Qwen/Qwen2.5-1.5B"


def test_a_resumed_fit_and_a_second_one_write_the_same_card(place, tmp_path):
    text = (place / "run" / "model" / "README.md").read_text()
    weight = {"weight": "CASE WHEN extra = '```' THEN 2 ELSE 1 END"}
    same = config(place, **weight).model_copy(update={"out": str(tmp_path / "run")})
    with pytest.raises(Killed):
        fit(same, progress=killer(3))
    fit(same, resume=True)
    assert (tmp_path / "run" / "model" / "README.md").read_text() == text


def test_reports_beside_the_run_and_a_readers_notes_are_in_the_next_card(place, tmp_path):
    shutil.copytree(place / "run", tmp_path / "run")
    run = tmp_path / "run"
    at = {"value": 0.5, "low": 0.4, "high": 0.6}
    judged = {"verdict": {"word": "better", "reason": "<i>", "rule": None}, "value": at, "gain": at}
    judged |= {"diagnostics": {"ess": 30.0}, "trained_rows": 0}
    ope = {"policies": [judged], "episodes": 40, "prompts": 10, "dataset": "/x/ds", "split": "holdout"}
    (run / "ope.json").write_text(json.dumps(ope | {"where": None, "logged": at}))
    (run / "eval" / "1").mkdir(parents=True)
    asked = {"samples": 4, "prompts": 9, "reward": "exact", "temperature": 1.0}
    one = {"policy": "run", "accuracy": at, "mean_reward": at, "pass_at": {"2": at}, "unjudged": 0}
    report = {"asked": asked, "policies": [one], "differences": []}
    (run / "eval" / "1" / "eval.json").write_text(json.dumps(report))
    file = run / "model" / "README.md"
    file.write_text(file.read_text() + "\nMy own words.\n")
    [made] = card(run)
    assert made.text == file.read_text()
    assert "## Off-policy estimate" in made.text
    assert "| better | &lt;i&gt; | 0.5 \\(0.4 to 0.6\\) |" in made.text
    assert "4 samples a prompt to 9 prompts, reward exact; temperature 1;" in made.text
    assert made.text.endswith(f"{markdown.END}\n\nMy own words.\n")
    assert card(run)[0].text == made.text


def test_the_card_of_a_dataset_counts_what_was_left_out(tmp_path):
    log = tmp_path / "log.jsonl"
    lines = [{"prompt": "1+1=", "response": "2", "reward": 1}, {"prompt": "1+2="}, {"response": "3"}]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    data_tools.collect([str(log)], str(tmp_path / "ds"))
    ds = data_tools.open(str(tmp_path / "ds"))
    ds.judge("0.5")
    [made] = card(tmp_path / "ds")
    told = facts(made.text)
    assert (told["rows"], told["prompts"], told["licence"]) == ("1", "1", "unknown")
    assert "| no\\_response | 1 |" in made.text
    assert "| log.jsonl | 1 |" in made.text
    assert "Left out" in made.text
    assert (tmp_path / "ds" / "README.md").read_text() == made.text
    assert data_tools.open(str(tmp_path / "ds")).info.secret not in made.text
    first = front(made.text)["rec"]["snapshot"]
    assert front(card(tmp_path / "ds")[0].text)["rec"]["snapshot"] == first
    ds.add_rewards  # noqa: B018
    (tmp_path / "ds" / "README.md").write_text("# mine\n")
    with pytest.raises(ConfigError, match="was not written by rec card"):
        card(tmp_path / "ds")


def test_a_run_without_a_model_has_no_card(place, tmp_path):
    shutil.copytree(place / "run", tmp_path / "run", ignore=shutil.ignore_patterns("model"))
    with pytest.raises(DataError, match="has no model yet"):
        card(tmp_path / "run")
