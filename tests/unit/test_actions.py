"""Actions and their registry: from a call to a checked job, and back to the function."""

import asyncio
import copy
import pickle
import threading
import time
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
from pydantic_core import core_schema

from cyclone_sqla.actions import Action, Registry
from cyclone_sqla.backoff import Constant, Exponential
from cyclone_sqla.context import Context
from cyclone_sqla.errors import (
    ConfigurationError,
    InvalidJobError,
    PayloadError,
    RegistrationError,
    UnknownKindError,
)
from cyclone_sqla.job_spec import JobSpec


class _Producer:
    """Keeps what it is handed."""

    def __init__(self) -> None:
        self.handed: list[tuple[Any, JobSpec]] = []

    def enqueue_spec(self, target: Any, spec: JobSpec, /) -> Any:
        """A ticket for the job."""
        self.handed.append((target, spec))
        return len(self.handed)


def _action(fn: Any, **options: Any) -> Action[..., Any]:
    return Action(fn, producer=_Producer(), **options)


def _pay(ctx: Context, account: int, amount: Decimal = Decimal(1)) -> tuple[int, Decimal]:
    """Pays."""
    assert isinstance(ctx, Context)
    return account, amount


def _mail(to: str) -> str:
    return to


async def _fetch(url: str) -> bytes:
    return url.encode()


pay = Action(_pay, producer=_Producer(), kind="pay", queue="ledger", timeout=30)


def test_enqueue_hands_the_checked_job_to_the_producer() -> None:
    producer = _Producer()
    action = Action(_pay, producer=producer, kind="pay", queue="ledger", max_attempts=8)
    session: Any = object()
    assert action.enqueue(session, 7, amount=Decimal("9.90")) == 1
    spec = JobSpec(
        kind="pay", arguments='{"account":7,"amount":"9.90"}', queue="ledger", max_attempts=8
    )
    assert producer.handed == [(session, spec)]


def test_job_is_the_job_that_enqueue_would_hand_over() -> None:
    assert pay.job(7) == JobSpec(
        kind="pay", arguments='{"account":7}', queue="ledger", timeout=timedelta(seconds=30)
    )


def test_options_apply_to_the_jobs_of_the_bound_action_only() -> None:
    noon = datetime(2030, 1, 1, 12, tzinfo=UTC)
    bound = pay.using(priority=1, unique="order:1", process_at=noon, headers={"a": "b"})
    job = bound.job(7)
    assert (job.priority, job.unique, job.process_at) == (1, "order:1", noon)
    assert (job.headers, job.queue) == ({"a": "b"}, "ledger")
    assert pay.job(7).unique is None


def test_options_can_be_added_to_a_bound_action() -> None:
    job = pay.using(priority=1, queue="slow").using(queue="fast", timeout=None).job(7)
    assert (job.priority, job.queue, job.timeout) == (1, "fast", timedelta(seconds=30))


def test_a_bad_option_is_refused_where_it_is_given() -> None:
    with pytest.raises(InvalidJobError, match="process_in"):
        pay.using(process_in=-1)
    with pytest.raises(InvalidJobError, match="did you mean 'priority'"):
        pay.using(prioritty=1)  # type: ignore[call-arg]


def test_a_bad_argument_is_refused_at_the_call_and_nothing_is_handed_over() -> None:
    producer = _Producer()
    action = Action(_pay, producer=producer, kind="pay")
    with pytest.raises(PayloadError, match="pay: amount: "):
        action.enqueue(Mock(), 7, amount="9.90")  # type: ignore[arg-type]
    assert producer.handed == []


def test_a_context_passed_to_enqueue_is_refused_with_a_hint() -> None:
    with pytest.raises(PayloadError, match="leave the Context out"):
        pay.job(Mock(spec=Context), 7, Decimal(1))  # type: ignore[call-arg]


def test_a_direct_call_runs_the_function() -> None:
    context = Mock(spec=Context)
    assert pay(context, 7) == (7, Decimal(1))
    assert _action(_mail)("me") == "me"
    assert asyncio.run(_action(_fetch)("u")) == b"u"


@pytest.mark.parametrize("args", [(), (7,), (7, Decimal(1))])
def test_a_direct_call_without_its_context_shows_the_call(args: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match=r"pay\(ctx, account, amount\)"):
        pay(*args)


def test_stored_arguments_come_back_as_the_call() -> None:
    assert pay.decode(pay.encode((7,), {"amount": Decimal("1.50")})) == (
        [],
        {"account": 7, "amount": Decimal("1.50")},
    )
    assert pay.encode_raw({"account": 7, "amount": "1.50"}) == '{"account":7,"amount":"1.50"}'


def test_a_result_is_kept_as_the_return_annotation_says() -> None:
    assert pay.encode_result((7, Decimal("1.50"))) == '[7,"1.50"]'
    assert pay.encode_result(None) is None
    assert _action(_fetch).encode_result(b"\xff") == '"/w=="'
    with pytest.raises(PayloadError, match=r"pay: result\[1\]"):
        pay.encode_result((7, 1.5))


def test_an_action_says_what_the_worker_needs() -> None:
    action = _action(
        _pay,
        kind="pay",
        queue="ledger",
        priority=3,
        max_attempts=8,
        timeout=timedelta(minutes=1),
        backoff=Constant(5),
        retry_on=OSError,
        discard_on=[ValueError, KeyError],
    )
    assert (action.queue, action.priority, action.max_attempts) == ("ledger", 3, 8)
    assert action.timeout == timedelta(minutes=1)
    assert action.backoff == Constant(5)
    assert action.retry_on == (OSError,)
    assert action.discard_on == (ValueError, KeyError)
    assert action.defaults == {
        "queue": "ledger",
        "priority": 3,
        "max_attempts": 8,
        "timeout": timedelta(minutes=1),
    }


def test_the_defaults_of_an_action() -> None:
    action = _action(_mail)
    assert (action.kind, action.queue, action.priority) == ("_mail", "default", 0)
    assert (action.max_attempts, action.timeout, action.backoff) == (25, None, Exponential())
    assert (action.retry_on, action.discard_on) == ((), ())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kind": ""}, "kind: must not be empty"),
        ({"kind": "a\nb"}, "kind: must be printable"),
        ({"queue": ""}, "_mail: queue: "),
        ({"max_attempts": 0}, "_mail: max_attempts: "),
        ({"timeout": 0}, "_mail: timeout: "),
        ({"priority": 40000}, "_mail: priority: "),
        ({"retry_on": [1]}, "_mail: retry_on: 1 is not an exception type"),
        ({"discard_on": (str,)}, "_mail: discard_on: "),
        ({"discard_on": int}, "_mail: discard_on: "),
    ],
)
def test_a_bad_option_of_a_registration_is_a_registration_error(
    options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RegistrationError, match=reason):
        _action(_mail, **options)


def test_a_bad_backoff_is_a_configuration_error() -> None:
    with pytest.raises(ConfigurationError, match="backoff"):
        _action(_mail, backoff="soon")


def test_an_action_shows_the_function_it_was_made_of() -> None:
    assert pay.__doc__ == "Pays."
    assert pay.__name__ == "_pay"
    assert pay.__wrapped__ is _pay  # type: ignore[attr-defined]
    assert repr(pay) == "<Action 'pay'>"


def test_attributes_of_the_function_do_not_overwrite_those_of_the_action() -> None:
    def fn(n: int) -> None:
        pass

    fn.kind = fn.queue = fn.enqueue = "mine"  # type: ignore[attr-defined]
    action = _action(fn, kind="fn")
    assert (action.kind, action.queue) == ("fn", "default")
    assert action.using(priority=1).job(1).arguments == '{"n":1}'


def _decorated(fn: Any) -> Any:
    return Action(fn, producer=_Producer())


@_decorated
def refund(n: int) -> None:
    """An action that a module holds under its function's name."""


class Refunds:
    """An action that a class holds under its function's name."""

    @_decorated
    @staticmethod
    def all() -> None:
        """Refunds all."""


@pytest.mark.parametrize("action", [refund, Refunds.all], ids=repr)
def test_an_action_is_pickled_by_its_name(action: Any) -> None:
    assert pickle.loads(pickle.dumps(action)) is action
    assert copy.deepcopy(action) is action


class _SlowToBuild:
    """A type whose schema takes a while, and knows which threads asked for it."""

    asked: ClassVar[list[int]] = []

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        """A str; the pause invites other threads in."""
        cls.asked.append(threading.get_ident())
        time.sleep(0.05)
        return core_schema.str_schema()


def test_an_action_is_built_once_by_threads_that_use_it_first() -> None:
    def action_of_slow(x: _SlowToBuild) -> None:
        pass

    action = _action(action_of_slow)
    start = threading.Barrier(4)

    def use() -> None:
        start.wait()
        action.check()

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(_SlowToBuild.asked)) == 1


def test_a_registry_finds_actions_by_kind() -> None:
    registry = Registry()
    for action in (pay, refund):
        registry.add(action)
    registry.add(pay)
    assert registry.get("pay") is registry.find("pay") is pay
    assert registry.find("payy") is None
    assert registry.kinds() == ("pay", "refund")
    assert registry.queues() == ("default", "ledger")
    assert (len(registry), "pay" in registry, "x" in registry) == (2, True, False)
    assert list(registry) == [pay, refund]


def test_an_unknown_kind_is_refused_with_its_neighbours() -> None:
    registry = Registry()
    registry.add(pay)
    with pytest.raises(UnknownKindError, match=r"'payy'; did you mean 'pay'"):
        registry.get("payy")
    with pytest.raises(UnknownKindError, match=r"'zzz'$"):
        registry.get("zzz")


def test_a_second_action_of_a_kind_is_refused_with_both_places() -> None:
    registry = Registry()
    registry.add(pay)
    with pytest.raises(RegistrationError, match=r"_mail cannot have.*_pay has it.*kind="):
        registry.add(_action(_mail, kind="pay"))
    assert registry.get("pay") is pay


def test_check_lists_the_problems_of_all_actions_in_one_error() -> None:
    def first(x: "Nowhere") -> None:  # type: ignore[name-defined]  # noqa: F821
        pass

    def second(x: "list[Nowhere]") -> None:  # type: ignore[name-defined]  # noqa: F821
        pass

    registry = Registry()
    for action in (pay, _action(first), _action(second)):
        registry.add(action)
    with pytest.raises(RegistrationError, match=r"(?s)first: .*\nsecond: ") as caught:
        registry.check()
    assert "pay" not in str(caught.value)


def test_check_of_sound_actions_builds_them() -> None:
    registry = Registry()
    registry.add(pay)
    registry.check()
    assert registry.get("pay").takes_context
