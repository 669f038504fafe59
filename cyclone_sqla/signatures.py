"""Reads a function as an action: its parameters, whether it takes the Context, what it returns."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cyclone_sqla.annotations import accepts_context, members, name_of, problems
from cyclone_sqla.context import Context
from cyclone_sqla.errors import RegistrationError

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_FIRST = (*_POSITIONAL, inspect.Parameter.VAR_POSITIONAL)


@dataclass(frozen=True, slots=True)
class Signature:
    """What a caller passes to an action: parameters without the Context, annotations resolved."""

    parameters: tuple[inspect.Parameter, ...]
    takes_context: bool
    returns: Any


class UnresolvedError(Exception):
    """An annotation names something that does not exist yet: a circular or type-checking import."""


def read_signature(kind: str, fn: Callable[..., Any], names: Mapping[str, Any]) -> Signature:
    """The signature of ``fn``; ``names`` are local names that its annotations may use.

    RegistrationError for what can't be an action, UnresolvedError for what can't be said yet.
    """
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError) as exc:
        raise RegistrationError(f"{kind}: {fn!r} has no signature to read: {exc}") from exc
    parameters = list(signature.parameters.values())
    _refuse_missing_annotations(kind, parameters)
    resolver = _Resolver(kind, fn, names)
    resolved = [p.replace(annotation=resolver(p.name, p.annotation)) for p in parameters]
    takes_context, rest = _without_context(kind, resolved)
    refuse_unfit(kind, rest)
    return Signature(tuple(rest), takes_context, resolver.returned(signature.return_annotation))


def refuse_unfit(kind: str, parameters: typing.Iterable[inspect.Parameter]) -> None:
    """RegistrationError with everything that keeps these annotations from travelling."""
    found = [
        f"parameter {p.name!r}: {reason}" for p in parameters for reason in problems(p.annotation)
    ]
    if found:
        raise RegistrationError(f"{kind}: " + "; ".join(found))


def refuse_unfit_callable(fn: object) -> None:
    """RegistrationError for what is no plain function, whatever its parameters."""
    name = getattr(fn, "__qualname__", repr(fn))
    if isinstance(fn, classmethod):
        raise RegistrationError(f"{name}: a class method cannot be an action; use @staticmethod")
    if not callable(fn) or inspect.isclass(fn):
        raise RegistrationError(f"{name}: only a function can be an action")
    code = implementation(fn)
    if getattr(code, "__name__", "") == "<lambda>":
        raise RegistrationError(f"{name}: a lambda has no annotations; write a def")
    if inspect.isgeneratorfunction(code) or inspect.isasyncgenfunction(code):
        raise RegistrationError(f"{name}: a generator function does nothing when it is called")
    if typing.get_overloads(code):
        raise RegistrationError(f"{name}: an overloaded function has no one signature; write two")


def own_name(fn: object) -> str | None:
    """The name by which a function can be found again; None for an instance or a partial."""
    name = getattr(fn, "__name__", None)
    return name if isinstance(name, str) and not isinstance(fn, functools.partial) else None


def implementation(fn: Any) -> Callable[..., Any]:
    """The function whose module the annotations belong to, beneath partials and decorators."""
    if isinstance(fn, functools.partial):
        return implementation(fn.func)
    if inspect.isfunction(fn) or inspect.ismethod(fn) or inspect.isbuiltin(fn):
        return typing.cast("Callable[..., Any]", inspect.unwrap(getattr(fn, "__func__", fn)))
    return implementation(type(fn).__call__) if hasattr(type(fn).__call__, "__code__") else fn


def is_async(fn: Any) -> bool:
    """Whether calling it gives a coroutine. A plain function that hands one on is not seen here."""
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)


def enclosing_names(fn: object) -> dict[str, Any]:
    """The local names of the functions and classes in whose bodies ``fn`` is being defined."""
    code = implementation(fn)
    qualname, module = getattr(code, "__qualname__", ""), getattr(code, "__globals__", None)
    names: dict[str, Any] = {}
    frame = inspect.currentframe() if "." in qualname else None
    while frame is not None:
        inside = qualname.startswith(frame.f_code.co_qualname + ".")
        if inside and frame.f_globals is module:
            names = {**frame.f_locals, **names}
        frame = frame.f_back
    return names


class _Resolver:
    """Turns annotations into types, by the names of the function's module and surroundings."""

    def __init__(self, kind: str, fn: Any, names: Mapping[str, Any]) -> None:
        self._kind = kind
        # Context is often imported for type checking only.
        module = getattr(implementation(fn), "__globals__", {})
        self._globals = {"Context": Context, **module}
        self._locals = dict(names)

    def __call__(self, name: str, annotation: Any) -> Any:
        try:
            return self._resolve(annotation)
        except NameError as exc:
            raise UnresolvedError(f"parameter {name!r}: {exc}") from exc
        except (TypeError, SyntaxError, AttributeError) as exc:
            raise RegistrationError(
                f"{self._kind}: parameter {name!r}: {annotation!r} is no annotation: {exc}"
            ) from exc

    def returned(self, annotation: Any) -> Any:
        """The return type, or Any: a result is kept as well as its type allows."""
        if annotation is inspect.Signature.empty:
            return Any
        try:
            return self._resolve(annotation)
        except (NameError, TypeError, SyntaxError, AttributeError):
            return Any

    def _resolve(self, annotation: Any) -> Any:
        holder = types.SimpleNamespace(__annotations__={"it": annotation})
        hints = typing.get_type_hints(holder, self._globals, self._locals, include_extras=True)
        return hints["it"]


def _refuse_missing_annotations(kind: str, parameters: list[inspect.Parameter]) -> None:
    missing = [p.name for p in parameters if p.annotation is inspect.Parameter.empty]
    if missing and missing[0] in ("self", "cls"):
        raise RegistrationError(
            f"{kind}: a method cannot be an action; use @staticmethod, or a function of the module"
        )
    if missing:
        raise RegistrationError(
            f"{kind}: parameter {missing[0]!r} has no annotation, so its argument could not be "
            "checked or brought back; annotate it (under a decorator: use functools.wraps)"
        )


def _without_context(
    kind: str, parameters: list[inspect.Parameter]
) -> tuple[bool, list[inspect.Parameter]]:
    first = parameters[0] if parameters and parameters[0].kind in _FIRST else None
    if first is None or not accepts_context(first.annotation):
        return False, parameters
    if members(first.annotation) == [Context] and first.kind in _POSITIONAL:
        return True, parameters[1:]
    raise RegistrationError(
        f"{kind}: first parameter {first.name!r} is annotated {name_of(first.annotation)}; type "
        "checkers take it for the Context. Put `ctx: Context` before it or make it keyword-only"
    )
