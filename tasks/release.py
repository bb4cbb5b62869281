"""The local trainer as a release: what ships, its digest, and proof that it parses.

A digest names content: two desks with the same files have the same release.
"""

from __future__ import annotations

import hashlib
import os
import stat
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.errors import ConfigError, visible

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

LARGEST_MB = 64
"""A file above this is data in the wrong place; it would travel to every host."""


@dataclass(frozen=True, slots=True)
class File:
    """One file of a release."""

    path: str
    """From the release's top, with `/`."""
    mode: str
    """0444, or 0555 when it may be executed."""
    sha256: str
    size: int

    def line(self) -> str:
        """Give the file's line in the text that is digested."""
        return f"{self.mode} {self.sha256} {self.path}\n"

    def entry(self) -> dict[str, Any]:
        """Give the file's entry in a manifest."""
        return {"path": self.path, "mode": self.mode, "sha256": self.sha256, "size": self.size}


@dataclass(frozen=True, slots=True)
class Release:
    """An immutable tree."""

    digest: str
    files: tuple[File, ...]
    root: Path
    """The folder that was read."""
    blobs: Mapping[str, bytes] = field(repr=False, compare=False)
    """Contents by sha256, held since they were hashed: an editor may save while we send."""

    def manifest(self) -> list[dict[str, Any]]:
        """Give what a host compares its files with, sorted by path."""
        return [file.entry() for file in self.files]

    def stream(self, wanted: list[str]) -> Iterator[bytes]:
        """Give the contents of `wanted` (sha256s), in that order."""
        return (self.blobs[sha256] for sha256 in wanted)


def digest_of(files: tuple[File, ...]) -> str:
    """Hash the manifest: sha256, in hex, of the lines sorted by path."""
    text = "".join(file.line() for file in sorted(files, key=lambda file: file.path))
    return hashlib.sha256(text.encode()).hexdigest()


def read_tree(folder: Path) -> Release:
    """Read the trainer in `folder` whole; its files keep the folder's name as their first part.

    Left out: names that start with a dot, `__pycache__`, `*.pyc`. A link to a file inside the
    folder ships as that file.

    Raises:
        ConfigError: nothing to ship, a .py that does not parse (with its line), a link that
            leaves the folder, or a file that cannot be read or is no file.
    """
    top = folder.resolve()
    if not (top / "__main__.py").is_file():
        raise ConfigError(
            str(folder), "no trainer there: __main__.py is missing", "name the trainer's folder"
        )
    files: list[File] = []
    blobs: dict[str, bytes] = {}
    for path, name in _walk(top):
        mode, content = _content(path, name, top)
        if name.endswith(".py"):
            _parse(content, name)
        sha256 = hashlib.sha256(content).hexdigest()
        blobs[sha256] = content
        files.append(File(name, mode, sha256, len(content)))
    ordered = tuple(sorted(files, key=lambda file: file.path))
    return Release(digest_of(ordered), ordered, top, blobs)


def _walk(top: Path) -> Iterator[tuple[Path, str]]:
    def refuse(wrong: OSError) -> None:
        place = Path(str(wrong.filename)).relative_to(top.parent)
        raise ConfigError(str(place), f"cannot be read: {wrong.strerror}", "see its owner and mode")

    for folder, folders, names in os.walk(top, onerror=refuse):
        for name in folders:
            if _ships(name) and (Path(folder) / name).is_symlink():
                place = (Path(folder) / name).relative_to(top.parent)
                raise ConfigError(str(place), "is a link to a folder", "put the files there")
        folders[:] = sorted(name for name in folders if _ships(name))
        for name in sorted(names):
            if not _ships(name):
                continue
            path = Path(folder) / name
            shipped = path.relative_to(top.parent).as_posix()
            if visible(shipped) != shipped:
                raise ConfigError(
                    visible(shipped), "has a name that is not plain text", "rename it"
                )
            yield path, shipped


def _ships(name: str) -> bool:
    return not name.startswith(".") and name != "__pycache__" and not name.endswith(".pyc")


def _content(path: Path, name: str, top: Path) -> tuple[str, bytes]:
    try:
        true = path.resolve(strict=True)
        if path.is_symlink() and not true.is_relative_to(top):
            raise ConfigError(name, f"is a link that leaves the folder, to {true}", "copy the file")
        about = true.stat()
        if not stat.S_ISREG(about.st_mode):
            raise ConfigError(name, "is neither a file nor a folder", "remove it")
        if about.st_size > LARGEST_MB << 20:
            raise ConfigError(
                name, f"has {about.st_size >> 20:,} MB", f"keep data elsewhere; {LARGEST_MB} fit"
            )
        mode = "0555" if about.st_mode & stat.S_IXUSR else "0444"
        return mode, true.read_bytes()
    except FileNotFoundError:
        raise ConfigError(name, "is a link to nothing", "remove it") from None
    except (OSError, RuntimeError) as wrong:  # RuntimeError: links in a circle, before 3.13
        why = getattr(wrong, "strerror", None) or str(wrong)
        raise ConfigError(name, f"cannot be read: {why}", "see its owner and mode") from None


def _parse(content: bytes, name: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(content, name, "exec", dont_inherit=True)
    except SyntaxError as wrong:
        what = visible(wrong.msg)
        raise ConfigError(f"{name}:{wrong.lineno or 1}", what, "nothing was sent") from None
    except (ValueError, RecursionError, MemoryError) as wrong:
        raise ConfigError(f"{name}:1", f"does not parse: {wrong}", "nothing was sent") from None
