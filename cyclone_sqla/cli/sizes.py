"""Sizes of memory, as people write them."""

from __future__ import annotations

import re

import click

_UNITS = {"": 0, "K": 10, "M": 20, "G": 30}


def size(text: str) -> int:
    """``512M``, ``2GiB`` or ``1.5g`` as bytes, for an option; units are powers of 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)(?:I?B)?", text.strip().upper())
    found = int(float(match[1]) * 2 ** _UNITS[match[2]]) if match else 0
    if found < 1:
        raise click.BadParameter(f"{text!r} is no size of memory: give one like 512M or 2G")
    return found
