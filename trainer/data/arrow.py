"""Arrow files of tokenised completions, as flat arrays: read once, in whole columns.

Two columns are read: `input_ids` (a list of token ids a row) and `loss_mask` (a list as long;
what is not 0 is trained on). Any integer width, `list` or `large_list`, any number of shards.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trainer.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

IDS, MASK = "input_ids", "loss_mask"
Int64 = npt.NDArray[np.int64]

# The last eight bytes of a whole Arrow stream. A stream that was cut between two messages reads
# without complaint, with rows missing; only this mark tells.
_STREAM_END = bytes.fromhex("ffffffff00000000")
_FOREIGN = {
    b"PAR1": "a Parquet file",
    b"\x1f\x8b": "gzip data",
    b"version https://git-lfs": "a Git LFS pointer (run `git lfs pull`)",
    b"<": "a web page",
}


@dataclass(frozen=True, kw_only=True)
class TokenStore:
    """Every row of a data set, end to end.

    Row r is `tokens[starts[r]:starts[r + 1]]`. Rows that cannot teach anything were left out.
    """

    tokens: npt.NDArray[np.int32]
    trainable: npt.NDArray[np.bool_]
    starts: Int64
    """One more than there are rows."""
    fingerprint: str
    """Of the rows' lengths, in order: two stores with the same one make the same batches."""
    dropped: dict[str, int]
    """Rows left out, by reason."""
    truncated: int = 0
    """Rows cut to the token budget."""

    @property
    def lengths(self) -> Int64:
        """Tokens of each row."""
        return np.diff(self.starts)

    def lengths_of(self, rows: Int64) -> Int64:
        """Tokens of these rows."""
        return self.starts[rows + 1] - self.starts[rows]


def load(
    data_dir: str | Path, *, vocab_size: int | None = None, budget: int, overlong: str = "error"
) -> TokenStore:
    """Read a data set into memory: 5 bytes a token.

    Args:
        data_dir: HuggingFace `save_to_disk` folder (of one split, or with a split `train`), or a
            folder of .arrow files, IPC file or stream format.
        vocab_size: ids from this on are refused; None refuses none but negative ones.
        budget: in tokens, the longest row a batch can hold.
        overlong: what becomes of longer rows: error, truncate or drop.

    Raises:
        InputError: what was found is not such a data set; the message names file and row.
    """
    parts = []
    reading = _Reading(vocab_size, budget, overlong)
    for path in _files(Path(data_dir)):
        row = 0
        for batch in _batches(path):
            parts.append(reading.columns(batch, path, row))
            row += batch.num_rows
    rows = sum(len(lengths) for _, _, lengths in parts)
    if not rows:
        left_out = ", ".join(f"{count:,} {why}" for why, count in reading.dropped.items())
        raise InputError(f"{data_dir}: has no row to train on ({left_out or 'no rows at all'})")
    starts = np.zeros(rows + 1, np.int64)
    np.cumsum(np.concatenate([lengths for _, _, lengths in parts]), out=starts[1:])
    return TokenStore(
        tokens=np.concatenate([tokens for tokens, _, _ in parts]),
        trainable=np.concatenate([trainable for _, trainable, _ in parts]),
        starts=starts,
        fingerprint=hashlib.sha256(np.diff(starts).tobytes()).hexdigest()[:16],
        dropped=dict(reading.dropped),
        truncated=reading.truncated,
    )


def _files(folder: Path) -> list[Path]:
    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_text())["splits"]
        if "train" not in splits:
            raise InputError(
                f"--data-dir: {folder} has the splits {', '.join(splits)}; give the folder of one"
            )
        folder = folder / "train"
    if not folder.is_dir():
        raise InputError(f"--data-dir: {folder} is not a folder")
    if (folder / "state.json").is_file():
        return _listed(folder)
    # HuggingFace leaves caches of its own beside the data.
    found = [
        path
        for path in sorted(folder.glob("*.arrow"))
        if not path.name.startswith(("cache-", "tmp"))
    ]
    if not found:
        raise InputError(f"--data-dir: {folder} holds neither state.json nor an .arrow file")
    return found


def _listed(folder: Path) -> list[Path]:
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        names = [entry["filename"] for entry in state["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder / 'state.json'}: is not HuggingFace's: {error!r}") from error
    if state.get("_indices_files") or state.get("_indices_data_files"):
        # Most readers ignore the mapping and silently give the rows that it leaves out.
        raise InputError(
            f"{folder}: rows are chosen by an indices file; save the data set again after"
            " `flatten_indices()`"
        )
    for name in names:
        if not (folder / name).is_file():
            raise InputError(f"{folder / name}: is listed in state.json and is not there")
    return [folder / name for name in names]


def _batches(path: Path) -> Iterator[pa.RecordBatch]:
    with path.open("rb") as file:
        head = file.read(24)
        file.seek(0, 2)
        size = file.tell()
        file.seek(max(0, size - len(_STREAM_END)))
        tail = file.read()
    if not size:
        raise InputError(f"{path}: is empty")
    for magic, name in _FOREIGN.items():
        if head.startswith(magic):
            raise InputError(f"{path}: is {name}, not Arrow data")
    streamed = not head.startswith(b"ARROW1")
    try:
        with pa.memory_map(str(path)) as source:
            if streamed:
                yield from pa.ipc.open_stream(source)
            else:
                reader = pa.ipc.open_file(source)
                yield from map(reader.get_batch, range(reader.num_record_batches))
    except (pa.ArrowException, OSError, EOFError) as error:
        raise InputError(
            f"{path}: is not whole Arrow data ({size:,} bytes): {error}; copy it again"
        ) from error
    if streamed and tail != _STREAM_END:
        raise InputError(
            f"{path}: has no end-of-stream mark ({size:,} bytes), so rows may be missing;"
            " copy it again"
        )


class _Reading:
    """The rules of one `load`, and the count of what they left out."""

    def __init__(self, vocab_size: int | None, budget: int, overlong: str) -> None:
        self.vocab_size, self.budget, self.overlong = vocab_size, budget, overlong
        self.dropped: Counter[str] = Counter()
        self.truncated = 0

    def columns(
        self, batch: pa.RecordBatch, path: Path, first_row: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_], Int64]:
        """Tokens, mask and lengths of a record batch's usable rows."""
        ids, lengths = _flat(batch, IDS, path, first_row)
        mask, mask_lengths = _flat(batch, MASK, path, first_row)
        if wrong := _first(lengths != mask_lengths):
            row = wrong[0]
            raise InputError(
                f"{path}: row {first_row + row:,}: {lengths[row]:,} {IDS} but"
                f" {mask_lengths[row]:,} {MASK}"
            )
        starts = np.concatenate([[0], np.cumsum(lengths)])
        if wrong := _first(_outside(ids, self.vocab_size)):
            row = int(np.searchsorted(starts, wrong[0], side="right")) - 1
            raise InputError(
                f"{path}: row {first_row + row:,}: id {ids[wrong[0]]} at position"
                f" {wrong[0] - starts[row]:,}; the target has ids 0 to"
                f" {(self.vocab_size or 2**31) - 1:,}"
            )
        trainable = mask != 0
        kept, cut = self._choose(lengths, trainable, starts, path, first_row)
        tokens = ids.astype(np.int32, copy=False)
        if not kept.all() or cut.any():
            position = np.arange(len(ids)) - np.repeat(starts[:-1], lengths)
            slots = np.repeat(kept, lengths) & (position < self.budget)
            tokens, trainable = tokens[slots], trainable[slots]
        return tokens, trainable, np.minimum(lengths, self.budget)[kept]

    def _choose(
        self,
        lengths: Int64,
        trainable: npt.NDArray[np.bool_],
        starts: Int64,
        path: Path,
        first_row: int,
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        # Which rows stay, and which of those are cut.
        over = lengths > self.budget
        if self.overlong == "error" and (wrong := _first(over)):
            raise InputError(
                f"{path}: row {first_row + wrong[0]:,}: {lengths[wrong[0]]:,} tokens; raise"
                f" --token-budget above {self.budget:,}, or give --overlong truncate (or drop)"
            )
        ends = starts[:-1] + np.minimum(lengths, self.budget)
        # A block needs an anchor that is trained on, and a trained token after it, in the same row.
        pairs = np.concatenate([[0], np.cumsum(trainable[:-1] & trainable[1:]), [0]])
        teaches = (lengths >= 2) & (pairs[np.maximum(ends - 1, 0)] > pairs[starts[:-1]])
        kept = teaches & ~over if self.overlong == "drop" else teaches
        self.dropped["empty"] += int((lengths == 0).sum())
        self.dropped["without two trained tokens in a row"] += int((~teaches & (lengths > 0)).sum())
        self.dropped["longer than the token budget"] += int((teaches & ~kept).sum())
        self.dropped = +self.dropped
        self.truncated += int((over & kept).sum())
        return kept, over & kept


def _flat(
    batch: pa.RecordBatch, name: str, path: Path, first_row: int
) -> tuple[npt.NDArray[np.generic], Int64]:
    # One column as its values end to end, and how many each row has (a null row has none).
    if name not in batch.schema.names:
        raise InputError(f"{path}: has no column {name}; it has {', '.join(batch.schema.names)}")
    column = batch.column(batch.schema.names.index(name))
    kind = column.type
    listed = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    inner = kind.value_type if listed else None
    numeric = listed and (
        pa.types.is_integer(inner) or (name == MASK and pa.types.is_boolean(inner))
    )
    if not numeric:
        raise InputError(f"{path}: column {name} is {kind}; lists of integers are needed")
    try:
        # Corrupt offsets pass every cheaper check, and would be read out of bounds.
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        raise InputError(f"{path}: column {name} is damaged: {error}; copy it again") from error
    lengths = np.asarray(pc.fill_null(pc.list_value_length(column), 0), dtype=np.int64)
    values = column.flatten()
    if values.null_count:
        missing = int(pc.index(pc.is_null(values), value=True).as_py())
        row = int(np.searchsorted(np.cumsum(lengths), missing, side="right"))
        raise InputError(f"{path}: row {first_row + row:,}: a value of {name} is null")
    return values.to_numpy(zero_copy_only=False), lengths


def _outside(ids: npt.NDArray[np.generic], vocab_size: int | None) -> npt.NDArray[np.bool_]:
    limit = vocab_size or 2**31
    # Two reductions, no array made: the usual answer is that nothing is outside.
    if not len(ids) or (int(ids.min()) >= 0 and int(ids.max()) < limit):
        return np.zeros(0, np.bool_)
    return np.asarray((ids < 0) | (ids >= limit))  # type: ignore[operator]


def _first(wrong: npt.NDArray[np.bool_]) -> tuple[int, ...]:
    return tuple(int(index) for index in np.flatnonzero(wrong)[:1])
