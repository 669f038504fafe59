"""The thread with the event loop in which async actions run."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from cyclone_sqla.worker.run_log import say

# How long background tasks and async generators that actions left behind get to end.
_CLEAN_UP = 1.0


class EventLoopThread:
    """One event loop in one thread, started when first needed; nothing that runs in it ends it."""

    def __init__(self, at_end: Callable[[], Coroutine[Any, Any, object]] | None = None) -> None:
        """``at_end`` is run in the loop when all actions in it have ended."""
        self._at_end = at_end
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closing = False

    @property
    def is_running(self) -> bool:
        """Whether anything was ever run in it."""
        return self._loop is not None

    def call(self, callback: Callable[..., object], *args: object) -> None:
        """Call back in the loop, soon. RuntimeError if it is closed, or there can be no thread."""
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
                try:
                    self._thread = self._start_thread(loop)
                except RuntimeError:
                    loop.close()
                    raise
                self._loop = loop
            return self._loop

    def _start_thread(self, loop: asyncio.AbstractEventLoop) -> threading.Thread:
        name = "cyclone-async-actions"
        thread = threading.Thread(target=self._main, args=(loop,), name=name, daemon=True)
        thread.start()
        return thread

    def _main(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._closing:
            try:
                loop.run_forever()
            except BaseException:  # noqa: BLE001 - asyncio lets the SystemExit of any task through
                text = "a background task of an action raised; the event loop goes on"
                say(logging.ERROR, text, exc_info=True)
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
        if self._at_end is not None:
            self._complete(loop, asyncio.wait_for(self._at_end(), _CLEAN_UP))

    def _complete(
        self, loop: asyncio.AbstractEventLoop, clean_up: Coroutine[Any, Any, object]
    ) -> None:
        try:
            loop.run_until_complete(clean_up)
        except BaseException:  # noqa: BLE001 - code of actions runs here, the thread must end
            say(logging.WARNING, "clean-up of the event loop failed", exc_info=True)
