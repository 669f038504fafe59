"""The table of a soak run, for people, and the same for programs."""

from dataclasses import asdict
from statistics import median
from typing import Any

from tests.soak.arena import Outcome


def table(outcome: Outcome) -> str:
    """What came, how soon the work went on, and what should be zero."""
    lines = [
        f"{outcome.database}, seed {outcome.seed!r}",
        "",
        "| fault | times | recovery, median | longest |",
        "| --- | --: | --: | --: |",
    ]
    for name, seconds in sorted(outcome.recoveries.items()):
        figures = f"{median(seconds):.1f} s | {max(seconds):.1f} s"
        lines.append(f"| {name} | {len(seconds)} | {figures} |")
    lines += ["", "| must be zero | |", "| --- | --: |"]
    lines += [f"| {name} | {_count(found)} |" for name, found in outcome.zeros.items()]
    counts = ", ".join(f"{name} {count}" for name, count in sorted(outcome.counts.items()))
    lines += ["", f"{counts}; all ended {outcome.drained_in:.1f} s after the last fault"]
    if outcome.tracebacks:
        lines.append(f"{outcome.tracebacks} tracebacks in the logs of the workers")
    return "\n".join(lines)


def _count(found: list[object]) -> str:
    return f"{len(found)}: {found[:5]}" if found else "0"


def is_clean(outcome: Outcome) -> bool:
    """Whether all that must be zero is."""
    return not any(outcome.zeros.values())


def as_json(outcome: Outcome) -> dict[str, Any]:
    """The same, with every single recovery and finding."""
    return asdict(outcome) | {"clean": is_clean(outcome)}
