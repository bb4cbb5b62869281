"""A person's words -> outcomes -> exit code. Alone prints, alone exits.

People read results on stdout; progress, retries and the last word of a failure go to stderr. With
--json, stdout carries one object a line and nothing else:

    {"kind": "outcome", "host", "operation", "state", "detail", "seconds", "facts", "error"}
        as each operation ends; state is changed, unchanged, ok, would change, FAILED or skipped;
        error is null, or {"class", "exit_code", "message", "facts"}
    {"kind": "status", "host", "state", ...}        one a host, with all that it answered
    {"kind": "log", "host", "run_id", "line"}
    {"kind": "error", "class", "exit_code", "message", "facts"}      what ended the task itself
    {"kind": "summary", "task", "hosts", "exit_code", "dry"}         always the last
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from tasks import report
from tasks.errors import ConfigError, DeployError, Interrupted, visible

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tasks.inventory import Host
    from tasks.operations import Operation, Run
    from tasks.outcome import Outcome

# Not the working directory: `fab` works from every folder below the project.
PROJECT = Path(__file__).resolve().parent.parent

HOST = (
    "hosts, groups or globs of hosts.yaml, separated by commas, such as gpu1,gpu2 or 'gpu*'; "
    "without it the group `default`"
)
DRY_RUN = "ask the hosts and print what would change; change nothing (so does fab -R)"
JSON = "print one JSON object a line on stdout, and nothing else there"
RUN_ID = (
    "id of the new run, such as 20261130-185839-ab12; repeated with the same one, this makes no "
    "second run"
)
TRAINER = "folder of the trainer to use instead of this checkout's trainer/"


@dataclass(frozen=True, kw_only=True)
class Words:
    """What a person typed, unread."""

    task: str
    host: str = ""
    run_id: str = ""
    trainer: str | None = None
    """Folder of the desk's trainer, "" for the checkout's own; None: not the desk's tree is meant,
    but what the hosts have."""
    fresh: bool = False
    dry: bool = False
    json: bool = False


class Face:
    """Where a task's words go. Written to from several threads, so each write is one whole."""

    def __init__(
        self, out: TextIO, err: TextIO, environment: Mapping[str, str], *, as_json: bool
    ) -> None:
        self._out, self._err, self.as_json = out, err, as_json
        plain = bool(environment.get("CI")) or environment.get("TERM") == "dumb"
        self.terminal = out.isatty() and not plain
        self.listening = True
        """False once whoever read stdout has gone: followers end, work under way goes on."""
        self.paper = report.Paper(
            width=shutil.get_terminal_size().columns if self.terminal else 80,
            fold=self.terminal,
            colour=self.terminal and not environment.get("NO_COLOR"),
        )
        self._in_place = err.isatty() and not plain

    def say(self, text: str) -> None:
        """Write a result for people."""
        if not self.as_json:
            self._write(text)

    def tell(self, kind: str, facts: Mapping[str, object]) -> None:
        """Write a result for programs."""
        if self.as_json:
            self._write(json.dumps({"kind": kind, **facts}, default=str))

    def note(self, text: str) -> None:
        """Write to stderr what stays: a retry, a warning, the last word of a failure."""
        _put(self._err, f"{self._wipe()}{visible(text, lines=True)}\n")

    def progress(self, text: str) -> None:
        """Write to stderr what is under way; on a terminal the next word takes its place."""
        if self._in_place:
            _put(self._err, f"{self._wipe()}{visible(text)[: self.paper.width - 1]}")
        else:
            self.note(text)

    def close(self) -> None:
        """Take the last word of progress away."""
        _put(self._err, self._wipe())

    def _wipe(self) -> str:
        return "\r\x1b[K" if self._in_place else ""

    def _write(self, text: str) -> None:
        if self._in_place:
            self.close()
        if self.listening and not _put(self._out, f"{text}\n"):
            self.listening = False


def _put(stream: TextIO, text: str) -> bool:
    """Write at once; False when nobody reads any more."""
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        # Python flushes once more when it exits, and would complain.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return False
    return True


def carry_out(plan: Sequence[Operation], words: Words) -> None:
    """Do a plan on the hosts that the words name, and print each outcome as it comes."""
    _speak(words, lambda face: _carry_out(plan, words, face))


def show_status(plan: Sequence[Operation], words: Words) -> None:
    """Print one table for all hosts, and the last words of what died."""
    _speak(words, lambda face: _show_status(plan, words, face))


def show_logs(words: Words, *, follow: bool, lines: str) -> None:
    """Print the end of the runs' logs, and with `follow` what comes after."""
    _speak(words, lambda face: _show_logs(words, face, follow=follow, lines=lines))


def show_manual(pages: Sequence[tuple[str, Sequence[tuple[str, str | None]]]]) -> None:
    """Print the first page of the manual: all tasks, in order of use."""
    _put(sys.stdout, report.manual(pages, report.Paper()) + "\n")


def refuse(text: str) -> None:
    """Say what was wrong with the command line, and exit 2."""
    _put(sys.stderr, f"{text}\n")
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


def _carry_out(plan: Sequence[Operation], words: Words, face: Face) -> int:
    hosts, run = _hosts(words), _run(words)
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

    outcomes = _on_all(plan, hosts, run, face, on_outcome)
    code = report.exit_code(outcomes)
    last = report.last_line(outcomes, names, dry=words.dry)
    if code:
        face.note(f"fab {words.task}: exit {code}; {report.failure(outcomes, names)}")
    elif last:
        face.say(last)
    return code


def _show_status(plan: Sequence[Operation], words: Words, face: Face) -> int:
    outcomes = _on_all(plan, _hosts(words), _run(words), face, lambda _: None)
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


def _show_logs(words: Words, face: Face, *, follow: bool, lines: str) -> int:
    from tasks.operations import ReadLogs  # noqa: PLC0415  # see _on_all

    if not re.fullmatch(r"\d{1,6}", lines):
        raise ConfigError("--lines", f"is {visible(lines)}", "give a number from 0 to 999999")
    hosts = _hosts(words)

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

    return report.exit_code(_on_all((read,), hosts, _run(words), face, on_outcome))


def _last_state(line: str) -> str:
    return line.removesuffix("\\x0d").rpartition("\\x0d")[2]


def _hosts(words: Words) -> tuple[Host, ...]:
    from tasks import inventory  # noqa: PLC0415  # see _on_all

    return inventory.read(PROJECT / "hosts.yaml").select([words.host] if words.host else [])


def _run(words: Words) -> Run:
    from tasks import operations, release  # noqa: PLC0415  # see _on_all

    if words.run_id and not re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{4}", words.run_id):
        what, form = f"is {visible(words.run_id)}", "YYYYMMDD-HHMMSS-xxxx"
        raise ConfigError("a run's id", what, f"its form is {form}, such as 20261130-185839-ab12")
    folder = Path(words.trainer or PROJECT / "trainer")
    if folder.resolve().name != "trainer":
        raise ConfigError("--trainer", f"is {folder}", "name a folder called `trainer`")
    return operations.Run(
        id=words.run_id or operations.new_run_id(datetime.now(UTC)),
        # Where the tree at the desk is not meant, it need not even parse.
        release=None if words.trainer is None else release.read_tree(folder),
        by=operations.By(
            who=os.environ.get("GITHUB_ACTOR") or os.environ.get("USER") or str(os.getuid()),
            host=socket.gethostname(),
            why=f"fab {shlex.join(sys.argv[1:])}",
        ),
        fresh=words.fresh,
        dry=words.dry,
    )


def _on_all(
    plan: Sequence[Operation],
    hosts: Sequence[Host],
    run: Run,
    face: Face,
    on_outcome: Callable[[Outcome], None],
) -> tuple[Outcome, ...]:
    # Late, because `fab --list` and `--help` need no SSH, no retries and no YAML.
    from tasks import fleet  # noqa: PLC0415
    from tasks.link import Link  # noqa: PLC0415

    def links(host: Host) -> Link:
        return Link(host, notify=face.note, progress=face.progress)

    return fleet.carry_out(plan, hosts, run, links=links, on_outcome=on_outcome)
