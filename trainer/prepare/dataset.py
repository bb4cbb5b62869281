"""Writes rows in the layout of HuggingFace `datasets`' `save_to_disk`, by pyarrow alone."""

from __future__ import annotations

import hashlib
import json
import shutil
from typing import TYPE_CHECKING

import pyarrow as pa

from trainer.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from trainer.prepare.completions import Row

STATE, INFO, ARROW, PROVENANCE = (
    "state.json",
    "dataset_info.json",
    "data-00000-of-00001.arrow",
    "provenance.json",
)


def write_dataset(out: Path, rows: Sequence[Row], facts: dict[str, object]) -> None:
    """Write rows as `input_ids` and `loss_mask` (0 over the prompt, 1 over the completion).

    All is written to a folder beside and then moved; `state.json`, which makes it a dataset, last.

    Raises:
        InputError: there is one already.
    """
    refuse_existing(out)
    beside = out.with_name(f".{out.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    fingerprint = _write_arrow(beside / ARROW, rows)
    texts = {
        PROVENANCE: facts,
        INFO: {
            "citation": "",
            "description": "",
            "features": _FEATURES,
            "homepage": "",
            "license": "",
        },
        STATE: {
            "_data_files": [{"filename": ARROW}],
            "_fingerprint": fingerprint,
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
        },
    }
    for name, value in texts.items():
        (beside / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")
    out.mkdir(parents=True, exist_ok=True)
    for name in (ARROW, *texts):
        (beside / name).replace(out / name)
    beside.rmdir()


# The older of the two spellings that `datasets` knows for a list: every release reads it.
_FEATURES = {
    "input_ids": {"feature": {"dtype": "int32", "_type": "Value"}, "_type": "Sequence"},
    "loss_mask": {"feature": {"dtype": "int8", "_type": "Value"}, "_type": "Sequence"},
}


def _write_arrow(path: Path, rows: Sequence[Row]) -> str:
    schema = pa.schema(
        [("input_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.int8()))],
        metadata={"huggingface": json.dumps({"info": {"features": _FEATURES}})},
    )
    sums = hashlib.sha256()
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as stream:
        for batch in _in_thousands(rows):
            ids = [row.prompt + row.completion for row in batch]
            masks = [[0] * len(row.prompt) + [1] * len(row.completion) for row in batch]
            stream.write_batch(
                pa.record_batch(
                    [pa.array(ids, schema.field(0).type), pa.array(masks, schema.field(1).type)],
                    schema=schema,
                )
            )
            sums.update(json.dumps([ids, masks]).encode())
    return sums.hexdigest()[:16]


def _in_thousands(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    # As many rows a record batch as `datasets` writes.
    for at in range(0, len(rows), 1000):
        yield rows[at : at + 1000]


def refuse_existing(out: Path) -> None:
    """Raise an InputError where a dataset lies already."""
    if any((out / name).exists() for name in (STATE, INFO, ARROW)):
        raise InputError(f"--out {out}: holds a dataset already; remove it or name another folder")
