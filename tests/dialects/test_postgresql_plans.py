"""PostgreSQL: what a worker asks costs what it yields, whatever the statistics say."""

import json
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from psycopg import sql

from cyclone_sqla.dialects import Dialect
from cyclone_sqla.dialects.postgresql import PostgresDialect
from tests.databases import Database
from tests.dialects.crowd import MOMENTS, Moment, a_whole_life, never, when_all_had_ended
from tests.life.hands import Hands

MOST_ROWS = 3_000
"""Rows that any step of a plan may look at: batches are smaller, the crowd is 20 times larger."""


@pytest.fixture
def hands(postgresql_database: Database) -> Iterator[Hands]:
    with closing(Hands(postgresql_database)) as hands:
        for table in ("job", "idempotency_key", "history"):
            hands.execute(f"ALTER TABLE cyclone_{table} SET (autovacuum_enabled = false)")
        yield hands


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("mode", "moment"),
    [("force_generic_plan", moment) for moment in MOMENTS]
    # Of a worker that may not prepare, which sees less: the values are known to the planner.
    + [("force_custom_plan", moment) for moment in (never, when_all_had_ended)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_no_statement_reads_the_crowd(
    hands: Hands, moment: Moment, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One by one: what goes through a pipeline is seen by no listener.
    monkeypatch.setattr(PostgresDialect, "run", Dialect.run)
    moment(hands, lambda: hands.execute("ANALYZE"))

    with explaining(hands, mode) as plans:
        a_whole_life(hands)

    assert len(plans) > 30
    faults = [f"{fault}\n{text}" for text, plan in plans for fault in faults_of(plan)]
    assert faults == [], "\n\n".join(faults)


def test_every_statement_goes_on_working_after_many_executions_on_one_connection(
    hands: Hands,
) -> None:
    """psycopg prepares a statement at its 6th execution, the plan may be generic at the 11th."""
    never(hands, lambda: None)
    with hands.held.step() as connection:
        driver = connection.connection.driver_connection
    for _ in range(16):
        hands.execute("DELETE FROM cyclone_idempotency_key WHERE key = 'new'")
        a_whole_life(hands)
    with hands.held.step() as connection:
        assert connection.connection.driver_connection is driver


Plan = dict[str, Any]


@contextmanager
def explaining(hands: Hands, mode: str) -> Iterator[list[tuple[str, Plan]]]:
    """Explain every statement with what it really does, before it runs."""
    plans: list[tuple[str, Plan]] = []

    def explain(
        connection: sa.Connection, _cursor: object, text: str, parameters: Any, *_: object
    ) -> None:
        if "cyclone_" in text:
            driver: Any = connection.connection.driver_connection
            plans.append((text, plan_of(driver, text, parameters, mode)))

    for engine in (hands.engine, hands.worker_engine):
        sa.event.listen(engine, "before_cursor_execute", explain)
    yield plans


def plan_of(driver: psycopg.Connection[Any], text: str, values: dict[str, Any], mode: str) -> Plan:
    """The plan that was run, in a transaction that is rolled back."""
    names = list(dict.fromkeys(re.findall(r"%\((\w+)\)s", text)))
    numbered = re.sub(r"%\((\w+)\)s", lambda match: f"${names.index(match[1]) + 1}", text)
    arguments = sql.SQL(", ").join(sql.Literal(values[name]) for name in names)
    call = sql.SQL("EXECUTE asked ({})").format(arguments) if names else sql.SQL("EXECUTE asked")
    with driver.transaction(force_rollback=True), driver.cursor() as cursor:
        cursor.execute(f"SET LOCAL plan_cache_mode = {mode}".encode())
        cursor.execute(f"PREPARE asked AS {numbered}".encode())
        cursor.execute(sql.SQL("EXPLAIN (ANALYZE, TIMING off, FORMAT json) {}").format(call))
        row = cursor.fetchone()
        cursor.execute("DEALLOCATE asked")
    assert row is not None
    plan: Plan = row[0][0]["Plan"]
    return plan


def faults_of(plan: Plan) -> Iterator[str]:
    """What is wrong with it: a look at more rows than anybody asked for."""
    for node in nodes_of(plan):
        rows = rows_seen(node)
        is_on_ours = str(node.get("Relation Name", "")).startswith("cyclone_")
        if rows > MOST_ROWS and (is_on_ours or "Sort" in node["Node Type"]):
            yield f"{node['Node Type']} saw {rows:.0f} rows: {json.dumps(brief(node))}"


def nodes_of(node: Plan) -> Iterator[Plan]:
    yield node
    for child in node.get("Plans", []):
        yield from nodes_of(child)


def rows_seen(node: Plan) -> float:
    removed = sum(value for name, value in node.items() if name.startswith("Rows Removed"))
    return float((node["Actual Rows"] + removed) * node["Actual Loops"])


def brief(node: Plan) -> Plan:
    names = ("Relation Name", "Index Name", "Index Cond", "Filter", "Actual Loops", "Plan Rows")
    return {name: node[name] for name in names if name in node}
