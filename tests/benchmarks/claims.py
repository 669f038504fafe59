"""How a worker's claims go: noted where the dialect makes them."""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from cyclone_sqla.dialects import Dialect


class Claim(NamedTuple):
    """A turn that asked for jobs: how many it wanted and got, and its seconds."""

    wanted: int
    got: int
    seconds: float


class Claims:
    """All claims of a process."""

    def __init__(self) -> None:
        self.noted: list[Claim] = []

    def watch(self, dialect: Dialect) -> None:
        """Note this dialect's claims from now on."""
        watched: Any = dialect
        watched.claim = self._noting(dialect.claim, len, slots_at=1)
        watched.take_turn = self._noting(
            dialect.take_turn, lambda turn: len(turn.claimed), slots_at=2
        )

    def _noting(
        self, call: Callable[..., Any], count: Callable[[Any], int], *, slots_at: int
    ) -> Callable[..., Any]:
        def noting(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            answer = call(*args, **options)
            if answer is not None:
                slots: Mapping[str, int] = args[slots_at]
                took = time.perf_counter() - began
                self.noted.append(Claim(sum(slots.values()), count(answer), took))
            return answer

        return noting
