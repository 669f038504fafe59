"""A place to run actions in: an executor, a registry, and what came of the runs."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import count
from queue import Empty
from typing import Any, Literal

from cyclone_sqla import Context, Cyclone
from cyclone_sqla.context import ClaimedJob
from cyclone_sqla.outcomes import Outcome
from cyclone_sqla.worker.executor import Executor
from cyclone_sqla.worker.runs import Finished

Flavour = Literal["sync", "async", "wrapped"]
"""How it runs: in a thread, in the event loop, or in a thread that returns an awaitable."""

FLAVOURS: tuple[Flavour, ...] = ("sync", "async", "wrapped")

PATIENCE = 30.0
"""Seconds after which something that must happen is said not to happen."""

_NOW = datetime(2030, 1, 1, tzinfo=UTC)


class Stage:
    """An executor with its actions; every outcome is kept."""

    def __init__(self, max_threads: int = 10) -> None:
        self.cyclone = Cyclone()
        self.executor = Executor(self.cyclone.registry.get, max_threads=max_threads)
        self.outcomes: dict[tuple[int, int], list[Finished]] = {}
        self._numbers = count(1)

    def outcome(self, fn: Callable[..., Any], *, job: Any = None, **options: Any) -> Outcome:
        """Run the function as an action, once, and wait for how it ends."""
        return self.wait(self.start(fn, job=job, **options)).outcome

    def start(self, fn: Callable[..., Any], *, job: Any = None, **options: Any) -> ClaimedJob:
        """Start one run of the function; ``job`` are fields of its ClaimedJob."""
        return self.start_kind(self.register(fn, **options), **(job or {}))

    def register(self, fn: Callable[..., Any], **options: Any) -> str:
        """Make an action of the function; its kind."""
        kind = f"action_{next(self._numbers)}"
        self.cyclone.action(kind=kind, **options)(fn)
        return kind

    def start_kind(self, kind: str, **fields: Any) -> ClaimedJob:
        """Start one run of a registered action."""
        job = self.claimed(kind, **fields)
        assert self.executor.start_runs([job]) == []
        return job

    def claimed(self, kind: str, **fields: Any) -> ClaimedJob:
        """A job as if it had been claimed."""
        number = next(self._numbers)
        values: dict[str, Any] = {
            "id": number,
            "kind": kind,
            "queue": "default",
            "priority": 0,
            "arguments": "{}",
            "attempt": 1,
            "max_attempts": 25,
            "snoozes": 0,
            "lease": 1000 + number,
            "run_at": _NOW,
            "created_at": _NOW,
        }
        return ClaimedJob(**{**values, **fields})

    def wait(self, job: ClaimedJob) -> Finished:
        """Wait until this run is finished; it must be so once."""
        key = (job.id, job.lease)
        while key not in self.outcomes:
            self._take(PATIENCE)
        (finished,) = self.outcomes[key]
        return finished

    def is_finished(self, job: ClaimedJob) -> bool:
        """Whether the outcome of this run is known by now."""
        self.drain()
        return (job.id, job.lease) in self.outcomes

    def drain(self) -> None:
        """Take in every outcome there is."""
        try:
            while True:
                self._take(0)
        except Empty:
            return

    def _take(self, patience: float) -> None:
        finished = self.executor.finished.get(timeout=patience or None, block=patience > 0)
        job = finished.job
        self.outcomes.setdefault((job.id, job.lease), []).append(finished)


@contextmanager
def opened(max_threads: int = 10) -> Iterator[Stage]:
    """A stage that is cleared away after the test, threads included."""
    stage = Stage(max_threads)
    yield stage
    left = stage.executor.stop(grace=PATIENCE)
    assert left == [], "every test lets its runs end"


def flavoured(flavour: Flavour, body: Callable[[Context], Any]) -> Callable[..., Any]:
    """An action of this flavour that does what ``body`` does without waiting for anything."""

    async def in_the_loop(ctx: Context) -> Any:
        return body(ctx)

    return _as(flavour, body, in_the_loop)


class Held:
    """An action that runs until it is released, whatever it is told meanwhile; then it acts."""

    def __init__(self, flavour: Flavour, then: Callable[[Context], Any] = lambda _: "released"):
        self.begun = threading.Event()
        self.release = threading.Event()
        self.told: list[bool] = []
        self._then = then
        self.fn = _as(flavour, self._in_a_thread, self._in_the_loop)

    def wait_begun(self) -> None:
        """Return once the action runs."""
        assert self.begun.wait(PATIENCE), "the action never began"

    def _in_a_thread(self, ctx: Context) -> Any:
        self.begun.set()
        assert self.release.wait(PATIENCE), "the action was never released"
        self.told.append(ctx.cancelled)
        return self._then(ctx)

    async def _in_the_loop(self, ctx: Context) -> Any:
        self.begun.set()
        while not self.release.is_set():
            try:
                await asyncio.sleep(0.002)
            except asyncio.CancelledError:  # and goes on
                continue
        self.told.append(ctx.cancelled)
        return self._then(ctx)


class Obedient:
    """An action that runs until it is asked to stop, and then does."""

    def __init__(self, flavour: Flavour):
        self.begun = threading.Event()
        self.fn = _as(flavour, self._in_a_thread, self._in_the_loop)

    def wait_begun(self) -> None:
        """Return once the action runs."""
        assert self.begun.wait(PATIENCE), "the action never began"

    def _in_a_thread(self, ctx: Context) -> Any:
        self.begun.set()
        assert ctx.wait_cancelled(PATIENCE), "the action was never asked to stop"
        ctx.raise_if_cancelled()

    async def _in_the_loop(self, ctx: Context) -> Any:
        self.begun.set()
        await asyncio.sleep(PATIENCE)
        raise AssertionError("the action was never asked to stop")


def _as(
    flavour: Flavour,
    in_a_thread: Callable[[Context], Any],
    in_the_loop: Callable[[Context], Coroutine[Any, Any, Any]],
) -> Callable[..., Any]:
    def sync(ctx: Context) -> Any:
        return in_a_thread(ctx)

    async def asynchronous(ctx: Context) -> Any:
        return await in_the_loop(ctx)

    def wrapped(ctx: Context) -> Any:
        return in_the_loop(ctx)

    return {"sync": sync, "async": asynchronous, "wrapped": wrapped}[flavour]


def seconds(number: float) -> timedelta:
    """A timedelta, shorter to read."""
    return timedelta(seconds=number)
