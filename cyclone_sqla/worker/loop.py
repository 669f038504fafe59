"""A background loop that no error ends: it logs, waits, goes on, and says how it is."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable

from cyclone_sqla.errors import CycloneError

log = logging.getLogger("cyclone_sqla.worker")

FIRST_PAUSE = 0.1
LONGEST_PAUSE = 5.0
LOG_EVERY = 60.0
"""Seconds between two log records about the same trouble of one loop."""

QUIET_REPEATS = 10
REPEAT_WITHIN = 0.02
"""Seconds before a round is run again that only met another transaction, at most so often."""


class Loop:
    """Calls ``step`` in a thread of its own until it is stopped.

    ``step`` does one round of work, including its own waiting. After an error the loop pauses (0.1
    s, doubling up to ``longest_pause`` seconds, jittered) and calls it again; ``recover`` is called
    before that, to forget what the failed round may have left behind. An outage is logged when it
    begins, once a minute while it lasts, and when it ends. An error that ``is_passing``, such as a
    deadlock, is no outage unless it comes again and again: the round is run again at once.
    ``at_end`` is called in the thread when it has been stopped.
    """

    def __init__(
        self,
        name: str,
        step: Callable[[], None],
        *,
        recover: Callable[[BaseException], None] = lambda _exc: None,
        is_passing: Callable[[BaseException], bool] = lambda _exc: False,
        longest_pause: float = LONGEST_PAUSE,
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self._step = step
        self._recover = recover
        self._is_passing = is_passing
        self._longest_pause = longest_pause
        self._at_end = at_end
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"cyclone-{name}", daemon=True)
        self._failing_since: float | None = None
        self._logged_at = 0.0
        self._pause = FIRST_PAUSE
        self._repeats = 0
        self.rounds = 0

    @property
    def healthy(self) -> bool:
        """Whether the loop runs and its latest round succeeded."""
        return self._thread.is_alive() and self._failing_since is None

    @property
    def is_alive(self) -> bool:
        """Whether the loop's thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ask the loop to end after its present round."""
        self._stopping.set()

    def join(self, timeout: float) -> bool:
        """Wait for the end; False if it has not come within ``timeout`` seconds."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._step()
                self.rounds += 1
            except BaseException as exc:  # noqa: BLE001 - a loop that ended would leave a zombie
                self._stopping.wait(self._pause_after(exc))
            else:
                self._succeed()
        self._at_end()

    def _pause_after(self, exc: BaseException) -> float:
        """Take note of a failed round; seconds until the next one."""
        is_quiet = self._is_passing(exc) and self._repeats < QUIET_REPEATS
        if is_quiet:
            self._repeats += 1
            log.debug("the %s loop runs again: %s", self.name, brief(exc))
        else:
            self._fail(exc)
        try:
            self._recover(exc)
        except Exception as second:  # noqa: BLE001 - as above
            log.warning("the %s loop could not recover: %s", self.name, brief(second))
        return random.uniform(0, REPEAT_WITHIN) if is_quiet else self._next_pause()

    def _fail(self, exc: BaseException) -> None:
        now = time.monotonic()
        is_first = self._failing_since is None
        if is_first:
            self._failing_since = now
        if is_first or now - self._logged_at >= LOG_EVERY:
            self._logged_at = now
            log.warning(
                "the %s loop failed, trying again: %s",
                self.name,
                brief(exc),
                exc_info=_unexpected(exc),
            )

    def _next_pause(self) -> float:
        pause = min(self._pause, self._longest_pause)
        self._pause = pause * 2
        return pause * random.uniform(0.5, 1.0)

    def _succeed(self) -> None:
        if self._failing_since is not None:
            log.info(
                "the %s loop works again after %.1f s",
                self.name,
                time.monotonic() - self._failing_since,
            )
            self._failing_since = None
        self._pause = FIRST_PAUSE
        self._repeats = 0


def brief(exc: BaseException) -> str:
    """One line, without the statement and its parameters, which may hold an application's data."""
    origin = getattr(exc, "orig", None) or exc
    lines = str(origin).strip().splitlines()
    return f"{type(origin).__name__}: {lines[0] if lines else ''}"


def _unexpected(exc: BaseException) -> bool:
    """Whether a traceback helps: not for what a database or network does."""
    is_known = getattr(exc, "orig", None) is not None or isinstance(exc, CycloneError | OSError)
    return not is_known
