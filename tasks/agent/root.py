"""A root on this host: where each of its files lies, whose it is, and how files get there whole."""

from __future__ import annotations

import json
import os
import re
import stat
from typing import Any, Dict, List, Optional

from .desk import Refused, want
from .machine import first_line, host_name, machine_id

TEMPORARY = ".tmp-"
"""Names that begin so are nobody's; whoever holds the lock next removes them."""
RUN_ID = re.compile(r"\A[0-9]{8}-[0-9]{6}-[0-9a-f]{4}\Z")
PROGRAM = re.compile(r"\A[A-Za-z0-9_][A-Za-z0-9_.+-]*\Z")
DIGEST = re.compile(r"\A[0-9a-f]{64}\Z")
OURS = ("machine.json", "blobs", "releases", "current", "runs", "lease", "history.jsonl", ".lock")


class Root:
    """Every path under a root; a value from outside becomes one only after it was checked."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.machine = os.path.join(path, "machine.json")
        self.blobs = os.path.join(path, "blobs")
        self.releases = os.path.join(path, "releases")
        self.current = os.path.join(path, "current")
        self.runs = os.path.join(path, "runs")
        self.latest = os.path.join(path, "runs", "latest")
        self.lease = os.path.join(path, "lease")
        self.history = os.path.join(path, "history.jsonl")
        self.lock = os.path.join(path, ".lock")

    def release(self, digest: str) -> str:
        """Folder of a release. Raises Refused, bad-request, for what is no digest."""
        if not DIGEST.match(digest):
            raise Refused("bad-request", f"digest: is {digest!r}; give 64 hex digits")
        return os.path.join(self.releases, digest)

    def run(self, run_id: str) -> str:
        """Folder of a run. Raises Refused, bad-request, for what is no run id."""
        if not RUN_ID.match(run_id):
            raise Refused("bad-request", f"run_id: is {run_id!r}; the form is YYYYMMDD-HHMMSS-xxxx")
        return os.path.join(self.runs, run_id)

    def check_owner(self) -> bool:
        """Whether the root is there and ours; False when there is nothing yet.

        Raises:
            Refused: not-ours.
        """
        if not os.path.isdir(self.path):
            return False
        if not os.access(self.path, os.R_OK | os.X_OK):
            raise self._of_user(os.stat(self.path).st_uid)
        if not os.path.exists(self.machine):
            # A typing error in `root` must not fill somebody's home with our folders.
            foreign = [
                name
                for name in os.listdir(self.path)
                if name not in OURS and not name.startswith(TEMPORARY)
            ]
            if foreign:
                raise Refused(
                    "not-ours",
                    f"{self.path}: holds {min(foreign)!r} and no machine.json, so it is no"
                    " root of ours; name a new or empty folder as root",
                )
            return False
        owner = read_json(self.machine)
        if not isinstance(owner, dict):
            raise Refused(
                "not-ours", f"{self.machine}: is not readable; look at it, then remove it"
            )
        if owner.get("machine_id") != machine_id():
            raise Refused(
                "not-ours",
                f"{self.path}: root is shared with {owner.get('host')}; give each host its own. If"
                " it was copied from there, or this is that host under a new id, and nothing"
                f" trains in it elsewhere: remove {self.machine}",
                host=owner.get("host"),
                machine_id=owner.get("machine_id"),
            )
        if owner.get("uid") != os.getuid():
            raise self._of_user(owner.get("uid"))
        return True

    def _of_user(self, uid: Any) -> Refused:
        return Refused(
            "not-ours",
            f"{self.path}: root belongs to uid {uid}, and this is uid {os.getuid()}; give each"
            " user their own",
            uid=uid,
        )

    def doubt(self) -> Optional[str]:
        """What speaks against this being the machine that made the root, though its id says so.

        Copies of a machine and containers of one image often have one id. They are told by name;
        a name alone is no reason to refuse, because hosts are renamed.
        """
        owner = read_json(self.machine)
        name = owner.get("host") if isinstance(owner, dict) else None
        if name in (None, host_name()):
            return None
        return (
            f"{self.path} was made by {name}, and this host with the same machine id calls itself"
            f" {host_name()}: if both live, give the copy an id (systemd-machine-id-setup) and a"
            " root of its own"
        )

    def claim(self) -> None:
        """Say whose the root is. Only under the lock. Raises Refused, not-ours."""
        if self.check_owner():
            return
        # With a link, not a rename: of two machines that claim a shared folder one must lose.
        mine = {"machine_id": machine_id(), "uid": os.getuid(), "host": host_name()}
        beside = os.path.join(self.path, f"{TEMPORARY}machine-{os.getpid()}")
        write(beside, json.dumps(mine).encode())
        try:
            os.link(beside, self.machine)
        except FileExistsError:
            self.check_owner()
        finally:
            os.unlink(beside)

    def sweep(self) -> None:
        """Remove what interrupted verbs and killed keepers left. Only under the lock.

        Verbs that only look write into the root without the lock, and keepers into their runs, by
        names that end in their pid: what belongs to a process that lives is left.
        """
        shared = [self.path]
        if os.path.isdir(self.runs):
            shared += [self.run(name) for name in os.listdir(self.runs) if RUN_ID.match(name)]
        for folder in (self.blobs, self.releases, self.runs, *shared):
            for name in os.listdir(folder) if os.path.isdir(folder) else []:
                if name.startswith(TEMPORARY) and not (folder in shared and _in_use(name)):
                    remove(os.path.join(folder, name))


def _in_use(name: str) -> bool:
    pid = name.rpartition("-")[2]
    if not pid.isdigit() or pid == str(os.getpid()):
        return False
    # The state stands behind the name in parentheses; a zombie writes nothing any more.
    state = (first_line(f"/proc/{pid}/stat") or ") X").rpartition(")")[2].split()
    return bool(state) and state[0] not in "ZX"


def expand(text: str, what: str) -> str:
    """An absolute path from one that may begin with ~/; of this user, never of another.

    Raises:
        Refused: bad-request.
    """
    path = text
    if text == "~" or text.startswith("~/"):
        path = os.path.expanduser(text)
    odd = any(ord(letter) < 32 or ord(letter) == 127 for letter in path)
    if odd or not path.startswith("/") or ".." in path.split("/") or len(path) > 2000:
        raise Refused("bad-request", f"{what}: is {text!r}; give an absolute path, or one from ~/")
    return os.path.normpath(path)


def program(text: str, what: str) -> str:
    """A program's path as `expand` gives it, or its bare name, which PATH resolves.

    Raises:
        Refused: bad-request.
    """
    return text if PROGRAM.match(text) else expand(text, what)


def root_of(arguments: Dict[str, Any]) -> Root:
    """The root that a request names, ours or not yet there.

    Raises:
        Refused: bad-request or not-ours.
    """
    path = expand(want(arguments, "root", str), "root")
    if path in ("/", os.path.expanduser("~")):
        raise Refused("bad-request", f"root: is {path}; give a folder of its own")
    root = Root(os.path.realpath(path))  # processes carry this path: one root, one spelling
    root.check_owner()
    return root


def write(path: str, content: bytes, *, durable: bool = True) -> None:
    """Write a file; for names that nobody reads yet. Not durable: a power cut may empty it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "wb") as file:
        file.write(content)
        if durable:
            file.flush()
            os.fsync(descriptor)


def replace(path: str, content: bytes, *, durable: bool = True) -> None:
    """Change a file so that a reader, or a crash, finds the old or the new one whole."""
    folder, name = os.path.split(path)
    beside = os.path.join(folder, f"{TEMPORARY}{name}-{os.getpid()}")
    write(beside, content, durable=durable)
    os.replace(beside, path)
    if durable:
        flush_folder(folder)


def flush_folder(path: str) -> None:
    """Make the names in a folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def point(link: str, target: str) -> bool:
    """Let a symbolic link point to `target`, by one rename; False when it does already."""
    if os.path.islink(link) and os.readlink(link) == target:
        return False
    folder, name = os.path.split(link)
    beside = os.path.join(folder, f"{TEMPORARY}{name}-{os.getpid()}")
    os.symlink(target, beside)
    os.replace(beside, link)
    return True


def read_json(path: str, most: int = 16 * 1024 * 1024) -> Optional[Any]:
    """The value in a JSON file; None when it is missing, torn, junk or larger than `most` bytes."""
    try:
        with open(path, "rb") as file:
            content = file.read(most + 1)
        return json.loads(content) if len(content) <= most else None
    except (OSError, ValueError, RecursionError):
        return None


def remove(path: str) -> None:
    """Remove a file, a link or a whole folder; nothing where it is gone."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(mode):
        os.unlink(path)
        return
    names: List[str] = os.listdir(path)
    for name in names:
        remove(os.path.join(path, name))
    os.rmdir(path)
