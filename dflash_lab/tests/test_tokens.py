"""Coloured text: every token once, in its kind, literally."""

import json

import pytest

from dflash_lab.config import DecodeConfig
from dflash_lab.decoding import decode
from dflash_lab.tests.pages import read_page, shown_text
from dflash_lab.tests.runs import HOSTILE
from dflash_lab.tests.toys import ORACLE, cut, replay_target, scripted_pair
from dflash_lab.tokens import (
    SHOWN_AS,
    ShownTrace,
    live_trace,
    shown_block,
    stored_trace,
    text_html,
    trace_html,
)
from dflash_lab.viewer import view

TOKENS = {str(i): f"t{i}" for i in range(20)}


def row(drafted, accepted, emitted):
    return {"drafted": drafted, "accepted": accepted, "emitted": emitted}


def kinds(html):
    """Class and text of each token that the output got."""
    tokens = [t for t in read_page(html).all("bdi") if not t.within("dl-drafts")]
    return [(next(iter(token.classes)), token.text) for token in tokens]


def test_a_block_holds_accepted_tokens_then_one_of_the_targets_own():
    trace = stored_trace(["a", "b", "c", "d"], [row([1, 2, 3, 4], 2, 3)], TOKENS)
    assert kinds(text_html(trace)) == [
        ("dl-first", "a"),
        ("dl-accepted", "b"),
        ("dl-accepted", "c"),
        ("dl-own", "d"),
    ]
    assert trace.blocks[0].rejected == ("t3", "t4")


def test_a_cut_block_has_no_token_of_the_targets_own():
    (block,) = stored_trace(["a", "b", "c"], [row([1, 2, 3, 4], 3, 2)], TOKENS).blocks
    assert (block.kept, block.own) == (("b", "c"), None)
    assert (block.unused, block.rejected) == (("t3",), ("t4",))
    assert "ended" in block.summary


def test_a_block_cut_after_its_accepted_tokens_has_none_unused():
    block = shown_block(["b", "c"], ["x", "y", "z"], 2, 2)
    assert (block.kept, block.own, block.unused, block.rejected) == (("b", "c"), None, (), ("z",))


def test_blocks_take_their_pieces_one_after_the_other():
    rows = [row([1, 2], 0, 1), row([3, 4], 2, 3), row([5, 6], 1, 2)]
    trace = stored_trace(list("abcdefg"), rows, TOKENS)
    assert [(block.kept, block.own) for block in trace.blocks] == [
        ((), "b"),
        (("c", "d"), "e"),
        (("f",), "g"),
    ]


def test_rejected_tokens_are_struck_through_and_not_part_of_the_text():
    trace = stored_trace(["a", "b"], [row([1, 2], 0, 1)], TOKENS)
    page = read_page(text_html(trace))
    assert shown_text(page) == "ab"
    (struck,) = page.all("s")
    assert [token.text for token in struck.all("bdi")] == ["t1", "t2"]
    assert struck.within("dl-drafts")


def test_every_block_can_be_reached_by_keyboard_and_says_how_many_were_accepted():
    trace = stored_trace(list("abcd"), [row([1, 2], 1, 2), row([], 0, 1)], TOKENS)
    blocks = list(read_page(text_html(trace)).all("span", "dl-block"))
    assert [block.attributes["tabindex"] for block in blocks] == ["0", "0"]
    assert [block.attributes["aria-label"] for block in blocks] == [
        "block 1 of 2: 1 of 2 accepted",
        "block 2 of 2: nothing drafted",
    ]


@pytest.mark.parametrize("text", HOSTILE)
def test_what_a_model_wrote_is_shown_literally(text):
    trace = ShownTrace(first=text, blocks=(shown_block([text, text], [text, text, text], 1, 2),))
    page = read_page(text_html(trace))
    assert shown_text(page) == text * 3
    assert {element.tag for element in page.all()} == {"pre", "span", "bdi", "s", "b"}
    drafted = [token.text for token in page.all("bdi") if token.within("dl-rejected")]
    assert drafted == [("" if "\ufffd" in text else text)] * 2


def test_control_characters_are_shown_as_their_pictures():
    page = read_page(text_html(ShownTrace(first="a\x00b\rc\x1b\x7f", blocks=())))
    assert shown_text(page) == "a\u2400b\u240dc\u241b\u2421"


def test_each_token_keeps_its_direction_to_itself():
    page = read_page(text_html(ShownTrace(first="\u202eabc", blocks=())))
    (token,) = page.all("bdi")
    assert token.text == "\u202eabc"


def test_a_token_without_text_of_its_own_gets_a_mark():
    trace = ShownTrace(first="", blocks=(shown_block(["\n\n"], ["\ufffd"], 0, 1),))
    page = read_page(text_html(trace))
    assert [token.classes & {"dl-part", "dl-line"} for token in page.all("bdi")] == [
        {"dl-part"},
        {"dl-line"},
        {"dl-part"},
        {"dl-line"},
    ]


def test_dollar_signs_stand_where_nothing_typesets_them():
    page = read_page(trace_html(ShownTrace(first="$x$", blocks=())))
    (token,) = (token for token in page.all("bdi") if token.text == "$x$")
    assert token.within("tex2jax_ignore")
    assert token.parent.tag == "pre"


def test_the_legend_names_every_kind_and_needs_no_script():
    page = read_page(trace_html(ShownTrace(first="a", blocks=())))
    (legend,) = page.all("div", "dl-legend")
    assert legend.text.count("token") >= 5
    assert "rejected" in legend.text
    assert not list(page.all("script"))


def test_a_box_puts_every_block_on_a_line_of_its_own():
    assert 'type="checkbox"' in trace_html(ShownTrace(first="a", blocks=()))


@pytest.fixture(scope="module")
def decoded(toy_pair):
    return decode(toy_pair, "one two three", DecodeConfig(block_size=4, max_new_tokens=12))


def test_a_trace_in_memory_is_shown_whole(toy_pair, decoded):
    shown = live_trace(toy_pair, decoded)
    assert shown_text(read_page(text_html(shown))) == decoded.text.translate(SHOWN_AS)
    assert [block.accepted for block in shown.blocks] == [b.accepted for b in decoded.blocks]
    assert [block.drafted for block in shown.blocks] == [len(b.drafted) for b in decoded.blocks]


MIXED = "naïve 机器学习 한국어 🙂👩‍👩‍👧 ď"


@pytest.mark.parametrize("script", [ORACLE, cut(2)], ids=["oracle", "cut 2"])
@pytest.mark.parametrize("block_size", range(1, 9))
def test_no_character_is_torn_wherever_blocks_split_it(block_size, script):
    said = [*MIXED.encode(), 300]
    pair = scripted_pair(script, target=replay_target(2, said), end_tokens=frozenset({300}))
    trace = decode(pair, (1, 2), DecodeConfig(block_size=block_size))
    shown = live_trace(pair, trace)
    assert shown_text(read_page(text_html(shown))) == MIXED
    assert "\ufffd" not in text_html(shown) + json.dumps(view(shown), ensure_ascii=False)
