"""Which token stands for "not drafted yet"."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.errors import InputError
from trainer.model.target import has_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trainer.model.target import Target

KNOWN_MASKS = {
    # The ids that the published drafters of these families were trained with.
    "qwen3": 151669,
    "qwen3_moe": 151669,
    "qwen3_5": 248070,
    "qwen3_5_text": 248070,
    "qwen3_5_moe": 248070,
    "qwen3_5_moe_text": 248070,
}


def choose_mask_token(
    target: Target, *, explicit: int | None = None, occurs: Callable[[int], bool]
) -> int:
    """A row of the embedding that no text uses, to stand for "not drafted yet".

    In this order: `explicit`; the id that published drafters of the family use; the first row
    behind the tokenizer's last token; a special token that the chat template does not use.

    Args:
        target: whose embedding it is.
        explicit: the person's choice, or None.
        occurs: whether a token id stands anywhere in the training data.

    Raises:
        InputError: the choice is a pad, begin or end token, lies outside the vocabulary or
            stands in the data; or none is left to choose.
    """
    if explicit is not None:
        if not 0 <= explicit < target.vocabulary:
            raise InputError(f"--mask-token-id: is {explicit}; give 0 to {target.vocabulary - 1:,}")
        if explicit in target.special_ids:
            raise InputError(
                f"--mask-token-id: {explicit} is a pad, begin or end token; give an unused one"
            )
        if occurs(explicit):
            raise InputError(
                f"--mask-token-id: token {explicit} stands in the data; give an unused one"
            )
        return explicit
    for candidate in _mask_candidates(target):
        if candidate not in target.special_ids and not occurs(candidate):
            return candidate
    raise InputError(
        f"target {target.path}: no unused token found to stand for the mask; give --mask-token-id"
    )


def _mask_candidates(target: Target) -> Iterator[int]:
    known = KNOWN_MASKS.get(target.shape.family)
    if known is not None and known < target.vocabulary:
        yield known
    if not has_tokenizer(target.path):
        return
    tokenizer = target.tokenizer()
    yield from range(len(tokenizer), target.vocabulary)
    template = tokenizer.chat_template or ""
    special = {
        i: str(token)
        for i, token in tokenizer.added_tokens_decoder.items()
        if token.special and i < target.vocabulary
    }
    unused = [
        i
        for i, text in special.items()
        if text not in template and i not in set(tokenizer.all_special_ids)
    ]
    named = ("mask", "unused", "reserved", "extra")
    yield from sorted(
        unused, key=lambda i: (not any(word in special[i].lower() for word in named), -i)
    )
