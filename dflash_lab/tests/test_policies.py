"""Policies by hand: what each decides, that the text stays, and that a policy says who it is."""

import json
import warnings
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from dflash_lab import DecodeConfig, SweepConfig, cli, decode, open_run, recommend, sweep
from dflash_lab.analyse import cell_frame, comparable, contest
from dflash_lab.costs import write_costs
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
    read_policy,
)
from dflash_lab.sweeps import status
from dflash_lab.tests.test_recommendation import table
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


# --- by text, in sweeps and on the command line -------------------------------------------------

ALTERNATING = Alternating()  # found as MODULE:NAME
HERE = __name__


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("none", None),
        ("fixed", Fixed()),
        ("fixed:block_size=4,verify_cap=2", Fixed(block_size=4, verify_cap=2)),
        ("confidence:threshold=0.5", ConfidenceThreshold(threshold=0.5)),
        ("back-off:start=8,ceiling=16", BackOff(start=8, ceiling=16)),
        ("survival", SurvivalTimesCost(costs={(1, 1): 1.0})),
        (f"{HERE}:ALTERNATING", ALTERNATING),
        (f"{HERE}:Alternating", ALTERNATING),
    ],
)
def test_a_policy_is_read_from_text(text, policy):
    assert read_policy(text, {(1, 1): 1.0}) == policy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("treshold", "the policy is 'treshold'; expected none, fixed, confidence"),
        ("survival", "needs a cost table"),
        ("confidence", "cannot be made"),
        ("confidence:threshold=2", "expected a probability"),
        ("confidence:threshold=high", "has the setting 'threshold=high'"),
        ("fixed:size=4", "cannot be made"),
        ("no_such_module:Mine", "cannot be imported"),
        (f"{HERE}:Missing", "cannot be imported"),
        (f"{HERE}:PROMPT", "has no name"),
    ],
)
def test_text_that_names_no_policy_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        read_policy(text)


@pytest.fixture
def prompt_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"id": f"p{n}", "prompt": f"say {n}"}) for n in range(2)))
    return str(path)


def steered(prompt_file, *policies, **settings):
    usual = {"block_sizes": (1, 4, 8), "prompts": prompt_file, "max_new_tokens": 12}
    return SweepConfig(policies=policies, **(usual | settings))


def test_a_policy_makes_cells_of_its_own_and_leaves_the_others_as_they_were(tmp_path, prompt_file):
    policy = ConfidenceThreshold(threshold=0.5)
    plain = sweep(steered(prompt_file, None), tmp_path / "a", pair=telling_pair(cut(6)))
    both = sweep(steered(prompt_file, None, policy), tmp_path / "b", pair=telling_pair(cut(6)))
    assert {cell.id for cell in plain.cells} < {cell.id for cell in both.cells}
    made = [(cell.block_size, cell.policy) for cell in both.cells if cell.policy]
    assert made == [(4, "confidence threshold 1"), (8, "confidence threshold 1")]
    cell = both.cells[-1] if both.cells[-1].policy else both.cells[-2]
    told = {"name": "confidence threshold", "version": "1", "settings": {"threshold": 0.5}}
    assert cell.request["policy"] == told
    drafted = both.select(policy=told, block_size=8).blocks(["drafted"])["drafted"].to_pylist()
    assert {len(tokens) for tokens in drafted} == {3}
    texts = {
        tuple(row["new_ids"]) for row in both.prompts().to_pylist() if row["prompt_id"] == "p0"
    }
    assert len(texts) == 1
    rows = {(row["block_size"], row["policy"]) for row in status(tmp_path / "b")}
    assert (8, "confidence threshold 1") in rows and (8, None) in rows


def test_settings_and_versions_of_a_policy_tell_cells_apart(tmp_path, prompt_file):
    costs = {(8, rows): 1 + 0.2 * rows for rows in range(1, 9)}
    policies = (
        *(ConfidenceThreshold(threshold=at) for at in (0.5, 0.7, 0.5)),
        *(SurvivalTimesCost(costs=told) for told in (costs, costs | {(8, 1): 9.0})),
        f"{HERE}:ALTERNATING",
        type("Mine", (Alternating,), {"version": "2"})(),
    )
    config = steered(prompt_file, *policies, block_sizes=(8,))
    run = sweep(config, tmp_path / "run", pair=telling_pair(cut(6)))
    assert len(run.cells) == 6  # the same one twice is one
    again = sweep(config, tmp_path / "run", pair=telling_pair(cut(6)))
    assert [cell.id for cell in again.cells] == [cell.id for cell in run.cells]


def test_cells_of_a_policy_are_shown_and_never_recommended(tmp_path, prompt_file):
    policy = Fixed(verify_cap=2)
    config = steered(prompt_file, None, policy, max_new_tokens=20)
    run = sweep(config, tmp_path / "run", pair=telling_pair(cut(6)))
    frame = cell_frame(run)
    assert frame["policy"].notna().sum() == 2
    steered_cells = {cell.id for cell in run.cells if cell.policy}
    assert not steered_cells & {arm.setting.cell for arm in contest(run).candidates}
    assert not steered_cells & {cell.id for cell in comparable(run).cells}
    assert recommend(run).choice.cell not in steered_cells
    with pytest.raises(ValueError, match="nothing to choose from"):
        recommend(sweep(steered(prompt_file, policy), tmp_path / "b", pair=telling_pair(cut(6))))


def test_the_command_line_sweeps_policies_beside_blocks_of_one_size(
    tmp_path, prompt_file, monkeypatch, capsys
):
    pair = telling_pair(cut(6))
    monkeypatch.setattr("dflash_lab.sweeps.pairs.load_spec", lambda spec, progress=None: pair)
    costs = write_costs(table({size: 1 + 0.1 * size for size in range(1, 9)}), tmp_path / "c.json")
    asked = ["--policy", "confidence:threshold=0.5", "--policy", "survival", "--costs", str(costs)]
    given = ["--prompts", prompt_file, "--block-sizes", "8", "--max-new-tokens", "9"]
    with pytest.raises(SystemExit) as end:
        cli.main(["sweep", "--out", str(tmp_path / "run"), *given, *asked])
    assert not end.value.code
    found = {cell.policy for cell in open_run(tmp_path / "run").cells}
    assert found == {None, "confidence threshold 1", "survival times cost 1"}
    shown = capsys.readouterr().out
    assert "policy" in shown and "surviv" in shown
    with pytest.raises(SystemExit):
        cli.main(
            ["sweep", "--out", str(tmp_path / "run"), *given, *asked, "--draft-windows", "4,8"]
        )
    assert "sweep one at a time" in capsys.readouterr().err


def test_a_sweep_refuses_what_is_no_policy(prompt_file):
    with pytest.raises(ValueError, match="has no name"):
        steered(prompt_file, object())
    with pytest.raises(ValueError, match="policies is empty"):
        steered(prompt_file)
