"""Secrets: hosts.yaml says where this desk has them, and never what they are.

A value lives in this process's memory, in the request that travels by stdin, and in the memory of
the keeper and of the trainer. No file of ours, command line, log or error text holds one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tasks.errors import ConfigError, visible
from tasks.inventory.fields import shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tasks.inventory.fields import Fields
    from tasks.inventory.values import Host

MOST_BYTES = 64 << 10
"""A program cannot be given a variable much longer than this."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Source:
    """Where the desk has a secret."""

    kind: Literal["env", "file"]
    where: str
    """Name of a variable of the desk, or the path of a file of the desk, absolute."""


class Secrets:
    """Values by host and name. Shown, it tells names alone."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Mapping[str, str]] | None = None) -> None:
        self._values = {host: dict(its) for host, its in (values or {}).items()}

    def of(self, host: str) -> dict[str, str]:
        """Give the values for one host, by name."""
        return dict(self._values.get(host, {}))

    def __repr__(self) -> str:
        return f"Secrets({ {host: sorted(its) for host, its in self._values.items()} })"


def resolve_secrets(hosts: Iterable[Host], environment: Mapping[str, str]) -> Secrets:
    """Read the secrets of every host's run, before any host is touched.

    Raises:
        ConfigError: the first one that this desk does not have.
    """
    return Secrets(
        {host.name: secret_values(host, host.run.secrets, environment) for host in hosts}
    )


def secret_values(
    host: Host, names: Iterable[str], environment: Mapping[str, str]
) -> dict[str, str]:
    """Read the secrets `names` as the host's run in hosts.yaml says; for a run of old, too.

    Raises:
        ConfigError: hosts.yaml does not say where one is, or the desk does not have it.
    """
    return {name: _value(host, name, environment) for name in names}


def _value(host: Host, name: str, environment: Mapping[str, str]) -> str:
    place = f"{host.name}: secret {visible(name)}"
    source = host.run.secrets.get(name)
    if source is None:
        raise ConfigError(
            place,
            "hosts.yaml does not say where this desk has it",
            f"add `{visible(name)}: {{env: VARIABLE}}` to the run's secrets",
        )
    text = (
        _of_variable(place, source.where, environment)
        if source.kind == "env"
        else _of_file(place, source.where)
    )
    if "\0" in text or len(text.encode()) > MOST_BYTES:
        what = "has a NUL character" if "\0" in text else f"is longer than {MOST_BYTES:,} bytes"
        raise ConfigError(place, what, "no variable can hold that")
    return text


def _of_variable(place: str, variable: str, environment: Mapping[str, str]) -> str:
    text = environment.get(variable, "")
    if not text:
        state = "is empty" if variable in environment else "is not set"
        raise ConfigError(place, f"the variable {variable} {state} at this desk", "set it first")
    return text


def _of_file(place: str, path: str) -> str:
    try:
        # A byte more than may be there: /dev/zero must not fill the desk's memory.
        with Path(path).open("rb") as file:
            text = file.read(MOST_BYTES + 3).decode()
    except OSError as wrong:
        why = wrong.strerror or type(wrong).__name__
        raise ConfigError(place, f"{visible(path)} cannot be read: {why}", "see the file") from None
    except UnicodeDecodeError:
        # `from None`, and no word of the cause: a decoder's message holds some of the bytes.
        raise ConfigError(place, f"{visible(path)} is not UTF-8 text", "see the file") from None
    text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        raise ConfigError(place, f"{visible(path)} is empty", "write the secret into it")
    return text


def read_sources(around: Fields, folder: Path) -> dict[str, Source]:
    """Read the mapping `secrets` in `around`; a value that stands there itself is refused.

    Raises:
        ConfigError: what is wrong, never with the value.
    """
    sources: dict[str, Source] = {}
    form = "write {env: VARIABLE} or {file: PATH}, and keep the value itself out of hosts.yaml"
    if type(around.values.get("secrets")) not in {dict, type(None)}:
        around.wrong("secrets", "is no mapping", form)
    given = around.table("secrets")
    for name, value in given.values.items():
        if not _VARIABLE.fullmatch(name):
            given.wrong(visible(name), "is no name of an environment variable", form)
        if type(value) is not dict:
            # Not `shown`: the value may be the secret.
            what = "is empty" if value is None else "is no mapping"
            given.wrong(name, what, form)
        kinds = sorted(key for key in value if key in {"env", "file"})
        if len(value) != 1 or not kinds:
            given.wrong(name, "must have either `env` or `file`, and nothing else", form)
        kind, where = kinds[0], value[kinds[0]]
        if type(where) is not str or not where.strip() or visible(where) != where:
            given.wrong(f"{name}.{kind}", f"is {shown(where)}", "name it by text")
        if kind == "env":
            if not _VARIABLE.fullmatch(where):
                # Somebody may have put the secret here; that is no reason to print it.
                given.wrong(f"{name}.env", "is no name of a variable", form)
            sources[name] = Source("env", where)
        else:
            sources[name] = Source("file", str(folder / Path(where).expanduser()))
    return sources
