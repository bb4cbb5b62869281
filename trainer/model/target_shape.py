"""What a drafter must know of its target: sizes, and which layers are tapped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, kw_only=True)
class TargetShape:
    """What a drafter must know of its target, in plain values."""

    family: str
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    max_positions: int
    rope_theta: float
    eps: float
    tied: bool


def tap_ids_by_formula(layers: int, count: int) -> tuple[int, ...]:
    """Layers to tap, spread as z-lab spreads them; id i is the output of decoder layer i.

    Raises:
        InputError: the target is too shallow for `count` different taps.
    """
    if count == 1:
        return (layers // 2,)
    # round() is Python's, half to even: published ids depend on it.
    ids = tuple(round(1 + i * (layers - 4) / (count - 1)) for i in range(max(count, 0)))
    if not ids or len(set(ids)) != count or ids[-1] >= layers:
        raise InputError(
            f"target: {layers} layers cannot be tapped {count} times; give --target-layer-ids"
        )
    return ids


def checked_taps(taps: Sequence[int], layers: int) -> tuple[int, ...]:
    """Taps that a person gave.

    Raises:
        InputError: one lies outside the target, or stands there twice.
    """
    wrong = [tap for tap in taps if not 0 <= tap < layers]
    if wrong or len(set(taps)) != len(taps) or not taps:
        raise InputError(
            f"--target-layer-ids: is {list(taps)}; give different ids from 0 to {layers - 1}"
        )
    return tuple(taps)


def read_shape(config: Any) -> TargetShape:
    """Read a transformers config, also where the language model is nested in it.

    Raises:
        InputError: its head does more than multiply.
    """
    text = config.get_text_config()
    for name, neutral in (
        ("final_logit_softcapping", None),
        ("logits_scaling", 1),
        ("logit_scale", 1),
    ):
        value = getattr(text, name, neutral)
        if value not in (None, neutral):
            raise InputError(
                f"target: {text.model_type} has {name} {value}; such heads are not supported"
            )
    rope = getattr(text, "rope_parameters", None) or {}
    if "full_attention" in rope:
        rope = rope["full_attention"]
    theta = rope.get("rope_theta") or getattr(text, "rope_theta", None) or 10_000.0
    heads = text.num_attention_heads
    return TargetShape(
        family=config.model_type,
        hidden_size=text.hidden_size,
        intermediate_size=getattr(text, "intermediate_size", None) or 3 * text.hidden_size,
        layers=text.num_hidden_layers,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocabulary=text.vocab_size,
        max_positions=text.max_position_embeddings,
        rope_theta=float(theta),
        eps=float(getattr(text, "rms_norm_eps", 1e-6)),
        tied=bool(text.tie_word_embeddings),
    )
