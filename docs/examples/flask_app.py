"""A newsletter behind Flask-SQLAlchemy: who signs up is stored together with the job that greets.

flask --app flask_app run
cyclone-sqla work --app flask_app:cyclone

Its own tables are made by its migrations, the queue's by `cyclone-sqla migrate`.
"""

import json
import logging
import os

from flask import Flask, abort, request
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import Engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from cyclone_sqla import Context, Cyclone

log = logging.getLogger(__name__)

app = Flask(__name__)
app.config["SQLALCHEMY_DATABASE_URI"] = os.environ.get("NEWS_DATABASE", "sqlite:///news.db")


class Base(DeclarativeBase):
    """The application's own tables."""


db = SQLAlchemy(app, model_class=Base)


def database() -> Engine:
    """Where the jobs are. A worker asks for it outside of every request."""
    with app.app_context():
        return db.engine


cyclone = Cyclone(database=database)


class Subscriber(db.Model):  # type: ignore[misc, name-defined]
    """Who reads the newsletter."""

    __tablename__ = "subscriber"

    id: Mapped[int] = mapped_column(primary_key=True)
    email: Mapped[str] = mapped_column(unique=True)
    greeted: Mapped[int] = mapped_column(default=0)


@cyclone.action(queue="mail", max_attempts=8)
def greet(ctx: Context, subscriber: Subscriber) -> None:
    """Write to a new subscriber, and remember it.

    The row is loaded in the session of this run, never in `db.session`, which belongs to requests.
    """
    send_mail(subscriber.email, "Welcome!")
    subscriber.greeted += 1


@cyclone.action(queue="exports")
def export(subscriber: Subscriber) -> dict[str, str]:
    """All that is known of a subscriber; kept as the result of the job."""
    return {"email": subscriber.email}


def send_mail(to: str, text: str) -> None:
    """Stands for the mail server."""
    log.info("to %s: %s", to, text)


@app.post("/subscribers")
def subscribe() -> tuple[dict[str, int], int]:
    """Store a subscriber together with the job of the greeting."""
    subscriber = Subscriber(email=request.form["email"])
    db.session.add(subscriber)
    greet.enqueue(db.session, subscriber)
    db.session.commit()
    return {"id": subscriber.id}, 201


@app.post("/subscribers/<int:number>/export")
def request_export(number: int) -> tuple[dict[str, int | bool], int]:
    """Have an export made; whoever asks again meanwhile is given the same job."""
    subscriber = db.session.get(Subscriber, number) or abort(404)
    once = export.using(unique=f"export:{number}", on_duplicate="return")
    job = once.enqueue(db.session, subscriber)
    db.session.commit()
    return {"job": job.id, "is_new": job.created}, 202


@app.get("/exports/<int:job>")
def show_export(job: int) -> dict[str, object]:
    """How the export is getting on, and at last what is in it."""
    found = cyclone.get(db.session, job)
    return {"state": found.state, "result": json.loads(found.result or "null")}
