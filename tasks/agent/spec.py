"""A launch specification: what is to run, with which words, variables, devices and limits."""

from __future__ import annotations

import os
import pwd
from typing import Any, Dict, List

from .desk import Refused, want
from .root import expand


def home(text: str) -> str:
    """A word of the spec with a leading ~/ expanded, also after the "=" of a flag."""
    flag, equals, value = text.partition("=")
    if flag.startswith("--") and equals and value.startswith("~/"):
        return f"{flag}={os.path.expanduser(value)}"
    return os.path.expanduser(text) if text == "~" or text.startswith("~/") else text


class Spec:
    """A launch specification, checked.

    Raises:
        Refused: bad-request.
    """

    def __init__(self, plain: Dict[str, Any]) -> None:
        self.argv = [home(word) for word in texts(want(plain, "argv", list), "argv")]
        if not self.argv or not self.argv[0]:
            raise Refused("bad-request", "spec.argv: is empty; give the program and its arguments")
        variables = want(plain, "env", dict, default={})
        texts(list(variables.values()), "env")
        self.env = {_name(name): home(value) for name, value in variables.items()}
        self.secret_names = [_name(name) for name in want(plain, "secret_names", list, default=[])]
        self.grace_s = want(plain, "grace_s", float, default=120.0)
        self.max_log_mb = want(plain, "max_log_mb", int, default=512)
        if self.max_log_mb < 1 or self.grace_s < 0:
            raise Refused("bad-request", "spec: max_log_mb is at least 1, grace_s at least 0")
        self.output_dir = expand(want(plain, "output_dir", str), "spec.output_dir")
        self.devices = want(plain, "devices", list, default=[])
        if any(type(device) is not int or device < 0 for device in self.devices):
            raise Refused("bad-request", f"spec.devices: is {self.devices}; give GPU numbers")

    def environment(self, added: Dict[str, str]) -> Dict[str, str]:
        """The whole environment of a process of this spec: nothing comes from the login."""
        user = pwd.getpwuid(os.getuid()).pw_name if _known_user() else str(os.getuid())
        devices = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, self.devices))} if self.devices else {}
        return {
            "HOME": os.path.expanduser("~"),
            "PATH": os.environ.get("PATH", "/usr/local/bin:/usr/bin:/bin"),
            "USER": user,
            "LOGNAME": user,
            "LANG": "C.UTF-8",
            **self.env,
            **devices,
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            **added,
        }


def _known_user() -> bool:
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:  # containers run under numbers that no passwd knows
        return False
    return True


def texts(values: List[Any], what: str) -> List[str]:
    """`values`, which must all be text. Raises Refused, bad-request."""
    for value in values:
        if type(value) is not str or "\0" in value:
            raise Refused("bad-request", f"spec.{what}: holds {value!r}; give text")
    return values


def _name(name: Any) -> str:
    if type(name) is not str or not name or "=" in name or "\0" in name:
        raise Refused("bad-request", f"spec: {name!r} is no name of a variable")
    return name
