"""The trace viewer: what its script is told, where it runs, and its twin without a script."""

import json
import re
import sys

import pytest

from dflash_lab.analyse import records, survival_frame
from dflash_lab.config import DecodeConfig
from dflash_lab.decoding import decode
from dflash_lab.reports import page
from dflash_lab.store import Run, open_run
from dflash_lab.tests.pages import data_of, read_page, shown_text
from dflash_lab.tests.runs import HOSTILE, block, prompt, request_of, write_cell, write_run
from dflash_lab.tests.toys import noise, replay_target, scripted_pair
from dflash_lab.tokens import SHOWN_AS, ShownTrace, Traces, live_trace, shown_block, stored_trace
from dflash_lab.viewer import (
    script,
    show_stored_trace,
    show_trace,
    survival_so_far,
    trace_widget,
    view,
)

TOKENS = {str(i): f"t{i}" for i in range(20)}
MANY_BYTES = "naïve 机器学习 한국어 🙂👩‍👩‍👧 ď"


def row(drafted, posterior, accepted, emitted, **more):
    told = {"drafted": drafted, "posterior": posterior, "accepted": accepted, "emitted": emitted}
    return told | more


def viewed(*rows, pieces="abcdefghij", **about):
    return view(stored_trace(list(pieces), rows, TOKENS, **about))["blocks"]


# What the script is told


def test_each_draft_position_has_the_drafts_and_the_targets_choice():
    (told,) = viewed(row([1, 2, 3], [1, 5, 6, 7], 1, 2))
    assert (told["kept"], told["own"], told["rejected"]) == (["b"], "c", ["t2", "t3"])
    assert told["choices"] == ["b", "c", "t6", "t7"]
    assert told["label"] == "block 1 of 1: 1 of 3 accepted"


def test_choices_in_a_cut_block_are_read_in_the_text_as_far_as_it_goes():
    (told,) = viewed(row([1, 2, 3], [1, 2, 3, 7], 3, 2), pieces="abc")
    assert (told["kept"], told["unused"], told["own"]) == (["b", "c"], ["t3"], None)
    assert told["choices"] == ["b", "c", "t3", "t7"]


def test_a_kept_draft_that_is_not_the_targets_choice_leaves_the_choice_as_it_is():
    (told,) = viewed(row([1, 2], [9, 4, 5], 1, 2))  # as the rejection rule may decide
    assert told["choices"][:2] == ["t9", "c"]


def test_probabilities_that_nobody_recorded_stay_missing():
    assert viewed(row([1], [1, 2], 1, 2))[0]["draft_prob"] is None
    (told,) = viewed(row([1], [1, 2], 1, 2, draft_prob=[float("nan")], target_prob=[0.123456]))
    assert (told["draft_prob"], told["target_prob"]) == ([None], [0.1235])


def test_survival_so_far_counts_the_blocks_up_to_this_one_and_no_cut_block():
    blocks = [
        shown_block(["a"], ["x", "y"], 0, 1),
        shown_block(["a", "b", "c"], ["x", "y"], 2, 3),
        shown_block(["a"], ["x", "y"], 2, 1),
    ]
    assert survival_so_far(blocks) == [
        [(0, 1), (0, 1)],
        [(1, 2), (1, 2)],
        [(1, 2), (1, 2)],
    ]


def test_a_narrow_block_adds_to_the_positions_that_it_drafted_alone():
    blocks = [shown_block(["a", "b"], ["x"], 1, 2), shown_block(["a"], ["x", "y", "z"], 0, 1)]
    assert survival_so_far(blocks) == [[(1, 1)], [(1, 2), (0, 1), (0, 1)]]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "viewed"
    return open_run(write_run(path, prompts=1, block_sizes=(1, 8), windows=(), hostile=True))


@pytest.fixture(scope="module")
def cell(run):
    return next(cell.id for cell in run.cells if cell.block_size == 8)


def test_survival_after_the_last_block_is_that_of_the_run(run, cell):
    key = Traces(run, [cell]).prompts[0].key
    counts = view(Traces(run, [cell]).of(cell, key))["blocks"][-1]["survival"]
    frame = survival_frame(Run(path=run.path, cells=(run.cell(cell),)))
    assert [accepted / drafted for accepted, drafted in counts] == [
        row["survival"] for row in records(frame)
    ]


def test_blocks_begin_where_the_one_before_ended():
    rows = [row([1], [2, 3], 0, 1, total_s=0.5), row([1], [2, 3], 0, 1, total_s=0.25)]
    told = view(stored_trace(list("abc"), rows, TOKENS, ttft_s=1.0))
    assert [each["begin_s"] for each in told["blocks"]] == [1.0, 1.5]
    assert told["blocks"][0]["seconds"] == {"total": 0.5}
    assert "1.000 s to the first token, then 2 blocks in 0.750 s" in told["clock"]


def test_stages_are_told_where_they_were_timed():
    (told,) = viewed(row([1], [2, 3], 0, 1, total_s=0.5, draft_s=0.1, verify_s=0.3, commit_s=0.05))
    assert told["seconds"] == {"total": 0.5, "draft": 0.1, "verify": 0.3}


def test_times_that_nobody_recorded_make_no_timeline():
    told = view(stored_trace(["a", "b"], [row([1], [2, 3], 0, 1, total_s=None)], TOKENS))
    assert told["blocks"][0]["begin_s"] is None
    assert told["clock"] == "Times were not recorded."


def test_a_trace_that_was_stopped_says_so():
    assert view(ShownTrace(first="a", blocks=(), finish_reason="cancelled"))["note"]
    assert not view(ShownTrace(first="a", blocks=(), finish_reason="stop"))["note"]


def strings(value):
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from strings(each)


@pytest.mark.parametrize("block_size", range(1, 9))
def test_characters_of_many_bytes_come_whole_wherever_blocks_split_them(block_size):
    ids = list(MANY_BYTES.encode())
    pair = scripted_pair(noise(0.5), block_size=8, target=replay_target(3, ids), vocabulary=512)
    config = DecodeConfig(block_size=block_size, max_new_tokens=len(ids))
    told = view(live_trace(pair, decode(pair, (5, 3, 8), config)))
    taken = [text for b in told["blocks"] for text in (*b["kept"], b["own"] or "")]
    assert told["first"] + "".join(taken) == MANY_BYTES
    assert not any("\ufffd" in text for text in strings(told))


@pytest.mark.parametrize("text", HOSTILE)
def test_text_of_a_model_is_told_as_it_is_to_be_seen(text):
    told = view(ShownTrace(first=text, blocks=(shown_block([text], [text], 0, 1),)))
    assert told["first"] == told["blocks"][0]["own"] == text.translate(SHOWN_AS)
    assert told["blocks"][0]["rejected"] == ["" if "\ufffd" in text else text.translate(SHOWN_AS)]


# The script


def test_the_script_imports_nothing_and_makes_no_markup_of_text():
    assert not re.search(r"\bimport\b\s*[\w{(\"'*]", script())
    for maker in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert maker not in script()
    assert script().rstrip().endswith("export default { render };")


def test_a_report_holds_the_very_script_and_every_trace(run, cell):
    made = read_page(page(run))
    assert any(script() in s.text for s in made.all("script"))
    data = data_of(made)
    traces = Traces(run, [cell])
    told = json.loads(json.dumps(view(traces.of(cell, traces.prompts[0].key))))
    assert data["traces"][cell] == [told]


# In a notebook


@pytest.fixture(scope="module")
def shown(toy_pair):
    trace = decode(toy_pair, "one two three", DecodeConfig(block_size=4, max_new_tokens=12))
    return show_trace(toy_pair, trace), trace


def test_a_notebook_gets_a_widget_a_twin_in_colours_and_words(shown):
    made, trace = shown
    bundle = made._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    text = read_page(bundle["text/html"]).by_class("dl-text")
    assert shown_text(text) == trace.text.translate(SHOWN_AS)
    assert repr(trace.text) in bundle["text/plain"]
    assert f"{len(trace.blocks)} blocks" in bundle["text/plain"]
    json.dumps(bundle, allow_nan=False)


def test_the_widget_holds_the_trace_and_begins_at_its_first_block(shown):
    widget = trace_widget(shown[0].trace)
    assert widget.trace == view(shown[0].trace)
    assert widget.block == 0
    assert widget._esm == script()
    json.dumps(widget.get_state(["trace", "legend"]), allow_nan=False)


def test_without_anywidget_the_twin_is_shown_and_the_widget_says_what_to_install(
    shown, monkeypatch
):
    monkeypatch.setattr("dflash_lab.viewer._widget_class", no_anywidget)
    assert set(shown[0]._repr_mimebundle_()) == {"text/html", "text/plain"}
    with pytest.raises(ImportError, match=r"pip install .*anywidget, then restart"):
        trace_widget(shown[0].trace)


def no_anywidget():
    raise ImportError("No module named 'anywidget'")


def test_the_package_needs_no_anywidget_before_a_viewer_is_shown():
    assert "anywidget" not in sys.modules["dflash_lab.viewer"].__dict__


def test_a_stored_trace_is_shown_by_its_cell_and_prompt(run, cell):
    text = run.prompts().to_pylist()[0]["text"]
    made = show_stored_trace(run.path, cell)
    assert shown_text(read_page(made.html).by_class("dl-text")) == text.translate(SHOWN_AS)
    assert cell in repr(made)


def test_a_prompt_that_a_cell_lacks_is_refused_with_those_it_has(run, cell):
    label = run.prompts().to_pylist()[0]["prompt_id"]
    with pytest.raises(ValueError, match=f"no text of prompt 'other'.* it has {label}"):
        show_stored_trace(run, cell, "other")


def test_a_cell_that_stored_no_texts_is_said_to_have_none(tmp_path):
    name = write_cell(tmp_path, request_of(["p0"]), [prompt()], [block(1)], {"other|0|0": ["a"]})
    with pytest.raises(ValueError, match="no text"):
        show_stored_trace(tmp_path, name, "p1")
