"""What is computed together is what is computed alone: documents in a row, ranks in a step."""

import pytest
import torch

from tests.trainer import made, tiny
from tests.trainer.runs import measures, state
from trainer import config as configs
from trainer import train
from trainer.model.loss import block_loss, weigh_by_decay, weigh_by_pace
from trainer.record.status import Status
from trainer.stop import Stop
from trainer.update.gradients import FlatGradients

FAULTS = f"{made.ROOT}/tests/trainer/faults:{made.ROOT}"
WEIGHTINGS = {"decay": weigh_by_decay(4, 4.0), "dpace": weigh_by_pace(0.5)}


def lost(case, weighting="decay"):
    laid = case.lay_out()
    return block_loss(
        case.run().flatten(0, 1),
        case.head_VH,
        laid.labels_NB,
        laid.supervised_NB,
        WEIGHTINGS[weighting],
    )


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_the_loss_of_packed_documents_is_the_sum_of_each_alone(weighting):
    together = tiny.Case(9, 13, anchors=[2, 7, 11, 20])
    wanted = lost(together, weighting)
    sums = torch.zeros(4, dtype=torch.float64)
    for start, end, rows in ((0, 9, slice(0, 2)), (9, 22, slice(2, 4))):
        alone = tiny.Case(end - start, anchors=(together.anchors_N[rows] - start).tolist())
        alone.ids_T = together.ids_T[start:end]
        alone.features_TF = together.features_TF[start:end]
        one = lost(alone, weighting)
        sums += torch.stack([one.numerator, one.denominator, one.accepted * one.blocks, one.blocks])
    found = [wanted.numerator, wanted.denominator, wanted.accepted * wanted.blocks, wanted.blocks]
    torch.testing.assert_close(torch.stack(found), sums, rtol=1e-12, atol=0)


def test_a_rank_without_a_valid_anchor_adds_nothing_and_nothing_that_is_not_finite():
    def gradients_of(*anchors_of_ranks):
        drafter = tiny.vector_drafter(torch.float64)
        gradients = FlatGradients(drafter.parameters(), tiny.Alone())
        for anchors in anchors_of_ranks:
            case = tiny.Case(12, anchors=anchors)
            case.drafter = drafter
            loss = lost(case)
            loss.numerator.backward()
            gradients.add_(loss.numerator, loss.denominator)
        gradients.sum_()
        norm = gradients.clip_(1.0, step=1)
        return norm, gradients.flat_G

    norm, flat_G = gradients_of([3, 7], [-1, -1])
    alone, wanted_G = gradients_of([3, 7])
    assert norm == alone > 0
    assert torch.equal(flat_G, wanted_G)
    norm, flat_G = gradients_of([-1, -1])
    assert norm == 0
    assert (flat_G == 0).all()


def test_ranks_hold_the_same_weights_after_every_step_also_where_one_has_no_anchor(
    tiny_target_dir, tmp_path
):
    # Rows that nothing is trained on are left out when all is read at the start; not when lazy.
    rows = [(ids, mask if i % 2 else [0] * len(ids)) for i, (ids, mask) in enumerate(made.rows(12))]
    data = made.save_to_disk(tmp_path / "data", [made.table(rows)])
    more = {
        "data_check": "lazy", "layout": "padded", "token_budget": 24, "dtype": "float64",
        "steps": 6, "warmup_ratio": 0.0,
    }  # fmt: skip
    words = made.flags(tiny_target_dir, data, tmp_path / "two", dp_pairs=2, **more)
    code, _, err = made.run(words, PYTHONPATH=FAULTS, FAULT=f"digests:{tmp_path}/digest")
    assert code == 0, err
    first, second = ((tmp_path / f"digest-{rank}").read_text().split() for rank in (0, 1))
    assert len(first) == len(set(first)) == 6
    assert first == second

    (tmp_path / "one").mkdir()
    words = made.flags(tiny_target_dir, data, tmp_path / "one", accumulation=2, **more)
    train.run(configs.read(words), Stop(), Status(None), lambda _: None)
    two, one = (measures(tmp_path / out) for out in ("two", "one"))
    for name in ("loss", "norm", "accepted"):
        assert [each[name] for each in two] == pytest.approx([each[name] for each in one], rel=1e-9)
    torch.testing.assert_close(
        state(tmp_path / "two")["masters"], state(tmp_path / "one")["masters"], rtol=0, atol=1e-9
    )
