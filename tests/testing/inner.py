"""pytest in a process of its own, as an application's developer runs it."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

Done: TypeAlias = "subprocess.CompletedProcess[str]"

IDLE = ("hypothesispytest", "timeout", "cacheprovider")
"""Plugins that would only take time."""


def run_pytest(directory: Path, *options: str, without: Sequence[str] = ("asyncio",)) -> Done:
    """Run pytest in `directory`, `without` these plugins; a warning is an error."""
    options += tuple(word for name in (*without, *IDLE) for word in ("-p", f"no:{name}"))
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", *options],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
