"""Headless Chromium on a file: what it writes to its console, and what a script of ours finds in the page."""

import json
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SILENT = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *(
        "--disable-dev-shm-usage",
        "--enable-logging=stderr",
        "--no-proxy-server",
        "--host-resolver-rules=MAP * ~NOTFOUND",
    ),
)
SECONDS = 120
POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')

ASKED = """<script>
for (const one of document.querySelectorAll('details')) one.open = true;
const wide = [...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll, svg') &&
  e.getBoundingClientRect().right > innerWidth + 1).map(e => e.tagName + '.' + e.className).slice(0, 5);
parent.postMessage(JSON.stringify({hacked: window.hacked ?? null,
  width: document.scrollingElement.scrollWidth,
  inner: innerWidth, wide, charts: document.querySelectorAll('figure svg').length,
  dark: matchMedia('(prefers-color-scheme: dark)').matches,
  background: getComputedStyle(document.body).backgroundColor}), "*");
</script>"""

FRAME = """<!DOCTYPE html><meta charset="utf-8"><title></title><body style="margin: 0">
<script>onmessage = event => { document.title = event.data };</script>
<iframe src="SOURCE" width="WIDTH" height="900" style="border: 0"></iframe>"""


@dataclass(frozen=True)
class Opened:
    """The elements after the page was loaded, and the lines of the browser's console."""

    dom: str
    console: list[str]


def open_page(path: Path, *, width: int = 1280, dark: bool = False, screenshot: Path | None = None) -> Opened:
    """Open a file in a fresh browser without a network; fails if the browser does."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert found, "there is no Chromium: apt-get install chromium"
    wanted = [f"--screenshot={screenshot}"] if screenshot else ["--dump-dom", "--virtual-time-budget=5000"]
    wanted += ["--blink-settings=preferredColorScheme=0"] if dark else []
    with tempfile.TemporaryDirectory(prefix="rec-chromium-", ignore_cleanup_errors=True) as profile:
        done = subprocess.run(
            [
                found,
                *SILENT,
                *wanted,
                f"--user-data-dir={profile}",
                f"--window-size={width},900",
                path.as_uri(),
            ],
            capture_output=True,
            timeout=SECONDS,
        )
    told = done.stderr.decode("utf-8", "replace")
    assert done.returncode == 0, told
    return Opened(
        done.stdout.decode("utf-8", "replace"), [line for line in told.splitlines() if "CONSOLE" in line]
    )


def ask(path: Path, *, width: int = 1280, dark: bool = False) -> dict[str, Any]:
    """What the page is like without its policy, so that escaping alone protects it, and with all unfolded.

    In a frame, as a window is never as narrow as a phone.
    """
    html = path.read_text(encoding="utf-8")
    assert POLICY.search(html)
    bare = path.with_name(f"bare-{path.name}")
    bare.write_text(POLICY.sub("", html).replace("</body>", f"{ASKED}</body>"), encoding="utf-8")
    frame = path.with_name(f"frame-{path.name}")
    frame.write_text(FRAME.replace("SOURCE", bare.as_uri()).replace("WIDTH", str(width)), encoding="utf-8")
    title = re.search(r"<title>(.*?)</title>", open_page(frame, dark=dark).dom, re.S)
    assert title
    answers: dict[str, Any] = json.loads(title[1].replace("&quot;", '"').replace("&amp;", "&"))
    return answers
