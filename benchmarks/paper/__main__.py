"""arXiv 2509.24203 at small scale, from nothing to figures and a table of findings.

    pip install -e '.[bench]'
    python -m benchmarks.paper run --out paper
    python -m benchmarks.paper publish --out paper && python -m tests.generated

From the top of the repository. `run` runs whatever is missing, two at a time; it can be stopped and goes on
where it was. It ends with page and figures under OUT, made of the runs that are there; `publish` puts
them into the repository.
"""

import os
import signal
import sys
from pathlib import Path

import click

from benchmarks.paper.plan import Effort, cells
from benchmarks.paper.publishing import FIGURES, PUBLISHED, gather, write_figures, write_json, write_page
from benchmarks.paper.runner import Results, estimate, run
from benchmarks.paper.world import Size

ROOT = Path(__file__).parent.parent.parent


def _results(out: Path) -> Results:
    return Results(out, Effort(), Size())


out_option = click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Where runs are kept."
)
cells_option = click.option(
    "--cells",
    "pattern",
    default="*",
    show_default=True,
    help="Only runs named like this, such as 'addition/*/1'.",
)


@click.group()
def main() -> None:
    """Does what arXiv 2509.24203 found hold for tiny policies?"""


@main.command("run")
@out_option
@cells_option
@click.option("--hours", type=float, help="Begin no run after so many hours.")
@click.option("--workers", default=2, show_default=True, help="Runs at a time, each on one core.")
def run_command(out: Path, pattern: str, hours: float | None, workers: int) -> None:
    """Run what is missing, then make the page and the figures of what is there."""
    os.environ["OMP_NUM_THREADS"] = "1"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs are told to end, as on Ctrl-C
    from benchmarks.paper.cell import work

    results = _results(out)
    failed = run(results, cells(pattern), work=work, workers=workers, hours=hours, say=click.echo)
    found = gather(results)
    write_json(found, out / "paper.json")
    write_page(found, out / "findings.md")
    write_figures(found, out / "figures")
    click.echo(f"{out / 'findings.md'}, {out / 'figures'}")
    if failed:
        raise click.ClickException(f"{len(failed)} runs failed; the same command tries them again")


@main.command()
@out_option
@cells_option
def status(out: Path, pattern: str) -> None:
    """How many runs are done, and how long the others will take."""
    left, unknown = 0.0, 0
    for place, done, total, seconds in estimate(_results(out), cells(pattern)):
        told = "" if seconds is None else f", {seconds:.1f} s of a core each"
        click.echo(f"{place}: {done} of {total}{told}")
        left += (total - done) * (seconds or 0)
        unknown += total - done if seconds is None else 0
    click.echo(f"{left / 3600:.2f} hours of a core are left, and {unknown} runs of unknown length")


@main.command()
@out_option
def publish(out: Path) -> None:
    """Put the results into the repository: benchmarks/results/paper.json, figures and page in docs/."""
    found = gather(_results(out))
    write_json(found, ROOT / PUBLISHED)
    write_figures(found, ROOT / FIGURES)
    click.echo("now: python -m tests.generated")


if __name__ == "__main__":
    main()
