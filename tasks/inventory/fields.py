"""Strict reading of nested mappings: each value has a type, a place and a sentence when wrong."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from tasks.errors import ConfigError, visible

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Iterable, Mapping

KINDS = {
    bool: "a yes/no value",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a mapping",
    type(None): "empty",
}


EXAMPLES = "the hosts.yaml that came with the project shows how it is written"
LONGEST = 240
"""Characters of one part of a message; a whole file may stand where a word should."""


def _cut(text: str) -> str:
    shown = visible(text)
    return shown if len(shown) <= LONGEST else f"{shown[: LONGEST - 3]}..."


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Give "did you mean 'gpus'?", or "" when nothing is near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean '{near[0]}'?" if near else ""


@dataclass(frozen=True, slots=True)
class Fields:
    """One mapping of a file, read field by field.

    Every method raises ConfigError with `source: path: what; hint`.
    """

    values: Mapping[str, Any]
    source: str
    path: str

    @classmethod
    def top(cls, values: object, source: str) -> Fields:
        """Take a whole file."""
        if type(values) is not dict:
            raise ConfigError(source, f"is {shown(values)}; must be a mapping", "see the README")
        return cls(values, source, "")

    def __post_init__(self) -> None:
        for name in self.values:
            if type(name) is not str:
                self.wrong(visible(str(name)), f"the key is {shown(name)}", "put it in quotes")

    def place(self, key: str) -> str:
        """Name the place of `key` as a person would look it up."""
        return f"{self.source}: {self.path}.{key}" if self.path else f"{self.source}: {key}"

    def wrong(self, key: str, what: str, hint: str = "") -> NoReturn:
        """Refuse the value at `key`, in one line that can be read."""
        if hint in what and hint:
            hint = ""
        raise ConfigError(_cut(self.place(key)), _cut(what), _cut(hint) or EXAMPLES)

    def only(self, *known: str) -> None:
        """Refuse keys that are not among `known`."""
        for key in self.values:
            if key not in known:
                hint = did_you_mean(key, known) or f"known are {', '.join(known)}"
                self.wrong(visible(key), "unknown key", hint)

    def _typed(self, key: str, kinds: tuple[type, ...], hint: str) -> Any:
        value = self.values.get(key)
        if key not in self.values:
            return None
        # `type(...) in`, not isinstance: True is an int, and `port: yes` should not mean 1.
        if type(value) not in kinds:
            self.wrong(key, f"is {shown(value)}; must be {KINDS[kinds[0]]}", hint)
        return value

    def table(self, key: str) -> Fields:
        """Read a mapping, {} when it is missing or empty; its keys must be text."""
        value = self.values.get(key)
        path = f"{self.path}.{key}" if self.path else key
        if value is None:
            value = {}
        if type(value) is not dict:
            self.wrong(key, f"is {shown(value)}; must be a mapping", "write `key: value` under it")
        return Fields(value, self.source, path)

    def text(self, key: str, default: str | None = None, hint: str = "") -> str | None:
        """Read one line of text without control characters."""
        value = self._typed(key, (str,), hint or "put it in quotes")
        if value is None:
            return default
        if not value.strip():
            self.wrong(key, "is empty", hint or "give a value, or leave the key out")
        if visible(value) != value:
            self.wrong(key, f"has a control character: {visible(value)}", "write it as one line")
        return str(value)

    def matching(
        self, key: str, pattern: re.Pattern[str], hint: str, default: str | None = None
    ) -> str | None:
        """Read text that `pattern` matches as a whole."""
        value = self.text(key, default, hint)
        if value is not None and not pattern.fullmatch(value):
            self.wrong(key, f"is {value!r}", hint)
        return value

    def whole(self, key: str, default: int, *, low: int, high: int) -> int:
        """Read a whole number from low to high."""
        value = self._typed(key, (int,), f"give {low} to {high}")
        if value is None:
            return default
        if not low <= value <= high:
            self.wrong(key, f"is {value}", f"give {low} to {high}")
        return int(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """Read true or false."""
        value = self._typed(key, (bool,), "write true or false")
        return default if value is None else bool(value)

    def items(self, key: str, kind: type, check: Callable[[Any], str]) -> tuple[Any, ...]:
        """Read a list of `kind`, () when it is missing, without repetitions.

        Args:
            key: where.
            kind: exact type of each item.
            check: gives what is wrong with an item, or "".
        """
        values = self._typed(key, (list,), "write it as [a, b]") or ()
        for number, value in enumerate(values):
            place = f"{key}[{number}]"
            if type(value) is not kind:
                self.wrong(place, f"is {shown(value)}; must be {KINDS[kind]}")
            if what := check(value):
                self.wrong(place, what)
            if value in values[:number]:
                self.wrong(place, f"{value} stands there twice", "remove one")
        return tuple(values)


def shown(value: object) -> str:
    """Name a value with its type, as in "the text 'x'" or "empty"."""
    if value is None:
        return "empty"
    if type(value) in {list, dict}:
        return KINDS[type(value)]
    kind = KINDS.get(type(value), f"a {type(value).__name__}").removeprefix("a ")
    return f"the {kind} {_cut(str(value))}"
