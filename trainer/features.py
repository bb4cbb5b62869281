"""What this trainer promises: each check runs the feature, small and on the CPU, and can fail.

A host runs them before a new release may replace an old run, so they are quick, need no data and
no model, and touch nothing but a folder of their own.
Shapes: T context tokens, H hidden size, F feature width, Q block tokens.
"""

from __future__ import annotations

import base64
import dataclasses
import platform
import tempfile
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from trainer.config import TrainConfig
from trainer.data import arrow, batching
from trainer.errors import InputError
from trainer.model import anchors
from trainer.model.drafter import Drafter, DrafterConfig
from trainer.pipeline import Pipeline
from trainer.record.status import release_digest
from trainer.update.gradients import DENOMINATOR, FlatGradients
from trainer.world import ALONE

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from trainer.data.arrow import TokenStore

_VOCABULARY = 32
_SHAPE = DrafterConfig(
    hidden_size=16, intermediate_size=24, layers=2, heads=2, kv_heads=1, head_dim=8,
    vocabulary=_VOCABULARY, tap_ids=(0, 1), target_layers=4, mask_token_id=_VOCABULARY - 1,
    block_size=4, rope_theta=10_000.0, sliding_layers=1, sliding_window=6,
)  # fmt: skip
# An Arrow stream of three rows, as `datasets` makes it: ids [[5, 6, 7], [8], [9, 10]] as int32 and
# masks [[0, 1, 1], [1], [1, 1]] as int64. The second row has no token after its anchor.
_SHARD = (
    "eNqNUjuOwjAUHIMJBrlwEa1SpqCgoNiSkpuglRaJiOUjBW7BESg4EHfyju0XbeQVgpH8Pp7x8/OTvfe+UoBDwBQW"
    "BUYwjAilmYOZodVigQHXVuIfnqfQloxr2WM5VFyTwB/bdr3/aneM79Tekn7gRKOREHxz3uxDfI0aqBXNo1d/1qu/"
    "kPrN4XQ5r5vvNnI68g4ley0wjt07eVu6s35yp6HW8IRJlKpF42U+peQWHzIhG6tjqOM7tugwZW7jtMIMb0izHeIP"
    "Bs/hMp/vV+LnGT/PdMuM7/LP3p7O+goosvwV32m0cCPxY3nnJE7kv66DetP79CfwC164L9I="
)
_PATIENCE_S = 5.0


class Rehearse(Protocol):
    """The training loop on parts in memory, from the newest checkpoint in the output folder."""

    def __call__(
        self, config: TrainConfig, store: TokenStore, target: Any, shape: DrafterConfig
    ) -> Any:
        """Train, and answer the run."""


def report(rehearse: Rehearse) -> dict[str, Any]:
    """Run all checks.

    Returns:
        What `features --json` prints: release, python, torch, and for each feature its name,
        whether it holds, a sentence and the seconds it took.
    """
    # Several threads would wait for each other on a machine that trains, longer than a check takes.
    torch.set_num_threads(1)
    return {
        "release": release_digest(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "features": [_checked(name, check, rehearse) for name, check in CHECKS.items()],
    }


def _checked(name: str, check: Callable[[Path, Rehearse], str], rehearse: Rehearse) -> Any:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="trainer-feature-") as folder:
        try:
            ok, detail = True, check(Path(folder), rehearse)
        except Exception as error:  # noqa: BLE001 - whatever it is, the feature does not hold
            ok, detail = False, f"{type(error).__name__}: {error}".splitlines()[0]
    seconds = round(time.perf_counter() - began, 3)
    return {"name": name, "ok": ok, "detail": detail, "seconds": seconds}


def flat_gradients(_folder: Path, _rehearse: Rehearse) -> str:
    """Gradients lie in one buffer and are clipped as torch clips them."""
    drafter, plain = _drafter(), _drafter()
    gradients = FlatGradients(drafter.parameters(), ALONE)
    for each in (drafter, plain):
        # Not squares: those of a normed output sum up to a constant.
        _out(each).pow(3).sum().backward()  # type: ignore[no-untyped-call] # torch leaves it so
    gradients.extra_E[DENOMINATOR] = 2.0
    gradients.sum_()
    norm = gradients.clip_(0.1, step=0)
    for parameter in plain.parameters():
        assert parameter.grad is not None
        parameter.grad.div_(2.0)
    wanted = nn.utils.clip_grad_norm_(plain.parameters(), 0.1).item()
    _need(abs(norm - wanted) <= 1e-5 * wanted, f"the norm is {norm}, torch's {wanted}")
    for ours, theirs in zip(drafter.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        _need(torch.allclose(ours.grad, theirs.grad, rtol=1e-4), "a clipped gradient differs")  # type: ignore[arg-type]
    parts = len(gradients.parameters)
    return f"{gradients.flat_G.numel():,} gradients of {parts} parameters in one buffer"


def preloaded_dataset(folder: Path, _rehearse: Rehearse) -> str:
    """An Arrow file is mapped and read in place, and a cut one is noticed."""
    held = zlib.decompress(base64.b64decode(_SHARD))
    (folder / "rows.arrow").write_bytes(held)
    store = arrow.load(folder, vocab_size=_VOCABULARY, budget=8)
    read = [tuple(each.tolist() for each in store.row(row)) for row in range(len(store.lengths))]
    wanted = [([5, 6, 7], [False, True, True]), ([9, 10], [True, True])]
    _need(read == wanted, f"read {read}, wrote {wanted}")
    _need(store.chunks[0].mapped is not None, "a file that could be mapped was copied")
    (folder / "rows.arrow").write_bytes(held[:-8])
    try:
        arrow.load(folder, vocab_size=_VOCABULARY, budget=8)
    except InputError:
        return f"{store.tokens} tokens of a mapped file; a cut file is refused"
    raise AssertionError("a file without its end was read as if it were whole")


def tensor_batches(_folder: Path, _rehearse: Rehearse) -> str:
    """Micro-batches of both layouts hold every row once, in the budget, and equal the slow way."""
    store, budget = _store(), 32
    counts = {}
    for layout in (batching.PADDED, batching.PACKED):
        batches = batching.Plan(store.lengths, budget, 0, layout=layout).batches(0)
        rows = np.concatenate(batches)
        _need(sorted(rows.tolist()) == list(range(len(store.lengths))), "a row is missing or twice")
        for number, chosen in enumerate(batches):
            lengths = store.lengths[chosen]
            slots = len(chosen) * lengths.max() if layout == batching.PADDED else lengths.sum()
            _need(slots <= budget, f"{layout} batch {number} is over the budget")
            _assembles(store, chosen, budget, number)
        counts[layout] = len(batches)
    return f"{len(rows)} rows in {counts['padded']} batches padded, {counts['packed']} packed"


def _assembles(store: TokenStore, chosen: Any, budget: int, number: int) -> None:
    made = batching.assemble(store, chosen, budget=budget, epoch=0, number=number)
    at = 0
    for document, row in enumerate(chosen.tolist()):
        for position, (token, trained) in enumerate(zip(*store.row(row), strict=True)):
            slot = (
                made.ids_T[at],
                made.trainable_T[at],
                made.document_T[at],
                made.position_T[at],
            )
            wanted = (token, trained, document, position)
            _need(slot == wanted, f"slot {at} of batch {number} is {slot}, should be {wanted}")
            at += 1
    _need(made.tokens == at and (made.document_T[at:] == -1).all(), "the padding is wrong")


def overlapped_pipeline(folder: Path, rehearse: Rehearse) -> str:
    """Stages run at once, and training comes out as in lock step, to the bit."""
    begun: list[int] = []

    def first(item: int) -> int:
        begun.append(item)
        return item

    def second(item: int) -> int:
        # Holds item 0 until the stage before has begun item 1: in lock step it never would.
        deadline = time.monotonic() + _PATIENCE_S
        while len(begun) <= 1 and time.monotonic() < deadline:
            time.sleep(0.001)
        return item

    with Pipeline(range(2), [("first", first), ("second", second)], depth=1) as items:
        stream = iter(items)
        next(stream)
        _need(len(begun) > 1, "a stage waits for the one behind it")
    overlapped = rehearse(_config(folder / "a"), _store(), _Target(), _SHAPE)
    serial = rehearse(_config(folder / "b", overlap=False), _store(), _Target(), _SHAPE)
    _need(_equal(overlapped, serial), "overlapped training differs from lock step")
    return "target and drafter at once; the same bits as in lock step"


def anchored_blocks(_folder: Path, _rehearse: Rehearse) -> str:
    """A block sees its context before its anchor, itself, and nothing else."""
    tokens, drawn = 20, [4, 5, 11]
    document_T = torch.tensor([0] * 9 + [1] * 9 + [-1] * 2)
    position_T = torch.tensor([*range(9), *range(9), 0, 0])
    trainable = (document_T >= 0).numpy()
    anchors_N = torch.tensor(drawn)
    laid = anchors.blocks(
        anchors_N, torch.arange(tokens), torch.from_numpy(trainable), document_T, position_T,
        block_size=4, mask_token_id=_SHAPE.mask_token_id,
    )  # fmt: skip
    _need(laid.labels_NB[0, 1:].tolist() == [5, 6, 7], "labels are not at the same position")
    _need(not laid.supervised_NB[:, 0].any(), "an anchor is supervised")
    drafter, features_TF = _drafter(), _features(tokens).requires_grad_()
    hidden_QH = drafter(
        _table()[laid.ids_Q], features_TF, position_T, laid.positions_Q,
        anchors.visible(
            anchors_N, document_T, block_size=4, kinds=_SHAPE.layer_types,
            window=_SHAPE.sliding_window,
        ),
    )  # fmt: skip
    for block, anchor in enumerate(drawn):
        mine = hidden_QH[4 * block : 4 * block + 4].pow(3).sum()
        (slope_TF,) = torch.autograd.grad(mine, features_TF, retain_graph=True)
        seen = slope_TF.abs().sum(1).nonzero().flatten().tolist()
        wanted = [u for u in range(anchor) if document_T[u] == document_T[anchor]]
        _need(seen == wanted, f"the block at {anchor} sees {seen}, should see {wanted}")
    one = anchors.draw(trainable, document_T.numpy(), count=5, seed=1, epoch=2, number=3)
    two = anchors.draw(trainable, document_T.numpy(), count=5, seed=1, epoch=2, number=3)
    _need(one.tolist() == two.tolist(), "the same batch draws other anchors the second time")
    _need(all(trainable[a] and document_T[a] == document_T[a + 1] for a in one), "a wrong anchor")
    return "no block sees its own answers, another block or another document"


def exact_resume(folder: Path, rehearse: Rehearse) -> str:
    """Stopped in the middle of an epoch and resumed: the same bits as without the stop."""
    whole = rehearse(_config(folder / "whole", layout="packed"), _store(), _Target(), _SHAPE)
    for steps in (3, 6):
        config = _config(folder / "parts", layout="packed", steps=steps)
        resumed = rehearse(config, _store(), _Target(), _SHAPE)
    _need(resumed.start.step == 3, f"resumed at step {resumed.start.step}, stopped at 3")
    _need(_equal(whole, resumed), "6 steps differ from 3 steps, a checkpoint and 3 steps")
    return "6 steps equal 3 steps, a checkpoint and 3 steps, to the bit"


CHECKS: dict[str, Callable[[Path, Rehearse], str]] = {
    "flat-gradients": flat_gradients,
    "preloaded-dataset": preloaded_dataset,
    "tensor-batches": tensor_batches,
    "overlapped-pipeline": overlapped_pipeline,
    "anchored-blocks": anchored_blocks,
    "exact-resume": exact_resume,
}


class _Target:
    """Stands in for a frozen target: features that depend on each token."""

    def __init__(self) -> None:
        self.embedding_VH = self.head_VH = _table()

    def features(self, ids_T: Tensor, _starts_D1: Tensor) -> Tensor:
        embedded_TH = functional.embedding(ids_T, self.embedding_VH)
        return torch.cat([embedded_TH, embedded_TH.roll(1, 0)], dim=1)


def _need(holds: bool, otherwise: str) -> None:
    # Not `assert`: python -O must not turn a failing feature into one that holds.
    if not holds:
        raise AssertionError(otherwise)


def _equal(one: Any, other: Any) -> bool:
    pairs = zip(one.drafter.parameters(), other.drafter.parameters(), strict=True)
    start = _drafter().fc.weight
    moved = not torch.equal(one.drafter.fc.weight, start)
    return moved and all(torch.equal(a, b) for a, b in pairs)


def _config(folder: Path, **changes: Any) -> TrainConfig:
    config = TrainConfig(
        target_model="-", data_dir="-", output_dir=str(folder), device="cpu", steps=6,
        token_budget=32, max_anchors=4, block_size=4, draft_layers=2, warmup_ratio=0.0,
        # Constant, so that a run of 3 steps goes as far in each as a run of 6.
        min_lr_ratio=1.0, lr=1e-2,
    )  # fmt: skip
    return dataclasses.replace(config, **changes)


def _store() -> TokenStore:
    random = np.random.Generator(np.random.Philox(key=5))
    lengths = random.integers(5, 15, 12)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    total = int(starts[-1])
    return arrow.TokenStore.in_memory(
        random.integers(0, _VOCABULARY - 1, total, dtype=np.int32),
        random.random(total) < 0.9,
        starts,
    )


def _table() -> Tensor:
    return torch.randn(_VOCABULARY, 16, generator=torch.Generator().manual_seed(1))


def _features(tokens: int) -> Tensor:
    return torch.randn(tokens, _SHAPE.feature_size, generator=torch.Generator().manual_seed(2))


def _drafter() -> Drafter:
    drafter = Drafter(_SHAPE)
    drafter.initialise_(0)
    return drafter


def _out(drafter: Drafter) -> Tensor:
    anchors_N, document_T, position_T = torch.tensor([2, 5]), torch.zeros(8), torch.arange(8)
    masks = anchors.visible(
        anchors_N, document_T, block_size=4, kinds=_SHAPE.layer_types, window=_SHAPE.sliding_window
    )
    hidden_QH: Tensor = drafter(_table()[:8], _features(8), position_T, torch.arange(8) + 2, masks)
    return hidden_QH
