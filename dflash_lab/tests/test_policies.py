"""Policies by hand: what each decides, that the text stays, and that a policy says who it is."""

import warnings
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from dflash_lab import DecodeConfig, decode
from dflash_lab.decoding import AcceptanceWarning
from dflash_lab.policies import (
    BackOff,
    Confidences,
    ConfidenceThreshold,
    Fixed,
    PastBlock,
    Steering,
    SurvivalTimesCost,
    describe_policy,
)
from dflash_lab.tests.toys import (
    ScriptedModels,
    ScriptedSession,
    cut,
    noise,
    scripted_greedy,
    scripted_pair,
)
from dflash_lab.tests.variants import prompts, text, variant

PROMPT = (5, 3, 8, 13, 21)


@dataclass(frozen=True)
class Alternating:
    """Written as a user would: sizes 2 and 8 in turn, and one row fewer than there are."""

    name: ClassVar[str] = "alternating"
    version: ClassVar[str] = "2026-01"

    def width(self, history):
        return 8 if len(history) % 2 else 2

    def rows(self, confidences):
        return len(confidences)


def past(accepted, block_size=8, rows=None, times=8):
    return [PastBlock(block_size=block_size, rows=rows or block_size, accepted=accepted)] * times


def quiet(pair, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AcceptanceWarning)
        return decode(pair, PROMPT, DecodeConfig(**settings))


# --- what each decides --------------------------------------------------------------------------


def test_a_threshold_verifies_up_to_the_first_token_the_draft_is_unsure_of():
    policy = ConfidenceThreshold(threshold=0.5)
    assert policy.rows((0.9, 0.5, 0.4, 0.9)) == 3
    assert policy.rows((0.4, 0.9)) == 1
    assert policy.rows((0.9, 0.9)) == 3
    assert policy.rows((float("nan"), 0.9)) == 1


def test_survival_times_cost_weighs_expected_tokens_against_seconds():
    # expected tokens by rows: 1, 1.8, 2.2, 2.3; tokens a second: 1, 1.2, 1.22, 0.77
    costs = {(4, 1): 1.0, (4, 2): 1.5, (4, 3): 1.8, (4, 4): 3.0}
    policy = SurvivalTimesCost(costs=costs)
    assert policy.rows((0.8, 0.5, 0.25)) == 3
    assert SurvivalTimesCost(costs=costs | {(4, 4): 1.8}).rows((0.8, 0.5, 0.25)) == 4
    assert policy.rows((0.1, 0.1, 0.1)) == 1
    with pytest.raises(ValueError, match="no seconds for block size 3 with 1 rows"):
        policy.rows((0.5, 0.5))


def test_back_off_halves_steps_and_grows_as_its_limits_say():
    policy = BackOff(start=8, ceiling=16)
    assert policy.width(()) == 8
    assert policy.width(past(0)) == 4  # draft rate below 0.3: halved from 8 on
    assert policy.width(past(0, block_size=6)) == 4
    assert policy.width(past(0, block_size=5)) == 4  # and never below the floor
    assert policy.width(past(3)) == 6  # 3 of 7: below one half
    assert policy.width(past(5)) == 8
    assert policy.width(past(7)) == 10
    assert policy.width(past(15, block_size=16)) == 16  # the ceiling
    assert policy.width(past(7, times=7)) == 8  # too few to judge by
    assert policy.width(past(0, times=4) + past(7, block_size=10, times=7)) == 10
    assert policy.width(past(0, rows=1)) == 4  # nothing verified is nothing accepted


def test_back_off_refuses_limits_that_are_not_in_order():
    with pytest.raises(ValueError, match="ascending order"):
        BackOff(start=32, ceiling=16)


def test_fixed_leaves_open_what_it_was_not_given():
    assert Fixed().width(()) is None
    assert Fixed().rows((0.5, 0.5)) is None
    assert Fixed(verify_cap=9).rows((0.5, 0.5)) == 3


# --- steering -----------------------------------------------------------------------------------


def test_a_policy_may_not_ask_beyond_the_decodes_block_size_or_the_block():
    too_wide = Steering(Fixed(block_size=16), 8)
    with pytest.raises(ValueError, match=r"width\(\) of the policy 'fixed' is 16; expected 1 to 8"):
        too_wide.width()

    class Greedy(Alternating):
        def rows(self, confidences):
            return len(confidences) + 2

    with pytest.raises(ValueError, match=r"rows\(\) of the policy .* is 5; expected 1 to 4"):
        Steering(Greedy(), 8).rows(4, lambda: (0.1, 0.1, 0.1))


def test_confidences_are_asked_for_at_the_first_look_and_once():
    asked = []
    view = Confidences(3, lambda: asked.append(1) or [0.1, 0.2, 0.3])
    assert len(view) == 3
    assert asked == []
    assert (view[0], view[-1], list(view)) == (0.1, 0.3, [0.1, 0.2, 0.3])
    assert asked == [1]


@pytest.mark.parametrize("lacks", ["name", "version"])
def test_a_policy_without_name_or_version_is_refused(lacks):
    policy = type("Mine", (Alternating,), {lacks: None})()
    with pytest.raises(ValueError, match=f"has no {lacks}"):
        DecodeConfig(policy=policy)


def test_a_policy_without_a_hook_is_refused():
    with pytest.raises(ValueError, match="neither width"):
        DecodeConfig(policy=type("Idle", (), {"name": "idle", "version": "1"})())


# --- live ---------------------------------------------------------------------------------------


class TellingSession(ScriptedSession):
    """A scripted session whose draft is sure of the first three tokens of a block."""

    def confidences(self, block):
        self.told = getattr(self, "told", 0) + 1
        return [0.9 if k < 3 else 0.1 for k in range(len(block) - 1)]


class TellingModels(ScriptedModels):
    def session(self, draft_window, speculate):
        self.sessions.append(TellingSession(self, draft_window, speculate))
        return self.sessions[-1]


def telling_pair(script):
    return replace(scripted_pair(), models=TellingModels(script=script))


POLICIES = [
    Fixed(block_size=4),
    Fixed(verify_cap=2),
    ConfidenceThreshold(threshold=0.5),
    BackOff(start=6, ceiling=8),
    SurvivalTimesCost(costs={(8, rows): 1 + 0.2 * rows for rows in range(1, 9)}),
    Alternating(),
]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.parametrize("script", [cut(2), cut(6), noise(0.6)])
def test_no_policy_changes_the_text(policy, script):
    pair = telling_pair(script)
    for limit in (1, 2, 9, 40):
        trace = quiet(pair, block_size=8, max_new_tokens=limit, policy=policy)
        assert trace.tokens == scripted_greedy(pair, PROMPT, limit)


def test_fewer_rows_judge_fewer_drafts_and_the_block_keeps_its_size():
    pair = telling_pair(cut(6))
    policy = ConfidenceThreshold(threshold=0.5)
    trace = quiet(pair, block_size=8, max_new_tokens=30, policy=policy)
    assert {block.block_size for block in trace.blocks} == {8}
    assert {(block.rows, len(block.drafted)) for block in trace.blocks} == {(4, 3)}
    assert {block.accepted for block in trace.blocks} == {3}


def test_sizes_follow_the_history():
    trace = quiet(telling_pair(cut(1)), block_size=8, max_new_tokens=9, policy=Alternating())
    assert [(block.block_size, block.rows) for block in trace.blocks[:4]] == [
        (2, 1),
        (8, 7),
        (2, 1),
        (8, 7),
    ]


def test_a_session_is_asked_for_confidences_only_by_a_policy_that_looks():
    for policy, looks in [(None, False), (Fixed(verify_cap=2), False), (POLICIES[2], True)]:
        pair = telling_pair(cut(6))
        quiet(pair, block_size=8, max_new_tokens=20, policy=policy)
        assert hasattr(pair.models.sessions[-1], "told") == looks


def test_a_backend_that_tells_no_confidences_is_refused_before_the_first_token():
    pair = scripted_pair(cut(3))
    with pytest.raises(ValueError, match="looks at the draft's confidences"):
        quiet(pair, block_size=8, policy=ConfidenceThreshold(threshold=0.5))
    assert pair.models.sessions[-1].calls == []


def test_the_trace_names_the_policy_and_its_settings():
    policy = BackOff(start=6, ceiling=8)
    trace = quiet(telling_pair(cut(2)), block_size=8, max_new_tokens=9, policy=policy)
    assert trace.policy == "back-off 1"
    assert describe_policy(trace.request.policy) == {
        "name": "back-off",
        "version": "1",
        "settings": {"start": 6, "ceiling": 8, "floor": 4, "blocks": 8},
    }
    assert quiet(telling_pair(cut(2)), max_new_tokens=3).policy is None


def test_torch_confidences_are_the_highest_probability_of_each_slot():
    import torch

    pair, prompt = variant("softcap"), prompts(1)[0]
    seen = []

    class Watching(Alternating):
        def rows(self, confidences):
            seen.append(tuple(confidences))

        width = None

    config = DecodeConfig(block_size=4, max_new_tokens=8, policy=Watching())
    trace = decode(pair, prompt, config)
    assert trace.tokens == text(prompt, 8)
    models = pair.models
    session = models.session(None, True)
    session.prefill(prompt)
    raw = session.draft(trace.tokens[0], 4).raw
    sure = models.draft.logits(raw).softmax(-1).amax(-1)
    assert seen[0] == pytest.approx(sure.tolist(), abs=1e-6)
    assert len(seen) == len(trace.blocks)
    assert torch.isfinite(sure).all()
