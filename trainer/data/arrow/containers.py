"""Files to record batches: Arrow IPC file or stream, mapped; Parquet, decoded piece by piece."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from trainer.data.arrow.mapped import Mapped
from trainer.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# The last eight bytes of a whole Arrow stream. A stream that was cut between two messages reads
# without complaint, with rows missing; only this mark tells.
STREAM_END = bytes.fromhex("ffffffff00000000")
_FILE, _STREAM, _PARQUET = b"ARROW1", b"\xff\xff\xff\xff", b"PAR1"
_FOREIGN = {
    b"\x1f\x8b": "gzip data; unpack it",
    b"\x28\xb5\x2f\xfd": "zstd data; unpack it",
    b"PK\x03\x04": "a zip archive; unpack it",
    b"version https://git-lfs": "a Git LFS pointer; run `git lfs pull`",
    b"FEA1": "Feather version 1; write it again as version 2",
    b"<": "a web page; download the file itself",
    b"{": "JSON; write it as Arrow or Parquet",
}
_ROWS = 1024
"""Rows of Parquet decoded together."""
_BYTES_A_TOKEN = 5
_MEMORY = Path("/proc/meminfo")


def batches(
    path: Path, needed: Callable[[Path, list[str]], Sequence[str]]
) -> Iterator[tuple[pa.RecordBatch, Mapped | None]]:
    """Record batches of a file, and the mapping that their arrays may be views of.

    Args:
        path: the file.
        needed: which of the file's columns are wanted; asked by Parquet, which reads no others.

    Raises:
        InputError: it is no such file, or not whole.
    """
    if not path.stat().st_size:
        raise InputError(f"{path}: is empty; copy it again")
    mapped = Mapped(path)
    head = mapped.memory[:24]
    _refuse_foreign(path, head)
    try:
        if path.suffix == ".parquet":
            yield from _parquet(path, needed)
        elif head.startswith(_FILE):
            reader = pa.ipc.open_file(pa.py_buffer(mapped.memory))
            for number in range(reader.num_record_batches):
                yield reader.get_batch(number), mapped
        else:
            for batch in pa.ipc.open_stream(pa.py_buffer(mapped.memory)):
                yield batch, mapped
    except (pa.ArrowException, OSError, EOFError) as error:
        kind = "Parquet" if path.suffix == ".parquet" else "Arrow"
        raise InputError(
            f"{path}: is not whole {kind} data ({len(mapped):,} bytes): {_one_line(error)};"
            " copy it again"
        ) from error
    cut = not head.startswith((_FILE, _PARQUET)) and mapped.memory[-8:] != STREAM_END
    if cut:
        raise InputError(
            f"{path}: has no end-of-stream mark ({len(mapped):,} bytes), so rows may be missing;"
            " copy it again"
        )


def _refuse_foreign(path: Path, head: bytes) -> None:
    kind = "Parquet" if path.suffix == ".parquet" else "Arrow"
    for magic, name in _FOREIGN.items():
        if head.startswith(magic):
            what, _, remedy = name.partition("; ")
            raise InputError(f"{path}: is {what}, not {kind} data; {remedy}")
    if head.startswith(_PARQUET) and path.suffix != ".parquet":
        raise InputError(f"{path}: is a Parquet file, not Arrow data; name it .parquet")
    if head.startswith((_FILE, _STREAM)) and path.suffix == ".parquet":
        raise InputError(f"{path}: is Arrow data, not a Parquet file; name it .arrow")


def _parquet(
    path: Path, needed: Callable[[Path, list[str]], Sequence[str]]
) -> Iterator[tuple[pa.RecordBatch, None]]:
    with pq.ParquetFile(path) as file:
        wanted = needed(path, file.schema_arrow.names)
        _refuse_too_large(path, file.metadata, wanted[0])
        for batch in file.iter_batches(_ROWS, columns=list(wanted)):
            yield batch, None


def _refuse_too_large(path: Path, facts: pq.FileMetaData, ids_name: str) -> None:
    tokens = sum(
        column.num_values
        for group in map(facts.row_group, range(facts.num_row_groups))
        for column in map(group.column, range(group.num_columns))
        if column.path_in_schema.split(".")[0] == ids_name
    )
    size, free = tokens * _BYTES_A_TOKEN, _free_memory()
    if free is not None and size > free:
        raise InputError(
            f"{path}: takes {size / 2**30:,.1f} GiB of memory decoded, and {free / 2**30:,.1f} are"
            " free; write it as Arrow without compression, which stays on disk"
        )


def _free_memory() -> int | None:
    try:
        lines = _MEMORY.read_text(encoding="ascii").splitlines()
    except OSError:  # only Linux tells
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if "MemAvailable" in line), None)


def indices(path: Path) -> pa.Array:
    """The row numbers in an indices file of HuggingFace `datasets`, as 64-bit integers.

    Raises:
        InputError: it is no such file.
    """
    parts = []
    for batch, _ in batches(path, lambda _, names: names):
        column = batch.column(0) if batch.num_columns == 1 else None
        if column is None or not pa.types.is_integer(column.type) or column.null_count:
            raise InputError(
                f"{path}: is no indices file ({batch.schema.names}); save the data set again after"
                " flatten_indices()"
            )
        parts.append(column.cast(pa.int64()))
    return pa.chunked_array(parts, pa.int64())


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".")
