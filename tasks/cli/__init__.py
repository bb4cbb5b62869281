"""A person's words -> outcomes -> exit code. Alone prints, alone exits.

People read results on stdout; progress, retries and the last word of a failure go to stderr. With
--json, stdout carries one object a line and nothing else:

    {"kind": "outcome", "host", "operation", "state", "detail", "seconds", "facts", "back", "error"}
        as each operation ends; state is changed, unchanged, ok, would change, FAILED or skipped;
        back: it was part of putting the old run back; error is null, or {"class", "exit_code",
        "message", "facts"}
    {"kind": "status", "host", "state", ...}        one a host, with all that it answered
    {"kind": "log", "host", "run_id", "line"}
    {"kind": "error", "class", "exit_code", "message", "facts"}      what ended the task itself
    {"kind": "summary", "task", "exit_code", "dry"}                  always the last
"""

from __future__ import annotations

import os
import re
import signal
import sys
from typing import TYPE_CHECKING

from tasks import report
from tasks.cli import trusting
from tasks.cli.face import Face, put
from tasks.cli.words import (
    DRY_RUN,
    HOST,
    JSON,
    RUN_ID,
    TRAINER,
    WAIT_LEASE,
    Words,
    hosts_of,
    run_of,
    with_secrets,
)
from tasks.errors import ConfigError, DeployError, Interrupted, visible

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tasks.inventory import Host
    from tasks.operations import Operation, Run
    from tasks.outcome import Outcome

__all__ = [
    "DRY_RUN",
    "HOST",
    "JSON",
    "RUN_ID",
    "TRAINER",
    "WAIT_LEASE",
    "Face",
    "Words",
    "carry_out",
    "refuse",
    "show_checks",
    "show_logs",
    "show_manual",
    "show_status",
    "show_trust",
]


def carry_out(
    plan: Sequence[Operation], words: Words, *, fallback: Sequence[Operation] = ()
) -> None:
    """Do a plan on the hosts that the words name, and print each outcome as it comes."""
    _speak(words, lambda face: _carry_out(plan, words, face, fallback))


def show_status(plan: Sequence[Operation], words: Words) -> None:
    """Print one table for all hosts, and the last words of what died."""
    _speak(words, lambda face: _show_status(plan, words, face))


def show_checks(plan: Sequence[Operation], words: Words) -> None:
    """Print what a check-up of each host found, as a table."""
    _speak(words, lambda face: _show_checks(plan, words, face))


def show_trust(words: Words, *, fingerprint: str, yes: bool) -> None:
    """Show the keys of hosts that are met for the first time, and remember what is trusted."""
    _speak(words, lambda face: trusting.trust(hosts_of(words), face, fingerprint, yes=yes))


def show_logs(words: Words, *, follow: bool, lines: str) -> None:
    """Print the end of the runs' logs, and with `follow` what comes after."""
    _speak(words, lambda face: _show_logs(words, face, follow=follow, lines=lines))


def show_manual(pages: Sequence[tuple[str, Sequence[tuple[str, str | None]]]]) -> None:
    """Print the first page of the manual: all tasks, in order of use."""
    put(sys.stdout, report.manual(pages, report.Paper()) + "\n")


def refuse(text: str) -> None:
    """Say what was wrong with the command line, and exit 2."""
    put(sys.stderr, f"{text}\n")
    raise SystemExit(ConfigError.exit_code)


def _speak(words: Words, work: Callable[[Face], int]) -> None:
    """Do the work, and turn what may end it into words and an exit code."""
    face = Face(sys.stdout, sys.stderr, os.environ, as_json=words.json)
    for number in (signal.SIGTERM, signal.SIGHUP):
        # A cancelled CI job and a closed terminal end like Ctrl-C: leases are given back.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    try:
        code = work(face)
    except DeployError as error:
        code = _failed(face, error)
    except KeyboardInterrupt:
        # Once hosts are being worked on, the fleet turns it into an Interrupted that knows more.
        code = _failed(face, Interrupted(f"fab {words.task}", "no host was asked yet"))
    finally:
        face.close()
    face.tell("summary", {"task": words.task, "exit_code": code, "dry": words.dry})
    if code:
        raise SystemExit(code)


def _failed(face: Face, error: DeployError) -> int:
    face.note(str(error))
    face.tell("error", report.error_object(error))
    return error.exit_code


def _carry_out(
    plan: Sequence[Operation], words: Words, face: Face, fallback: Sequence[Operation]
) -> int:
    hosts = hosts_of(words)
    run = with_secrets(run_of(words), hosts, plan, falls_back=bool(fallback))
    names, operations = [host.name for host in hosts], [each.__name__ for each in plan]
    columns = {
        "hosts": max(map(len, names)),
        "operations": max(len(report.operation_name(name)) for name in operations),
        "states": len("would change" if words.dry else "unchanged"),
    }
    if words.dry:
        face.say(report.plan_line(operations, names))

    def on_outcome(outcome: Outcome) -> None:
        if outcome.state != "skipped":  # the last line names what was not done
            face.say(report.outcome_line(outcome, face.paper, **columns))
        face.tell("outcome", report.outcome_object(outcome))

    outcomes = _on_all(plan, hosts, run, face, on_outcome, fallback)
    code = report.exit_code(outcomes)
    last = report.last_line(outcomes, names, dry=words.dry)
    if code:
        face.note(f"fab {words.task}: exit {code}; {report.failure(outcomes, names)}")
    elif last:
        face.say(last)
    return code


def _show_status(plan: Sequence[Operation], words: Words, face: Face) -> int:
    outcomes = _on_all(plan, hosts_of(words), run_of(words), face, lambda _: None)
    rows = [{"state": "no answer", **each.facts, "host": each.host} for each in outcomes]
    for each, row in zip(outcomes, rows, strict=True):
        error = each.error and report.error_object(each.error)
        face.tell("status", {**row, "error": error})
    face.say(report.status_table(rows, face.paper))
    for each, row in zip(outcomes, rows, strict=True):
        if words_of_it := report.last_words(row):
            face.say(f"\n{words_of_it}")
        if each.error:
            face.note(str(each.error))
    return report.exit_code(outcomes)


def _show_checks(plan: Sequence[Operation], words: Words, face: Face) -> int:
    outcomes = _on_all(plan, hosts_of(words), run_of(words), face, lambda _: None)
    for each in outcomes:
        face.tell("outcome", report.outcome_object(each))
        rows = each.facts.get("checks")
        if isinstance(rows, list):
            face.say(report.check_table(each.host, rows, face.paper))
        elif each.error:
            face.note(str(each.error))
    code = report.exit_code(outcomes)
    if code:
        failed = [f"{each.host} ({each.error.kind})" for each in outcomes if each.error]
        face.note(f"fab {words.task}: exit {code}; {', '.join(failed)}")
    return code


def _show_logs(words: Words, face: Face, *, follow: bool, lines: str) -> int:
    from tasks.operations import ReadLogs  # noqa: PLC0415  # see _on_all

    if not re.fullmatch(r"\d{1,6}", lines):
        raise ConfigError("--lines", f"is {visible(lines)}", "give a number from 0 to 999999")
    hosts = hosts_of(words)

    def emit(host: str, run_id: str, texts: Sequence[str]) -> bool:
        for text in texts if face.as_json else ():
            face.tell("log", {"host": host, "run_id": run_id, "line": text})
        # A terminal shows the last state of a line that was redrawn; a file gets all of it. The
        # link has escaped what could steer a terminal, the carriage returns included.
        shown = [_last_state(text) for text in texts] if face.terminal else texts
        prefix = f"{host}  " if len(hosts) > 1 else ""
        face.say("\n".join(f"{prefix}{text}" for text in shown))
        return face.listening

    read = ReadLogs(emit=emit, run_id=words.run_id or None, lines=int(lines), follow=follow)

    def on_outcome(outcome: Outcome) -> None:
        if isinstance(outcome.error, Interrupted):
            return  # Ctrl-C is how one stops following; a single line tells it
        if outcome.error:
            face.note(str(outcome.error))
            face.tell("outcome", report.outcome_object(outcome))
        elif follow and outcome.facts.get("ended"):
            face.note(f"{outcome.host}: run {outcome.facts['run_id']} has ended; see `fab status`")

    return report.exit_code(_on_all((read,), hosts, run_of(words), face, on_outcome))


def _last_state(line: str) -> str:
    return line.removesuffix("\\x0d").rpartition("\\x0d")[2]


def _on_all(  # noqa: PLR0917 - each is another thing, and the callers are three
    plan: Sequence[Operation],
    hosts: Sequence[Host],
    run: Run,
    face: Face,
    on_outcome: Callable[[Outcome], None],
    fallback: Sequence[Operation] = (),
) -> tuple[Outcome, ...]:
    # Late, because `fab --list` and `--help` need no SSH, no retries and no YAML.
    from tasks import fleet  # noqa: PLC0415
    from tasks.link import Link  # noqa: PLC0415

    def links(host: Host) -> Link:
        return Link(host, notify=face.note, progress=face.progress)

    return fleet.carry_out(plan, hosts, run, links=links, on_outcome=on_outcome, fallback=fallback)
