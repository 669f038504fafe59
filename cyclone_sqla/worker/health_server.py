"""Answers /livez and /readyz by HTTP, from a thread of the process."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from functools import partial
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from cyclone_sqla.errors import ConfigurationError
from cyclone_sqla.worker.health import WorkerStatus

LOOPBACK = "127.0.0.1"

CLIENT_PATIENCE = 5.0
"""Seconds that a client may take for its request."""

CHILD_PATIENCE = 2.0
"""Seconds for a child to answer its parent: one that takes longer counts as hung."""


class Answer(NamedTuple):
    """Whether it is well, and what there is to say."""

    is_well: bool
    details: Mapping[str, Any]


Answers = Mapping[str, Callable[[], Answer]]
"""What is asked for each path."""


class HealthServer:
    """Listens from its making on; answers 200 or 503 with a JSON object.

    Raises ConfigurationError if the address can't be had.
    """

    def __init__(self, host: str, port: int, answers: Answers) -> None:
        handler = partial(_Handler, answers)
        try:
            self._server = _Server((host, port), handler)
        except OSError as exc:
            raise ConfigurationError(
                f"can't answer health checks on {host}:{port}: {exc.strerror or exc}"
            ) from exc
        thread = threading.Thread(
            target=self._server.serve_forever,
            name="cyclone-health",
            daemon=True,
            kwargs={"poll_interval": 0.1},
        )
        thread.start()

    def close(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is nothing to tell."""


class _Handler(BaseHTTPRequestHandler):
    timeout = CLIENT_PATIENCE

    def __init__(self, answers: Answers, *connection: Any) -> None:
        self._answers = answers
        super().__init__(*connection)

    def do_GET(self) -> None:
        ask = self._answers.get(self.path.partition("?")[0])
        if ask is None:
            self._send(404, {"paths": sorted(self._answers)})
        else:
            answer = ask()
            self._send(200 if answer.is_well else 503, answer.details)

    def _send(self, status: int, details: Mapping[str, Any]) -> None:
        body = json.dumps(details).encode() + b"\n"
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name upstream
        """Probes come every few seconds: they are not logged."""


# ---- one worker ----------------------------------------------------------------------------------


def answers_of(status: Callable[[], WorkerStatus]) -> Answers:
    """Those of one worker."""
    return {
        "/livez": lambda: _live(status()),
        "/readyz": lambda: _ready(status()),
    }


def _live(status: WorkerStatus) -> Answer:
    return Answer(status.is_live, {"live": status.is_live})


def _ready(status: WorkerStatus) -> Answer:
    details = {
        "ready": status.is_ready,
        "stopping": status.is_stopping,
        "database": status.is_reachable,
        "schema_version": status.revision,
        "listener": status.hears,
        "loops": dict(status.loops),
    }
    return Answer(status.is_ready, details)


# ---- a parent, which asks its children -----------------------------------------------------------


def answers_for(ports: Mapping[str, int]) -> Answers:
    """Those of several workers, which answer on this host's ports: well if all of them are."""
    return {
        path: partial(_ask_all, ports, path, starting_is_well=path == "/livez")
        for path in ("/livez", "/readyz")
    }


def _ask_all(ports: Mapping[str, int], path: str, *, starting_is_well: bool) -> Answer:
    answers = {
        name: _ask(port, path, starting_is_well=starting_is_well) for name, port in ports.items()
    }
    is_well = all(answer.is_well for answer in answers.values())
    details = {name: answer.details for name, answer in answers.items()}
    return Answer(is_well, {path[1:-1]: is_well, "workers": details})


def _ask(port: int, path: str, *, starting_is_well: bool) -> Answer:
    """A child that doesn't listen is about to start, or to be started again."""
    connection = HTTPConnection(LOOPBACK, port, timeout=CHILD_PATIENCE)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return Answer(response.status == 200, json.loads(response.read()))
    except ConnectionRefusedError:
        return Answer(starting_is_well, {"error": "it is not started"})
    except (OSError, HTTPException, ValueError) as exc:
        return Answer(False, {"error": f"no answer: {type(exc).__name__}"})
    finally:
        connection.close()
