"""Tiles say the same as the dense mask, and every tile that holds something visible is visited."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from tests.trainer.tiny import Case, flat
from trainer.model.anchors import FULL, SLIDING, visible
from trainer.model.tiles import TILE, tiles

pytestmark = pytest.mark.torch

CASES = {
    "one document": ((200,), 0, [3, 90, 150, 199]),
    "several, a tail, unused anchors": ((130, 7, 260), 11, [1, 129, 131, 140, 390, -1, -1]),
    "an odd number of tiles": ((77, 300, 40), 3, [5, 76, 80, 200, 201, 202, 203, 376, 400]),
    "nothing drawn": ((20,), 300, [-1] * 9),
}
KINDS = [(FULL, None), (SLIDING, 5), (SLIDING, 64)]


def laid(case, block_size, kind, window):
    lengths, padding, anchors = CASES[case]
    document_T, _ = flat(*lengths, padding=padding)
    rule = {"block_size": block_size, "kinds": (kind,), "window": window}
    anchors_N = torch.tensor(anchors)
    return visible(anchors_N, document_T, **rule)[kind], tiles(anchors_N, document_T, **rule)[kind]


def places(shape):
    return torch.arange(shape[0])[:, None], torch.arange(shape[1])[None]


@pytest.mark.parametrize(("kind", "window"), KINDS)
@pytest.mark.parametrize("block_size", [16, 10])
@pytest.mark.parametrize("case", CASES)
def test_they_agree_with_the_dense_mask(case, block_size, kind, window):
    dense_QS, found = laid(case, block_size, kind, window)
    query, key = places(dense_QS.shape)
    assert torch.equal(found.mask_mod(None, None, query, key), dense_QS)
    assert found.seq_lengths == tuple(dense_QS.shape)


@pytest.mark.parametrize(("kind", "window"), KINDS)
@pytest.mark.parametrize("block_size", [16, 10])
@pytest.mark.parametrize("case", CASES)
def test_exactly_the_tiles_that_hold_something_are_visited(case, block_size, kind, window):
    dense_QS, found = laid(case, block_size, kind, window)
    rows, columns = (-(-size // TILE) for size in dense_QS.shape)
    padded = torch.zeros(rows * TILE, columns * TILE, dtype=torch.bool)
    padded[: dense_QS.shape[0], : dense_QS.shape[1]] = dense_QS
    wanted = padded.view(rows, TILE, columns, TILE).any(dim=3).any(dim=1)
    counted, order = found.kv_num_blocks[0, 0], found.kv_indices[0, 0]
    visited = torch.zeros_like(wanted)
    for row in range(rows):
        visited[row, order[row, : counted[row]].long()] = True
    assert not (wanted & ~visited).any()
    # A tile of several blocks may join intervals that touch other tiles; none beside those.
    assert (visited & ~wanted).sum() == 0


def test_the_kernel_gives_what_the_dense_mask_gives():
    dense_QS, found = laid("several, a tail, unused anchors", 16, FULL, None)
    queries, keys = (
        torch.randn(1, heads, size, 16, generator=torch.Generator().manual_seed(size))
        for heads, size in zip((4, 2), dense_QS.shape, strict=True)
    )
    with pytest.warns(UserWarning, match="without torch.compile"):
        got = flex_attention(queries, keys, keys, block_mask=found, enable_gqa=True)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        queries, keys.repeat_interleave(2, 1), keys.repeat_interleave(2, 1), attn_mask=dense_QS
    )
    torch.testing.assert_close(got, wanted)


def test_a_kind_without_its_window_is_refused():
    with pytest.raises(ValueError, match="window None"):
        tiles(torch.tensor([1]), torch.zeros(9), block_size=4, kinds=(SLIDING,))


@pytest.mark.filterwarnings("default")  # the compiler's own
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the compiled kernel needs a GPU")
@pytest.mark.parametrize("window", [None, 5])
def test_a_compiled_drafter_learns_what_the_dense_one_learns(window):
    case = Case(
        130, 90, anchors=[3, 50, 129, 140, 200, -1], padding=12,
        sliding_layers=1 if window else 0, sliding_window=window,
    )  # fmt: skip
    blocks = case.lay_out()
    shape = case.config
    rule = {"block_size": shape.block_size, "kinds": shape.layer_types, "window": window}
    embedded_QH = case.embedded().cuda().float()
    given = (case.features_TF.cuda().float(), case.position_T.cuda(), blocks.positions_Q.cuda())
    gradients = {}
    for mask in (visible, tiles):
        drafter = deepcopy(case.drafter).to("cuda", torch.float32)
        if mask is tiles:
            drafter.compile(fullgraph=True, dynamic=False)
        hidden_QH = drafter(
            embedded_QH, *given, mask(case.anchors_N.cuda(), case.document_T.cuda(), **rule)
        )
        # The unused block counts nowhere: what it holds may differ.
        hidden_QH[: 5 * shape.block_size].square().sum().backward()
        gradients[mask] = {name: each.grad for name, each in drafter.named_parameters()}
    for name, wanted in gradients[visible].items():
        error = (gradients[tiles][name] - wanted).norm() / wanted.norm()
        assert error < 5e-3, name  # the kernel multiplies in TF32
