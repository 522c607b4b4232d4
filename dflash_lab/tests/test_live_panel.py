"""The live panel: Run returns at once, Stop within a block, and nothing fails in silence."""

import sys
import time
from threading import Event

import pytest
from traitlets import TraitError

import dflash_lab.live_panel
from dflash_lab.config import DecodeConfig
from dflash_lab.decoding import decode
from dflash_lab.live_panel import live, race_html, verdict
from dflash_lab.racing import Lane, run_race
from dflash_lab.tests.pages import read_page, shown_text
from dflash_lab.tests.toys import ORACLE, WRONG, cut, noise, replay_target, scripted_pair
from dflash_lab.tokens import SHOWN_AS, live_trace
from dflash_lab.viewer import view

LIMIT_S = 30.0
TWO_RIGHT = cut(2)


@pytest.fixture(autouse=True)
def nothing_at_work(monkeypatch):
    monkeypatch.setattr(dflash_lab.live_panel, "_AT_WORK", {})


def made(script=TWO_RIGHT, tokens=24, **models):
    panel = live(scripted_pair(script, block_size=8, **models))
    panel.new_tokens.value = tokens
    return panel


def finish(panel):
    assert panel.wait(LIMIT_S)


def soon(condition, limit=LIMIT_S):
    end = time.monotonic() + limit
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    assert condition()


def is_idle(panel):
    return (panel.start.disabled, panel.halt.disabled) == (False, True)


# A run


def test_a_run_decodes_what_the_controls_say_beside_plain_decoding():
    panel = made()
    panel.block_size.value, panel.draft_window.value = 4, 16
    panel.run()
    finish(panel)
    asked = panel.trace.request
    assert (asked.block_size, asked.draft_window, asked.max_new_tokens) == (4, 16, 24)
    assert asked.temperature == 0
    assert panel.plain.request.block_size == 1
    alone = decode(panel.pair, panel.prompt.value, DecodeConfig(block_size=4, max_new_tokens=24))
    assert panel.trace.tokens == panel.plain.tokens == alone.tokens
    assert [b.accepted for b in panel.trace.blocks] == [b.accepted for b in alone.blocks]
    assert panel.trace.text == alone.text
    assert is_idle(panel)


def test_block_size_1_has_no_race_to_run():
    panel = made()
    panel.block_size.value = 1
    panel.run()
    finish(panel)
    assert panel.plain is None
    assert "plain decoding" not in read_page(panel.race.value).text


def test_the_temperature_reaches_both_lanes_with_one_seed():
    panel = made()
    panel.temperature.value = 0.7
    drafting, plain = panel._configs()
    assert drafting.temperature == plain.temperature == 0.7
    assert drafting.seed == plain.seed is not None


def test_the_panel_draws_the_same_text_in_both_lanes_and_another_one_each_time(toy_pair):
    panel, texts = live(toy_pair), set()
    panel.new_tokens.value, panel.temperature.value = 12, 1.5
    for _ in range(3):
        panel.run()
        finish(panel)
        assert panel.trace.tokens == panel.plain.tokens
        texts.add(panel.trace.tokens)
    assert len(texts) > 1


@pytest.mark.parametrize("window", [0, -1, "64", 7])
def test_a_window_that_the_panel_does_not_offer_cannot_be_set(window):
    panel = live(scripted_pair())
    with pytest.raises(TraitError):
        panel.draft_window.value = window
    assert panel.draft_window.value == "full"


def test_sizes_end_at_the_trained_one():
    panel = live(scripted_pair(block_size=8, trained_block_size=6))
    assert [value for _, value in panel.block_size.options] == [1, 2, 3, 4, 5, 6]


def test_the_text_arrives_while_it_is_decoded():
    panel = made(tokens=200, verify_s=0.01)
    panel.run()
    soon(lambda: len(panel.viewer.trace["blocks"]) >= 2 and not panel.wait(0))
    so_far = panel.viewer.trace
    assert panel.viewer.block == len(so_far["blocks"]) - 1
    assert "tokens" in read_page(panel.race.value).text
    panel.stop()
    finish(panel)


def test_the_viewer_holds_the_whole_trace_at_the_end():
    panel = made(noise(0.6))
    panel.run()
    finish(panel)
    told = panel.viewer.trace
    taken = [text for block in told["blocks"] for text in (*block["kept"], block["own"] or "")]
    assert told["first"] + "".join(taken) == panel.trace.text.translate(SHOWN_AS)
    assert len(told["blocks"]) == len(panel.trace.blocks)


def test_a_trait_is_assigned_at_most_ten_times_a_second():
    panel, told = made(WRONG, tokens=60, verify_s=0.002), []
    panel.race.observe(told.append, names="value")
    began = time.monotonic()
    panel.run()
    finish(panel)
    assert len(told) <= 2 + 10 * (time.monotonic() - began)


def test_half_a_character_is_held_back_while_the_text_grows():
    ids = list("🙂🙂🙂🙂".encode())
    pair = scripted_pair(cut(1), block_size=8, target=replay_target(3, ids), vocabulary=512)
    lane = Lane(pair, pair.encode((5, 3, 8)), DecodeConfig(block_size=4, max_new_tokens=len(ids)))
    for _ in range(4):
        lane.step()
        assert "\ufffd" not in str(view(live_trace(pair, lane.trace())))


# The race


def test_the_lane_that_is_behind_by_its_own_clock_moves_next():
    pair = scripted_pair(ORACLE, block_size=8, verify_s=0.003)
    lanes = [
        Lane(pair, pair.encode((5, 3, 8)), DecodeConfig(block_size=size, max_new_tokens=20))
        for size in (4, 1)
    ]
    gaps = []

    def look():
        if all(lane.blocks and not lane.ended for lane in lanes):
            gaps.append(abs(lanes[0].seconds - lanes[1].seconds))

    run_race(lanes, Event(), look)
    longest = max(block.seconds.total for lane in lanes for block in lane.blocks)
    assert gaps
    assert max(gaps) <= longest
    assert all(session.closed for session in pair.models.sessions)


def traces(script, **models):
    pair = scripted_pair(script, block_size=8, verify_s=0.002, **models)
    return [
        decode(pair, (5, 3, 8), DecodeConfig(block_size=size, max_new_tokens=20)) for size in (8, 1)
    ]


def test_a_race_says_who_was_faster_and_whether_the_texts_are_the_same():
    fast, plain = traces(ORACLE)
    assert "x the speed of plain decoding. The same text." in verdict(fast, plain)
    slow, plain = traces(WRONG, draft_s=0.004)
    assert "slower" in verdict(slow, plain)
    other = decode(scripted_pair(ORACLE), (1, 2), DecodeConfig(block_size=8, max_new_tokens=20))
    assert "The texts part at new token" in verdict(other, plain)


def test_a_single_token_has_no_pace():
    (trace, plain) = (
        decode(scripted_pair(ORACLE), (5, 3), DecodeConfig(block_size=size, max_new_tokens=1))
        for size in (8, 1)
    )
    assert verdict(trace, plain) == ""
    assert "tokens/s" not in race_html(trace, plain)


# Run and Stop


def test_run_and_stop_answer_at_once_and_the_decode_ends_within_a_block():
    panel = made(WRONG, tokens=50, verify_s=0.1)
    began = time.monotonic()
    panel.run()
    assert time.monotonic() - began < 0.2
    assert (panel.start.disabled, panel.halt.disabled) == (True, False)
    soon(lambda: len(panel.viewer.trace["blocks"]) >= 1)
    began = time.monotonic()
    panel.stop()
    assert panel.status.value == "stopping"
    assert time.monotonic() - began < 0.1
    calls = sum(session.calls.count("verify") for session in panel.pair.models.sessions)
    finish(panel)
    after = sum(session.calls.count("verify") for session in panel.pair.models.sessions)
    assert after - calls <= 1
    assert panel.trace.finish_reason == "cancelled"
    assert 0 < len(panel.trace.tokens) < 50
    assert "Stopped" in panel.status.value
    assert panel.viewer.trace["note"] == "Stopped before its end."
    assert all(session.closed for session in panel.pair.models.sessions)
    assert is_idle(panel)


def test_a_stop_before_the_first_token_leaves_an_empty_trace_and_a_panel_that_runs_again():
    panel = made(prefill_s=0.2)
    panel.run()
    panel.stop()
    finish(panel)
    assert len(panel.trace.tokens) <= 1
    panel.run()
    finish(panel)
    assert panel.trace.finish_reason == "length"


def test_a_stop_after_the_drafting_lane_ended_stops_plain_decoding_alone():
    panel = made(ORACLE, verify_s=0.02)
    panel.run()
    soon(lambda: panel.trace is not None and panel.trace.finish_reason == "length")
    panel.stop()
    finish(panel)
    assert panel.plain.finish_reason == "cancelled"
    assert panel.status.value.startswith("24 tokens in ")
    assert "x the speed of plain decoding" in panel.status.value


def test_a_second_click_starts_no_second_decode():
    panel = made(WRONG, tokens=50, verify_s=0.02)
    panel.run()
    panel.run()
    assert "stop it first" in panel.status.value
    panel.stop()
    finish(panel)
    assert len(panel.pair.models.sessions) <= 2


def test_another_panel_on_the_same_model_has_to_wait():
    panel = made(WRONG, tokens=50, verify_s=0.02)
    other = live(panel.pair)
    panel.run()
    other.run()
    assert "A decode is running on cpu" in other.status.value
    assert is_idle(other)
    panel.stop()
    finish(panel)
    other.new_tokens.value = 4
    other.run()
    finish(other)
    assert len(other.trace.tokens) == 4


# Errors


def test_an_empty_prompt_is_told_in_the_panel_which_can_be_used_again():
    panel = made()
    panel.prompt.value = " "
    panel.run()
    finish(panel)
    assert "ValueError: the prompt is empty" in read_page(panel.problem.value).text
    assert is_idle(panel)
    panel.prompt.value = "salt"
    panel.run()
    finish(panel)
    assert panel.problem.value == ""
    assert panel.trace.finish_reason == "length"


def test_an_error_in_a_block_is_told_with_a_hint_and_the_blocks_before_it_are_kept(monkeypatch):
    panel = made(tokens=200)
    verify, asked = panel.pair.models.session, []

    def session(*args, **kwargs):
        opened = verify(*args, **kwargs)
        plainly = opened.verify

        def boom(*args):
            asked.append(1)
            if len(asked) == 6:
                raise MemoryError("no room for <b>$x$</b>")
            return plainly(*args)

        opened.verify = boom
        return opened

    monkeypatch.setattr(type(panel.pair.models), "session", lambda self, *a, **k: session(*a, **k))
    panel.run()
    finish(panel)
    page = read_page(panel.problem.value)
    assert "MemoryError" in page.text
    assert "no room for <b>$x$</b>" in page.text
    assert "smaller block size" in page.text
    assert "in boom" in next(page.all("details")).text
    assert panel.trace.blocks
    assert panel.trace.finish_reason == "cancelled"
    assert is_idle(panel)


def test_a_thread_that_cannot_start_leaves_the_panel_usable(monkeypatch):
    panel = made()
    with monkeypatch.context() as patch:
        patch.setattr("dflash_lab.live_panel.Thread.start", cannot_start)
        panel.run()
    assert "cannot start" in panel.problem.value
    assert is_idle(panel)
    panel.run()
    finish(panel)
    assert panel.trace is not None


def cannot_start(self):
    raise RuntimeError("cannot start")


# As an output


def test_the_panel_is_a_widget_with_a_twin_in_html_and_words():
    panel = made()
    assert "Nothing was decoded" in panel._repr_mimebundle_()["text/html"]
    panel.run()
    finish(panel)
    bundle = panel._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    text = read_page(bundle["text/html"]).by_class("dl-text")
    assert shown_text(text) == panel.trace.text.translate(SHOWN_AS)
    assert f"{len(panel.trace.tokens)} tokens" in bundle["text/plain"]


def test_without_ipywidgets_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with pytest.raises(ImportError, match=r'pip install "ipywidgets'):
        live(scripted_pair())
