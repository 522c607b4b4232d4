"""What is recommended, from measured cells and by prediction, and what rules of thumb cost."""

import json
import math

import numpy as np
import pytest

from dflash_lab.analyse import choose
from dflash_lab.costs import Cost, CostTable
from dflash_lab.recommendation import confirm, recommend
from dflash_lab.store import open_run, to_json
from dflash_lab.tests.runs import HARDWARE, block, prompt, provenance, request_of, write_cell

PROMPTS = 8
TRAINED = 16


def accepted_blocks(size, rate, prompts=PROMPTS, blocks=30, start=50):
    """Blocks whose drafts are each right with that chance, prompts a little apart."""
    rng = np.random.default_rng(size)
    rows = []
    for i in range(prompts):
        at = start
        for index in range(blocks):
            accepted = min(int(rng.geometric(1 - rate)) - 1, size - 1)
            keys = {"prompt_id": f"p{i}", "index": index, "start": at}
            rows.append(block(accepted, size, **keys))
            at += accepted + 1
    return rows


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Make a run of cells, each (block size, tokens per second, draft right with a chance of)."""
    told = {"trained_block_size": TRAINED}
    monkeypatch.setattr(
        "dflash_lab.tests.runs.provenance", lambda request: provenance(request) | told
    )

    def make(*cells, spread=0.02, **settings):
        for size, speed, rate in cells:
            ids = [f"p{i}" for i in range(PROMPTS)]
            rows = [
                prompt(
                    name,
                    new_ids=list(range(101)),
                    decode_s=100 / (speed * (1 + spread * math.sin(7 * i + size))),
                )
                for i, name in enumerate(ids)
            ]
            blocks = accepted_blocks(size, rate) if size > 1 else []
            write_cell(tmp_path, request_of(ids, block_size=size, **settings), rows, blocks)
        return open_run(tmp_path)

    return make


USUAL = ((1, 10, 0), (2, 14, 0.8), (4, 20, 0.7), (8, 18, 0.7), (16, 12, 0.7))


def test_the_recommended_setting_is_the_one_that_the_whole_code_calls_chosen(measured):
    run = measured(*USUAL)
    made = recommend(run)
    assert made.choice == choose(run)
    assert (made.block_size, made.draft_window) == (4, None)
    assert made.text.startswith(made.choice.sentence)
    assert json.loads(to_json(made))["choice"]["block_size"] == 4


def test_the_gain_over_the_trained_default_is_paired_and_held_out(measured):
    choice = recommend(measured(*USUAL)).choice
    assert choice.trained_block_size == TRAINED
    assert choice.speedup_trained == pytest.approx(20 / 12, rel=0.02)
    assert choice.speedup_trained_low < choice.speedup_trained < choice.speedup_trained_high
    assert choice.gain_held_out_trained == pytest.approx(choice.speedup_trained, rel=0.03)
    assert "Against the trained default, block size 16 with the full window: 1.6" in (
        recommend(measured(*USUAL)).text
    )


def test_a_run_that_does_not_tell_the_trained_size_says_so(tmp_path):
    ids = ["p0", "p1"]
    rows = [prompt(name, new_ids=[1] * 9) for name in ids]
    write_cell(tmp_path, request_of(ids, block_size=4), rows, [block(1)])
    made = recommend(open_run(tmp_path))
    assert made.choice.speedup_trained is None
    assert "trained with is not recorded" in made.text
    assert "Rule of thumb" in made.text


def test_rules_of_thumb_name_a_size_and_what_it_costs(measured):
    """Draft rates: 0.8 at size 2, about 0.5 at 4, about 0.3 at 8, 0.15 at 16."""
    rules = recommend(measured(*USUAL)).rules
    sizes = [rule.setting.block_size for rule in rules]
    assert sizes[0] == 2 and sizes[1] in (4, 8)
    assert sizes[2] >= 8  # tau still grows a little from 4 to 8
    first = rules[0]
    assert first.loss == pytest.approx(1 - 14 / 20, abs=0.02)
    assert first.loss_low < first.loss < first.loss_high
    assert first.sentence.startswith(
        "a draft rate above 60 % (the largest such size): block size 2"
    )
    assert "30 % [" in first.sentence and first.sentence.endswith("slower.")


def test_where_no_draft_rate_is_high_the_rule_goes_back_to_plain_decoding(measured):
    rules = recommend(measured((1, 10, 0), (4, 20, 0.1), (8, 18, 0.1))).rules
    assert [rule.setting.block_size for rule in rules] == [1, 1, 4]
    assert rules[0].loss == pytest.approx(0.5, abs=0.02)


def test_plain_decoding_is_recommended_where_it_is_fastest(measured):
    made = recommend(measured((1, 30, 0), (4, 20, 0.6), (16, 12, 0.6)))
    assert made.block_size == 1
    assert made.text.startswith("Do not speculate")
    assert made.choice.speedup_trained == pytest.approx(30 / 12, rel=0.02)


def test_near_equals_are_named_with_plain_decoding_and_the_trained_size_first(measured):
    made = recommend(measured((1, 19.8, 0), (4, 20, 0.6), (8, 19.9, 0.6), (16, 19.7, 0.6)))
    (line,) = (line for line in made.text.splitlines() if "within 2 %:" in line)
    assert line.index("block size 1 (") < line.index("the trained size") < line.index("size 8")


def test_hardware_classes_are_never_mixed_and_never_chosen_in_silence(measured):
    measured(*USUAL)
    run = measured((4, 90, 0.7), hardware="server")
    with pytest.raises(ValueError, match=r"several hardware classes: .*server.*--hardware"):
        recommend(run)
    assert recommend(run.select(hardware=HARDWARE)).block_size == 4


def test_a_setting_is_confirmed_on_prompts_it_was_not_chosen_on(measured):
    run = measured(*USUAL)
    half = [f"p{i}" for i in range(0, PROMPTS, 2)]
    rest = [f"p{i}" for i in range(1, PROMPTS, 2)]
    chosen = recommend(run, prompts=half)
    assert chosen.choice.prompts == 4 and chosen.source == "4 prompts of mini"
    found = confirm(run, chosen.block_size, chosen.draft_window, prompts=rest)
    assert (found.regret, found.low, found.high, found.prompts) == (0, 0, 0, 4)
    worse = confirm(run, 8, prompts=rest)
    assert worse.best.block_size == 4
    assert worse.low <= worse.regret <= worse.high
    assert worse.regret == pytest.approx(0.1, abs=0.04)
    with pytest.raises(ValueError, match="block size 6 with the full window was not measured"):
        confirm(run, 6)


# By prediction


def table(seconds, hardware="a server", dtype="float16", **facts):
    """A cost table with these seconds by block size at every context."""
    costs = tuple(
        Cost(
            block_size=size,
            draft_window=None,
            context=64,
            blocks=5,
            draft_s=0.1 * total if size > 1 else 0.0,
            verify_s=0.8 * total,
            other_s=0.1 * total,
            total_s=total,
            total_s_low=total,
            total_s_high=total,
            first_draft_s=0.1 * total if size > 1 else 0.0,
            prefill_s=2.0,
            draft_cache_bytes=1000 if size > 1 else 0,
        )
        for size, total in seconds.items()
    )
    return CostTable(costs=costs, facts={"hardware": hardware, "dtype": dtype, **facts})


CHEAP = {1: 1.0, 2: 1.05, 4: 1.1, 8: 1.15, 16: 1.2}  # rows cost next to nothing
DEAR = {1: 1.0, 2: 1.9, 4: 3.5, 8: 6.0, 16: 11.0}


def test_another_machines_costs_move_the_answer_with_the_same_acceptance(measured):
    run = measured(*USUAL)
    cheap, dear = recommend(run, costs=table(CHEAP)), recommend(run, costs=table(DEAR))
    assert cheap.block_size >= 8 and dear.block_size == 1
    assert (cheap.choice.hardware, cheap.choice.dtype) == ("a server", "float16")
    assert cheap.choice.predicted and cheap.choice.cell is None
    assert "predicted tokens/s" in cheap.choice.sentence
    assert cheap.drift is None and "confirm it there" in cheap.text
    assert dear.choice.tokens_per_s == pytest.approx(1.0)


def test_predicted_throughput_is_tokens_over_predicted_seconds(measured):
    run = measured((1, 10, 0), (8, 18, 0.7))
    made = recommend(run, costs=table({1: 1.0, 8: 1.25})).choice
    blocks = run.blocks().to_pandas()
    emitted = blocks["emitted"].sum()
    assert made.tokens_per_s == pytest.approx(emitted / (1.25 * len(blocks)))
    assert made.speedup == pytest.approx(made.tokens_per_s)


def test_latency_by_prediction_adds_the_prefill_and_the_first_token(measured):
    run = measured((1, 10, 0), (8, 18, 0.7))
    made = recommend(run, "latency", costs=table({1: 1.0, 8: 1.25})).choice
    blocks = run.blocks().to_pandas()
    tokens = blocks["emitted"].sum() + PROMPTS
    seconds = 1.25 * len(blocks) + 2.0 * PROMPTS
    assert made.tokens_per_s == pytest.approx(tokens / seconds)


def test_sizes_above_the_trained_one_or_without_a_cost_are_left_out_in_sight(measured):
    run = measured(*USUAL, (32, 9, 0.7), (6, 19, 0.7))
    made = recommend(run, costs=table(CHEAP | {32: 1.21}))
    assert made.block_size <= TRAINED
    assert "block size 32 with the full window is above the trained 16: not predicted." in (
        made.notes
    )
    assert "block size 6 with the full window is not in the cost table." in made.notes
    with pytest.raises(ValueError, match="nothing to choose from: no setting is in both"):
        recommend(run, costs=table({1: 1.0, 3: 2.0}))


def test_on_the_tables_own_machine_the_residual_is_reported(measured):
    run = measured((1, 10, 0), (8, 18, 0.7))
    made = recommend(run, costs=table({1: 0.1, 8: 0.125}, HARDWARE, "bfloat16"))
    assert made.residual.cells == 1  # the plain cell has no blocks stored here
    assert abs(made.residual.worst) == made.residual.mean_absolute
    assert "Prediction beside 1 measured cells: off by" in made.text


def test_blocks_of_a_replay_stand_in_for_a_run(measured):
    from dflash_lab.costs import BLOCK_COLUMNS, measured_blocks

    run = measured(*USUAL)
    blocks = measured_blocks(run)[list(BLOCK_COLUMNS)]
    blocks = blocks[blocks["cell_block_size"] > 1]
    made = recommend(acceptance=blocks, costs=table(CHEAP, trained_block_size=16))
    assert made.choice.tokens_per_s == recommend(run, costs=table(CHEAP)).choice.tokens_per_s
    with pytest.raises(ValueError, match="acceptance alone says nothing of speed"):
        recommend(acceptance=blocks)
    with pytest.raises(ValueError, match="give a run, or acceptance and costs"):
        recommend()


def test_an_acceptance_map_gives_its_blocks_and_its_trained_size():
    from dflash_lab.replay import AcceptanceMap, PromptMap, Text

    def text(name, tokens, counts):
        made = Text(prompt_id=name, prompt_ids=(1, 2, 3), tokens=tuple(range(tokens)))
        accepted = [[np.minimum(count, made.remaining)] for count in counts]
        return PromptMap(text=made, accepted=np.array(accepted, dtype=np.int32))

    acceptance = AcceptanceMap(
        block_sizes=(1, 4, 8),
        draft_windows=(None,),
        prompts=(text("a", 13, (0, 2, 2)), text("b", 25, (0, 3, 3))),
        context_limit=99,
        trained_block_size=4,
    )
    made = recommend(acceptance=acceptance, costs=table({1: 1.0, 4: 1.5, 8: 1.5}))
    choice = made.choice
    assert (choice.block_size, choice.trained_block_size, choice.prompts) == (4, 4, 2)
    # 12 tokens in blocks of 3, 24 in blocks of 4: 4 and 6 blocks of 1.5 s, 36 plain steps of 1 s
    assert choice.tokens_per_s == pytest.approx(36 / 15)
    assert choice.plain_tokens_per_s == pytest.approx(1.0)
    assert made.source == "2 prompts"
    assert "block size 8 with the full window is above the trained 4: not predicted." in made.notes
