"""Waiting for what must become true, with a deadline, instead of sleeping and hoping."""

import time
from collections.abc import Callable


def wait_until(
    condition: Callable[[], object], what: str, *, within: float = 30.0, every: float = 0.01
) -> None:
    """Return once `condition` is true; after `within` seconds fail, saying `what` never came.

    Raises:
        TimeoutError: it isn't true yet.
    """
    deadline = time.monotonic() + within
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {within:g} s in vain: {what}")
        time.sleep(every)
