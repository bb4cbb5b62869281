"""hosts.yaml, read strictly: the one place that knows its spelling.

Every message has the form `hosts.yaml: path: what; hint`.
"""

from __future__ import annotations

import base64
import binascii
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tasks.errors import ConfigError, visible
from tasks.inventory.fields import Fields, did_you_mean, shown
from tasks.inventory.secrets import read_sources
from tasks.inventory.values import ALL, Host, Inventory, RunSettings

if TYPE_CHECKING:
    from tasks.inventory.values import Flag


def read(path: Path) -> Inventory:
    """Read and check the whole file.

    Raises:
        ConfigError: the first thing that is wrong, with its place.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            path.name, f"no such file: {path}", "run from the project's folder"
        ) from None
    except (OSError, UnicodeDecodeError) as wrong:
        raise ConfigError(path.name, f"cannot be read: {wrong}", "see its owner and mode") from None
    return parse(text, source=path.name, folder=path.resolve().parent)


def parse(text: str, *, source: str, folder: Path) -> Inventory:
    """Check the text of a hosts.yaml; relative file names in it start from `folder`.

    Raises:
        ConfigError: the first thing that is wrong, with its place.
    """
    top = Fields.top(_load(text, source), source)
    top.only("run", "groups", "hosts", "host_keys")
    accept_new = _host_keys(top, default=False)
    shared = _settings(top.table("run"), RunSettings(), folder)
    table = top.table("hosts")
    hosts = tuple(_host(table, name, shared, accept_new, folder) for name in table.values)
    return Inventory(source=source, hosts=hosts, groups=_groups(top.table("groups"), table))


class _Loader(yaml.SafeLoader):
    """YAML where a key that stands there twice is an error, not the last one's win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            name = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else id(key)
            if name in seen:
                raise ConfigError(
                    f"{self.name}:{line}",
                    f"{visible(str(key.value))} stands there twice, first in line {seen[name]}",
                    "remove one",
                )
            seen[name] = line
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, TypeError, OverflowError):
            # A scalar that looks like a date, a number or what its tag says, and is none.
            line, value = node.start_mark.line + 1, visible(str(node.value))[:60]
            kind = str(node.tag).rpartition(":")[2]
            what = f"{value} is no {visible(kind)}"
            raise ConfigError(f"{self.name}:{line}", what, "put text in quotes") from None


def _load(text: str, source: str) -> object:
    loader = None
    try:
        loader = _Loader(text)
        loader.name = source
        return loader.get_single_data()
    except yaml.YAMLError as wrong:
        mark = getattr(wrong, "problem_mark", None)
        where = f"{source}:{mark.line + 1}" if mark else source
        what = getattr(wrong, "problem", None) or "is not YAML"
        raise ConfigError(
            where, visible(str(what)), "look at the indentation and quotes there"
        ) from None
    except RecursionError:
        raise ConfigError(source, "is nested too deeply", "write it flat") from None
    finally:
        if loader is not None:
            loader.dispose()


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ADDRESS = re.compile(r"[A-Za-z0-9:_][A-Za-z0-9._:%-]*")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@$-]*")
_PROGRAM = re.compile(r"[A-Za-z0-9_./+][A-Za-z0-9_./+-]*")
_ON_HOST = re.compile(r"(/|~/)[^\x00-\x1f]*")
_KEY = re.compile(r"(ssh|ecdsa|sk)-[a-z0-9@.-]+ [A-Za-z0-9+/]+={0,2}( .*)?")
_FLAG = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_ENV = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_RUN_KEYS = (
    *("trainer", "env", "secrets", "grace_seconds", "first_step_seconds", "features"),
    "max_log_mb",
)
_HOST_KEYS = (
    *("address", "port", "user", "identity_file", "ssh_config"),
    *("host_key", "host_keys", "known_hosts"),
    *("root", "python", "agent_python", "devices", "env", "secrets", "run", "enabled", "if_down"),
)


def _host(table: Fields, name: str, shared: RunSettings, accept_new: bool, folder: Path) -> Host:
    if not _NAME.fullmatch(name) or name == ALL:
        table.wrong(visible(name), "is no name for a host", "use letters, digits, `.`, `_` and `-`")
    given = table.table(name)
    given.only(*_HOST_KEYS)
    program = "give a path or a name of letters, digits and any of _ . / + -"
    on_host = "give an absolute path, or one that starts with ~/"
    settings = _settings(given.table("run"), shared, folder)
    env = {**settings.env, **_environment(given.table("env"))}
    secrets = {**settings.secrets, **read_sources(given, folder)}
    for key in secrets:
        if key in env or key in _OURS:
            what = "is in `env` too" if key in env else "is set by the tool itself"
            given.wrong(f"secrets.{key}", what, "leave it out at one of the places")
    enabled = given.flag("enabled", default=True)
    if enabled and "output-dir" not in settings.trainer:
        given.wrong(
            "run.trainer.output-dir",
            "is missing",
            "say where checkpoints go, here or in the top `run`",
        )
    return Host(
        name=name,
        address=given.matching("address", _ADDRESS, "give a name or an IP address", name) or name,
        port=given.whole("port", 0, low=1, high=65535) or None,
        user=given.matching("user", _USER, "give a login name"),
        identity_file=_local(given, "identity_file", folder),
        ssh_config=_local(given, "ssh_config", folder),
        host_key=_host_key(given),
        known_hosts=_local(given, "known_hosts", folder),
        accept_new=_host_keys(given, default=accept_new),
        root=_folder(given, "root", "~/fab", on_host),
        python=given.matching("python", _ON_HOST, on_host) or "python3",
        agent_python=given.matching("agent_python", _PROGRAM, program) or "python3",
        devices=given.items("devices", int, lambda v: "" if v >= 0 else f"is {v}; give 0 or more"),
        if_down=given.text("if_down") or "",
        enabled=enabled,
        run=_replaced(settings, env=env, secrets=secrets),
    )


def _replaced(settings: RunSettings, **changes: Any) -> RunSettings:
    return RunSettings(**{**{k: getattr(settings, k) for k in _RUN_KEYS}, **changes})


def _local(given: Fields, key: str, folder: Path) -> str | None:
    """Read a file name of this machine: relative ones start from the folder of hosts.yaml."""
    value = given.text(key)
    if value is None:
        return None
    return str(folder / Path(value).expanduser())


def _folder(given: Fields, key: str, default: str, hint: str) -> str:
    value = given.matching(key, _ON_HOST, hint, default) or default
    if ".." in value.split("/") or value.strip("~/") == "":
        given.wrong(key, f"is {value!r}", "name a folder of its own, without `..`")
    return value.rstrip("/")


_POLICIES = {"strict": False, "accept-new": True}


def _host_keys(given: Fields, *, default: bool) -> bool:
    value = given.text("host_keys", None, "write strict or accept-new")
    if value is None:
        return default
    if value not in _POLICIES:
        hint = "write `strict` (known keys alone, as without it) or `accept-new`"
        given.wrong("host_keys", f"is {value!r}", hint)
    return _POLICIES[value]


def _host_key(given: Fields) -> str | None:
    hint = "copy type and key from `ssh-keyscan` or the host's ssh_host_ed25519_key.pub"
    value = given.matching("host_key", _KEY, hint)
    if value is None:
        return None
    kind, encoded = value.split()[:2]
    try:
        blob = base64.b64decode(encoded, validate=True)
    except binascii.Error:
        given.wrong("host_key", "is cut or mistyped", hint)
    # The blob starts with its own type: a pin whose two halves differ was pasted wrongly.
    if blob[4 : 4 + len(kind)] != kind.encode() or len(blob) < 40:
        given.wrong("host_key", f"is not a whole {kind} key", hint)
    return f"{kind} {encoded}"


def _settings(given: Fields, base: RunSettings, folder: Path) -> RunSettings:
    given.only(*_RUN_KEYS)
    changes: dict[str, Any] = {
        "trainer": {**base.trainer, **_flags(given.table("trainer"))},
        "env": {**base.env, **_environment(given.table("env"))},
        "secrets": {**base.secrets, **read_sources(given, folder)},
        "grace_seconds": given.whole("grace_seconds", base.grace_seconds, low=1, high=3600),
        "first_step_seconds": given.whole(
            "first_step_seconds", base.first_step_seconds, low=1, high=86400
        ),
        "max_log_mb": given.whole("max_log_mb", base.max_log_mb, low=1, high=1 << 20),
    }
    if "features" in given.values:
        changes["features"] = given.items(
            "features", str, lambda v: "" if _FLAG.fullmatch(v) else f"is {v!r}; no feature's name"
        )
    return _replaced(base, **changes)


def _flags(given: Fields) -> dict[str, Flag]:
    flags: dict[str, Flag] = {}
    for key, value in given.values.items():
        if not _FLAG.fullmatch(key):
            given.wrong(
                visible(key), "is no flag", "write it as in `--token-budget`, no dashes before"
            )
        flags[key] = tuple(value) if type(value) is list else value
        for item in value if type(value) is list else [value]:
            if type(item) not in {bool, int, float, str}:
                given.wrong(
                    key, f"is {shown(item)}", "give a value, or false to leave the flag out"
                )
            if type(value) is list and type(item) is bool:
                given.wrong(key, "is a list with a yes/no value", 'put it in quotes: "yes"')
            if type(item) is str and ("\x00" in item or (type(value) is list and "," in item)):
                given.wrong(
                    key, f"is {item!r}", "a list's items have no comma, and nothing has a NUL"
                )
    return flags


_OURS = ("TRAINER_RUN_ID", "TRAINER_RUN_DIR", "TRAINER_GRACE_SECONDS", "CUDA_VISIBLE_DEVICES")


def _environment(given: Fields) -> dict[str, str]:
    env: dict[str, str] = {}
    for key, value in given.values.items():
        if not _ENV.fullmatch(key):
            given.wrong(visible(key), "is no name of an environment variable")
        if key in _OURS:
            given.wrong(key, "is set by the tool itself", "use `devices` for GPUs, or leave it out")
        if type(value) not in {str, int, float}:
            given.wrong(key, f"is {shown(value)}; must be text", "put it in quotes")
        if type(value) is str and "\x00" in value:
            given.wrong(key, "has a NUL character", "remove it")
        env[key] = str(value)
    return env


def _groups(given: Fields, hosts: Fields) -> dict[str, tuple[str, ...]]:
    groups = {}
    for name in given.values:
        if not _NAME.fullmatch(name) or name == ALL:
            given.wrong(visible(name), "is no name for a group", "use letters, digits and `-`")
        if name in hosts.values:
            given.wrong(name, "is also the name of a host", "rename one of them")

        def check(member: str) -> str:
            if member in hosts.values:
                return ""
            known = list(hosts.values)
            hint = did_you_mean(member, known) or f"there are {', '.join(known)}"
            return f"no host named {visible(member)}; {hint}"

        groups[name] = given.items(name, str, check)
    return groups
