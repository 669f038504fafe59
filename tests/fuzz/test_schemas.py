"""A schema has any name, or one that is refused: then nothing is made."""

from contextlib import closing
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Engine
from sqlalchemy.schema import DropSchema
from sqlalchemy.sql import quoted_name

from cyclone_sqla import Cyclone, CycloneError, WorkerSettings, admission, operations
from cyclone_sqla.lifecycle import State
from cyclone_sqla.migrations import migrate_database
from cyclone_sqla.operations import Claiming, Retention, Settlement
from cyclone_sqla.outcomes import Completed
from tests.databases import Database
from tests.fuzz.nasty import EXAMPLES, TEXTS, examples

SHORT = st.one_of(TEXTS, st.text(min_size=1, max_size=8))


@pytest.mark.timeout(120 + 2 * EXAMPLES)
def test_a_queue_lives_in_a_schema_of_any_name_that_is_not_refused(database: Database) -> None:
    engine = database.engine()

    @examples(6)
    @given(name=SHORT)
    def live(name: str) -> None:
        try:
            migrate_database(database.url, schema=name)
        except CycloneError:
            return
        assert database.dialect == "postgresql"
        try:
            live_in(engine, name)
        finally:
            with engine.begin() as connection:
                connection.execute(DropSchema(quoted_name(name, quote=True), cascade=True))

    live()


def live_in(engine: Engine, schema: str) -> None:
    """A life from the first step to the last."""
    cyclone = Cyclone(engine, schema=schema, hints=False)
    dialect, settings = cyclone.dialect("postgresql"), WorkerSettings()
    with engine.begin() as connection:
        job_id = cyclone.enqueue(connection, "work", {}, sequence="a", unique="b").id
        cyclone.enqueue_many(connection, [])
    worker_engine = dialect.worker_engine(engine, settings)
    wanted = Claiming({"default": 1}, ["work"], "worker", timedelta(minutes=1))
    with closing(dialect.hold(worker_engine, settings, takes_turns=True)) as held:
        with held.step() as connection:
            operations.look_ahead(connection, dialect)
            admission.admit(connection, dialect, 0, 10)
            (job,) = operations.claim(connection, dialect, wanted)
        end = Settlement(job.id, job.lease, 1, "worker", Completed(None), "a")
        with held.step() as connection:
            operations.settle_and_claim(connection, dialect, [end], wanted, history_limit=1)
        with engine.connect() as connection:
            assert cyclone.get(connection, job_id).state == "completed"
        with held.transaction() as connection:
            place = Retention(State.COMPLETED, timedelta(0), False)
            operations.prune(connection, dialect, place, None, 10)
    worker_engine.dispose()
