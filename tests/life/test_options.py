"""What an enqueue may say beside the arguments: stored as it is said, or refused by its name."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from cyclone_sqla import InvalidJobError, Job
from tests.databases import Database
from tests.life.hands import ManualClock
from tests.shop import Shop, statements_of

NOON = datetime(2031, 5, 4, 12, tzinfo=UTC)
IN_TOKYO = timezone(timedelta(hours=9))


def test_every_option_is_stored_however_the_job_goes_in(database: Database) -> None:
    shop = Shop(database, clock=ManualClock(), instance="web-1")
    mail = shop.mail.using(
        queue="slow",
        priority=-32768,
        process_at=datetime(2031, 5, 5, 9, tzinfo=IN_TOKYO),
        deadline=datetime(2031, 5, 6, tzinfo=UTC),
        max_attempts=1_000_000,
        timeout=timedelta(seconds=1.5),
        tenant="müller",
        trace_id="00-4bf9-01",
        headers={"a": "ä", "b": ""},
    )
    with shop.session() as session, session.begin():
        mail.using(unique="1").enqueue(session, "anna")
        mail.using(unique="2", idempotency_key="2").enqueue(session, "anna")
        many = [mail.using(unique="3"), mail.using(unique="4", idempotency_key="4")]
        shop.cyclone.enqueue_many(session, [each.job("anna") for each in many])
    jobs = shop.jobs()
    assert [job.unique_key for job in jobs] == ["1", "2", "3", "4"]
    for job in jobs:
        assert _options_of(job) == {
            "queue": "slow",
            "priority": -32768,
            "state": "pending",
            "waits_for": "time",
            "run_at": datetime(2031, 5, 5, tzinfo=UTC),
            "deadline": datetime(2031, 5, 6, tzinfo=UTC),
            "max_attempts": 1_000_000,
            "timeout": timedelta(seconds=1.5),
            "origin": "web-1",
            "tenant": "müller",
            "trace_id": "00-4bf9-01",
            "headers": {"a": "ä", "b": ""},
        }


def test_what_is_not_said_has_its_default(shop: Shop) -> None:
    with shop.session() as session, session.begin():
        shop.mail.enqueue(session, "anna")
        shop.cyclone.enqueue_many(session, [shop.mail.using(queue=None, unique=None).job("bert")])
    for job in shop.jobs():
        assert _options_of(job) == {
            "queue": "default",
            "priority": 0,
            "state": "available",
            "waits_for": None,
            "run_at": job.created_at,
            "deadline": None,
            "max_attempts": 25,
            "timeout": None,
            "origin": None,
            "tenant": None,
            "trace_id": None,
            "headers": None,
        }
        assert (job.unique_key, job.attempt, job.lease, job.worker) == (None, 0, 0, None)


def _options_of(job: Job) -> dict[str, Any]:
    names = (
        "queue", "priority", "state", "waits_for", "run_at", "deadline", "max_attempts", "timeout",
        "origin", "tenant", "trace_id", "headers",
    )  # fmt: skip
    return {name: getattr(job, name) for name in names}


def test_the_nearest_word_wins(shop: Shop) -> None:
    @shop.cyclone.action(queue="ledger", priority=5, max_attempts=3, timeout=10)
    def post(account: int) -> None:
        """Nobody runs it."""

    with shop.session() as session, session.begin():
        post.enqueue(session, 1)
        post.using(priority=1, timeout=20.5).using(priority=2).enqueue(session, 1)
        shop.cyclone.enqueue(session, "post", {"account": 1}, queue="other")
    found = [(job.queue, job.priority, job.max_attempts, job.timeout) for job in shop.jobs()]
    assert found == [
        ("ledger", 5, 3, timedelta(seconds=10)),
        ("ledger", 2, 3, timedelta(seconds=20.5)),
        ("other", 5, 3, timedelta(seconds=10)),
    ]


BAD: list[tuple[Mapping[str, object], str]] = [
    ({"queue": ""}, "queue: must not be empty"),
    ({"queue": "a\nb"}, "queue: must be printable"),
    ({"queue": "q" * 257}, "queue: is 257 bytes long"),
    ({"priority": 32768}, "priority: must be from -32768 to 32767"),
    ({"priority": "1"}, "priority: must be an int, not str"),
    ({"priority": True}, "priority: must be an int, not bool"),
    ({"unique": "u\0"}, "unique: holds a NUL"),
    ({"on_duplicate": "ignore"}, "on_duplicate: must be 'raise' or 'return'"),
    ({"idempotency_key": ""}, "idempotency_key: must not be empty"),
    ({"process_in": -1}, "process_in: must not be negative"),
    ({"process_in": float("nan")}, "process_in: must be at most 36500 days"),
    ({"process_in": timedelta(days=36_501)}, "process_in: must be at most 36500 days"),
    ({"process_in": "1"}, "process_in: must be a timedelta or a number of seconds, not str"),
    ({"process_at": datetime(2031, 1, 1)}, "process_at: naive datetime 2031-01-01"),  # noqa: DTZ001
    ({"process_at": "2031-01-01"}, "process_at: must be an aware datetime, not str"),
    ({"process_at": datetime(1, 1, 1, tzinfo=IN_TOKYO)}, "process_at: .* is out of range"),
    ({"process_at": NOON, "process_in": 1}, "process_in, process_at: give one of them"),
    ({"deadline": datetime(2031, 1, 1)}, "deadline: naive datetime"),  # noqa: DTZ001
    ({"max_attempts": 0}, "max_attempts: must be from 1 to 1000000"),
    ({"timeout": 0}, "timeout: must be more than zero"),
    ({"tenant": "\ud800"}, "tenant: holds a lone surrogate"),
    ({"trace_id": 7}, "trace_id: must be a str, not int"),
    ({"headers": {"a": 1}}, r"headers\['a'\]: must be a str, not int"),
    ({"headers": {"a": "\0"}}, r"headers\['a'\]: holds a NUL"),
    ({"headers": ["a"]}, "headers: must map str to str, not be a list"),
    ({"headers": {"a": "x" * 70_000}}, "headers: take 70009 bytes of JSON"),
    ({"que": "a"}, "que: there is no such option; did you mean 'queue'?"),
]


def test_a_bad_option_is_refused_by_its_name_before_any_sql(shop: Shop) -> None:
    with shop.session() as session, statements_of(shop.engine) as sent:
        for options, complaint in BAD:
            given: Any = options
            with pytest.raises(InvalidJobError, match=f"^{complaint}"):
                shop.mail.using(**given).enqueue(session, "anna")
            with pytest.raises(InvalidJobError, match=f"^{complaint}"):
                shop.cyclone.enqueue(session, "elsewhere", {}, **given)
        assert sent == []
    assert shop.jobs() == []


def test_a_kind_is_a_name(shop: Shop) -> None:
    bad: Any
    for bad in ("", "a\nb", "k" * 257, "\0", None, 7):
        with shop.session() as session, pytest.raises(InvalidJobError, match=r"^kind: "):
            shop.cyclone.enqueue(session, bad, {})
    assert shop.jobs() == []
