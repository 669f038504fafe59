"""A process that works: ours, or a loop by hand. `python -m tests.benchmarks.runner '{…}'`.

It says "ready" when all is imported, begins at a line on its standard input, and at the next one
says what it used and saw, as JSON, and ends.
"""

import json
import os
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from cyclone_sqla import Context, Cyclone, Worker
from tests.benchmarks.claims import Claims
from tests.benchmarks.trail import Trail

EFFECT = sa.insert(sa.table("hand_effect", sa.column("job_id", sa.BigInteger())))


class Mark:
    """When each job began, by the clock that all processes of a machine share."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, float]] = []

    def __call__(self, seq: int) -> None:
        self.seen.append((seq, time.monotonic()))


def application(mark: Mark) -> Cyclone:
    """The actions of all benchmarks."""
    cyclone = Cyclone()

    @cyclone.action(kind="tick")
    def tick() -> None:
        pass

    @cyclone.action(kind="atick")
    async def atick() -> None:
        pass

    @cyclone.action(kind="mark")
    async def begun(seq: int) -> None:
        mark(seq)

    @cyclone.action(kind="write")
    def write(ctx: Context) -> None:
        ctx.session.execute(EFFECT, {"job_id": ctx.job.id})

    @cyclone.action(kind="awrite")
    async def awrite(ctx: Context) -> None:
        session = ctx.async_session
        await session.execute(EFFECT, {"job_id": ctx.job.id})

    return cyclone


class Ours:
    """A worker with these settings."""

    def __init__(
        self,
        url: str,
        mark: Mark,
        slots: int = 500,
        count_claims: bool = False,
        trail: bool = False,
        # The rows of earlier rounds stay: to prune them is not what is measured.
        keep_completed: float | None = None,
        prune_interval: float = 1.0,
    ) -> None:
        cyclone = application(mark)
        cyclone.database = url
        dialect = cyclone.dialect(sa.make_url(url).get_backend_name())
        self.claims, self.trail = Claims(), Trail()
        if count_claims:
            self.claims.watch(dialect)
        if trail:
            self.trail.watch_worker(dialect)
        self._worker = Worker(
            cyclone,
            queues={"default": slots},
            keep_completed=keep_completed,
            prune_interval=prune_interval,
        )

    def begin(self) -> None:
        """Work from now on."""
        self._worker.start()

    def told(self) -> dict[str, Any]:
        """What else it saw."""
        return {"claims": self.claims.noted, "stamps": self.trail.stamps}


class ByHand:
    """One of the loops by hand."""

    def __init__(self, url: str, mark: Mark, loop: str, threads: int = 1) -> None:
        from tests.benchmarks import by_hand  # not among the modules of a worker that is weighed

        dsn = url.replace("+psycopg", "")
        loops = {
            "batches": lambda: by_hand.loop(dsn, _nothing, by_hand.BATCH),
            "one": lambda: by_hand.loop(dsn, _nothing, 1),
            "marked": lambda: by_hand.loop(dsn, mark, by_hand.BATCH),
            "transactional": lambda: by_hand.transactional(dsn, threads),
            "sessions": lambda: by_hand.transactional_in_sessions(url, threads),
            "async sessions": lambda: by_hand.transactional_in_async_sessions(url, threads),
            "sqlite": lambda: by_hand.loop_in_sqlite(sa.make_url(url).database or "", _nothing),
        }
        self._thread = threading.Thread(target=loops[loop], daemon=True)

    def begin(self) -> None:
        """Work from now on."""
        self._thread.start()

    def told(self) -> dict[str, Any]:
        """What else it saw: nothing."""
        return {}


def _nothing(_job_id: int) -> None:
    pass


def main() -> None:
    """Work as the argument says."""
    options: dict[str, Any] = json.loads(sys.argv[1])
    mark = Mark()
    side = ByHand if "loop" in options else Ours
    work = side(mark=mark, **options)
    _say("ready")
    sys.stdin.readline()
    work.begin()
    sys.stdin.readline()
    used = resource.getrusage(resource.RUSAGE_SELF)
    told = {
        "rss_mib": _most_memory() / 1024,
        "cpu": used.ru_utime + used.ru_stime,
        "seen": mark.seen,
        **work.told(),
    }
    _say(json.dumps(told))
    os._exit(0)


def _most_memory() -> int:
    """In KiB. What getrusage() says is at least the memory of who started this process."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
