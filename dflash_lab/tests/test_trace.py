"""Records state facts and derive the rest."""

import pytest

from dflash_lab.accept import Verdict
from dflash_lab.trace import BlockRecord, StageSeconds, tau


def block(accepted, emitted=None, size=4, seconds=0.5):
    drafted = tuple(range(10, 10 + size - 1))
    right = drafted[:accepted]
    posterior = (*right, *(99,) * (size - accepted))
    return BlockRecord(
        index=0,
        start=5,
        anchor=1,
        block_size=size,
        verdict=Verdict(drafted=drafted, posterior=posterior),
        accepted=accepted,
        emitted=accepted + 1 if emitted is None else emitted,
        draft_cache_tokens=5,
        draft_cache_bytes=40,
        seconds=StageSeconds(total=seconds),
    )


def test_tau_of_the_hand_made_trace_counts_the_targets_own_token():
    assert tau([block(3), block(0), block(1), block(2)]) == 2.5


def test_a_cut_block_changes_tau_only_where_it_is_asked_for():
    blocks = [block(3), block(0), block(1), block(2)]
    with_cut = [*blocks, block(3, emitted=2)]
    assert tau(with_cut) == tau(blocks) == 2.5
    assert tau(with_cut, cut_blocks=True) == 14 / 5


def test_tau_of_nothing_is_none_and_not_nan():
    assert tau([]) is None
    assert tau([block(2, emitted=1)]) is None


@pytest.mark.parametrize(
    ("accepted", "emitted", "cut"), [(2, 3, False), (2, 2, True), (0, 1, False)]
)
def test_a_block_is_cut_where_the_output_ended_inside_it(accepted, emitted, cut):
    assert block(accepted, emitted).cut is cut


def test_emitted_tokens_are_the_accepted_drafts_and_one_of_the_targets_own():
    assert block(2).tokens == (10, 11, 99)
    assert block(2, emitted=1).tokens == (10,)
    assert block(0).tokens == (99,)
