"""The drafter against published vectors, and what may reach a block's output."""

from __future__ import annotations

import pytest
import torch

from tests.trainer import tiny
from trainer.model.anchors import FULL, visible
from trainer.model.loss import block_loss, weigh_by_decay

KINDS = {
    "full": {},
    "sliding": {"sliding_layers": 2, "sliding_window": 6},
    "wide sliding": {"sliding_layers": 2, "sliding_window": 64},
    "mixed": {"sliding_layers": 1, "sliding_window": 6},
}


def vector_case(dtype):
    held = tiny.vectors()
    case = tiny.Case(24, anchors=held["anchors"].tolist())
    case.ids_T = held["input_ids"][0]
    case.drafter = tiny.vector_drafter(dtype)
    case.features_TF = held["features"][0].to(dtype)
    case.embedding_VH = held["embed"].to(dtype)
    return case, held


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_output_equals_the_vectors(dtype):
    case, held = vector_case(dtype)
    out = case.run().flatten(0, 1)
    assert (out - held["out_hidden"][0]).abs().max() < 1e-5
    assert out.sum().item() == pytest.approx(6.566904120929223, abs=1e-3)


def test_layout_and_mask_equal_the_vectors():
    case, held = vector_case(torch.float64)
    laid = case.lay_out()
    assert torch.equal(laid.ids_NB, held["block_ids"])
    assert torch.equal(torch.cat([case.position_T, laid.positions_Q]), held["position_ids"][0])
    masks = visible(case.anchors_N, case.document_T, block_size=4)
    assert torch.equal(masks[FULL], held["visible"])
    assert torch.equal(laid.supervised_NB, held["weights"] > 0)


def test_loss_equals_the_vectors():
    case, held = vector_case(torch.float64)
    laid = case.lay_out()
    loss = block_loss(
        case.run().flatten(0, 1),
        held["lm_head"],
        laid.labels_NB,
        laid.supervised_NB,
        weigh_by_decay(4, 4.0),
    )
    assert (loss.numerator / loss.denominator).item() == pytest.approx(4.132207667661768, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("anchors", [[3, 4, 5, 9, 14, 21], [14, 4, 21, 3, 9, 5]])
def test_no_block_depends_on_what_it_must_not_see(kind, anchors):
    # Three documents, anchors one apart, blocks over a document's end, any order.
    case = tiny.Case(8, 8, 8, anchors=anchors, padding=2, **KINDS[kind])
    features = case.features_TF.clone().requires_grad_()
    embedded = case.embedded().clone().requires_grad_()
    out = case.run(embedded_QH=embedded, features_TF=features)
    block_size = case.config.block_size
    for j, anchor in enumerate(anchors):
        for slot in range(block_size):
            to_features, to_embedded = torch.autograd.grad(
                out[j, slot].square().sum(), (features, embedded), retain_graph=True
            )
            reached = to_features.abs().sum(-1)
            start = int((case.document_T[: anchor + 1] == case.document_T[anchor]).nonzero()[0])
            allowed = torch.zeros(len(reached), dtype=torch.bool)
            allowed[start:anchor] = True
            if kind == "sliding":
                # One layer's window bounds each key; layers do not widen it, context is fixed.
                window = case.config.sliding_window
                allowed &= torch.arange(len(reached)) >= anchor - (window - 1)
            assert (reached[~allowed] == 0).all()
            if kind != "sliding" or slot == 0:
                assert (reached[allowed] > 0).all()
            own = to_embedded.abs().sum(-1).view(len(anchors), block_size)
            assert (own[torch.arange(len(anchors)) != j] == 0).all()
            own_slots = slot + 1 if "sliding" in kind else block_size
            assert (own[j, :own_slots] > 0).all()
            assert (own[j, own_slots:] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_forward_of_many_blocks_is_many_single_drafts(kind):
    case = tiny.Case(12, 20, anchors=[3, 4, 5, 11, 14, 15, 30, 31], **KINDS[kind])
    out = case.run()
    embedded = case.embedded().view(len(case.anchors_N), case.config.block_size, -1)
    for j, anchor in enumerate(case.anchors_N.tolist()):
        start = 0 if anchor < 12 else 12
        context = case.drafter.new_context()
        # In two pieces: the context grows as tokens are accepted.
        middle = (start + anchor) // 2
        case.drafter.extend(context, case.features_TF[start:middle])
        case.drafter.extend(context, case.features_TF[middle:anchor])
        torch.testing.assert_close(
            case.drafter.draft(embedded[j], context), out[j], rtol=0, atol=1e-12
        )


def test_packed_documents_equal_documents_alone():
    together = tiny.Case(9, 13, anchors=[2, 7, 11, 20])
    out = together.run()
    for start, end, rows in ((0, 9, slice(0, 2)), (9, 22, slice(2, 4))):
        alone = tiny.Case(end - start, anchors=(together.anchors_N[rows] - start).tolist())
        alone.ids_T = together.ids_T[start:end]
        alone.features_TF = together.features_TF[start:end]
        torch.testing.assert_close(alone.run(), out[rows], rtol=0, atol=1e-12)
        laid, wanted = alone.lay_out(), together.lay_out()
        assert torch.equal(laid.labels_NB, wanted.labels_NB[rows])
        assert torch.equal(laid.supervised_NB, wanted.supervised_NB[rows])


def test_unused_anchors_change_nothing_and_stay_finite():
    few = tiny.Case(12, anchors=[3, 7])
    many = tiny.Case(12, anchors=[3, 7, -1, -1])
    out = many.run()
    assert out.isfinite().all()
    torch.testing.assert_close(out[:2], few.run(), rtol=0, atol=1e-12)
    assert not many.lay_out().supervised_NB[2:].any()


def test_frequencies_stay_in_float32_when_the_module_is_cast():
    drafter = tiny.vector_drafter(torch.bfloat16)
    assert drafter.fc.weight.dtype == torch.bfloat16
    assert drafter.rotary.inv_freq.dtype == torch.float32
    assert torch.equal(drafter.rotary.inv_freq, tiny.vector_drafter(torch.float32).rotary.inv_freq)
    assert "rotary.inv_freq" not in drafter.state_dict()


def test_one_seed_makes_one_drafter():
    first, second, other = (tiny.vector_drafter(torch.float32) for _ in range(3))
    first.initialise_(1)
    second.initialise_(1)
    other.initialise_(2)
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(first.fc.weight, other.fc.weight)
