"""`cyclone-sqla jobs|queues|sequences|stats`: what they show, what they do, and how they end."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from click.testing import CliRunner, Result
from sqlalchemy import Engine, event

from cyclone_sqla import Cyclone
from cyclone_sqla.cli import main
from cyclone_sqla.cli.access import os_user
from cyclone_sqla.clock import DatabaseClock
from cyclone_sqla.failures import Failure
from cyclone_sqla.migrations import migrate_database
from cyclone_sqla.outcomes import Discarded
from tests.databases import Database
from tests.life.hands import FAILED, HOPELESS, Hands

KEY = "account-42"

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture
def hands(database: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hands]:
    """A queue that the commands find by the environment."""
    monkeypatch.setenv("CYCLONE_DATABASE_URL", database.url)
    with closing(Hands(database, DatabaseClock())) as direct:
        yield direct


def run(*arguments: str, code: int = 0, **options: Any) -> Result:
    """Run a command, which must end with this code."""
    result = CliRunner().invoke(main, list(arguments), **options)
    assert result.exit_code == code, (result.output, result.exception)
    return result


def document(*arguments: str) -> Any:
    """The one JSON document that a command prints."""
    return json.loads(run(*arguments, "--json").stdout)


def halted(hands: Hands) -> tuple[int, int]:
    """A job that halts its sequence, and the one behind it."""
    first, second = (hands.enqueue(sequence=KEY, on_failure="halt") for _ in range(2))
    hands.admit()
    hands.settle(hands.claim_one(), HOPELESS)
    return first, second


# ---- what is shown -------------------------------------------------------------------------------


def test_every_reading_command_prints_one_document_for_programs(hands: Hands) -> None:
    first, second = halted(hands)
    jobs = document("jobs", "list", "--limit", "1")
    assert (jobs["after"], [job["id"] for job in jobs["jobs"]]) == (second, [second])
    assert jobs["jobs"][0]["arguments"] == {}
    shown = document("jobs", "show", str(first))
    assert (shown["job"]["state"], shown["explanation"]["reason"]) == ("discarded", "discarded")
    assert [entry["event"] for entry in shown["history"]] == ["discard"]
    explained = document("jobs", "explain", str(second))
    assert [reason["code"] for reason in explained["reasons"]] == ["sequence-halted", "no-worker"]
    assert explained["reasons"][0]["ahead"] == {"number": 1, "is_exact": True}
    assert explained["text"].startswith(f"Job {second} (work, queue default) is pending")
    (queue,) = document("queues", "list")["queues"]
    assert queue["jobs"]["pending"] == {"number": 1, "is_exact": True}
    (line,) = document("sequences", "list")["sequences"]
    assert (line["key"], line["is_halted"], line["head"]["id"]) == (KEY, True, first)
    (line,) = document("sequences", "list", "--halted")["sequences"]
    assert (line["head"], line["why"]) == (first, "ValueError: it broke")
    assert document("sequences", "show", KEY)["explanation"]["job_id"] == first
    assert document("stats")["dead_letters"] == {"number": 1, "is_exact": True}


@pytest.mark.parametrize("group", ["jobs", "queues", "sequences"])
def test_a_group_alone_shows_its_help(group: str) -> None:
    result = CliRunner().invoke(main, [group])
    assert result.exit_code in (0, 2)
    assert "\nCommands:\n" in result.output


def test_times_are_told_in_utc(hands: Hands) -> None:
    hands.enqueue()
    (job,) = document("jobs", "list")["jobs"]
    created = datetime.fromisoformat(job["created_at"])
    assert created.utcoffset() == timedelta(0)
    assert abs(datetime.now(UTC) - created) < timedelta(minutes=5)


def test_a_table_fits_the_terminal_and_cuts_no_id_state_or_number(hands: Hands) -> None:
    job = hands.enqueue("a_kind_with_a_very_long_name_" * 2, queue="q" * 40, process_in=60)
    hands.enqueue(sequence="a-very-long-key-" * 5)
    lines = run("jobs", "list", env={"COLUMNS": "80"}).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split()[:4] == ["ID", "KIND", "QUEUE", "STATE"]
    assert any(line.split()[0] == str(job) and "pending: time" in line for line in lines)
    assert all(len(line) <= 80 for line in _all_tables("80"))


def _all_tables(width: str) -> list[str]:
    commands = (("queues", "list"), ("sequences", "list"), ("stats",))
    return [
        line
        for command in commands
        for line in run(*command, env={"COLUMNS": width}).stdout.splitlines()
    ]


def test_whoever_reads_a_pipe_gets_whole_lines(hands: Hands) -> None:
    kind = "a_kind_with_a_very_long_name_" * 5
    hands.enqueue(kind)
    assert kind in run("jobs", "list").stdout


HOSTILE = "a\x1b[31m\x9b2J\u202e[bold]\r\nline"


EVERY_COMMAND = (
    "jobs list", "jobs list --json", "jobs show 1", "jobs show 1 --json", "jobs show 2",
    "jobs show 2 --json", "jobs explain 1", "jobs explain 3 --json", "queues list",
    "queues list --json", "sequences list", "sequences list --json", "sequences list --halted",
    "sequences list --limit 1", "sequences list --halted --json", "sequences show KEY",
    "sequences show KEY --json", "sequences pause KEY --by KEY", "sequences resume KEY",
    "sequences resume none", "jobs cancel 1", "jobs cancel --sequence KEY --yes --json",
    "jobs replay 2 --by KEY", "stats", "stats --json", "doctor", "doctor --format json",
    "doctor --fix",
)  # fmt: skip


def test_nothing_of_a_job_is_obeyed_by_the_terminal(hands: Hands) -> None:
    stranger = hands.enqueue(headers={HOSTILE: HOSTILE}, unique=HOSTILE, process_in=60)
    labels = dict.fromkeys(("kind", "queue", "tenant", "trace_id", "origin"), HOSTILE)
    hands.change(stranger, **labels)
    hands.enqueue(sequence=HOSTILE, on_failure="halt")
    hands.admit()
    hands.settle(hands.claim_one(), Discarded(Failure.because(HOSTILE, kind=HOSTILE)))
    hands.enqueue(sequence=HOSTILE)
    hands.enqueue(sequence="z")
    hands.act("pause_sequence", HOSTILE, by=HOSTILE)
    hands.act("pause_queue", "default", by=HOSTILE)
    told = {
        command: run(*(word.replace("KEY", HOSTILE) for word in command.split()), color=True).output
        for command in EVERY_COMMAND
    }
    assert obeyed(told) == {}


def obeyed(told: dict[str, str]) -> dict[str, str]:
    """What a terminal would not simply show."""
    return {
        command: ascii(text)
        for command, text in told.items()
        if not text.replace("\n", "").isprintable()
    }


def test_what_is_not_obeyed_can_be_read(hands: Hands) -> None:
    job = hands.enqueue(sequence=HOSTILE)
    assert "a\\x1b[31m\\x9b2J\\u202e[bold] line" in run("jobs", "show", str(job)).stdout
    assert document("jobs", "show", str(job))["job"]["sequence_key"] == HOSTILE


EVERY_REFUSAL = (
    ["queues", "pause", HOSTILE], ["jobs", "list", "--kind", HOSTILE], [HOSTILE],
    ["stats", "--schema", HOSTILE], ["stats", "--app", HOSTILE], ["stats", "--" + HOSTILE],
    ["jobs", "show", HOSTILE], ["jobs", "reschedule", "1", "--at", HOSTILE],
    ["stats", "--database-url", "sqlite:///" + HOSTILE], ["jobs", "list", "--state", HOSTILE],
)  # fmt: skip


@pytest.mark.usefixtures("hands")
def test_a_refusal_repeats_nothing_that_a_terminal_obeys() -> None:
    results = {
        " ".join(words): CliRunner().invoke(main, words, color=True) for words in EVERY_REFUSAL
    }
    assert {result.exit_code for result in results.values()} <= {1, 2}
    assert obeyed({command: result.output for command, result in results.items()}) == {}


def test_show_tells_the_arguments_and_the_history(hands: Hands) -> None:
    with hands.engine.begin() as connection:
        job = hands.cyclone.enqueue(connection, "work", {"to": ["ä", 1]}).id
    hands.settle(hands.claim_one(), FAILED)
    hands.act("pause", job, by="anna")
    shown = run("jobs", "show", str(job)).stdout
    assert '    "ä",' in shown
    lines = [line.split()[2:] for line in shown.splitlines()]
    assert ["retry", "1", "worker-1", "ValueError:", "it", "broke"] in lines
    assert ["pause", "anna"] in lines


def test_a_page_says_how_to_go_on(hands: Hands) -> None:
    ids = hands.enqueue_many(3)
    page = run("jobs", "list", "--limit", "2", "--oldest-first")
    assert f"--after {ids[1]}" in page.stderr
    rest = run("jobs", "list", "--limit", "2", "--oldest-first", "--after", str(ids[1]))
    assert rest.stderr == ""
    assert str(ids[2]) in rest.stdout


def test_filters_narrow_a_listing(hands: Hands) -> None:
    mail, _ = hands.enqueue(queue="mail"), hands.enqueue()
    listed = ("jobs", "list", "--queue", "mail", "--state", "available", "--created-after", "1h")
    assert [job["id"] for job in document(*listed)["jobs"]] == [mail]
    assert document("jobs", "list", "--created-before", "1h")["jobs"] == []
    assert run("jobs", "list", "--kind", "none").stdout == "no jobs\n"


# ---- verbs on named jobs -------------------------------------------------------------------------


def test_a_verb_is_done_to_named_jobs_and_says_so(hands: Hands) -> None:
    first, second = hands.enqueue_many(2)
    result = run("jobs", "cancel", str(first), str(second), "--by", "anna")
    assert result.stdout.splitlines() == [
        f"job {first} (work): cancelled",
        f"job {second} (work): cancelled",
        "2 cancelled",
    ]
    assert [entry.actor for entry in hands.history(second)] == ["anna"]


@pytest.mark.parametrize(
    ("verb", "options", "state"),
    [
        ("pause", [], "paused"),
        ("resume", [], "available"),
        ("cancel", [], "cancelled"),
        ("replay", [], "available"),
        ("reschedule", ["--in", "2h"], "pending"),
        ("reschedule", ["--at", "2099-01-01T00:00:00+02:00"], "pending"),
    ],
)
def test_every_verb_records_the_user_of_the_system(
    hands: Hands, verb: str, options: list[str], state: str
) -> None:
    job = hands.enqueue()
    if verb in ("resume", "replay"):
        hands.act({"resume": "pause", "replay": "cancel"}[verb], job)
    run("jobs", verb, str(job), *options)
    assert hands.job(job).state == state
    last = hands.history(job)[-1]
    assert (last.event, last.actor) == (verb, os_user())


def test_the_head_of_a_halted_sequence_is_skipped(hands: Hands) -> None:
    first, _second = halted(hands)
    assert "skipped, now completed" in run("jobs", "skip", str(first)).stdout
    assert run("sequences", "list", "--halted").stdout == "no sequence is halted\n"


def test_a_running_job_is_asked_to_stop(hands: Hands) -> None:
    job = hands.enqueue()
    hands.claim_one()
    result = run("jobs", "cancel", str(job))
    assert result.stdout.splitlines() == [
        f"job {job} (work): runs, was asked to stop",
        "0 cancelled, 1 asked to stop",
    ]


def test_a_refusal_is_told_by_job_and_by_the_exit_code(hands: Hands) -> None:
    job = hands.enqueue()
    result = run("jobs", "resume", str(job), "4711", code=1)
    allowed = "it allows: cancel, pause, reschedule"
    why = f"job {job} is available, so it can't be resumed; {allowed}"
    assert result.stdout.splitlines() == [
        f"job {job}: refused: {why}",
        "job 4711: refused: there is no job 4711 in this database",
        "0 resumed, 2 refused",
    ]


def test_an_unknown_id_is_one_line(hands: Hands) -> None:
    for command in ("show", "explain"):
        result = run("jobs", command, "4711", code=1)
        assert result.stderr == "Error: there is no job 4711 in this database\n"


def test_new_arguments_are_checked_against_the_action_of_the_application(
    hands: Hands, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("people_shop.py").write_text(
        "from cyclone_sqla import Cyclone\ncyclone = Cyclone()\n\n"
        "@cyclone.action\ndef work(to: str) -> None: ...\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    job = hands.enqueue()
    hands.act("cancel", job)
    replay = ("jobs", "replay", str(job), "--arguments")

    assert "--app" in run(*replay, '{"to": "a"}', code=2).stderr
    app = ("--app", "people_shop:cyclone")
    try:
        assert "to:" in run(*replay, '{"to": 3}', *app, code=2).stderr
        assert "JSON" in run(*replay, "{", *app, code=2).stderr
        run(*replay, '{"to": "a"}', *app)
    finally:
        sys.modules.pop("people_shop", None)

    assert (hands.job(job).arguments, hands.job(job).state) == ('{"to":"a"}', "available")


# ---- verbs on all of a filter --------------------------------------------------------------------


def test_a_filter_is_asked_about_before_anything_is_done(hands: Hands) -> None:
    hands.enqueue_many(3, queue="mail")
    command = ("jobs", "cancel", "--queue", "mail")
    result = run(*command, input="n\n", code=1)
    assert result.stderr.startswith("cancel 3 jobs? [y/N]")
    assert hands_states(hands) == {"available"}
    assert run(*command, input="", code=1).exit_code == 1
    assert hands_states(hands) == {"available"}
    assert run(*command, input="y\n").stdout.splitlines()[-1] == "3 cancelled"
    assert hands_states(hands) == {"cancelled"}


def hands_states(hands: Hands) -> set[str]:
    return {row.state for row in hands.rows() if hasattr(row, "kind")}


def test_yes_asks_nothing_and_batches_are_transactions(hands: Hands) -> None:
    hands.enqueue_many(5, queue="mail")
    commits: list[int] = []

    def committed(_connection: sa.Connection) -> None:
        commits.append(1)

    event.listen(Engine, "commit", committed)
    try:
        command = ("jobs", "pause", "--queue", "mail", "--yes", "--batch", "2", "--quiet")
        assert run(*command).stdout == "5 paused\n"
    finally:
        event.remove(Engine, "commit", committed)
    assert len(commits) == 3


@pytest.mark.parametrize("which", ["ids", "filter"])
def test_a_dry_run_tells_everything_and_changes_nothing(hands: Hands, which: str) -> None:
    first, second = hands.enqueue_many(2)
    hands.act("cancel", first)
    before = hands.rows()
    by = [str(first), str(second)] if which == "ids" else ["--kind", "work", "--state", "cancelled"]
    result = run("jobs", "replay", *by, "--dry-run", code=1 if which == "ids" else 0)
    assert f"job {first} (work): would be replayed" in result.stdout
    if which == "ids":
        assert f"job {second}: refused: job {second} is available" in result.stdout
    assert hands.rows() == before


def test_a_report_for_programs_names_every_job(hands: Hands) -> None:
    first, second = hands.enqueue_many(2)
    hands.act("pause", first)
    found = run("jobs", "pause", "--state", "paused", "--yes", "--json", code=1)
    report = json.loads(found.stdout)
    assert (report["verb"], report["dry_run"], report["done"]) == ("pause", False, [])
    assert [refused["job_id"] for refused in report["refused"]] == [first]
    report = document("jobs", "pause", str(second))
    assert (report["done"], report["asked_to_stop"]) == ([second], [])


@pytest.mark.parametrize(
    "arguments",
    [
        ["cancel"],
        ["cancel", "1", "--queue", "mail"],
        ["cancel", "0"],
        ["cancel", "--created-before", "yesterday"],
        ["cancel", "--created-before", "2030-01-01T00:00:00"],
        ["cancel", "--created-before", "999999d"],
        ["reschedule", "1", "--in", "99999d"],
        ["reschedule", "1"],
        ["reschedule", "1", "--in", "5"],
        ["reschedule", "1", "--in", "5m", "--at", "2h"],
        ["replay", "--queue", "mail", "--arguments", "{}"],
        ["list", "--sequence", ""],
        ["list", "--limit", "0"],
    ],
)
def test_wrong_use_is_one_line_and_exit_2(hands: Hands, arguments: list[str]) -> None:
    result = run("jobs", *arguments, code=2)
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1


# ---- queues, sequences ---------------------------------------------------------------------------


def test_a_queue_is_paused_and_resumed(hands: Hands) -> None:
    hands.enqueue(queue="mail")
    assert run("queues", "pause", "mail", "--by", "anna").stdout == "queue mail is paused\n"
    assert "paused by anna" in run("queues", "list").stdout
    assert hands.claim(queues=["mail"]) == []
    assert run("queues", "resume", "mail").stdout == "queue mail is resumed\n"
    assert run("queues", "resume", "mail").stdout == "queue mail was not paused\n"
    assert len(hands.claim(queues=["mail"])) == 1


def test_a_sequence_is_paused_and_resumed(hands: Hands) -> None:
    hands.enqueue(sequence=KEY)
    hands.admit()
    run("sequences", "pause", KEY, "--by", "anna")
    assert "paused by anna" in run("sequences", "list", "--paused").stdout
    shown = run("sequences", "show", KEY).stdout
    assert "paused by" in shown
    assert "has been paused since" in shown
    assert run("sequences", "resume", KEY).stdout == f"sequence {KEY} is resumed\n"
    assert run("sequences", "list", "--paused").stdout == "no sequences\n"


def test_stats_say_what_pending_jobs_wait_for(hands: Hands) -> None:
    halted(hands)
    hands.enqueue(process_in=60)
    shown = run("stats").stdout
    assert "2 (turn 1, time 1)" in shown
    assert "halted sequences  1" in shown


# ---- without a queue -----------------------------------------------------------------------------


def test_missing_tables_are_one_line_that_says_what_to_run(empty_database: Database) -> None:
    result = run("jobs", "list", "--database-url", empty_database.url, code=1)
    assert len(result.stderr.splitlines()) == 1
    assert "run: cyclone-sqla migrate --database-url" in result.stderr


def test_another_schema_is_looked_into(empty_postgresql: Database) -> None:
    place = ("--database-url", empty_postgresql.url, "--schema", "a queue")
    migrate_database(empty_postgresql.url, schema="a queue")
    cyclone = Cyclone(schema="a queue", hints=False)
    with empty_postgresql.engine().begin() as connection:
        job = cyclone.enqueue(connection, "work", {}, sequence=KEY).id
    run("jobs", "pause", "--sequence", KEY, "--yes", *place)
    run("sequences", "pause", KEY, *place)
    for command in (("jobs", "list"), ("jobs", "show", str(job))):
        assert "paused" in run(*command, *place).stdout
    (queue,) = document("queues", "list", *place)["queues"]
    assert queue["jobs"]["paused"]["number"] == 1
    assert "paused by" in run("sequences", "list", "--paused", *place).stdout


def test_no_sqlite_file_is_created_by_a_look() -> None:
    run("stats", "--database-url", "sqlite:///missing.db", code=1)
    assert not Path("missing.db").exists()


COMMANDS = (["jobs", "list"], ["queues", "list"], ["sequences", "list"], ["stats"])


def test_documents_for_programs_need_no_rich(sqlite_database: Database) -> None:
    program = (
        "import sys; from cyclone_sqla.cli import main\n"
        f"for command in {COMMANDS}: main([*command, '--json'], standalone_mode=False)\n"
        "assert not {name for name in sys.modules if name.partition('.')[0] == 'rich'}"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"CYCLONE_DATABASE_URL": sqlite_database.url, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert '"jobs": []' in done.stdout
