"""Releases: which contents are missing, their arrival, and assembly into an immutable tree.

Nothing here is flushed to disk: after a power cut a file may be empty, and both `sync` and
`verify` read every byte again before they call a release whole.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import stat
from typing import Any, Dict, List, NamedTuple, Optional, Set

from . import history, space
from .desk import Desk, Refused, want
from .lease import changing
from .root import DIGEST, TEMPORARY, Root, read_json, remove

MANIFEST = "MANIFEST.json"
MODES = ("0444", "0555")
FICLONE = 0x40049409
CHUNK = 1 << 20
LARGEST = 1 << 30
SPARE_BYTES = 16 << 20
"""Left free on the disk: a full one stops the run that trains there."""


class File(NamedTuple):
    """One line of a manifest."""

    path: str
    mode: str
    sha256: str
    size: int


def parse(manifest: List[Any], digest: str) -> List[File]:
    """A manifest, checked: every path stays inside, and the digest is that of its lines.

    Raises:
        Refused: bad-request.
    """
    files = []
    for entry in manifest:
        if not isinstance(entry, dict):
            raise Refused("bad-request", f"manifest: {entry!r} is no entry")
        values: List[Any] = [entry.get(name) for name in File._fields]
        file = File(*values)
        if not _sound(file):
            raise Refused("bad-request", f"manifest: {entry!r} is no file of a release")
        files.append(file)
    paths = [file.path for file in files]
    folders = {path[:cut] for path in paths for cut in _slashes(path)}
    if paths != sorted(set(paths)) or folders & set(paths) or not paths:
        raise Refused("bad-request", "manifest: is empty, unsorted, or names a path twice")
    if digest_of(files) != digest:
        raise Refused("bad-request", f"digest: is {digest!r}, and not that of the manifest")
    return files


def digest_of(files: List[File]) -> str:
    """The digest of a release: of its manifest's lines."""
    lines = "".join(f"{file.mode} {file.sha256} {file.path}\n" for file in files)
    return hashlib.sha256(lines.encode()).hexdigest()


def _sound(file: File) -> bool:
    if type(file.path) is not str or type(file.sha256) is not str or type(file.size) is not int:
        return False
    parts = file.path.split("/")
    odd = any(ord(letter) < 32 or ord(letter) == 127 for letter in file.path)
    # Names with a leading dot are left out: ".", "..", our temporary ones, and editors' leavings.
    if odd or len(file.path.encode("utf-8", "surrogateescape")) > 1000 or file.path == MANIFEST:
        return False
    if any(not part or part.startswith(".") or len(part.encode()) > 255 for part in parts):
        return False
    sized = 0 <= file.size <= LARGEST
    return sized and file.mode in MODES and bool(DIGEST.match(file.sha256))


def _slashes(path: str) -> List[int]:
    return [index for index, letter in enumerate(path) if letter == "/"]


def stored(release: str) -> Optional[List[File]]:
    """The files that a release on this host says it has; None when it says nothing sound."""
    record = read_json(os.path.join(release, MANIFEST))
    if not isinstance(record, dict) or not isinstance(record.get("files"), list):
        return None
    try:
        return parse(record["files"], str(record.get("digest")))
    except Refused:
        return None


def sha256_of(path: str) -> Optional[str]:
    """Of a regular file's content; None for anything else, and for links to one."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.ENOTDIR):
            return None
        raise
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        total = hashlib.sha256()
        for part in iter(lambda: file.read(CHUNK), b""):
            total.update(part)
    return total.hexdigest()


def differences(release: str, files: List[File]) -> List[str]:
    """What in the folder is not as the manifest says, by name; empty when it is whole."""
    found = []
    for file in files:
        path = os.path.join(release, file.path)
        if not os.path.lexists(path):
            found.append(f"{file.path}: missing")
            continue
        if sha256_of(path) != file.sha256:
            found.append(f"{file.path}: content differs")
        elif f"{stat.S_IMODE(os.lstat(path).st_mode):04o}" != file.mode:
            found.append(f"{file.path}: mode differs")
    wanted = {file.path for file in files} | {MANIFEST}
    for folder, folders, names in os.walk(release):
        inside = os.path.relpath(folder, release)
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        for name in [*names, *links]:
            path = os.path.normpath(os.path.join(inside, name))
            if path not in wanted:
                found.append(f"{path}: is not part of the release")
    return sorted(found)


def sync(desk: Desk, arguments: Dict[str, Any]) -> Dict[str, Any]:
    """Put a release on this host, asking the desk for the contents that are missing."""
    digest = want(arguments, "digest", str)
    files = parse(want(arguments, "manifest", list), digest)
    with changing(desk, arguments) as root:
        release = root.release(digest)
        damaged: List[str] = []
        if os.path.isdir(release):
            damaged = differences(release, files)
            if stored(release) is None:
                damaged.append(f"{MANIFEST}: content differs")
            if not damaged:
                return _result(digest, changed=False, sent=[], files=files, warnings=[])
        warnings = [f"{digest[:12]} was damaged ({damaged[0]}), made anew"] if damaged else []
        dry = want(arguments, "dry", bool, default=False)
        missing = _missing(root, files, keep=dry)
        if dry:
            return _result(digest, changed=True, sent=missing, files=files, warnings=warnings)
        try:
            _check_space(root, missing, files)
            _receive(desk, root, missing)
            desk.check()
            _assemble(root, release, files, digest)
        except OSError as error:
            if error.errno not in space.FULL:
                raise
            refused = space.full(root.path, error.errno)  # before the sweep, which makes room
            root.sweep()
            raise refused from error
        sent = sum(file.size for file in missing)
        history.record(
            desk, root, "sync", release=digest, files=len(missing), bytes=sent, result="synced"
        )
        return _result(digest, changed=True, sent=missing, files=files, warnings=warnings)


def _result(
    digest: str, *, changed: bool, sent: List[File], files: List[File], warnings: List[str]
) -> Dict[str, Any]:
    return {
        "changed": changed,
        "digest": digest,
        "sent_files": len(sent),
        "sent_bytes": sum(file.size for file in sent),
        "reused": len({file.sha256 for file in files}) - len(sent),
        "warnings": warnings,
    }


def _missing(root: Root, files: List[File], *, keep: bool) -> List[File]:
    """One file for each content that is not stored; damaged contents are removed, unless `keep`."""
    missing: List[File] = []
    seen: Set[str] = set()
    for file in files:
        if file.sha256 in seen:
            continue
        seen.add(file.sha256)
        blob = os.path.join(root.blobs, file.sha256)
        if sha256_of(blob) != file.sha256:
            if not keep:
                remove(blob)
            missing.append(file)
    return missing


def _check_space(root: Root, missing: List[File], files: List[File]) -> None:
    os.makedirs(root.blobs, exist_ok=True)
    os.makedirs(root.releases, exist_ok=True)
    disk = os.statvfs(root.releases)
    needed = sum(file.size for file in missing) + sum(file.size for file in files) + SPARE_BYTES
    if disk.f_bavail * disk.f_frsize < needed:
        raise space.full(root.path, needed=needed)
    if disk.f_files and disk.f_favail < len(missing) + 2 * len(files):
        raise Refused("failed", f"{root.path}: no inodes left ({disk.f_favail}); free some")


def _receive(desk: Desk, root: Root, missing: List[File]) -> None:
    if not missing:
        return
    desk.need([file.sha256 for file in missing])
    arrived = 0
    for file in missing:
        beside = os.path.join(root.blobs, f"{TEMPORARY}{file.sha256}")
        total, left = hashlib.sha256(), file.size
        with open(beside, "wb") as blob:
            while left:
                part = desk.read(min(left, CHUNK))
                blob.write(part)
                total.update(part)
                left -= len(part)
        if total.hexdigest() != file.sha256:
            os.unlink(beside)
            raise Refused(
                "failed",
                f"{file.path}: arrived as {total.hexdigest()[:12]}, not as {file.sha256[:12]};"
                " it changed at the desk meanwhile, or the stream is damaged; repeat",
            )
        os.chmod(beside, 0o400)
        os.rename(beside, os.path.join(root.blobs, file.sha256))
        arrived += file.size
        desk.progress(received=arrived, file=file.path)


def _assemble(root: Root, release: str, files: List[File], digest: str) -> None:
    building = os.path.join(root.releases, f"{TEMPORARY}{digest}")
    os.mkdir(building)
    for file in files:
        path = os.path.join(building, file.path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        _copy(os.path.join(root.blobs, file.sha256), path)
        os.chmod(path, int(file.mode, 8))
    manifest = os.path.join(building, MANIFEST)
    record = {"digest": digest, "files": [file._asdict() for file in files]}
    with open(manifest, "w", encoding="utf-8") as out:
        json.dump(record, out, indent=1)
    os.chmod(manifest, 0o444)
    wrong = differences(building, files)
    if wrong:
        raise Refused("failed", f"{digest[:12]}: written, and read back otherwise: {wrong[0]}")
    if os.path.lexists(release):
        os.rename(release, os.path.join(root.releases, f"{TEMPORARY}damaged-{digest}"))
    os.rename(building, release)
    root.sweep()


def _copy(source: str, target: str) -> None:
    # Copies, not hard links: whoever writes to one in place would change every release.
    with open(source, "rb") as old, open(target, "wb") as new:
        try:
            fcntl.ioctl(new.fileno(), FICLONE, old.fileno())
        except OSError:  # this file system shares no blocks
            new.writelines(iter(lambda: old.read(CHUNK), b""))
