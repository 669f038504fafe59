"""Log records as lines: for people, and for programs."""

import json
import logging
import subprocess
import sys
from typing import Any

import pytest

from cyclone_sqla.cli.logs import LogFormat, formatter

OWN = "cyclone_sqla.worker"


class _Sulking:
    def __str__(self) -> str:
        raise RuntimeError("no")


def _record(
    message: object, *args: object, name: str = OWN, exc: BaseException | None = None, **extra: Any
) -> logging.LogRecord:
    exc_info = (type(exc), exc, exc.__traceback__) if exc is not None else None
    logger = logging.getLogger(name)
    return logger.makeRecord(
        name, logging.WARNING, __file__, 1, message, args, exc_info, extra=extra
    )


def _text(record: logging.LogRecord) -> str:
    return formatter("text", "web-1").format(record)


def _object(record: logging.LogRecord) -> dict[str, Any]:
    line = formatter("json", "web-1").format(record)
    assert "\n" not in line
    fields: dict[str, Any] = json.loads(line, parse_constant=_refuse)
    return fields


def _refuse(constant: str) -> None:
    pytest.fail(f"{constant} is no JSON")


def _raised(message: str) -> ValueError:
    try:
        raise ValueError(message)
    except ValueError as exc:
        return exc


# ---- text --------------------------------------------------------------------------------------


def test_a_line_begins_with_time_level_and_worker() -> None:
    time, zone, level, worker, *words = _text(_record("all is %s", "well")).split()
    assert len(time) == len("2026-01-31")
    assert len(zone) == len("12:00:00.000+00:00")
    assert (level, worker, words) == ("WARNING", "web-1", ["all", "is", "well"])


def test_others_are_named() -> None:
    assert _text(_record("hello", name="shop.mail")).endswith("  shop.mail: hello")
    assert _text(_record("hello", name="cyclone_sqla_shop")).endswith("  cyclone_sqla_shop: hello")


def test_the_job_is_added_where_the_message_does_not_name_it() -> None:
    job: dict[str, Any] = {"job_id": 7, "kind": "mail", "attempt": 2}
    assert _text(_record("sent", **job)).endswith("  sent  job_id=7  kind=mail  attempt=2")
    assert _text(_record("mail job 7: sent", **job)).endswith("  mail job 7: sent")


@pytest.mark.parametrize(
    "break_", ["\n", "\r", "\x0b", "\x1b[2J", "\x85", "\u2028", "\u202e", "\ud800"]
)
def test_nothing_breaks_a_line_or_speaks_to_the_terminal(break_: str) -> None:
    line = _text(_record("a%sb", break_, name=f"n{break_}", job_id=break_, kind=break_))
    assert line.isprintable()


def test_a_traceback_is_indented_and_its_text_can_not_leave_it() -> None:
    lines = _text(_record("broke", exc=_raised("bad\n2026-01-31 \x1b[31m"))).split("\n")
    assert lines[0].endswith("broke")
    assert all(line.startswith("    ") and line.isprintable() for line in lines[1:])
    assert lines[-2:] == ["    ValueError: bad", "    2026-01-31 \\x1b[31m"]


# ---- JSON --------------------------------------------------------------------------------------


def test_extra_fields_are_fields() -> None:
    fields = _object(_record("sent", job_id=7, details={"to": ["a", None, 1.5]}))
    assert (fields["message"], fields["level"], fields["logger"]) == ("sent", "warning", OWN)
    assert (fields["worker"], fields["job_id"]) == ("web-1", 7)
    assert fields["details"] == {"to": ["a", None, 1.5]}


def test_no_extra_field_replaces_one_of_ours() -> None:
    fields = _object(_record("sent", level="mine", worker="me"))
    assert (fields["level"], fields["level_"]) == ("warning", "mine")
    assert (fields["worker"], fields["worker_"]) == ("web-1", "me")


def test_what_is_no_json_is_told_as_text() -> None:
    fields = _object(_record("x", nan=float("nan"), cls=int, deep={"a": {1j}}, sulking=_Sulking()))
    assert (fields["nan"], fields["cls"]) == ("nan", "<class 'int'>")
    assert fields["deep"] == "{'a': {1j}}"
    assert fields["sulking"] == "<_Sulking that can't be shown: RuntimeError>"


def test_an_exception_is_one_field() -> None:
    fields = _object(_record("broke", exc=_raised("bad\nnews")))
    assert fields["exception"].startswith("Traceback (most recent call last):\n")
    assert fields["exception"].endswith("ValueError: bad\nnews")


# ---- both --------------------------------------------------------------------------------------


@pytest.mark.parametrize("log_format", ["text", "json"])
@pytest.mark.parametrize(
    "record",
    [
        pytest.param(_record("%d apples", "no"), id="wrong type"),
        pytest.param(_record("%s %s", 1), id="too few"),
        pytest.param(_record("%s", _Sulking()), id="argument"),
        pytest.param(_record(_Sulking()), id="message"),
    ],
)
def test_a_record_that_can_not_be_put_together_is_still_a_line(
    log_format: LogFormat, record: logging.LogRecord
) -> None:
    line = formatter(log_format, "web-1").format(record)
    assert line.isprintable()


PROGRAM = """
import logging, warnings
from cyclone_sqla.cli import logs
logs.set_up("json", "warning", "web-1")
warnings.warn("this is old")
logging.getLogger("shop").info("not heard")
logging.basicConfig(level="INFO")
logging.getLogger("shop").error("heard once")
"""


def test_warnings_of_python_are_records_and_the_set_up_stands() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True
    )
    assert done.stdout == ""
    warning, error = [json.loads(line) for line in done.stderr.splitlines()]
    assert (warning["logger"], error["message"]) == ("py.warnings", "heard once")
    assert "this is old" in warning["message"]
