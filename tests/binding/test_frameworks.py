"""The sessions that frameworks make: an enqueue takes part in the transaction of each."""

import asyncio
import warnings
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, Any

import flask
import pytest
import sqlmodel
from fastapi import Depends, FastAPI, HTTPException
from fastapi.testclient import TestClient
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import Engine, select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    mapped_column,
    scoped_session,
    sessionmaker,
)
from sqlalchemy.pool import NullPool
from sqlmodel.ext.asyncio.session import AsyncSession as SQLModelAsyncSession

from cyclone_sqla import Context, Cyclone, DuplicateError, Job, Worker, begin_before_savepoints
from cyclone_sqla.testing import CycloneEnv
from tests.databases import Database
from tests.shop import Base, Order
from tests.waiting import wait_until

with warnings.catch_warnings():
    # It decorates its mixins as SQLAlchemy 2.1 no longer needs it.
    warnings.filterwarnings("ignore", "The declarative_mixin decorator")
    from advanced_alchemy.base import UUIDBase
    from advanced_alchemy.config import SQLAlchemyAsyncConfig, SQLAlchemySyncConfig
    from advanced_alchemy.config.routing import RoutingConfig
    from advanced_alchemy.extensions import fastapi as alchemy
    from advanced_alchemy.repository import SQLAlchemyAsyncRepository, SQLAlchemySyncRepository
    from advanced_alchemy.routing.maker import dispose_session_maker_sync

ASYNC_DRIVERS = {"postgresql": "psycopg_async", "sqlite": "aiosqlite"}

cyclone = Cyclone(hints=False)


@cyclone.action
def mail(to: str) -> None: ...


@pytest.fixture
def engine(database: Database) -> Engine:
    """A synchronous engine, on a database with our tables and the shop's."""
    engine = database.engine()
    begin_before_savepoints(engine)
    Base.metadata.create_all(engine)
    return engine


@pytest.fixture
def async_url(database: Database, engine: Engine) -> str:
    """The database of `engine`, for an asynchronous one."""
    return database.url_for(ASYNC_DRIVERS[database.dialect])


def notes(engine: Engine) -> list[str]:
    """What is committed of orders."""
    with Session(engine) as session:
        return list(session.scalars(select(Order.note).order_by(Order.id)))


def mails(engine: Engine) -> list[str]:
    """Whom the committed jobs write to."""
    with Session(engine) as session:
        jobs = session.scalars(select(Job).where(Job.kind == "mail").order_by(Job.id))
        return [mail.decode(job.arguments)[1]["to"] for job in jobs]


# ---- FastAPI, with an AsyncSession ---------------------------------------------------------------


class AsyncShop:
    """Takes orders: each has a mail sent, unless the order is bad."""

    def __init__(self, url: str, *, scope: Any = "function", awaits: bool = True) -> None:
        sessions = async_sessionmaker(create_async_engine(url, poolclass=NullPool))
        app = FastAPI()

        async def in_transaction() -> AsyncIterator[AsyncSession]:
            async with sessions.begin() as session:
                yield session

        @app.post("/{note}")
        async def order(
            note: str, session: Annotated[AsyncSession, Depends(in_transaction, scope=scope)]
        ) -> None:
            session.add(Order(note=note))
            sent = mail.enqueue(session, to=note)
            if awaits:
                await sent
            if note == "bad":
                raise HTTPException(400)

        self._client = TestClient(app, raise_server_exceptions=False)

    def order(self, note: str) -> int:
        """The status of the response."""
        return self._client.post(f"/{note}").status_code


def test_fastapi_a_job_is_there_if_its_request_succeeded(engine: Engine, async_url: str) -> None:
    shop = AsyncShop(async_url)
    assert [shop.order(note) for note in ("tea", "bad", "milk")] == [200, 400, 200]
    assert notes(engine) == mails(engine) == ["tea", "milk"]


def test_fastapi_a_commit_that_fails_is_told_if_it_comes_before_the_response(
    engine: Engine, async_url: str
) -> None:
    forgets = {scope: AsyncShop(async_url, scope=scope, awaits=False) for scope in SCOPES}
    assert {scope: shop.order("tea") for scope, shop in forgets.items()} == SCOPES
    assert notes(engine) == mails(engine) == []


SCOPES = {"function": 500, "request": 200}
"""When FastAPI ends a dependency, and what the client hears of a commit that fails there."""


# ---- Flask-SQLAlchemy, with a scoped_session -----------------------------------------------------


class Site:
    """A Flask application with two databases; the jobs are in its first."""

    def __init__(self, url: str, elsewhere: str) -> None:
        self.flask = flask.Flask("site")
        self.flask.config["SQLALCHEMY_DATABASE_URI"] = url
        self.flask.config["SQLALCHEMY_BINDS"] = {"audit": elsewhere}
        self.db = db = SQLAlchemy(self.flask, model_class=type("Base", (DeclarativeBase,), {}))

        class Page(db.Model):  # type: ignore[name-defined]
            id: Mapped[int] = mapped_column(primary_key=True)
            title: Mapped[str]

        class Visit(db.Model):  # type: ignore[name-defined]
            __bind_key__ = "audit"
            id: Mapped[int] = mapped_column(primary_key=True)

        self.cyclone = Cyclone(database=self.engine, hints=False)

        @self.cyclone.action
        def publish(ctx: Context, page: Page, title: str) -> None:
            page.title = title

        self.Page, self.Visit, self.publish = Page, Visit, publish

    def engine(self) -> Engine:
        """Where the jobs are, for a worker: it is outside of every request."""
        with self.flask.app_context():
            return self.db.engine

    def title(self) -> str:
        """The title of the only page, as it is committed."""
        self.db.session.rollback()
        return str(self.db.session.scalars(select(self.Page.title)).one())


@pytest.fixture
def site(database: Database, tmp_path: Path) -> Iterator[Site]:
    site = Site(database.url, f"sqlite:///{tmp_path}/audit.db")
    with site.flask.app_context():
        site.db.create_all()
        yield site
        site.db.session.remove()
        for engine in site.db.engines.values():
            engine.dispose()


def test_flask_a_job_commits_with_the_session_of_its_request(site: Site, engine: Engine) -> None:
    session = site.db.session
    session.add_all([site.Page(title="draft"), site.Visit()])
    mail.using(unique="u").enqueue(session, to="a")
    with pytest.raises(DuplicateError):
        mail.using(unique="u").enqueue(session, to="b")
    assert mails(engine) == []
    session.commit()
    mail.enqueue(session, to="c")
    session.remove()  # as at the end of every request
    assert mails(engine) == ["a"]


def test_flask_a_worker_runs_what_a_request_enqueued(site: Site) -> None:
    page = site.Page(title="draft")
    site.db.session.add(page)
    site.publish.enqueue(site.db.session, page, "final")
    site.db.session.commit()
    with Worker(site.cyclone, poll=0.05):
        wait_until(lambda: site.title() == "final", "the page is published")


def test_flask_a_test_has_the_session_join_its_transaction(
    site: Site, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine.connect() as connection, connection.begin() as outer:
        joined = sessionmaker(connection, join_transaction_mode="create_savepoint")
        monkeypatch.setattr(site.db, "session", scoped_session(joined))
        with CycloneEnv(connection, site.cyclone):
            page = site.Page(title="draft")
            site.db.session.add(page)
            site.publish.enqueue(site.db.session, page, "final")
            site.db.session.commit()
            assert page.title == "final"
            site.db.session.remove()
        outer.rollback()


# ---- SQLModel ------------------------------------------------------------------------------------


class Knight(sqlmodel.SQLModel, table=True):
    """A row that is also a pydantic model."""

    id: int | None = sqlmodel.Field(default=None, primary_key=True)
    name: str


class Quest(sqlmodel.SQLModel):
    """A model without a table."""

    goal: str
    days: int = 1


tales = Cyclone(hints=False)


@tales.action
def send_out(ctx: Context, knight: Knight, quest: Quest) -> None:
    knight.name += f" seeks the {quest.goal} for {quest.days} days"


def test_sqlmodel_travels_as_a_row_if_it_has_a_table_and_else_as_its_fields(
    engine: Engine,
) -> None:
    sqlmodel.SQLModel.metadata.create_all(engine)
    with engine.connect() as connection, connection.begin() as outer:
        with CycloneEnv(connection, tales), sqlmodel.Session(connection) as session:
            session.begin_nested()
            knight = Knight(name="Percival")
            session.add(knight)
            send_out.enqueue(session, knight, Quest(goal="grail", days=7))
            assert session.exec(sqlmodel.select(Job.kind)).all() == ["send_out"]
            session.commit()
            assert knight.name == "Percival seeks the grail for 7 days"
        outer.rollback()


def test_sqlmodel_an_async_session_enqueues_as_any_other(engine: Engine, async_url: str) -> None:
    async def story() -> None:
        made = create_async_engine(async_url, poolclass=NullPool)
        async with SQLModelAsyncSession(made) as session:
            await mail.enqueue(session, to="a")
            await session.commit()
            await mail.enqueue(session, to="b")

    asyncio.run(story())
    assert mails(engine) == ["a"]


# ---- advanced-alchemy, the sessions of Litestar --------------------------------------------------


class Book(UUIDBase):
    """A row whose primary key has a type of advanced-alchemy's own."""

    __tablename__ = "book"
    title: Mapped[str]


class Books(SQLAlchemySyncRepository[Book]):
    model_type = Book


class AsyncBooks(SQLAlchemyAsyncRepository[Book]):
    model_type = Book


library = Cyclone(hints=False)


@library.action
def lend(ctx: Context, book: Book) -> None: ...


def lent(engine: Engine) -> list[str]:
    """The books that committed jobs are about."""
    with Session(engine) as session:
        jobs = session.scalars(select(Job).order_by(Job.id)).all()
        return [lend.load(job.arguments, session)[1]["book"].title for job in jobs]


@pytest.fixture
def shelf(engine: Engine) -> Engine:
    Book.metadata.create_all(engine)
    return engine


def test_advanced_alchemy_a_repository_that_commits_commits_the_jobs_of_its_session(
    shelf: Engine,
) -> None:
    with SQLAlchemySyncConfig(engine_instance=shelf).get_session() as session:
        books = Books(session=session)
        lend.enqueue(session, books.add(Book(title="Emma")))
        assert lent(shelf) == []
        books.add(Book(title="Persuasion"), auto_commit=True)
        lend.enqueue(session, books.add(Book(title="Sanditon")))
    assert lent(shelf) == ["Emma"]


def test_advanced_alchemy_an_async_repository_too(shelf: Engine, async_url: str) -> None:
    async def story() -> None:
        made = create_async_engine(async_url, poolclass=NullPool)
        async with SQLAlchemyAsyncConfig(engine_instance=made).get_session() as session:
            books = AsyncBooks(session=session)
            await lend.enqueue(session, await books.add(Book(title="Emma")))
            await books.add(Book(title="Persuasion"), auto_commit=True)
            await lend.enqueue(session, await books.add(Book(title="Sanditon")))

    asyncio.run(story())
    assert lent(shelf) == ["Emma"]


def test_advanced_alchemy_a_session_that_reads_from_replicas_enqueues_on_the_primary(
    shelf: Engine, tmp_path: Path
) -> None:
    primary = shelf.url.render_as_string(hide_password=False)
    routing = RoutingConfig(primary, read_replicas=[f"sqlite:///{tmp_path}/replica.db"])
    config = SQLAlchemySyncConfig(routing_config=routing)
    with config.get_session() as session:
        ref = mail.using(unique="u").enqueue(session, to="a")
        assert cyclone.get(session, ref.id).unique_key == "u"
        session.commit()
    dispose_session_maker_sync(config.session_maker)
    assert mails(shelf) == ["a"]


def test_advanced_alchemy_what_a_request_enqueued_is_there_if_it_is_answered_well(
    shelf: Engine, async_url: str
) -> None:
    made = create_async_engine(async_url, poolclass=NullPool)
    config = alchemy.SQLAlchemyAsyncConfig(engine_instance=made, commit_mode="autocommit")
    app = FastAPI()
    sessions = alchemy.AdvancedAlchemy(config=config, app=app).provide_session()

    @app.post("/{title}")
    async def borrow(title: str, session: Annotated[AsyncSession, Depends(sessions)]) -> None:
        await lend.enqueue(session, await AsyncBooks(session=session).add(Book(title=title)))
        if title == "Sanditon":
            raise HTTPException(404)

    with TestClient(app) as client:
        answers = [client.post(f"/{title}").status_code for title in ("Emma", "Sanditon")]
    assert answers == [200, 404]
    assert lent(shelf) == ["Emma"]
