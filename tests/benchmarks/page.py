"""`python -m tests.benchmarks.page figures.json`: the tables of the documentation.

Without a file it makes them again from the figures that are kept in the documentation.
"""

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.book import Figure, shown

DOCS = Path(__file__).parents[2] / "docs"

FIGURES = DOCS / "reference" / "performance.json"

PERFORMANCE = DOCS / "reference" / "performance.md"

BEYOND = DOCS / "explanation" / "beyond-one-server.md"

BEGIN, END = "<!-- measured: begin -->\n", "<!-- measured: end -->\n"

TITLES = {
    "enqueue": "Enqueue",
    "drain": "Drain",
    "pickup": "Pickup",
    "sequences": "Sequences",
    "backlog": "Beside much else",
    "snapshot": "Under a snapshot that stays open",
    "steps": "The steps of a worker",
    "cost": "What a job writes",
    "profile": "Where the time goes",
}

_NAMES = {"postgresql": "PostgreSQL", "sqlite": "SQLite"}


def performance(kept: dict[str, Any]) -> str:
    """The tables of the page of figures."""
    figures = [Figure(**figure) for figure in kept["figures"]]
    parts = [circumstances(kept["run"])]
    for section, title in TITLES.items():
        own = [figure for figure in figures if figure.section == section]
        if own:
            parts += [f"## {title}", *tables(own)]
    return "\n\n".join(parts) + "\n"


def beyond(kept: dict[str, Any]) -> str:
    """The tables of the page about several servers."""
    figures = [Figure(**figure) for figure in kept["figures"]]
    scale = [figure for figure in figures if figure.section == "scale"]
    throughput = [figure for figure in scale if "idle" not in figure.work]
    pickup = [figure for figure in scale if "idle" in figure.work]
    retention = [figure for figure in figures if figure.section == "retention"]
    parts = [circumstances(kept["run"]), *(pivot(some) for some in (throughput, pickup) if some)]
    parts += tables(retention)
    return "\n\n".join(parts) + "\n"


PAGES: dict[Path, Callable[[dict[str, Any]], str]] = {PERFORMANCE: performance, BEYOND: beyond}


def circumstances(run: dict[str, Any]) -> str:
    """Where and with what it was measured."""
    packages = ", ".join(f"{name} {version}" for name, version in run["packages"].items())
    text = (
        f"Measured on {run['date']}: {run['machine']}, {run['cores']} cores that the server, the "
        f"workers and who measures share, {run['memory_gib']} GiB, PostgreSQL "
        f"{run['postgresql']}, SQLite {run['sqlite']}, Python {run['python']}, {packages}."
    )
    if run["scale"] != 1:
        text += f" **All sizes are {run['scale']:g} of the real ones: these figures mean nothing.**"
    return text


def tables(figures: Sequence[Figure]) -> list[str]:
    """Those with a reference, then those without."""
    compared = [figure for figure in figures if figure.ratio is not None]
    alone = [figure for figure in figures if figure.ratio is None]
    parts = [comparison(compared)] if compared else []
    if alone:
        parts.append(pivot(alone) if is_matrix(alone) else listing(alone))
    return parts


def comparison(figures: Iterable[Figure]) -> str:
    """Ours, the reference, and what one is of the other."""
    rows = [
        (
            named(figure),
            shown(figure.ours, figure.unit),
            f"{shown(figure.reference or 0.0, figure.unit)}, {figure.beside}",
            f"{figure.ratio:.2f}",
            f"{figure.low:.2f} to {figure.high:.2f}, {figure.rounds}",
        )
        for figure in figures
    ]
    return table(("work", "here", "beside", "ratio", "lowest to highest, pairs"), rows)


def listing(figures: Iterable[Figure]) -> str:
    """Figures that stand alone."""
    rows = [
        (
            named(figure),
            shown(figure.ours, figure.unit),
            f"{shown(figure.low)} to {shown(figure.high)}, {figure.rounds}",
        )
        for figure in figures
    ]
    return table(("work", "here", "lowest to highest, rounds"), rows)


def is_matrix(figures: Sequence[Figure]) -> bool:
    """Whether several things were measured of each work."""
    return len({named(figure) for figure in figures}) < len(figures)


def pivot(figures: Sequence[Figure]) -> str:
    """One line for each work, one column for each thing that was measured of it."""
    units = list(dict.fromkeys(figure.unit for figure in figures))
    works = list(dict.fromkeys(named(figure) for figure in figures))
    values = {(named(figure), figure.unit): shown(figure.ours) for figure in figures}
    rows = [(work, *(values.get((work, unit), "") for unit in units)) for work in works]
    return table(("work", *units), rows)


def named(figure: Figure) -> str:
    """The work, and where unless it is PostgreSQL."""
    place = _NAMES[figure.database]
    return figure.work if place == "PostgreSQL" else f"{place}: {figure.work}"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown; all but the first column are figures."""
    lines = [heads, ("---", *["--:"] * (len(heads) - 1)), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def with_tables(text: str, tables: str) -> str:
    """A page with other tables between its marks."""
    pattern = re.compile(re.escape(BEGIN) + ".*" + re.escape(END), re.DOTALL)
    changed, count = pattern.subn(lambda _: f"{BEGIN}\n{tables}\n{END}", text)
    assert count == 1, "the page has lost its marks"
    return changed


def main() -> None:
    """Keep the given figures, and write the pages."""
    if len(sys.argv) > 1:
        shutil.copyfile(sys.argv[1], FIGURES)
    kept = json.loads(FIGURES.read_text())
    for page, make in PAGES.items():
        page.write_text(with_tables(page.read_text(), make(kept)))


if __name__ == "__main__":
    main()
