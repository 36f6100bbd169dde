"""Where logs come from: folders of everything, patterns, object stores, Hugging Face datasets."""

import gzip
import sys

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

import data_tools
from data_tools.errors import DataError, MissingExtra
from tests.data_tools.logged import collected, draw, lines, rollouts

FILES = {
    "plain.jsonl": lines(draw(response="1")),
    "deep/packed": gzip.compress(lines(draw(response="2"))),
    "deep/table.csv": b"prompt,response\na,3\n",
    "deep/notes.md": b"words without any structure\n",
    ".cache/old.jsonl": lines(draw(response="4")),
    "deep/.hidden": lines(draw(response="5")),
}


@pytest.fixture
def folder(tmp_path):
    for name, content in FILES.items():
        path = tmp_path / "logs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "logs"


class Hub(MemoryFileSystem):
    """Stands in for huggingface_hub's filesystem of the same protocol."""

    protocol = "hf"
    store = {}  # noqa: RUF012 - fsspec's own way
    pseudo_dirs = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("hf://"))

    def unstrip_protocol(self, name):
        return f"hf://{name.strip('/')}"


@pytest.fixture
def hub():
    fsspec.register_implementation("hf", Hub, clobber=True)
    files = Hub()
    for name, content in FILES.items():
        files.pipe_file(f"/datasets/owner/name/{name}", content)
    yield files
    Hub.store.clear()
    fsspec.register_implementation("hf", "huggingface_hub.HfFileSystem", clobber=True)


@pytest.fixture
def store():
    files = fsspec.filesystem("memory")
    for name, content in FILES.items():
        files.pipe_file(f"/bucket/{name}", content)
    yield files
    files.store.clear()


def responses(folder):
    return sorted(row["response"] for row in rollouts(folder, "response"))


@pytest.mark.parametrize("source", ["logs", "logs/**", "logs/**/*", "logs/*"])
def test_a_folder_or_pattern_sweeps_up_every_log_once_and_names_the_rest(tmp_path, folder, source):
    report = collected(tmp_path, tmp_path / source)
    assert responses(tmp_path) == ["1", "2", "3"]
    assert report.total.duplicate == 0
    assert list(report.skipped) == [str(folder / "deep" / "notes.md")]


def test_what_a_shell_makes_of_a_pattern_is_swept_too(tmp_path, folder):
    (folder / "README.md").write_text("words without any structure")
    report = collected(tmp_path, *sorted(path for path in folder.iterdir() if path.name[0] != "."))
    assert responses(tmp_path) == ["1", "2", "3"]
    assert len(report.skipped) == 2


def test_a_file_that_is_named_must_be_a_log(tmp_path, folder):
    with pytest.raises(DataError, match=r"notes\.md is not a log"):
        collected(tmp_path, folder / "plain.jsonl", folder / "deep" / "notes.md")
    (folder / "deep" / "empty.log").touch()
    assert collected(tmp_path, f"{folder}/deep/*.log").batch is None
    with pytest.raises(DataError, match="no log was found among 1 files"):
        collected(tmp_path, f"{folder}/deep/*.md")


@pytest.mark.parametrize("source", ["memory://bucket", "memory://bucket/", "memory://bucket/**"])
def test_an_object_store_is_swept_as_a_folder_is(tmp_path, store, source):
    report = collected(tmp_path, source)
    assert responses(tmp_path)[:3] == ["1", "2", "3"]
    assert any(name.endswith("notes.md") for name in report.skipped)


def test_one_object_is_one_log(tmp_path, store):
    report = collected(tmp_path, "memory://bucket/deep/packed")
    assert [log.source for log in report.logs] == ["memory:///bucket/deep/packed"]
    assert responses(tmp_path) == ["2"]
    with pytest.raises(DataError, match="does not exist"):
        collected(tmp_path, "memory://bucket/nothing")


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("hf:owner/name", ["1", "2", "3"]),
        ("hf:owner/name/deep/table.csv", ["3"]),
        ("hf:owner/name/*.jsonl", ["1"]),
        ("hf://datasets/owner/name/deep", ["2", "3"]),
    ],
)
def test_a_hugging_face_dataset_goes_by_its_name(tmp_path, hub, source, found):
    report = collected(tmp_path, source)
    assert responses(tmp_path) == found
    assert all(log.source.startswith("hf://datasets/owner/name/") for log in report.logs)


def test_a_file_of_such_a_name_goes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hf:log").write_bytes(lines(draw()))
    assert collected(tmp_path, "hf:log").total.kept == 1


@pytest.mark.parametrize(
    ("url", "module", "extra"),
    [
        ("s3://b/x", "s3fs", "s3"),
        ("gs://b/x", "gcsfs", "gs"),
        ("hf://datasets/a/b", "huggingface_hub", "hf"),
        ("hf:a/b", "huggingface_hub", "hf"),
    ],
)
def test_a_store_whose_package_is_missing_names_the_extra(tmp_path, monkeypatch, url, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(_registry, url.split(":")[0], raising=False)
    with pytest.raises(MissingExtra, match=module) as error:
        collected(tmp_path, url)
    assert error.value.hint == f"install it with: pip install 'offline-rec[{extra}]'"
    if "://" in url:
        with pytest.raises(MissingExtra, match=module):
            data_tools.open(url)


@pytest.mark.parametrize("moment", ["isdir", "open"])
def test_errors_of_a_store_are_one_clear_error(tmp_path, store, monkeypatch, moment):
    class NoCredentials(Exception):
        pass

    def fails(*_, **__):
        raise NoCredentials("unable to locate credentials")

    monkeypatch.setattr(MemoryFileSystem, moment, fails)
    with pytest.raises(DataError, match="cannot be read: unable to locate credentials"):
        collected(tmp_path, "memory://bucket/plain.jsonl")


def test_the_report_of_many_logs_ends_with_a_table_by_format(tmp_path):
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(5):
        (folder / f"{number}.jsonl").write_bytes(lines(draw(response=str(number)), draw(prompt=...)))
    call = {
        "messages": [{"role": "user", "content": "a"}],
        "choices": [{"message": {"content": "b"}, "index": 0}],
    }
    (folder / "calls.jsonl").write_bytes(lines(call, call))
    report = collected(tmp_path, folder)
    told = report.lines()[-4:]
    assert [line.split() for line in told] == [
        ["format", "logs", "read", "kept", "duplicate", "rejected"],
        ["rows", "5", "10", "5", "0", "5"],
        ["openai", "1", "2", "2", "0", "0"],
        ["total", "6", "12", "7", "0", "5"],
    ]
    assert len(set(map(len, told))) == 1
    assert report.to_dict()["formats"][0] == {
        "format": "rows", "logs": 5, "read": 10, "kept": 5, "duplicate": 0, "rejected": 5,
    }  # fmt: skip
