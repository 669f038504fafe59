"""A look at everything that may be wrong with a queue: what is, and what to do about it."""

from cyclone_sqla.doctor.examining import examine, examine_engine, examine_tables
from cyclone_sqla.doctor.findings import DEFAULT_LIMITS, Finding, Limits, Severity
from cyclone_sqla.doctor.repairing import mend

__all__ = [
    "DEFAULT_LIMITS",
    "Finding",
    "Limits",
    "Severity",
    "examine",
    "examine_engine",
    "examine_tables",
    "mend",
]
