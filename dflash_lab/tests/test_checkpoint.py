"""A draft's configuration: every place a value may stand, and every form that is refused."""

import json

import pytest

from dflash_lab import checkpoint
from dflash_lab.checkpoint import default_taps, draft_fingerprint, parse_draft_config
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
        (shape(576, 1536, 9, 3, 64, 2, 5), 8_740_480, 25),
    ],
)
def test_parameters_and_tensors_are_those_of_the_published_drafts(config, parameters, tensors):
    assert config.parameters == parameters
    assert len(config.tensor_shapes) == tensors


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
    assert parse_draft_config(draft_json(**changes)).rope_theta == theta


def test_two_different_rope_bases_are_an_error_that_names_both():
    raw = draft_json(rope_theta=1e6, rope_parameters={"rope_theta": 1e7})
    with pytest.raises(checkpoint.ConfigConflict, match=r"1e\+07.*1e\+06"):
        parse_draft_config(raw)


def test_a_nested_rope_base_is_not_overlooked():
    with pytest.raises(checkpoint.ConfigConflict, match=r"dflash_config\.rope_theta"):
        parse_draft_config(draft_json(rope_theta=1e6, dflash_config=nested(rope_theta=1e7)))


def test_settings_of_other_programs_are_noted():
    config = parse_draft_config(draft_json(dflash_config=nested(runtime_block_size=4)))
    assert "runtime_block_size is another program's setting" in config.notes[0]


def test_no_rope_base_at_all_is_an_error_and_never_10000():
    with pytest.raises(checkpoint.ConfigMissing, match="rope_theta"):
        parse_draft_config(draft_json(rope_theta=None))


def test_yarn_is_refused_by_name_until_it_is_implemented():
    with pytest.raises(checkpoint.RopeUnsupported, match="yarn"):
        parse_draft_config(draft_json(rope_scaling={"rope_type": "yarn", "factor": 32}))


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
        ({"architectures": ["DFlash2DraftModel"]}, checkpoint.UnsupportedDraft, "DFlash 2"),
        ({"dflash_config": nested(selector_rank=4)}, checkpoint.UnsupportedDraft, "DFlash 2"),
        ({"dflash_config": nested(markov_rank=4)}, checkpoint.UnsupportedDraft, "DSpark"),
        ({"dflash_config": nested(sample_from_anchor=True)}, checkpoint.UnsupportedDraft, "anchor"),
        ({"sample_from_anchor": True}, checkpoint.UnsupportedDraft, "anchor"),
        ({"dflash_config": nested(target_layer_ids=3)}, checkpoint.WidthMismatch, "a list"),
        ({"dflash_config": nested(surprise=1)}, checkpoint.UnsupportedDraft, "surprise"),
        ({"dflash_config": nested(output_multiplier=2.0)}, checkpoint.UnsupportedDraft, "output"),
        ({"dflash_config": nested(target_layer_ids=[1, 1])}, checkpoint.WidthMismatch, "different"),
        ({"dflash_config": nested(target_layer_ids=[-1])}, checkpoint.WidthMismatch, "from 0"),
        ({"dflash_config": {"mask_token_id": 3}}, checkpoint.ConfigMissing, "num_target_layers"),
        ({"dflash_config": {"target_layer_ids": [1]}}, checkpoint.ConfigMissing, "mask_token_id"),
        ({"hidden_size": None}, checkpoint.ConfigMissing, "hidden_size"),
        ({"layer_types": [F]}, checkpoint.UnknownLayerType, "1 entries for 2 layers"),
        ({"layer_types": [F, "mamba"]}, checkpoint.UnknownLayerType, "mamba"),
        ({"layer_types": [S, F]}, checkpoint.WindowMissing, "sliding_window is None"),
        ({"dflash_config": 3}, checkpoint.CheckpointError, "expected a JSON object"),
    ],
)
def test_what_is_not_a_dflash_1_draft_is_refused_by_name(changes, kind, words):
    with pytest.raises(kind, match=words):
        parse_draft_config(draft_json(**changes))


@pytest.mark.parametrize("changes", [{"partial_rotary_factor": 0.5}, {"rope_interleave": True}])
def test_a_rotation_of_another_layout_is_refused_by_name(changes):
    with pytest.raises(checkpoint.RopeUnsupported, match=next(iter(changes))):
        parse_draft_config(draft_json(**changes))


@pytest.mark.parametrize("name", ["lm_head.weight", "embed_tokens.weight", "d2t"])
def test_a_vocabulary_of_the_drafts_own_is_refused_and_never_replaced(name):
    config = parse_draft_config(draft_json())
    with pytest.raises(checkpoint.OwnVocabularyUnsupported, match=name):
        checkpoint.check_tensors(config, {**config.tensor_shapes, name: (256, 64)})


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
