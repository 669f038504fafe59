"""What was measured: figures beside their references of the same run, in a table and in JSON."""

import json
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

SCALE = float(os.environ.get("BENCH_SCALE", "1"))
"""Of all sizes: a try with 0.01 takes minutes, and its figures mean nothing."""

PAIRS = int(os.environ.get("BENCH_PAIRS", "7"))
"""How often both sides of a comparison are measured."""


def sized(count: int, at_least: int = 20) -> int:
    """A number of jobs or rows, smaller in a try."""
    return max(at_least, round(count * SCALE))


@dataclass(frozen=True)
class Figure:
    """One row of a table.

    ``ratio`` is the median over the pairs of ours to the reference; ``low`` and ``high`` are its
    extremes, or without a reference those of ours.
    """

    section: str
    work: str
    database: str
    unit: str
    ours: float
    size: int
    rounds: int
    low: float
    high: float
    beside: str | None = None
    reference: float | None = None
    ratio: float | None = None

    @property
    def key(self) -> tuple[str, ...]:
        """A later one with the same key takes its place."""
        return self.section, self.work, self.database, self.unit, self.beside or ""

    def line(self) -> str:
        """One line for people."""
        text = f"{self.section:<14} {self.work:<58} {self.database:<10} "
        text += f"{shown(self.ours, self.unit):>20}"
        if self.ratio is None:
            return f"{text}  ({shown(self.low)} to {shown(self.high)})"
        text += f"  {self.ratio:.2f} of {shown(self.reference or 0.0, self.unit)} {self.beside}"
        return f"{text}  ({self.low:.2f} to {self.high:.2f})"


def shown(value: float, unit: str = "") -> str:
    """A figure with as many digits as mean something."""
    text = f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
    return f"{text} {unit}".rstrip()


class Book:
    """Takes the figures of a run, shows each at once, and keeps all in a JSON file."""

    def __init__(self, path: Path | None, servers: dict[str, str]) -> None:
        """``servers`` are the versions of the databases by their names."""
        self._path = path
        self._servers = servers

    def compare(
        self,
        section: str,
        work: str,
        database: str,
        *,
        ours: Callable[[], float],
        reference: Callable[[], float],
        beside: str,
        size: int,
        unit: str = "jobs/s",
        pairs: int = PAIRS,
    ) -> None:
        """Measure both sides in turn, each first every other time; they return figures in
        ``unit``.
        """
        got: list[tuple[float, float]] = []
        for number in range(pairs):
            if number % 2:
                own = ours()
                got.append((own, reference()))
            else:
                other = reference()
                got.append((ours(), other))
        self.write_pairs(section, work, database, got, beside=beside, size=size, unit=unit)

    def write_pairs(
        self,
        section: str,
        work: str,
        database: str,
        pairs: Sequence[tuple[float, float]],
        *,
        beside: str,
        size: int,
        unit: str,
    ) -> None:
        """Take pairs of figures, ours first."""
        ratios = [own / other for own, other in pairs]
        self._take(
            Figure(
                section,
                work,
                database,
                unit,
                ours=statistics.median(own for own, _ in pairs),
                size=size,
                rounds=len(pairs),
                low=min(ratios),
                high=max(ratios),
                beside=beside,
                reference=statistics.median(other for _, other in pairs),
                ratio=statistics.median(ratios),
            )
        )

    def note(
        self,
        section: str,
        work: str,
        database: str,
        values: Sequence[float],
        *,
        unit: str,
        size: int,
    ) -> None:
        """Take a figure that stands alone, measured once or several times."""
        self._take(
            Figure(
                section,
                work,
                database,
                unit,
                ours=statistics.median(values),
                size=size,
                rounds=len(values),
                low=min(values),
                high=max(values),
            )
        )

    def _take(self, figure: Figure) -> None:
        print(figure.line(), flush=True)  # noqa: T201 - the result of a benchmark
        if self._path is None:
            return
        kept = json.loads(self._path.read_text()) if self._path.exists() else {"figures": []}
        figures = [f for f in kept["figures"] if Figure(**f).key != figure.key]
        text = json.dumps(
            {"run": self._circumstances(), "figures": [*figures, asdict(figure)]}, indent=1
        )
        self._path.write_text(text + "\n")

    def _circumstances(self) -> dict[str, Any]:
        return {
            "date": datetime.now(UTC).date().isoformat(),
            "scale": SCALE,
            "cores": os.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30),
            "machine": f"{platform.system()} {platform.machine()}",
            "python": platform.python_version(),
            "packages": {name: version(name) for name in ("sqlalchemy", "psycopg", "pydantic")},
            **self._servers,
        }
