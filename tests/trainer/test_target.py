"""The frozen target's features and choices, on tiny random models."""

from __future__ import annotations

import hashlib

import pytest
import torch
import transformers

from tests.trainer import tiny
from trainer.errors import InputError
from trainer.model.mask_token import choose_mask_token
from trainer.model.target import Target, convert, load_tokenizer
from trainer.model.target_shape import tap_ids_by_formula


def load(folder, **options):
    return Target.load(folder, **{"tap_count": 3, "dtype": torch.float32} | options)


def never(_token):
    return False


def test_tap_ids_are_the_published_ones():
    wanted = {
        24: (1, 6, 11, 16, 21),
        28: (1, 7, 13, 19, 25),
        32: (1, 8, 15, 22, 29),
        36: (1, 9, 17, 25, 33),
        40: (1, 10, 19, 28, 37),
        48: (1, 12, 23, 34, 45),
        64: (1, 16, 31, 46, 61),
    }
    assert {layers: tap_ids_by_formula(layers, 5) for layers in wanted} == wanted
    assert tap_ids_by_formula(36, 1) == (18,)
    with pytest.raises(InputError, match="4 layers cannot be tapped 5 times"):
        tap_ids_by_formula(4, 5)


@pytest.mark.parametrize("which", ["tiny_target_dir", "tiny_qwen_dir"])
def test_features_are_the_hidden_states_of_the_whole_model(request, which):
    target = load(request.getfixturevalue(which), dtype=torch.float64)
    ids = torch.randint(3, 64, (18,), generator=torch.Generator().manual_seed(0))
    starts = torch.tensor([0, 5, 6, 15], dtype=torch.int32)
    features = target.features(ids, starts)
    assert features.shape == (18, 3 * 32)
    assert (features[15:] == 0).all()
    assert not features.requires_grad
    for start, end in ((0, 5), (5, 6), (6, 15)):
        with torch.no_grad():
            states = target.model(ids[None, start:end], output_hidden_states=True).hidden_states
        wanted = torch.cat([states[tap + 1][0] for tap in target.tap_ids], dim=-1)
        # transformers keeps norms and angles in float32 whatever the model is.
        torch.testing.assert_close(features[start:end], wanted, rtol=1e-5, atol=1e-4)


def test_features_can_be_trained_on(tiny_target_dir):
    # Tensors made under inference_mode could not be saved for a backward.
    target = load(tiny_target_dir)
    features = target.features(torch.arange(3, 9), torch.tensor([0, 6]))
    weight = torch.ones(96, requires_grad=True)
    (features * weight).sum().backward()
    assert weight.grad is not None


def test_layers_above_the_last_tap_do_not_run(tiny_target_dir):
    target = load(tiny_target_dir, taps=[0, 2])
    ran = []
    for i, layer in enumerate(target.model.model.layers):
        layer.register_forward_hook(lambda *_, i=i: ran.append(i))
    target.model.model.norm.register_forward_hook(lambda *_: ran.append("norm"))
    target.features(torch.arange(3, 9), torch.tensor([0, 6]))
    assert ran == [0, 1, 2]


def test_no_documents_are_no_features(tiny_target_dir):
    features = load(tiny_target_dir).features(torch.zeros(4, dtype=torch.int64), torch.tensor([0]))
    assert torch.equal(features, torch.zeros(4, 96))


def test_the_target_is_frozen_and_in_eval_mode(tiny_target_dir):
    target = load(tiny_target_dir)
    assert not target.model.training
    assert not any(each.requires_grad for each in target.model.parameters())


def test_tied_and_untied_heads(tiny_target_dir, tiny_qwen_dir):
    tied, untied = load(tiny_target_dir), load(tiny_qwen_dir)
    assert tied.shape.tied
    assert tied.head_VH is tied.embedding_VH
    assert not untied.shape.tied
    assert not torch.equal(untied.head_VH, untied.embedding_VH)
    for target in (tied, untied):
        ids = torch.arange(3, 9)
        with torch.no_grad():
            reply = target.model(ids[None], output_hidden_states=True)
        # transformers' last hidden state is behind the final norm.
        torch.testing.assert_close(reply.hidden_states[-1] @ target.head_VH.T, reply.logits)


def test_a_nested_hybrid_target_gives_its_own_hidden_states(tmp_path):
    # As Qwen3.5 and 3.6: the language model lies inside, most layers are recurrent.
    folder, whole = tiny.save_qwen35(tmp_path / "model")
    target = load(folder, taps=[1, 3, 5])
    assert (target.hidden_size, target.layers, target.vocabulary) == (32, 8, 64)
    assert torch.equal(target.head_VH, whole.lm_head.weight)
    ids = torch.randint(3, 64, (15,), generator=torch.Generator().manual_seed(0))
    starts = torch.tensor([0, 5, 6, 15])
    features = target.features(ids, starts)
    for start, end in ((0, 5), (5, 6), (6, 15)):
        with torch.no_grad():
            states = whole(ids[None, start:end], output_hidden_states=True).hidden_states
        wanted = torch.cat([states[tap + 1][0] for tap in target.tap_ids], dim=-1)
        torch.testing.assert_close(features[start:end], wanted, rtol=1e-4, atol=1e-3)
    with pytest.raises(InputError, match="keeps recurrent state"):
        target.new_cache()


def test_a_head_that_does_more_than_multiply_is_refused(tmp_path):
    folder = tiny.save_llama(tmp_path / "model", final_logit_softcapping=30.0)
    with pytest.raises(InputError, match=r"final_logit_softcapping 30\.0"):
        load(folder)


def test_what_cannot_be_loaded_is_said_in_one_line(tmp_path, tiny_target_dir):
    with pytest.raises(InputError, match="does not exist"):
        load(tmp_path / "nothing")
    with pytest.raises(InputError, match=r"neither config\.json nor one GGUF file"):
        load(tmp_path)
    with pytest.raises(InputError, match=r"is \[1, 9\]; give different ids from 0 to 5"):
        load(tiny_target_dir, taps=[1, 9])
    with pytest.raises(InputError, match="has no tokenizer"):
        load_tokenizer(tiny_target_dir)


def test_mask_token_of_the_persons_choice(tiny_target_dir):
    target = load(tiny_target_dir)
    assert choose_mask_token(target, explicit=63, occurs=never) == 63
    for wrong, why in ((64, "give 0 to 63"), (2, "is a pad, begin or end token"), (-1, "give 0")):
        with pytest.raises(InputError, match=why):
            choose_mask_token(target, explicit=wrong, occurs=never)
    with pytest.raises(InputError, match="token 63 stands in the data"):
        choose_mask_token(target, explicit=63, occurs=lambda token: token == 63)


def test_no_mask_token_to_choose(tiny_target_dir):
    with pytest.raises(InputError, match="give --mask-token-id"):
        choose_mask_token(load(tiny_target_dir), occurs=never)


def test_mask_token_of_a_known_family(tmp_path):
    sizes = {"vocab_size": 151_936, "hidden_size": 8, "intermediate_size": 8}
    target = load(tiny.save_qwen(tmp_path / "wide", **sizes), tap_count=1)
    assert choose_mask_token(target, occurs=never) == 151_669


def save_tokenizer(folder, words, special):
    """A word tokenizer beside the weights."""
    import tokenizers

    core = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<u>")
    )
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<u>")
    wrapped.add_special_tokens({"additional_special_tokens": special})
    wrapped.save_pretrained(folder)


def test_mask_token_is_a_row_behind_the_tokenizer(tmp_path):
    folder = tiny.save_llama(tmp_path / "model")
    save_tokenizer(folder, ["<u>", *(f"w{i}" for i in range(59))], [])
    target = load(folder)
    assert choose_mask_token(target, occurs=never) == 60
    assert choose_mask_token(target, occurs=lambda token: token == 60) == 61


def test_mask_token_is_an_unused_special_token_where_no_row_is_free(smollm_dir):
    target = Target.load(smollm_dir, dtype=torch.float32)
    assert len(target.tokenizer()) == target.vocabulary
    chosen = choose_mask_token(target, occurs=never)
    assert target.tokenizer().convert_ids_to_tokens(chosen) == "<empty_output>"
    other = choose_mask_token(target, occurs=lambda token: token == chosen)
    assert other != chosen
    assert other not in target.special_ids


def test_a_real_target_is_loaded_with_its_settings(smollm_dir):
    target = Target.load(smollm_dir, dtype=torch.float32)
    assert target.tap_ids == (1, 8, 14, 20, 27)
    assert (target.hidden_size, target.vocabulary, target.layers) == (576, 49_152, 30)
    assert target.head_VH.data_ptr() == target.embedding_VH.data_ptr()
    assert target.shape.rope_theta == 100_000
    assert target.eos_ids == {2}
    text = target.tokenizer().apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>assistant\n")


def test_convert_refuses_what_it_would_overwrite_or_cannot_read(tmp_path, tiny_target_dir):
    (tmp_path / "there").mkdir()
    with pytest.raises(InputError, match="exists already"):
        convert(tiny_target_dir, tmp_path / "there")
    with pytest.raises(InputError, match="is no GGUF file"):
        convert(tiny_target_dir, tmp_path / "new")


@pytest.mark.long
def test_convert_is_repeatable(tmp_path, smollm_gguf):
    hashes = set()
    for name in ("first", "second"):
        convert(smollm_gguf, tmp_path / name)
        weights = (tmp_path / name / "model.safetensors").read_bytes()
        hashes.add(hashlib.sha256(weights).hexdigest())
    assert len(hashes) == 1
