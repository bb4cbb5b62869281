"""The data of a run: opened before the target is loaded, looked through once it is known."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from trainer.data import arrow
from trainer.data.batching import PACKED, PADDED
from trainer.data.holdout import held_out
from trainer.errors import InputError

if TYPE_CHECKING:
    from trainer.config import TrainConfig
    from trainer.data.arrow import TokenStore
    from trainer.model.target import Target

AUTO = "auto"


def opened(config: TrainConfig) -> TokenStore:
    """The index of the data; no token is read yet.

    Raises:
        InputError: there is no such data set, or a row is too long.
    """
    return arrow.load(
        config.data_dir,
        split=config.data_split,
        budget=config.token_budget,
        overlong=config.overlong,
        whole=False,
    )


def checked(store: TokenStore, config: TrainConfig, *, vocab_size: int) -> TokenStore:
    """The data as it is trained on: ids are looked at now, or batch by batch.

    Raises:
        InputError: the target lacks an id, or no row teaches anything.
    """
    if config.data_check == "lazy":
        return dataclasses.replace(store, vocab_size=vocab_size)
    return arrow.scanned(store, config.data_dir, vocab_size=vocab_size)


def divided(store: TokenStore, config: TrainConfig) -> tuple[TokenStore, TokenStore | None]:
    """What is trained on, and the rows that are kept from it; None where none are.

    Raises:
        InputError: nothing would be left to train on.
    """
    return held_out(store, config.eval_rows) if config.eval_rows else (store, None)


def layout(config: TrainConfig, target: Target) -> str:
    """How rows share a micro-batch.

    Raises:
        InputError: they are to be packed, and the target would mix them up.
    """
    # On a GPU only the padded layout was measured: packed is an attention call for each document.
    if config.layout == PADDED or (config.layout == AUTO and target.device.type == "cuda"):
        return PADDED
    mixed = target.mixes_documents()
    if config.layout == PACKED and mixed:
        raise InputError(f"--layout: is packed, but the target {mixed}; give padded or auto")
    return PADDED if mixed else PACKED


def told(store: TokenStore) -> list[str]:
    """What was found, and what of it is left out."""
    words = [f"{len(store.lengths):,} rows, {store.tokens:,} tokens"]
    words += [f"{count:,} dropped ({why})" for why, count in store.dropped.items()]
    if store.truncated:
        words.append(f"{store.truncated:,} truncated")
    return [", ".join(words), *store.notes]
