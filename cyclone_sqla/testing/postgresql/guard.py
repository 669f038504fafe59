"""A process that outlives another by a moment and clears away its server, however it ended.

The guard holds the reading end of a pipe. When the other process ends, even by SIGKILL, the pipe
closes; the guard then ends the server and removes its directory. It runs as a script, and so
imports nothing of ours.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

PATIENCE = 20.0
"""Seconds for a server to end; it takes five to give up a child that doesn't answer."""


class Guard:
    """The tests' side of the guard: holds the pipe open until :meth:`release`."""

    def __init__(self, directory: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", __file__, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # neither Ctrl-C nor a kill of the process group stops it
        )

    def release(self) -> None:
        """Let the guard do its work, and wait for it."""
        self._process.communicate()


def data_in(directory: Path) -> Path:
    """Where a server in ``directory`` has its data."""
    return directory / "data"


def server_of(data: Path) -> int | None:
    """The process id of the server that works on ``data``, if one does.

    It stands in a file, which a server that was killed leaves behind; the system may have given the
    number to another process since then.
    """
    lines = lines_of(data / "postmaster.pid")
    if not lines:
        return None
    pid = abs(int(lines[0]))  # negative while initdb works
    return pid if _is_server(pid, data) else None


def lines_of(path: Path) -> list[str]:
    """The lines of a file; none if it is not there."""
    try:
        return path.read_text().splitlines()
    except FileNotFoundError:
        return []


def _is_server(pid: int, data: Path) -> bool:
    """Where the system shows command lines, by what it was started for."""
    if not Path("/proc/self/cmdline").exists():
        return _is_alive(pid)
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return os.fsencode(data) in words


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def end_server(data: Path) -> None:
    """End the server that works on ``data``, at once but with a last chance to clean up.

    A PostgreSQL that is killed leaves shared memory behind; SIGQUIT is its quick way out.
    """
    if not _tell(data, signal.SIGCONT, signal.SIGQUIT):
        return
    deadline = time.monotonic() + PATIENCE
    while server_of(data) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    _tell(data, signal.SIGKILL)


def _tell(data: Path, *signals: signal.Signals) -> bool:
    """Send these signals; False if there is nobody to hear them."""
    pid = server_of(data)
    if pid is None:
        return False
    try:
        for number in signals:
            os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def remove(directory: Path) -> None:
    """Remove ``directory``, also while an initdb that has lost its parent still writes there."""
    deadline = time.monotonic() + PATIENCE
    while directory.exists() and time.monotonic() < deadline:
        shutil.rmtree(directory, ignore_errors=True)
        time.sleep(0.01)


def _main() -> None:
    directory = Path(sys.argv[1])
    sys.stdin.read()
    end_server(data_in(directory))
    remove(directory)


if __name__ == "__main__":
    _main()
