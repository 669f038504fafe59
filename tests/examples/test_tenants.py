"""Exports for many tenants."""

import pytest
from sqlalchemy import Engine, select

from cyclone_sqla import Cyclone
from cyclone_sqla.testing import CycloneEnv
from docs.examples import tenants
from docs.examples.tenants import (
    Export,
    close_account,
    cyclone,
    export,
    request_exports,
    waiting_exports,
)


@pytest.fixture(scope="session")
def cyclone_app() -> Cyclone:
    return cyclone


@pytest.fixture(scope="session", autouse=True)
def tables(cyclone_database: Engine) -> None:
    tenants.Base.metadata.create_all(cyclone_database)


def exported(env: CycloneEnv) -> list[tuple[str, str]]:
    rows = env.session.execute(select(Export.tenant, Export.report).order_by(Export.id))
    return [(tenant, report) for tenant, report in rows]


@pytest.mark.cyclone(auto_start=False)
def test_a_tenant_whose_export_hangs_holds_up_its_own_and_nobody_elses(
    cyclone_env: CycloneEnv,
) -> None:
    first, *_ = request_exports(cyclone_env.session, "acme", ["a", "b", "c"])
    request_exports(cyclone_env.session, "tiny", ["x", "y"])
    cyclone_env.crash(at="claimed", job=first)  # nothing is heard of this run any more

    cyclone_env.run_until_idle()

    assert exported(cyclone_env) == [("tiny", "x"), ("tiny", "y")]
    assert waiting_exports(cyclone_env.session, "acme") == 2
    cyclone_env.advance(minutes=2)
    cyclone_env.run_until_idle()
    assert exported(cyclone_env)[2:] == [("acme", report) for report in "abc"]


@pytest.mark.cyclone(auto_start=False)
def test_a_tenant_that_goes_takes_its_jobs_along_and_no_others(cyclone_env: CycloneEnv) -> None:
    request_exports(cyclone_env.session, "acme", ["done"])
    cyclone_env.run_until_idle()
    request_exports(cyclone_env.session, "acme", [f"{number}" for number in range(120)])
    request_exports(cyclone_env.session, "tiny", ["x"])

    assert close_account(cyclone_env.session, "acme", by="anna") == 120

    cyclone_env.run_until_idle()
    assert exported(cyclone_env) == [("tiny", "x")]
    assert {job.state for job in cyclone_env.jobs(export)} == {"completed", "cancelled"}
