"""A draft's folder: every place a value may stand, every form that is read and that is refused."""

import json
import math
import struct

import pytest

from dflash_lab import checkpoint
from dflash_lab.checkpoint import (
    Rope,
    TensorInfo,
    check_headers,
    check_target,
    default_taps,
    draft_fingerprint,
    parse_draft_config,
    read_draft_config,
    read_headers,
)
from dflash_lab.tests.drafts import PUBLISHED, SECOND, TWO, save_random, shrunken
from dflash_lab.tests.toys import MASK, draft_json


def nested(**changes):
    return {"target_layer_ids": [1, 2], "mask_token_id": MASK} | changes


@pytest.mark.parametrize(
    ("layers", "count", "taps"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (32, 5, (1, 8, 15, 22, 29)),
        (32, 8, (1, 5, 9, 13, 17, 21, 25, 29)),
        (64, 5, (1, 16, 31, 46, 61)),
        (24, 5, (1, 6, 11, 16, 21)),
        (30, 3, (1, 14, 27)),
        (30, 5, (1, 8, 14, 20, 27)),
        (30, 1, (15,)),
    ],
)
def test_default_taps_are_those_of_the_published_drafts(layers, count, taps):
    assert default_taps(layers, count) == taps


def shape(hidden, inner, heads, kv, head, layers, taps, bias=False):
    return parse_draft_config(
        draft_json(
            hidden_size=hidden,
            intermediate_size=inner,
            num_attention_heads=heads,
            num_key_value_heads=kv,
            head_dim=head,
            num_hidden_layers=layers,
            attention_bias=bias,
            dflash_config=nested(target_layer_ids=list(range(taps))),
        )
    )


@pytest.mark.parametrize(
    ("config", "parameters", "tensors"),
    [
        (shape(2560, 9728, 32, 8, 128, 5, 5), 537_427_200, 58),
        (shape(4096, 12288, 32, 8, 128, 5, 5), 1_048_626_432, 58),
        (shape(2560, 9216, 32, 8, 128, 6, 8), 634_425_856, 69),
        (shape(2880, 7680, 64, 8, 64, 8, 5, bias=True), 784_767_104, 3 + 15 * 8),
        (shape(576, 1536, 9, 3, 64, 1, 3), 4_536_704, 14),
        (shape(576, 1536, 9, 3, 64, 2, 3), 8_076_928, 25),
        (shape(576, 1536, 9, 3, 64, 2, 5), 8_740_480, 25),
        (shape(576, 1536, 9, 3, 64, 3, 5), 12_280_704, 36),
        (shape(576, 1536, 9, 3, 64, 5, 5), 19_361_152, 58),
    ],
)
def test_parameters_and_tensors_are_the_published_ones(config, parameters, tensors):
    assert config.parameters == parameters
    assert len(config.tensor_shapes) == tensors


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Qwen3-4B-DFlash-b16", 537_427_200),
        ("Qwen3-8B-DFlash-b16", 1_048_626_432),
        ("Qwen3.5-4B-DFlash", 634_425_856),
        ("gpt-oss-20b-DFlash", 784_767_104),
    ],
)
def test_published_drafts_have_the_published_number_of_parameters(name, parameters):
    assert parse_draft_config(PUBLISHED[name]).parameters == parameters


def part(config, word):
    """Parameters and number of the tensors with a word in their names."""
    shapes = [shape for name, shape in config.tensor_shapes.items() if word in name]
    return sum(math.prod(shape) for shape in shapes), len(shapes)


def test_a_dflash_2_draft_has_two_convolutions_a_layer_and_a_selector():
    muse = parse_draft_config(PUBLISHED["Muse-Glimmer-30B-DFlash2"])
    assert part(muse, "layers.3.mlp_conv") == (11_102_208, 2)
    assert muse.tensor_shapes["layers.0.attention_conv.kernel_projection.weight"] == (1664, 6656)
    assert part(muse, "candidate_selector") == (256 * 6656 + 2 * 202_048 * 256, 3)
    assert len(muse.tensor_shapes) == 81
    narrow = parse_draft_config({**PUBLISHED["Muse-Glimmer-30B-DFlash2"], "hidden_size": 2560})
    assert part(narrow, "_conv.") == (16_486_400, 20)


PLACES = {  # (block size, its place), windows, causal, RoPE base: dflash.md 2.6
    "Qwen3-4B-DFlash-b16": (16, "block_size", (None,) * 5, False, 1e6),
    "Qwen3-8B-DFlash-b16": (16, "block_size", (None,) * 5, False, 1e6),
    "Qwen3.5-4B-DFlash, before June 2026": (16, "block_size", (None,) * 5, False, 1e7),
    "Qwen3.5-4B-DFlash": (16, "dflash_config.block_size", (4096,) * 5 + (None,), None, 1e7),
    "Qwen3.6-27B-DFlash": (16, "block_size", (2048,) * 4 + (None,), None, 1e7),
    "gpt-oss-20b-DFlash": (8, "block_size", (None,) * 8, False, 150_000),
    "gpt-oss-120b-DFlash": (10, "block_size", (None,) * 8, False, 150_000),
    "LLaMA3.1-8B-DFlash-UltraChat": (10, "block_size", (None,) * 5, False, 1e6),
    "Qwen3.8-27B-DFlash2": (8, "dflash_config.block_size", (2048,) * 5, False, 1e7),
    "Muse-Glimmer-30B-DFlash2": (16, "dflash_config.block_size", (2048,) * 5, False, 5e5),
    "Qwen3.5-0.8B-DFlash": (16, "block_size", (None,) * 5, False, 1e7),
    "Qwen2.5-0.5B": (16, "block_size", (None,) * 5, False, 1e6),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_form_is_read_as_published(name):
    size, place, windows, causal, theta = PLACES[name]
    config = parse_draft_config(PUBLISHED[name])
    assert (config.block_size, config.sources["block_size"]) == (size, place)
    assert config.layer_windows == windows
    expected = tuple(window is not None for window in windows) if causal is None else None
    assert config.layer_causal == (expected or (causal,) * len(windows))
    assert {rope.theta for rope in config.layer_ropes} == {theta}
    assert {rope.kind for rope in config.layer_ropes} == {"yarn" if "oss" in name else "default"}
    assert config.attention_bias == ("oss" in name)
    assert config.kind == ("DFlash 2" if name.endswith("2") else "DFlash 1")
    assert list(config.target_layer_ids) == PUBLISHED[name]["dflash_config"]["target_layer_ids"]
    told = {"auto_map"} if "auto_map" in PUBLISHED[name] else set()
    assert {note.split()[0] for note in config.notes} == told


def test_softcap_multiplier_and_embedding_scale_are_read_nested_or_at_top_level():
    muse = parse_draft_config(PUBLISHED["Muse-Glimmer-30B-DFlash2"])
    assert (muse.softcap, muse.output_multiplier, muse.embedding_scale) == (20.0, 0.1961, 1.0)
    top = parse_draft_config(draft_json(final_logit_softcapping=30.0, input_embedding_scale=8))
    assert (top.softcap, top.output_multiplier, top.embedding_scale) == (30.0, 1.0, 8.0)
    assert parse_draft_config(draft_json(final_logit_softcapping=0)).softcap is None


@pytest.mark.parametrize(
    ("top", "inner", "size", "source", "notes"),
    [
        (12, None, 12, "block_size", 0),
        (None, 12, 12, "dflash_config.block_size", 0),
        (12, 12, 12, "dflash_config.block_size", 0),
        (12, 10, 10, "dflash_config.block_size", 1),
        (None, None, 16, "default", 1),
    ],
)
def test_the_block_size_is_nested_before_top_level_before_16(top, inner, size, source, notes):
    raw = draft_json(block_size=top, dflash_config=nested(block_size=inner))
    config = parse_draft_config(raw)
    assert (config.block_size, config.sources["block_size"]) == (size, source)
    assert len(config.notes) == notes
    if notes and top:
        assert str(top) in config.notes[0]
        assert str(inner) in config.notes[0]


def test_the_trained_block_size_is_the_stored_one_else_the_checkpoints():
    assert parse_draft_config(draft_json()).trained_block_size == 8
    locked = parse_draft_config(draft_json(block_size=4, trained_block_size=16))
    assert (locked.block_size, locked.trained_block_size) == (4, 16)


@pytest.mark.parametrize("value", [0, -3, 7.5, "8", True])
def test_a_block_size_that_is_no_whole_number_is_named_with_its_key(value):
    with pytest.raises(ValueError, match=r"dflash_config\.block_size is"):
        parse_draft_config(draft_json(dflash_config=nested(block_size=value)))


@pytest.mark.parametrize(
    ("changes", "theta"),
    [
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 5e5}}, 5e5),
        ({"rope_theta": None, "rope_scaling": {"rope_theta": 5e5}}, 5e5),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 5e5}}, 5e5),
        ({"rope_theta": None, "dflash_config": nested(rope_theta=5e5)}, 5e5),
        ({"rope_theta": 5e5, "partial_rotary_factor": None}, 5e5),
        ({"rope_theta": None, "rope_parameters": {"full_attention": {"rope_theta": 5e5}}}, 5e5),
    ],
)
def test_the_rope_base_is_read_wherever_it_stands(changes, theta):
    config = parse_draft_config(draft_json(**changes))
    assert config.layer_ropes == (Rope(theta=theta),) * 2


def test_two_different_rope_bases_are_an_error_that_names_both():
    raw = draft_json(rope_theta=1e6, rope_parameters={"rope_theta": 1e7})
    with pytest.raises(checkpoint.ConfigConflict, match=r"1e\+07.*1e\+06"):
        parse_draft_config(raw)


def test_a_nested_rope_base_is_not_overlooked():
    with pytest.raises(checkpoint.ConfigConflict, match=r"dflash_config\.rope_theta"):
        parse_draft_config(draft_json(rope_theta=1e6, dflash_config=nested(rope_theta=1e7)))


def test_sliding_that_is_switched_on_without_layer_types_is_noted():
    config = parse_draft_config(draft_json(use_sliding_window=True, sliding_window=32))
    assert "read as full attention" in config.notes[0]


def test_settings_of_other_programs_are_noted():
    config = parse_draft_config(draft_json(dflash_config=nested(runtime_block_size=4)))
    assert "runtime_block_size is another program's setting" in config.notes[0]


def test_no_rope_base_at_all_is_an_error_and_never_10000():
    with pytest.raises(checkpoint.ConfigMissing, match="rope_theta"):
        parse_draft_config(draft_json(rope_theta=None))


def test_each_kind_of_layer_may_have_a_base_of_its_own():
    each = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    raw = draft_json(rope_theta=None, rope_parameters=each, layer_types=[S, F], sliding_window=32)
    config = parse_draft_config(raw)
    assert [rope.theta for rope in config.layer_ropes] == [1e4, 1e6]
    source = "rope_parameters.sliding_attention.rope_theta"
    assert config.sources["rope_theta"].split(", ")[0] == source
    with pytest.raises(checkpoint.ConfigConflict, match=r"1e\+06.*10000"):
        parse_draft_config({**raw, "rope_theta": 1e4})


# theta 10000, head size 8: the plain frequencies are 1, 1/10, 1/100, 1/1000.
HAND = {
    "default": (Rope(theta=10_000.0), (1, 0.1, 0.01, 0.001)),
    "linear": (Rope(theta=10_000.0, kind="linear", factor=4.0), (0.25, 0.025, 0.0025, 0.00025)),
    # Over 4096 positions, pair i turns 4096 / (2 pi 10^i) times: 651.9, 65.2, 6.5, 0.65. 32 turns
    # lie at pair log10(4096 / 64 pi) = 1.309, one turn at log10(4096 / 2 pi) = 2.814; rounded
    # outwards 1 and 3. So pair 2 is half stretched, pair 3 wholly: by (1 + 1/32) / 2 and by 1/32.
    "yarn": (
        Rope(theta=10_000.0, kind="yarn", factor=32.0, original_length=4096),
        (1, 0.1, 0.01 * 33 / 64, 0.001 / 32),
    ),
    "yarn, not rounded": (
        Rope(theta=10_000.0, kind="yarn", factor=32.0, original_length=4096, truncate=False),
        (1, 0.1, 0.01 * (1 - 31 / 32 * 0.45908), 0.001 / 32),  # (2 - 1.3091) / 1.50515
    ),
}


@pytest.mark.parametrize(("rope", "expected"), HAND.values(), ids=HAND)
def test_inverse_frequencies_are_the_hand_computed_ones(rope, expected):
    assert rope.inverse_frequencies(8) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({}, 1 + 0.1 * math.log(32)),
        ({"attention_factor": 1.5}, 1.5),
        (
            {"mscale": 2.0, "mscale_all_dim": 1.0},
            (1 + 0.2 * math.log(32)) / (1 + 0.1 * math.log(32)),
        ),
        ({"factor": 0.5}, 1.0),
    ],
)
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_yarn_is_read_wherever_it_stands_and_scales_cosines_and_sines(place, settings, scale):
    form = {"type": "yarn", "factor": 32, "original_max_position_embeddings": 64, **settings}
    config = parse_draft_config(draft_json(**{place: form}))
    assert {rope.kind for rope in config.layer_ropes} == {"yarn"}
    assert config.layer_ropes[0].scale == pytest.approx(scale)


def yarn(**changes):
    return {"rope_type": "yarn", "factor": 32, "original_max_position_embeddings": 64} | changes


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"rope_scaling": yarn(rope_type="llama3")}, checkpoint.RopeUnsupported, "'llama3'.*yarn"),
        ({"rope_scaling": yarn(surprise=1)}, checkpoint.RopeUnsupported, "surprise"),
        ({"rope_scaling": {"rope_type": "linear"}}, checkpoint.ConfigMissing, "no factor"),
        ({"rope_scaling": yarn(factor=-1)}, checkpoint.CheckpointError, "above 0"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2}},
            checkpoint.ConfigMissing,
            "no original_max_position_embeddings",
        ),
        (
            {"rope_scaling": yarn(), "rope_parameters": yarn(factor=16)},
            checkpoint.ConfigConflict,
            "16.*32",
        ),
        ({"rope_scaling": yarn(partial_rotary_factor=0.5)}, checkpoint.RopeUnsupported, "partial"),
        ({"rope_local_base_freq": 1e4}, checkpoint.RopeUnsupported, "rope_local_base_freq"),
        ({"rope_scaling": [1]}, checkpoint.CheckpointError, "a JSON object"),
    ],
)
def test_a_rotation_that_is_not_implemented_is_refused_by_name(changes, kind, words):
    with pytest.raises(kind, match=words):
        parse_draft_config(draft_json(**changes))


S, F = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("changes", "windows", "causal"),
    [
        ({}, (None, None), (False, False)),
        ({"layer_types": [F, F]}, (None, None), (False, False)),
        ({"layer_types": [S, S], "sliding_window": 32}, (32, 32), (True, True)),
        ({"layer_types": [S, F], "sliding_window": 32}, (32, None), (True, False)),
        (
            {"layer_types": [S, F], "sliding_window": 32, "is_causal": False},
            (32, None),
            (False,) * 2,
        ),
        ({"is_causal": True}, (None, None), (True, True)),
        ({"use_sliding_window": True, "sliding_window": 32}, (None, None), (False, False)),
    ],
)
def test_windows_and_causality_are_decided_layer_by_layer(changes, windows, causal):
    config = parse_draft_config(draft_json(**changes))
    assert (config.layer_windows, config.layer_causal) == (windows, causal)


def test_top_level_causality_goes_before_nested():
    raw = draft_json(is_causal=False, dflash_config=nested(causal=True))
    assert parse_draft_config(raw).layer_causal == (False, False)
    raw = draft_json(dflash_config=nested(causal=True))
    assert parse_draft_config(raw).layer_causal == (True, True)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"architectures": TWO}, checkpoint.ConfigMissing, "conv_kernel_size"),
        ({"dflash_config": nested(selector_rank=4)}, checkpoint.ConfigMissing, "conv_kernel"),
        (
            {"dflash_config": nested(**{**SECOND, "conv_group_size": 7})},
            checkpoint.CheckpointError,
            "does not divide",
        ),
        (
            {"architectures": ["MuseGlimmerAssistantModel"]},
            checkpoint.UnsupportedDraft,
            r"encoder\.\*",
        ),
        ({"architectures": ["Qwen3DSparkModel"]}, checkpoint.UnsupportedDraft, "DSpark"),
        ({"dflash_config": nested(confidence_weight=1.0)}, checkpoint.UnsupportedDraft, "DSpark"),
        ({"draft_vocab_size": 100}, checkpoint.OwnVocabularyUnsupported, "100.*reduced"),
        ({"hidden_act": "gelu"}, checkpoint.UnsupportedDraft, "gelu"),
        ({"dflash_config": nested(markov_rank=4)}, checkpoint.UnsupportedDraft, "DSpark"),
        ({"dflash_config": nested(sample_from_anchor=True)}, checkpoint.UnsupportedDraft, "anchor"),
        ({"sample_from_anchor": True}, checkpoint.UnsupportedDraft, "anchor"),
        ({"dflash_config": nested(target_layer_ids=3)}, checkpoint.WidthMismatch, "a list"),
        ({"dflash_config": nested(surprise=1)}, checkpoint.UnsupportedDraft, "surprise"),
        ({"dflash_config": nested(output_multiplier=0)}, checkpoint.CheckpointError, "above 0"),
        ({"final_logit_softcapping": -1}, checkpoint.CheckpointError, "softcapping is -1"),
        ({"is_causal": "no"}, checkpoint.CheckpointError, "is_causal is 'no'"),
        ({"attention_bias": 1}, checkpoint.CheckpointError, "attention_bias is 1"),
        ({"rms_norm_eps": None}, checkpoint.ConfigMissing, "rms_norm_eps"),
        ({"num_key_value_heads": 3}, checkpoint.CheckpointError, "num_key_value_heads"),
        ({"layer_types": "full_attention"}, checkpoint.UnknownLayerType, "a list"),
        ({"dflash_config": nested(target_layer_ids=[1, 1])}, checkpoint.WidthMismatch, "different"),
        ({"dflash_config": nested(target_layer_ids=[-1])}, checkpoint.WidthMismatch, "from 0"),
        ({"dflash_config": {"mask_token_id": 3}}, checkpoint.ConfigMissing, "num_target_layers"),
        ({"num_target_layers": 2}, checkpoint.WidthMismatch, "counted 0 to 1"),
        ({"target_hidden_size": 128}, checkpoint.WidthMismatch, "64.*128"),
        ({"dflash_config": {"target_layer_ids": [1]}}, checkpoint.ConfigMissing, "mask_token_id"),
        ({"hidden_size": None}, checkpoint.ConfigMissing, "hidden_size"),
        ({"layer_types": [F]}, checkpoint.UnknownLayerType, "1 entries for 2 layers"),
        ({"layer_types": [F, "mamba"]}, checkpoint.UnknownLayerType, "mamba"),
        ({"layer_types": [S, F]}, checkpoint.WindowMissing, "sliding_window is None"),
        ({"dflash_config": 3}, checkpoint.CheckpointError, "expected a JSON object"),
    ],
)
def test_what_is_not_a_dflash_draft_is_refused_by_name(changes, kind, words):
    with pytest.raises(kind, match=words):
        parse_draft_config(draft_json(**changes))


@pytest.mark.parametrize("changes", [{"partial_rotary_factor": 0.5}, {"rope_interleave": True}])
def test_a_rotation_of_another_layout_is_refused_by_name(changes):
    with pytest.raises(checkpoint.RopeUnsupported, match=next(iter(changes))):
        parse_draft_config(draft_json(**changes))


@pytest.mark.parametrize("name", ["lm_head.weight", "embed_tokens.weight", "d2t", "model.t2d"])
def test_a_vocabulary_of_the_drafts_own_is_refused_and_never_replaced(name):
    config = parse_draft_config(draft_json())
    with pytest.raises(checkpoint.OwnVocabularyUnsupported, match=name):
        checkpoint.check_tensors(config, {**config.tensor_shapes, name: (256, 64)})


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("markov_head.embedding.weight", checkpoint.UnsupportedDraft, "Markov head"),
        ("confidence_head.weight", checkpoint.UnsupportedDraft, "DSpark"),
        ("encoder.fc.weight", checkpoint.UnsupportedDraft, "Muse assistant"),
        ("layers.0.self_attn.sinks", checkpoint.UnsupportedDraft, "attention sinks"),
        ("aux_hidden_norms.0.weight", checkpoint.UnsupportedDraft, "each tap"),
        ("layers.0.self_attn.g_proj.weight", checkpoint.UnsupportedDraft, "a gate"),
        ("layers.0.self_attn.qkv_proj.weight", checkpoint.TensorMismatch, "fused; split it"),
    ],
)
def test_tensors_of_another_kind_of_draft_are_named_as_such(name, kind, words):
    config = parse_draft_config(draft_json())
    with pytest.raises(kind, match=words):
        checkpoint.check_tensors(config, {**config.tensor_shapes, name: (8, 8)})


def test_half_a_dflash_2_draft_is_refused_and_so_is_one_read_as_dflash_1():
    two = parse_draft_config(shrunken(PUBLISHED["Qwen3.8-27B-DFlash2"]))
    found = dict(two.tensor_shapes)
    one = parse_draft_config(shrunken(PUBLISHED["Qwen3-4B-DFlash-b16"]))
    with pytest.raises(checkpoint.TensorMismatch, match=r"left over: candidate_selector\.hidden"):
        checkpoint.check_tensors(one, found)
    for name in ("layers.4.mlp_conv.base_kernel", "layers.4.mlp_conv.kernel_projection.weight"):
        del found[name]
    with pytest.raises(checkpoint.TensorMismatch, match=r"missing: .*kernel_projection") as caught:
        checkpoint.check_tensors(two, found)
    assert "left over" not in str(caught.value)


def test_weights_stored_as_whole_numbers_are_refused():
    config = parse_draft_config(draft_json())
    found = {n: TensorInfo(dtype="BF16", shape=s) for n, s in config.tensor_shapes.items()}
    check_headers(config, found)
    found["fc.weight"] = TensorInfo(dtype="U8", shape=found["fc.weight"].shape)
    with pytest.raises(checkpoint.TensorMismatch, match=r"fc\.weight is U8"):
        check_headers(config, found)


def test_every_tensor_at_fault_is_listed():
    config = parse_draft_config(draft_json())
    found = dict(config.tensor_shapes)
    del found["layers.0.self_attn.k_norm.weight"]
    found["enc.aux_norm.weight"] = (64,)
    found["fc.weight"] = (64, 64)
    with pytest.raises(checkpoint.TensorMismatch) as caught:
        checkpoint.check_tensors(config, found)
    for name in ("layers.0.self_attn.k_norm.weight", "enc.aux_norm.weight", "fc.weight"):
        assert name in str(caught.value)


def test_a_folder_without_config_or_with_broken_json_says_so(tmp_path):
    with pytest.raises(checkpoint.CheckpointError, match=r"no config\.json"):
        checkpoint.read_draft_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(checkpoint.CheckpointError, match="not valid JSON"):
        checkpoint.read_draft_config(tmp_path)


def test_locking_a_block_size_does_not_make_it_another_draft(tmp_path):
    for name, raw in {
        "a": draft_json(),
        "locked": draft_json(block_size=4, trained_block_size=8),
        "other": draft_json(rope_theta=5e5),
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(raw))
        (tmp_path / name / "model.safetensors").write_bytes(b"weights")
    assert draft_fingerprint(tmp_path / "a") == draft_fingerprint(tmp_path / "locked")
    assert draft_fingerprint(tmp_path / "a") != draft_fingerprint(tmp_path / "other")


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("shards", [1, 3])
def test_headers_are_read_from_one_file_or_many_and_with_or_without_a_prefix(
    tmp_path, shards, prefix
):
    save_random(tmp_path, draft_json(), shards=shards, prefix=prefix)
    config = read_draft_config(tmp_path)
    found = read_headers(tmp_path)
    check_headers(config, found)
    assert {name: info.shape for name, info in found.items()} == config.tensor_shapes
    assert {info.dtype for info in found.values()} == {"F32"}


def test_a_prefix_before_some_names_only_is_not_stripped(tmp_path):
    tensors = save_random(tmp_path, draft_json(), prefix="model.")
    names = [name.removeprefix("model.") if "fc" in name else name for name in tensors]
    found = checkpoint.bare_names(dict.fromkeys(names, (1,)))
    with pytest.raises(checkpoint.TensorMismatch, match=r"left over: model\.hidden_norm"):
        checkpoint.check_tensors(read_draft_config(tmp_path), found)


def test_a_shard_or_an_entry_of_the_index_that_is_not_there_is_named(tmp_path):
    save_random(tmp_path, draft_json(), shards=2)
    index = tmp_path / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    first = tmp_path / "model-00001-of-00002.safetensors"
    second = tmp_path / "model-00002-of-00002.safetensors"

    index.write_text(json.dumps({"weight_map": whole["weight_map"] | {"more": first.name}}))
    with pytest.raises(checkpoint.TensorMismatch, match="disagree about: more"):
        read_headers(tmp_path)
    index.write_text("{}")
    with pytest.raises(checkpoint.CheckpointError, match="no weight_map"):
        read_headers(tmp_path)
    index.write_text(json.dumps(whole))
    (tmp_path / "other.safetensors").write_bytes(first.read_bytes())
    with pytest.raises(checkpoint.TensorMismatch, match=r"Not named by it: other\.safetensors"):
        read_headers(tmp_path)
    index.unlink()
    with pytest.raises(checkpoint.TensorMismatch, match="two files"):
        read_headers(tmp_path)
    (tmp_path / "other.safetensors").unlink()
    assert len(read_headers(tmp_path)) == len(whole["weight_map"])
    index.write_text(json.dumps(whole))
    second.unlink()
    with pytest.raises(checkpoint.TensorMismatch, match=r"Missing: model-00002-of-00002"):
        read_headers(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "draft.pt"])
def test_weights_that_may_hold_code_are_refused_with_the_reason(tmp_path, name):
    (tmp_path / name).write_bytes(b"weights")
    with pytest.raises(checkpoint.CheckpointError, match=f"{name} is not read.*run code"):
        read_headers(tmp_path)


def test_a_damaged_or_shortened_file_is_noticed_by_its_header(tmp_path):
    save_random(tmp_path, draft_json())
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    for broken in (
        content[:-1],
        content + b"x",
        content[:100],
        struct.pack("<Q", 9) + b"[1, 2, 3]",
    ):
        path.write_bytes(broken)
        with pytest.raises(checkpoint.CheckpointError, match="cannot be read"):
            read_headers(tmp_path)


def test_a_key_that_stands_twice_and_differs_is_noted_with_both_values():
    config = parse_draft_config(draft_json(mask_token_id=3))
    assert config.mask_token == MASK
    assert f"mask_token_id = {MASK} and mask_token_id = 3" in config.notes[0]


@pytest.mark.parametrize(
    ("windows", "user", "kept"),
    [
        ((None, None), None, None),
        ((None, None), 5, 5),
        ((16, None), None, None),
        ((16, None), 5, 5),
        ((16, 16), None, 15),
        ((16, 16), 40, 15),
        ((16, 16), 5, 5),
        ((1, 1), None, 1),
    ],
)
def test_a_cache_keeps_what_the_widest_layer_may_see(windows, user, kept):
    changes = {
        "layer_types": [F if window is None else S for window in windows],
        "sliding_window": next((window for window in windows if window), None),
    }
    assert parse_draft_config(draft_json(**changes)).context_window(user) == kept


@pytest.mark.parametrize(
    ("shape", "kind", "words"),
    [
        ((64, 4, 512), None, ""),
        ((128, 4, 512), checkpoint.WidthMismatch, "64.*128"),
        ((64, 2, 512), checkpoint.WidthMismatch, "layers 0 to 1"),
        ((64, 4, 500), checkpoint.MaskIdOutOfRange, "511.*500 rows"),
    ],
)
def test_a_target_fits_by_width_layers_and_vocabulary(shape, kind, words):
    config = parse_draft_config(draft_json())
    if kind is None:
        check_target(config, *shape)
        return
    with pytest.raises(kind, match=words):
        check_target(config, *shape)


def test_a_selector_and_its_target_know_the_same_tokens():
    two = parse_draft_config(draft_json(dflash_config=nested(**SECOND)))
    check_target(two, 64, 4, 512)
    with pytest.raises(checkpoint.WidthMismatch, match=r"knows 512 tokens.*520"):
        check_target(two, 64, 4, 520)
