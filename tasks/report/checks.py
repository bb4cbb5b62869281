"""A check-up as a table: what was asked, how it is, what that means, and what mends it."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from tasks.errors import visible

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tasks.report.lines import Paper

_MOODS = {"ok": "ok", "warn": "changed", "broken": "FAILED"}


def check_table(host: str, rows: Sequence[Mapping[str, object]], paper: Paper) -> str:
    """Write one host's rows; what is not ok is followed by the command that mends it."""
    names = [visible(str(row.get("check"))) for row in rows]
    width = max([len(name) for name in names] + [5])
    lines = [f"{host}:"]
    for name, row in zip(names, rows, strict=True):
        state = str(row.get("state"))
        head = f"  {name:<{width}}  {paper.styled(f'{state:<6}', _MOODS.get(state, ''))}"
        indent = width + 12
        first, *more = _folded(visible(str(row.get("detail") or "")), paper, indent)
        lines.append(f"{head}  {first}".rstrip())
        lines += [" " * indent + line for line in more]
        if state != "ok" and row.get("mend"):
            mend = _folded(f"-> {visible(str(row['mend']))}", paper, indent)
            lines += [" " * indent + line for line in mend]
    return "\n".join(lines)


def _folded(text: str, paper: Paper, indent: int) -> list[str]:
    if not paper.fold:
        return [text]
    return textwrap.wrap(text, max(paper.width - indent, 24), break_on_hyphens=False) or [""]
