"""Pushing: what goes, what stays, and what the hub is asked to do; a stub stands for the hub."""

import json
from types import SimpleNamespace

import pytest

import data_tools
from data_tools.errors import ConfigError, DataError
from offline_rec.hub.push import push
from tests.offline_rec import logged

pytest.importorskip("huggingface_hub")


class Hub:
    """The calls of `HfApi` that are used, on a dictionary of files."""

    def __init__(self, *, private=None, files=()):
        self.private, self.files, self.calls = private, dict.fromkeys(files, b""), []

    def create_repo(self, repo_id, *, repo_type, private, exist_ok):
        self.calls.append(("create_repo", repo_id, repo_type, private))
        self.private = bool(private) if self.private is None else self.private

    def repo_info(self, repo_id, *, repo_type):
        return SimpleNamespace(private=self.private)

    def list_repo_files(self, repo_id, *, repo_type):
        return list(self.files)

    def create_commit(self, repo_id, *, repo_type, operations, commit_message):
        self.calls.append(("create_commit", len(operations)))
        for one in operations:
            if type(one).__name__ == "CommitOperationDelete":
                del self.files[one.path_in_repo]
            else:
                with one.as_file() as file:
                    self.files[one.path_in_repo] = file.read()
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}")


@pytest.fixture(scope="module")
def ds(tmp_path_factory):
    """A dataset with everything that must stay: a reject, erased rows, a journal, a secret."""
    tmp_path = tmp_path_factory.mktemp("push")
    made = logged.dataset(tmp_path / "ds", logged.rows(4), batches=2)
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps({"prompt": "x", "secret": "raw text of a log"}) + "\n")
    data_tools.collect([str(log)], made.path, format="rows")
    card = data_tools.PolicyCard(name="tiny", model="/home/someone/m", url="http://10.0.0.1:8000")
    made.write_policy(card)
    made.delete("response_id = 'r0-1'")
    made.judge("0.5", where="response_id = 'r0-0'")
    (tmp_path / "ds" / "_journals").mkdir()
    (tmp_path / "ds" / "_journals" / "samples.jsonl").write_text("prompts of users")
    (tmp_path / "ds" / ".lock").write_text("")
    (tmp_path / "ds" / "notes.txt").write_text("mine")
    return data_tools.open(made.path)


def test_of_a_dataset_rows_rewards_and_policies_go_and_nothing_else(ds):
    hub = Hub()
    report = push(ds.path, "lab/answers", private=True, api=hub)
    assert hub.calls[0] == ("create_repo", "lab/answers", "dataset", True)
    assert report.pushed
    assert report.url == "https://hub/lab/answers"
    folders = {name.split("/")[0] for name in hub.files}
    assert folders == {"README.md", "rec.json", "rollouts", "rewards", "policies"}
    batches = {
        name.removeprefix("rollouts/").removesuffix(".parquet") for name in hub.files if "roll" in name
    }
    assert batches == set(ds.batches())
    assert {
        "rejects",
        "erased",
        "_journals",
        ".lock",
        "notes.txt",
        "the secret in rec.json",
    } <= report.stays.keys()
    everything = b"".join(hub.files.values())
    secret = ds.info.secret.encode()
    for told in (secret, b"raw text of a log", b"prompts of users", b"/home/someone", b"10.0.0.1", b"r0-1"):
        assert told not in everything, told
    assert len(secret) == 32


def test_what_was_pushed_is_a_dataset_again(ds, tmp_path):
    hub = Hub()
    push(ds.path, "answers", api=hub)
    for name, content in hub.files.items():
        path = tmp_path / "back" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    query = "SELECT response_id, split, reward FROM rollouts ORDER BY ALL"
    assert data_tools.open(str(tmp_path / "back")).sql(query) == ds.sql(query)


def test_what_an_older_push_left_is_removed_in_the_same_commit(ds):
    hub = Hub(files=["rollouts/old.parquet", "policies/gone.json", "figure.png", ".gitattributes"])
    report = push(ds.path, "lab/answers", api=hub)
    assert report.removed == ["policies/gone.json", "rollouts/old.parquet"]
    assert "history" in "\n".join(report.lines())
    assert {"figure.png", ".gitattributes"} <= hub.files.keys()
    assert [call[0] for call in hub.calls] == ["create_repo", "create_commit"]


def test_a_dry_run_tells_the_same_and_asks_nobody(ds):
    before = sorted(ds.storage.entries(""))
    report = push(ds.path, "lab/answers", dry_run=True, api=None)
    assert not report.pushed
    assert report.bytes == sum(one["bytes"] for one in report.files)
    assert sorted(ds.storage.entries("")) == before


def test_a_public_repository_is_refused_where_a_private_one_is_wanted(ds):
    hub = Hub(private=False)
    with pytest.raises(ConfigError, match="exists and is public"):
        push(ds.path, "lab/answers", private=True, api=hub)
    assert not hub.files


def test_what_cannot_be_pushed_is_said_before_anybody_is_asked(ds, tmp_path):
    for name in ("a b", "a/b/c", "/x", "x--y", "../x", ""):
        with pytest.raises(ConfigError, match="no name of a repository"):
            push(ds.path, name, api=Hub())
    data_tools.open(str(tmp_path / "empty"), create=True)
    with pytest.raises(DataError, match="has no rows"):
        push(tmp_path / "empty", "x", api=Hub())
    with pytest.raises(ConfigError, match="has no adapter"):
        push(ds.path, "x", adapter=True, api=Hub())


def test_a_refusal_of_the_hub_is_one_line(ds):
    class Refusing(Hub):
        def create_repo(self, *_, **__):
            raise OSError("\n\n403 Forbidden: you have no right here\n")

    with pytest.raises(DataError, match="could not be pushed: 403 Forbidden: you have no right here"):
        push(ds.path, "lab/answers", api=Refusing())


def test_of_a_run_the_files_of_its_model_go(tmp_path):
    from offline_rec.training.fit import fit
    from tests.offline_rec.fitting import config, world  # torch

    run = fit(config(world(tmp_path, groups=8), steps=1, eval_every=None)).out
    (run / "model" / "training_args.bin").write_bytes(b"pickle")
    (run / "model" / "link.json").symlink_to("/etc/passwd")
    hub = Hub(files=["model-00001-of-00002.safetensors", "notes.md"])
    report = push(run, "lab/policy", api=hub)
    assert hub.calls[0] == ("create_repo", "lab/policy", "model", None)
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json", "notes.md"} <= hub.files.keys()
    assert not {"training_args.bin", "link.json", "optimizer.safetensors"} & hub.files.keys()
    assert {"model/training_args.bin", "model/link.json", "checkpoints", "lineage"} <= report.stays.keys()
    assert report.removed == ["model-00001-of-00002.safetensors"]
    assert str(tmp_path).encode() not in hub.files["README.md"]
    with pytest.raises(DataError, match="has no adapter"):
        push(run, "lab/policy", adapter=True, api=hub)
