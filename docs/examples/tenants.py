"""Exports for many tenants: each has one running at a time, however many it has asked for."""

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from cyclone_sqla import Context, Cyclone, JobFilter, JobRef, State

QUEUE = "exports"

cyclone = Cyclone()


class Base(DeclarativeBase):
    """The application's own tables."""


class Export(Base):
    """What was exported, for whom."""

    __tablename__ = "export"

    id: Mapped[int] = mapped_column(primary_key=True)
    tenant: Mapped[str] = mapped_column(index=True)
    report: Mapped[str]


def request_exports(session: Session, tenant: str, reports: list[str]) -> list[JobRef]:
    """Enqueue a tenant's exports: one at a time, so that the other slots are for other tenants."""
    of_tenant = export.using(tenant=tenant, sequence=f"exports:{tenant}")
    return cyclone.enqueue_many(session, [of_tenant.job(report) for report in reports])


@cyclone.action(queue=QUEUE, max_attempts=3)
def export(ctx: Context, report: str) -> None:
    """Do the heavy work, for the tenant that the job says."""
    assert ctx.job.tenant is not None
    ctx.session.add(Export(tenant=ctx.job.tenant, report=report))


def waiting_exports(session: Session, tenant: str) -> int:
    """How many exports of a tenant have not begun."""
    states = [State.PENDING, State.AVAILABLE]
    job = cyclone.job_class
    mine = sa.select(sa.func.count()).where(job.tenant == tenant, job.state.in_(states))
    return session.scalar(mine) or 0


def close_account(session: Session, tenant: str, by: str) -> int:
    """Delete what a tenant has, and cancel whatever it waits for; how many jobs those were."""
    session.execute(sa.delete(Export).where(Export.tenant == tenant))
    cancelled = 0
    after: int | None = 0
    while after is not None:
        report = cyclone.cancel_many(session, JobFilter(tenant=tenant), after=after, by=by)
        cancelled += len(report.done)
        after = report.after
    return cancelled
