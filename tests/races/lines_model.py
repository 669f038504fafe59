"""What must hold of sequences, in plain Python: fed with what is committed, asked what may happen.

Looks are numbered. What a look shows was committed before it; a transaction that began after it has
seen that, or more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Row = Any
"""A row of :meth:`tests.races.actors.Race.rows`."""


@dataclass
class Known:
    """What is known of a job; times are the numbers of looks."""

    key: str
    place: int
    called: int
    committed: int | None = None
    entered: int | None = None
    """When it was first seen in its line, after it was last seen outside."""
    was_released: bool = False


@dataclass(frozen=True)
class Turn:
    """A job became the head of its line, by a transaction that began after this look."""

    job_id: int
    began: int


class Model:
    """The jobs and lines as they are to be."""

    def __init__(self, keys: Sequence[str], numbered: str) -> None:
        self.keys = keys
        self.numbered = numbered
        self.jobs: dict[int, Known] = {}
        self.looks = 0
        self.turns: dict[str, Turn] = {}
        self._lines: list[dict[str, list[int]]] = []

    # ---- what happens ------------------------------------------------------------------------

    def enqueued(self, job_id: int, key: str, position: int | None) -> None:
        """A job was enqueued, not committed yet."""
        self.jobs[job_id] = Known(key, position or job_id, self.looks)

    def ended(self, ids: Iterable[int], *, well: bool) -> None:
        """The transaction that enqueued these jobs has ended."""
        for job_id in ids:
            if well:
                self.jobs[job_id].committed = self.looks
            else:
                del self.jobs[job_id]

    def look(self, rows: Sequence[Row], began: Iterable[int]) -> None:
        """Take note of the committed rows; ``began`` are the last looks before the beginnings of
        the workers' open transactions.
        """
        self.looks += 1
        self._note_lines(rows)
        self._judge_turns(rows, min([self.looks - 1, *began]))

    def _note_lines(self, rows: Sequence[Row]) -> None:
        open_rows = {row.id for row in rows if row.sequence_open}
        for job_id, known in self.jobs.items():
            if job_id not in open_rows:
                known.entered = None
                known.was_released = known.was_released or known.committed is not None
            elif known.entered is None:
                known.entered = self.looks
        self._lines.append(
            {
                key: [row.id for row in rows if row.sequence_key == key and row.sequence_open]
                for key in self.keys
            }
        )

    # ---- what must hold ----------------------------------------------------------------------

    def _judge_turns(self, rows: Sequence[Row], began: int) -> None:
        """A new head was the first of its line, in some view that its admission can have had."""
        gone = {row.id for row in rows if not row.sequence_open}
        for head in (row for row in rows if row.admitted):
            key, turn = head.sequence_key, self.turns.get(head.sequence_key)
            if turn is not None and turn.job_id == head.id:
                continue
            self.turns[key] = Turn(head.id, began)
            views = [view[key] for view in self._lines[max(0, began - 1) :]]
            firsts = [next((i for i in view if i not in gone), None) for view in views]
            assert not head.sequence_open or head.id in firsts, (
                f"{head.id} became the head of {key}: {views}"
            )

    def judge_claim(
        self, job_id: int, seen: Sequence[Row], paused: Collection[str], began: int
    ) -> None:
        """The literal rule: no other job of the key runs, and it is the oldest unreleased one that
        had been committed when the claim began.

        Excused are those that came into the line after its turn was given. ``seen`` is what the
        claim's transaction sees, ``began`` the last look before it began.
        """
        known = self.jobs[job_id]
        line = [row for row in seen if row.sequence_key == known.key and row.id != job_id]
        running = [row.id for row in line if row.state == "running"]
        assert running == [], f"{job_id} of {known.key} was claimed while {running} ran"
        assert known.key not in paused, f"{job_id} was claimed though {known.key} is paused"
        turn = self.turns.get(known.key)
        given = turn.began if turn is not None and turn.job_id == job_id else began
        older = [row.id for row in line if row.sequence_open and self._is_before(row.id, known)]
        late = [i for i in older if (self.jobs[i].entered or self.looks + 1) > given]
        assert older == late, f"{job_id} of {known.key} was claimed before {older}"
        released = {row.id for row in line if not row.sequence_open}
        if known.key == self.numbered:
            missing = self.missing_before(known.place, released)
            assert missing == [], f"{job_id} runs at {known.place} before the positions {missing}"
        else:
            self._judge_committed_before(job_id, known, released)

    def _is_before(self, job_id: int, known: Known) -> bool:
        return job_id in self.jobs and self.jobs[job_id].place < known.place

    def _judge_committed_before(self, job_id: int, known: Known, released: Collection[int]) -> None:
        """Whatever was committed before this job's enqueue was called has left the line once."""
        for other_id, other in self.jobs.items():
            is_before = other.committed is not None and other.committed < known.called
            if other.key == known.key and is_before:
                is_over = other.was_released or other_id in released
                assert is_over, f"{job_id} runs before {other_id}"

    def missing_before(self, position: int, released: Collection[int] = ()) -> list[int]:
        """The positions before one that were never released, nor are just now."""
        over = {
            known.place
            for job_id, known in self.jobs.items()
            if known.key == self.numbered and (known.was_released or job_id in released)
        }
        return [number for number in range(1, position) if number not in over]

    def judge_lull(self, rows: Sequence[Row], paused: Collection[str]) -> None:
        """Nobody produces, nobody has a transaction, nothing can be claimed: each line that goes on
        has somebody to wait for.
        """
        for key in self.keys:
            line = [row for row in rows if row.sequence_key == key]
            waiting = [row for row in line if row.sequence_open]
            if waiting and not (key == self.numbered and self.missing_before(waiting[0].position)):
                self._judge_reason(key, waiting, key in paused)
                debts = [row.id for row in line if row.admitted and not row.sequence_open]
                assert debts == [], f"{key} goes on behind the debt {debts}"

    def _judge_reason(self, key: str, waiting: Sequence[Row], is_paused: bool) -> None:
        head = next((row for row in waiting if row.admitted), None)
        told = f"{key} has nobody to wait for: {[tuple(row) for row in waiting]}"
        if head is None:
            assert not [row for row in waiting if row.waits_for in ("admission", "turn")], told
        else:
            assert is_paused or (
                head.state != "available" and head.waits_for not in ("admission", "turn")
            ), told
