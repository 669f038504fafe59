"""A worker's turn as one function in PostgreSQL: settle, hand on, claim.

Where a turn is about one job, most of its time is overhead: of seven statements, of their answers,
and of a row version for a next in line that is made ready only to be claimed at once. The function
has none of these. It is temporary, so that each connection makes its own, out of the very
statements that are sent one by one elsewhere: it always is what this code means, and nobody has to
migrate it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import sqlalchemy as sa
from sqlalchemy import BindParameter, Connection
from sqlalchemy.dialects.postgresql.base import PGCompiler, PGDialect
from sqlalchemy.exc import DBAPIError

from cyclone_sqla.dialects.base import Turn, claimed_jobs
from cyclone_sqla.dialects.pipeline import driver_errors
from cyclone_sqla.lifecycle import WaitsFor
from cyclone_sqla.models import JsonText

_NAME = "pg_temp.cyclone_turn"

_PARAMETERS = {
    "done_id": "bigint[]",
    "done_lease": "bigint[]",
    "done_result": "text[]",
    "released_id": "bigint[]",
    "hands_over": "boolean",
    "only_next": "boolean",
    "wanted_queue": "text[]",
    "wanted_slots": "integer[]",
    "kinds_kind": "text[]",
    "floors_queue": "text[]",
    "floors_kind": "text[]",
    "floors_priority": "smallint[]",
    "floors_id": "bigint[]",
    "claimed_by": "text",
    "lease_length": "interval",
    "now": "timestamptz",
}

_VARIABLES = {name: f"_{name}" for name in [*_PARAMETERS, "key", "next_ids"]} | {
    "one_id": "_done_id[1]", "one_lease": "_done_lease[1]", "one_result": "_done_result[1]",
}  # fmt: skip
"""What the bound values of the statements are in the function, if they are its own."""

_NO_VERDICT: list[sa.ColumnElement[Any]] = [
    sa.literal_column("NULL::bigint[]"),
    sa.literal_column("NULL::boolean"),
    sa.literal_column("NULL::integer"),
]
"""What stands in the rows of claimed jobs where the first row tells of the settled ones."""


@dataclass(frozen=True)
class TurnFunction:
    """What the function is made of: statements that name their bound values as it does.

    ``complete_one`` is ``complete`` for one run, which is what most of its time goes into where
    jobs come one by one. ``next_to_claim`` finds an id and its queue in the line of a ``key``,
    ``nexts_to_claim`` the same (and ``left_id``) in the lines of all heads that are released.
    ``claim_next`` takes these jobs (``next_ids``) and ``claim`` others; both return ``claimed``.
    """

    complete: Any
    complete_one: sa.Update
    advance: Any
    next_to_claim: Any
    nexts_to_claim: Any
    admit_next: Any
    keep_as_debt: Any
    claim_next: sa.Update
    claim: sa.Update
    claimed: Sequence[sa.ColumnElement[Any]]

    def create(self, connection: Connection) -> bool:
        """Make it on this connection; False where the role may make nothing temporary."""
        import psycopg
        from psycopg.sql import Literal

        driver: Any = connection.connection.driver_connection
        columns = ", ".join(f"{column.name} {_type_of(column)}" for column in self.claimed)
        parameters = ", ".join(
            f"_{name} {type_} DEFAULT {_default_of(type_)}" for name, type_ in _PARAMETERS.items()
        )
        try:
            with driver_errors(connection), driver.transaction():
                driver.execute(
                    f"CREATE FUNCTION {_NAME}({parameters}) "
                    f"RETURNS TABLE ({columns}, "
                    "settled bigint[], has_delayed boolean, handed integer) "
                    f"LANGUAGE plpgsql AS {Literal(self._body()).as_string(driver)}".encode()
                )
        except DBAPIError as exc:
            if isinstance(exc.orig, psycopg.errors.InsufficientPrivilege):
                return False
            raise
        return True

    def call(self, connection: Connection, values: Mapping[str, Any]) -> Turn:
        """Take a turn: its first row tells of the settled jobs, the others are the claimed."""
        driver: Any = connection.connection.driver_connection
        given = {name: value for name, value in values.items() if value}
        call = _call_with(tuple(given))
        with driver_errors(connection):
            cursor = driver.cursor()
            cursor.execute(call, [_as_text(value) for value in given.values()])
            first, *claimed = cursor.fetchall()
        settled, has_delayed, handed = first[-len(_NO_VERDICT) :]
        jobs = claimed_jobs([row[: -len(_NO_VERDICT)] for row in claimed])
        return Turn(settled or (), bool(has_delayed), jobs, handed)

    def _body(self) -> str:
        claim_next, claim = (
            _text(taking.returning(*self.claimed, *_NO_VERDICT))
            for taking in (self.claim_next, self.claim)
        )
        left = self.complete_one.table.c
        complete_one = self.complete_one.returning(left.sequence_key, left.position.is_not(None))
        return f"""
#variable_conflict use_column
DECLARE
    _key text;
    _is_numbered boolean;
    _next_id bigint;
    _next_queue text;
    _next_ids bigint[];
    _next_queues text[];
    _left_ids bigint[];
    _rest integer[];
    _count bigint;
BEGIN
    IF cardinality(_done_id) = 1 THEN
        {_text(complete_one)} INTO _key, _is_numbered;
        IF FOUND THEN
            settled := _done_id;
        END IF;
    ELSIF cardinality(_done_id) > 1 THEN
        WITH done AS ({_text(self.complete)})
        SELECT array_agg(done.id), bool_or(done.position IS NOT NULL)
        INTO settled, _is_numbered FROM done;
        IF cardinality(settled) < cardinality(_done_id) THEN
            _released_id := ARRAY(SELECT unnest(_released_id) INTERSECT SELECT unnest(settled));
        END IF;
    END IF;

    IF cardinality(_released_id) > 0 AND settled IS NOT NULL THEN
        IF _is_numbered THEN
            {_text(self.advance)};
        END IF;
        IF _hands_over AND NOT _is_numbered THEN
            IF cardinality(_done_id) = 1 THEN
                {_text(self.next_to_claim)} INTO _next_id, _next_queue;
                IF FOUND THEN
                    _next_ids := ARRAY[_next_id];
                    _count := array_position(_wanted_queue, _next_queue);
                    _wanted_slots[_count] := _wanted_slots[_count] - 1;
                    _released_id := '{{}}';
                END IF;
            ELSE
                WITH ready AS ({_text(self.nexts_to_claim)})
                SELECT array_agg(ready.id), array_agg(ready.queue), array_agg(ready.left_id)
                INTO _next_ids, _next_queues, _left_ids FROM ready;
            END IF;
            IF _left_ids IS NOT NULL THEN
                _rest := ARRAY(
                    SELECT wanted.slots - cardinality(array_positions(_next_queues, wanted.queue))
                    FROM unnest(_wanted_queue, _wanted_slots) WITH ORDINALITY
                    AS wanted(queue, slots, place) ORDER BY wanted.place
                );
                IF 0 <= ALL (_rest) THEN
                    _wanted_slots := _rest;
                    _released_id := ARRAY(
                        SELECT unnest(_released_id) EXCEPT SELECT unnest(_left_ids)
                    );
                ELSE
                    _next_ids := NULL;
                END IF;
            END IF;
        END IF;
        IF cardinality(_released_id) > 0 THEN
            WITH ahead AS ({_text(self.admit_next)})
            SELECT count(*), bool_or(ahead.waits_for = '{WaitsFor.TIME}')
            INTO _count, has_delayed FROM ahead;
            IF _count < cardinality(_released_id) THEN
                WITH owing AS ({_text(self.keep_as_debt)})
                SELECT count(*) INTO _count FROM owing;
            END IF;
        END IF;
    END IF;
    handed := coalesce(cardinality(_next_ids), 0);
    RETURN NEXT;
    IF handed > 0 THEN
        RETURN QUERY {claim_next};
    END IF;
    IF handed = 0 OR NOT _only_next THEN
        RETURN QUERY {claim};
    END IF;
END
"""


@cache
def _call_with(names: Sequence[str]) -> str:
    """A call that gives these parameters, and leaves the others as they are if nobody does: most
    turns need few of them, and each costs the driver as much as a column of an answer.
    """
    given = ", ".join(f"_{name} => %s::{_PARAMETERS[name]}" for name in names)
    return f"SELECT * FROM {_NAME}({given})"


def _default_of(type_: str) -> str:
    """What a parameter is that nobody gives: nothing."""
    if type_.endswith("[]"):
        return "'{}'"
    return "false" if type_ == "boolean" else "NULL"


class _BodyCompiler(PGCompiler):
    """Writes a statement of the function: its own values by their names, others as they are."""

    def visit_bindparam(self, bindparam: BindParameter[Any], *args: Any, **kwargs: Any) -> str:
        if bindparam.key in _VARIABLES:
            return _VARIABLES[bindparam.key]
        base: Any = super()  # has no types
        return str(base.visit_bindparam(bindparam, *args, **{**kwargs, "literal_binds": True}))


class _BodyDialect(PGDialect):
    statement_compiler = _BodyCompiler
    supports_statement_cache = True
    default_paramstyle = "named"  # others double percent signs


_DIALECT: sa.Dialect = cast("Any", _BodyDialect)()


def _as_text(value: Any) -> Any:
    """A list as the text that PostgreSQL reads: the driver's own way takes far longer."""
    if not isinstance(value, list | tuple):
        return value
    elements = cast("Sequence[int | str | None]", value)
    return "{" + ",".join([_element_of(element) for element in elements]) + "}"


def _element_of(value: int | str | None) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, int):
        return str(value)
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _text(statement: Any) -> str:
    return str(statement.compile(dialect=_DIALECT))


def _type_of(column: sa.ColumnElement[Any]) -> str:
    if isinstance(column.type, JsonText):  # is read as its text
        return "text"
    return column.type.compile(_DIALECT)
