"""Which files of a folder are the data set, in which order. Names and JSON only."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

DEFAULT_SPLIT = "train"
SUFFIXES = (".arrow", ".feather", ".ipc", ".parquet")
# As the hub names them: train-00000-of-00002.parquet.
_SHARD = re.compile(r"(?P<split>.+)-\d{5}-of-\d{5}$")


@dataclass(frozen=True, kw_only=True)
class Found:
    """The files of a data set."""

    files: tuple[Path, ...]
    indices: tuple[Path, ...] = ()
    """Files of row numbers that choose and order the rows; empty: all, in order."""
    notes: tuple[str, ...] = ()
    """What a person should know."""


def find(data_dir: Path, split: str = "") -> Found:
    """The files of one split.

    Args:
        data_dir: a HuggingFace `save_to_disk` folder, a folder of files, or one file.
        split: which of several; empty: `train` where there are several.

    Raises:
        InputError: no data set is there, or not that split.
    """
    if data_dir.is_file():
        _no_splits(data_dir, split)
        return Found(files=(data_dir,))
    if not data_dir.is_dir():
        raise InputError(f"--data-dir: {data_dir} is not a folder; give the data set's")
    if (data_dir / "dataset_dict.json").is_file():
        names = _read(data_dir / "dataset_dict.json", "splits")
        folder = data_dir / _chosen(data_dir, [str(each) for each in names], split)
        if not folder.is_dir():
            raise InputError(
                f"{folder}: is listed in dataset_dict.json and is not there; copy it again"
            )
        return _whole(folder)
    if (data_dir / "state.json").is_file():
        _no_splits(data_dir, split)
        return _whole(data_dir)
    return _bare(data_dir, split)


def _whole(folder: Path) -> Found:
    state = folder / "state.json"
    if not state.is_file():
        raise InputError(f"{state}: is missing; save the data set again with save_to_disk")
    files = _listed(folder, _read(state, "_data_files"))
    held = json.loads(state.read_text(encoding="utf-8"))
    indices = _listed(folder, held.get("_indices_files") or held.get("_indices_data_files") or [])
    stale = sorted({each.name for each in _data_files(folder)} - {each.name for each in files})
    stale = [name for name in stale if name not in {each.name for each in indices}]
    notes = []
    if stale:
        notes.append(
            f"{folder}: {', '.join(stale)} is not listed in state.json and is left out; remove it"
            if len(stale) == 1
            else f"{folder}: {len(stale)} files are not listed in state.json and are left out"
            f" ({stale[0]} ...); remove them"
        )
    return Found(files=tuple(files), indices=tuple(indices), notes=tuple(notes))


def _listed(folder: Path, entries: Any) -> list[Path]:
    try:
        names = [str(entry["filename"]) for entry in entries]
    except (KeyError, TypeError) as error:
        raise InputError(f"{folder / 'state.json'}: is not HuggingFace's: {error!r}") from error
    for name in names:
        if not (folder / name).is_file():
            raise InputError(
                f"{folder / name}: is listed in state.json and is not there; copy it again"
            )
    return [folder / name for name in names]


def _read(path: Path, key: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))[key]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path}: is not HuggingFace's: {error!r}; save the data set again with save_to_disk"
        ) from error


def _bare(folder: Path, split: str) -> Found:
    files = _data_files(folder)
    if not files and (folder / "data").is_dir():
        # The hub's own layout.
        files = _data_files(folder / "data")
    if not files:
        below = sorted(
            each.name
            for each in folder.iterdir()
            if each.is_dir() and ((each / "state.json").is_file() or _data_files(each))
        )
        hint = f"; give one of its folders {', '.join(below)}" if below else ""
        raise InputError(
            f"--data-dir: {folder} holds no state.json, and no {', '.join(SUFFIXES[:-1])} or"
            f" {SUFFIXES[-1]} file{hint}"
        )
    shards = [_SHARD.match(each.stem) for each in files]
    names = sorted({each["split"] for each in shards if each} - {"data"})
    if all(shards) and (len(names) > 1 or split):
        chosen = _chosen(folder, names, split)
        files = [each for each in files if each.name.startswith(f"{chosen}-")]
    else:
        _no_splits(folder, split)
    return Found(files=tuple(files))


def _data_files(folder: Path) -> list[Path]:
    # HuggingFace leaves caches of its own beside the data.
    return [
        path
        for path in sorted(folder.iterdir())
        if path.suffix in SUFFIXES
        and path.is_file()
        and not path.name.startswith(("cache-", "tmp", "."))
    ]


def _chosen(folder: Path, names: list[str], split: str) -> str:
    wanted = split or DEFAULT_SPLIT
    if wanted not in names:
        raise InputError(
            f"--data-dir: {folder} has the splits {', '.join(names)}, and no {wanted};"
            " give one as --data-split"
        )
    return wanted


def _no_splits(path: Path, split: str) -> None:
    if split:
        raise InputError(f"--data-split: is {split}, but {path} has no splits; leave it out")
