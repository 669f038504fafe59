"""What a producer's account on PostgreSQL has to be granted, and no more."""

import uuid
from collections.abc import Callable

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from cyclone_sqla import Cyclone, JobSpec
from tests.databases import Database

FOR_JOBS = ["SELECT, INSERT ON cyclone_job"]
FOR_MANY = ["USAGE ON SEQUENCE cyclone_job_id_seq"]
FOR_POSITIONS = ["SELECT, INSERT, UPDATE ON cyclone_sequence"]
FOR_IDEMPOTENCY = ["SELECT, INSERT, UPDATE, DELETE ON cyclone_idempotency_key"]

cyclone = Cyclone(hints=False)


def one(session: Session) -> None:
    cyclone.enqueue(session, "work", {})
    cyclone.enqueue(session, "work", {}, unique=uuid.uuid4().hex, process_in=60)
    cyclone.enqueue(session, "work", {}, sequence="a")


def many(session: Session) -> None:
    cyclone.enqueue_many(session, [JobSpec(kind="work", arguments="{}")] * 2)


def positioned(session: Session) -> None:
    cyclone.enqueue(session, "work", {}, sequence="b", position=1)


def idempotent(session: Session) -> None:
    cyclone.enqueue(session, "work", {}, idempotency_key="once")


@pytest.mark.parametrize(
    ("act", "needed"),
    [(one, []), (many, FOR_MANY), (positioned, FOR_POSITIONS), (idempotent, FOR_IDEMPOTENCY)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_producer_needs_these_rights_alone(
    postgresql_database: Database, act: Callable[[Session], None], needed: list[str]
) -> None:
    role = f"producer_{uuid.uuid4().hex[:8]}"
    admin = postgresql_database.engine(isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.exec_driver_sql(f"CREATE ROLE {role} LOGIN")
        try:
            producer = postgresql_database.engine()
            event_role = f"SET ROLE {role}"
            sa.event.listen(producer, "begin", lambda c: c.exec_driver_sql(event_role))
            for right in FOR_JOBS:
                connection.exec_driver_sql(f"GRANT {right} TO {role}")
            if needed:
                with Session(producer) as session, pytest.raises(sa.exc.ProgrammingError):
                    act(session)
            for right in needed:
                connection.exec_driver_sql(f"GRANT {right} TO {role}")
            with Session(producer) as session, session.begin():
                act(session)
        finally:
            producer.dispose()
            connection.exec_driver_sql(f"DROP OWNED BY {role}")
            connection.exec_driver_sql(f"DROP ROLE {role}")
