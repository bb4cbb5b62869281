"""Prompts that are kept from training, to measure on what was never seen. numpy only."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import TYPE_CHECKING

import numpy as np

from trainer.errors import InputError

if TYPE_CHECKING:
    from trainer.data.arrow import TokenStore


def held_out(store: TokenStore, prompts: int) -> tuple[TokenStore, TokenStore]:
    """Take some prompts out of a data set, with every answer to them.

    Which ones depends on their own tokens alone, by a hash: not on the order of rows or files, and
    hardly on what else the data holds.

    Args:
        store: everything.
        prompts: how many different prompts are taken out.

    Returns:
        What is left to train on; and for each prompt that was taken out its first row.

    Raises:
        InputError: there are not more prompts than that.
    """
    hashes_R = np.array([_hash(store, row) for row in range(len(store.lengths))], np.uint64)
    # return_index: where each first occurs.
    different, first = np.unique(hashes_R, return_index=True)
    if len(different) <= prompts:
        raise InputError(
            f"--eval-rows: is {prompts}; the data holds {len(different):,} different prompts, of"
            " which some must be left to train on"
        )
    taken_R = hashes_R < different[prompts]
    kept = dataclasses.replace(store, index=store.index[~taken_R])
    return kept, dataclasses.replace(store, index=store.index[np.sort(first[:prompts])])


def parts(store: TokenStore, row: int) -> tuple[list[int], list[int]]:
    """Prompt and completion of a row: what stands before its first trained token, and that run."""
    ids, trainable = store.row(row)
    start = int(np.argmax(trainable))
    behind = np.flatnonzero(~trainable[start:])
    end = start + int(behind[0]) if len(behind) else len(ids)
    return ids[:start].tolist(), ids[start:end].tolist()


def _hash(store: TokenStore, row: int) -> int:
    prompt, completion = parts(store, row)
    told = np.array(prompt or completion, np.int64).tobytes()
    return int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), "little")
