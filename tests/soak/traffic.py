"""What comes in while the faults happen: an application that enqueues, and a person who replays."""

import json
import random
import threading
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from cyclone_sqla import Cyclone, Job, JobRef
from cyclone_sqla.errors import CycloneError, InvalidTransitionError, JobNotFoundError
from cyclone_sqla.models import IS_HALTED
from tests.soak.business import AMOUNT, Ticket

FOR_EVER = 1_000_000
MODES = ("dead-letter", "skip", "halt")
KEYS_OF_A_MODE = 3


class Traffic(threading.Thread):
    """Calls `once` again and again until it is stopped; a database that is away is no reason to
    end.
    """

    def __init__(self, once: Callable[[], None], chance: random.Random, pause: float) -> None:
        super().__init__(daemon=True)
        self._once = once
        self._chance = chance
        self._pause = pause
        self._ending = threading.Event()
        self.refused = 0

    def run(self) -> None:
        while not self._ending.wait(self._chance.uniform(0, 2 * self._pause)):
            try:
                self._once()
            except (DBAPIError, CycloneError):
                self.refused += 1

    def stop(self) -> None:
        """Let it end, and wait for that."""
        self._ending.set()
        self.join()


class Producer:
    """Enqueues jobs of every sort, each with its ticket in the same transaction."""

    def __init__(self, engine: sa.Engine, cyclone: Cyclone, chance: random.Random) -> None:
        self._engine = engine
        self._cyclone = cyclone
        self._chance = chance
        self.confirmed: set[int] = set()
        """Jobs whose transaction was told to be committed."""

    def once(self) -> None:
        """One transaction of one to three jobs, some of them rolled back."""
        with Session(self._engine) as session:
            refs = [self._enqueue_any(session) for _ in range(self._chance.randint(1, 3))]
            if self._chance.random() < 0.05:
                session.rollback()
                return
            session.commit()
        self.confirmed.update(ref.id for ref in refs if ref.created)

    def _enqueue_any(self, session: Session) -> JobRef:
        kind = self._chance.choice(["plain", "unique", "delayed", "transfer", "parent", "sequence"])
        if kind == "sequence":
            return self._enqueue_in_sequence(session)
        options: dict[str, Any] = {"max_attempts": FOR_EVER}
        if kind == "unique":
            key = f"u{self._chance.randrange(5)}"
            options |= {"unique": key, "on_duplicate": "return"}
        if kind == "delayed":
            options["process_in"] = self._chance.uniform(0.1, 2.0)
        stored = kind if kind in ("transfer", "parent") else "plain"
        return self._enqueue(session, stored, self._arguments(stored), **options)

    def _enqueue_in_sequence(self, session: Session) -> JobRef:
        mode = self._chance.choice(MODES)
        kind = self._chance.choice(["step", "step_async"])
        fails = self._chance.choice([0, 0, 0, 0, 1, FOR_EVER])
        key = f"{mode}-{self._chance.randrange(KEYS_OF_A_MODE)}"
        options = {"sequence": key, "on_failure": mode, "max_attempts": 3}
        return self._enqueue(session, kind, {"fails": fails}, **options)

    def _enqueue(
        self, session: Session, kind: str, arguments: dict[str, Any], **options: Any
    ) -> JobRef:
        ref = self._cyclone.enqueue(session, kind, arguments, **options)
        if ref.created:
            key, mode = options.get("sequence"), options.get("on_failure")
            session.add(Ticket(job_id=ref.id, kind=kind, sequence_key=key, on_failure=mode))
        return ref

    def _arguments(self, kind: str) -> dict[str, Any]:
        if kind == "transfer":
            return {"debit": 1, "credit": 2, "amount": AMOUNT}
        return {} if kind == "parent" else {"millis": self._chance.randrange(20)}


class Person:
    """Replays some dead letters and halted heads, and skips the others."""

    def __init__(self, engine: sa.Engine, cyclone: Cyclone, chance: random.Random) -> None:
        self._engine = engine
        self._cyclone = cyclone
        self._chance = chance

    def once(self) -> None:
        """Deal with each that there is, in a transaction of its own."""
        with self._engine.connect() as connection:
            dead = connection.execute(DEAD).all()
        for job_id, arguments in dead:
            try:
                with self._engine.begin() as connection:
                    self._deal_with(connection, job_id, json.loads(arguments))
            except (JobNotFoundError, InvalidTransitionError):
                continue  # the commit of an earlier time had succeeded after all

    def _deal_with(self, connection: sa.Connection, job_id: int, arguments: dict[str, Any]) -> None:
        if self._chance.random() < 0.6:
            arguments["fails"] = 0
            self._cyclone.replay(connection, job_id, arguments=arguments, by="soak")
        else:
            self._cyclone.skip(connection, job_id, by="soak")


DEAD = (
    sa.select(Job.id, Job.arguments)
    .where(sa.or_(Job.dead_letter.is_not(None), sa.text(IS_HALTED)))
    .order_by(Job.id)
    .limit(50)
)
"""Dead letters, and heads of sequences that stand still."""
