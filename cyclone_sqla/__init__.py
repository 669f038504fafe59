"""A durable, ordered, transactional job queue inside your own SQLAlchemy database."""

from cyclone_sqla.actions import Action, BoundAction
from cyclone_sqla.app import Cyclone
from cyclone_sqla.backoff import BackoffPolicy, Constant, Exponential, Linear
from cyclone_sqla.bulk import BulkReport, Refused
from cyclone_sqla.clock import Clock
from cyclone_sqla.context import ClaimedJob, Context
from cyclone_sqla.dialects.sqlite import begin_before_savepoints
from cyclone_sqla.errors import (
    ConfigurationError,
    CycloneError,
    DatabaseBusyError,
    Duplicate,
    DuplicateError,
    DuplicatePositionError,
    InvalidJobError,
    InvalidKeyError,
    InvalidTransitionError,
    JobNotFoundError,
    LeaseLostError,
    NotRunningError,
    PayloadError,
    RegistrationError,
    SchemaError,
    SequenceGapError,
    SnapshotError,
    TransactionError,
    UnknownKindError,
)
from cyclone_sqla.explanations import Explanation
from cyclone_sqla.job_filter import JobFilter
from cyclone_sqla.job_spec import JobRef, JobSpec
from cyclone_sqla.lifecycle import State, WaitsFor
from cyclone_sqla.models import Job
from cyclone_sqla.options import Options
from cyclone_sqla.outcomes import Cancelled, Discard, Retry, Snooze
from cyclone_sqla.settings import WorkerSettings
from cyclone_sqla.worker.worker import Worker

__all__ = [
    "Action",
    "BackoffPolicy",
    "BoundAction",
    "BulkReport",
    "Cancelled",
    "ClaimedJob",
    "Clock",
    "ConfigurationError",
    "Constant",
    "Context",
    "Cyclone",
    "CycloneError",
    "DatabaseBusyError",
    "Discard",
    "Duplicate",
    "DuplicateError",
    "DuplicatePositionError",
    "Explanation",
    "Exponential",
    "InvalidJobError",
    "InvalidKeyError",
    "InvalidTransitionError",
    "Job",
    "JobFilter",
    "JobNotFoundError",
    "JobRef",
    "JobSpec",
    "LeaseLostError",
    "Linear",
    "NotRunningError",
    "Options",
    "PayloadError",
    "Refused",
    "RegistrationError",
    "Retry",
    "SchemaError",
    "SequenceGapError",
    "SnapshotError",
    "Snooze",
    "State",
    "TransactionError",
    "UnknownKindError",
    "WaitsFor",
    "Worker",
    "WorkerSettings",
    "begin_before_savepoints",
]
