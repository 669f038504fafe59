"""Tells workers that a transaction with new jobs has committed: when, and what.

A hint is a courtesy. Workers look by themselves once per poll interval, so a hint too many costs
one look and a lost one costs one interval; nothing here may ever fail or delay a transaction of the
application. Hence hints leave after the commit; :mod:`cyclone_sqla.hint_senders` says how.

    queue_after_commit(connection, channel, ["ledger"], notify_sender(engine), session=session)
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple, Protocol

from sqlalchemy import Connection, RootTransaction, Transaction, TwoPhaseTransaction, event
from sqlalchemy.orm import Session, SessionTransaction

CALL_TO_ADMIT = "\x01admit"
"""In the place of a queue's name, which no queue has: jobs wait for their place in a sequence."""


CALL_TO_RENEW = "\x01renew"
"""In the place of a queue's name: a run may have been asked to stop, which a renewal tells."""


class Hint(NamedTuple):
    """There may be work in this queue; ``channel`` stands for the schema that it lies in."""

    channel: str
    queue: str


class HintSender(Protocol):
    """A way to the workers of one database. Its methods return at once and never raise."""

    def send(self, hints: Collection[Hint]) -> None:
        """Tell the workers. The jobs are committed."""
        ...

    def send_after(self, transaction: Transaction, hints: Collection[Hint]) -> None:
        """Tell the workers when the commit of ``transaction``, being sent now, has returned."""
        ...


def queue_after_commit(
    connection: Connection,
    channel: str,
    queues: Iterable[str],
    sender: HintSender,
    *,
    session: Session | None = None,
) -> None:
    """Send hints for ``queues`` once what was written on ``connection`` is committed, else never.

    ``session`` is the Session that the connection was taken from, if the caller works with one.
    Names are kept until the outermost transaction ends; a savepoint that was rolled back leaves a
    hint too many. A Session that joined the transaction of an outside Connection commits nothing by
    itself: the hints then wait for that Connection's commit.
    """
    hints = [Hint(channel, queue) for queue in queues]
    transaction = session.get_transaction() if session is not None else None
    if transaction is None:
        _queue_on_connection(connection, hints, sender)
        return
    waiting = _sessions_waiting.setdefault(transaction, {})
    waiting.setdefault((sender, connection), set()).update(hints)


# By transaction: after a rollback the names go when the transaction object goes.
_sessions_waiting: weakref.WeakKeyDictionary[
    SessionTransaction, dict[tuple[HintSender, Connection], set[Hint]]
] = weakref.WeakKeyDictionary()
_connections_waiting: weakref.WeakKeyDictionary[Transaction, dict[HintSender, set[Hint]]] = (
    weakref.WeakKeyDictionary()
)


# Once for all sessions: to listen to one Session costs 20 µs, and many live for a single commit.
@event.listens_for(Session, "after_commit")
def _after_commit(session: Session) -> None:
    # The event also comes when a savepoint is released.
    if not _sessions_waiting or session.in_nested_transaction():
        return
    transaction = session.get_transaction()
    if transaction is None:
        return
    for (sender, connection), hints in _sessions_waiting.pop(transaction, {}).items():
        _queue_on_connection(connection, hints, sender)


def _queue_on_connection(
    connection: Connection, hints: Collection[Hint], sender: HintSender
) -> None:
    transaction = connection.get_transaction()
    if transaction is None or not transaction.is_active:
        sender.send(hints)
        return
    waiting = _connections_waiting.setdefault(transaction, {})
    waiting.setdefault(sender, set()).update(hints)
    _listen(connection, transaction)


def _listen(connection: Connection, transaction: RootTransaction) -> None:
    """Listen to the commit of this Connection, once: costs 40 µs, which a Connection must pay."""
    if isinstance(transaction, TwoPhaseTransaction):
        if connection not in _two_phase_listened:
            _two_phase_listened.add(connection)
            event.listen(connection, "commit_twophase", _before_two_phase_commit)
    elif connection not in _listened:
        _listened.add(connection)
        event.listen(connection, "commit", _before_commit)


_listened: weakref.WeakSet[Connection] = weakref.WeakSet()
_two_phase_listened: weakref.WeakSet[Connection] = weakref.WeakSet()


def _before_commit(connection: Connection) -> None:
    # Core has no event after the commit: the sender watches the transaction end.
    transaction = connection.get_transaction()
    if transaction is None:
        return
    for sender, hints in _connections_waiting.pop(transaction, {}).items():
        sender.send_after(transaction, hints)


def _before_two_phase_commit(connection: Connection, _xid: Any, _is_prepared: bool) -> None:
    _before_commit(connection)
