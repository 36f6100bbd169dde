"""`report`: the page is whole without anything else, its numbers are SQL's, and texts stay texts."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

import data_tools
import offline_rec
from cli.main import rec
from data_tools.errors import ConfigError, DataError
from offline_rec.reporting.blocks import Note, Page, Section
from offline_rec.reporting.groups import choose
from offline_rec.reporting.page import render
from offline_rec.reporting.plain_text import number, shown
from offline_rec.training.fit import fit
from tests.offline_rec import hostile
from tests.offline_rec.fitting import config, world

VOID = {"meta", "link", "br", "img", "path", "use"}


class Reading(HTMLParser):
    """The elements of a page, its texts, and the rows of its tables by the question above them."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.tables: dict[str, list[list[str]]] = {}
        self.facts: dict[str, str] = {}
        self._question = self._term = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in VOID:
            return
        self.open.append(tag)
        if tag == "h3":
            self._question = ""
        if tag == "tr":
            self.tables.setdefault(self._question, []).append([])
        if tag in ("td", "th"):
            self.tables[self._question][-1].append("")
        if tag == "dt":
            self._term = ""

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        inside = self.open[-1] if self.open else ""
        if "h3" in self.open:
            self._question += data
        elif "td" in self.open or "th" in self.open:
            self.tables[self._question][-1][-1] += data
        elif inside == "dt":
            self._term += data
        elif inside == "dd":
            self.facts.setdefault(self._term, data)


def read(path: Path) -> Reading:
    reading = Reading()
    reading.feed(path.read_text(encoding="utf-8"))
    reading.close()
    assert reading.open == []
    return reading


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fitted run and its dataset."""
    folder = world(tmp_path_factory.mktemp("report"), groups=24, holdout=0.5)
    fit(config(folder, steps=3, eval_every=2))
    return folder


@pytest.fixture(scope="module")
def told(place: Path) -> dict[str, str]:
    """What the command says when it writes the pages of both, the second with --json."""
    said = {}
    for name, options in (("ds", []), ("run", ["--json"])):
        page = str(place / f"{name}.html")
        done = CliRunner().invoke(rec, ["report", str(place / name), "-o", page, *options])
        assert done.exit_code == 0, done.output
        said[name] = done.stdout
    return said


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pages of a dataset and a run that are all traps; also their folders are."""
    folder = tmp_path_factory.mktemp("evil") / "<img src=x onerror='window.hacked = 4'>"
    ds = hostile.dataset(folder / "data\u202e set")
    run = hostile.run(folder / "run & <b>", ds)
    offline_rec.report(ds, folder / "dataset.html", groups=30)
    offline_rec.report(run, folder / "run.html", groups=30)
    return folder


@pytest.mark.parametrize("page", ["dataset.html", "run.html"])
def test_no_text_of_a_log_becomes_an_element_or_an_attribute(evil: Path, page: str) -> None:
    reading = read(evil / page)
    tags = {tag for tag, _ in reading.tags}
    assert not tags & {"script", "img", "iframe", "object", "embed", "form", "base"}
    for tag, attributes in reading.tags:
        assert not any(name.startswith("on") for name in attributes), tag
        for name in ("href", "xlink:href", "src"):
            assert re.fullmatch(r"#\w+|data:,|None", str(attributes.get(name)))
    assert hostile.SCRIPT in reading.text
    assert hostile.TEMPLATE[:11] in reading.text
    assert not re.search("[\u202a-\u202e\u2066-\u2069\u200e\u200f\x00-\x08\x0b-\x1f\x7f-\x9f]", reading.text)
    assert r"safe\u202egnp.exe\u2066" in reading.text


@pytest.mark.parametrize("page", ["dataset.html", "run.html"])
def test_pages_of_long_texts_stay_small_and_say_what_is_left_out(evil: Path, page: str) -> None:
    assert (evil / page).stat().st_size < 2_000_000
    assert "characters…]" in read(evil / page).text


def test_a_page_asks_for_nothing_and_allows_no_script(evil: Path) -> None:
    html = (evil / "dataset.html").read_text()
    policy = next(a["content"] for t, a in read(evil / "dataset.html").tags if a.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'")
    assert not re.findall(r"(?:url\(|@import|href=\"|src=\")(?!#|data:,)", html)


def test_half_a_character_is_shown_and_not_an_error() -> None:
    html = render(Page("\ud800", "s", "\udcff", [Section("a", "b", [Note("x\udc80\r\ny", "\x1b")])]))
    assert rb"\ud800" in html
    assert b"x\\udc80\ny" in html
    assert rb"<code>\x1b</code>".replace(rb"\x1b", rb"\u001b") in html


def test_what_is_shown_keeps_letters_of_all_scripts() -> None:
    kept = "é 漢字 שלום \U0001f468\u200d\U0001f469\u200d\U0001f467 a\nb\tc\u00a0d"
    assert shown(kept) == kept
    assert shown("\u2028\ufeff\U000e0001") == r"\u2028\ufeff\U000e0001"


def test_numbers_are_as_people_read_them() -> None:
    told = [
        number(x) for x in (None, 0, 12345, 1234.56, 0.5, -0.0034, 3e-6, 4e-12, float("nan"), float("inf"))
    ]
    assert told == ["–", "0", "12,345", "1,235", "0.500", "−0.0034", "3e-06", "≈ 0", "–", "–"]


@pytest.mark.usefixtures("told")
def test_numbers_of_a_dataset_are_those_of_sql(place: Path) -> None:
    ds = data_tools.open(place / "ds")
    page = read(place / "ds.html")
    assert page.facts["Responses"] == number(ds.sql("SELECT count(*) FROM rollouts").column(0)[0].as_py())
    assert page.facts["Mean reward"] == number(
        ds.sql("SELECT avg(reward) FROM rollouts").column(0)[0].as_py()
    )
    by_version = ds.sql(
        "SELECT policy, policy_version, count(*), avg(reward) FROM rollouts GROUP BY ALL ORDER BY 1, 2 DESC"
    ).to_pylist()
    rows = page.tables["Who sampled the responses?"][1:]
    assert [(row[0], row[1], row[2].split()[0], row[3]) for row in rows] == [
        (str(r["policy"]), str(r["policy_version"]), *map(number, list(r.values())[2:])) for r in by_version
    ]
    counted = ds.sql("SELECT n_tokens, count(*) FROM rollouts GROUP BY 1 ORDER BY 1").to_pylist()
    drawn = {row[0]: row[1] for row in page.tables["How long are responses?"][1:]}
    assert {label: n for label, n in drawn.items() if n != "0"} == {
        str(r["n_tokens"]): number(list(r.values())[1]) for r in counted
    }
    assert sum(int(row[1]) for row in page.tables["How are rewards distributed?"][1:]) == 96


@pytest.mark.usefixtures("told")
def test_numbers_of_a_run_are_those_of_sql(place: Path) -> None:
    page, run = read(place / "run.html"), data_tools.open(place / "run")
    losses = run.sql("SELECT step, loss FROM metrics WHERE step > 0 ORDER BY step").to_pylist()
    assert page.tables["Does the loss go down?"][1:] == [
        [number(r["step"]), number(r["loss"])] for r in losses
    ]
    value = run.sql(
        "SELECT heldout.value AS v FROM metrics WHERE heldout IS NOT NULL ORDER BY step"
    ).to_pylist()
    told = [row[1] for row in page.tables["What would the policy earn on held-out prompts?"][1:]]
    assert told == [number(r["v"]) for r in value]
    uses = run.sql("SELECT count(*) AS n FROM lineage").to_pylist()[0]["n"]
    by_policy = page.tables["Whose responses had the weight?"][1:]
    assert sum(int(row[4]) for row in by_policy) == uses
    mass = [float(row[5].split()[0]) for row in by_policy]
    assert sum(mass) == pytest.approx(100, abs=0.2)
    assert "No off-policy estimate is kept in this run." in page.text
    assert f"rec ope {place / 'run'} --data {place / 'ds'}" in page.text


@pytest.mark.usefixtures("told")
def test_groups_show_advantage_weight_and_colours_of_tokens(evil: Path, place: Path) -> None:
    page = (place / "ds.html").read_text()
    shown_groups = re.findall(r'<details class="card wide group"', page)
    assert len(shown_groups) == 20
    # Rewards 1, 0, 0, 0: advantages to the mean of the group.
    assert page.count("<dt>advantage</dt><dd>+0.750</dd>") == 20
    assert page.count("<dt>advantage</dt><dd>−0.250</dd>") == 60
    assert 'title="log-prob -' in page
    # In a run the tokens are coloured by the log-ratios that its scores give: +0.4 and -0.4 in turn.
    ratios = (evil / "run.html").read_text()
    assert ratios.count('title="log-ratio +0.40') > 50
    assert 'class="p2" title="log-ratio +0.40' in ratios
    assert 'class="n2" title="log-ratio -0.40' in ratios


def test_what_a_run_promoted_comes_by_the_change_of_its_log_prob(evil: Path) -> None:
    page = read(evil / "run.html")
    rows = page.tables["In numbers"][1:]
    better = next(row for row in rows if row[0] == "better than their group")
    assert better[2:] == ["+0.400", "100 %"]
    assert next(row for row in rows if row[0] == "worse than their group")[2:] == ["−1.300", "0 %"]


def test_the_choice_of_groups_is_that_of_its_seed_and_of_every_kind(evil: Path) -> None:
    with data_tools.open(evil / "data\u202e set").connect() as con:
        one, same, other = (choose(con, count=6, seed=seed) for seed in (1, 1, 2))
        every = choose(con, count=100, seed=1)
    assert one == same != other
    assert set(one.values()) == set(every.values()) == {"mixed", "equal", "unjudged"}
    assert len(every) == 24


def test_a_loop_is_told_like_a_run(evil: Path, tmp_path: Path) -> None:
    loop = hostile.run(tmp_path / "loop", data_tools.open(evil / "data\u202e set"))
    (loop / "config.yaml").write_text(json.dumps({"dataset": str(evil / "data\u202e set"), "rounds": 3}))
    offline_rec.report(loop, tmp_path / "loop.html", groups=2)
    page = read(tmp_path / "loop.html")
    assert "run of a loop" in page.text
    assert len(page.tables["Whose responses had the weight?"]) > 10


def test_without_groups_no_text_of_a_log_is_on_the_page(evil: Path, tmp_path: Path) -> None:
    offline_rec.report(evil / "run & <b>", tmp_path / "run.html", groups=0)
    text = read(tmp_path / "run.html").text
    assert "line 0" in read(evil / "run.html").text
    assert "line 0" not in text
    assert "Most promoted" not in text


def test_an_empty_dataset_and_a_run_that_has_just_begun_say_why_there_is_nothing(tmp_path: Path) -> None:
    data_tools.open(tmp_path / "ds", create=True)
    offline_rec.report(tmp_path / "ds", tmp_path / "ds.html")
    assert "The dataset holds no response yet." in read(tmp_path / "ds.html").text
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("algorithm: [\n")
    offline_rec.report(tmp_path / "run", tmp_path / "run.html")
    text = read(tmp_path / "run.html").text
    for why in (
        "has recorded no step",
        "No evaluation is kept",
        "kept no lineage",
        "The dataset of the run is not",
    ):
        assert why in text


def test_errors_name_what_is_wrong(evil: Path, place: Path, tmp_path: Path) -> None:
    ds = data_tools.open(place / "ds")
    with pytest.raises(ConfigError, match="no scores begin with 'ffff'"):
        offline_rec.report(ds, tmp_path / "x.html", score="ffff")
    with pytest.raises(ConfigError, match="leave --score out"):
        offline_rec.report(place / "run", tmp_path / "x.html", score="ffff")
    with pytest.raises(ConfigError, match="groups must be at least 0"):
        offline_rec.report(ds, tmp_path / "x.html", groups=-1)
    with pytest.raises(DataError, match="is not a dataset"):
        offline_rec.report(tmp_path / "nothing", tmp_path / "x.html")
    assert not list(tmp_path.iterdir())


def test_the_command_tells_what_it_wrote(place: Path, told: dict[str, str]) -> None:
    page = place / "ds.html"
    assert told["ds"] == f"{page}: {page.stat().st_size / 1000:,.0f} kB about a dataset\n"
    facts = json.loads(told["run"])
    assert (facts["about"], facts["bytes"]) == ("run", (place / "run.html").stat().st_size)
    assert CliRunner().invoke(rec, ["report", str(place / "ds")]).exit_code == 2
