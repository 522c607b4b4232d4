"""Pairs by name, folder and hub id; prompts to ids; ids to text."""

import json
import re
import shutil

import pytest

import dflash_lab as dl
from dflash_lab.load import (
    DraftConfigWarning,
    ModelUnavailable,
    draft_fingerprint,
    flat_ids,
    target_fingerprint,
)
from dflash_lab.tests.toys import END, byte_tokenizer, scripted_pair


def test_an_unknown_pair_is_one_line_that_names_the_known_ones():
    with pytest.raises(ValueError, match=r"no pair 'smolm'; known are 'smollm2', 'tiny'"):
        dl.load_pair("smolm")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "a name, or both"),
        ({"target": "t"}, "a name, or both"),
        ({"name": "smollm2", "draft": "d"}, "not both"),
        ({"target": "t", "draft": "d", "dtype": "int8"}, "dtype is 'int8'"),
        ({"target": "t", "draft": "d", "device": "gpu"}, "device is 'gpu'"),
        ({"name": "smollm2", "target_revision": "abc"}, "has no revisions"),
        ({"target": "t", "draft": "d", "backend": "jax"}, "backend is 'jax'"),
    ],
)
def test_a_pair_described_wrongly_is_refused_before_anything_is_read(arguments, words):
    with pytest.raises(ValueError, match=words):
        dl.load_pair(**arguments)


def test_a_missing_folder_and_an_unreachable_hub_name_the_local_way(
    tmp_path, qwen3_toy, monkeypatch
):
    with pytest.raises(ModelUnavailable, match=r"neither a folder here nor a hub id"):
        dl.load_pair(target=qwen3_toy.target, draft=str(tmp_path / "gone"))
    import huggingface_hub

    def no_network(*_, **__):
        raise OSError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_network)
    with pytest.raises(ModelUnavailable, match=r"'z-lab/Some-DFlash'.*give its folder as draft="):
        dl.load_pair(target=qwen3_toy.target, draft="z-lab/Some-DFlash")


def test_a_hub_id_becomes_the_snapshot_of_its_revision(qwen3_toy, monkeypatch):
    import huggingface_hub

    asked = {}

    def snapshot(repo, revision=None, allow_patterns=None):
        asked[repo] = (revision, tuple(allow_patterns))
        return str(qwen3_toy.draft if "draft" in repo else qwen3_toy.target)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    dl.load_pair(target="org/target", draft="org/draft", draft_revision="abc123")
    assert asked["org/draft"][0] == "abc123"
    assert asked["org/target"][0] is None
    assert not any("*.py" in pattern or "bin" in pattern for pattern in asked["org/draft"][1])


def test_a_revision_of_a_folder_is_refused(qwen3_toy):
    with pytest.raises(ValueError, match=r"draft_revision is 'abc'"):
        dl.load_pair(target=qwen3_toy.target, draft=qwen3_toy.draft, draft_revision="abc")


def test_conflicting_block_sizes_in_a_draft_are_shown_when_it_is_loaded(qwen3_toy, tmp_path):
    folder = shutil.copytree(qwen3_toy.draft, tmp_path / "draft")
    raw = json.loads((folder / "config.json").read_text())
    raw["dflash_config"]["block_size"] = 4
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.warns(DraftConfigWarning, match=r"= 4 and block_size = 8.*nested"):
        pair = dl.load_pair(target=qwen3_toy.target, draft=folder)
    assert pair.draft_config.block_size == 4


def test_a_folder_may_bear_any_name(qwen3_toy, tmp_path):
    target = shutil.copytree(qwen3_toy.target, tmp_path / "not-a-qwen at all")
    assert dl.load_pair(target=target, draft=qwen3_toy.draft).draft_config.block_size == 8


def test_fingerprints_tell_checkpoints_apart_and_copies_not(qwen3_toy, untied_toy, tmp_path):
    copy = shutil.copytree(qwen3_toy.target, tmp_path / "copy")
    written = (copy / "config.json").read_text()
    (copy / "manifest.json").write_text('{"made": "another day"}')
    assert target_fingerprint(copy) == target_fingerprint(qwen3_toy.target)
    for other in ('"5.1.0"', '"6.0.0.dev0"'):  # another version of the library wrote it
        text = re.sub(r'(?<="transformers_version": )"[^"]+"', other, written)
        assert text != written
        (copy / "config.json").write_text(text)
        assert target_fingerprint(copy) == target_fingerprint(qwen3_toy.target)
    (copy / "config.json").write_text(written.replace('"vocab_size": ', '"vocab_size": 1'))
    assert target_fingerprint(copy) != target_fingerprint(qwen3_toy.target)
    (copy / "config.json").write_text(written)
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1  # the last byte of the last tensor
    (copy / "model.safetensors").write_bytes(weights)
    assert target_fingerprint(copy) != target_fingerprint(qwen3_toy.target)
    assert target_fingerprint(untied_toy.target) != target_fingerprint(qwen3_toy.target)
    assert len(draft_fingerprint(qwen3_toy.draft)) == 64


def test_text_goes_through_the_template_unless_told_otherwise(toy_pair):
    chat, plain = toy_pair.encode("hi"), toy_pair.encode("hi", chat=False)
    assert plain.ids == (104, 105)
    assert len(chat.ids) > len(plain.ids)
    assert (chat.thinking, plain.thinking) == ("template default", "no template")
    messages = toy_pair.encode([{"role": "user", "content": "hi"}])
    assert messages == chat
    assert toy_pair.encode((104, 105)).ids == (104, 105)


def test_thinking_is_honoured_where_the_template_knows_it_and_refused_elsewhere(
    toy_pair, llama_toy
):
    assert toy_pair.encode("hi", thinking=False).ids != toy_pair.encode("hi", thinking=True).ids
    assert toy_pair.encode("hi", thinking=False).thinking == "off"
    with pytest.raises(ValueError, match=r"thinking is True.*no such switch"):
        llama_toy.load().encode("hi", thinking=True)


@pytest.mark.parametrize("settings", [{"chat": False}, {}])
def test_thinking_is_refused_where_no_template_is_used(toy_pair, settings):
    prompt = "hi" if settings else (104, 105)
    with pytest.raises(ValueError, match="does not go through the chat template"):
        toy_pair.encode(prompt, thinking=True, **settings)


@pytest.mark.parametrize("ids", [[1.7, 2.2], ["1", "2"], [10**6], [-1], [512]])
def test_ids_that_the_target_has_no_row_for_are_refused(toy_pair, ids):
    with pytest.raises(ValueError, match=r"whole numbers only|not in this target's 0 to 511"):
        toy_pair.encode(ids)


def test_chat_messages_without_a_template_are_refused(toy_pair):
    with pytest.raises(ValueError, match="messages need the template"):
        toy_pair.encode([{"role": "user", "content": "hi"}], chat=False)


def test_a_target_that_lacks_weights_is_refused_by_their_names(qwen3_toy, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(qwen3_toy.target, tmp_path / "target")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks weights.*layers\.2\.mlp\.up_proj"):
        dl.load_pair(target=folder, draft=qwen3_toy.draft)
    (folder / "model.safetensors").write_bytes(b"\x00" * 40)
    with pytest.raises(ValueError, match="cannot be loaded"):
        dl.load_pair(target=folder, draft=qwen3_toy.draft)


def test_a_pair_without_a_tokenizer_takes_ids_and_says_so_for_text():
    pair = scripted_pair(tokenizer=None)
    assert pair.encode((1, 2)).ids == (1, 2)
    assert pair.text((1, 2)) == ""
    with pytest.raises(ValueError, match="no tokenizer"):
        pair.encode("text")


class Mapped(dict):
    pass


@pytest.mark.parametrize(
    "encoded",
    [[1, 2], [[1, 2]], {"input_ids": [1, 2]}, Mapped(input_ids=[[1, 2]])],
)
def test_whatever_a_tokenizer_returns_becomes_one_flat_tuple(encoded):
    assert flat_ids(encoded) == (1, 2)


def test_a_tensor_of_ids_becomes_one_flat_tuple():
    import torch

    assert flat_ids(torch.tensor([[1, 2]])) == (1, 2)
    assert flat_ids({"input_ids": torch.tensor([1])}) == (1,)


HARD = "naïve 机器学习 한국어 🙂👩‍👩‍👧 ď"


def test_pieces_join_to_the_text_and_never_show_half_a_character():
    pair = scripted_pair()
    tokens = tuple(HARD.encode())
    pieces = pair.pieces(tokens)
    assert len(pieces) == len(tokens)
    assert "".join(pieces) == pair.text(tokens) == HARD
    assert not any("\ufffd" in piece for piece in pieces)
    broken = tokens[:-1]  # the last character is incomplete, and stays so in both
    assert "".join(pair.pieces(broken)) == pair.text(broken)


def test_an_end_token_is_in_the_tokens_and_not_in_the_text(qwen3_toy):
    pair = qwen3_toy.load()
    tokens = (*b"ok", END)
    assert pair.text(tokens) == "ok"
    assert pair.pieces(tokens) == ("o", "k", "")
    assert byte_tokenizer().eos_token_id == END
