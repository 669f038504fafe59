"""Many plain jobs are copied into PostgreSQL: stored as if inserted, all of them or none."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Connection, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from cyclone_sqla import JobRef, JobSpec, State
from cyclone_sqla.operations import COPY_FROM
from tests.databases import Database
from tests.life.hands import Hands

WORDS = "\\N \\. \\\\t \t \n \r \b \x7f ä \u2028 \U0001f600 \"q\" 's' %s %(f)s {} NULL"


@pytest.fixture
def hands(postgresql_database: Database) -> Iterator[Hands]:
    with closing(Hands(postgresql_database)) as hands:
        yield hands


def specs(**fields: Any) -> list[JobSpec]:
    """As many as are copied."""
    return [
        JobSpec(kind="work", arguments=json.dumps({"n": n}), **fields) for n in range(COPY_FROM)
    ]


@contextmanager
def statements_seen(hands: Hands) -> Iterator[list[str]]:
    """What the server was sent, by its own account: SQLAlchemy's listeners don't see a COPY."""
    seen: list[str] = []
    with hands.engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$"
            "BEGIN RAISE NOTICE '%%', split_part(current_query(), ' ', 1); RETURN NULL; END $$"
        )
        connection.exec_driver_sql(
            "CREATE TRIGGER note AFTER INSERT ON cyclone_job EXECUTE FUNCTION note()"
        )

    def listen(driver: Any, *_: object) -> None:
        driver.add_notice_handler(lambda notice: seen.append(notice.message_primary))

    hands.engine.dispose()
    event.listen(hands.engine, "connect", listen)
    yield seen
    event.remove(hands.engine, "connect", listen)


def enqueue(hands: Hands, jobs: list[JobSpec]) -> list[JobRef]:
    with hands.engine.begin() as connection:
        return hands.cyclone.enqueue_many(connection, jobs)


def test_many_plain_jobs_are_copied_and_others_inserted(hands: Hands) -> None:
    with statements_seen(hands) as seen:
        enqueue(hands, specs())
        assert seen == ["COPY"]
        for others in (
            specs()[1:],
            [*specs(), JobSpec(kind="work", arguments="{}", sequence="k")],
            specs(process_in=None, tenant="t"),
            [*specs(), JobSpec(kind="work", arguments="{}", idempotency_key="i")],
        ):
            del seen[:]
            enqueue(hands, others)
            assert set(seen) == {"WITH"}


def test_they_are_copied_through_an_async_session_too(
    hands: Hands, postgresql_database: Database
) -> None:
    async def story() -> None:
        engine = create_async_engine(postgresql_database.url)
        event.listen(engine.sync_engine, "connect", _note)
        async with AsyncSession(engine) as session:
            await hands.cyclone.enqueue_many(session, specs())
            bad = [spec._replace(queue="\ud800") for spec in specs()]
            with pytest.raises(UnicodeEncodeError):
                await hands.cyclone.enqueue_many(session, bad)
            await session.commit()
        await engine.dispose()

    notices: list[str] = []

    def _note(connection: Any, _record: object) -> None:
        driver = connection.driver_connection
        driver.add_notice_handler(lambda notice: notices.append(notice.message_primary))

    with statements_seen(hands):
        asyncio.run(story())
    assert notices == ["COPY"]
    assert len(_ids(hands)) == COPY_FROM


def test_the_answers_are_those_of_an_insert(hands: Hands) -> None:
    jobs = [s._replace(kind=f"k{i % 2}", queue=f"q{i % 3}") for i, s in enumerate(specs())]
    refs = enqueue(hands, jobs)

    assert [ref.id for ref in refs] == sorted({ref.id for ref in refs})
    for n, (spec, ref) in enumerate(zip(jobs, refs, strict=True)):
        assert ref == JobRef(ref.id, spec.kind, spec.queue, True, State.AVAILABLE)
        job = hands.job(ref.id)
        assert (job.kind, job.queue, json.loads(job.arguments)) == (spec.kind, spec.queue, {"n": n})


def test_no_character_is_lost_or_read_as_the_formats_own(hands: Hands) -> None:
    text = json.dumps([WORDS, {WORDS: None}], ensure_ascii=False)
    spaced = text.replace(",", ",\n\t\r ")
    jobs = [spec._replace(queue=WORDS, arguments=text) for spec in specs()]
    jobs[7] = jobs[7]._replace(arguments=spaced)
    refs = enqueue(hands, jobs)

    stored = [hands.job(ref.id) for ref in refs]
    assert {job.queue for job in stored} == {WORDS}
    assert [job.arguments for job in stored] == [job.arguments for job in jobs]


def test_a_row_that_is_refused_leaves_nothing_and_a_usable_transaction(hands: Hands) -> None:
    with hands.engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            " IF NEW.arguments::text LIKE '%%57%%' THEN RAISE 'not 57'; END IF; RETURN NEW; END $$"
        )
        connection.exec_driver_sql(
            "CREATE TRIGGER refuse BEFORE INSERT ON cyclone_job"
            " FOR EACH ROW EXECUTE FUNCTION refuse()"
        )
    with hands.engine.begin() as connection:
        with pytest.raises(DBAPIError, match="not 57"):
            hands.cyclone.enqueue_many(connection, specs())
        kept = hands.cyclone.enqueue_many(connection, specs()[:57])
    assert [job_id for (job_id,) in _ids(hands)] == [ref.id for ref in kept]


def test_a_text_that_has_no_encoding_leaves_a_usable_transaction(hands: Hands) -> None:
    jobs = specs()
    jobs[57] = jobs[57]._replace(queue="\ud800")
    with hands.engine.begin() as connection:
        with pytest.raises(UnicodeEncodeError):
            hands.cyclone.enqueue_many(connection, jobs)
        kept = hands.cyclone.enqueue_many(connection, specs()[:2])
    assert [job_id for (job_id,) in _ids(hands)] == [ref.id for ref in kept]


def _ids(hands: Hands) -> list[Any]:
    with hands.engine.connect() as connection:
        return list(connection.execute(sa.text("SELECT id FROM cyclone_job ORDER BY id")))


def test_under_row_level_security_they_are_inserted(hands: Hands) -> None:
    """COPY refuses it."""
    with hands.engine.begin() as connection:
        for statement in (
            "CREATE ROLE tenant_of_copy",
            "GRANT ALL ON ALL TABLES IN SCHEMA public TO tenant_of_copy",
            "GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO tenant_of_copy",
            "ALTER TABLE cyclone_job ENABLE ROW LEVEL SECURITY",
            "CREATE POLICY all_of_them ON cyclone_job USING (true) WITH CHECK (kind <> 'theirs')",
        ):
            connection.exec_driver_sql(statement)
    try:
        with statements_seen(hands) as seen, hands.engine.begin() as connection:
            connection.exec_driver_sql("SET LOCAL ROLE tenant_of_copy")
            hands.cyclone.enqueue_many(connection, specs())
            assert set(seen) == {"WITH"}
            with pytest.raises(DBAPIError, match="row-level security"), connection.begin_nested():
                hands.cyclone.enqueue_many(connection, [s._replace(kind="theirs") for s in specs()])
        assert len(_ids(hands)) == COPY_FROM
    finally:
        _drop_role(hands)


def _drop_role(hands: Hands) -> None:
    with hands.engine.begin() as connection:
        connection.exec_driver_sql("DROP OWNED BY tenant_of_copy")
        connection.exec_driver_sql("DROP ROLE tenant_of_copy")


def test_in_another_encoding_they_are_inserted(hands: Hands) -> None:
    with statements_seen(hands) as seen, hands.engine.connect() as connection:
        connection.exec_driver_sql("SET client_encoding = 'latin1'")
        hands.cyclone.enqueue_many(connection, specs(queue="café"))
        assert set(seen) == {"WITH"}
        assert _queues(connection) == {"café"}
        with pytest.raises(UnicodeEncodeError):
            hands.cyclone.enqueue_many(connection, specs(queue="\u20ac"))
        assert _queues(connection) == {"café"}, "the transaction can't be used any more"


def _queues(connection: Connection) -> set[str]:
    return set(connection.scalars(sa.text("SELECT DISTINCT queue FROM cyclone_job")))


def test_they_take_the_application_s_own_time(hands: Hands) -> None:
    hands.clock.advance(minutes=5)
    (ref, *_) = enqueue(hands, specs())
    job = hands.job(ref.id)
    assert job.run_at == job.created_at == hands.clock.now()
