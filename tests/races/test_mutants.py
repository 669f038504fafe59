"""The proof of the proof: sequences broken in one way each, and the test that must see it.

A mutant replaces a statement, or the way in which one is built or begun; the product itself is left
alone. What takes a rare interleaving to see is shown to the script of it, the rest to
the state machine.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import sqlalchemy as sa

from cyclone_sqla.dialects import pipeline, postgresql
from cyclone_sqla.dialects.postgresql import PostgresSyntax
from cyclone_sqla.intervention_statements import InterventionStatements
from cyclone_sqla.lifecycle import State, WaitsFor
from cyclone_sqla.line_statements import LineStatements
from cyclone_sqla.statements import Statements, word
from tests.databases import Database
from tests.races import test_admission as scripts
from tests.races.actors import Race
from tests.races.test_sequences_stateful import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

EXAMPLES = 40
"""Of which each mutant needs a few: the run stops at the first failure."""

Break = Callable[[pytest.MonkeyPatch], None]


def no_debt_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that could not hand its place on leaves the line all the same."""
    nothing = sa.select(sa.literal(1)).where(sa.false())
    monkeypatch.setattr(LineStatements, "keep_as_debt", nothing)


def jobs_sink_behind_a_head_that_is_not_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be released just now by somebody who does not see them."""
    locked = PostgresSyntax.locked

    def lock_all_but_heads(
        self: PostgresSyntax, picked: sa.Select[Any], job: Any, name: str, **options: Any
    ) -> sa.FromClause:
        if name == "held":
            return picked.cte(name).prefix_with("MATERIALIZED")
        return locked(self, picked, job, name, **options)

    monkeypatch.setattr(PostgresSyntax, "locked", lock_all_but_heads)


def jobs_sink_behind_a_first_that_is_not_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has it locked may be about to cancel it, not to make it the head."""

    def heads_and_firsts(self: LineStatements, heads: sa.CTE) -> sa.FromClause:
        job = self.job.alias("relied_on")
        first = sa.select(sa.func.coalesce(heads.c.head, self._first_of(heads.c.key, heads)))
        return sa.select(job.c.id, job.c.sequence_key).where(job.c.id.in_(first)).cte("held")

    monkeypatch.setattr(LineStatements, "_locked_heads", heads_and_firsts)


def a_worker_has_one_snapshot_for_a_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it would be on a server whose default is REPEATABLE READ, if no level was pinned."""
    for module in (postgresql, pipeline):
        monkeypatch.setattr(module, "BEGIN", "BEGIN ISOLATION LEVEL REPEATABLE READ")


def a_job_comes_back_right_behind_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though there may be none, or one whose successor is being chosen."""
    back = InterventionStatements._back_in_line

    def at_once(self: InterventionStatements, run_at: Any) -> dict[str, Any]:
        values = back(self, run_at)
        lost = sa.and_(self.job.c.sequence_key.is_not(None), self.job.c.admitted.is_(None))
        turn = sa.case((lost, word(WaitsFor.TURN)), else_=values["waits_for"])
        return {**values, "waits_for": turn}

    monkeypatch.setattr(InterventionStatements, "_back_in_line", at_once)


def a_first_that_is_not_ready_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A paused job, or one that halts its sequence, does not keep its place."""
    first_of = LineStatements._first_of

    def first_ready(self: LineStatements, key: Any, outer: sa.FromClause) -> Any:
        found = first_of(self, key, outer).element
        ready = found.get_final_froms()[0].c.state == word(State.PENDING)
        return found.where(ready).correlate(outer).scalar_subquery()

    monkeypatch.setattr(LineStatements, "_first_of", first_ready)


def a_gap_in_the_positions_is_no_reason_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def may_lead(_self: LineStatements, job: Any) -> sa.ColumnElement[bool]:
        return sa.and_(job.c.sequence_open.is_not(None), job.c.admitted.is_(None))

    monkeypatch.setattr(LineStatements, "_may_lead", may_lead)


def a_claim_does_not_ask_for_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Statements, "may_start", lambda _self, _job: sa.true())


SEEN_BY_THE_MACHINE: tuple[Break, ...] = (
    no_debt_is_kept,
    a_first_that_is_not_ready_is_passed_over,
)


@pytest.mark.parametrize("mutant", SEEN_BY_THE_MACHINE, ids=lambda mutant: mutant.__name__)
def test_the_state_machine_sees_what_is_broken(
    postgresql_database: Database, monkeypatch: pytest.MonkeyPatch, mutant: Break
) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        run(postgresql_database, EXAMPLES, steps=40, shrinks=False)


Script = Callable[[Race], None]


def cancel_the_next_while_its_turn_comes(race: Race) -> None:
    scripts.test_whatever_happens_to_the_next_job_while_its_turn_comes_the_line_goes_on(
        race, "cancel", True
    )


SEEN_BY_A_SCRIPT: tuple[tuple[Break, Script], ...] = (
    (no_debt_is_kept, cancel_the_next_while_its_turn_comes),
    (
        jobs_sink_behind_a_head_that_is_not_locked,
        scripts.test_jobs_that_come_in_while_the_head_is_released_run_after_it,
    ),
    (
        jobs_sink_behind_a_first_that_is_not_locked,
        scripts.test_an_admission_relies_on_no_first_job_that_it_could_not_lock,
    ),
    (
        a_worker_has_one_snapshot_for_a_transaction,
        scripts.test_a_worker_reads_anew_in_every_statement_whatever_the_servers_default,
    ),
    (
        a_job_comes_back_right_behind_its_head,
        scripts.test_a_replay_of_a_head_whose_debt_is_being_paid_waits_and_comes_back_in_line,
    ),
    (
        a_gap_in_the_positions_is_no_reason_to_wait,
        scripts.test_a_position_that_fills_a_gap_while_the_one_before_ends_is_the_next_head,
    ),
    (
        a_claim_does_not_ask_for_pauses,
        scripts.test_a_job_of_a_sequence_whose_pause_is_committed_does_not_start,
    ),
)


@pytest.mark.parametrize(
    ("mutant", "script"), SEEN_BY_A_SCRIPT, ids=lambda function: function.__name__[:50]
)
def test_a_script_sees_what_is_broken(
    postgresql_database: Database,
    monkeypatch: pytest.MonkeyPatch,
    mutant: Break,
    script: Script,
) -> None:
    mutant(monkeypatch)
    with closing(Race(postgresql_database)) as race, pytest.raises(AssertionError):
        script(race)
