"""Runs as one table for all hosts, and the last words of those that died."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tasks.errors import visible

if TYPE_CHECKING:
    from tasks.report.lines import Paper

Row = Mapping[str, object]
"""What one host answered to `status`, with its name under "host"."""

WELL = ("starting", "training", "training, unsupervised", "finished")
DIED = ("stalled", "crashed", "killed", "lost")
"""The states whose last words are shown below the table."""

_COLUMNS = {
    "host": "<",
    "state": "<",
    "run": "<",
    "step": ">",
    "loss": ">",
    "accept": ">",
    "tok/s": ">",
    "age": ">",
    "release": "<",
}
# Left out in this order until the table fits its paper.
_SPARED = ("release", "tok/s", "accept", "run", "loss")


def status_table(rows: Sequence[Row], paper: Paper) -> str:
    """Write one table for all hosts.

    `age` is the time since the last step, or since the end of a run that ended. What finds no
    room in `paper.width` is left out; `--json` has everything.
    """
    cells = [_cells(row) for row in rows]
    widths = {name: max(len(name), *(len(cell[name]) for cell in cells)) for name in _COLUMNS}
    columns = dict(_COLUMNS)
    for spared in _SPARED:
        if sum(widths[name] + 2 for name in columns) - 2 <= paper.width:
            break
        del columns[spared]
    lines = ["  ".join(f"{name:{align}{widths[name]}}" for name, align in columns.items())]
    for cell in cells:
        texts = {name: f"{cell[name]:{align}{widths[name]}}" for name, align in columns.items()}
        texts["state"] = paper.styled(texts["state"], _mood(cell["state"]))
        lines.append("  ".join(texts.values()))
    return "\n".join(line.rstrip() for line in lines)


def last_words(row: Row) -> str | None:
    """Write what a run that died said last, or None when it did not die."""
    if row.get("state") not in DIED:
        return None
    host, said = str(row["host"]), row.get("last_lines")
    detail = f"; {visible(str(row['detail']))}" if row.get("detail") else ""
    lines = said[-10:] if isinstance(said, Sequence) and not isinstance(said, str) else []
    return "\n".join(
        [
            f"{host}: {run_words(row)}{detail}",
            *(f"    | {visible(str(line))}" for line in lines),
            f"    fab logs --host {host} shows more",
        ]
    )


def run_words(row: Row) -> str:
    """Put a run into a few words: `training, step 12/400, loss 10.83`."""
    words = [str(row.get("state") or "absent")]
    if row.get("step"):
        words.append(f"step {_step(row)}")
    if isinstance(row.get("loss"), int | float):
        words.append(f"loss {_number(row['loss'])}")
    ended = row.get("exit")
    if isinstance(ended, Mapping) and row.get("state") in {"crashed", "killed"}:
        if ended.get("signal") is not None:
            words.append(f"signal {ended['signal']}")
        elif ended.get("code") is not None:
            words.append(f"exit {ended['code']}")
    return ", ".join(words)


def _mood(state: str) -> str:
    if state in WELL:
        return "ok"
    return "skipped" if state == "absent" else "FAILED"


def _cells(row: Row) -> dict[str, str]:
    there = row.get("state") not in {None, "absent", "unknown"}
    return {
        "host": str(row["host"]),
        "state": str(row.get("state") or "absent"),
        "run": str(row.get("run_id") or "-") if there else "-",
        "step": _step(row),
        "loss": _number(row.get("loss")),
        "accept": _number(row.get("accepted")),
        "tok/s": _number(row.get("tokens_per_s")),
        "age": _age(row.get("age_s")),
        "release": str(row.get("release") or "-")[:7],
    }


def _step(row: Row) -> str:
    """Write `12/400` with thousands marked; without the total where it is unknown."""
    done, total = row.get("step"), row.get("steps")
    if not isinstance(done, int):
        return "-"
    return f"{done:,}/{total:,}" if isinstance(total, int) and total else f"{done:,}"


def _number(value: object) -> str:
    """Write a measure in three or four digits: `10.83`, `0.412`, `12.4k`; `-` when unknown."""
    if not isinstance(value, int | float):
        return "-"
    if abs(value) >= 10_000:
        return f"{value / 1000:.1f}k"
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"


def _age(seconds: object) -> str:
    """Write a span: `4s`, `12m`, `3h05`, `6d`; `-` when unknown."""
    if not isinstance(seconds, int | float):
        return "-"
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}"
    return f"{whole // 86400}d"
