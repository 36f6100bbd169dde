"""Reports in a real browser: clean console, no script, no sideways scrolling, light and dark."""

from pathlib import Path

import pytest

import offline_rec
from tests.browser.chromium import ask, open_page
from tests.offline_rec import hostile

pytestmark = pytest.mark.browser
PAGES = ("dataset.html", "run.html")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pages whose every text is a trap; their names too."""
    folder = tmp_path_factory.mktemp("pages") / "<img src=x onerror='window.hacked = 4'> #?%41"
    ds = hostile.dataset(folder / "data\u202e set")
    run = hostile.run(folder / "run & <b>", ds)
    offline_rec.report(ds, folder / "dataset.html", groups=30)
    offline_rec.report(run, folder / "run.html", groups=30)
    return folder


@pytest.mark.parametrize("page", PAGES)
def test_the_console_stays_empty(pages: Path, page: str) -> None:
    opened = open_page(pages / page)
    assert opened.console == []
    assert "</footer>" in opened.dom


def test_a_script_that_slipped_through_would_be_stopped_and_seen(pages: Path) -> None:
    trapped = pages / "trapped.html"
    html = (pages / "dataset.html").read_text(encoding="utf-8")
    trapped.write_text(html.replace("<main>", f"<main>{hostile.SCRIPT}"), encoding="utf-8")
    assert any("Content Security Policy" in line for line in open_page(trapped).console)
    assert ask(trapped)["hacked"] == 1


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_runs_and_nothing_scrolls_sideways(pages: Path, page: str, width: int) -> None:
    found = ask(pages / page, width=width)
    assert found["hacked"] is None
    assert found["inner"] == width
    assert found["wide"] == []
    assert found["width"] <= width
    assert found["charts"] >= 5


def test_the_page_follows_the_reader_s_light_or_dark(pages: Path, tmp_path: Path) -> None:
    light, dark = ask(pages / "run.html"), ask(pages / "run.html", dark=True)
    assert (light["dark"], dark["dark"]) == (False, True)
    assert light["background"] != dark["background"]
    open_page(pages / "run.html", screenshot=tmp_path / "shot.png")
    assert (tmp_path / "shot.png").read_bytes().startswith(b"\x89PNG")
