"""What a function must look like to be an action, and how its annotations are resolved."""

import functools
import inspect
import typing
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, ParamSpec, TypeVar, overload

import pytest

from cyclone_sqla.actions import Action
from cyclone_sqla.context import Context
from cyclone_sqla.errors import RegistrationError
from cyclone_sqla.job_spec import JobSpec

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class _Producer:
    """Keeps what it is handed."""

    def enqueue_spec(self, target: Any, spec: JobSpec, /) -> Any:
        """The job that would have been enqueued."""
        return spec


def _action(fn: Any, **options: Any) -> Action[..., Any]:
    return Action(fn, producer=_Producer(), **options)


class MyContext(Context):
    """A subclass of the Context."""


def test_the_context_is_the_first_parameter_annotated_context() -> None:
    def plain(ctx: Context, n: int) -> None:
        pass

    def positional_only(ctx: Context, /, n: int) -> None:
        pass

    def quoted(ctx: "Context", n: "int") -> None:
        pass

    def with_metadata(ctx: Annotated[Context, "the run"], n: int) -> None:
        pass

    def with_default(ctx: Context = None, n: int = 0) -> None:  # type: ignore[assignment]
        pass

    def without(n: int) -> None:
        pass

    for fn in (plain, positional_only, quoted, with_metadata, with_default):
        assert _action(fn).takes_context
        assert [p.name for p in _action(fn).signature.parameters] == ["n"]
    assert not _action(without).takes_context


@pytest.mark.parametrize(
    "annotation",
    [Any, object, Context | None, Any | None, T, Hashable, typing.Hashable, "object"],
    ids=str,
)
def test_a_first_parameter_that_accepts_a_context_is_refused(annotation: Any) -> None:
    def action(x: annotation) -> None:  # type: ignore[valid-type]
        pass

    def keyword_only(*, x: annotation) -> None:  # type: ignore[valid-type]
        pass

    with pytest.raises(RegistrationError, match=r"first parameter 'x' is annotated .* take it for"):
        _action(action)
    if annotation in (Any, object, Any | None, "object"):
        assert not _action(keyword_only).takes_context


def test_variadic_first_parameters_that_accept_a_context_are_refused() -> None:
    def anything(*args: Any) -> None:
        pass

    def contexts(*args: Context) -> None:
        pass

    for action in (anything, contexts):
        with pytest.raises(RegistrationError, match="first parameter 'args'"):
            _action(action)


def test_a_context_anywhere_else_is_refused() -> None:
    def second(n: int, ctx: Context) -> None:
        pass

    def keyword_only(*, ctx: Context) -> None:
        pass

    def subclass(ctx: MyContext) -> None:
        pass

    for action in (second, keyword_only, subclass):
        with pytest.raises(RegistrationError, match="only the first positional parameter"):
            _action(action)


def _generator() -> Iterator[int]:
    yield 1


async def _async_generator() -> AsyncIterator[int]:
    yield 1


def _undecorated(n: int) -> None:
    pass


def _careless(fn: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*a, **k):  # type: ignore[no-untyped-def]
        return fn(*a, **k)

    return wrapper


class _Service:
    def method(self, n: int) -> None:
        pass

    @classmethod
    def of_class(cls, n: int) -> None:
        pass

    @staticmethod
    def static(n: int) -> None:
        pass

    def __call__(self, ctx: Context, n: int) -> None:
        pass


class _AsyncService:
    async def __call__(self, n: int) -> None:
        pass


@overload
def _overloaded(n: int) -> None: ...
@overload
def _overloaded(n: str) -> None: ...
def _overloaded(n: int | str) -> None:
    pass


def _unannotated(n) -> None:  # type: ignore[no-untyped-def]
    pass


def _param_spec(*args: P.args, **kwargs: P.kwargs) -> None:
    pass


def _of_text(amount: "Decimal") -> None:
    pass


class _OfText:
    def __call__(self, amount: "Decimal") -> None:
        pass


def _odd(n: "list[") -> None:  # type: ignore[valid-type]  # noqa: F722
    pass


def _unreadable(n: int) -> None:
    pass


_unreadable.__signature__ = "unreadable"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda n: n, "a lambda"),
        (_generator, "a generator function"),
        (_async_generator, "a generator function"),
        (_Service.method, "use @staticmethod"),
        (_Service.__dict__["of_class"], "use @staticmethod"),
        (_overloaded, "overloaded"),
        (_unannotated, "parameter 'n' has no annotation"),
        (_careless(_undecorated), "use functools.wraps"),
        (_Service, "only a function"),
        (5, "only a function"),
        (_Service(), "give it kind="),
        (functools.partial(_undecorated, 1), "give it kind="),
        (_param_spec, "type variable|first parameter"),
        (_odd, "is no annotation"),
        (_unreadable, "has no signature"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_an_action_is_refused_where_it_is_decorated(fn: Any, reason: str) -> None:
    with pytest.raises(RegistrationError, match=reason):
        _action(fn)


def test_all_that_is_wrong_with_a_signature_is_said_at_once() -> None:
    def action(a: Decimal | str, b: bytearray) -> None:
        pass

    with pytest.raises(RegistrationError, match=r"parameter 'a': .*; parameter 'b': "):
        _action(action)


def test_a_static_method_is_an_action_inside_and_outside_the_decorator() -> None:
    inside = _action(_Service.static)
    outside = _action(_Service.__dict__["static"])
    for action in (inside, outside):
        assert action.kind == "static"
        assert action.job(1).arguments == '{"n":1}'
        assert action(1) is None


def test_a_bound_method_is_an_action_without_its_self() -> None:
    assert _action(_Service().method).job(1).arguments == '{"n":1}'


def test_a_callable_instance_is_an_action_with_a_kind() -> None:
    action = _action(_Service(), kind="service")
    assert action.takes_context
    assert not action.is_async
    assert action.job(1).arguments == '{"n":1}'
    assert _action(_AsyncService(), kind="service").is_async


def test_a_partial_is_an_action_with_a_kind_and_its_bound_arguments_are_not_stored() -> None:
    def add(a: int, b: int, c: int = 3) -> int:
        return a + b + c

    action = _action(functools.partial(add, 1, c=5), kind="add")
    assert action.job(2).arguments == '{"b":2}'
    assert action(2) == 8


def test_async_functions_are_told_from_sync_ones() -> None:
    async def waits() -> None:
        pass

    def hands_on() -> Awaitable[None]:
        return waits()

    assert _action(waits).is_async
    assert _action(functools.partial(waits), kind="waits").is_async
    assert not _action(hands_on).is_async


def test_a_wrapping_decorator_shows_the_function_beneath() -> None:
    def logged(fn: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(fn)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            return fn(*args, **kwargs)

        return wrapper

    @logged
    def pay(ctx: Context, n: "int") -> None:
        pass

    action = _action(pay)
    assert (action.kind, action.takes_context) == ("pay", True)
    assert action.job(1).arguments == '{"n":1}'


def test_a_local_class_is_found_by_its_name() -> None:
    @dataclass
    class Local:
        n: int

    def pay(local: "list[Local]") -> None:
        pass

    assert _action(pay).job([Local(1)]).arguments == '{"local":[{"n":1}]}'


def test_a_local_name_of_a_mere_caller_is_not_taken() -> None:
    def make() -> Any:
        def pay(amount: "Decimal") -> None:
            pass

        return pay

    def register(fn: Any) -> Action[..., Any]:
        Decimal = str  # noqa: F841, N806
        return _action(fn)

    assert register(make()).job(Decimal(1)).arguments == '{"amount":"1"}'


def test_names_are_those_of_the_module_of_the_function_beneath() -> None:
    elsewhere: dict[str, Any] = {"functools": functools}
    exec(
        "def logged(fn):\n"
        "    @functools.wraps(fn)\n"
        "    def wrapper(*a, **k): return fn(*a, **k)\n"
        "    return wrapper",
        elsewhere,
    )
    decorated = elsewhere["logged"](_of_text)
    partial = functools.partial(_of_text)
    for fn in (decorated, partial, _OfText()):
        assert _action(fn, kind="pay").job(Decimal(1)).arguments == '{"amount":"1"}'


def test_a_name_of_an_enclosing_class_body_is_found() -> None:
    class Jobs:
        @dataclass
        class Inner:
            n: int

        def pay(inner: "Inner") -> None:  # type: ignore[misc,name-defined]  # noqa: N805
            pass

        action = _action(pay)

    assert Jobs.action.job(Jobs.Inner(1)).arguments == '{"inner":{"n":1}}'


def test_a_name_that_comes_later_is_resolved_on_first_use() -> None:
    def pay(later: "LaterOnly") -> None:  # type: ignore[name-defined]  # noqa: F821
        pass

    action = _action(pay)
    pay.__globals__["LaterOnly"] = int
    try:
        assert action.job(1).arguments == '{"later":1}'
    finally:
        del pay.__globals__["LaterOnly"]


def test_a_name_that_never_comes_is_a_registration_error_on_first_use() -> None:
    def pay(when: "Nowhere") -> None:  # type: ignore[name-defined]  # noqa: F821
        pass

    action = _action(pay)
    for use in (action.check, lambda: action.job(1), lambda: action.takes_context):
        with pytest.raises(
            RegistrationError, match=r"pay: parameter 'when': .*Nowhere.*TYPE_CHECK"
        ):
            use()


def test_the_context_may_be_imported_for_type_checking_only() -> None:
    namespace: dict[str, Any] = {}
    exec("def pay(ctx: 'Context', n: int) -> None: pass", namespace)
    assert _action(namespace["pay"]).takes_context


def test_metadata_may_be_unhashable() -> None:
    def pay(n: Annotated[int, {"unit": "cent"}]) -> None:
        pass

    assert _action(pay).job(1).arguments == '{"n":1}'


def test_what_is_no_type_at_all_is_refused_by_check() -> None:
    def pay(n: 5) -> None:  # type: ignore[valid-type]
        pass

    with pytest.raises(RegistrationError, match="pay: parameter 'n': "):
        _action(pay).check()


def test_a_return_type_that_cannot_be_resolved_does_no_harm() -> None:
    def pay() -> "Nowhere":  # type: ignore[name-defined]  # noqa: F821
        return 1

    assert _action(pay).encode_result((1, 2)) == "[1,2]"


def test_a_signature_given_by_a_decorator_is_honoured() -> None:
    def injecting(fn: Any) -> Any:
        @functools.wraps(fn)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return fn(*args, client="client", **kwargs)

        signature = inspect.signature(fn)
        rest = [p for p in signature.parameters.values() if p.name != "client"]
        wrapper.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
        return wrapper

    @injecting
    def pay(n: int, client: str) -> tuple[int, str]:
        return n, client

    action = _action(pay)
    assert action.job(1).arguments == '{"n":1}'
    assert action(1) == (1, "client")
