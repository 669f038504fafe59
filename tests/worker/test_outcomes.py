"""However an action ends, its run has one outcome, and the next job runs."""

import asyncio
import gc
import json
import logging
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

import pytest

from cyclone_sqla import Context, Discard, PayloadError, Retry, Snooze
from cyclone_sqla.backoff import MAX_DELAY
from cyclone_sqla.context import ClaimedJob
from cyclone_sqla.outcomes import (
    Cancelled,
    Completed,
    Discarded,
    GivenBack,
    Retried,
    Snoozed,
)
from cyclone_sqla.worker.executor import UNKNOWN_KIND_DELAY, Executor
from cyclone_sqla.worker.runs import Finished, Interruption
from tests.waiting import wait_until
from tests.worker.stage import FLAVOURS, PATIENCE, Flavour, Stage, flavoured, opened, seconds

every_flavour = pytest.mark.parametrize("flavour", FLAVOURS)


@pytest.fixture
def stage() -> Iterator[Stage]:
    with opened() as stage:
        yield stage


def raising(exc: BaseException, cause: BaseException | None = None) -> Callable[[Context], Any]:
    def body(_: Context) -> None:
        raise exc from cause

    return body


# --- what an action returns


@every_flavour
def test_the_returned_value_is_kept_as_the_result(stage: Stage, flavour: Flavour) -> None:
    outcome = stage.outcome(flavoured(flavour, lambda _: {"sum": 3}))

    assert isinstance(outcome, Completed)
    assert outcome.failure is None
    assert json.loads(outcome.result or "") == {"sum": 3}


@every_flavour
def test_returning_nothing_completes_without_a_result(stage: Stage, flavour: Flavour) -> None:
    assert stage.outcome(flavoured(flavour, lambda _: None)) == Completed()


def _not_awaited() -> Any:
    async def never() -> None: ...

    coroutine = never()
    coroutine.close()  # or Python warns of it
    return coroutine


@every_flavour
@pytest.mark.parametrize(
    "result",
    [object(), "NUL \x00", "\ud800", float("nan")],
    ids=["object", "NUL", "surrogate", "nan"],
)
def test_a_result_that_cannot_be_stored_is_reported_and_the_job_completes(
    stage: Stage, flavour: Flavour, result: object
) -> None:
    outcome = stage.outcome(flavoured(flavour, lambda _: result))

    assert isinstance(outcome, Completed)
    assert outcome.result is None
    assert outcome.failure is not None
    assert "the result was not kept" in outcome.failure.error


def test_a_coroutine_is_never_a_result(stage: Stage) -> None:
    async def returns_another() -> Any:
        return _not_awaited()

    outcome = stage.outcome(returns_another)

    assert isinstance(outcome, Completed)
    assert outcome.result is None
    assert outcome.failure is not None


def test_a_generator_has_not_run_so_the_attempt_failed(stage: Stage) -> None:
    def generate() -> Iterator[int]:
        yield 1

    def wrapper() -> Any:
        return generate()

    outcome = stage.outcome(wrapper)

    assert isinstance(outcome, Retried)
    assert "its body has not run" in outcome.failure.error


# --- what is raised: the action's own verdicts


@every_flavour
def test_retry_runs_again_after_its_own_delay(stage: Stage, flavour: Flavour) -> None:
    outcome = stage.outcome(flavoured(flavour, raising(Retry("bank is shut", in_=90))))

    assert isinstance(outcome, Retried)
    assert outcome.delay == seconds(90)
    assert outcome.failure.error == "Retry: bank is shut"


@every_flavour
def test_retry_without_a_delay_asks_the_backoff(stage: Stage, flavour: Flavour) -> None:
    fn = flavoured(flavour, raising(Retry()))

    outcome = stage.outcome(fn, backoff=lambda attempt: attempt * 10, job={"attempt": 4})

    assert isinstance(outcome, Retried)
    assert outcome.delay == seconds(40)


@every_flavour
def test_retry_at_once_means_at_once(stage: Stage, flavour: Flavour) -> None:
    outcome = stage.outcome(flavoured(flavour, raising(Retry(in_=0))))

    assert isinstance(outcome, Retried)
    assert outcome.delay == seconds(0)


@every_flavour
def test_snooze_waits_without_failing(stage: Stage, flavour: Flavour) -> None:
    fn = flavoured(flavour, raising(Snooze("not yet", in_=60)))

    outcome = stage.outcome(fn, job={"attempt": 25, "max_attempts": 25})

    assert isinstance(outcome, Snoozed)
    assert outcome.delay == seconds(60)
    assert outcome.failure is not None
    assert outcome.failure.error == "Snooze: not yet"


@every_flavour
def test_discard_ends_the_job(stage: Stage, flavour: Flavour) -> None:
    outcome = stage.outcome(flavoured(flavour, raising(Discard("no such customer"))))

    assert isinstance(outcome, Discarded)
    assert outcome.failure.error == "Discard: no such customer"


@every_flavour
@pytest.mark.parametrize("verdict", [Retry("r"), Snooze("s", in_=1), Discard("d")], ids=repr)
def test_a_verdict_records_its_cause(
    stage: Stage, flavour: Flavour, verdict: Retry | Snooze | Discard
) -> None:
    outcome = stage.outcome(flavoured(flavour, raising(verdict, KeyError("customer"))))

    assert isinstance(outcome, Retried | Snoozed | Discarded)
    assert outcome.failure is not None
    (cause,) = json.loads(outcome.failure.details)["causes"]
    assert cause["type"] == "KeyError"


@pytest.mark.parametrize("verdict", [Retry(in_=timedelta.max), Snooze(in_=timedelta.max)], ids=repr)
def test_a_delay_for_ever_is_one_that_can_be_stored(stage: Stage, verdict: Retry | Snooze) -> None:
    outcome = stage.outcome(flavoured("sync", raising(verdict)))

    assert isinstance(outcome, Retried | Snoozed)
    assert outcome.delay == MAX_DELAY


def test_a_verdict_in_a_task_group_is_still_that_verdict(stage: Stage) -> None:
    async def polls() -> None:
        raise Snooze("not yet", in_=5)

    async def action() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(polls())

    outcome = stage.outcome(action)

    assert isinstance(outcome, Snoozed)
    assert outcome.delay == seconds(5)


def test_a_verdict_among_other_exceptions_is_a_failed_attempt(stage: Stage) -> None:
    group = ExceptionGroup("both", [Snooze(in_=5), ValueError("real")])

    assert isinstance(stage.outcome(flavoured("sync", raising(group))), Retried)


class _Forgetful(Retry):
    def __init__(self) -> None:
        """Without the base's."""


@every_flavour
def test_a_verdict_of_an_odd_class_is_a_failed_attempt(stage: Stage, flavour: Flavour) -> None:
    outcome = stage.outcome(flavoured(flavour, raising(_Forgetful())))

    assert isinstance(outcome, Retried)
    assert "_Forgetful" in outcome.failure.error
    assert "what it asks for can't be told: AttributeError" in outcome.failure.error


# --- what is raised: anything else


ANYTHING: list[BaseException] = [
    ValueError("bad"),
    SystemExit(1),
    KeyboardInterrupt(),
    GeneratorExit(),
    asyncio.CancelledError(),
    Cancelled("by myself"),
    BaseExceptionGroup("group", [SystemExit(1), KeyboardInterrupt()]),
    BaseExceptionGroup("group of one", [asyncio.CancelledError()]),
    StopIteration(),
    StopAsyncIteration(),
    RecursionError(),
    MemoryError(),
]


@every_flavour
@pytest.mark.parametrize("exc", ANYTHING, ids=repr)
def test_any_exception_fails_the_attempt_and_the_next_job_runs(
    stage: Stage, flavour: Flavour, exc: BaseException
) -> None:
    outcome = stage.outcome(flavoured(flavour, raising(exc)), backoff=7)

    assert isinstance(outcome, Retried)
    assert outcome.delay == seconds(7)
    # In a coroutine Python itself makes a RuntimeError of a StopIteration.
    assert type(exc).__name__ in outcome.failure.details
    assert stage.outcome(flavoured(flavour, lambda _: 1)) == Completed("1")


@every_flavour
def test_the_last_attempt_is_discarded_with_the_reason(stage: Stage, flavour: Flavour) -> None:
    fn = flavoured(flavour, raising(ValueError("bad")))

    outcome = stage.outcome(fn, job={"attempt": 3, "max_attempts": 3})

    assert isinstance(outcome, Discarded)
    assert outcome.failure.error == "ValueError: bad (attempt 3 of 3, none left)"
    assert json.loads(outcome.failure.details)["type"] == "ValueError"


@every_flavour
def test_the_last_attempt_is_the_last_though_it_asks_for_a_retry(
    stage: Stage, flavour: Flavour
) -> None:
    fn = flavoured(flavour, raising(Retry(in_=1)))

    assert isinstance(stage.outcome(fn, job={"attempt": 3, "max_attempts": 3}), Discarded)


@every_flavour
def test_snoozed_runs_do_not_count(stage: Stage, flavour: Flavour) -> None:
    fn = flavoured(flavour, raising(ValueError("bad")))
    job = {"attempt": 7, "max_attempts": 3, "snoozes": 5}

    outcome = stage.outcome(fn, backoff=lambda attempt: attempt, job=job)

    assert isinstance(outcome, Retried)
    assert outcome.delay == seconds(2)


@pytest.mark.parametrize(
    ("exc", "discarded"),
    [
        (LookupError("itself"), True),
        (KeyError("below it"), True),
        (IndexError("excepted"), False),
        (ValueError("unrelated"), False),
        (ExceptionGroup("a group of one", [KeyError("below it")]), True),
        (ExceptionGroup("a group of two", [KeyError("one"), KeyError("two")]), False),
        (SystemExit(1), True),
    ],
    ids=repr,
)
@every_flavour
def test_discard_on_ends_the_job_unless_retry_on_is_closer(
    stage: Stage, flavour: Flavour, exc: BaseException, discarded: bool
) -> None:
    outcome = stage.outcome(
        flavoured(flavour, raising(exc)),
        discard_on=(LookupError, SystemExit),
        retry_on=IndexError,
    )

    assert isinstance(outcome, Discarded if discarded else Retried)


def test_discard_on_may_be_closer_than_retry_on(stage: Stage) -> None:
    fn = flavoured("sync", raising(KeyError("x")))

    outcome = stage.outcome(fn, discard_on=KeyError, retry_on=LookupError)

    assert isinstance(outcome, Discarded)


def test_a_failing_backoff_does_not_lose_the_job(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: int) -> float:
        raise ZeroDivisionError

    outcome = stage.outcome(flavoured("sync", raising(ValueError("bad"))), backoff=broken)

    assert isinstance(outcome, Retried)
    assert "ValueError: bad" in outcome.failure.error
    assert "the default is used" in caplog.text


# --- runs that never reach the action


def _typed(flavour: Flavour, calls: list[int]) -> Callable[..., Any]:
    def sync(amount: int) -> None:
        calls.append(amount)

    async def asynchronous(amount: int) -> None:
        calls.append(amount)

    def wrapped(amount: int) -> Any:
        return asynchronous(amount)

    return {"sync": sync, "async": asynchronous, "wrapped": wrapped}[flavour]


@every_flavour
def test_arguments_arrive_as_they_were_given(stage: Stage, flavour: Flavour) -> None:
    calls: list[int] = []

    stage.outcome(_typed(flavour, calls), job={"arguments": '{"amount": 3}'})

    assert calls == [3]


@every_flavour
def test_arguments_that_this_code_cannot_read_discard_the_job(
    stage: Stage, flavour: Flavour
) -> None:
    calls: list[int] = []

    outcome = stage.outcome(_typed(flavour, calls), job={"arguments": '{"amount": "three"}'})

    assert isinstance(outcome, Discarded)
    assert "this code can't read the job's arguments" in outcome.failure.error
    assert "amount" in outcome.failure.error
    assert calls == []


@every_flavour
def test_a_payload_error_of_the_action_itself_is_a_failed_attempt(
    stage: Stage, flavour: Flavour
) -> None:
    fn = flavoured(flavour, raising(PayloadError("other", "amount", "is odd")))

    assert isinstance(stage.outcome(fn), Retried)


@every_flavour
@pytest.mark.parametrize(
    "fields", [{"time_left": seconds(-1)}, {"time_left": seconds(0)}], ids=repr
)
def test_an_expired_job_is_discarded_without_running(
    stage: Stage, flavour: Flavour, fields: Any
) -> None:
    calls: list[Context] = []

    outcome = stage.outcome(flavoured(flavour, calls.append), job=fields)

    assert isinstance(outcome, Discarded)
    assert outcome.failure.error == "Expired: its deadline has passed"
    assert calls == []


def test_a_kind_without_an_action_waits_and_keeps_its_attempts(stage: Stage) -> None:
    job = stage.start_kind("nobody_knows_it", attempt=25, max_attempts=25)

    outcome = stage.wait(job).outcome

    assert isinstance(outcome, Snoozed)
    assert outcome.delay == UNKNOWN_KIND_DELAY
    assert outcome.failure is not None
    assert "UnknownKindError" in outcome.failure.error
    assert stage.executor.running() == []


# --- threads and tasks


@every_flavour
def test_all_jobs_of_a_batch_run_at_the_same_time(stage: Stage, flavour: Flavour) -> None:
    together = threading.Barrier(10, timeout=PATIENCE)
    begun = 0
    all_begun = asyncio.Event()

    def meet() -> None:
        together.wait()

    async def meet_in_the_loop() -> None:
        nonlocal begun
        begun += 1
        if begun == 10:
            all_begun.set()
        await asyncio.wait_for(all_begun.wait(), PATIENCE)

    def wrapped() -> Any:
        return meet_in_the_loop()

    fn: Callable[..., Any] = {"sync": meet, "async": meet_in_the_loop, "wrapped": wrapped}[flavour]
    kind = stage.register(fn)
    jobs = [stage.claimed(kind) for _ in range(10)]

    assert stage.executor.start_runs(jobs) == []

    assert [stage.wait(job).outcome for job in jobs] == [Completed()] * 10


def test_threads_are_made_as_needed_and_used_again() -> None:
    names: list[str] = []
    with opened(max_threads=10) as stage:
        kind = stage.register(_name_of_the_thread(names))
        for _ in range(20):
            job = stage.start_kind(kind)
            stage.wait(job)
            wait_until(lambda: not stage.executor.running(), "the run is forgotten")

    assert len(names) == 20
    assert set(names) <= {"cyclone-action-1", "cyclone-action-2"}, "at most one was still busy"


def _name_of_the_thread(names: list[str]) -> Callable[[], None]:
    def action() -> None:
        names.append(threading.current_thread().name)

    return action


def test_there_are_never_more_threads_than_allowed() -> None:
    names: list[str] = []
    with opened(max_threads=3) as stage:
        kind = stage.register(_name_of_the_thread(names))
        jobs = [stage.claimed(kind) for _ in range(200)]
        stage.executor.start_runs(jobs)
        for job in jobs:
            stage.wait(job)

    assert len(names) == 200
    assert set(names) <= {f"cyclone-action-{i}" for i in (1, 2, 3)}


def test_async_actions_share_one_loop_in_one_thread(stage: Stage) -> None:
    seen: set[tuple[str, int]] = set()

    async def action() -> None:
        seen.add((threading.current_thread().name, id(asyncio.get_running_loop())))

    for _ in range(5):
        stage.outcome(action)

    assert [name for name, _ in seen] == ["cyclone-async-actions"]


def test_jobs_run_when_the_system_gives_no_more_threads(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    kind = stage.register(_name_of_the_thread(names))
    stage.wait(stage.start_kind(kind))

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    jobs = [stage.start_kind(kind) for _ in range(5)]

    assert [stage.wait(job).outcome for job in jobs] == [Completed()] * 5
    assert set(names) == {"cyclone-action-1"}


@every_flavour
def test_jobs_are_given_back_when_there_can_be_no_thread(
    flavour: Flavour, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with opened() as stage:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            job = stage.start(flavoured(flavour, lambda _: None))
            assert stage.wait(job).outcome == GivenBack()

        assert stage.wait(stage.start_kind(job.kind)).outcome == Completed(), "it works again"


@every_flavour
def test_a_run_whose_timeout_nobody_can_watch_is_a_failed_attempt(
    stage: Stage, flavour: Flavour, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "cyclone-timeouts":
            raise RuntimeError("can't start new thread")
        start(thread)

    kind = stage.register(flavoured(flavour, lambda _: None), timeout=60)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        outcome = stage.wait(stage.start_kind(kind)).outcome
    assert isinstance(outcome, Retried)
    assert "can't start new thread" in outcome.failure.error
    assert stage.wait(stage.start_kind(kind)).outcome == Completed(), "it works again"


_tenant: ContextVar[str] = ContextVar("tenant", default="nobody")


@every_flavour
def test_each_run_has_context_variables_of_its_own(stage: Stage, flavour: Flavour) -> None:
    def body(_: Context) -> str:
        before = _tenant.get()
        _tenant.set("somebody")
        return before

    _tenant.set("the worker")
    kind = stage.register(flavoured(flavour, body))

    for _ in range(3):
        assert stage.wait(stage.start_kind(kind)).outcome == Completed('"nobody"')


def test_what_a_wrapper_sets_its_coroutine_sees(stage: Stage) -> None:
    async def inner() -> str:
        return _tenant.get()

    def wrapper() -> Any:
        _tenant.set("set by the wrapper")
        return inner()

    assert stage.outcome(wrapper) == Completed('"set by the wrapper"')


# --- what actions leave behind


def test_the_loop_survives_background_tasks_that_exit(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    async def exits() -> None:
        raise SystemExit(3)

    async def action() -> None:
        asyncio.get_running_loop().create_task(exits())
        asyncio.get_running_loop().call_soon(_raise_keyboard_interrupt)
        await asyncio.sleep(0)

    for _ in range(3):
        assert stage.outcome(action) == Completed()
    wait_until(lambda: "the event loop goes on" in caplog.text, "it is said")


def _raise_keyboard_interrupt() -> None:
    raise KeyboardInterrupt


def test_the_loop_survives_actions_that_stop_it(stage: Stage) -> None:
    async def action() -> str:
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0.001)
        return "still there"

    for _ in range(3):
        assert stage.outcome(action) == Completed('"still there"')


def test_a_task_factory_of_an_action_does_not_reach_other_runs(stage: Stage) -> None:
    async def sabotage() -> None:
        asyncio.get_running_loop().set_task_factory(_make_no_task)

    async def action() -> None: ...

    stage.outcome(sabotage)

    assert stage.outcome(action) == Completed()


def _make_no_task(loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], **_: Any) -> Any:
    raise RuntimeError("no task")


def test_async_generators_and_tasks_left_behind_are_closed_at_the_stop() -> None:
    closed: list[str] = []
    kept: list[object] = []

    async def numbers() -> Any:
        try:
            yield 1
            yield 2
        finally:
            closed.append("generator")

    async def endless() -> None:
        try:
            await asyncio.sleep(PATIENCE)
        finally:
            closed.append("task")

    async def action() -> None:
        generator = numbers()
        await anext(generator)
        kept.extend([generator, asyncio.create_task(endless())])
        await asyncio.sleep(0)

    with opened() as stage:
        assert stage.outcome(action) == Completed()

    assert sorted(closed) == ["generator", "task"]


class _Headers(str):
    """Part of a job; its end can be seen."""


class _Error(Exception):
    """Its end can be seen. It is kept in no variable: that would be a circle with its traceback."""

    def __init__(self, seen: list[weakref.ref[Any]], *args: object) -> None:
        super().__init__(*args)
        seen.append(weakref.ref(self))


@every_flavour
@pytest.mark.parametrize("ending", ["returns", "raises", "is interrupted"])
def test_nothing_of_a_run_is_kept_alive(stage: Stage, flavour: Flavour, ending: str) -> None:
    seen: list[weakref.ref[Any]] = []

    def body(ctx: Context) -> None:
        seen.append(weakref.ref(ctx.job.headers_json))
        if ending == "raises":
            raise _Error(seen, ctx) from _Error(seen, ctx)
        if ending == "is interrupted":
            stage.executor.cancel(ctx.job.id, ctx.lease, Interruption.TIMED_OUT)
            ctx.raise_if_cancelled()

    kind = stage.register(flavoured(flavour, body))
    gc.collect()
    gc.disable()
    try:
        stage.wait(stage.start_kind(kind, headers_json=_Headers("{}")))
        stage.outcomes.clear()
        wait_until(lambda: all(ref() is None for ref in seen), "all of it is gone")
    finally:
        gc.enable()
    assert seen, "the action ran"


@every_flavour
def test_a_limit_keeps_no_finished_run_alive(stage: Stage, flavour: Flavour) -> None:
    seen: list[weakref.ref[Any]] = []
    fn = flavoured(flavour, lambda ctx: seen.append(weakref.ref(ctx.job.headers_json)))

    stage.wait(stage.start(fn, timeout=3600, job={"headers_json": _Headers("{}")}))
    stage.outcomes.clear()

    wait_until(lambda: [ref() for ref in seen] == [None], "all of it is gone")


# --- what is told


@every_flavour
def test_the_log_of_a_run_names_its_job(
    stage: Stage, flavour: Flavour, caplog: pytest.LogCaptureFixture
) -> None:
    def body(ctx: Context) -> None:
        ctx.log.info("paid %s", 3, extra={"amount": 3})

    with caplog.at_level(logging.INFO, "cyclone_sqla.worker"):
        job = stage.start(flavoured(flavour, body), job={"attempt": 4, "queue": "ledger"})
        stage.wait(job)

    (record,) = (r for r in caplog.records if r.getMessage() == "paid 3")
    told = {name: getattr(record, name) for name in ("job_id", "kind", "queue", "attempt")}
    assert told == {"job_id": job.id, "kind": job.kind, "queue": "ledger", "attempt": 4}
    assert getattr(record, "amount") == 3  # noqa: B009 - the record has what it was given


@pytest.mark.parametrize(
    ("body", "job", "level", "text"),
    [
        (lambda _: 1, {}, logging.DEBUG, "completed"),
        (lambda _: object(), {}, logging.WARNING, "the result was not kept"),
        (raising(ValueError("bad")), {}, logging.WARNING, "failed, again in 7.0 s: ValueError"),
        (raising(ValueError("bad")), {"max_attempts": 1}, logging.ERROR, "discarded: ValueError"),
        (raising(Snooze(in_=60)), {}, logging.DEBUG, "snoozed, again in 60.0 s"),
    ],
    ids=["completed", "result lost", "failed", "discarded", "snoozed"],
)
def test_every_outcome_is_logged_at_its_level(
    stage: Stage,
    caplog: pytest.LogCaptureFixture,
    body: Callable[[Context], Any],
    job: Any,
    level: int,
    text: str,
) -> None:
    with caplog.at_level(logging.DEBUG, "cyclone_sqla.worker"):
        ran = stage.start(flavoured("sync", body), backoff=7, job=job)
        stage.wait(ran)
        wait_until(lambda: _records_of(caplog, ran), "the outcome is logged")

    (record,) = _records_of(caplog, ran)
    assert record.levelno == level
    assert text in record.getMessage()
    assert record.exc_info is None, "exceptions are kept out of the log: they hold frames"


def _records_of(caplog: pytest.LogCaptureFixture, job: ClaimedJob) -> list[logging.LogRecord]:
    return [r for r in caplog.records if getattr(r, "job_id", None) == job.id]


def test_a_receiver_that_fails_ends_no_thread(caplog: pytest.LogCaptureFixture) -> None:
    got: list[Finished] = []

    def receive(finished: Finished) -> None:
        got.append(finished)
        raise SystemExit("broken receiver")

    stage = Stage()
    kinds = [stage.register(flavoured(flavour, lambda _: None)) for flavour in FLAVOURS]
    executor = Executor(stage.cyclone.registry.get, max_threads=1, on_finished=receive)
    for kind in [*kinds, *kinds]:
        executor.start_runs([stage.claimed(kind)])

    wait_until(lambda: len(got) == 6, "all runs are reported")
    assert executor.stop(PATIENCE) == []
    lost = [r.getMessage() for r in caplog.records if r.levelno == logging.CRITICAL]
    assert sorted(lost) == sorted(f"the outcome of job {f.job.id} is lost" for f in got)


class _BrokenHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise SystemExit(f"broken handler: {record.getMessage()}")


def test_a_log_handler_that_fails_costs_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("cyclone_sqla.worker")
    handler = _BrokenHandler()
    logger.addHandler(handler)
    try:
        with opened() as stage:
            fails = [flavoured(flavour, raising(ValueError("bad"))) for flavour in FLAVOURS]
            kinds = [stage.register(fn) for fn in fails]
            jobs = [stage.claimed(kind) for kind in [*kinds, "nobody_knows_it", *kinds]]
            assert stage.executor.start_runs(jobs) == []
            ends = [type(stage.wait(job).outcome) for job in jobs]
    finally:
        logger.removeHandler(handler)

    assert ends == [Retried] * 3 + [Snoozed] + [Retried] * 3
    assert "broken handler: " in capsys.readouterr().err


def test_a_run_tells_how_long_it_took(stage: Stage) -> None:
    finished = stage.wait(stage.start(flavoured("sync", lambda ctx: ctx.wait_cancelled(0.02))))

    assert 0.02 <= finished.seconds < PATIENCE
