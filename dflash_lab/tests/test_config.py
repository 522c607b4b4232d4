"""What enters is checked where it enters."""

import json

import numpy as np
import pytest

from dflash_lab import DecodeConfig, PairSpec, SweepConfig
from dflash_lab.config import read_sweep


@pytest.mark.parametrize("value", [0, -1, 7.5, "8", "x", True, 2.0])
def test_a_block_size_that_is_no_whole_number_from_1_is_refused(value):
    with pytest.raises(ValueError, match=r"block_size is .*expected a whole number from 1"):
        DecodeConfig(block_size=value)
    with pytest.raises(ValueError, match="block_size"):
        SweepConfig(block_sizes=(4, value))


@pytest.mark.parametrize("value", [0, -1, "64", 1.5, False])
def test_a_window_that_is_no_whole_number_from_1_is_refused(value):
    with pytest.raises(ValueError, match=r"draft_window is .*expected a whole number from 1"):
        DecodeConfig(draft_window=value)
    with pytest.raises(ValueError, match="draft_window"):
        SweepConfig(draft_windows=(None, value))


def test_whole_numbers_of_other_libraries_become_plain_ones():
    config = DecodeConfig(block_size=np.int64(8), draft_window=np.int32(64))
    assert type(config.block_size) is int
    assert type(config.draft_window) is int


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -0.1}, "temperature is -0.1; expected a number from 0; 0 is greedy"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": True}, "temperature is True"),
        ({"top_k": 0}, "top_k is 0; expected a whole number from 1"),
        ({"top_p": 0}, "top_p is 0; expected a number above 0 and up to 1"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"min_p": -0.1}, "min_p is -0.1; expected a number from 0 to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0; expected a number above 0"),
        ({"rule": "typical"}, "expected one of match, rejection"),
        ({"proposal": "beam"}, "expected one of argmax, sample"),
        ({"probabilities": "yes"}, "probabilities is 'yes'; expected True or False"),
        ({"stop_strings": "end"}, "stop_strings is 'end'; expected a list"),
        ({"stop_strings": ("end", "")}, "stop_strings has ''; expected text"),
        ({"stop_strings": (5,)}, "stop_strings has 5"),
        ({"rule": "rejection"}, "rule is 'rejection'"),
        ({"proposal": "sample"}, "proposal is 'sample'"),
        ({"timing": "fast"}, "whole, stages"),
        ({"stop_tokens": (-1,)}, "stop_tokens"),
        ({"stop_tokens": 5}, r"stop_tokens is 5; expected a list"),
        ({"seed": -1}, "seed is -1"),
        ({"block_size_source": "moon"}, "expected one of argument, flag, variable, sweep"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(settings, words):
    with pytest.raises(ValueError, match=words):
        DecodeConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"block_sizes": ()}, "block_sizes is empty"),
        ({"draft_windows": ()}, "draft_windows is empty"),
        ({"repeats": 0}, "repeats"),
        ({"block_sizes": 8}, r"block_sizes is 8; expected a list"),
        ({"categories": ()}, "categories is empty"),
        ({"timing": "stages", "library_baseline": True}, "no stages to time"),
        ({"pair": PairSpec(target="t", draft="d"), "dtype": "float32"}, "stand in the PairSpec"),
        ({"max_prompts": 0}, "max_prompts"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"backend": "jax"}, "backend is 'jax'"),
    ],
)
def test_a_sweep_that_cannot_be_run_is_refused_by_name(settings, words):
    with pytest.raises(ValueError, match=words):
        SweepConfig(**settings)


def test_a_pair_on_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="backend is 'jax'"):
        PairSpec(target="t", draft="d", backend="jax")


def test_a_sweep_file_says_what_a_sweep_config_says(tmp_path):
    toml, other = tmp_path / "sweep.toml", tmp_path / "sweep.json"
    toml.write_text(
        'block_sizes = [1, 8]\ndraft_windows = ["full", 64]\nthinking = false\n'
        '[pair]\ntarget = "t"\ndraft = "d"\ndtype = "bfloat16"\n'
    )
    read = read_sweep(toml)
    assert (read.block_sizes, read.draft_windows, read.thinking) == ([1, 8], [None, 64], False)
    assert read.pair == PairSpec(target="t", draft="d", dtype="bfloat16")
    assert read.repeats == SweepConfig().repeats
    other.write_text(json.dumps({"draft_windows": [None, 64], "pair": "smollm2"}))
    assert read_sweep(other) == SweepConfig(draft_windows=[None, 64])


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("s.toml", "block_sizes = [", "s.toml cannot be read"),
        ("s.json", "[1]", "s.json holds a list"),
        ("s.yaml", "", r"expected a .toml or .json file"),
        (
            "s.toml",
            "blocksize = 8",
            "unknown settings blocksize; known are backend, beyond_trained",
        ),
        ("s.toml", "block_sizes = [4, 0]", r"s.toml: block_size is 0; expected a whole number"),
        ("s.json", '{"pair": {"target": "t"}}', "s.json: .*draft"),
    ],
)
def test_a_faulty_sweep_file_is_one_error_that_names_it(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=words):
        read_sweep(tmp_path / name)
