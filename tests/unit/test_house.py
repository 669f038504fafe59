"""What holds for every file of the repository, for ever."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

_CHECKOUT = Path(__file__).parents[2]

_OF_ONE_MACHINE = re.compile(
    r"""
      /(?:home|Users|root)/\w      # somebody's home
    | /tmp/\w+/                    # somebody's scratch directory
    | /work/ | /opt/pypi
    | [\w.-]*(?:index-url|find-links|trusted-host)\b
    """,
    re.VERBOSE,
)


def _tracked_files() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=_CHECKOUT, check=True, capture_output=True, text=True
    )
    names = listing.stdout.split("\0")[:-1]
    return [path for name in names if (path := _CHECKOUT / name).is_file()]
