"""A process that outlives the tests by a moment and cleans up after a server, however they ended.

The guard holds the reading end of a pipe. When the test process ends, even by SIGKILL, the pipe
closes; the guard then ends every process that lives in the server's directory (frozen ones too)
and removes the directory.
"""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil


class Guard:
    """The test's side of the guard: holds the pipe open until `release`."""

    def __init__(self, directory: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(directory)],
            stdin=subprocess.PIPE,
            start_new_session=True,  # neither Ctrl-C nor a kill of the process group stops it
        )

    def release(self) -> None:
        """Let the guard do its work, and wait for it."""
        self._process.communicate()


def processes_living_in(directory: Path) -> list[psutil.Process]:
    """The processes whose working directory is `directory` or below it, oldest first.

    A server and its children work in its data directory. Unlike a pid in a file this can't name a
    stranger, and it finds children whose parent has died.
    """
    return [process for process in psutil.process_iter() if _lives_in(process, directory)]


def _lives_in(process: psutil.Process, directory: Path) -> bool:
    try:
        return Path(process.cwd()).is_relative_to(directory)
    except psutil.Error:
        return False


def send_all(directory: Path, number: signal.Signals) -> list[psutil.Process]:
    """Send the signal `number` to every process that lives in `directory`; return them."""
    processes = processes_living_in(directory)
    for process in processes:
        _send(process, number)
    return processes


def _send(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


def end_all(directory: Path) -> None:
    """End every process that lives in `directory`, at once but with a last chance to clean up.

    A PostgreSQL that is killed leaves shared memory behind; SIGQUIT is its quick way out.
    """
    send_all(directory, signal.SIGCONT)
    send_all(directory, signal.SIGQUIT)
    deadline = time.monotonic() + 10
    while processes_living_in(directory) and time.monotonic() < deadline:
        time.sleep(0.01)
    kill_all(directory)


def kill_all(directory: Path) -> None:
    """Kill every process that lives in `directory` and wait until none is left."""
    while send_all(directory, signal.SIGKILL):
        time.sleep(0.01)


def _main() -> None:
    directory = Path(sys.argv[1])
    sys.stdin.read()
    end_all(directory)
    shutil.rmtree(directory)


if __name__ == "__main__":
    _main()
