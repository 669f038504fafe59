"""The page on privileges: each role can work with what is granted there, and needs all of it."""

import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy import Connection, Engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from cyclone_sqla import Context, Cyclone, DuplicateError, JobSpec, Retry, Worker
from cyclone_sqla.clock import DatabaseClock
from cyclone_sqla.doctor import examine
from cyclone_sqla.migrations import migrate_database
from cyclone_sqla.worker.worker import _Parts
from tests.databases import Database
from tests.life.hands import Hands
from tests.worker.site import Gate

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "privileges.md").read_text()

GRANT = re.compile(r"^GRANT (.+) ON (?:(SEQUENCE|SCHEMA|DATABASE) )?(\w+) TO (\w+);$", re.MULTILINE)


@dataclass(frozen=True)
class Right:
    """One privilege on one thing."""

    privilege: str
    thing: str

    def __str__(self) -> str:
        return f"{self.privilege} ON {self.thing}"


def rights_of(role: str) -> list[Right]:
    """What the page grants, one by one."""
    return [
        Right(privilege, f"{kind} {name}".strip())
        for privileges, kind, name, grantee in GRANT.findall(PAGE)
        if grantee == role
        for privilege in privileges.split(", ")
    ]


class Role:
    """A role without any right, and the URL by which one is it."""

    def __init__(self, admin: Connection, database: Database) -> None:
        self.name = f"role_{uuid.uuid4().hex[:8]}"
        self.url = sa.make_url(database.url).update_query_dict({"options": f"-c role={self.name}"})
        self._admin = admin

    def grant(self, right: Right) -> None:
        """Give it a right."""
        self._admin.exec_driver_sql(f"GRANT {right} TO {self.name}")

    def revoke(self, right: Right) -> None:
        """Take it away."""
        self._admin.exec_driver_sql(f"REVOKE {right} FROM {self.name}")

    def drop_owned(self) -> None:
        """Drop its tables, but leave its rights."""
        self._admin.exec_driver_sql(f"SET ROLE {self.name}")
        for table in sa.inspect(self._admin).get_table_names():
            self._admin.exec_driver_sql(f"DROP TABLE {table} CASCADE")
        self._admin.exec_driver_sql("RESET ROLE; DROP SEQUENCE IF EXISTS cyclone_lease_seq")

    @contextmanager
    def engine(self) -> Iterator[Engine]:
        """An engine whose connections are this role's."""
        engine = sa.create_engine(self.url, poolclass=NullPool)
        yield engine
        engine.dispose()


@pytest.fixture
def role(postgresql_database: Database) -> Iterator[Role]:
    """One that is gone after the test."""
    engine = postgresql_database.engine(isolation_level="AUTOCOMMIT")
    with engine.connect() as admin:
        role = Role(admin, postgresql_database)
        admin.exec_driver_sql(f"CREATE ROLE {role.name}")
        try:
            yield role
        finally:
            admin.exec_driver_sql(f"DROP OWNED BY {role.name}")
            admin.exec_driver_sql(f"DROP ROLE {role.name}")


@pytest.fixture
def hands(postgresql_database: Database) -> Iterator[Hands]:
    """The administrator's."""
    with closing(Hands(postgresql_database, DatabaseClock())) as hands:
        yield hands


Work = Callable[[Role, Hands], None]
"""What a role does; it raises when it may not."""


def needs(work: Work, role: Role, hands: Hands, rights: list[Right]) -> None:
    """The work is done with these rights, and with none of them missing."""
    for right in rights:
        role.grant(right)
    work(role, hands)
    assert [str(right) for right in rights if can_do_without(work, role, hands, right)] == []


def can_do_without(work: Work, role: Role, hands: Hands, right: Right) -> bool:
    role.revoke(right)
    try:
        work(role, hands)
    except sa.exc.ProgrammingError as exc:
        if not re.search("permission denied|no schema has been selected", str(exc)):
            raise
        return False
    finally:
        role.grant(right)
    return True


# ---- enqueue only --------------------------------------------------------------------------------

cyclone = Cyclone(hints=False)


def one(session: Session) -> None:
    cyclone.enqueue(session, "work", {})
    cyclone.enqueue(session, "work", {}, unique=uuid.uuid4().hex, process_in=60)
    cyclone.enqueue(session, "work", {}, sequence="a")


def many(session: Session) -> None:
    cyclone.enqueue_many(session, [JobSpec(kind="work", arguments="{}")] * 2)


def positioned(session: Session) -> None:
    for position in (1, 2):
        cyclone.enqueue(session, "work", {}, sequence=uuid.uuid4().hex, position=position)


def idempotent(session: Session) -> None:
    key = uuid.uuid4().hex
    for _ in range(2):
        cyclone.enqueue(session, "work", {}, idempotency_key=key, unique=key)
    with pytest.raises(DuplicateError):  # which gives the other key back
        cyclone.enqueue(session, "work", {}, idempotency_key=uuid.uuid4().hex, unique=key)


@pytest.mark.parametrize(
    ("act", "thing"),
    [
        (one, "cyclone_job"),
        (many, "SEQUENCE cyclone_job_id_seq"),
        (positioned, "cyclone_sequence"),
        (idempotent, "cyclone_idempotency_key"),
    ],
)
def test_a_producer_needs_exactly_these_rights(
    role: Role, hands: Hands, act: Callable[[Session], None], thing: str
) -> None:
    def work(role: Role, _hands: Hands) -> None:
        with role.engine() as engine, Session(engine) as session, session.begin():
            act(session)

    listed = rights_of("shop_web")
    assert {right.thing for right in listed} >= {thing}
    needs(work, role, hands, [r for r in listed if r.thing in ("cyclone_job", thing)])


# ---- work ----------------------------------------------------------------------------------------


def test_a_worker_needs_exactly_these_rights(role: Role, hands: Hands) -> None:
    needs(a_workers_day, role, hands, rights_of("shop_worker"))


def a_workers_day(role: Role, hands: Hands) -> None:
    """Every duty of a worker has something to do, and is done once."""
    leave_work(hands)
    gate = Gate()
    app = Cyclone(role.url, hints=False)
    app.action(kind="work")(gate.passing())
    app.action(kind="retry")(fail)
    app.action(kind="write")(write)
    worker = Worker(app, listen=False, history_limit=1)
    parts = _Parts(worker)
    try:
        parts.prepare()
        do_all(parts, gate)
    finally:
        gate.open()
        parts.executor.stop(60.0)
        parts._close()
        empty(hands)


def fail() -> None:
    raise Retry("again")


def write(ctx: Context) -> None:
    ctx.session.execute(sa.select(1))


def leave_work(hands: Hands) -> None:
    """For all loops."""
    for kind in ("work", "write"):
        hands.enqueue(kind)
    hands.change(hands.enqueue("retry"), attempt=5)  # a history that is too long
    hands.enqueue(kind="later", process_in=0.001)
    lost = hands.enqueue("lost")
    hands.claim_one(kinds=["lost"])
    done = hands.enqueue("done")
    hands.enqueue("idle", idempotency_key="old", process_in=3600)
    for _ in range(2):
        hands.enqueue(sequence="line", process_in=3600)
    past = datetime.now(UTC) - timedelta(days=100)
    hands.change(lost, leased_until=past)
    hands.change(done, state="cancelled", finished_at=past)
    hands.execute("UPDATE cyclone_idempotency_key SET created_at = :past", past=past)


def do_all(parts: _Parts, gate: Gate) -> None:
    parts.stager.look_ahead()
    parts.work.round()
    gate.await_arrival()
    parts.leases.renew()
    gate.open()
    parts.executor.stop(60.0)
    parts.work.round()
    parts.rescuer.rescue_all()
    while parts.pruner.prune_batch():
        pass
    parts.sweeper.sweep()
    parts.presence.beat()
    with parts.care_connection.reading() as connection:
        parts._note_revision(connection)


def empty(hands: Hands) -> None:
    tables = "cyclone_job, cyclone_history, cyclone_worker, cyclone_idempotency_key"
    hands.execute(f"TRUNCATE {tables}")


# ---- look ----------------------------------------------------------------------------------------


def test_a_dashboard_needs_exactly_these_rights(role: Role, hands: Hands) -> None:
    job_id = hands.enqueue(sequence="line")

    def work(role: Role, _hands: Hands) -> None:
        with role.engine() as engine, engine.connect() as connection:
            look(connection, job_id)

    needs(work, role, hands, rights_of("shop_dashboard"))


def look(connection: Connection, job_id: int) -> None:
    cyclone.get(connection, job_id)
    cyclone.jobs(connection)
    cyclone.explain(connection, job_id)
    cyclone.history(connection, job_id)
    cyclone.queues(connection)
    cyclone.sequences(connection)
    cyclone.sequence(connection, "line")
    cyclone.halted_sequences(connection)
    cyclone.stats(connection)
    assert "schema-version" not in {finding.name for finding in examine(connection, cyclone)}


# ---- act -----------------------------------------------------------------------------------------


def test_an_operator_needs_exactly_these_rights(role: Role, hands: Hands) -> None:
    def work(role: Role, hands: Hands) -> None:
        with role.engine() as engine, engine.begin() as connection:
            act(connection, [hands.enqueue(sequence="line") for _ in range(3)])

    needs(work, role, hands, rights_of("shop_operator"))


def act(connection: Connection, jobs: list[int]) -> None:
    first, second, third = jobs
    cyclone.pause(connection, first)
    cyclone.resume(connection, first)
    cyclone.cancel(connection, second)
    cyclone.replay(connection, second)
    cyclone.reschedule(connection, third, process_in=60)
    for _ in range(2):
        cyclone.pause_queue(connection, "default")
        cyclone.pause_sequence(connection, "line")
    cyclone.resume_queue(connection, "default")
    cyclone.resume_sequence(connection, "line")


# ---- migrate -------------------------------------------------------------------------------------


def test_who_migrates_needs_exactly_these_rights(role: Role, hands: Hands) -> None:
    hands.held.close()
    hands.execute("DROP SCHEMA public CASCADE")
    hands.execute("CREATE SCHEMA public")

    def work(role: Role, _hands: Hands) -> None:
        migrate_database(role.url)
        migrate_database(role.url)
        role.drop_owned()

    needs(work, role, hands, rights_of("shop_owner"))
