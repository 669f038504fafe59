"""Many jobs in one step: the answer to each input at its place, and all or nothing."""

import json
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from cyclone_sqla import DuplicateError, JobRef, State, operations
from tests.databases import Database
from tests.life.hands import ManualClock
from tests.shop import Order, Shop, statements_of


def test_no_jobs_are_no_work(shop: Shop) -> None:
    with shop.session() as session, statements_of(shop.engine) as sent:
        assert shop.cyclone.enqueue_many(session, []) == []
        assert sent == []


def test_the_answer_to_each_input_is_at_its_place(shop: Shop) -> None:
    specs = [
        shop.ship.using(unique=f"{-i % 700}" if i % 3 else None, queue=f"q{i % 2}").job(i)
        for i in range(2_100)
    ]
    specs = [spec for i, spec in enumerate(specs) if i < 700 or spec.unique is None]
    with shop.session() as session, session.begin():
        refs = shop.cyclone.enqueue_many(session, (spec for spec in specs))
    ids = [ref.id for ref in refs]
    assert ids == sorted(set(ids)), "ids don't rise in the order of the input"
    by_id = {job.id: job for job in shop.jobs()}
    for spec, ref in zip(specs, refs, strict=True):
        stored = by_id[ref.id]
        assert json.loads(stored.arguments) == json.loads(spec.arguments)
        assert (ref.queue, ref.kind) == (stored.queue, stored.kind) == (spec.queue, spec.kind)
        assert stored.unique_key == spec.unique


LATER = datetime(2031, 2, 3, 4, 5, 6, 789_012, tzinfo=timezone(timedelta(hours=5, minutes=45)))
WORDS = 'a "b" \\n \u2028 \U0001f600 {"c": [1]} \'d\' :e %s %(f)s'


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"queue": WORDS.replace("\u2028", ""), "priority": -7, "max_attempts": 3},
        {"unique": WORDS, "tenant": "t", "trace_id": "0" * 32},
        {"sequence": WORDS, "on_failure": "halt", "position": 1},
        {"process_at": LATER, "deadline": datetime.max.replace(tzinfo=UTC)},
        {"process_in": timedelta(days=36_500), "timeout": timedelta(microseconds=1)},
        {"process_in": timedelta(days=3, hours=4, microseconds=5), "timeout": 86_400},
        {"headers": {WORDS: WORDS, "empty": ""}},
    ],
)  # fmt: skip
@pytest.mark.parametrize("others", [1, operations.COPY_FROM])
def test_a_job_among_many_is_stored_like_one_alone(
    database: Database, options: dict[str, Any], others: int
) -> None:
    shop = Shop(database, clock=ManualClock())
    details = {WORDS: [WORDS, 10**30, -0.0, 1e-7, None]}
    own = {"sequence", "unique"} & options.keys()

    def given(number: int) -> dict[str, Any]:
        return options | {name: f"{options[name]}{number}" for name in own}

    with shop.session() as session, session.begin():
        shop.ship.using(**given(1)).enqueue(session, 1, details)
        jobs = [shop.ship.using(**given(2)).job(1, details), *[shop.mail.job("b")] * others]
        shop.cyclone.enqueue_many(session, jobs)
    alone, among, *_ = (dict(zip(shop.job_table.c.keys(), row, strict=True)) for row in shop.rows())
    assert alone.keys() == among.keys()
    differ = {name for name, value in alone.items() if value != among[name]}
    assert differ == {"id"} | {f"{name}_key" for name in own}


@pytest.mark.parametrize("options", [{}, {"unique": "u"}, {"idempotency_key": "i"}])
def test_the_caller_gets_no_savepoint_of_ours(shop: Shop, options: dict[str, Any]) -> None:
    with shop.session() as session, session.begin():
        jobs = [shop.mail.job("a"), shop.mail.using(**options).job("b")]
        shop.cyclone.enqueue_many(session, jobs)
        assert not session.connection().in_nested_transaction()


def test_one_duplicate_means_that_nothing_is_inserted(shop: Shop) -> None:
    with shop.session() as session, session.begin():
        held = shop.mail.using(unique="held").enqueue(session, "holder")
    before = shop.rows()
    specs = [shop.mail.using(unique=f"{i}").job("a") for i in range(1_000)]
    specs[17] = specs[400] = shop.mail.using(unique="held").job("b")
    specs[901] = shop.mail.using(unique="5").job("c")
    specs[902] = shop.ship.using(unique="held").job(1)
    with shop.session() as session, session.begin():
        with pytest.raises(DuplicateError) as refused:
            shop.cyclone.enqueue_many(session, specs)
        session.add(Order(note="still usable"))
    found = [(d.index, d.kind, d.key, d.job_id) for d in refused.value.duplicates]
    assert found == [
        (17, "mail", "held", held.id),
        (400, "mail", "held", held.id),
        (901, "mail", "5", None),
    ]
    assert refused.value.job_id == held.id
    assert "(and 2 more)" in str(refused.value)
    assert shop.rows() == before
    assert shop.notes() == ["still usable"]


def test_a_twin_in_the_same_call_is_called_so(shop: Shop) -> None:
    with shop.session() as session:
        with pytest.raises(DuplicateError, match="'u': another job of the same call") as refused:
            shop.cyclone.enqueue_many(session, [shop.mail.using(unique="u").job("a")] * 3)
        assert [(d.index, d.job) for d in refused.value.duplicates] == [(1, None), (2, None)]


def test_duplicates_can_be_answered_with_their_holders(shop: Shop) -> None:
    with shop.session() as session, session.begin():
        held = shop.mail.using(unique="held", queue="slow").enqueue(session, "holder")
    specs = [shop.mail.using(unique=f"{i}").job("a") for i in range(1_000)]
    specs[0] = specs[17] = shop.mail.using(unique="held").job("b")
    specs[901] = specs[5]
    with shop.session() as session, session.begin():
        refs = shop.cyclone.enqueue_many(session, specs, on_duplicate="return")
    assert len(refs) == 1_000
    with shop.session() as session, statements_of(shop.engine) as sent:
        again = shop.cyclone.enqueue_many(session, specs, on_duplicate="return")
        assert not any("INSERT" in statement for statement in sent)
    assert [ref.id for ref in again] == [ref.id for ref in refs]
    skipped = {i: ref for i, ref in enumerate(refs) if not ref.created}
    assert skipped == {
        0: JobRef(held.id, "mail", "slow", created=False, state=State.AVAILABLE),
        17: JobRef(held.id, "mail", "slow", created=False, state=State.AVAILABLE),
        901: JobRef(refs[5].id, "mail", "default", created=False, state=State.AVAILABLE),
    }
    assert shop.job_ids() == sorted({held.id, *(ref.id for ref in refs)})


def test_each_job_may_say_for_itself_what_a_duplicate_means(shop: Shop) -> None:
    with shop.session() as session, session.begin():
        held = shop.mail.using(unique="held").enqueue(session, "holder")
    patient = shop.mail.using(unique="held", on_duplicate="return").job("a")
    with shop.session() as session, session.begin():
        assert [ref.id for ref in shop.cyclone.enqueue_many(session, [patient])] == [held.id]
        strict = shop.mail.using(unique="held").job("b")
        with pytest.raises(DuplicateError) as refused:
            shop.cyclone.enqueue_many(session, [patient, shop.mail.job("c"), strict])
        assert [duplicate.index for duplicate in refused.value.duplicates] == [2]
        with pytest.raises(DuplicateError) as refused:
            shop.cyclone.enqueue_many(session, [patient], on_duplicate="raise")
    assert shop.job_ids() == [held.id]


def test_more_jobs_than_one_statement_takes(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "INSERT_BATCH", 10)
    specs = [shop.ship.using(unique=f"{-i % 40}", queue=f"q{i}").job(i) for i in range(45)]
    with shop.session() as session, session.begin():
        with pytest.raises(DuplicateError) as refused:
            shop.cyclone.enqueue_many(session, specs)
        assert [duplicate.index for duplicate in refused.value.duplicates] == [40, 41, 42, 43, 44]
        refs = shop.cyclone.enqueue_many(session, specs, on_duplicate="return")
    ids = [ref.id for ref in refs]
    assert ids[40:] == ids[:5]
    assert shop.job_ids() == ids[:40]
    assert [job.queue for job in shop.jobs()] == [f"q{i}" for i in range(40)]


def test_more_json_than_one_statement_takes(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "INSERT_SIZE", 1_000)
    lengths = [10, 990, 2_000, 10, 10, 1_500, 400, 400, 400]
    specs = [shop.mail.job("x" * length) for length in lengths]
    with shop.session() as session, session.begin(), statements_of(shop.engine) as sent:
        refs = shop.cyclone.enqueue_many(session, specs)
    assert shop.job_ids() == [ref.id for ref in refs]
    found = [len(shop.mail.decode(job.arguments)[1]["to"]) for job in shop.jobs()]
    assert found == lengths
    assert sum("INSERT" in statement for statement in sent) == 7


def test_jobs_of_a_kind_stay_in_order_among_others(shop: Shop) -> None:
    with shop.session() as session, session.begin():
        first = shop.mail.enqueue(session, "a")
        many = shop.cyclone.enqueue_many(session, [shop.mail.job("b"), shop.mail.job("c")])
        last = shop.mail.enqueue(session, "d")
    assert shop.job_ids() == [first.id, *(ref.id for ref in many), last.id]


def test_a_refused_job_undoes_what_was_said_of_idempotency_keys(shop: Shop) -> None:
    with shop.session() as session, session.begin():
        shop.mail.using(unique="held").enqueue(session, "holder")
    before = shop.rows()
    once, plain = shop.mail.using(idempotency_key="once"), shop.mail.using(unique="held")
    via_holder = plain.using(idempotency_key="via", on_duplicate="return")
    with shop.session() as session, session.begin():
        for specs in (
            [once.job("a"), via_holder.job("b"), plain.using(idempotency_key="z").job("c")],
            [plain.job("a"), once.job("b"), via_holder.job("c")],
            [via_holder.job("a"), once.job("b"), plain.job("c"), shop.mail.job("d")],
        ):
            with pytest.raises(DuplicateError):
                shop.cyclone.enqueue_many(session, specs)
    assert shop.rows() == before
    with shop.session() as session, session.begin():
        for key in ("once", "via", "z"):
            assert shop.mail.using(idempotency_key=key).enqueue(session, "new").created


def test_every_duplicate_is_listed_with_and_without_an_idempotency_key(shop: Shop) -> None:
    with shop.session() as session, session.begin():
        held = shop.mail.using(unique="held").enqueue(session, "holder")
    strict = shop.mail.using(unique="held")
    specs = [
        strict.using(idempotency_key="2").job("a"),
        shop.mail.using(unique="u", idempotency_key="3").job("b"),
        strict.job("c"),
        strict.using(idempotency_key="1").job("d"),
        shop.mail.using(unique="u", idempotency_key="0").job("e"),
        shop.mail.using(unique="u").job("f"),
    ]
    with shop.session() as session, pytest.raises(DuplicateError) as refused:
        shop.cyclone.enqueue_many(session, specs)
    assert [(d.index, d.job_id) for d in refused.value.duplicates] == [
        (0, held.id), (2, held.id), (3, held.id), (4, None), (5, None),
    ]  # fmt: skip
