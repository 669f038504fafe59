"""`cyclone-sqla demo`: what it shows, what it proves, and that it leaves nothing behind."""

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from cyclone_sqla import Job, Worker
from cyclone_sqla.cli import demo_shop
from cyclone_sqla.cli.demo_checks import checks
from cyclone_sqla.cli.demo_traffic import Books, open_shop, take_orders
from cyclone_sqla.cli.options import DATABASE_URL
from tests.databases import Database
from tests.processes import PATIENCE, Process
from tests.waiting import wait_until

COMMITTED = 25
"""The number of an order that every demo commits, when it takes at least five."""

ROLLED_BACK = 1
"""The number of an order that every demo rolls back."""

ENDLESS = "100000"
"""So many jobs that a test is over before they are."""


class Demo(Process):
    """A demo, with a directory of its own for temporary files."""

    def __init__(self, popen: "subprocess.Popen[bytes]", output: Path, temporary: Path) -> None:
        super().__init__(popen, output)
        self._temporary = temporary

    def left_files(self) -> list[str]:
        """What it has not removed."""
        return [path.name for path in self._temporary.iterdir()]

    def workers(self) -> list[psutil.Process]:
        """Its worker processes, when both are there."""
        wait_until(lambda: len(self.children()) == 2, "there are two workers", within=PATIENCE)
        return self.children()


Start = Callable[..., Demo]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a demo, or a program that calls it; nothing of it is left after the test."""
    temporary, output = tmp_path / "temporary", tmp_path / "output"
    temporary.mkdir()
    started: list[Demo] = []

    def start(*options: str, program: str = "", **environment: str) -> Demo:
        how = ["-c", program] if program else ["-m", "cyclone_sqla", "demo"]
        with output.open("wb") as file:
            popen = subprocess.Popen(
                [sys.executable, *how, *options],
                cwd=tmp_path,
                env={**os.environ, "TMPDIR": str(temporary), **environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        started.append(Demo(popen, output, temporary))
        return started[-1]

    yield start
    for each in started:
        each.clear_away()


def _assert_all_is_well(demo: Demo) -> None:
    """Every check holds, nothing has warned, and no file is left."""
    assert demo.exit_code() == 0, demo.lines()
    assert len([line for line in demo.lines() if line.startswith("ok ")]) == 9
    assert [line for line in demo.lines() if "Warning" in line] == []
    assert demo.left_files() == []


# ---- what it shows -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.sqlite
def test_a_thousand_jobs_on_sqlite_need_no_set_up(start: Start) -> None:
    demo = start()
    _assert_all_is_well(demo)
    assert "  1,000 of 1,000 jobs have run" in demo.lines()
    assert [line for line in demo.lines() if line.startswith("Killed: one worker, in the middle")]


def test_on_postgresql_it_touches_only_what_it_makes(
    start: Start, postgresql_database: Database
) -> None:
    before = _catalog(postgresql_database)
    demo = start("--jobs", "100", "--database-url", postgresql_database.url_for("asyncpg"))
    _assert_all_is_well(demo)
    assert _catalog(postgresql_database) == before


def _catalog(database: Database) -> list[tuple[str, str | None]]:
    """Every schema, and every table, index, view and sequence in one."""
    names = text(
        "SELECT nspname, relname FROM pg_namespace LEFT JOIN pg_class "
        "ON relnamespace = pg_namespace.oid WHERE nspname NOT LIKE 'pg\\_t%' ORDER BY 1, 2"
    )
    with database.engine().connect() as connection:
        return [(row.nspname, row.relname) for row in connection.execute(names)]


@pytest.mark.sqlite
def test_a_file_of_somebody_else_is_refused(start: Start, sqlite_database: Database) -> None:
    demo = start("--database-url", sqlite_database.url)
    assert demo.exit_code() == 2, demo.lines()
    (line,) = demo.lines()
    assert "not there yet" in line
    with sqlite_database.engine().connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM cyclone_job")) == 0
    assert demo.left_files() == []


def test_a_database_that_is_not_supported_is_one_line(start: Start) -> None:
    demo = start("--database-url", "mysql://user:secret@host/shop")
    assert demo.exit_code() == 2, demo.lines()
    assert demo.lines() == ["Error: mysql is not supported: use PostgreSQL or SQLite"]
    assert demo.left_files() == []


@pytest.mark.slow
@pytest.mark.sqlite
def test_a_named_file_is_removed_unless_it_is_to_be_kept(start: Start, tmp_path: Path) -> None:
    options = ("--jobs", "5", "--database-url", "sqlite:///new.db")
    demo = start(*options)
    assert demo.exit_code() == 0, demo.lines()
    assert not list(tmp_path.glob("new.db*"))
    kept = start(*options, "--keep")
    assert kept.exit_code() == 0, kept.lines()
    assert (tmp_path / "new.db").exists()
    (logs,) = kept.left_files()
    assert logs in "".join(kept.lines())


@pytest.mark.slow
@pytest.mark.sqlite
def test_a_terminal_shows_bars_and_a_file_plain_lines(start: Start, tmp_path: Path) -> None:
    plain = start("--jobs", "20")
    assert plain.exit_code() == 0, plain.lines()
    assert "\x1b" not in "".join(plain.lines())
    shown = _on_a_terminal([sys.executable, "-m", "cyclone_sqla", "demo", "--jobs", "20"], tmp_path)
    assert "\x1b" in shown
    assert "20/20" in shown
    assert "jobs have run" not in shown


def _on_a_terminal(command: list[str], directory: Path) -> str:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "TMPDIR": str(directory)}
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        shown = b"".join(iter(lambda: _read(ours), b""))
    os.close(ours)
    assert process.returncode == 0, shown
    return shown.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # how Linux says that nobody writes to it any more
        return b""


# ---- what its processes load ---------------------------------------------------------------------

WITNESS = """
import os, sys
file = os.open(os.path.join(os.environ["WITNESS"], str(os.getpid())), os.O_CREAT | os.O_WRONLY)
os.write(file, " ".join(sys.orig_argv).encode() + b"\\n")

def note(event, values):
    if event == "import":
        os.write(file, values[0].encode() + b"\\n")

sys.addaudithook(note)
"""
"""Notes every import of a process, tried or done, from its very start."""


@pytest.mark.sqlite
def test_on_sqlite_no_process_imports_psycopg_and_no_worker_alembic_or_rich(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITNESS)
    (tmp_path / "seen").mkdir()
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    demo = start("--jobs", "20", PYTHONPATH=path, WITNESS=str(tmp_path / "seen"))
    assert demo.exit_code() == 0, demo.lines()
    seen = [path.read_text().splitlines() for path in (tmp_path / "seen").iterdir()]
    imports = [{name.split(".")[0] for name in names} for _, *names in seen]
    assert not [names for names in imports if "psycopg" in names]
    assert not [names for names in imports if "sqlalchemy" not in names]
    light = [names for names in imports if not names & {"alembic", "rich"}]
    assert len(light) == sum(" work " in command for command, *_ in seen) == 2


# ---- what it proves ------------------------------------------------------------------------------

THIEF = """
from sqlalchemy import DDL, event
from cyclone_sqla.cli import demo_shop, main

thief = DDL(
    "CREATE TRIGGER thief AFTER INSERT ON demo_entry WHEN new.order_number = 25 "
    "BEGIN DELETE FROM demo_entry WHERE id = new.id; END"
)
event.listen(demo_shop.Entry.__table__, "after_create", thief)
main(["demo", "--jobs", "20"])
"""


@pytest.mark.sqlite
def test_a_run_that_loses_an_effect_fails_and_names_the_check(start: Start) -> None:
    demo = start(program=THIEF)
    assert demo.exit_code() == 1, demo.lines()
    name = "each order is in the ledger exactly once"
    assert [line for line in demo.lines() if line.startswith(f"FAILED  {name}")]
    assert demo.lines()[-1] == f"Error: the demo failed: {name} (1 order (25): not one right entry)"
    assert demo.left_files() == []


@pytest.mark.sqlite
def test_a_run_that_loses_a_worker_fails_and_names_it(start: Start) -> None:
    demo = start("--jobs", ENDLESS)
    lost, other = demo.workers()
    lost.kill()
    assert demo.exit_code() == 1, demo.lines()
    assert "every other worker stayed to the end (worker-" in demo.lines()[-1]
    assert not other.is_running()
    assert demo.left_files() == []


@pytest.fixture
def books(sqlite_database: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[Books]:
    """Those of a shop whose orders are taken and whose jobs have run."""
    monkeypatch.setenv(DATABASE_URL, sqlite_database.url)
    demo_shop.engine.cache_clear()
    books = Books()
    open_shop()
    assert list(take_orders(40, books))
    with Worker(demo_shop.cyclone, database=demo_shop.engine(), queues={demo_shop.QUEUE: 2}):
        wait_until(_all_over, "all jobs are over", within=PATIENCE)
    yield books
    demo_shop.engine().dispose()
    demo_shop.engine.cache_clear()


def _all_over() -> bool:
    with Session(demo_shop.engine()) as session:
        return session.query(Job).where(~Job.is_terminal).count() == 0


def _failed(books: Books) -> set[str]:
    with Session(demo_shop.engine()) as session:
        return {check.name for check in checks(session, books) if check.trouble}


def test_the_books_know_what_was_rolled_back(books: Books) -> None:
    assert COMMITTED in books.committed
    assert ROLLED_BACK in books.rolled_back
    assert books.committed.keys().isdisjoint(books.rolled_back)
    assert (len(books.committed), books.rollbacks > 0, books.savepoints > 0) == (40, True, True)
    assert _failed(books) == set()


ORDERS = "every committed order is there"
JOBS = "each has its one job"
ROLLBACKS = "nothing is left of what was rolled back"
COMPLETED = "every job is completed"
LEDGER = "each order is in the ledger exactly once"
IN_ORDER = "each account's orders were charged in their order"
OVERLAP = "no two of an account were charged at a time"
BALANCES = "the balances are right"

JOB_OF = f"json_extract(arguments, '$.order_number') = {COMMITTED}"
SPOILED_JOB = (
    "INSERT INTO cyclone_job (kind, queue, priority, state, arguments, run_at, max_attempts, "
    "created_at, updated_at, finished_at) SELECT kind, queue, priority, state, "
    f"json_set(arguments, '$.order_number', {{number}}), run_at, max_attempts, created_at, "
    f"updated_at, finished_at FROM cyclone_job WHERE {JOB_OF}"
)
SPOILED_ENTRY = (
    "INSERT INTO demo_entry (order_number, account_id, amount, began, ended) SELECT {number}, "
    "account_id, amount, (SELECT max(ended) FROM demo_entry), (SELECT max(ended) FROM demo_entry) "
    f"FROM demo_entry WHERE order_number = {COMMITTED}"
)
SPOILED_ORDER = (
    "INSERT INTO demo_order (number, account_id, amount) SELECT {number}, account_id, amount "
    f"FROM demo_order WHERE number = {COMMITTED}"
)


@pytest.mark.parametrize(
    ("spoil", "failed"),
    [
        (f"DELETE FROM demo_order WHERE number = {COMMITTED}", {ORDERS}),
        (f"UPDATE demo_order SET amount = 1 WHERE number = {COMMITTED}", {ORDERS}),
        (f"DELETE FROM cyclone_job WHERE {JOB_OF}", {JOBS}),
        (SPOILED_JOB.format(number=COMMITTED), {JOBS}),
        (SPOILED_JOB.format(number=ROLLED_BACK), {ROLLBACKS}),
        (SPOILED_ORDER.format(number=ROLLED_BACK), {ROLLBACKS}),
        (SPOILED_ENTRY.format(number=ROLLED_BACK), {ROLLBACKS, LEDGER, IN_ORDER}),
        (f"UPDATE cyclone_job SET state = 'discarded' WHERE {JOB_OF}", {COMPLETED}),
        (f"DELETE FROM demo_entry WHERE order_number = {COMMITTED}", {LEDGER}),
        (SPOILED_ENTRY.format(number=COMMITTED), {LEDGER, IN_ORDER}),
        (
            f"UPDATE demo_entry SET id = id + 1000 WHERE order_number = {COMMITTED}",
            {IN_ORDER, OVERLAP},
        ),
        (f"UPDATE demo_entry SET ended = ended + 60 WHERE order_number = {COMMITTED}", {OVERLAP}),
        (f"UPDATE demo_entry SET amount = 1 WHERE order_number = {COMMITTED}", {LEDGER}),
        ("UPDATE demo_account SET balance = balance + 1 WHERE id = 3", {BALANCES}),
    ],
)
def test_what_is_spoiled_fails_the_check_that_looks_at_it(
    books: Books, spoil: str, failed: set[str]
) -> None:
    with demo_shop.engine().begin() as connection:
        assert connection.execute(text(spoil)).rowcount == 1
    assert _failed(books) == failed


# ---- how it ends ---------------------------------------------------------------------------------

INTERRUPTED = (130, -signal.SIGINT)
"""For a shell both are 130. Python 3.11 ends itself by the signal if it met it inside ``exec``."""


def _interrupt(demo: Demo) -> None:
    demo.send(signal.SIGINT)


def _interrupt_all(demo: Demo) -> None:
    """As a terminal does."""
    demo.send_all(signal.SIGINT)


def _interrupt_twice(demo: Demo) -> None:
    demo.send_all(signal.SIGINT)
    demo.send_all(signal.SIGINT)


def _terminate(demo: Demo) -> None:
    demo.send(signal.SIGTERM)


@pytest.mark.sqlite
@pytest.mark.parametrize("end", [_interrupt, _interrupt_all, _interrupt_twice, _terminate])
def test_an_interrupted_demo_leaves_nothing(start: Start, end: Callable[[Demo], None]) -> None:
    demo = start("--jobs", ENDLESS)
    workers = demo.workers()
    end(demo)
    assert demo.exit_code() in INTERRUPTED, demo.lines()
    assert demo.lines()[-1] == "Error: interrupted"
    assert not [worker for worker in workers if worker.is_running()]
    assert demo.left_files() == []


def test_an_interrupted_demo_leaves_nothing_on_postgresql(
    start: Start, postgresql_database: Database
) -> None:
    before = _catalog(postgresql_database)
    demo = start("--jobs", ENDLESS, "--database-url", postgresql_database.url)
    demo.workers()
    demo.send_all(signal.SIGINT)
    assert demo.exit_code() in INTERRUPTED, demo.lines()
    assert _catalog(postgresql_database) == before


@pytest.mark.sqlite
def test_the_workers_of_a_killed_demo_end_by_themselves(start: Start) -> None:
    demo = start("--jobs", ENDLESS)
    workers = demo.workers()
    demo.send(signal.SIGKILL)
    demo.exit_code()
    gone, alive = psutil.wait_procs(workers, timeout=PATIENCE)
    assert (len(gone), alive) == (2, [])


def test_a_server_that_is_not_there_is_one_line(start: Start) -> None:
    demo = start("--database-url", "postgresql://u:secret@127.0.0.1:1/shop")
    assert demo.exit_code() == 1, demo.lines()
    assert "secret" not in "".join(demo.lines())
    assert [line for line in demo.lines() if line.startswith("Error: ")] == demo.lines()[-1:]
