"""Targets of mlx-lm: their caches, what a draft borrows of them, and which ones are refused."""

import importlib
import json
import random
import shutil

import mlx.core as mx
import numpy as np
import pytest
import torch
from mlx.utils import tree_map
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from dflash_lab import DecodeConfig, load_pair, stream
from dflash_lab.backends import (
    TargetNotFinite,
    TargetNotReversible,
    UnsupportedTarget,
    mlx_target,
)
from dflash_lab.backends.mlx_target import (
    MlxTarget,
    WindowCache,
    captured,
    spelled_for_mlx,
    take_back,
)

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
KINDS = {
    "llama": {},
    "qwen2": {},
    "gemma3_text": {"sliding_window": 16, "sliding_window_pattern": 2},
    "gpt_oss": {"sliding_window": 16, "num_local_experts": 2, "num_experts_per_tok": 1},
    "lfm2": {
        "norm_eps": 1e-6,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 32,
        "block_ff_dim": 32,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1],
    },
}
SLIDING = ("gemma3_text", "gpt_oss")


def model_of(kind, **changes):
    """A random model of one of mlx-lm's files."""
    file = importlib.import_module(f"mlx_lm.models.{kind}")
    settings = {"model_type": kind} | SMALL | KINDS[kind] | changes
    model = file.Model(file.ModelArgs.from_dict(settings)).eval()
    keys = iter(mx.random.split(mx.random.key(1), 200))
    model.update(
        tree_map(lambda w: mx.random.normal(w.shape, key=next(keys)) * 0.3, model.parameters())
    )
    return model


def target_of(model, dtype=mx.float32, **changes):
    return MlxTarget(model, SMALL | vars(model.args) | changes, dtype, mx.cpu)


@pytest.fixture(scope="module")
def toy(qwen3_toy):
    return qwen3_toy


@pytest.fixture(scope="module")
def pair(toy):
    return toy.load(backend="mlx")


@pytest.mark.parametrize("kind", [KVCache, lambda: WindowCache(4), lambda: WindowCache(16)])
def test_take_back_leaves_the_first_rows_as_they_were(kind):
    cache = [kind()]
    rows = mx.arange(10.0).reshape(1, 1, 10, 1)
    cache[0].update_and_fetch(rows, rows)
    take_back(cache, 0)
    take_back(cache, 3)
    assert cache[0].offset == 7
    assert cache[0].keys[:, :, :7].flatten().tolist() == list(range(7))
    new = mx.full((1, 1, 1, 1), 99.0)
    assert cache[0].update_and_fetch(new, new)[0].flatten().tolist()[-4:] == [4, 5, 6, 99]
    take_back(cache, 1)
    with pytest.raises(ValueError, match="8 tokens back from a cache that holds 7"):
        take_back(cache, 8)


def test_state_that_cannot_be_taken_back_is_refused_by_its_name(toy, monkeypatch):
    for part in (ArraysCache(2), RotatingKVCache(max_size=8, keep=4)):
        monkeypatch.setattr(
            mlx_target, "make_prompt_cache", lambda model, part=part: [KVCache(), part]
        )
        with pytest.raises(TargetNotReversible, match=rf"qwen3 has {type(part).__name__} state"):
            toy.load(backend="mlx")


@pytest.mark.parametrize("window", [1, 2, 5, 16])
def test_a_step_sees_exactly_the_rows_inside_its_window_also_after_rows_were_taken_back(window):
    dice, cache, held, serial = random.Random(0), WindowCache(window), [], 0
    for _ in range(40):
        new = list(range(serial, serial + dice.choice([1, 1, 2, 8, 20])))
        mask = cache.make_mask(len(new), window_size=window)
        rows = mx.array(new, mx.float32).reshape(1, 1, -1, 1)
        keys, _ = cache.update_and_fetch(rows, rows)
        serial, held = serial + len(new), held + new
        ends = range(len(held) - len(new) + 1, len(held) + 1)
        assert seen_rows(keys, len(new), mask) == [held[max(0, end - window) : end] for end in ends]
        back = dice.randint(0, len(new))
        take_back([cache], back)
        held = held[: len(held) - back]
        assert cache.offset == len(held)
        assert keys.shape[2] < window + 20
    with pytest.raises(TargetNotReversible, match="layer 0 holds"):
        take_back([cache], cache.offset)


@pytest.mark.parametrize("kind", SLIDING)
@pytest.mark.parametrize("size", [7, 20])
def test_next_logits_after_every_block_are_those_of_a_fresh_prefill_past_the_window(kind, size):
    model, dice = model_of(kind), random.Random(0)
    target, ids = target_of(model), [dice.randrange(64) for _ in range(70)]
    cache, place = target.new_cache(), 10
    target.logits(mx.array([ids[:place]]), cache, ())
    while place + size < len(ids):
        keep = 1 + place % size
        step = ids[place : place + keep] + [7] * (size - keep)
        mx.eval(target.logits(mx.array([step]), cache, ())[0])
        take_back(cache, size - keep)
        place += keep
        live, _ = target.logits(mx.array([[ids[place]]]), cache, ())
        take_back(cache, 1)
        fresh = model(mx.array([ids[: place + 1]]))
        np.testing.assert_allclose(np.array(live[0, 0]), np.array(fresh[0, -1]), atol=1e-3)
    assert place > 3 * 16


def seen_rows(keys, rows, mask):
    """For each of the last `rows`, the keys that it sees, as MLX's attention reads a mask."""
    numbers = keys.flatten().tolist()
    if mask is None:
        return [numbers] * rows
    if isinstance(mask, str):
        assert mask == "causal"
        return [numbers[: len(numbers) - rows + row + 1] for row in range(rows)]
    mask = mask.tolist()
    return [[n for n, ok in zip(numbers, row, strict=True) if ok] for row in mask]


def test_a_window_that_mlx_lm_does_not_heed_limits_the_context(toy, tmp_path):
    folder = with_settings(toy.target, tmp_path / "a", sliding_window=100, use_sliding_window=True)
    assert load_pair(target=folder, draft=toy.draft, backend="mlx").models.context_limit == 100
    folder = with_settings(toy.target, tmp_path / "b", sliding_window=100, use_sliding_window=False)
    assert load_pair(target=folder, draft=toy.draft, backend="mlx").models.context_limit == 1024


def with_settings(folder, copy, **changes):
    """A copy of a model folder, its config.json changed; None takes a key away."""
    shutil.copytree(folder, copy)
    raw = json.loads((copy / "config.json").read_text()) | changes
    raw = {key: value for key, value in raw.items() if value is not None}
    if "use_sliding_window" in changes:
        raw.pop("layer_types", None)
    (copy / "config.json").write_text(json.dumps(raw))
    return copy


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500.0, "rope_type": "default"},
        {"rope_theta": 500.0, "rope_type": "linear", "factor": 4.0},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_the_rope_of_a_transformers_config_is_the_one_that_mlx_rotates_with(
    llama_toy, tmp_path, rope
):
    folder = with_settings(llama_toy.target, tmp_path / "target", rope_parameters=rope)
    ids = [list(llama_toy.prompts[0])]
    ours, theirs = (
        load_pair(target=folder, draft=llama_toy.draft, backend=name, device="cpu").models.target
        for name in ("mlx", "torch")
    )
    logits, _ = ours.logits(mx.array(ids), ours.new_cache(), ())
    expected, _ = theirs.logits(torch.tensor(ids), theirs.new_cache(), ())
    np.testing.assert_allclose(np.array(logits), expected.numpy(), atol=1e-3)


def test_rope_settings_a_layer_type_and_of_a_nested_config_are_found():
    rope = {
        "full_attention": {"rope_theta": 1e6, "rope_type": "default"},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    }
    flat = {"rope_theta": 1e6, "rope_local_base_freq": 1e4}
    assert spelled_for_mlx({"rope_parameters": rope}) == flat
    nested = spelled_for_mlx({"text_config": {"hidden_size": 8, "rope_parameters": rope}})
    assert nested == {"text_config": {"hidden_size": 8, "rope_parameters": rope, **flat}}
    assert spelled_for_mlx({"rope_theta": 1e4}) == {}


def test_a_qwen_3_5_without_its_images_and_the_distance_of_its_full_layers_are_known_to_mlx_lm():
    raw = {
        "model_type": "qwen3_5_text",
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.5},
    }
    assert spelled_for_mlx(raw) == {
        "model_type": "qwen3_5",
        "full_attention_interval": 2,
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.5,
    }
    with pytest.raises(UnsupportedTarget, match="fixed distance"):
        spelled_for_mlx(raw | {"layer_types": ["full_attention", "linear_attention"]})


def test_a_target_that_lacks_weights_is_refused_by_their_names(toy, tmp_path):
    folder = shutil.copytree(toy.target, tmp_path / "target")
    file = str(folder / "model.safetensors")
    tensors = mx.load(file)
    mx.eval(tensors)
    del tensors["model.layers.2.mlp.up_proj.weight"]
    mx.save_safetensors(file, tensors)
    with pytest.raises(UnsupportedTarget, match=r"layers\.2\.mlp\.up_proj"):
        load_pair(target=folder, draft=toy.draft, backend="mlx")


def test_features_are_the_output_of_the_layer_with_that_number(toy, pair):
    target = pair.models.target
    ids = mx.array([toy.prompts[0]])
    logits, features = target.logits(ids, target.new_cache(), (0, 2))
    body, states = target.model.model, []
    hidden = body.embed_tokens(ids)
    for layer in body.layers:
        hidden = layer(hidden, "causal", None)
        states.append(hidden)
    np.testing.assert_allclose(
        np.array(features), np.array(mx.concatenate((states[0], states[2]), axis=-1)), atol=1e-5
    )
    assert logits.shape == (1, len(toy.prompts[0]), 512)


def test_the_target_is_left_as_it_was_found_by_a_pass_that_breaks_too(toy, pair):
    layers = pair.models.target.layers
    before = [(layer, type(layer), type(layer).__call__) for layer in layers]

    def now():
        return [(layer, type(layer), type(layer).__call__) for layer in layers]

    abandoned = stream(pair, toy.prompts[0], DecodeConfig(block_size=4, max_new_tokens=20))
    next(abandoned)
    assert now() == before
    with pytest.raises(RuntimeError, match="boom"), captured(layers, (1, 2)):
        assert now() != before
        raise RuntimeError("boom")
    assert now() == before


# --- what cannot be decoded in blocks is refused ------------------------------------------------


def keep_one_more(part, n):
    part.offset -= max(0, n - 1)
    return n


def forget_the_first_row(part, n):
    part.offset -= n
    part.keys = mx.concatenate((part.keys[:, :, 1:], part.keys[:, :, :1]), axis=2)
    return n


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
@pytest.mark.parametrize("broken", [keep_one_more, forget_the_first_row, lambda part, n: 0])
def test_a_cache_that_takes_back_wrongly_fails_the_self_test(monkeypatch, kind, broken):
    model = model_of(kind)
    for part in (KVCache, WindowCache):
        monkeypatch.setattr(part, "trim", broken)
    with pytest.raises(TargetNotReversible, match=rf"taken back|{kind} cannot be decoded"):
        target_of(model)


@pytest.mark.parametrize("kind", SLIDING)
def test_a_window_short_by_one_fails_the_self_test(monkeypatch, kind):
    model = model_of(kind)
    window = target_of(model).windows
    assert set(window) == {None, 16}

    def late(part, position):
        return max(0, position - part.window + 2)

    monkeypatch.setattr(WindowCache, "_seen_from", late)
    with pytest.raises(TargetNotReversible, match=f"{kind} cannot be decoded in blocks"):
        target_of(model)
    assert model.model.window_size == 16


def test_model_code_that_fails_in_a_cached_step_is_refused_by_name(monkeypatch):
    model = model_of("llama")
    layer = type(model.layers[0])
    real = layer.__call__

    def boom(self, x, mask=None, cache=None):
        if cache is not None and cache.offset:
            raise RuntimeError("boom")
        return real(self, x, mask, cache)

    monkeypatch.setattr(layer, "__call__", boom)
    with pytest.raises(TargetNotReversible, match=r"llama .* RuntimeError: boom"):
        target_of(model)


def test_another_recurrent_kind_and_a_rope_that_depends_on_where_a_pass_ends_are_refused():
    with pytest.raises(TargetNotReversible, match="lfm2 has ArraysCache state"):
        target_of(model_of("lfm2"))
    dynamic = {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
    with pytest.raises(TargetNotReversible, match=r"llama has a rope \(dynamic\)"):
        target_of(model_of("llama", **dynamic))


def test_layers_at_no_fixed_distance_are_refused_for_gemma_3():
    full, sliding = "full_attention", "sliding_attention"
    raw = {"model_type": "gemma3_text", "layer_types": [sliding, full, sliding]}
    assert spelled_for_mlx(raw) == {"sliding_window_pattern": 2}
    assert spelled_for_mlx(raw | {"layer_types": [sliding] * 3}) == {"sliding_window_pattern": 4}
    with pytest.raises(UnsupportedTarget, match="fixed distance"):
        spelled_for_mlx(raw | {"layer_types": [sliding, full, sliding, sliding]})


def test_a_scale_outside_of_the_embedding_is_applied_once():
    model = model_of("gemma3_text", hidden_size=64)
    ids = mx.array([[3, 60, 3]])
    found = target_of(model).embedding(ids)
    np.testing.assert_allclose(np.array(found), 8 * np.array(model.model.embed_tokens(ids)), 1e-5)


def test_a_target_whose_logits_overflow_is_refused_with_the_way_out():
    model = model_of("llama")
    model.lm_head.weight = model.lm_head.weight * 1e5
    model.set_dtype(mx.float16)
    with pytest.raises(TargetNotFinite, match=r"not finite numbers in float16.*bfloat16"):
        target_of(model, mx.float16)


def test_rounding_in_16_bits_is_no_fault():
    for kind in ("llama", "gemma3_text"):
        model = model_of(kind)
        model.set_dtype(mx.bfloat16)
        assert target_of(model, mx.bfloat16).dtype == mx.bfloat16
