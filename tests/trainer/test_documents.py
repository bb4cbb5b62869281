"""Documents that lie end to end in one row have the features that each has alone."""

import types

import pytest
import torch
import transformers

from tests.trainer import tiny
from trainer.build.data import layout
from trainer.model import documents
from trainer.model.target import Target

# Long ones alone, short ones sharing a call of the kernel, one of a single token.
LENGTHS = (40, 9, 7, 1, 23, 5)


def load(folder, dtype=torch.float64, **more):
    return Target.load(folder, **{"tap_count": 3, "dtype": dtype} | more)


def drawn(lengths=LENGTHS, padding=5):
    ids = torch.randint(
        3, 64, (sum(lengths) + padding,), generator=torch.Generator().manual_seed(1)
    )
    return ids, torch.tensor([0, *lengths]).cumsum(0)


def alone(target, ids, starts):
    """The slow reference: each document on its own, through the whole model."""
    found = []
    for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        with torch.no_grad():
            reply = target.model(ids[None, start:end], output_hidden_states=True)
        states = [reply.hidden_states[tap + 1][0] for tap in target.tap_ids]
        found.append(torch.cat(states, dim=-1))
    return torch.cat(found)


def end_to_end(target, ids, starts):
    total = int(starts[-1])
    out_TF = torch.zeros(len(ids), target.feature_size, dtype=target.embedding_VH.dtype)
    target._trunk._end_to_end(ids[:total], starts, out_TF)
    return out_TF


@pytest.fixture(params=["llama", "qwen"])
def folder(request, tiny_target_dir, tiny_qwen_dir):
    return {"llama": tiny_target_dir, "qwen": tiny_qwen_dir}[request.param]


@pytest.fixture(params=[512, 16], ids=["short ones together", "most alone"])
def short(request, monkeypatch):
    monkeypatch.setattr(documents, "SHORT", request.param)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("dtype", "within"), [(torch.float64, 1e-10), (torch.float32, 2e-5)], ids=str
)
def test_features_end_to_end_are_those_of_each_document_alone(folder, dtype, within):
    target = load(folder, dtype)
    ids, starts = drawn()
    found, wanted = end_to_end(target, ids, starts), alone(target, ids, starts)
    scale = wanted.abs().max()
    assert (found[: len(wanted)] - wanted).abs().max() <= within * scale
    assert (found[len(wanted) :] == 0).all()


@pytest.mark.usefixtures("short")
def test_no_document_moves_another_by_a_bit(folder):
    target = load(folder, torch.float32)
    ids, starts = drawn()
    before = end_to_end(target, ids, starts)
    other = ids.clone()
    other[: starts[1]] = 5
    after = end_to_end(target, other, starts)
    assert torch.equal(before[starts[1] :], after[starts[1] :])
    assert not torch.equal(before[: starts[1]], after[: starts[1]])


@pytest.mark.usefixtures("short")
def test_sliding_windows_hold_in_each_document(tmp_path):
    target = load(
        tiny.save_qwen(
            tmp_path / "model", use_sliding_window=True, sliding_window=6, max_window_layers=2
        )
    )
    kinds = target.model.config.layer_types
    assert {"sliding_attention", "full_attention"} <= set(kinds)
    ids, starts = drawn()
    found, wanted = end_to_end(target, ids, starts), alone(target, ids, starts)
    assert (found[: len(wanted)] - wanted).abs().max() <= 1e-10 * wanted.abs().max()


def test_rows_of_like_length_are_padded_and_others_are_not(folder, monkeypatch):
    target = load(folder)
    ran = []
    for name in ("_in_rows", "_end_to_end"):
        run = getattr(target._trunk, name)
        monkeypatch.setattr(
            target._trunk, name, lambda *words, name=name, run=run: (ran.append(name), run(*words))
        )
    assert target.mixes_documents() == ""
    ran.clear()
    for lengths, way in (((8, 8, 7), "_in_rows"), ((40,), "_in_rows"), (LENGTHS, "_end_to_end")):
        ids, starts = drawn(lengths)
        features, wanted = target.features(ids, starts), alone(target, ids, starts)
        assert ran.pop() == way
        assert (features[: len(wanted)] - wanted).abs().max() <= 1e-10 * wanted.abs().max()


def test_a_recurrent_target_is_padded_whatever_it_gets(tmp_path):
    folder, _ = tiny.save_qwen35(tmp_path / "model")
    target = load(folder, torch.float32, taps=[1, 3, 5])
    assert target.mixes_documents() == (
        "has layers of linear_attention, which carry state along a row"
    )
    ids, starts = drawn()
    wanted = alone(target, ids, starts)
    found = target.features(ids, starts)[: len(wanted)]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)


def test_a_target_that_mixes_documents_is_found_out_by_trying(folder, monkeypatch):
    # Attention that knows nothing of documents: causal over the whole row.
    def blind(module, query, key, value, _mask, **more):
        return transformers.AttentionInterface()["sdpa"](module, query, key, value, None, **more)

    target = load(folder, torch.float32)
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "sdpa_by_document", blind)
    assert target.mixes_documents() == "lets documents in one row meet"


def test_decoding_is_not_touched(folder):
    target, plain = load(folder), load(folder)
    plain.model.config._attn_implementation = "sdpa"
    ids, _ = drawn((12,), padding=0)
    replies = []
    for each in (target, plain):
        cache = each.new_cache()
        logits, _ = each.extend(ids[:7], cache)
        more, _ = each.extend(ids[7:], cache)
        replies.append(torch.cat([logits, more]))
    assert torch.equal(*replies)


def test_short_documents_share_a_call():
    held = documents.spans([0, 600, 700, 800, 1100, 1101, 1700, 1700])
    assert [(each.start, each.end, each.starts) for each in held] == [
        (0, 600, [0]),
        (600, 1101, [0, 100, 200, 500]),
        (1101, 1700, [0]),
    ]
    assert held[0].mask(None, "cpu") is None
    assert held[0].mask(600, "cpu") is None
    seen = held[1].mask(None, "cpu")[0, 0]
    assert int(seen.sum()) == sum(n * (n + 1) // 2 for n in (100, 100, 300, 1))
    assert int(held[0].mask(2, "cpu").sum()) == 2 * 600 - 1


@pytest.mark.parametrize(
    ("asked", "device", "mixed", "found"),
    [
        ("auto", "cpu", "", "packed"),
        ("auto", "cpu", "keeps recurrent state", "padded"),
        ("auto", "cuda", "", "padded"),
        ("packed", "cuda", "", "packed"),
        ("padded", "cpu", "", "padded"),
    ],
)
def test_the_layout_suits_target_and_device(asked, device, mixed, found):
    target = types.SimpleNamespace(device=torch.device(device), mixes_documents=lambda: mixed)
    assert layout(types.SimpleNamespace(layout=asked), target) == found
