"""Where a block size comes from: one order, whichever of the sources are there."""

from dataclasses import replace
from itertools import combinations

import pytest

from dflash_lab import DecodeConfig, SweepConfig, decode, sweep
from dflash_lab.checkpoint import parse_draft_config
from dflash_lab.decoding import BlockSizeWarning, choose_block_size, resolve_request
from dflash_lab.tests.toys import draft_json, scripted_pair

# A source, the size it names here, and what a trace calls it; the highest first.
SOURCES = {
    "argument": (2, "argument"),
    "flag": ("3", "flag --block-size"),
    "variable": ("4", "DFLASH_BLOCK_SIZE"),
    "sweep": (5, "sweep"),
    "nested": (6, "draft config: dflash_config.block_size"),
    "top": (7, "draft config: block_size"),
}
PRESENT = [names for count in range(7) for names in combinations(SOURCES, count)]


def pair_of(**config):
    """A scripted pair whose draft has that configuration, None being a key that is not there."""
    return replace(scripted_pair(), draft_config=parse_draft_config(draft_json(**config)))


def pair_with(present):
    size = {name: SOURCES[name][0] if name in present else None for name in ("nested", "top")}
    nested = draft_json()["dflash_config"] | {"block_size": size["nested"]}
    return pair_of(block_size=size["top"], dflash_config=nested)


@pytest.mark.parametrize("present", PRESENT, ids="+".join)
def test_of_the_sources_that_are_there_the_highest_names_the_size(present):
    pair = pair_with(present)
    value, name = next((SOURCES[one] for one in SOURCES if one in present), (16, "default"))
    called = {one: SOURCES[one][0] for one in present if one not in ("nested", "top")}
    size, source = choose_block_size(**called)
    asked = {} if size is None else {"block_size": size, "block_size_source": source}
    request = resolve_request(pair, DecodeConfig(**asked))
    assert (request.block_size, request.block_size_source) == (int(value), name)
    assert request.block_size_requested == request.block_size
    assert choose_block_size(pair.draft_config, **called)[0] == request.block_size


@pytest.mark.parametrize("text", ["", " ", "abc", "0", "-1", "12.5", "8,", "1e1", "0x8", "\uff18"])
def test_text_that_is_no_whole_number_from_1_is_refused_by_the_name_of_its_source(text):
    with pytest.raises(ValueError, match=r"^flag --block-size is .*whole number from 1"):
        choose_block_size(flag=text, variable="4")
    with pytest.raises(ValueError, match=r"^DFLASH_BLOCK_SIZE is .*whole number from 1"):
        choose_block_size(variable=text)
    assert choose_block_size(flag=" 8\n", variable=text) == (8, "flag")  # it is not looked at


def test_only_what_is_typed_may_be_text():
    for source in ("argument", "sweep"):
        with pytest.raises(ValueError, match=rf"^{source} is '8'"):
            choose_block_size(**{source: "8"})


def test_library_functions_do_not_read_the_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("DFLASH_BLOCK_SIZE", "3")
    pair = scripted_pair(block_size=8)
    assert decode(pair, (1, 2), DecodeConfig(max_new_tokens=4)).block_size == 8
    config = SweepConfig(block_sizes=(4,), max_prompts=1, max_new_tokens=4)
    assert [cell.block_size for cell in sweep(config, tmp_path, pair=pair).cells] == [4]


@pytest.mark.parametrize(
    ("config", "requested"),
    [({}, 32), ({"block_size": 32}, None), ({"trained_block_size": 24, "block_size": 28}, None)],
    ids=["asked", "locked above", "both in the config"],
)
def test_above_the_trained_size_one_warning_names_both_numbers_and_how_to_insist(config, requested):
    pair = pair_of(**{"block_size": 16, "trained_block_size": 16} | config)
    trained = pair.draft_config.trained_block_size
    wanted = requested or pair.draft_config.block_size
    words = rf"block size {wanted} .* {trained} that .*beyond_trained=True \(--beyond-trained\)"
    with pytest.warns(BlockSizeWarning, match=words) as heard:
        trace = decode(pair, (1, 2), DecodeConfig(block_size=requested, max_new_tokens=30))
    assert len(heard) == 1
    assert (trace.block_size_requested, trace.block_size) == (wanted, trained)
    assert {block.block_size for block in trace.blocks} == {trained}
    insisting = DecodeConfig(block_size=requested, max_new_tokens=40, beyond_trained=True)
    trace = decode(pair, (1, 2), insisting)
    assert {block.block_size for block in trace.blocks} == {wanted}
    assert trace.request.beyond_trained
    at_it = DecodeConfig(block_size=trained, beyond_trained=True)
    assert not resolve_request(pair, at_it).beyond_trained


def test_a_config_locked_below_the_trained_size_leaves_room_up_to_it():
    pair = pair_of(block_size=4, trained_block_size=16)
    assert resolve_request(pair, DecodeConfig()).block_size == 4
    assert resolve_request(pair, DecodeConfig(block_size=16)).block_size == 16
