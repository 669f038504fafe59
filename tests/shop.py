"""A small application for the tests: a table of its own, and a queue with a few actions."""

from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from inspect import isawaitable
from typing import Any, TypeVar

from sqlalchemy import CheckConstraint, Engine, Table, delete, event, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from cyclone_sqla import Cyclone, Job
from cyclone_sqla.lifecycle import TERMINAL
from cyclone_sqla.models import tables_in
from tests.databases import Database

T = TypeVar("T")


class Base(DeclarativeBase):
    """The application's own."""


class Order(Base):
    """A row of the application; `total` may not be negative."""

    __tablename__ = "shop_order"

    id: Mapped[int] = mapped_column(primary_key=True)
    note: Mapped[str]
    total: Mapped[int] = mapped_column(CheckConstraint("total >= 0"), default=0)


class Shop:
    """An application on one database: its engine, its table, its queue."""

    def __init__(self, database: Database, **options: Any) -> None:
        """`options` are those of `Cyclone`; nobody is told of new jobs unless they say so."""
        self.database = database
        self.engine = database.engine()
        Base.metadata.create_all(self.engine)
        self.cyclone = Cyclone(self.engine, **{"hints": False, **options})
        self.mail = self.cyclone.action(_mail, kind="mail")
        self.ship = self.cyclone.action(_ship, kind="ship")

    def session(self) -> Session:
        """A new session of the application."""
        return Session(self.engine)

    @property
    def job_table(self) -> Table:
        """The table of the queue's jobs."""
        return tables_in(self.cyclone.schema).job

    def jobs(self) -> list[Job]:
        """What is committed, by id."""
        job = self.cyclone.job_class
        with self.session() as session:
            jobs = list(session.scalars(select(job).order_by(job.id)))
            session.expunge_all()
            return jobs

    def job_ids(self) -> list[int]:
        """The ids of the committed jobs."""
        return [job.id for job in self.jobs()]

    def notes(self) -> list[str]:
        """The committed rows of the application."""
        with self.session() as session:
            return list(session.scalars(select(Order.note).order_by(Order.id)))

    def rows(self) -> list[tuple[Any, ...]]:
        """Every column of every committed job."""
        with self.engine.connect() as connection:
            table = self.job_table
            return [tuple(row) for row in connection.execute(select(table).order_by(table.c.id))]

    def clear(self) -> None:
        """Delete every job, key and row of the application."""
        with self.engine.begin() as connection:
            for table in (self.job_table, tables_in(self.cyclone.schema).idempotency_key):
                connection.execute(table.delete())
            connection.execute(delete(Order))

    def set_state(self, job_id: int, state: str, waits_for: str | None = None) -> None:
        """Put a job into a state, with all that the table demands of it."""
        now = self.jobs()[0].created_at
        values = {
            "state": state,
            "waits_for": waits_for,
            "worker": "somebody",
            "leased_until": now + timedelta(hours=1) if state == "running" else None,
            "finished_at": now if state in TERMINAL else None,
        }
        table = self.job_table
        with self.engine.begin() as connection:
            connection.execute(table.update().where(table.c.id == job_id).values(values))


@contextmanager
def statements_of(engine: Engine) -> Iterator[list[str]]:
    """Every statement that is sent while the block runs."""
    sent: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        sent.append(statement)

    event.listen(engine, "before_cursor_execute", note)
    try:
        yield sent
    finally:
        event.remove(engine, "before_cursor_execute", note)


async def settled(value: T | Awaitable[T]) -> T:
    """The value that a synchronous call gave, or what an asynchronous one gives when awaited."""
    return await value if isawaitable(value) else value  # type: ignore[return-value]


def _mail(to: str, body: str = "") -> None:
    """Nobody runs it: these tests only enqueue."""


def _ship(order: int, details: object = None) -> None:
    """Nobody runs it either."""
