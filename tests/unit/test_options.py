"""The options of an enqueue: each checked, each refusal naming the option."""

import math
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta, timezone
from types import MappingProxyType
from typing import Any, get_type_hints

import pytest

from cyclone_sqla.errors import InvalidJobError, InvalidKeyError
from cyclone_sqla.job_spec import JobSpec
from cyclone_sqla.options import (
    MAX_DURATION,
    MAX_HEADERS_BYTES,
    Options,
    build_spec,
    check_options,
    with_options,
)

_NOON = datetime(2030, 6, 1, 12, tzinfo=UTC)


def _checked(**options: object) -> dict[str, Any]:
    return check_options(options)


@pytest.mark.parametrize(
    ("option", "given", "stored"),
    [
        ("queue", "ledger", "ledger"),
        ("priority", -32768, -32768),
        ("priority", 32767, 32767),
        ("unique", "order:1", "order:1"),
        ("on_duplicate", "return", "return"),
        ("idempotency_key", "k", "k"),
        ("process_in", 0, timedelta(0)),
        ("process_in", 1.5, timedelta(seconds=1.5)),
        ("process_in", timedelta(hours=24), timedelta(hours=24)),
        ("process_in", MAX_DURATION, MAX_DURATION),
        ("process_at", _NOON, _NOON),
        ("deadline", _NOON.astimezone(timezone(timedelta(hours=-7))), _NOON),
        ("max_attempts", 1, 1),
        ("max_attempts", 1_000_000, 1_000_000),
        ("timeout", 0.001, timedelta(milliseconds=1)),
        ("tenant", "Ärzte & Co", "Ärzte & Co"),
        ("trace_id", "00-4bf9-01", "00-4bf9-01"),
        ("headers", {}, {}),
        ("headers", MappingProxyType({"a": ""}), {"a": ""}),
    ],
)
def test_an_option_is_brought_into_the_form_that_is_stored(
    option: str, given: object, stored: object
) -> None:
    assert _checked(**{option: given}) == {option: stored}


@pytest.mark.parametrize(
    ("option", "given", "reason"),
    [
        ("queue", "mail,ledger", "must not hold a comma"),
        ("queue", "", "empty"),
        ("queue", 3, "must be a str"),
        ("queue", "a\nb", "printable"),
        ("queue", "q" * 257, "257 bytes"),
        ("priority", 32768, "from -32768 to 32767"),
        ("priority", -32769, "from -32768 to 32767"),
        ("priority", 1.0, "must be an int"),
        ("priority", True, "must be an int"),
        ("unique", "", "empty"),
        ("unique", "a\x00", "NUL"),
        ("on_duplicate", "ignore", "'raise' or 'return'"),
        ("on_duplicate", ["raise"], "'raise' or 'return'"),
        ("idempotency_key", "\udfff", "surrogate"),
        ("process_in", -1, "negative"),
        ("process_in", timedelta(microseconds=-1), "negative"),
        ("process_in", math.nan, "36500 days"),
        ("process_in", math.inf, "36500 days"),
        pytest.param("process_in", 10**400, "36500 days", id="process_in-huge"),
        ("process_in", timedelta.max, "36500 days"),
        ("process_in", True, "not bool"),
        ("process_in", "1h", "not str"),
        ("process_at", datetime(2030, 1, 1), "naive datetime 2030-01-01"),  # noqa: DTZ001
        ("process_at", date(2030, 1, 1), "not date"),
        ("process_at", 1_900_000_000, "not int"),
        ("process_at", datetime.max.replace(tzinfo=timezone(timedelta(hours=-1))), "out of range"),
        ("deadline", datetime(2030, 1, 1), "naive datetime"),  # noqa: DTZ001
        ("deadline", timedelta(hours=1), "not timedelta"),
        ("max_attempts", 0, "from 1 to 1000000"),
        ("max_attempts", 1_000_001, "from 1 to 1000000"),
        ("max_attempts", 2.0, "must be an int"),
        ("timeout", 0, "more than zero"),
        ("timeout", timedelta(0), "more than zero"),
        ("timeout", -1, "more than zero"),
        ("tenant", "", "empty"),
        ("tenant", "a\tb", "printable"),
        ("trace_id", "\x00", "NUL"),
        ("headers", [("a", "b")], "not be a list"),
        ("headers", {1: "a"}, "the key 1 must be a str"),
        ("headers", {"": "a"}, "empty"),
        ("headers", {"a": 1}, r"\['a'\]: must be a str"),
        ("headers", {"a": "\x00"}, r"\['a'\]: holds a NUL"),
        ("headers", {"a": "\ud800"}, r"\['a'\]: holds a lone surrogate"),
        ("headers", {"a\x00": "b"}, "NUL"),
        ("headers", {"a": "x" * MAX_HEADERS_BYTES}, "bytes of JSON"),
    ],
)
def test_a_bad_option_is_refused_by_name(option: str, given: object, reason: str) -> None:
    with pytest.raises(InvalidJobError, match=reason) as caught:
        _checked(**{option: given})
    assert str(caught.value).startswith(option)


@pytest.mark.parametrize("option", ["unique", "idempotency_key"])
def test_a_bad_key_is_an_invalid_key_error(option: str) -> None:
    with pytest.raises(InvalidKeyError, match=option):
        _checked(**{option: ""})


def test_a_misspelt_option_is_refused_with_the_right_one() -> None:
    with pytest.raises(InvalidJobError, match=r"prioritty: .* did you mean 'priority'"):
        _checked(prioritty=1)


def test_a_delay_and_a_time_together_are_refused() -> None:
    with pytest.raises(InvalidJobError, match="process_in, process_at"):
        build_spec("mail", "{}", {}, Options(process_in=1, process_at=_NOON))


def test_a_delay_and_a_time_given_one_after_the_other_are_refused() -> None:
    with pytest.raises(InvalidJobError, match="process_in, process_at"):
        with_options(_checked(process_in=1), Options(process_at=_NOON))


def test_none_means_the_default() -> None:
    spec = build_spec("mail", "{}", {"queue": "post", "timeout": 5}, {"queue": None})
    assert spec == JobSpec(kind="mail", arguments="{}", queue="post", timeout=timedelta(seconds=5))


def test_options_win_over_defaults() -> None:
    spec = build_spec("mail", "{}", {"queue": "post", "priority": 3}, {"priority": -3})
    assert (spec.queue, spec.priority) == ("post", -3)


@pytest.mark.parametrize("kind", ["", "a\nb", "k" * 257, "\ud800", 3])
def test_a_kind_that_cannot_be_shown_is_refused(kind: Any) -> None:
    with pytest.raises(InvalidJobError, match="kind: "):
        build_spec(kind, "{}", {}, {})


def test_a_changed_header_dict_does_not_change_the_job() -> None:
    headers = {"a": "1"}
    spec = build_spec("mail", "{}", {}, {"headers": headers})
    headers["a"] = "2"
    assert spec.headers == {"a": "1"}


def test_every_option_is_a_field_of_the_job() -> None:
    stored: Mapping[str, Any] = get_type_hints(JobSpec)
    assert set(get_type_hints(Options)) == set(stored) - {"kind", "arguments"}
