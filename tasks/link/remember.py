"""known_hosts, written to: one line more, in the form in which ssh itself would write it."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.errors import HostKeyWrong, visible

if TYPE_CHECKING:
    import paramiko

    from tasks.link.route import Hop


def remember(host: str, hop: Hop, key: paramiko.PKey) -> str:
    """Add the server's key to the first of its known_hosts files, and name that file.

    Raises:
        HostKeyWrong: there is no such file, or it cannot be written.
    """
    if not hop.known_hosts or hop.known_hosts[0] == os.devnull:
        raise HostKeyWrong(
            host,
            f"{hop.looked_up} has no known_hosts file to remember its key in",
            f"set `host_key: {key.get_name()} {key.get_base64()}` in hosts.yaml",
        )
    path = Path(hop.known_hosts[0]).expanduser()
    name = _hashed(hop.looked_up) if hop.hashed else hop.looked_up
    line = f"{name} {key.get_name()} {key.get_base64()}\n"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Opened for appending: two desks that meet two hosts at once lose no line.
        with path.open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else f"\n{line}"
            file.write(line.encode())
    except OSError as wrong:
        why = wrong.strerror or type(wrong).__name__
        raise HostKeyWrong(
            host, f"{visible(str(path))} cannot be written: {why}", "see its owner and mode"
        ) from None
    return visible(str(path))


def _hashed(name: str) -> str:
    salt = secrets.token_bytes(20)
    made = hmac.new(salt, name.lower().encode(), hashlib.sha1).digest()
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(made).decode()}"
