"""What is said of unique jobs, and then of sequences, statement by statement.

Here it is as a user writes it, with the test kit; where another test states it already, the
tables name that one.
"""

import re
from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path

import pytest
from sqlalchemy.orm import Session

from cyclone_sqla import (
    Context,
    Cyclone,
    Discard,
    DuplicateError,
    InvalidKeyError,
    begin_before_savepoints,
)
from cyclone_sqla.testing import CycloneEnv
from tests.databases import Database

OF_UNIQUE_JOBS = {
    "pending, available, running and paused jobs hold their slot": (
        "test_every_active_job_holds_its_key"
    ),
    "completed, discarded and cancelled ones do not": "test_a_job_that_has_ended_frees_its_key",
    "the key is one of its kind": "test_a_key_belongs_to_its_kind",
    "a unique index enforces it": "test_when_the_winner_commits_the_other_is_told_of_it",
}

OF_SEQUENCES = {
    "different keys, and jobs without one, stay concurrent": (
        "test_keys_and_jobs_without_one_do_not_block_each_other"
    ),
    "the next job becomes claimable only when the active one has ended": (
        "test_a_waiting_job_becomes_claimable_by_the_very_end_of_the_one_before"
    ),
    "the gate applies to every worker": "test_the_database_itself_lets_nothing_but_a_head_run",
    "in order and never overlapping, on a whole fleet": (
        "test_each_key_runs_in_order_and_alone_whoever_fails_or_is_killed"
    ),
    "the backlog has no limit": "test_admission_and_hand_over_look_at_no_blocked_job",
    "a failed head can stop its whole sequence": (
        "test_a_failed_head_halts_its_sequence_until_a_person_replays_or_skips_it"
    ),
}

ELSEWHERE = OF_UNIQUE_JOBS | OF_SEQUENCES

DAY = timedelta(hours=24)


def test_what_is_stated_elsewhere_is_there() -> None:
    checkout = Path(__file__).parents[2]
    folders = (checkout / "tests", checkout / "cyclone_sqla" / "testing")
    texts = (path.read_text() for folder in folders for path in folder.rglob("test_*.py"))
    found = {name for text in texts for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE)}
    assert set(ELSEWHERE.values()) - found == set()


class Application:
    """The actions of the pages, and what they have done."""

    def __init__(self) -> None:
        self.cyclone = Cyclone()
        self.done: list[str] = []
        self.running: list[str] = []
        self.fails: dict[str, Exception] = {}

        @self.cyclone.action
        def sync_account(account: int) -> None:
            self._do(f"account {account}")

        @self.cyclone.action
        def deliver_webhook(event: str) -> None:
            self._do(event)

        @self.cyclone.action
        def send_reminder(invoice: str) -> None:
            self._do(invoice)

        @self.cyclone.action(max_attempts=3)
        def apply_ledger_entry(entry: str) -> None:
            self._do(entry)

        @self.cyclone.action
        def enqueue_again(ctx: Context) -> None:
            with pytest.raises(DuplicateError) as refused:
                enqueue_again.using(unique="once").enqueue(ctx.session)
            assert refused.value.job_id == ctx.job.id

        self.sync_account, self.deliver_webhook = sync_account, deliver_webhook
        self.send_reminder, self.apply_ledger_entry = send_reminder, apply_ledger_entry
        self.enqueue_again = enqueue_again

    def _do(self, what: str) -> None:
        assert self.running == [], "two at a time"
        self.running.append(what)
        try:
            if what in self.fails:
                raise self.fails[what]
            self.done.append(what)
        finally:
            self.running.remove(what)


@pytest.fixture(scope="module")
def application() -> Application:
    """One for all tests: its statements are built once."""
    return Application()


@pytest.fixture
def app(application: Application) -> Application:
    """The application, which has done nothing yet."""
    application.done.clear()
    application.fails.clear()
    return application


@pytest.fixture
def env(database: Database, app: Application) -> Iterator[CycloneEnv]:
    """An environment whose jobs wait to be told, and may fail."""
    engine = database.engine()
    begin_before_savepoints(engine)
    with engine.connect() as connection, connection.begin() as outer:
        with CycloneEnv(connection, app.cyclone, auto_start=False, raise_errors=False) as env:
            yield env
        outer.rollback()


# ---- unique jobs: handle duplicates --------------------------------------------------------------


def request_sync(app: Application, session: Session, account: int) -> int | None:
    """Have an account synchronised; the job that does it, or is at it already."""
    try:
        return app.sync_account.using(unique=f"account:{account}").enqueue(session, account).id
    except DuplicateError as duplicate:
        return duplicate.job_id


def test_a_duplicate_is_work_in_progress_and_its_job_can_be_returned(
    env: CycloneEnv, app: Application
) -> None:
    first = request_sync(app, env.session, 42)
    assert request_sync(app, env.session, 42) == first
    assert request_sync(app, env.session, 43) != first
    env.session.commit()
    assert env.run_until_idle() == 2
    assert sorted(app.done) == ["account 42", "account 43"]


def test_the_job_of_a_duplicate_can_be_shown_and_waited_for(
    env: CycloneEnv, app: Application
) -> None:
    once = app.sync_account.using(unique="account:42")
    once.enqueue(env.session, 42)
    with pytest.raises(DuplicateError) as refused:
        once.enqueue(env.session, 42)
    holder = refused.value.job
    assert holder is not None
    assert (holder.kind, holder.state) == ("sync_account", "available")
    env.run_until_idle()
    assert app.cyclone.get(env.session, holder.id).state == "completed"


# ---- unique jobs: keys ---------------------------------------------------------------------------

USEFUL = [
    (f"account:{42}", f"account:{43}"),
    ("invoice:inv_123", "invoice:inv_124"),
    (f"daily-report:{date(2031, 5, 1):%Y-%m-%d}", f"daily-report:{date(2031, 5, 2):%Y-%m-%d}"),
    ("webhook:evt_123", "webhook:evt_124"),
]


def test_a_key_that_describes_the_work_refuses_the_same_work_alone(
    env: CycloneEnv, app: Application
) -> None:
    for key, other in USEFUL:
        app.sync_account.using(unique=key).enqueue(env.session, 42)
        with pytest.raises(DuplicateError):
            app.sync_account.using(unique=key).enqueue(env.session, 42)
        assert app.sync_account.using(unique=other).enqueue(env.session, 43).created


def test_a_key_that_is_too_narrow_lets_duplicates_through(
    env: CycloneEnv, app: Application
) -> None:
    for request in ("r1", "r2"):
        app.sync_account.using(unique=f"account:42:request:{request}").enqueue(env.session, 42)
    env.run_until_idle()
    assert app.done == ["account 42"] * 2


def test_a_key_that_is_too_broad_blocks_unrelated_work(env: CycloneEnv, app: Application) -> None:
    app.sync_account.using(unique="account-sync").enqueue(env.session, 42)
    with pytest.raises(DuplicateError):
        app.sync_account.using(unique="account-sync").enqueue(env.session, 43)


LONGEST = ["k" * 256, "ä" * 128]
BAD_KEYS = ["", "a\0b", "\ud800", "k" * 257, "ä" * 129, 0]

of_both_options = pytest.mark.parametrize("option", ["unique", "sequence"])


@of_both_options
def test_a_key_may_have_256_bytes(env: CycloneEnv, app: Application, option: str) -> None:
    for key in LONGEST:
        app.cyclone.enqueue(env.session, "sync_account", {"account": 42}, **{option: key})
    assert env.run_until_idle() == 2


@of_both_options
def test_a_key_that_breaks_a_rule_is_an_error_and_inserts_nothing(
    env: CycloneEnv, app: Application, option: str
) -> None:
    for key in BAD_KEYS:
        with pytest.raises(InvalidKeyError, match=option):
            app.cyclone.enqueue(env.session, "sync_account", {"account": 42}, **{option: key})
    assert env.jobs(app.sync_account) == []


# ---- unique jobs: a slot is held -----------------------------------------------------------------


def test_a_retrying_job_keeps_its_slot_and_nothing_queues_behind_it(
    env: CycloneEnv, app: Application
) -> None:
    once = app.deliver_webhook.using(unique="webhook:evt_123")
    app.fails["evt_123"] = ConnectionError("the receiver is down")
    once.enqueue(env.session, "evt_123")
    env.run_until_idle()
    for _ in range(10):
        with pytest.raises(DuplicateError):
            once.enqueue(env.session, "evt_123")
    (job,) = env.jobs(app.deliver_webhook)
    assert (job.state, job.waits_for) == ("pending", "retry")

    app.fails.clear()
    env.advance(minutes=5)
    env.run_until_idle()
    assert app.done == ["evt_123"]
    assert once.enqueue(env.session, "evt_123").created


@pytest.mark.parametrize("option", ["process_in", "process_at"])
def test_a_delayed_job_holds_its_slot_before_it_can_be_claimed(
    env: CycloneEnv, app: Application, option: str
) -> None:
    due = {"process_in": DAY} if option == "process_in" else {"process_at": env.now + DAY}
    once = app.send_reminder.using(unique="invoice:inv_123:reminder")
    once.using(**due).enqueue(env.session, "inv_123")
    for _ in range(3):
        assert env.run_until_idle() == 0
        with pytest.raises(DuplicateError):
            once.enqueue(env.session, "inv_123")
        env.advance(hours=8)
    assert env.run_until_idle() == 1
    assert once.enqueue(env.session, "inv_123").created


def test_a_job_holds_its_slot_while_it_runs(env: CycloneEnv, app: Application) -> None:
    app.enqueue_again.using(unique="once").enqueue(env.session)
    env.run_until_idle()
    env.assert_completed(app.enqueue_again)


def test_with_auto_start_the_first_job_has_ended_before_the_second(
    env: CycloneEnv, app: Application
) -> None:
    env.auto_start = True
    for _ in range(2):
        app.sync_account.using(unique="account:42").enqueue(env.session, 42)
        env.session.commit()
    assert app.done == ["account 42"] * 2


# ---- sequences -----------------------------------------------------------------------------------


def enqueue_entries(app: Application, session: Session, account: str, *entries: str) -> None:
    """Each more urgent than the one before: without their sequence they would run backwards."""
    in_turn = app.apply_ledger_entry.using(sequence=f"account-{account}")
    for number, entry in enumerate(entries):
        in_turn.using(priority=-number).enqueue(session, entry)


def test_entries_of_an_account_run_one_at_a_time_in_enqueue_order(
    env: CycloneEnv, app: Application
) -> None:
    enqueue_entries(app, env.session, "42", "1", "2", "3")
    assert env.run_until_idle() == 3
    assert app.done == ["1", "2", "3"]


def test_a_sequence_accepts_every_job_where_a_unique_key_refuses_the_second(
    env: CycloneEnv, app: Application
) -> None:
    enqueue_entries(app, env.session, "42", *["same"] * 10)
    assert env.run_until_idle() == 10
    once = app.apply_ledger_entry.using(unique="account-42")
    once.enqueue(env.session, "same")
    with pytest.raises(DuplicateError):
        once.enqueue(env.session, "same")


def test_while_the_head_is_in_backoff_its_key_waits_and_the_others_run(
    env: CycloneEnv, app: Application
) -> None:
    app.fails["a1"] = ConnectionError("the bank is down")
    enqueue_entries(app, env.session, "a", "a1", "a2")
    enqueue_entries(app, env.session, "b", "b1")
    app.sync_account.enqueue(env.session, 42)
    env.run_until_idle()
    assert sorted(app.done) == ["account 42", "b1"]

    app.fails.clear()
    env.advance(minutes=5)
    env.run_until_idle()
    assert app.done[2:] == ["a1", "a2"]


@pytest.mark.parametrize(
    ("failure", "attempts"), [(ConnectionError("again and again"), 3), (Discard("for good"), 1)]
)
def test_when_the_head_is_discarded_the_next_job_runs(
    env: CycloneEnv, app: Application, failure: Exception, attempts: int
) -> None:
    app.fails["1"] = failure
    enqueue_entries(app, env.session, "42", "1", "2", "3")
    for _ in range(attempts):
        assert app.done == []
        env.run_until_idle()
        env.advance(minutes=5)
    assert app.done == ["2", "3"]
    assert env.assert_discarded(app.apply_ledger_entry, entry="1").attempt == attempts
