"""The chosen size in a draft's config.json, and out of it again byte for byte."""

import json
import shutil

import pytest

from dflash_lab.checkpoint import draft_fingerprint, read_draft_config
from dflash_lab.locking import BEFORE, lock_block_size, unlock_block_size, ways_to_set
from dflash_lab.tests.toys import draft_json


def draft_folder(folder, raw):
    """A draft's folder whose config.json is that text or mapping; its weights are never read."""
    folder.mkdir(parents=True)
    text = raw if isinstance(raw, str) else json.dumps(raw)
    (folder / "config.json").write_bytes(text.encode())
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def nested(**inner):
    base = draft_json()
    del base["block_size"]
    return base | {"dflash_config": base["dflash_config"] | inner}


FORMS = {
    "top level": (draft_json(block_size=16), ("block_size",)),
    "nested": (nested(block_size=16), ("dflash_config.block_size",)),
    "both": (
        draft_json(block_size=16) | {"dflash_config": nested(block_size=16)["dflash_config"]},
        ("dflash_config.block_size", "block_size"),
    ),
    "nowhere": (nested(), ("block_size",)),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_size_is_written_where_the_draft_keeps_it_and_the_undo_restores_every_byte(
    tmp_path, form
):
    raw, keys = FORMS[form]
    folder = draft_folder(tmp_path / "draft", json.dumps(raw, indent=7) + "\n\n")
    before, name = (folder / "config.json").read_bytes(), draft_fingerprint(folder)
    locked = lock_block_size(folder, 6)
    assert (locked.keys, locked.before, locked.copied) == (keys, 16, False)
    config = read_draft_config(folder)
    assert (config.block_size, config.trained_block_size) == (6, 16)
    assert not [note for note in config.notes if "twice" in note]
    assert json.loads((folder / "config.json").read_text())["trained_block_size"] == 16
    assert draft_fingerprint(folder) == name
    assert unlock_block_size(folder) == folder / "config.json"
    assert (folder / "config.json").read_bytes() == before
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_locking_twice_keeps_the_first_file_and_the_trained_size(tmp_path):
    folder = draft_folder(tmp_path / "draft", draft_json(block_size=16))
    before = (folder / "config.json").read_bytes()
    lock_block_size(folder, 6)
    again = lock_block_size(folder, 12)
    assert (again.before, again.trained_block_size) == (6, 16)
    assert read_draft_config(folder).trained_block_size == 16
    unlock_block_size(folder)
    assert (folder / "config.json").read_bytes() == before


def test_a_trained_size_that_the_draft_tells_itself_stays(tmp_path):
    folder = draft_folder(tmp_path / "draft", nested(block_size=8, trained_block_size=12))
    lock_block_size(folder, 10)
    raw = json.loads((folder / "config.json").read_text())
    assert raw["dflash_config"]["trained_block_size"] == 12 and "trained_block_size" not in raw


def test_a_hub_snapshot_is_never_edited_and_its_copy_holds_files(tmp_path):
    blob = tmp_path / "cache" / "blobs" / "abc"
    blob.parent.mkdir(parents=True)
    blob.write_text(json.dumps(draft_json(block_size=16)))
    snapshot = draft_folder(tmp_path / "cache" / "snapshots" / "0123", draft_json())
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(blob)
    stored = blob.read_bytes()
    with pytest.raises(ValueError, match=r"snapshot in a hub's cache.*copy_to=, or --copy-to"):
        lock_block_size(snapshot, 4)
    locked = lock_block_size(snapshot, 4, copy_to=tmp_path / "mine")
    assert (locked.folder, locked.copied) == (tmp_path / "mine", True)
    assert blob.read_bytes() == stored and not (snapshot / BEFORE).exists()
    assert read_draft_config(tmp_path / "mine").block_size == 4
    assert not (tmp_path / "mine" / "config.json").is_symlink()
    with pytest.raises(ValueError, match="is there already"):
        lock_block_size(snapshot, 4, copy_to=tmp_path / "mine")


def test_what_would_do_harm_is_refused_and_changes_nothing(tmp_path):
    folder = draft_folder(tmp_path / "draft", draft_json(block_size=16))
    before = (folder / "config.json").read_bytes()
    with pytest.raises(ValueError, match="32 is above the 16 that this draft was trained with"):
        lock_block_size(folder, 32)
    with pytest.raises(ValueError, match="nothing is locked"):
        unlock_block_size(folder)
    assert (folder / "config.json").read_bytes() == before and not (folder / BEFORE).exists()
    lock_block_size(folder, 4)
    edited = (folder / "config.json").read_text().replace("silu", "silu") + " "
    (folder / "config.json").write_text(edited)
    with pytest.raises(ValueError, match=r"edited after it was locked.*before-lock"):
        unlock_block_size(folder)
    assert (folder / "config.json").read_text() == edited


def test_the_ways_to_set_it_by_hand_name_the_window_too():
    assert ways_to_set(6) == {
        "python": "DecodeConfig(block_size=6)",
        "flag": "--block-size 6",
        "variable": "DFLASH_BLOCK_SIZE=6",
    }
    assert ways_to_set(6, 64)["flag"] == "--block-size 6 --draft-sliding-window-size 64"


def test_a_copied_folder_may_be_asked_for(tmp_path):
    folder = draft_folder(tmp_path / "draft", draft_json(block_size=16))
    locked = lock_block_size(folder, 2, copy_to=tmp_path / "copy")
    assert read_draft_config(folder).block_size == 16
    shutil.rmtree(folder)
    assert read_draft_config(locked.folder).block_size == 2
