"""Where an output ends and what its text is: tokens, usage, trace and stream agree."""

import pytest

from dflash_lab import DecodeConfig, decode
from dflash_lab.calls import Draft, stream_generate
from dflash_lab.tests.toys import (
    ORACLE,
    ByteTokenizer,
    cut,
    replay_target,
    scripted_greedy,
    scripted_pair,
)
from dflash_lab.texts import StopStrings, stop_place, without_beginning
from dflash_lab.tokens import live_trace

pytestmark = pytest.mark.usefixtures("quiet")

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
PROMPT = (1, 2)
MIXED = "naïve 机器学习 한국어 🙂👩‍👩‍👧 ď"


def saying(said, script=ORACLE, **settings):
    """A pair whose target says this text (bytes) or these ids, then the last of them for ever."""
    ids = list(said.encode()) if isinstance(said, str) else list(said)
    return scripted_pair(script, target=replay_target(len(PROMPT), ids), **settings)


def ended(pair, **settings):
    """The trace of a decode, having seen that the stream of the same says the same."""
    trace = decode(pair, PROMPT, DecodeConfig(**({"max_new_tokens": 60} | settings)))
    pieces = streamed(pair, **settings)
    assert "".join(one.text for one in pieces) == trace.text
    assert tuple(token for one in pieces for token in one.tokens) == trace.tokens
    assert pieces[-1].generation_tokens == len(trace.tokens)
    assert pieces[-1].finish_reason == trace.finish_reason
    assert {one.finish_reason for one in pieces[:-1]} <= {None}
    assert 1 + sum(block.emitted for block in trace.blocks) == len(trace.tokens)
    shown = live_trace(pair, trace)
    kept = [piece for block in shown.blocks for piece in (*block.kept, block.own or "")]
    assert "".join((shown.first, *kept)) == trace.text
    return trace


def streamed(pair, max_new_tokens=60, block_size=None, **settings):
    """Every response of `stream_generate` on the same scripted models."""

    class Scripted(Draft):
        def models(self, target):
            return pair.models

    call = (None, Scripted("draft", pair.draft_config), pair.tokenizer, list(PROMPT))
    return list(stream_generate(*call, block_size, max_new_tokens, **settings))


# --- stop strings -------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [ORACLE, cut(2)], ids=["oracle", "cut 2"])
@pytest.mark.parametrize("block_size", range(1, 9))
@pytest.mark.parametrize(
    ("stops", "text", "tokens"),
    [
        (("ef",), "abcd", 6),
        (("ef", "efg"), "abcd", 6),
        (("efg", "ef"), "abcd", 6),
        (("efg",), "abcd", 7),
        (("a",), "", 1),
        (("abc",), "", 3),
        (("xyz", "hijkl"), "abcdefg", 12),
        (("defghij", "g"), "abcdef", 7),
    ],
)
def test_a_stop_string_ends_text_and_tokens_alike_at_every_block_size(
    stops, text, tokens, block_size, script
):
    trace = ended(saying(ALPHABET, script), block_size=block_size, stop_strings=stops)
    assert (trace.text, trace.finish_reason) == (text, "stop")
    assert trace.tokens == tuple(ALPHABET.encode()[:tokens])


@pytest.mark.parametrize("block_size", [1, 3, 8])
def test_what_only_begins_like_a_stop_string_is_shown_in_the_end(block_size):
    pair = saying("abcdefgh")
    trace = ended(pair, block_size=block_size, max_new_tokens=8, stop_strings=("efx", "ghij"))
    assert (trace.text, trace.finish_reason) == ("abcdefgh", "length")


def test_no_piece_shows_a_part_of_the_stop_string():
    pieces = streamed(saying("abcXYZdXYend"), block_size=2, stop_strings=("XYe",))
    shown = "".join(one.text for one in pieces)
    assert shown == "abcXYZd"
    seen = ""
    for one in pieces:
        seen += one.text
        assert shown.startswith(seen)


@pytest.mark.parametrize("block_size", range(1, 9))
def test_a_stop_string_of_characters_that_are_split_over_tokens(block_size):
    trace = ended(saying(MIXED), block_size=block_size, stop_strings=("学", "🙂"))
    assert trace.text == "naïve 机器"
    assert trace.tokens == tuple("naïve 机器学".encode())
    assert trace.finish_reason == "stop"


class Words(ByteTokenizer):
    """Bytes, and some words as ids from 300 on."""

    WORDS = ("hello wo", "rld. The", " end", "xcdex")

    def decode(self, ids, skip_special_tokens=False):
        made = b"".join(
            self.WORDS[token - 300].encode() if token >= 300 else bytes([token]) for token in ids
        )
        return made.decode(errors="replace")


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_of_a_token_with_several_characters_the_text_ends_inside(block_size):
    pair = saying([300, 301, 302, 65], tokenizer=Words())
    trace = ended(pair, block_size=block_size, stop_strings=("world",))
    assert (trace.text, trace.tokens, trace.finish_reason) == ("hello ", (300, 301), "stop")
    trace = ended(pair, block_size=block_size, stop_strings=(". T",))
    assert (trace.text, trace.tokens) == ("hello world", (300, 301))


def test_of_several_stop_strings_in_one_token_the_one_that_is_complete_first_counts():
    pair = saying([65, 303, 66], tokenizer=Words())
    assert ended(pair, stop_strings=("cde", "d")).text == "Axc"
    assert ended(pair, stop_strings=("ex", "cde")).text == "Ax"
    assert stop_place("abcd", ("bcd", "cd")) == 1  # complete at once: the longer one
    assert stop_place("abcd", ("x",)) is None


def test_a_stop_string_in_the_prompt_or_over_its_end_stops_nothing():
    pair = scripted_pair(target=replay_target(3, list(b"cdefgh")))
    config = DecodeConfig(max_new_tokens=4, stop_strings=("ab", "bc"))
    trace = decode(pair, tuple(b"xab"), config)
    assert (trace.text, trace.finish_reason) == ("cdef", "length")


def test_a_stop_string_complete_with_the_last_token_allowed_is_a_stop():
    trace = ended(saying(ALPHABET), max_new_tokens=6, block_size=4, stop_strings=("ef",))
    assert (trace.text, trace.finish_reason, len(trace.tokens)) == ("abcd", "stop", 6)


@pytest.mark.parametrize(("end", "text", "tokens"), [("h", "abcd", 6), ("c", "ab", 3)])
def test_of_an_end_token_and_a_stop_string_the_first_one_ends_the_output(end, text, tokens):
    pair = saying(ALPHABET, end_tokens=frozenset(end.encode()))
    trace = ended(pair, block_size=8, stop_strings=("ef",))
    assert (trace.text, trace.finish_reason, len(trace.tokens)) == (text, "stop", tokens)


def test_the_text_of_an_end_token_completes_no_stop_string():
    pair = saying([*b"abc", 300, 301], end_tokens=frozenset({300}))
    trace = ended(pair, stop_strings=("c<300>",))
    assert (trace.text, trace.tokens) == ("abc", (97, 98, 99, 300))


def test_a_block_that_a_stop_string_cuts_is_flagged_and_recorded_whole():
    trace = ended(saying(ALPHABET), block_size=8, stop_strings=("ef",))
    (block,) = trace.blocks
    assert (block.accepted, block.emitted, block.cut) == (7, 5, True)


def test_stop_strings_without_a_tokenizer_are_refused():
    with pytest.raises(ValueError, match=r"stop_strings are 'ef', but this pair has no tokenizer"):
        decode(scripted_pair(tokenizer=None), PROMPT, DecodeConfig(stop_strings=("ef",)))


def test_without_stop_strings_nobody_makes_text_of_tokens():
    def read(tokens):
        raise AssertionError("read")

    assert StopStrings((), read).kept((1, 2)) == 2


@pytest.mark.parametrize(
    ("text", "strings", "rest"),
    [("abc", ("cd",), "ab"), ("abc", ("bcd", "c"), "a"), ("abc", ("x",), "abc"), ("", ("a",), "")],
)
def test_what_may_begin_a_stop_string_is_held_back(text, strings, rest):
    assert without_beginning(text, strings) == rest


# --- text ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", range(1, 9))
def test_no_character_is_torn_wherever_blocks_split_it(block_size):
    said = [*MIXED.encode(), 300]
    for script in (ORACLE, cut(2)):
        pair = saying(said, script, end_tokens=frozenset({300}))
        assert ended(pair, block_size=block_size).text == MIXED
        assert all("\ufffd" not in one.text for one in streamed(pair, block_size=block_size))


def test_an_output_that_ends_inside_a_character_streams_what_its_text_says():
    for limit in range(1, 12):
        trace = ended(saying("é机🙂é"), block_size=4, max_new_tokens=limit)
        assert trace.text == "é机🙂é".encode()[:limit].decode(errors="replace")


def test_bytes_that_never_become_a_character_are_shown_once_and_in_their_place():
    said = [*b"ab", 0xFF, *b"cd", 0xE6, *b"ef"]
    assert ended(saying(said), block_size=3, max_new_tokens=8).text == "ab\ufffdcd\ufffdef"


# --- counts and reasons -------------------------------------------------------------------------


@pytest.mark.parametrize("limit", range(1, 25))
def test_tokens_usage_trace_and_stream_count_the_same_at_every_limit(limit):
    assert len(ended(saying(ALPHABET), block_size=8, max_new_tokens=limit).tokens) == limit


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"max_new_tokens": 5}, "length"),
        ({"stop_tokens": (100,)}, "stop"),
        ({"stop_strings": ("d",)}, "stop"),
        ({"stop_tokens": (100,), "max_new_tokens": 4}, "stop"),
        ({"stop_strings": ("cd",), "max_new_tokens": 4}, "stop"),
    ],
)
@pytest.mark.parametrize("block_size", [1, 4, 8])
def test_the_finish_reason_is_why_the_output_ended(settings, reason, block_size):
    config = DecodeConfig(**({"block_size": block_size, "max_new_tokens": 20} | settings))
    assert decode(saying(ALPHABET), PROMPT, config).finish_reason == reason


def test_the_finish_reasons_of_a_full_context_and_of_a_user_who_stops():
    pair, config = saying(ALPHABET, context_limit=9), DecodeConfig(block_size=4)
    assert decode(pair, PROMPT, config).finish_reason == "context"
    trace = decode(saying(ALPHABET), PROMPT, config, should_stop=lambda: True)
    assert trace.finish_reason == "cancelled"


# --- real models --------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_real_models_take_a_prompt_of_one_token_and_stop_at_a_string(qwen3_toy, backend):
    pair = qwen3_toy.load(backend=backend)
    plain = decode(pair, (65,), DecodeConfig(block_size=1, max_new_tokens=16))
    for size in (2, 8):
        config = DecodeConfig(block_size=size, max_new_tokens=16)
        assert decode(pair, (65,), config).tokens == plain.tokens
    place = next(n for n in range(5, 16) if plain.tokens[n] not in plain.tokens[:n])
    string = pair.text_so_far(plain.tokens[place : place + 1])
    if "\ufffd" in string:
        string = pair.text_so_far(plain.tokens)[-3:-1]
    whole = pair.text_so_far(plain.tokens)
    config = DecodeConfig(block_size=8, max_new_tokens=16, stop_strings=(string,))
    trace = decode(pair, (65,), config)
    assert (trace.text, trace.finish_reason) == (whole[: whole.index(string)], "stop")
    assert trace.tokens == plain.tokens[: len(trace.tokens)]


def test_the_mask_id_is_a_token_like_any_other_to_a_scripted_target():
    mask = scripted_pair().draft_config.mask_token
    pair = saying([5, mask, 7, mask, mask, 9])
    assert decode(pair, PROMPT, DecodeConfig(block_size=4, max_new_tokens=6)).tokens == (
        scripted_greedy(pair, PROMPT, 6)
    )
