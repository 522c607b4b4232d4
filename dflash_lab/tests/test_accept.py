"""Decisions on whole numbers."""

import pytest

from dflash_lab.accept import Verdict, kept, matched_prefix, unrejected_prefix


@pytest.mark.parametrize(
    ("drafted", "posterior", "accepted"),
    [
        ((), (7,), 0),
        ((1, 2, 3), (1, 2, 3, 4), 3),
        ((1, 2, 3), (9, 2, 3, 4), 0),
        ((1, 2, 3), (1, 9, 3, 4), 1),
        ((1, 2, 3), (1, 2, 9, 4), 2),
    ],
)
def test_acceptance_ends_at_the_first_token_the_target_would_not_have_chosen(
    drafted, posterior, accepted
):
    assert matched_prefix(Verdict(drafted=drafted, posterior=posterior)) == accepted


@pytest.mark.parametrize(
    ("odds", "draws", "accepted"),
    [
        ((), (), 0),
        ((2.0, 1.0, 0.5), (0.99, 0.99, 0.49), 3),
        ((2.0, 1.0, 0.5), (0.99, 0.99, 0.5), 2),  # the draw has to be below
        ((0.0, 1.0, 1.0), (0.0, 0.0, 0.0), 0),
        ((1.0, float("nan"), 1.0), (0.0, 0.0, 0.0), 1),
    ],
)
def test_rejection_keeps_drafts_up_to_the_first_whose_draw_is_not_below_p_over_q(
    odds, draws, accepted
):
    drafted = tuple(range(len(odds)))
    verdict = Verdict(drafted=drafted, posterior=(*drafted, 9), odds=odds, draws=draws)
    assert unrejected_prefix(verdict) == accepted


def test_a_verdict_without_odds_cannot_be_judged_by_rejection():
    with pytest.raises(ValueError, match=r"shorter|longer"):
        unrejected_prefix(Verdict(drafted=(1,), posterior=(1, 2)))


def test_a_verdict_of_unequal_lengths_is_a_bug_and_not_a_short_match():
    with pytest.raises(ValueError, match=r"shorter|longer"):
        matched_prefix(Verdict(drafted=(1, 2), posterior=(1, 2)))


@pytest.mark.parametrize(
    ("stops", "budget", "count"),
    [((), 9, 4), ((), 4, 4), ((), 2, 2), ((5,), 9, 1), ((7,), 9, 3), ((7,), 2, 2), ((99,), 9, 4)],
)
def test_a_block_is_kept_up_to_its_first_stop_token_and_within_the_budget(stops, budget, count):
    assert kept((5, 6, 7, 8), stops, budget) == count
