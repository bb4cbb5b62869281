"""Outcomes as lines: `host  operation  state  detail` in columns.

On a terminal a long detail is folded to its width; elsewhere a line stays one line, so that
`grep` and the log of a CI job keep it whole.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasks.errors import MIXED, ROLLED_BACK, NoFirstStep, visible
from tasks.report.runs import run_words

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tasks.outcome import Outcome

_STYLES = {
    "changed": "33",
    "would change": "36",
    "unchanged": "32",
    "ok": "32",
    "FAILED": "1;31",
    "skipped": "2",
}
_WORST_LAST = ("skipped", "ok", "unchanged", "would change", "changed", "FAILED")


@dataclass(frozen=True, kw_only=True)
class Paper:
    """What is written on."""

    width: int = 80
    """In columns: where lines are folded, and what a table must fit in."""
    fold: bool = False
    """Whether long lines are folded at `width`; only on a terminal."""
    colour: bool = False

    def styled(self, text: str, state: str) -> str:
        """Give `text` the colour of `state`, where there is colour."""
        style = _STYLES.get(state)
        return f"\x1b[{style}m{text}\x1b[0m" if style and self.colour else text


def operation_name(name: str) -> str:
    """Write an operation as people type it: `verify-features`."""
    return name.replace("_", "-")


def outcome_line(
    outcome: Outcome, paper: Paper, *, hosts: int, operations: int, states: int = len("unchanged")
) -> str:
    """Write one outcome: `gpu-1  kill  changed  ended pid 4211 at step 1,240`.

    Args:
        outcome: what came of one operation on one host; an error may bring lines of its own, which
            follow indented.
        paper: what it is written on.
        hosts: columns for host names.
        operations: columns for names of operations.
        states: columns for how it ended.
    """
    # The line begins with the host already.
    detail = (
        str(outcome.error).removeprefix(f"{outcome.host}: ") if outcome.error else outcome.detail
    )
    head = f"{outcome.host:<{hosts}}  {operation_name(outcome.operation):<{operations}}  "
    state = f"{outcome.state:<{states}}"
    indent = len(head) + len(state) + 2
    first, *more = folded(visible(detail, lines=True), paper, indent) or [""]
    lines = [f"{head}{paper.styled(state, outcome.state)}  {first}".rstrip()]
    lines += [" " * indent + line for line in more]
    told = outcome.error.facts if outcome.error else outcome.facts if outcome.back else {}
    said = told.get("last_lines")
    if isinstance(said, list) and said:
        lines += [f"    | {visible(str(line))}" for line in said[-10:]]
    return "\n".join(lines)


def folded(text: str, paper: Paper, indent: int) -> list[str]:
    """Break text into lines, each short enough to stand behind `indent` columns."""
    lines = text.splitlines()
    if not paper.fold:
        return lines
    room = max(paper.width - indent, 24)
    return [
        part
        for line in lines
        for part in (textwrap.wrap(line, room, break_on_hyphens=False) or [""])
    ]


def plan_line(operations: Sequence[str], hosts: Sequence[str]) -> str:
    """Write what a dry run would do: `plan: probe, sync, ... on gpu-1, gpu-2`."""
    return f"plan: {', '.join(map(operation_name, operations))}; on {', '.join(hosts)}"


def exit_code(outcomes: Iterable[Outcome]) -> int:
    """Say what `fab` exits with: a failure's own code, or 9 when hosts failed differently."""
    codes: dict[str, int] = {}
    for each in outcomes:
        if each.error is not None:
            codes[each.host] = each.error.exit_code
        elif each.back:
            codes[each.host] = ROLLED_BACK  # unless one of the later ones fails
    found = set(codes.values())
    return 0 if not found else found.pop() if len(found) == 1 else MIXED


def _of(outcomes: Sequence[Outcome], host: str) -> int:
    """What one host's outcomes alone would make `fab` exit with."""
    return exit_code(each for each in outcomes if each.host == host)


def summary(outcomes: Sequence[Outcome], hosts: Sequence[str]) -> str:
    """Put many hosts into a line: `8 hosts: 1 FAILED (gpu-3), 5 changed, 2 unchanged`."""
    worst: dict[str, str] = dict.fromkeys(hosts, "skipped")
    for each in outcomes:
        if _WORST_LAST.index(each.state) > _WORST_LAST.index(worst[each.host]):
            worst[each.host] = each.state
    worst.update((host, "rolled back") for host in hosts if _of(outcomes, host) == ROLLED_BACK)
    parts = []
    for state in ("FAILED", "rolled back", *reversed(_WORST_LAST[:-1])):
        names = [host for host, its in worst.items() if its == state]
        if names:
            told = f" ({', '.join(names)})" if state in {"FAILED", "rolled back", "skipped"} else ""
            parts.append(f"{len(names)} {state}{told}")
    count = f"{len(worst)} host{'' if len(worst) == 1 else 's'}"
    return f"{count}: {', '.join(parts)}"


def last_line(outcomes: Sequence[Outcome], hosts: Sequence[str], *, dry: bool) -> str | None:
    """Write what to remember when all went well: where the run is, and how to watch it."""
    if dry:
        return "dry run: nothing was changed"
    if len(hosts) > 1:
        return summary(outcomes, hosts)
    for each in outcomes:
        if each.operation == "await_progress":
            run = {"state": "training", **each.facts}
            return f"{each.host}: {run_words(run)}; fab logs -f --host {each.host}"
    return None


def failure(outcomes: Sequence[Outcome], hosts: Sequence[str]) -> str:
    """Write what a failed plan leaves undone: `gpu-1: verify failed; not done: kill, launch`."""
    if len(hosts) > 1:
        return summary(outcomes, hosts)
    failed = [operation_name(each.operation) for each in outcomes if each.state == "FAILED"]
    undone = [operation_name(each.operation) for each in outcomes if each.state == "skipped"]
    told = f"; not done: {', '.join(undone)}" if undone else ""
    what = f"{hosts[0]}: {', '.join(failed)} failed{told}"
    if back := [each for each in outcomes if each.back]:
        run = next((each.facts for each in back if each.operation == "put_back"), {})
        if exit_code(outcomes) == ROLLED_BACK:
            release = str(run.get("release"))[:12]
            return f"{what}; rolled back: run {run.get('run_id')} of release {release} trains"
        return f"{what}; not rolled back: see `fab status --host {hosts[0]}`"
    if any(isinstance(each.error, NoFirstStep) for each in outcomes):
        return f"{what}; `fab rollback --host {hosts[0]}` puts back what trained before"
    return what


def manual(pages: Sequence[tuple[str, Sequence[tuple[str, str | None]]]], paper: Paper) -> str:
    """Write the first page: headings, each with its tasks and the first line of their help."""
    width = max(len(name) for _, tasks in pages for name, _ in tasks)
    lines = ["fab TASK [--host NAMES|GROUP|GLOB]     hosts, and what they run: hosts.yaml"]
    for title, tasks in pages:
        lines += ["", f"{title}:"]
        for name, doc in tasks:
            first = (doc or "").strip().partition("\n")[0]
            head, *more = textwrap.wrap(first, max(paper.width - width - 4, 24)) or [""]
            lines.append(f"  {name:<{width}}  {head}")
            lines += [" " * (width + 4) + line for line in more]
    lines += ["", "fab TASK --help tells all of a task; --dry-run shows what would change."]
    return "\n".join(lines)
