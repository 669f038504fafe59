"""The pytest plugin, in the tests of a small application of its own."""

from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.databases import Database
from tests.testing.inner import Done, run_pytest

CONFTEST = """
import pytest
from sqlalchemy import CheckConstraint, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from cyclone_sqla import Context, Cyclone

cyclone = Cyclone()

class Base(DeclarativeBase): ...

class Receipt(Base):
    __tablename__ = "receipt"
    id: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(CheckConstraint("number >= 0"))

@cyclone.action
def receive(ctx: Context, number: int) -> None:
    ctx.session.add(Receipt(number=number))

@pytest.fixture(scope="session")
def cyclone_app():
    return cyclone

@pytest.fixture(scope="session", autouse=True)
def tables(cyclone_database):
    with cyclone_database.begin() as connection:
        if connection.dialect.name == "postgresql":  # processes of pytest-xdist come together
            connection.execute(text("SELECT pg_advisory_xact_lock(1)"))
        Base.metadata.create_all(connection)
"""

TESTS = """
import pytest
from sqlalchemy import func, select
from conftest import Receipt, receive

def count(env):
    return env.session.scalar(select(func.count()).select_from(Receipt))

@pytest.mark.parametrize("number", range({count}))
def test_a_commit_runs_the_job(cyclone_env, number):
    with cyclone_env.session.begin():
        receive.enqueue(cyclone_env.session, number=number)
    assert count(cyclone_env) == 1

@pytest.mark.parametrize("number", range({count}))
@pytest.mark.cyclone(auto_start=False)
def test_a_job_waits(cyclone_env, number):
    with cyclone_env.session.begin():
        receive.enqueue(cyclone_env.session, number=number)
    assert count(cyclone_env) == 0
    assert cyclone_env.run_until_idle() == 1
    assert count(cyclone_env) == 1
"""


ASYNC_CONFTEST = """
import pytest
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from cyclone_sqla import Context, Cyclone

cyclone = Cyclone()

class Base(DeclarativeBase): ...

class Receipt(Base):
    __tablename__ = "receipt"
    id: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[int]

@cyclone.action
async def receive(ctx: Context, number: int) -> None:
    ctx.async_session.add(Receipt(number=number))

@pytest.fixture(scope="session")
def cyclone_app():
    return cyclone

@pytest.fixture
def anyio_backend():
    return "asyncio"
"""

ASYNC_TESTS = """
import pytest
from sqlalchemy import func, select
from conftest import Base, Receipt, receive

pytestmark = pytest.mark.{runner}

async def count(env):
    await env.connection.run_sync(Base.metadata.create_all)
    return await env.session.scalar(select(func.count()).select_from(Receipt))

@pytest.mark.parametrize("number", range(3))
async def test_a_commit_runs_the_job(cyclone_async_env, number):
    assert await count(cyclone_async_env) == 0
    await receive.enqueue(cyclone_async_env.session, number=number)
    await cyclone_async_env.session.commit()
    assert await count(cyclone_async_env) == 1

@pytest.mark.cyclone(auto_start=False)
async def test_a_job_waits(cyclone_async_env):
    assert await count(cyclone_async_env) == 0
    await receive.enqueue(cyclone_async_env.session, number=1)
    await cyclone_async_env.session.commit()
    assert await count(cyclone_async_env) == 0
    assert await cyclone_async_env.run_until_idle() == 1
"""


def run(directory: Path, *options: str, tests: int, more: str = "") -> Done:
    """``more`` of conftest.py."""
    (directory / "conftest.py").write_text(CONFTEST + more)
    (directory / "test_receipts.py").write_text(TESTS.replace("{count}", str(tests // 2)))
    return run_pytest(directory, *options)


def run_async(directory: Path, runner: str, *options: str, more: str = "") -> Done:
    """With the plugin of this runner alone, and ``more`` of conftest.py."""
    (directory / "conftest.py").write_text(ASYNC_CONFTEST + more)
    (directory / "test_receipts.py").write_text(ASYNC_TESTS.replace("{runner}", runner))
    if runner == "anyio":
        return run_pytest(directory, *options)
    scope = "asyncio_default_fixture_loop_scope=function"
    return run_pytest(directory, "-p", "no:anyio", "-o", scope, *options, without=())


@pytest.mark.sqlite
def test_two_hundred_tests_run_in_memory_with_no_set_up(tmp_path: Path) -> None:
    done = run(tmp_path, tests=200)
    assert "200 passed" in done.stdout, done.stdout
    assert done.returncode == 0


OWN_ENGINE = """
from sqlalchemy import create_engine

@pytest.fixture(scope="session")
def cyclone_engine():
    engine = create_engine("{url}")
    yield engine
    engine.dispose()

@pytest.fixture(autouse=True)
def nothing_remained(cyclone_database):
    with cyclone_database.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM receipt")) == 0
"""

TOLD = """
@pytest.fixture(autouse=True)
def told(cyclone_database_url):
    with open("urls", "a") as urls:
        print(cyclone_database_url, file=urls)
"""

FAILING = """
import pytest
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session
from conftest import Receipt, receive

def test_a_session_inside_a_session(cyclone_env):
    with Session(cyclone_env.connection, join_transaction_mode="create_savepoint") as session:
        with session.begin_nested(), session.begin_nested():
            receive.enqueue(session, number=1)
        session.commit()
    assert cyclone_env.assert_completed(receive, number=1)

def test_what_fails_at_its_commit(cyclone_env):
    cyclone_env.session.add(Receipt(id=1, number=7))
    cyclone_env.session.commit()
    with pytest.raises(IntegrityError):
        receive.enqueue(cyclone_env.session, number=-1)
        cyclone_env.session.commit()
    assert cyclone_env.connection.in_transaction()
    assert cyclone_env.session.scalars(select(Receipt.number)).all() == [7]
    cyclone_env.assert_enqueued(receive, number=-1)
"""


def test_processes_share_the_applications_engine_and_leave_nothing_there(
    tmp_path: Path, postgresql_database: Database
) -> None:
    (tmp_path / "test_failing.py").write_text(FAILING)
    more = OWN_ENGINE.replace("{url}", postgresql_database.url)
    done = run(tmp_path, "-n", "2", tests=16, more=more)
    assert "18 passed" in done.stdout, done.stdout + done.stderr
    with postgresql_database.engine().connect() as connection:
        for table in ("cyclone_job", "cyclone_history", "receipt"):
            assert connection.scalar(sa.text(f"SELECT count(*) FROM {table}")) == 0


@pytest.mark.sqlite
def test_asynchronous_tests_run_by_pytest_asyncio_in_memory(tmp_path: Path) -> None:
    pytest.importorskip("pytest_asyncio")
    done = run_async(tmp_path, "asyncio")
    assert "4 passed" in done.stdout, done.stdout + done.stderr


def test_an_environment_is_in_the_event_loop_of_its_test_whatever_that_is(
    tmp_path: Path, postgresql_database: Database
) -> None:
    pytest.importorskip("pytest_asyncio")
    of_module = ASYNC_TESTS.replace("{runner}", "asyncio(loop_scope='module')")
    (tmp_path / "test_of_module.py").write_text(of_module)
    url = postgresql_database.url_for("asyncpg")  # which refuses every other loop
    session = "asyncio_default_test_loop_scope=session"
    done = run_async(tmp_path, "asyncio", "--cyclone-database-url", url, "-o", session)
    assert "8 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.postgresql
def test_asynchronous_tests_run_by_anyio_on_a_private_server(tmp_path: Path) -> None:
    pytest.importorskip("anyio")
    done = run_async(tmp_path, "anyio", "--cyclone-database-url", "postgresql", more=TOLD)
    assert "4 passed" in done.stdout, done.stdout + done.stderr
    (url,) = set((tmp_path / "urls").read_text().splitlines())
    assert not Path(str(sa.make_url(url).query["host"])).exists()


@pytest.mark.sqlite
def test_who_has_said_too_little_is_told(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(ASYNC_CONFTEST.replace("def cyclone_app", "def _app"))
    (tmp_path / "test_it.py").write_text(
        "def test_it(cyclone_env): ...\ndef test_async(cyclone_async_env): ...\n"
    )
    done = run_pytest(tmp_path)
    assert "say which application is tested" in done.stdout
    assert "anyio's (and pytest.mark.anyio on the test), or pytest-asyncio" in done.stdout
