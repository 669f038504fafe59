"""From where a worker's claims look on, so that they do not walk what was claimed before.

An index keeps an entry of every job that was claimed from it until no transaction can see that any
more: one that stays open for an hour, of whoever and in whatever table, has each claim walk over
all the jobs of that hour. But a worker that has just taken as many jobs as it wanted knows where
they ended, and looks on from there.

What is made available below a floor (by a late commit, a retry, a replay, a lower number of
priority, whoever had it locked) is found by the next full look, which comes at once when a claim
has come short, and otherwise when the floors have stood for :data:`STANDS` times as long as the
last full look took: full looks so take a tenth of a busy worker's time at most, and no more of
what waits is passed by than others take in that time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

STANDS = 9.0
"""How long floors stand, in durations of the full look before."""


class Floor(NamedTuple):
    """A claim begins at this place of the jobs of a kind in a queue."""

    queue: str
    kind: str
    priority: int
    id: int


class Floors:
    """Those of one connection: they are gone with it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._floors: dict[tuple[str, str], Floor] = {}
        self._used: Sequence[Floor] = ()
        self._began = 0.0
        self._stand_until = 0.0

    def of_next_claim(self) -> Sequence[Floor]:
        """Where a claim that begins now looks on from; none if it is a full look."""
        self._began = self._clock()
        stand = self._began < self._stand_until
        self._used = list(self._floors.values()) if stand else []
        return self._used

    def note(self, slots: Mapping[str, int], claimed: Sequence[Any]) -> dict[str, int]:
        """Take note of what a claim has got.

        Returns the slots, by queue, that it left empty without having looked everywhere.
        """
        got = Counter(row.queue for row in claimed)
        short = {name: count - got[name] for name, count in slots.items() if got[name] < count}
        missed = {name: short[name] for name in short if any(f.queue == name for f in self._used)}
        self._forget(short)
        self._put([row for row in claimed if row.queue not in short])
        if not self._used:
            now = self._clock()
            self._stand_until = now + STANDS * (now - self._began)
            self._forget({name for name, _ in self._floors} - slots.keys())  # not looked at now
        return missed

    def _forget(self, queues: Collection[str]) -> None:
        for pair in [pair for pair in self._floors if pair[0] in queues]:
            del self._floors[pair]

    def _put(self, claimed: Sequence[Any]) -> None:
        """Also lower than they were: after a full look that found something there."""
        rows = sorted(claimed, key=lambda row: (row.priority, row.id))
        last = {(row.queue, row.kind): row for row in rows}
        self._floors |= {pair: Floor(*pair, row.priority, row.id) for pair, row in last.items()}
