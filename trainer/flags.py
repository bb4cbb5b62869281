"""Fields as flags: how they are named, read and told about.

Standard library only, as config.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from typing import TYPE_CHECKING, NoReturn

from trainer.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence


def flag(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


class Parser(argparse.ArgumentParser):
    """A parser that answers a wrong line with one sentence, and knows what was probably meant."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and leaving."""
        message = message.removeprefix("argument ")
        if message.startswith("unrecognized arguments: "):
            word = message.split()[2].split("=")[0]
            close = difflib.get_close_matches(word, self._option_string_actions, n=1)
            hint = f"; did you mean {close[0]}?" if close else f"; see {self.prog} --help"
            message = f"{word}: unknown flag{hint}"
        raise InputError(message)


def add(
    group: argparse._ArgumentGroup,
    name: str,
    kind: object,
    *,
    default: object,
    text: str,
    words: Sequence[str] = (),
) -> None:
    """Add a field's flag to a parser's group.

    Args:
        group: of the parser.
        name: of the field.
        kind: its type: bool, int, float, str, or a tuple of int.
        default: `dataclasses.MISSING` where the flag must be given.
        text: its help, a sentence.
        words: all that it may be; empty: anything of its type.
    """
    required = default is dataclasses.MISSING
    text = text if required or default in ("", ()) else f"{text[:-1]} (default {shown(default)})."
    text = text.replace("%", "%%")
    if kind is bool:
        group.add_argument(
            flag(name), action=argparse.BooleanOptionalAction, default=default, help=text
        )
        return
    reader = {int: _integer, float: _number, str: str}.get(kind, _integers)  # type: ignore[call-overload]
    letter = {int: "N", float: "X"}.get(kind)  # type: ignore[call-overload]
    metavar = "|".join(words) or letter or ("PATH" if kind is str else "N,N")
    group.add_argument(
        flag(name), type=reader, metavar=metavar, required=required, help=text,
        default=None if required else default,
    )  # fmt: skip


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"is {text!r}; give a whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"is {text!r}; give a number") from None


def _integers(text: str) -> tuple[int, ...]:
    return tuple(_integer(part) for part in text.split(",") if part.strip())


def shown(value: object) -> str:
    """A field's value as a person would write it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value) or "empty"
