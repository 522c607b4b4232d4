"""Text of tokenizers that read bytes together; ends that are none, and ends beside each other."""

import random

import pytest

from dflash_lab import DecodeConfig, decode
from dflash_lab.racing import Lane
from dflash_lab.tests.test_ends import ALPHABET, PROMPT, ended, saying, streamed
from dflash_lab.tests.toys import WRONG, ByteTokenizer, cut

pytestmark = pytest.mark.usefixtures("quiet")

SIZES = (1, 3, 8)


class BytesTogether(ByteTokenizer):
    """Bytes beside each other are one piece of text: where one does not fit, none of them does.

    So do tokenizers that fall back to bytes for what they have no token of.
    """

    def decode(self, ids, skip_special_tokens=False):
        text, run = "", b""
        for token in (*ids, None):
            if token is not None and 128 <= token < 256:
                run += bytes([token])
                continue
            text, run = text + _together(run), b""
            text += "" if token is None else chr(token) if token < 128 else f"<{token}>"
        return text


def _together(run):
    try:
        return run.decode()
    except UnicodeDecodeError:
        return "\ufffd" * len(run)


def test_the_tokenizer_of_these_tests_takes_text_back():
    read = BytesTogether().decode
    assert [read("机".encode()), read("机".encode() + b"\xff")] == ["机", "\ufffd" * 4]


@pytest.mark.parametrize("block_size", SIZES)
@pytest.mark.parametrize(
    "said",
    ["a机🙂b👩‍👩‍👧".encode(), b"x\xe6\x9c\xba\xffy\xe6\x9c\xba"],
    ids=["whole characters", "one byte too many"],
)
def test_pieces_join_to_the_text_though_a_byte_undoes_the_character_before_it(said, block_size):
    pair = saying(list(said), tokenizer=BytesTogether())
    for limit in range(1, len(said) + 1):
        trace = ended(pair, block_size=block_size, max_new_tokens=limit)
        assert trace.text == BytesTogether().decode(said[:limit])


def test_text_goes_on_to_be_shown_after_such_a_byte():
    pair = saying([*b"x\xe6\x9c\xba\xffyz", *b"abcdef"], tokenizer=BytesTogether())
    shown = [one.text for one in streamed(pair, block_size=1, max_new_tokens=12)]
    assert shown[-3:] == ["c", "d", "e"]


@pytest.mark.parametrize("script", [cut(2), WRONG], ids=["cut 2", "wrong"])
@pytest.mark.parametrize("block_size", range(1, 9))
def test_a_stop_string_of_bytes_ends_the_output_at_the_same_token_at_every_block_size(
    block_size, script
):
    # the byte after the string undoes it, in the same block or in the next
    pair = saying(list(b"ab\xe6\x9c\xba\xffcdef"), script, tokenizer=BytesTogether())
    trace = ended(pair, block_size=block_size, stop_strings=("机",), max_new_tokens=11)
    assert (trace.text, trace.tokens) == ("ab", tuple(b"ab\xe6\x9c\xba"))


# --- ends that end nothing ----------------------------------------------------------------------


@pytest.mark.parametrize("script", [WRONG, cut(1)], ids=["wrong", "cut 1"])
@pytest.mark.parametrize("block_size", SIZES)
def test_what_was_drafted_in_vain_ends_nothing(block_size, script):
    said = ALPHABET[::2]  # what is drafted wrongly is the letter between two of these
    pair = saying(said, script, end_tokens=frozenset(ALPHABET[1::2].encode()))
    asked = {"max_new_tokens": len(said), "stop_strings": ("ad", "aceh", *ALPHABET[3::2])}
    trace = ended(pair, block_size=block_size, **asked)
    assert (trace.text, trace.finish_reason) == (said, "length")
    vain = {token for block in trace.blocks for token in block.drafted[block.accepted :]}
    assert block_size == 1 or vain & set(ALPHABET[1::2].encode())


@pytest.mark.parametrize("block_size", SIZES)
@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5])
def test_an_end_token_before_the_shortest_output_is_text_wherever_the_output_ends(
    limit, block_size
):
    said = [65, 300, 66, 300, 67, 68]
    pair = saying(said, end_tokens=frozenset({300}), context_limit=len(PROMPT) + limit)
    trace = decode(pair, PROMPT, DecodeConfig(block_size=block_size, min_new_tokens=5))
    assert trace.finish_reason == "context"
    assert trace.text == ByteTokenizer().decode(said[:limit])


@pytest.mark.parametrize("block_size", SIZES)
def test_a_stop_string_may_hold_the_text_of_an_end_token_that_ends_nothing(block_size):
    pair = saying([65, 300, 66, 67], end_tokens=frozenset({300}))
    config = DecodeConfig(block_size=block_size, min_new_tokens=9, stop_strings=("A<300>",))
    trace = decode(pair, PROMPT, config)
    assert (trace.text, trace.tokens) == ("", (65, 300))


def brute_force(said, stops):
    """Text and number of tokens of a text of one character a token, looked at after each."""
    for count in range(1, len(said) + 1):
        starts = [said.find(stop) for stop in stops if said[:count].endswith(stop)]
        if starts:
            return said[: min(starts)], count
    return said, len(said)


@pytest.mark.parametrize("seed", range(30))
def test_stop_strings_that_overlap_each_other_and_themselves_end_every_output_alike(seed):
    dice = random.Random(seed)
    said = "".join(dice.choices("ab", k=20))
    stops = ["".join(dice.choices("ab", k=dice.randint(3, 6))) for _ in range(3)]
    text, count = brute_force(said, stops)
    for block_size in (1, 2, 5, 8):
        pair = saying(said, cut(dice.randrange(4)))
        trace = ended(pair, block_size=block_size, max_new_tokens=20, stop_strings=stops)
        assert (trace.text, len(trace.tokens)) == (text, count)


@pytest.mark.parametrize("settings", [{}, {"stop_strings": ("ef",)}, {"stop_tokens": (103,)}])
def test_a_race_ends_and_names_its_end_as_a_decode_does(settings):
    pair, config = saying(ALPHABET), DecodeConfig(block_size=4, max_new_tokens=9, **settings)
    lane = Lane(pair, pair.encode(PROMPT), config)
    assert lane.trace().finish_reason == "cancelled"
    while not lane.ended:
        lane.step()
    raced, alone = lane.trace(), decode(pair, PROMPT, config)
    for name in ("tokens", "text", "finish_reason"):
        assert getattr(raced, name) == getattr(alone, name)


@pytest.mark.parametrize("last", range(1, 18))
def test_a_budget_an_end_token_and_a_stop_string_cut_a_block_at_the_same_place(last):
    for settings in (
        {"max_new_tokens": last},
        {"stop_tokens": (ALPHABET[last - 1].encode()[0],)},
        {"stop_strings": (ALPHABET[last - 1],)},
    ):
        blocks = decode(saying(ALPHABET), PROMPT, DecodeConfig(block_size=8, **settings)).blocks
        assert 1 + sum(block.emitted for block in blocks) == last
        assert [block.cut for block in blocks[:-1]] == [False] * len(blocks[:-1])
        assert not blocks or blocks[-1].cut == (last % 8 != 1)
