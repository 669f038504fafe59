"""Workers are told of new jobs when the transaction that made them has committed, and only then."""

import asyncio
import gc
import logging
import re
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Collection, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, Transaction, create_engine, event, make_url, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from cyclone_sqla import hint_senders
from cyclone_sqla.hint_senders import (
    NotifySender,
    hint_engine,
    local_sender,
    notify_channel,
    notify_in_transaction,
    notify_sender,
)
from cyclone_sqla.hints import Hint, queue_after_commit
from cyclone_sqla.own_connection import Outage
from tests.databases import Database
from tests.servers.postgres import PostgresServer
from tests.waiting import wait_until
from tests.worker.ear import Ear, listening

_CHANNEL = notify_channel(None)
_LOGGER = "cyclone_sqla.hint_senders"

_SYNC_DRIVERS = ["psycopg", "psycopg2"]
_ASYNC_DRIVERS = ["psycopg_async", "asyncpg"]


@pytest.fixture
def ear(postgresql_database: Database) -> Iterator[Ear]:
    with listening(postgresql_database.url, _CHANNEL) as ear:
        yield ear


@pytest.fixture
def engine(postgresql_database: Database) -> Engine:
    return postgresql_database.engine()


def _enqueue(session: Session, *queues: str) -> None:
    """What an enqueue does, as far as hints go."""
    connection = session.connection()
    connection.execute(text("SELECT 1"))
    sender = notify_sender(connection.engine)
    queue_after_commit(connection, _CHANNEL, queues, sender, session=session)


def _enqueue_on(connection: Connection, *queues: str) -> None:
    connection.execute(text("SELECT 1"))
    queue_after_commit(connection, _CHANNEL, queues, notify_sender(connection.engine))


def _names_up_to_now(ear: Ear, engine: Engine) -> list[str]:
    """Every queue that was called. A last call proves that nothing more is under way."""
    notify_sender(engine).send([Hint(_CHANNEL, "the last one")])
    calls = ear.hear_until("the last one")
    return [call.payload for call in calls if call.payload != "the last one"]


# A Session


@pytest.mark.parametrize("driver", _SYNC_DRIVERS)
def test_a_commit_calls_each_queue_once(
    postgresql_database: Database, ear: Ear, driver: str
) -> None:
    engine = postgresql_database.engine(driver)
    with Session(engine) as session, session.begin():
        _enqueue(session, "ledger", "mail")
        _enqueue(session, "ledger")
    assert sorted(_names_up_to_now(ear, engine)) == ["ledger", "mail"]


def test_every_enqueue_of_a_transaction_adds_its_queues(engine: Engine, ear: Ear) -> None:
    with Session(engine) as session:
        _enqueue(session, "ledger")
        with session.begin_nested():
            _enqueue(session, "mail")
        _enqueue(session, "print", "ledger")
        session.commit()
    assert sorted(_names_up_to_now(ear, engine)) == ["ledger", "mail", "print"]


def test_nothing_is_called_before_the_commit(engine: Engine, ear: Ear) -> None:
    with Session(engine) as session:
        _enqueue(session, "ledger")
        session.flush()
        assert _names_up_to_now(ear, engine) == []


@pytest.mark.parametrize("end", [Session.rollback, Session.close, Session.reset])
def test_a_rollback_calls_nobody_and_a_later_commit_neither(
    engine: Engine, ear: Ear, end: Any
) -> None:
    with Session(engine) as session:
        _enqueue(session, "ledger")
        end(session)
        _enqueue(session, "mail")
        session.commit()
    assert _names_up_to_now(ear, engine) == ["mail"]


def test_each_transaction_of_a_session_calls_for_itself(engine: Engine, ear: Ear) -> None:
    with Session(engine) as session:
        for _ in range(3):
            _enqueue(session, "ledger")
            session.commit()
            assert _names_up_to_now(ear, engine) == ["ledger"]


def test_a_released_savepoint_calls_nobody_yet(engine: Engine, ear: Ear) -> None:
    with Session(engine) as session:
        with session.begin_nested(), session.begin_nested():
            _enqueue(session, "ledger")
        assert _names_up_to_now(ear, engine) == []
        session.commit()
    assert _names_up_to_now(ear, engine) == ["ledger"]


def test_an_enqueue_after_a_rolled_back_savepoint_is_heard(engine: Engine, ear: Ear) -> None:
    with Session(engine) as session:
        savepoint = session.begin_nested()
        _enqueue(session, "ledger")
        savepoint.rollback()
        _enqueue(session, "ledger")
        session.commit()
    assert _names_up_to_now(ear, engine) == ["ledger"]


class Recorder:
    """A sender that keeps what it is given."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.sent_after: list[str] = []

    def send(self, hints: Collection[Hint]) -> None:
        self.sent += [hint.queue for hint in hints]

    def send_after(self, transaction: Transaction, hints: Collection[Hint]) -> None:
        assert transaction.is_active
        self.sent_after += [hint.queue for hint in hints]


def test_a_session_is_heard_after_its_commit_also_with_savepoints(
    sqlite_database: Database,
) -> None:
    recorder = Recorder()
    with Session(sqlite_database.engine()) as session:
        with session.begin_nested():
            connection = session.connection()
            queue_after_commit(connection, _CHANNEL, ["ledger"], recorder, session=session)
        session.commit()
    assert (recorder.sent, recorder.sent_after) == (["ledger"], [])


def test_a_commit_that_closes_open_savepoints_calls(engine: Engine, ear: Ear) -> None:
    with Session(engine) as session:
        session.begin_nested()
        _enqueue(session, "ledger")
        session.commit()
    assert _names_up_to_now(ear, engine) == ["ledger"]


def test_a_scoped_session_calls_as_its_session_does(engine: Engine, ear: Ear) -> None:
    sessions = scoped_session(sessionmaker(engine))
    _enqueue(sessions(), "ledger")
    sessions.commit()
    sessions.remove()
    assert _names_up_to_now(ear, engine) == ["ledger"]


def test_a_subclass_of_session_calls(engine: Engine, ear: Ear) -> None:
    class Shop(Session):
        pass

    with Shop(engine) as session, session.begin():
        _enqueue(session, "ledger")
    assert _names_up_to_now(ear, engine) == ["ledger"]


def test_a_session_with_several_databases_calls_in_the_right_one(
    engine: Engine, ear: Ear, tmp_path: Path
) -> None:
    other = create_engine(f"sqlite:///{tmp_path}/other.db")
    with Session() as session:
        session.connection(bind_arguments={"bind": other}).execute(text("SELECT 1"))
        connection = session.connection(bind_arguments={"bind": engine})
        sender = notify_sender(engine)
        queue_after_commit(connection, _CHANNEL, ["ledger"], sender, session=session)
        session.commit()
    other.dispose()
    assert _names_up_to_now(ear, engine) == ["ledger"]


def test_a_rolled_back_transaction_is_forgotten(engine: Engine) -> None:
    with Session(engine) as session:
        _enqueue(session, "ledger")
        transaction = weakref.ref(session.get_transaction())
        session.rollback()
        gc.collect()
        assert transaction() is None


# A Session inside the transaction of an outside Connection


@pytest.mark.parametrize("mode", ["conditional_savepoint", "rollback_only", "create_savepoint"])
def test_a_joined_session_calls_when_the_outside_transaction_commits(
    engine: Engine, ear: Ear, mode: Any
) -> None:
    with engine.connect() as connection:
        outside = connection.begin()
        with Session(connection, join_transaction_mode=mode) as session:
            _enqueue(session, "ledger")
            session.commit()
        assert _names_up_to_now(ear, engine) == []
        outside.commit()
    assert _names_up_to_now(ear, engine) == ["ledger"]


@pytest.mark.parametrize("mode", ["conditional_savepoint", "rollback_only", "create_savepoint"])
def test_a_joined_session_calls_nobody_when_the_outside_transaction_rolls_back(
    engine: Engine, ear: Ear, mode: Any
) -> None:
    with engine.connect() as connection:
        outside = connection.begin()
        with Session(connection, join_transaction_mode=mode) as session:
            _enqueue(session, "ledger")
            session.commit()
        outside.rollback()
        connection.execute(text("SELECT 1"))
        connection.commit()
    assert _names_up_to_now(ear, engine) == []


def test_each_session_in_an_outside_transaction_adds_its_queues(engine: Engine, ear: Ear) -> None:
    with engine.connect() as connection:
        outside = connection.begin()
        for queue in ("ledger", "mail"):
            with Session(connection, join_transaction_mode="create_savepoint") as session:
                _enqueue(session, queue)
                session.commit()
        outside.commit()
    ear.hear_until("ledger", "mail")


def test_a_session_joined_to_a_savepoint_calls_when_the_outside_transaction_commits(
    engine: Engine, ear: Ear
) -> None:
    with engine.connect() as connection:
        connection.begin()
        connection.begin_nested()
        with Session(connection) as session:
            _enqueue(session, "ledger")
            session.commit()
        assert _names_up_to_now(ear, engine) == []
        connection.commit()
    assert _names_up_to_now(ear, engine) == ["ledger"]


def test_a_session_in_full_control_calls_at_its_own_commit(engine: Engine, ear: Ear) -> None:
    with engine.connect() as connection:
        connection.begin()
        with Session(connection, join_transaction_mode="control_fully") as session:
            _enqueue(session, "ledger")
            session.commit()
            assert _names_up_to_now(ear, engine) == ["ledger"]


def test_a_session_on_an_idle_connection_calls_at_its_own_commit(engine: Engine, ear: Ear) -> None:
    with engine.connect() as connection, Session(connection) as session:
        _enqueue(session, "ledger")
        session.commit()
        assert _names_up_to_now(ear, engine) == ["ledger"]


# A Connection


@pytest.mark.parametrize("driver", _SYNC_DRIVERS)
def test_the_commit_of_a_connection_calls(
    postgresql_database: Database, ear: Ear, driver: str
) -> None:
    engine = postgresql_database.engine(driver)
    with engine.begin() as connection:
        _enqueue_on(connection, "ledger", "mail")
    ear.hear_until("ledger", "mail")


def test_every_enqueue_on_a_connection_adds_its_queues(engine: Engine, ear: Ear) -> None:
    with engine.begin() as connection:
        _enqueue_on(connection, "ledger")
        with connection.begin_nested():
            _enqueue_on(connection, "mail")
        _enqueue_on(connection, "print", "ledger")
    ear.hear_until("ledger", "mail", "print")


def test_the_rollback_of_a_connection_calls_nobody_and_a_later_commit_neither(
    engine: Engine, ear: Ear
) -> None:
    with engine.connect() as connection:
        _enqueue_on(connection, "ledger")
        connection.rollback()
        _enqueue_on(connection, "mail")
        connection.commit()
    assert [call.payload for call in ear.hear_until("mail")] == ["mail"]


def test_a_savepoint_of_a_connection_calls_with_the_transaction(engine: Engine, ear: Ear) -> None:
    with engine.connect() as connection:
        with connection.begin_nested():
            _enqueue_on(connection, "ledger")
        assert _names_up_to_now(ear, engine) == []
        connection.commit()
        ear.hear_until("ledger")


def test_a_connection_is_listened_to_once_however_long_it_lives(engine: Engine, ear: Ear) -> None:
    with engine.connect() as connection:
        for _ in range(20):
            _enqueue_on(connection, "ledger")
            connection.commit()
        assert len(connection.dispatch.commit) == 1
    ear.hear_until("ledger")


def test_a_session_gets_no_listeners_of_its_own(engine: Engine) -> None:
    with Session(engine) as before:
        listeners = len(before.dispatch.after_commit)
    with Session(engine) as session:
        for _ in range(20):
            _enqueue(session, "ledger")
            session.commit()
        assert len(session.dispatch.after_commit) == listeners


def _make_commits_slow(connection: Connection) -> None:
    connection.execute(text("CREATE TABLE shop (id INT)"))
    connection.execute(
        text(
            "CREATE FUNCTION dawdle() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN PERFORM pg_sleep(0.3); RETURN NULL; END $$"
        )
    )
    connection.execute(
        text(
            "CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON shop"
            " DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION dawdle()"
        )
    )


def test_who_is_called_can_see_the_row_however_slow_the_commit(engine: Engine, ear: Ear) -> None:
    with engine.begin() as connection:
        _make_commits_slow(connection)
    rows: list[int] = []

    def look_when_called() -> None:
        ear.hear_until("ledger")
        with engine.connect() as connection:
            rows.append(connection.execute(text("SELECT count(*) FROM shop")).scalar_one())

    worker = threading.Thread(target=look_when_called)
    worker.start()
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO shop VALUES (1)"))
        _enqueue_on(connection, "ledger")
    worker.join()
    assert rows == [1]


def test_a_commit_whose_transaction_is_let_go_is_called_for_at_once(
    engine: Engine, ear: Ear, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hint_senders, "_LOOK", 60.0)
    with engine.connect() as connection:
        for queue in ("ledger", "mail"):
            with connection.begin():
                _enqueue_on(connection, queue)
            ear.hear_until(queue)
        _enqueue_on(connection, "print")
        connection.commit()
        ear.hear_until("print")


def test_a_commit_whose_transaction_is_kept_calls(engine: Engine, ear: Ear) -> None:
    with engine.connect() as connection:
        transaction = connection.begin()
        _enqueue_on(connection, "ledger")
        transaction.commit()
        ear.hear_until("ledger")
        assert not transaction.is_active


def test_who_lets_go_of_a_transaction_never_waits_for_the_sender(engine: Engine) -> None:
    class UnderWay:
        is_active = True

    transaction: Any = UnderWay()
    sender = notify_sender(engine)
    sender.send_after(transaction, [Hint(_CHANNEL, "ledger")])
    is_held, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with sender._changed:
            is_held.set()
            may_end.wait(10)

    holder = threading.Thread(target=hold)
    holder.start()
    is_held.wait()
    began = time.monotonic()
    del transaction  # as the garbage collector may do it anywhere, with any lock held
    seconds = time.monotonic() - began
    may_end.set()
    holder.join()
    assert seconds < 5


# Two-phase commits


def test_a_two_phase_session_calls_after_its_second_phase(engine: Engine, ear: Ear) -> None:
    with Session(engine, twophase=True) as session:
        _enqueue(session, "ledger")
        session.prepare()
        assert _names_up_to_now(ear, engine) == []
        session.commit()
    assert _names_up_to_now(ear, engine) == ["ledger"]


def test_a_two_phase_connection_calls_after_its_second_phase(engine: Engine, ear: Ear) -> None:
    with engine.connect() as connection:
        transaction = connection.begin_twophase()
        _enqueue_on(connection, "ledger")
        transaction.prepare()
        assert _names_up_to_now(ear, engine) == []
        transaction.commit()
        ear.hear_until("ledger")


# Async


@pytest.mark.parametrize("driver", _ASYNC_DRIVERS)
def test_an_async_session_calls_without_a_second_driver(
    postgresql_database: Database, ear: Ear, driver: str
) -> None:
    async def shop() -> None:
        engine = create_async_engine(postgresql_database.url_for(driver))
        async with AsyncSession(engine) as session:
            await session.run_sync(_enqueue, "mail")
            await session.rollback()
            await session.run_sync(_enqueue, "ledger")
            await session.commit()
        names = await asyncio.to_thread(_names_up_to_now, ear, engine.sync_engine)
        assert names == ["ledger"]
        await engine.dispose()

    asyncio.run(shop())


@pytest.mark.parametrize("driver", _ASYNC_DRIVERS)
def test_an_async_connection_calls(postgresql_database: Database, ear: Ear, driver: str) -> None:
    async def shop() -> None:
        engine = create_async_engine(postgresql_database.url_for(driver))
        async with engine.begin() as connection:
            await connection.run_sync(_enqueue_on, "ledger")
        await asyncio.to_thread(ear.hear_until, "ledger")
        await engine.dispose()

    asyncio.run(shop())


# The sender: its connection, its thread, its troubles


def _sender_backends(engine: Engine) -> list[Any]:
    """The connections of senders: their last statement is a notification."""
    with engine.connect() as connection:
        rows = connection.execute(
            text(
                "SELECT pid, application_name, state FROM pg_stat_activity"
                " WHERE datname = current_database() AND query LIKE 'SELECT set_config%pg_notify%'"
            )
        )
        return list(rows)


@pytest.mark.parametrize("driver", _SYNC_DRIVERS)
def test_the_sender_connects_as_the_application_does(
    postgresql_database: Database, engine: Engine, ear: Ear, driver: str
) -> None:
    application = postgresql_database.engine(driver, connect_args={"application_name": "the shop"})
    notify_sender(application).send([Hint(_CHANNEL, "ledger")])
    ear.hear_until("ledger")
    [backend] = _sender_backends(engine)
    assert (backend.application_name, backend.state) == ("the shop", "idle")


def test_the_sender_connects_as_an_asyncpg_application_does(
    postgresql_database: Database, engine: Engine, ear: Ear
) -> None:
    settings = {"server_settings": {"application_name": "the shop"}}
    application = create_async_engine(
        postgresql_database.url_for("asyncpg"), connect_args=settings
    ).sync_engine
    with closing(notify_sender(application)) as sender:
        sender.send([Hint(_CHANNEL, "ledger")])
        ear.hear_until("ledger")
        [backend] = _sender_backends(engine)
    assert (backend.application_name, backend.state) == ("the shop", "idle")


def test_connect_listeners_of_the_application_see_the_connection(engine: Engine, ear: Ear) -> None:
    @event.listens_for(engine, "connect")
    def leave_a_transaction_open(dbapi_connection: Any, _record: object) -> None:
        dbapi_connection.execute("SET application_name = 'the shop'")

    notify_sender(engine).send([Hint(_CHANNEL, "ledger")])
    ear.hear_until("ledger")
    assert [each.application_name for each in _sender_backends(engine)] == ["the shop"]


def test_the_sender_uses_no_slot_of_the_pool(postgresql_database: Database, ear: Ear) -> None:
    engine = postgresql_database.engine(pool_size=1, max_overflow=0, pool_timeout=5)
    with engine.connect():
        notify_sender(engine).send([Hint(_CHANNEL, "ledger")])
        ear.hear_until("ledger")
    with engine.connect():
        pass  # the pool has its connection back


def test_a_sender_serves_all_schemas_and_all_views_of_an_engine(engine: Engine) -> None:
    view = engine.execution_options(logging_token="shop")
    assert notify_sender(view) is notify_sender(engine)


def test_dispose_takes_the_connection_of_the_sender_too(
    postgresql_database: Database, engine: Engine, ear: Ear
) -> None:
    application = postgresql_database.engine()
    notify_sender(application).send([Hint(_CHANNEL, "ledger")])
    ear.hear_until("ledger")
    application.dispose()
    wait_until(lambda: not _sender_backends(engine), "the sender has gone")
    notify_sender(application).send([Hint(_CHANNEL, "mail")])
    ear.hear_until("mail")


def test_an_idle_sender_gives_its_connection_back_and_returns(
    engine: Engine, ear: Ear, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cyclone_sqla.hint_senders._IDLE", 0.2)
    for _ in range(2):
        notify_sender(engine).send([Hint(_CHANNEL, "ledger")])
        ear.hear_until("ledger")
        wait_until(lambda: not _sender_backends(engine), "the sender has gone")


def test_no_hint_of_many_threads_is_lost(engine: Engine, ear: Ear) -> None:
    names = [[f"{thread}-{number}" for number in range(25)] for thread in range(16)]

    def shop(own_names: list[str]) -> None:
        for name in own_names:
            with Session(engine) as session, session.begin():
                _enqueue(session, name)

    threads = [threading.Thread(target=shop, args=(own_names,)) for own_names in names]
    for thread in threads:
        thread.start()
    ear.hear_until(*(name for own_names in names for name in own_names))
    for thread in threads:
        thread.join()


class LateHint(NotifySender):
    """A sender that is given a hint when it has decided to give its connection back."""

    def _disconnect(self) -> None:
        if self._connection is not None:
            super()._disconnect()
            self.send([Hint(_CHANNEL, "mail")])


def test_a_hint_that_comes_when_the_sender_is_leaving_is_heard(engine: Engine, ear: Ear) -> None:
    with closing(LateHint(engine.pool, engine.dialect)) as sender:
        sender.send([Hint(_CHANNEL, "ledger")])
        ear.hear_until("ledger")
    ear.hear_until("mail")


def test_hints_that_come_while_the_sender_is_busy_are_collected(engine: Engine, ear: Ear) -> None:
    with closing(NotifySender(engine.pool, engine.dialect)) as sender:
        assert sender.rest(30)
        for queue in ("ledger", "mail", "print"):
            sender.send([Hint(_CHANNEL, queue)])
        sender.go_on()
        ear.hear_until("ledger", "mail", "print")


def test_a_flood_of_hints_is_few_statements(engine: Engine, ear: Ear) -> None:
    sender = notify_sender(engine)
    for _ in range(5000):
        sender.send([Hint(_CHANNEL, "ledger")])
    assert len(_names_up_to_now(ear, engine)) < 1000


def test_a_hint_after_the_server_ended_the_connection_is_heard(
    engine: Engine, ear: Ear, caplog: pytest.LogCaptureFixture
) -> None:
    sender = notify_sender(engine)
    sender.send([Hint(_CHANNEL, "ledger")])
    ear.hear_until("ledger")
    [backend] = _sender_backends(engine)
    with engine.connect() as connection:
        connection.execute(text("SELECT pg_terminate_backend(:pid, 30000)"), {"pid": backend.pid})
    sender.send([Hint(_CHANNEL, "mail")])
    ear.hear_until("mail")
    assert [record for record in caplog.records if record.name == _LOGGER] == []


def test_a_hint_that_the_server_refuses_stops_no_other(engine: Engine, ear: Ear) -> None:
    sender = notify_sender(engine)
    sender.send([Hint(_CHANNEL, "x" * 9000)])  # longer than a payload may be
    wait_until(lambda: not sender._hints, "it was tried")
    sender.send([Hint(_CHANNEL, "ledger")])
    ear.hear_until("ledger")


def test_hints_of_an_outage_are_sent_after_it_and_it_is_two_lines_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger=_LOGGER)
    with PostgresServer() as server:
        url = server.url("postgres")
        engine = create_engine(url)
        with closing(notify_sender(engine)) as sender:
            server.stop()
            sender.send([Hint(_CHANNEL, "ledger")])
            time.sleep(1)  # several attempts to connect
            assert sender.rest(30)
            server.start()
            with listening(url, _CHANNEL) as ear:
                sender.send([Hint(_CHANNEL, "mail")])
                sender.go_on()
                ear.hear_until("ledger", "mail")
        engine.dispose()
    lines = [record.getMessage() for record in caplog.records if record.name == _LOGGER]
    assert len(lines) == 2
    assert "workers find jobs by polling" in lines[0]
    assert "again, after" in lines[1]


class HintInTrouble(NotifySender):
    """A sender that is given a hint when another one has just failed to leave."""

    def _speak(self, hints: set[Hint]) -> None:
        if Hint(_CHANNEL, "mail") not in hints:
            self.send([Hint(_CHANNEL, "mail")])
            raise ConnectionError("the server has gone")
        super()._speak(hints)


def test_a_hint_that_failed_to_leave_goes_with_those_that_came_meanwhile(
    engine: Engine, ear: Ear
) -> None:
    with closing(HintInTrouble(engine.pool, engine.dialect)) as sender:
        sender.send([Hint(_CHANNEL, "ledger")])
        ear.hear_until("ledger", "mail")


def test_outages_in_quick_succession_are_one_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    outage = Outage(logging.getLogger("shop"), "Selling", "it waits")
    for _ in range(10):
        outage.failed(ConnectionError("gone\nand a second line"))
        outage.failed(ConnectionError("still gone"))
        outage.over()
    assert [record.getMessage().split(", after")[0] for record in caplog.records] == [
        "Selling failed (ConnectionError: gone); it waits, trying again",
        "Selling again",
    ]


def test_an_outage_is_tried_ever_more_rarely_but_every_five_seconds_at_least() -> None:
    outage = Outage(logging.getLogger("shop"), "Selling", "it waits")
    delays = [outage.failed(ConnectionError()) for _ in range(2000)]
    assert 0.05 <= delays[0] <= 0.1
    assert all(2.5 <= delay <= 5.0 for delay in delays[10:])


def test_a_failing_sender_never_reaches_the_application(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]  # nobody answers there once it is closed
    unreachable = hint_engine(make_url(f"postgresql+psycopg://nobody@127.0.0.1:{port}/none"))
    application = create_engine(f"sqlite:///{tmp_path}/shop.db")
    with closing(notify_sender(unreachable)) as sender, Session(application) as session:
        connection = session.connection()
        queue_after_commit(connection, _CHANNEL, ["ledger"], sender, session=session)
        session.commit()
    application.dispose()


def _run(program: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *_WARNINGS, "-c", _PRELUDE + program, *arguments],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )


# Newer Pythons warn of every fork beside a thread, which is what these tests are about.
_WARNINGS = ["-W", "error", "-W", "ignore:This process:DeprecationWarning"]

_PRELUDE = """
import asyncio, os, sys, threading, time
from sqlalchemy import create_engine, make_url
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session
from cyclone_sqla import hint_senders
from cyclone_sqla.hint_senders import hint_engine, notify_channel, notify_sender
from cyclone_sqla.hints import Hint

def send(engine, queue):
    notify_sender(engine).send([Hint(notify_channel(None), queue)])

def engine_of(url):
    is_async = make_url(url).get_dialect().is_async
    return create_async_engine(url).sync_engine if is_async else create_engine(url)
"""


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2", "asyncpg"])
def test_hints_leave_before_the_process_ends(
    postgresql_database: Database, ear: Ear, driver: str
) -> None:
    done = _run(
        "hint_senders._EXIT_WITHIN = 30\n"  # this machine may be busy
        "send(engine_of(sys.argv[1]), 'ledger')",
        postgresql_database.url_for(driver),
    )
    ear.hear_until("ledger")
    assert done.stderr == ""


def test_a_server_that_does_not_answer_delays_the_end_of_the_process_little() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        url = f"postgresql+psycopg://nobody@127.0.0.1:{door.getsockname()[1]}/none"
        before = time.monotonic()
        _run("send(hint_engine(make_url(sys.argv[1])), 'ledger')", url)
        assert time.monotonic() - before < 30


_FORK = """
hint_senders._FORK_WITHIN = 30  # this machine may be busy
engine = engine_of(sys.argv[1])
sender = notify_sender(engine)

def sent(queue):
    send(engine, queue)
    while sender._hints:
        pass

sent("parent before")
children = []
for number in range(3):
    child = os.fork()
    if child == 0:
        send(engine, f"child {number}")
        sender.close(30)
        sys.exit()  # an ordinary end, with all its clearing up
    children.append(child)
codes = [os.waitpid(child, 0)[1] for child in children]
send(engine, "parent after")
sender.close(30)
print(codes)
"""


_FORK_WHILE_CONNECTING = """
hint_senders._FORK_WITHIN = 30  # this machine may be busy
inside, left = threading.Event(), threading.Event()

def connect():
    inside.set()
    time.sleep(0.1)
    left.set()
    raise ConnectionError

send(create_engine("postgresql+psycopg://", creator=connect), "ledger")
inside.wait()
child = os.fork()
if child == 0:
    os._exit(0 if left.is_set() else 1)
print(os.waitpid(child, 0)[1])
"""


def test_a_fork_waits_until_no_sender_is_inside_its_driver() -> None:
    assert _run(_FORK_WHILE_CONNECTING).stdout.strip() == "0"


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2", "asyncpg", "psycopg_async"])
def test_a_forked_child_sends_through_a_connection_of_its_own(
    postgresql_database: Database, ear: Ear, driver: str
) -> None:
    done = _run(_FORK, postgresql_database.url_for(driver))
    names = ["parent before", "child 0", "child 1", "child 2", "parent after"]
    calls = ear.hear_until(*names)
    senders = {call.payload: call.pid for call in calls}
    assert done.stdout.strip() == "[0, 0, 0]"
    assert senders["parent before"] == senders["parent after"]
    assert len(set(senders.values())) == 4


# Channels, and notifying inside the transaction


@pytest.mark.parametrize("schema", [None, "", "My-App", "user", "1x", 'a"b', "o'brien", "a.b", "ü"])
def test_a_channel_never_needs_quotes(schema: str | None) -> None:
    assert re.fullmatch("cyclone_[0-9a-f]{12}", notify_channel(schema))


def test_each_schema_has_its_own_channel() -> None:
    assert len({notify_channel(schema) for schema in (None, "a", "A", "a.b")}) == 4


@pytest.mark.parametrize("driver", [*_SYNC_DRIVERS, *_ASYNC_DRIVERS])
def test_a_notification_in_the_transaction_is_heard_at_its_commit(
    postgresql_database: Database, ear: Ear, driver: str
) -> None:
    def notify(connection: Connection, queue: str) -> None:
        notify_in_transaction(connection, _CHANNEL, [queue, queue + " too"])

    async def shop() -> None:
        engine = create_async_engine(postgresql_database.url_for(driver))
        async with engine.connect() as connection:
            await connection.run_sync(notify, "rolled back")
            await connection.rollback()
            await connection.run_sync(notify, "ledger")
            await connection.commit()
        await engine.dispose()

    if driver in _ASYNC_DRIVERS:
        asyncio.run(shop())
    else:
        with postgresql_database.engine(driver).connect() as connection:
            notify(connection, "rolled back")
            connection.rollback()
            notify(connection, "ledger")
            connection.commit()
    calls = ear.hear_until("ledger", "ledger too")
    assert {call.payload for call in calls} == {"ledger", "ledger too"}


# SQLite: within the process


@pytest.fixture
def called(sqlite_database: Database) -> Iterator[list[str]]:
    """The queues that a worker of this process was called for."""
    names: list[str] = []

    def receive(queues: Collection[str]) -> None:
        names.extend(queues)

    sender = local_sender(sqlite_database.engine())
    sender.subscribe(receive)
    yield names
    sender.unsubscribe(receive)


def _enqueue_locally(session: Session, queue: str) -> None:
    connection = session.connection()
    sender = local_sender(connection.engine)
    queue_after_commit(connection, _CHANNEL, [queue], sender, session=session)


def test_a_commit_on_sqlite_calls_the_workers_of_the_process(
    sqlite_database: Database, called: list[str]
) -> None:
    with Session(sqlite_database.engine()) as session:
        _enqueue_locally(session, "mail")
        session.rollback()
        _enqueue_locally(session, "ledger")
        assert called == []
        session.commit()
    assert called == ["ledger"]


def test_every_enqueue_of_a_transaction_on_sqlite_adds_its_queues(
    sqlite_database: Database, called: list[str]
) -> None:
    engine = sqlite_database.engine()
    with Session(engine) as session, session.begin():
        _enqueue_locally(session, "ledger")
        _enqueue_locally(session, "mail")
    assert sorted(called) == ["ledger", "mail"]
    with engine.begin() as connection:
        for queue in ("print", "archive"):
            queue_after_commit(connection, _CHANNEL, [queue], local_sender(engine))
    assert sorted(called[2:]) == ["archive", "print"]


def test_a_commit_of_a_connection_on_sqlite_calls(
    sqlite_database: Database, called: list[str]
) -> None:
    engine = sqlite_database.engine()
    with engine.begin() as connection:
        connection.execute(text("SELECT 1"))
        queue_after_commit(connection, _CHANNEL, ["ledger"], local_sender(engine))
        assert called == []
    assert called == ["ledger"]


def test_a_commit_through_aiosqlite_calls(sqlite_database: Database, called: list[str]) -> None:
    async def shop() -> None:
        engine = create_async_engine(sqlite_database.url_for("aiosqlite"))
        async with AsyncSession(engine) as session:
            await session.run_sync(_enqueue_locally, "ledger")
            await session.commit()
        await engine.dispose()

    asyncio.run(shop())
    assert called == ["ledger"]


def test_a_file_is_known_by_all_its_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link.db").symlink_to(tmp_path / "shop.db")
    monkeypatch.chdir(tmp_path)
    urls = [
        f"sqlite:///{tmp_path}/shop.db",
        f"sqlite+aiosqlite:///{tmp_path}/shop.db",
        "sqlite:///shop.db",
        "sqlite:///link.db",
        f"sqlite:///file:{tmp_path}/shop.db?uri=true",
        "sqlite:///file:shop.db?mode=rwc&uri=true",
    ]
    assert len({local_sender(create_engine(url)) for url in urls}) == 1


def test_databases_in_memory_are_not_one() -> None:
    one, other = create_engine("sqlite://"), create_engine("sqlite:///:memory:")
    assert local_sender(one) is not local_sender(other)
