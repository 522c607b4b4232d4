"""What replay and prediction promise, measured on the embedded pair (`make test-thorough`).

Ratios of times taken in one process; give them a machine with nothing else to do.
"""

import itertools
from time import perf_counter

import pytest

import dflash_lab as dl
from dflash_lab.replay.maps import acceptance_map, texts_of

pytestmark = pytest.mark.thorough
SIZES = (1, 2, 4, 6, 8, 12, 16)


def seconds_of(work):
    start = perf_counter()
    work()
    return perf_counter() - start


def test_45_cells_are_replayed_in_a_tenth_of_the_time_that_decoding_them_takes():
    """Live time is that of nine cells, scaled to 45; the greedy texts are given to the replay."""
    pair = dl.load_pair("smollm2", dtype="float32", device="cpu")
    texts = texts_of(pair, dl.load_prompts(limit=4), 64)
    sizes, windows, sampled = range(2, 17), (None, 64, 16), (3, 9, 15)

    def live(size, window):
        config = dl.DecodeConfig(block_size=size, draft_window=window, max_new_tokens=64)
        for text in texts:
            assert dl.decode(pair, list(text.prompt_ids), config).tokens == text.tokens

    def replay():
        acceptance_map(pair, texts, sizes, windows)

    live(2, None)  # warm
    decoding, replaying = 0.0, []
    for place, (size, window) in enumerate(itertools.product(sampled, windows)):
        decoding += seconds_of(lambda size=size, window=window: live(size, window))
        if place % 4 == 0:
            replaying.append(seconds_of(replay))
    scaled, replayed = decoding / 9 * 45, sum(replaying) / len(replaying)
    print(f"45 cells: {scaled:.0f} s live, scaled from 9; {replayed:.1f} s by replay")
    assert replayed <= 0.1 * scaled


def test_a_size_chosen_by_prediction_on_half_of_the_prompts_holds_on_the_other_half(tmp_path):
    """Acceptance by replay and a cost table choose; seven measured cells in bfloat16 judge."""
    pair = dl.load_pair("smollm2", dtype="bfloat16", device="cpu")
    prompts = dl.load_prompts(limit=24)
    chosen_on = texts_of(pair, prompts[::2], 48)
    costs = dl.measure_costs(pair, SIZES, contexts=(64, 128), repeats=5)
    made = dl.recommend(acceptance=acceptance_map(pair, chosen_on, SIZES), costs=costs)
    config = dl.SweepConfig(
        dtype="bfloat16", device="cpu", block_sizes=SIZES, max_prompts=24, max_new_tokens=48
    )
    run = dl.sweep(config, tmp_path / "run")
    others = {prompt.id for prompt in prompts[1::2]}
    held = dl.confirm(run, made.choice.block_size, prompts=others)
    print(f"chosen {made.choice.block_size}; {held}")
    assert held.prompts == 12
    assert held.low <= 0.03
