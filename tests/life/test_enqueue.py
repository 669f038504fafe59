"""A job is part of the transaction that enqueues it, and a refused one leaves no trace in it."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import func, inspect, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, sessionmaker

from cyclone_sqla import (
    ConfigurationError,
    Cyclone,
    DuplicateError,
    InvalidJobError,
    InvalidKeyError,
    JobNotFoundError,
    JobRef,
    PayloadError,
    State,
    TransactionError,
    begin_before_savepoints,
)
from tests.databases import Database
from tests.life.hands import ManualClock
from tests.shop import Order, Shop, statements_of

NOON = datetime(2031, 5, 4, 12, tzinfo=UTC)


# ---- it exists if, and only if, the transaction commits ------------------------------------------


def test_a_job_commits_with_its_transaction(shop: Shop) -> None:
    with shop.session() as session, session.begin():
        session.add(Order(note="tea"))
        ref = shop.mail.enqueue(session, "anna")
        assert shop.jobs() == [], "seen before the commit"
    assert shop.job_ids() == [ref.id]
    assert shop.notes() == ["tea"]


def test_a_job_is_rolled_back_with_its_transaction(shop: Shop) -> None:
    with shop.session() as session:
        session.add(Order(note="tea"))
        shop.mail.enqueue(session, "anna")
        shop.mail.using(unique="u", idempotency_key="i").enqueue(session, "anna")
        shop.cyclone.enqueue_many(session, [shop.mail.job("bert"), shop.mail.job("carl")])
        session.rollback()
    assert shop.jobs() == []
    assert shop.notes() == []
    with shop.session() as session, session.begin():
        again = shop.mail.using(unique="u", idempotency_key="i").enqueue(session, "anna")
    assert again.created


@pytest.mark.parametrize(
    ("inner", "outer", "survives"),
    [
        ("commit", "commit", True),
        ("commit", "rollback", False),
        ("rollback", "commit", False),
    ],
)
def test_a_job_goes_with_its_savepoint(shop: Shop, inner: str, outer: str, survives: bool) -> None:
    begin_before_savepoints_where_needed(shop)
    with shop.session() as session:
        first = shop.mail.enqueue(session, "anna")
        savepoint = session.begin_nested()
        shop.mail.using(unique="u").enqueue(session, "bert")
        shop.cyclone.enqueue_many(session, [shop.mail.job("carl")])
        getattr(savepoint, inner)()
        assert shop.cyclone.get(session, first.id).state == "available"
        getattr(session, outer)()
    expected = {True: 3, False: 1 if outer == "commit" else 0}[survives]
    assert len(shop.jobs()) == expected


def begin_before_savepoints_where_needed(shop: Shop) -> None:
    if shop.database.dialect == "sqlite":
        begin_before_savepoints(shop.engine)


def test_the_answer_names_the_row(shop: Shop) -> None:
    with shop.session() as session, session.begin():
        now = shop.mail.enqueue(session, "anna", body="hello")
        later = shop.mail.using(queue="slow", process_in=60).enqueue(session, "bert")
    assert now == JobRef(now.id, "mail", "default", created=True, state=State.AVAILABLE)
    assert later == JobRef(later.id, "mail", "slow", created=True, state=State.PENDING)
    first, second = shop.jobs()
    assert (first.id, first.kind, first.queue, first.state) == (
        now.id,
        "mail",
        "default",
        "available",
    )
    assert json.loads(first.arguments) == {"to": "anna", "body": "hello"}
    assert (second.id, second.queue, second.state) == (later.id, "slow", "pending")
    assert second.waits_for == "time"


def test_an_autocommit_connection_is_refused_before_anything_is_written(shop: Shop) -> None:
    with shop.session() as session, session.begin():  # the tables are known to be there
        shop.mail.enqueue(session, "anna")
    engine = shop.engine.execution_options(isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        with pytest.raises(TransactionError, match="AUTOCOMMIT"):
            shop.mail.enqueue(connection, "bert")
        with pytest.raises(TransactionError, match="AUTOCOMMIT"):
            shop.cyclone.enqueue_many(connection, [shop.mail.job("bert")])
    assert len(shop.jobs()) == 1


def test_what_is_no_transaction_is_refused_by_name(shop: Shop) -> None:
    unfit: Any
    for unfit in (shop.engine, sessionmaker(shop.engine), None):
        with pytest.raises(ConfigurationError, match=f"not {type(unfit).__name__}"):
            shop.mail.enqueue(unfit, "anna")


# ---- a refusal leaves the transaction as it was --------------------------------------------------

Refused = Callable[[Shop, Session], object]

BEFORE_SQL: dict[str, tuple[type[Exception], Refused]] = {
    "an empty key": (InvalidKeyError, lambda s, t: s.mail.using(unique="").enqueue(t, "a")),
    "a long key": (InvalidKeyError, lambda s, t: s.mail.using(unique="ä" * 129).enqueue(t, "a")),
    "a key that is no text": (
        InvalidKeyError,
        lambda s, t: s.mail.using(unique=7).enqueue(t, "a"),  # type: ignore[arg-type]
    ),
    "a key with NUL": (
        InvalidKeyError,
        lambda s, t: s.mail.using(idempotency_key="a\0").enqueue(t, "a"),
    ),
    "a key with half a character": (
        InvalidKeyError,
        lambda s, t: s.mail.using(unique="\ud800").enqueue(t, "a"),
    ),
    "an argument with NUL": (PayloadError, lambda s, t: s.mail.enqueue(t, "a\0")),
    "a missing argument": (
        PayloadError,
        lambda s, t: s.mail.enqueue(t),  # type: ignore[call-arg]
    ),
    "arguments by name that don't fit": (
        PayloadError,
        lambda s, t: s.cyclone.enqueue(t, "mail", {"to": 7}),
    ),
    "arguments for unknown code that JSON can't hold": (
        PayloadError,
        lambda s, t: s.cyclone.enqueue(t, "elsewhere", {"when": NOON}),
    ),
    "too much": (PayloadError, lambda s, t: s.mail.enqueue(t, "x" * 1024 * 1024)),
    "too much among many": (
        PayloadError,
        lambda s, t: s.cyclone.enqueue_many(t, [s.mail.job("a"), s.mail.job("x" * 1024 * 1024)]),
    ),
    "a naive time": (
        InvalidJobError,
        lambda s, t: s.mail.using(process_at=datetime(2031, 1, 1)).enqueue(t, "a"),  # noqa: DTZ001
    ),
    "two times": (
        InvalidJobError,
        lambda s, t: s.mail.using(process_at=NOON, process_in=1).enqueue(t, "a"),
    ),
    "an option that is none": (
        InvalidJobError,
        lambda s, t: s.mail.using(uniqe="k").enqueue(t, "a"),  # type: ignore[call-arg]
    ),
    "no job": (
        TypeError,
        lambda s, t: s.cyclone.enqueue_many(t, [s.mail]),  # type: ignore[list-item]
    ),
}

AFTER_SQL: dict[str, tuple[type[Exception], Refused]] = {
    "a duplicate": (DuplicateError, lambda s, t: s.mail.using(unique="held").enqueue(t, "a")),
    "a duplicate among many": (
        DuplicateError,
        lambda s, t: s.cyclone.enqueue_many(
            t, [s.mail.job("a"), s.mail.using(unique="held").job("b"), s.mail.job("c")]
        ),
    ),
    "a twin among many": (
        DuplicateError,
        lambda s, t: s.cyclone.enqueue_many(t, [s.mail.using(unique="new").job("a")] * 2),
    ),
    "a duplicate with an idempotency key": (
        DuplicateError,
        lambda s, t: s.mail.using(unique="held", idempotency_key="i").enqueue(t, "a"),
    ),
    "no such job": (JobNotFoundError, lambda s, t: s.cyclone.get(t, 4711)),
    "an id that no job can have": (JobNotFoundError, lambda s, t: s.cyclone.get(t, 2**80)),
}


@pytest.mark.parametrize("refusal", [*BEFORE_SQL, *AFTER_SQL])
def test_a_refusal_leaves_the_transaction_and_its_objects_as_they_were(
    shop: Shop, refusal: str
) -> None:
    error, refused = {**BEFORE_SQL, **AFTER_SQL}[refusal]
    with shop.session() as session, session.begin():
        shop.mail.using(unique="held").enqueue(session, "holder")
        session.add(Order(note="old"))
    before = shop.rows()
    with shop.session() as session, session.begin():
        dirty = session.scalars(select(Order)).one()
        dirty.note = "changed"
        pending = Order(note="new")
        session.add(pending)
        with pytest.raises(error):
            refused(shop, session)
        with statements_of(shop.engine) as sent:
            assert (dirty.note, dirty.id) == ("changed", 1)
            assert sent == [], "it had to be read again"
        assert inspect(pending).pending
        assert inspect(dirty).modified
    assert shop.notes() == ["changed", "new"]
    assert shop.rows() == before


def test_what_is_wrong_with_a_job_is_said_before_any_sql(shop: Shop) -> None:
    with shop.session() as session, statements_of(shop.engine) as sent:
        for error, refused in BEFORE_SQL.values():
            with pytest.raises(error):
                refused(shop, session)
        assert sent == []
        assert not session.in_transaction()


def test_an_enqueue_sends_none_of_the_applications_own_rows(shop: Shop) -> None:
    with shop.session() as session:
        session.add(bad := Order(note="bad", total=-1))
        shop.mail.using(unique="u").enqueue(session, "anna")
        shop.cyclone.enqueue_many(session, [shop.mail.using(unique="v").job("bert")])
        shop.cyclone.get(session, shop.mail.using(idempotency_key="i").enqueue(session, "c").id)
        assert inspect(bad).pending
        with pytest.raises(IntegrityError, match="total"):
            session.commit()
    assert shop.jobs() == []


def test_the_applications_own_broken_rule_is_never_called_a_duplicate(shop: Shop) -> None:
    with shop.session() as session, session.begin():
        shop.mail.using(unique="held").enqueue(session, "holder")
    with shop.session() as session:
        session.add(Order(note="bad", total=-1))
        with pytest.raises(DuplicateError):
            shop.mail.using(unique="held").enqueue(session, "anna")
        with pytest.raises(IntegrityError, match="total"):
            session.flush()


# ---- when: from the call on, by one clock --------------------------------------------------------


def test_a_delay_counts_from_the_call_not_from_the_begin(shop: Shop) -> None:
    with shop.session() as session, session.begin():
        session.add(Order(note="a long transaction"))
        session.flush()
        before = _clock(session)
        late = shop.mail.using(process_in=timedelta(seconds=30)).enqueue(session, "anna")
        many = shop.cyclone.enqueue_many(session, [shop.mail.using(process_in=30).job("bert")])
        after = _clock(session)
    jobs = shop.jobs()
    assert [job.id for job in jobs] == [late.id, many[0].id]
    for job in jobs:
        assert before < job.created_at <= after
        assert job.run_at - job.created_at == timedelta(seconds=30)
        assert job.updated_at == job.created_at


def _clock(session: Session) -> datetime:
    if session.get_bind().dialect.name == "sqlite":
        return datetime.now(UTC) - timedelta(microseconds=1)
    start, now = session.execute(select(func.now(), func.clock_timestamp())).one()
    assert now > start
    return now  # type: ignore[no-any-return]


def test_with_a_clock_of_its_own_a_queue_knows_no_other(database: Database) -> None:
    clock = ManualClock()
    start = clock.now()
    shop = Shop(database, clock=clock)
    with shop.session() as session, session.begin():
        in_three_hours = shop.mail.using(process_in=timedelta(hours=3), unique="u")
        in_three_hours.enqueue(session, "anna")
        clock.advance(hours=1)
        shop.mail.using(process_at=start + timedelta(hours=1)).enqueue(session, "bert")
        shop.cyclone.enqueue_many(session, [shop.mail.using(process_in=0.000001).job("carl")])
    first, second, third = shop.jobs()
    assert (first.created_at, first.run_at) == (start, start + timedelta(hours=3))
    assert (second.created_at, second.run_at) == (clock.now(), clock.now())
    assert third.created_at == clock.now()
    assert third.run_at == clock.now() + timedelta(microseconds=1)
    assert [job.state for job in (first, second, third)] == ["pending", "available", "pending"]


def test_what_is_due_already_is_available_at_once(database: Database) -> None:
    clock = ManualClock()
    shop = Shop(database, clock=clock)
    times = [datetime(1, 1, 2, tzinfo=UTC), datetime(1969, 7, 20, tzinfo=UTC), clock.now()]
    with shop.session() as session, session.begin():
        refs = [shop.mail.using(process_at=time).enqueue(session, "anna") for time in times]
        specs = [shop.mail.using(process_at=time).job("bert") for time in times]
        refs += shop.cyclone.enqueue_many(session, specs)
    assert {ref.state for ref in refs} == {State.AVAILABLE}
    found = [(job.state, job.waits_for, job.run_at) for job in shop.jobs()]
    assert found == [("available", None, time) for time in times * 2]


# ---- arguments arrive as they were given, or not at all ------------------------------------------


UNFIT: list[tuple[object, str]] = [
    ({"rows": [1, {"name": "a\0b"}]}, r"^ship: details\.rows\[1\]\.name: holds a NUL"),
    ({"rows": ["\ud800"]}, r"^ship: details\.rows\[0\]: holds a lone surrogate"),
    ({"a\0": 1}, r"^ship: details\['a\\x00'\]: the key holds a NUL"),
    ([float("nan")], r"^ship: details\[0\]: is not a finite number"),
    ([float("-inf")], r"^ship: details\[0\]: is not a finite number"),
    ({1: 2}, r"^ship: details\[1\]: the key, of type int, would arrive as str"),
    ([10**5000], r"^ship: details\[0\]: is a whole number of more than 4300 digits"),
    ({"at": NOON}, r"^ship: details\.at: datetime would arrive as str"),
    ((1, 2), r"^ship: details: tuple would arrive as list"),
]


def test_what_would_not_arrive_is_refused_with_its_path_on_every_database(shop: Shop) -> None:
    with shop.session() as session, session.begin(), statements_of(shop.engine) as sent:
        for details, complaint in UNFIT:
            with pytest.raises(PayloadError, match=complaint):
                shop.ship.enqueue(session, 1, details)
        assert sent == []
        shop.ship.enqueue(session, 1)
    assert len(shop.jobs()) == 1


FIT: list[object] = [
    2**53 + 1, 2**63, -(2**63), 10**400, 1e22, 5e-324, -0.0, 1970670598291982290, True, None,
    "ünïcode ✓ 🜁", "\x7f\x1f\t", "\\u0000", {"b": 1, "a": [1.0, {}]}, "x" * 100_000,
]  # fmt: skip


def test_what_is_stored_is_what_was_given(shop: Shop) -> None:
    with shop.session() as session, session.begin():
        for value in FIT:
            shop.ship.enqueue(session, 1, value)
            shop.cyclone.enqueue(session, "elsewhere", {"order": 1, "details": value})
        shop.cyclone.enqueue_many(session, [shop.ship.job(1, value) for value in FIT])
    stored = [shop.ship.decode(job.arguments)[1]["details"] for job in shop.jobs()]
    one_by_one = [value for value in FIT for _ in range(2)]
    assert [repr(value) for value in stored] == [repr(value) for value in [*one_by_one, *FIT]]


def test_the_limit_of_a_payload_is_the_applications_to_set(database: Database) -> None:
    shop = Shop(database, max_payload=97)
    with shop.session() as session, session.begin():
        shop.mail.enqueue(session, "ä" * 44)
        with pytest.raises(PayloadError, match="take 98 bytes of JSON, more than the limit of 97"):
            shop.mail.enqueue(session, "ä" * 44 + "x")
        with pytest.raises(PayloadError, match="more than the limit"):
            shop.cyclone.enqueue(session, "elsewhere", {"text": "x" * 97})
    assert len(shop.jobs()) == 1


def test_a_producer_without_the_code_enqueues_by_name(shop: Shop) -> None:
    producer = Cyclone(hints=False, instance="web-1")
    with shop.session() as session, session.begin():
        ref = producer.enqueue(session, "mail", {"to": "anna"}, queue="slow", unique="u")
        with pytest.raises(DuplicateError):
            producer.enqueue(session, "mail", {"to": "bert"}, unique="u")
    (job,) = shop.jobs()
    assert (job.id, job.kind, job.queue, job.origin) == (ref.id, "mail", "slow", "web-1")
    assert shop.mail.decode(job.arguments) == ([], {"to": "anna"})


# ---- look ----------------------------------------------------------------------------------------


def test_a_job_is_read_in_the_transaction_that_asks(shop: Shop) -> None:
    with shop.session() as session:
        ref = shop.mail.enqueue(session, "anna")
        job = shop.cyclone.get(session, ref.id)
        assert (job.id, job.kind, job.state, job.is_terminal) == (
            ref.id,
            "mail",
            "available",
            False,
        )
        assert job in session
        with shop.session() as other, pytest.raises(JobNotFoundError, match=f"no job {ref.id}"):
            shop.cyclone.get(other, ref.id)
        session.commit()
    with shop.engine.connect() as connection:
        detached = shop.cyclone.get(connection, ref.id)
        assert inspect(detached).detached
        assert json.loads(detached.arguments)["to"] == "anna"
    with shop.engine.begin() as connection, pytest.raises(JobNotFoundError):
        shop.cyclone.get(connection, ref.id + 1)


def test_a_job_is_read_as_it_is_now(shop: Shop) -> None:
    with shop.session() as session, session.begin():
        ref = shop.mail.enqueue(session, "anna")
    with shop.session() as session:
        job = shop.cyclone.get(session, ref.id)
        session.commit()
        shop.set_state(ref.id, "completed")
        assert shop.cyclone.get(session, ref.id) is job
        assert (job.state, job.is_terminal) == ("completed", True)


def test_reading_a_job_leaves_the_transaction_of_a_connection_open(shop: Shop) -> None:
    with shop.engine.connect() as connection:
        ref = shop.mail.enqueue(connection, "anna")
        assert shop.cyclone.get(connection, ref.id).id == ref.id
        with pytest.raises(JobNotFoundError):
            shop.cyclone.get(connection, ref.id + 1)
        connection.commit()
    assert shop.job_ids() == [ref.id]


def test_only_a_whole_number_is_an_id(shop: Shop) -> None:
    job_id: Any
    for job_id in ("1", 1.0, True, None):
        told = "a job id is an int" if job_id is not None else "takes a job's id, or its sequence"
        with shop.session() as session, pytest.raises(TypeError, match=told):
            shop.cyclone.get(session, job_id)
