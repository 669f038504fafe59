"""Working processes, driven from outside: who measures does not share the worker's interpreter."""

import json
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.place import Jobs, Place

CHECKOUT = Path(__file__).parents[2]


class Runner:
    """A process of `tests.benchmarks.runner`, imported and waiting."""

    def __init__(self, place: Place, options: dict[str, Any]) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.runner", json.dumps(options)],
            cwd=CHECKOUT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._hear() == "ready"

    @classmethod
    def ours(cls, place: Place, **options: Any) -> "Runner":
        """A worker."""
        return cls(place, {"url": place.url, **options})

    @classmethod
    def by_hand(cls, place: Place, loop: str, **options: Any) -> "Runner":
        """One of the loops by hand."""
        return cls(place, {"url": place.url, "loop": loop, **options})

    def begin(self) -> None:
        """Have it work."""
        self._say("begin")

    def end(self) -> dict[str, Any]:
        """End it; what it used and saw."""
        self._say("end")
        told: dict[str, Any] = json.loads(self._hear())
        self._popen.wait(30)
        return told

    def clear_away(self) -> None:
        """Leave nothing of it, whatever happened."""
        self._popen.kill()
        self._popen.communicate()

    def _say(self, text: str) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.write(text + "\n")
        self._popen.stdin.flush()

    def _hear(self) -> str:
        assert self._popen.stdout is not None
        return self._popen.stdout.readline().strip()


@contextmanager
def running(runners: Sequence[Runner]) -> Generator[None]:
    """The processes begin; none is left after the block."""
    with ExitStack() as stack:
        for runner in runners:
            stack.callback(runner.clear_away)
        for runner in runners:
            runner.begin()
        yield


@dataclass(frozen=True)
class Drained:
    """How long it took, and what each process used and saw."""

    rate: float
    seconds: float
    told: list[dict[str, Any]]


def drain(place: Place, jobs: Jobs, runners: Sequence[Runner]) -> Drained:
    """Time from the first claim to the last end that is committed; connecting is part of it."""
    with running(runners):
        began = time.perf_counter()
        place.wait_done(jobs)
        seconds = time.perf_counter() - began
        told = [runner.end() for runner in runners]
    return Drained((jobs.last - jobs.first + 1) / seconds, seconds, told)
