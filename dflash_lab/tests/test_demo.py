"""In which dtype the demo measures: bfloat16, unless the machine has to take it apart."""

import pytest

from dflash_lab import demo
from dflash_lab.store.parts import open_part
from dflash_lab.tests.runs import request_of, write_run


def told(monkeypatch, tmp_path, bfloat16, float32):
    """The demo's sweep where a block takes so many seconds, and what was said."""
    seconds, said = {"bfloat16": bfloat16, "float32": float32}, []
    monkeypatch.setattr(demo, "block_seconds", seconds.__getitem__)
    return demo.demo_sweep(tmp_path / "demo", said.append), said


@pytest.mark.parametrize("bfloat16", [0.05, 0.14])
def test_throughput_is_in_bfloat16_where_its_blocks_take_less_than_half_as_long_again(
    monkeypatch, tmp_path, bfloat16
):
    config, said = told(monkeypatch, tmp_path, bfloat16, 0.1)
    assert config == demo.SWEEP
    assert (config.dtype, config.plain_dtypes) == ("bfloat16", ("float32",))
    assert not any("measured" in line for line in said)


def test_where_bfloat16_is_slower_throughput_is_in_float32_and_both_plain_arms_stay(
    monkeypatch, tmp_path
):
    config, said = told(monkeypatch, tmp_path, 0.36, 0.09)
    assert (config.dtype, config.plain_dtypes) == ("float32", ("bfloat16",))
    assert said[-1] == (
        "a block of 16 takes 360 ms in bfloat16 and 90 ms in float32 here: "
        "throughput is measured in float32"
    )


@pytest.mark.parametrize(("dtype", "plain"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_a_demo_that_was_killed_goes_on_in_its_dtype_and_times_nothing(
    monkeypatch, tmp_path, dtype, plain
):
    for name, made_in, size in (("a", dtype, 4), ("b", plain, 1)):
        asked = request_of(["p0"], dtype=made_in, block_size=size)
        cell = {"id": name, "request": asked, "requested_block_sizes": [size], "decodes": 1}
        open_part(tmp_path / "demo" / "cells" / name, cell).add_process({})
    config, said = told(monkeypatch, tmp_path, 0.9, 0.1)
    assert (config.dtype, config.plain_dtypes, said) == (dtype, (plain,), [])


def test_a_finished_demo_keeps_its_dtype(monkeypatch, tmp_path):
    write_run(tmp_path / "demo", prompts=2, block_sizes=(1, 4), windows=())
    assert told(monkeypatch, tmp_path, 0.9, 0.1) == (demo.SWEEP, [])
