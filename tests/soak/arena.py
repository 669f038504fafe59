"""One database under fire: traffic, workers, one fault after the other, and the verdict."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from cyclone_sqla import Cyclone, Job
from cyclone_sqla.errors import CycloneError
from cyclone_sqla.lifecycle import ACTIVE
from tests.crashes.crew import BROKEN
from tests.crashes.fleet import Fleet
from tests.databases import Database
from tests.servers.postgres import PostgresServer
from tests.servers.silent import SilentProxy
from tests.soak import business, faults
from tests.soak.crowd import Crowd
from tests.soak.traffic import DEAD, FOR_EVER, Person, Producer, Traffic
from tests.soak.verdict import Found, judge
from tests.waiting import wait_until

T = TypeVar("T")

PATIENCE = 60.0
"""Seconds for a recovery that takes a few, on a machine that is busy with others."""

LAST_PATIENCE = 180.0
"""Seconds for all that is left when the faults are over."""

AWAY = (DBAPIError, CycloneError)
"""What an application meets while its database is away."""


@dataclass
class Outcome:
    """What became of one database."""

    database: str
    seed: str
    recoveries: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of each recovery, by fault."""

    zeros: Found = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    drained_in: float = 0.0
    """Seconds from the end of the last recovery until every job had ended."""

    tracebacks: int = 0
    """In the workers' logs, where a database's fault is a line."""


class Arena:
    """A database, its workers and its traffic; here, a file."""

    lease = 2.0
    workers = 2
    pause = 0.03
    """Seconds between two transactions of the producer, on average."""

    kinds: ClassVar = faults.OF_WORKERS | faults.OF_SQLITE

    def __init__(
        self, database: Database, directory: Path, seed: str, *, workers_way: str | None = None
    ) -> None:
        """`workers_way` is the URL that workers use, if not that of everybody."""
        self.database = database
        self.directory = directory
        self.chance = random.Random(seed)
        self.outcome = Outcome(database.dialect, seed)
        self.outside = database.engine(poolclass=sa.NullPool)
        """The connections of strangers."""

        self._engine = database.engine(pool_pre_ping=True)
        self._cyclone = Cyclone(self._engine)
        self._producer = Producer(self._engine, self._cyclone, self._own_chance("producer"))
        self._person = Person(self._engine, self._cyclone, self._own_chance("person"))
        self._fleet = Fleet(directory, database, business.work, url=workers_way)
        self.crowd = self._crowd()
        self._broken: list[object] = []
        self._looks = 0
        self._idle: list[object] = []

    def fight(self, seconds: float) -> Outcome:
        """Faults for so long, then peace, then the verdict."""
        business.create(self._engine)
        with self.crowd.at_work():
            with ExitStack() as stack:
                person = self._traffic(self._person.once, 0.3)
                for part in (person, self._traffic(self._producer.once, self.pause)):
                    stack.callback(part.stop)
                    part.start()
                stack.enter_context(self._watched())
                self._suffer(seconds)
            self._drain()
            self._probe()
        self._judge()
        return self.outcome

    # ---- the faults --------------------------------------------------------------------------

    def _suffer(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        for name in faults.rounds(self.kinds, self.chance):
            time.sleep(self.chance.uniform(0, 1.5))
            if time.monotonic() > end:
                return
            with faults.beside(self, self._second(name)):
                self.kinds[name](self)
            self.outcome.recoveries.setdefault(name, []).append(self._recovery())

    def _second(self, name: str) -> faults.Fault | None:
        """Sometimes a worker is killed at the same time."""
        is_alone = name in faults.OF_WORKERS or self.chance.random() > 0.25
        return None if is_alone else faults.kill_worker

    def _recovery(self) -> float:
        """Seconds until a new job was run, and the runs that the fault met have ended or changed
        hands; infinite if that takes too long.
        """
        began = time.monotonic()
        held = set(self._insist(self._held))
        canary = self.enqueue("plain", {"millis": 0}, priority=-100)
        try:
            wait_until(
                lambda: self._try(lambda: self._has_ended(canary) and not held & self._held()),
                "the work goes on",
                within=PATIENCE,
            )
        except TimeoutError:
            return float("inf")
        return time.monotonic() - began

    def _held(self) -> set[tuple[int, int]]:
        """The runs that there are, by job and lease."""
        running = sa.select(Job.id, Job.lease).where(Job.state == "running")
        with self._engine.connect() as connection:
            return {(row.id, row.lease) for row in connection.execute(running)}

    def _has_ended(self, job_id: int) -> bool:
        ended = sa.text("SELECT 1 FROM ending WHERE job_id = :id AND state = 'completed'")
        with self._engine.connect() as connection:
            return connection.execute(ended, {"id": job_id}).first() is not None

    def enqueue(self, kind: str, arguments: dict[str, Any], **options: Any) -> int:
        """Enqueue a job that must be completed, however often it takes to commit that; its id."""

        def once() -> int:
            with Session(self._engine) as session, session.begin():
                ref = self._cyclone.enqueue(
                    session, kind, arguments, max_attempts=FOR_EVER, **options
                )
                ticket = {"kind": kind, "sequence_key": None, "on_failure": None}
                session.add(business.Ticket(job_id=ref.id, **ticket))
            return ref.id

        return self._insist(once)

    def _insist(self, call: Callable[[], T]) -> T:
        give_up = time.monotonic() + PATIENCE
        while True:
            try:
                return call()
            except AWAY:
                if time.monotonic() > give_up:
                    raise
                time.sleep(0.05)

    def _try(self, call: Callable[[], bool]) -> bool:
        with suppress(*AWAY):
            return call()
        return False

    # ---- the invariant -----------------------------------------------------------------------

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Look for broken lines all the time."""
        ending = threading.Event()
        thread = threading.Thread(target=self._watch, args=(ending,), daemon=True)
        thread.start()
        yield
        ending.set()
        thread.join()

    def _watch(self, ending: threading.Event) -> None:
        while not ending.wait(0.1):
            with suppress(*AWAY), self._engine.connect() as connection:
                self._broken += [row[0] for row in connection.execute(BROKEN)]
                self._looks += 1

    # ---- peace -------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Wait until every job has ended and no line stands still."""
        began = time.monotonic()
        person = self._traffic(self._person.once, 0.1)
        person.start()
        with suppress(TimeoutError):
            wait_until(self._is_over, "all have ended", within=LAST_PATIENCE, every=0.1)
        person.stop()
        self.outcome.drained_in = time.monotonic() - began

    def _is_over(self) -> bool:
        active = sa.select(Job.id).where(Job.state.in_(list(ACTIVE))).limit(1)
        with self._engine.connect() as connection:
            return not connection.execute(active).all() and not connection.execute(DEAD).all()

    def _probe(self) -> None:
        """Every worker that lives is given the chance to run something."""

        def is_everybody_busy() -> bool:
            for _ in range(4 * self.workers):
                self.enqueue("probe", {})
            wait_until(self._is_over, "the probes have ended", within=PATIENCE)
            return not self.crowd.idle()

        with suppress(TimeoutError):
            wait_until(is_everybody_busy, "every worker has run something", within=PATIENCE)
        self._idle.extend(self.crowd.idle())

    def _judge(self) -> None:
        found = judge(self._engine, self._producer.confirmed)
        found["alive and idle"] = self._idle
        late = (name for name, all_ in self.outcome.recoveries.items() if float("inf") in all_)
        found["no recovery"] = list(late)
        found["broken lines seen"] = self._broken
        self.outcome.zeros = found
        self.outcome.tracebacks = self._fleet.output().count("Traceback")
        with self._engine.connect() as connection:
            count = sa.text("SELECT state, count(*) FROM ending GROUP BY state")
            ended = {str(state): int(n) for state, n in connection.execute(count)}
        self.outcome.counts = ended | {"looks at the lines": self._looks}

    # ---- how it is made ----------------------------------------------------------------------

    def _traffic(self, once: Callable[[], None], pause: float) -> Traffic:
        return Traffic(once, self._own_chance("traffic"), pause)

    def _own_chance(self, purpose: str) -> random.Random:
        return random.Random(f"{self.outcome.seed} {purpose}")

    def _crowd(self) -> Crowd:
        settings = {"concurrency": 4, "poll": 0.2, "lease": self.lease, "rescue_interval": 0.5}
        pruning = {"keep_completed": 15.0, "keep_discarded": 30.0, "prune_interval": 2.0}
        settings |= {"query_timeout": 1.5, **pruning}
        chance = self._own_chance("crowd")
        return Crowd(self._fleet, self.directory, self.workers, chance, **settings)


class PostgresArena(Arena):
    """A database of a server that may be killed."""

    workers = 3
    pause = 0.02
    kinds: ClassVar = faults.OF_WORKERS | faults.OF_POSTGRESQL

    def __init__(
        self,
        server: PostgresServer,
        database: Database,
        proxy: SilentProxy,
        directory: Path,
        seed: str,
    ) -> None:
        super().__init__(database, directory, seed, workers_way=proxy.url)
        self.server = server
        self.proxy = proxy
        self.name = self.outside.url.database
        admin = self.outside.url.set(database="postgres")
        self._admin = sa.create_engine(admin, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)

    def administer(self, *statements: str) -> None:
        """Execute as the server's administrator, from another database if need be."""

        def once() -> None:
            with self._admin.connect() as connection:
                for statement in statements:
                    connection.exec_driver_sql(statement)

        self._insist(once)
