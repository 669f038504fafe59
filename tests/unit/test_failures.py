"""A failure can be recorded whatever the exception is, and every database takes the record."""

import gc
import json
import sqlite3
import sys
import weakref
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest

from cyclone_sqla.failures import DETAILS_LIMIT, ERROR_LIMIT, Failure
from cyclone_sqla.outcomes import Discard


class _Mute(Exception):
    def __str__(self) -> NoReturn:
        raise RuntimeError("not telling")

    __repr__ = __str__


class _Quits(Exception):
    def __str__(self) -> NoReturn:  # noqa: PLE0307
        sys.exit(3)


class _SaysNoText(Exception):
    def __str__(self) -> Any:
        return 42  # noqa: PLE0307


class _TextOfItsOwn(str):
    def __len__(self) -> NoReturn:
        raise RuntimeError("no length")

    def __getitem__(self, key: object) -> NoReturn:
        raise RuntimeError("no parts")

    def __str__(self) -> NoReturn:
        raise RuntimeError("no text")


class _SaysOddText(Exception):
    def __str__(self) -> str:
        return _TextOfItsOwn("said all the same")


class _OddInit(Exception):
    def __init__(self, *, needed: object) -> None:
        self.needed = needed


class _Untraceable(Exception):
    @property
    def __traceback__(self) -> NoReturn:  # type: ignore[override]
        raise RuntimeError("no traceback")

    @property
    def __cause__(self) -> NoReturn:  # type: ignore[override]
        raise RuntimeError("no cause")

    @property
    def __context__(self) -> NoReturn:  # type: ignore[override]
        raise RuntimeError("no context")


class _WrongTraceback(Exception):
    __traceback__ = "a string"  # type: ignore[assignment]
    __cause__ = "another"  # type: ignore[assignment]


class _EndlessTraceback:
    tb_frame = sys._getframe()
    tb_lineno = 1

    @property
    def tb_next(self) -> "_EndlessTraceback":
        return self


class _EndlesslyTraced(Exception):
    __traceback__ = _EndlessTraceback()  # type: ignore[assignment]


class _NoName(type):
    def __getattribute__(cls, name: str) -> Any:
        if name in ("__module__", "__qualname__", "__name__"):
            raise RuntimeError("no name")
        return super().__getattribute__(name)


class _Nameless(Exception, metaclass=_NoName):
    pass


class _GroupThatHides(ExceptionGroup[Exception]):
    @property
    def exceptions(self) -> NoReturn:  # type: ignore[override]
        raise RuntimeError("no members")


class _AlwaysAnother(Exception):
    @property
    def __cause__(self) -> BaseException:  # type: ignore[override]
        return _AlwaysAnother("again")


def _recursing() -> Exception:
    def deeper() -> None:
        deeper()

    try:
        deeper()
    except RecursionError as exc:
        return exc
    raise AssertionError


def _chain(length: int) -> Exception:
    exc = ValueError("the root")
    for i in range(length):
        outer = ValueError(f"link {i}")
        outer.__cause__ = exc
        exc = outer
    return exc


def _huge() -> Exception:
    """Every part at its limit, in characters of four bytes."""
    exc = _recursing()
    for _ in range(20):
        outer = ValueError("😀" * 100_000)
        outer.__traceback__ = exc.__traceback__
        outer.__cause__ = exc
        exc = outer
    return exc


def _circle() -> Exception:
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    return one


def _nested_groups(depth: int) -> ExceptionGroup[Exception]:
    group = ExceptionGroup("innermost", [ValueError("leaf")])
    for i in range(depth):
        group = ExceptionGroup(f"group {i}", [group, KeyError(i)])
    return group


def _noted(*notes: object) -> Exception:
    exc = ValueError("noted")
    exc.__notes__ = list(notes)  # type: ignore[attr-defined]
    return exc


def _misnoted() -> Exception:
    exc = ValueError("noted")
    exc.__notes__ = 7  # type: ignore[attr-defined,assignment]
    return exc


def _without_init() -> BaseException:
    return _OddInit.__new__(_OddInit)


ODD = {
    "NUL": ValueError("a\x00b"),
    "lone surrogate": ValueError("a\ud800b\udfff"),
    "control characters": ValueError("\x1b[31mred\x07\x85\x9f\r\x7f"),
    "line separators": ValueError("a\u2028b\u2029c"),
    "only NUL": ValueError("\x00" * 100_000),
    "only surrogates": ValueError("\udc80" * 100_000),
    "only quotation marks": ValueError('"' * 100_000),
    "only emoji": ValueError("😀" * 100_000),
    "50 MB": ValueError("begin" + "x" * 50_000_000 + "end"),
    "str raises": _Mute("x"),
    "str exits": _Quits("x"),
    "str is no text": _SaysNoText("x"),
    "str is odd text": _SaysOddText("x"),
    "argument can't be shown": ValueError(_Mute()),
    "unprintable int": ValueError(10**5000),
    "recursion": _recursing(),
    "nested groups": _nested_groups(300),
    "wide group": ExceptionGroup("wide", [ValueError(str(i)) for i in range(5_000)]),
    "group that hides its members": _GroupThatHides("g", [ValueError("x")]),
    "long cause chain": _chain(5_000),
    "circle of causes": _circle(),
    "endless causes": _AlwaysAnother("first"),
    "huge in every way": _huge(),
    "odd init": _OddInit(needed=object()),
    "never initialised": _without_init(),
    "no traceback to get": _Untraceable("x"),
    "wrong traceback": _WrongTraceback("x"),
    "endless traceback": _EndlesslyTraced("x"),
    "nameless class": _Nameless("x"),
    "class with a huge name": type("N" * 1_000_000, (Exception,), {})("x"),
    "class of a huge module": type("E", (Exception,), {"__module__": "m" * 100_000})("x"),
    "class of an odd module": type("E", (Exception,), {"__module__": 7})("x"),
    "notes": _noted("a note\x00", "b" * 100_000, *range(1_000)),
    "notes that fail": _noted(_Mute()),
    "notes that are none": _misnoted(),
    "SystemExit": SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt(),
    "GeneratorExit": GeneratorExit(),
    "BaseExceptionGroup": BaseExceptionGroup("b", [SystemExit(1), KeyboardInterrupt()]),
    "no message": ValueError(),
}


@pytest.fixture(scope="module")
def database() -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(":memory:")
    yield connection
    connection.close()


@pytest.mark.parametrize("name", ODD)
def test_any_exception_becomes_a_record_that_can_be_stored(
    name: str, database: sqlite3.Connection
) -> None:
    failure = Failure.of(ODD[name], note="attempt 3 of 3, none left")

    _assert_storable(failure, database)
    assert failure.error != "an error that could not be recorded"
    assert failure.error.endswith("(attempt 3 of 3, none left)")
    assert json.loads(failure.details)["note"] == "attempt 3 of 3, none left"


@pytest.mark.parametrize("name", ODD)
def test_any_exception_can_be_the_cause_of_a_failure(
    name: str, database: sqlite3.Connection
) -> None:
    failure = Failure.because("timed out after 5 s", "TimeoutError", cause=ODD[name])

    _assert_storable(failure, database)
    assert failure.error == "TimeoutError: timed out after 5 s"
    assert json.loads(failure.details)["causes"][0]["relation"] == "cause"


@pytest.mark.parametrize("text", ["", "a\x00b\ud800", "x" * 1_000_000, "\ud800" * 100_000])
def test_any_text_becomes_a_record_that_can_be_stored(
    text: str, database: sqlite3.Connection
) -> None:
    _assert_storable(Failure.because(text, "Odd"), database)


def _assert_storable(failure: Failure, database: sqlite3.Connection) -> None:
    assert 0 < len(failure.error) <= ERROR_LIMIT
    assert len(failure.details.encode()) <= DETAILS_LIMIT
    assert failure.error.isprintable(), "one line, nothing that a terminal obeys"
    told = json.loads(failure.details)
    assert {"type", "message", "traceback", "causes"} <= told.keys()
    for text in _texts(told):
        assert "\x00" not in text
        text.encode()  # a lone surrogate fails here
    assert database.execute(
        "SELECT json_valid(?), json_extract(?, '$.type'), ?",
        (failure.details, failure.details, failure.error),
    ).fetchone() == (1, told["type"], failure.error)


def _texts(value: object) -> Iterator[str]:
    match value:
        case str():
            yield value
        case list():
            for item in value:
                yield from _texts(item)
        case dict():
            yield from _texts([*value.keys(), *value.values()])


def test_the_error_is_one_readable_line() -> None:
    assert Failure.of(ValueError("no such\n\taccount")).error == "ValueError: no such account"
    assert Failure.of(ValueError()).error == "ValueError"
    assert Failure.of(sqlite3.OperationalError("x")).error == "sqlite3.OperationalError: x"
    assert Failure.of(Discard("gone")).error == "Discard: gone"


def test_what_cannot_be_stored_is_spelt_out() -> None:
    failure = Failure.of(ValueError("a\x00b\ud800c\x1bd"))

    assert failure.error == r"ValueError: a\x00b\ud800c\x1bd"
    assert json.loads(failure.details)["message"] == r"a\x00b\ud800c\x1bd"


def test_head_and_tail_of_a_long_message_are_kept() -> None:
    failure = Failure.of(ValueError("begin" + "x" * 50_000_000 + "end"))

    for text in (
        failure.error.removeprefix("ValueError: "),
        json.loads(failure.details)["message"],
    ):
        assert text.startswith("begin")
        assert text.endswith("end")
        assert "characters left out" in text


def test_a_message_that_cannot_be_shown_says_why() -> None:
    assert "str() raised RuntimeError" in Failure.of(_Mute()).error


def test_the_traceback_names_the_lines_of_the_action() -> None:
    try:
        _chain(0).nonsense  # type: ignore[attr-defined]  # noqa: B018
    except AttributeError as exc:
        failure = Failure.of(exc)

    (line,) = json.loads(failure.details)["traceback"]
    assert __file__ in line
    assert "in test_the_traceback_names_the_lines_of_the_action: _chain(0).nonsense" in line


def test_the_ends_of_a_long_traceback_are_kept() -> None:
    lines = json.loads(Failure.of(_recursing()).details)["traceback"]

    assert "_recursing" in lines[0]
    assert any("calls left out" in line for line in lines)
    assert "in deeper" in lines[-1]


def test_causes_contexts_and_members_are_told_in_order() -> None:
    root = KeyError("root")
    group = ExceptionGroup("both", [ValueError("one"), ValueError("two")])
    group.__context__ = root
    outer = RuntimeError("outer")
    outer.__cause__ = group

    causes = json.loads(Failure.of(outer).details)["causes"]

    assert [(c["relation"], c["type"], c["message"]) for c in causes] == [
        ("cause", "ExceptionGroup", "both (2 sub-exceptions)"),
        ("context", "KeyError", "'root'"),
        ("member", "ValueError", "one"),
        ("member", "ValueError", "two"),
    ]


def test_a_suppressed_context_is_not_told() -> None:
    exc = ValueError("x")
    exc.__context__ = KeyError("hidden")
    exc.__suppress_context__ = True

    assert json.loads(Failure.of(exc).details)["causes"] == []


def test_a_long_chain_keeps_its_root() -> None:
    causes = json.loads(Failure.of(_chain(500)).details)["causes"]

    assert causes[0]["message"] == "link 498"
    assert causes[-1]["message"] == "the root"
    assert [c["message"] for c in causes if c["relation"] == "left out"] == ["490 more"]


def test_a_circle_of_causes_is_told_once() -> None:
    causes = json.loads(Failure.of(_circle()).details)["causes"]

    assert [c["message"] for c in causes] == ["two"]


def test_notes_are_part_of_the_message() -> None:
    assert json.loads(Failure.of(_noted("row 7")).details)["message"] == "noted\nrow 7"


def test_a_failure_keeps_nothing_of_the_exception_alive() -> None:
    class Local(Exception):
        pass

    def fail() -> Failure:
        try:
            raise Local
        except Local as exc:
            failures.append(weakref.ref(exc))
            return Failure.of(exc)

    failures: list[weakref.ref[Local]] = []
    gc.disable()
    try:
        fail()
        assert failures[0]() is None
    finally:
        gc.enable()


def test_a_failure_is_recorded_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: object, **__: object) -> NoReturn:
        raise MemoryError

    monkeypatch.setattr(json, "dumps", out_of_memory)

    assert Failure.of(ValueError("x")).error == "an error that could not be recorded"
    assert Failure.because("x", "y").error == "an error that could not be recorded"
    assert json.loads(Failure.of(ValueError("x")).details)["type"] == "unknown"
