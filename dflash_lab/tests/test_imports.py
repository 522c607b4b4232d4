"""Imports from files made by hand, beside figures worked out on paper.

Nearly all tell one story: block size 4, accepted 3, 0, 1 and 2, so tau is 2.5 (dflash.md 5.2).
"""

import json

import pandas as pd
import pytest

from dflash_lab import cli
from dflash_lab.analyse import block_frame, cell_frame, length_frame, records, survival_frame
from dflash_lab.imports import (
    COUNTER_FORM,
    FORMS,
    SETTINGS,
    ImportFault,
    block_size_of,
    draft_rate_of,
    draft_share_of,
    import_traces,
    save_import,
    setting_of,
    tau_of_filled_share,
    tokens_per_block_of,
)
from dflash_lab.recommendation import recommend
from dflash_lab.store import open_run
from dflash_lab.tests.test_recommendation import CHEAP, DEAR, table

ACCEPTED = [3, 0, 1, 2]
TOKENS = 11  # that of the prefill, and accepted + 1 of each block


def vllm(tokens=TOKENS, **told):
    metrics = {"num_spec_tokens": 3, "num_spec_steps": 4, "num_accepted_draft_tokens": 6}
    steps = {"per_step_accepted": ACCEPTED, "per_step_drafted": [3] * 4, "num_draft_tokens": 12}
    return {
        "id": "a",
        "metrics": {"speculative_decoding": metrics | steps | told, "time_to_first_token_ms": 250},
        "usage": {"completion_tokens": tokens},
    }


def sglang(**told):
    made = {"completion_tokens": TOKENS, "spec_verify_ct": 4, "e2e_latency": 2.0}
    now = {"spec_num_correct_drafts": 6, "spec_num_proposed_drafts": 12}
    return {"meta_info": made | now | {"spec_correct_drafts_histogram": [1, 1, 1, 1]} | told}


def cycles(**told):
    return [
        {"prompt_id": "a", "block_size": 4, "acceptance_length": accepted + 1} | told
        for accepted in ACCEPTED
    ]


SOURCES = {  # each form, told of the same four blocks, none of them cut
    "vllm": [vllm()],
    "sglang": [sglang()],
    "upstream-torch": [
        {"acceptance_lengths": [1, 2, 3, 4], "block_size": 4, "num_output_tokens": TOKENS}
    ],
    "upstream-torch-april": [
        {"acceptance_lengths": [4, 1, 2, 3], "block_size": 4, "num_output_tokens": TOKENS}
    ],
    "upstream-mlx": [{"accepted": [None, 1, 2, 3, 4, None], "block_size": 4}],
    "upstream-mlx-april": [{"accepted": [1, 1, 2, 3, 4, 0], "block_size": 4}],
    "dflash_mlx": [
        {
            "block_tokens": 4,
            "verify_len_cap": None,
            "generation_tokens": TOKENS,
            "rounds": [{"accepted": accepted} for accepted in ACCEPTED],
        }
    ],
    "mlx_dspark": [
        {
            "block_size": 4,
            "tokens": TOKENS,
            "rounds": [{"accepted": accepted, "drafted": 3} for accepted in ACCEPTED],
        }
    ],
    "atharvrn": [cycle | {"tokens": TOKENS} for cycle in cycles()],
}


@pytest.fixture
def given(tmp_path):
    """Imports records, written one a line, or a text as it is."""

    def imported(form, told, **settings):
        path = tmp_path / "told.jsonl"
        lines = told if isinstance(told, str) else "\n".join(map(json.dumps, told))
        path.write_text(lines, encoding="utf-8")
        return import_traces(form, path, **settings)

    return imported


# --- one story in every form ----------------------------------------------------------------------


def test_every_form_is_told_here():
    assert set(SOURCES) == set(FORMS)


@pytest.mark.parametrize("form", SOURCES)
def test_every_form_tells_the_same_story_in_the_same_quantities(given, form):
    made = given(form, SOURCES[form])
    assert made.figures == {
        "prompts": 1,
        "blocks": 4,
        "tokens": None if "upstream-mlx" in form else TOKENS,
        "unknown_cut": 0,
        "tau": 2.5,
        "tau_cut_blocks": 2.5,
        "tokens_per_block": None if "upstream-mlx" in form else 2.5,
        "draft_rate": 0.5,
    }
    survival = made.survival
    assert list(survival["survival"]) == [0.75, 0.5, 0.25]
    assert list(survival["conditional"]) == pytest.approx([3 / 4, 2 / 3, 1 / 2])
    assert list(survival["at_risk"]) == [4, 4, 4]
    assert list(made.lengths["blocks"]) == [1, 1, 1, 1]
    assert list(made.lengths["censored"]) == [False, False, False, True]
    assert not made.lengths["cut_blocks"].any()
    assert set(made.blocks["cell_block_size"]) == {4}


@pytest.mark.parametrize("form", sorted(set(SOURCES) - {"sglang"}))
def test_blocks_keep_their_order_and_a_histogram_has_none(given, form):
    blocks = given(form, SOURCES[form]).blocks
    assert list(blocks["index"]) == [0, 1, 2, 3]
    wanted = (
        [0, 1, 2, 3]
        if form in ("upstream-torch", "upstream-mlx", "upstream-mlx-april")
        else ACCEPTED
    )
    assert list(blocks["accepted"]) == wanted
    assert list(blocks["emitted"]) == [accepted + 1 for accepted in wanted]


def test_blocks_of_a_histogram_have_no_order(given):
    blocks = given("sglang", [sglang()]).blocks
    assert blocks["index"].isna().all()
    assert list(blocks["accepted"]) == [0, 1, 2, 3]


# --- what is not told stays missing ---------------------------------------------------------------


def test_a_last_block_that_was_cut_is_left_out_of_tau_and_kept_elsewhere(given):
    made = given("vllm", [vllm(tokens=TOKENS - 1)])
    assert list(made.blocks["emitted"]) == [4, 1, 2, 2]
    assert list(made.blocks["cut"]) == [False, False, False, True]
    assert made.figures["tau"] == pytest.approx(7 / 3)
    assert made.figures["tau_cut_blocks"] == 2.5
    assert made.figures["tokens_per_block"] == 9 / 4
    assert list(made.survival["at_risk"]) == [3, 3, 3]


def test_without_the_number_of_tokens_the_last_block_may_be_cut_or_not(given):
    made = given("vllm", [vllm(tokens=None)])
    assert list(made.blocks["cut"].isna()) == [False, False, False, True]
    assert made.blocks["emitted"].isna().sum() == 1
    assert made.figures["unknown_cut"] == 1
    assert made.figures["tokens_per_block"] is None


def test_upstream_0_1_0_does_not_tell_what_a_short_last_block_accepted(given):
    told = {"acceptance_lengths": [4, 2, 1], "block_size": 4, "num_output_tokens": 8}
    made = given("upstream-torch", [told])
    assert list(made.blocks["emitted"]) == [4, 2, 1]
    assert list(made.blocks["accepted"].isna()) == [False, False, True]
    assert made.blocks["block_size"].isna().sum() == 1  # narrowed near the limit, or not
    assert made.figures["tau"] == 3.0
    assert made.figures["tau_cut_blocks"] is None
    assert made.figures["tokens_per_block"] == pytest.approx(7 / 3)
    april = given("upstream-torch-april", [told])
    assert list(april.blocks["accepted"]) == [3, 1, 0]
    assert april.figures["tau"] == april.figures["tau_cut_blocks"] == pytest.approx(7 / 3)


def test_the_states_of_upstream_are_told_apart_by_their_counts(given):
    april = {"acceptance_lengths": [4, 4], "block_size": 4, "num_output_tokens": 6}
    assert list(given("upstream-torch-april", [april]).blocks["emitted"]) == [4, 1]
    with pytest.raises(
        ImportFault, match=r"emit 8 tokens, .*, but 6 new tokens are told. Is it another form"
    ):
        given("upstream-torch", [april])
    with pytest.raises(ImportFault, match="it is the form upstream-mlx"):
        given("upstream-mlx-april", SOURCES["upstream-mlx"])


def test_a_histogram_with_fewer_tokens_than_blocks_gave_does_not_tell_which_was_cut(given):
    made = given("sglang", [sglang(completion_tokens=TOKENS - 1)])
    assert made.blocks["cut"].isna().all()
    assert made.figures["tau"] is None
    assert made.figures["tau_cut_blocks"] == 2.5
    assert made.figures["unknown_cut"] == 4
    assert made.lengths["cut_blocks"].all()


@pytest.mark.parametrize(
    "names",
    [
        ("spec_accept_token_num", "spec_draft_token_num", "spec_accept_histogram"),
        ("spec_accepted_drafts", "spec_proposed_drafts", "spec_accept_histogram"),
    ],
)
def test_older_names_of_sglang_mean_the_same(given, names):
    told = dict(zip(names, (6, 12, [1, 1, 1, 1]), strict=True))
    record = {"meta_info": told | {"spec_verify_ct": 4, "completion_tokens": TOKENS}}
    assert given("sglang", [record]).figures == given("sglang", [sglang()]).figures


def test_ngram_rounds_say_nothing_of_the_draft(given):
    rounds = [{"accepted": 3, "drafted": 3}, {"accepted": 2, "drafted": 2, "kind": "ngram"}]
    told = {"block_size": 4, "tokens": 8, "rounds": rounds}
    made = given("mlx_dspark", [told])
    assert made.figures["tau"] == 4.0
    assert made.figures["blocks"] == 1
    assert made.figures["tokens_per_block"] == 3.5
    assert list(made.lengths["blocks"]) == [0, 0, 0, 1]
    totals = given("mlx_dspark", [told | {"rounds": 2}])
    assert totals.figures["blocks"] is None  # how many of the two were the draft's?
    assert given("mlx_dspark", [told | {"rounds": 2, "ngram_rounds": 1}]).figures["blocks"] == 1


def test_a_result_with_totals_alone_gives_totals_alone(given):
    told = {"block_tokens": 16, "generation_tokens": 737, "rounds": 100, "accepted": 636}
    made = given("dflash_mlx", [told])
    assert made.blocks.empty
    assert made.survival.empty
    assert made.figures["tau_cut_blocks"] == 7.36
    assert made.figures["tokens_per_block"] == 7.36
    assert (made.figures["tau"], made.figures["draft_rate"]) == (None, None)


def test_a_verify_cap_is_not_the_block_size(given):
    told = SOURCES["dflash_mlx"][0] | {"block_tokens": 16, "verify_len_cap": 4}
    blocks = given("dflash_mlx", [told]).blocks
    assert set(blocks["block_size"]) == {16}
    assert set(blocks["rows"]) == {4}
    del told["verify_len_cap"]
    assert given("dflash_mlx", [told]).blocks["rows"].isna().all()


def test_cycles_of_several_prompts_may_stand_mixed_in_one_file(given):
    one, two = cycles(), cycles(prompt_id="b", draft_ms=3.0)
    made = given("atharvrn", [line for pair in zip(one, two, strict=True) for line in pair])
    assert list(made.prompts["prompt_id"]) == ["a", "b"]
    assert list(made.prompts["accepted"]) == [6, 6]
    second = made.blocks[made.blocks["prompt_id"] == "b"]
    assert list(second["draft_s"]) == [0.003] * 4
    assert made.blocks["draft_s"].isna().sum() == 4


# --- counters of a server -------------------------------------------------------------------------

PAGE = """# HELP vllm:spec_decode_num_drafts_total Number of drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} %d.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} %d.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} %d.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} %d.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} %d.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="2"} %d.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e9
"""


def test_counters_between_two_readings_give_survival_by_position(given, tmp_path):
    before = tmp_path / "before.txt"
    before.write_text(PAGE % (10, 30, 12, 6, 4, 2))
    made = given(COUNTER_FORM, PAGE % (14, 42, 18, 9, 6, 3), before=before)
    assert list(made.survival["survival"]) == [0.75, 0.5, 0.25]
    assert list(made.survival["conditional"]) == pytest.approx([3 / 4, 2 / 3, 1 / 2])
    assert list(made.lengths["blocks"]) == [1, 1, 1, 1]
    assert made.lengths["cut_blocks"].all()
    assert made.figures["tau"] is None  # cut blocks are counted, too
    assert made.figures["tau_cut_blocks"] == 2.5
    assert made.figures["draft_rate"] == 0.5
    assert made.blocks.empty


def test_counters_as_json_say_what_a_page_says(given):
    told = {"num_drafts": 4, "num_draft_tokens": 12, "num_accepted_tokens": 6}
    made = given(COUNTER_FORM, [told | {"num_accepted_tokens_per_pos": [3, 2, 1]}])
    page = given(COUNTER_FORM, PAGE % (4, 12, 6, 3, 2, 1))
    pd.testing.assert_frame_equal(made.survival, page.survival)
    assert made.figures == page.figures


def test_readings_in_the_wrong_order_are_noticed(given, tmp_path):
    before = tmp_path / "later.txt"
    before.write_text(PAGE % (14, 42, 18, 9, 6, 3))
    with pytest.raises(ImportFault, match=r"num_drafts fell from 14 to 10.*right order"):
        given(COUNTER_FORM, PAGE % (10, 30, 12, 6, 4, 2), before=before)
    with pytest.raises(ValueError, match="vllm has none"):
        given("vllm", [vllm()], before=before)


# --- what cannot be -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "told", "message"),
    [
        (
            "vllm",
            [vllm(per_step_accepted=[4, 0, 1, 1])],
            "accepted is 4, above drafted, which is 3",
        ),
        ("vllm", [vllm(per_step_accepted=[-1, 0, 1, 2])], "expected a whole number from 0"),
        ("vllm", [vllm(per_step_accepted=[3, 0, 1])], "3 entries, per_step_drafted 4"),
        ("vllm", [vllm(num_accepted_draft_tokens=7)], "7 accepted are told, but the steps have 6"),
        ("vllm", [vllm(tokens=20)], "emitted is 12 with 2 accepted"),
        ("vllm", [vllm(), vllm()], "'a' is in record 0 already"),
        ("vllm", [{"id": "a", "choices": []}], "--per-request-spec-decode-metrics"),
        ("vllm", [[1, 2]], "record 0 is a int; expected an object"),
        ("vllm", "", "holds no record"),
        ("sglang", [sglang(spec_num_correct_drafts=5)], "adds up to 6 accepted, but 5 are told"),
        ("sglang", [sglang(spec_verify_ct=3)], "is 4, above blocks, which is 3"),
        ("sglang", [sglang() | {"block_size": 3}], "a block of 3 drafts 2"),
        ("sglang", [{"meta_info": {}}], "neither spec_correct_drafts_histogram nor"),
        (
            "upstream-torch",
            [{"acceptance_lengths": [5, 1], "block_size": 4}],
            "accepted is 4, above",
        ),
        (
            "upstream-torch",
            [{"acceptance_lengths": [1, 5], "block_size": 4}],
            "emits 5, above its 4",
        ),
        ("upstream-torch", [{"acceptance_lengths": [1, 0, 2]}], "gives one token at least"),
        ("upstream-torch", [{"block_size": 4}], "has no acceptance_lengths"),
        ("dflash_mlx", [{"block_tokens": 4, "rounds": [3]}], "expected an object with accepted"),
        ("mlx_dspark", [{"rounds": 2, "ngram_rounds": 3}], "ngram_rounds is 3, above rounds"),
        (
            "atharvrn",
            [{"block_size": 4, "accepted": 4}],
            "accepted is 4, above drafted, which is 3",
        ),
        ("atharvrn", [{"block_size": 4}], "no accepted, nor acceptance_length"),
        ("atharvrn", [{"accepted": 1, "draft_ms": -1}], "draft_ms is -1; expected a number from 0"),
        ("atharvrn", [{"accepted": 1, "emitted": 1}, {"accepted": 1}], "is cut, but only the last"),
        (COUNTER_FORM, PAGE % (4, 12, 9, 2, 3, 4), "position 2 is 3, above accepted at position 1"),
        (COUNTER_FORM, PAGE % (4, 12, 7, 3, 2, 1), "add up to 6 accepted, but 7 are told"),
        (COUNTER_FORM, "some other page\n", "has no vllm:spec_decode_ counter"),
    ],
)
def test_counts_that_cannot_be_are_one_error_that_says_where(given, form, told, message):
    with pytest.raises(ImportFault, match=message) as caught:
        given(form, told)
    assert str(caught.value).startswith("told.jsonl")


def test_an_unknown_form_lists_those_there_are(given):
    with pytest.raises(ValueError, match=r"form is 'vlm'; expected one of vllm, .*vllm-counters"):
        given("vlm", [vllm()])


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(cycles()[0]) + "\n" + json.dumps(cycles()[1])[:-9],
        json.dumps(cycles(), indent=1)[:-30],
    ],
)
def test_a_torn_file_names_the_line(given, text):
    last = text.count("\n") + 1
    with pytest.raises(ImportFault, match=f"is torn, or no JSON, at line {last}: "):
        given("atharvrn", text)


# --- into a run -----------------------------------------------------------------------------------


def test_a_source_with_token_ids_becomes_a_cell_with_the_frames_of_any_other(given, tmp_path):
    ids = list(range(100, 100 + TOKENS))
    record = vllm() | {"choices": [{"token_ids": ids, "prompt_token_ids": [7, 8, 9]}]}
    run = save_import(given("vllm", [record]), tmp_path / "run")
    [row] = records(cell_frame(run))
    assert (row["engine"], row["block_size"], row["tau"]) == ("vllm", 4, 2.5)
    assert (row["draft_rate"], row["tokens"], row["looped"]) == (0.5, TOKENS, 0)
    assert (row["tokens_per_s"], row["dtype"], row["peak_bytes"]) == (None, None, None)
    assert list(survival_frame(run)["survival"]) == [0.75, 0.5, 0.25]
    assert list(length_frame(run)["blocks"]) == [1, 1, 1, 1]
    blocks = records(block_frame(run))
    assert [block["start"] for block in blocks] == [3, 7, 8, 10]
    assert blocks[2]["drafted"] == [106, None, None]  # what was not accepted is not told
    assert blocks[2]["posterior"] == [106, 107, None, None]
    assert run.cells[0].request["hardware"] == "not told by vllm"
    with pytest.raises(ValueError, match="no finished cell with a block size above 1"):
        recommend(run)


def test_a_source_without_token_ids_is_kept_as_frames_alone(given, tmp_path):
    made = given("sglang", [sglang()])
    run = save_import(made, tmp_path / "run")
    assert run.cells == ()
    [folder] = (tmp_path / "run" / "imports").iterdir()
    told = json.loads((folder / "import.json").read_text())
    assert (told["form"], told["figures"]["tau"], told["file"]) == ("sglang", 2.5, "told.jsonl")
    pd.testing.assert_frame_equal(pd.read_parquet(folder / "blocks.parquet"), made.blocks)


def test_importing_a_file_twice_changes_nothing(given, tmp_path):
    ids = list(range(TOKENS))
    made = given("atharvrn", [cycle | {"new_ids": ids} for cycle in cycles()])
    first = save_import(made, tmp_path / "run")
    again = save_import(made, tmp_path / "run")
    assert [cell.id for cell in first.cells] == [cell.id for cell in again.cells]
    assert len(open_run(tmp_path / "run").cells) == 1
    assert len(list((tmp_path / "run" / "imports").iterdir())) == 1


def test_imported_acceptance_and_a_cost_table_give_a_recommendation(given):
    ids = {"choices": [{"prompt_token_ids": [7, 8, 9]}]}
    blocks = given("vllm", [vllm() | ids, vllm() | ids | {"id": "b"}]).blocks
    cheap, dear = (recommend(acceptance=blocks, costs=table(costs)) for costs in (CHEAP, DEAR))
    assert (cheap.block_size, dear.block_size) == (4, 1)
    assert cheap.choice.tokens_per_s == pytest.approx(10 / (4 * CHEAP[4]))


def test_the_command_prints_the_figures_and_keeps_the_frames(tmp_path, capsys):
    path, out = tmp_path / "told.json", tmp_path / "run"
    path.write_text(json.dumps(sglang(completion_tokens=None)))
    with pytest.raises(SystemExit) as end:
        cli.main(["import", "sglang", str(path), "--out", str(out)])
    assert not end.value.code
    said = capsys.readouterr().out
    assert "tau_cut_blocks: 2.50" in said
    assert "tau: n/a" in said
    assert "frames alone" in said
    assert (out / "imports").is_dir()


# --- one name a quantity --------------------------------------------------------------------------


def test_settings_of_other_systems_stand_for_block_size_16():
    wanted = {"checkpoint": 16, "vllm": 15, "sglang": 16, "llama.cpp": 15, "tensorrt-llm": 15}
    wanted |= {"transformers": 15, "mlx-lm": 15, "dflash_mlx": 16, "mlx_dspark": 15}
    wanted |= {"mlx-vlm": 16, "atharvrn": 16}
    assert {system: setting_of(system, 16) for system in SETTINGS} == wanted
    assert {block_size_of(system, number) for system, number in wanted.items()} == {16}
    with pytest.raises(ValueError, match="num_speculative_tokens is -1"):
        block_size_of("vllm", -1)
    with pytest.raises(ValueError, match="system is 'vLLM'"):
        setting_of("vLLM", 16)


def test_rates_and_shares_of_others_become_named_quantities():
    assert tokens_per_block_of(0.864) == pytest.approx(7.35, abs=0.01)  # dflash_mlx's 86.4 %
    assert draft_share_of(7.37) == pytest.approx(0.864, abs=1e-3)
    assert draft_rate_of(7.37, 16) == pytest.approx(0.42, abs=0.005)
    assert draft_rate_of(1.0, 1) is None
    assert tau_of_filled_share(0.45, 16) == 7.2
    with pytest.raises(ValueError, match="from 0 to below 1"):
        tokens_per_block_of(1.0)
