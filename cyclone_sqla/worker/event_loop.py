"""The thread with the event loop in which async actions run."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

log = logging.getLogger("cyclone_sqla.worker")

# How long background tasks and async generators that actions left behind get to end.
_CLEAN_UP = 1.0


class EventLoopThread:
    """One event loop in one thread, started when first needed; nothing that runs in it ends it."""

    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closing = False

    @property
    def is_running(self) -> bool:
        """Whether anything was ever run in it."""
        return self._loop is not None

    def call(self, callback: Callable[..., object], *args: object) -> None:
        """Call back in the loop, soon. RuntimeError once the loop is closed."""
        loop = self._loop or self._start()
        loop.call_soon_threadsafe(callback, *args)

    def close(self) -> None:
        """End what actions left behind, then the loop and its thread: some seconds at most."""
        self._closing = True
        if self._loop is not None and self._thread is not None:
            with suppress(RuntimeError):  # closed before
                self.call(self._loop.stop)
            self._thread.join(3 * _CLEAN_UP)

    def _start(self) -> asyncio.AbstractEventLoop:
        with self._starting:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._main, args=(loop,), name="cyclone-async-actions", daemon=True
                )
                self._thread.start()
                self._loop = loop
            return self._loop

    def _main(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._closing:
            try:
                loop.run_forever()
            except BaseException:  # asyncio lets the SystemExit of any task through
                log.exception("a background task of an action raised; the event loop goes on")
        self._clean_up(loop)
        loop.close()

    def _clean_up(self, loop: asyncio.AbstractEventLoop) -> None:
        """As ``asyncio.run`` does, but with an end to its patience."""
        loop.set_task_factory(None)  # an action may have set one
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel("the worker is stopping")
        if left:
            self._complete(loop, asyncio.wait(left, timeout=_CLEAN_UP))
        self._complete(loop, asyncio.wait_for(loop.shutdown_asyncgens(), _CLEAN_UP))

    def _complete(
        self, loop: asyncio.AbstractEventLoop, clean_up: Coroutine[Any, Any, object]
    ) -> None:
        try:
            loop.run_until_complete(clean_up)
        except BaseException:  # code of actions runs here, and the thread must end
            log.warning("clean-up of the event loop failed", exc_info=True)
