"""The comparison with an independent decoder: equal, or where it parts."""

import pytest

from dflash_lab import DecodeConfig, Prompt
from dflash_lab.accept import RULES
from dflash_lab.exactness import check_exactness, first_difference
from dflash_lab.tests.toys import cut, scripted_pair

PROMPTS = [
    Prompt(id=f"p{n}", turns=(f"say {n}",), category="chat", source="test") for n in range(3)
]
CONFIG = DecodeConfig(block_size=8, max_new_tokens=30)


@pytest.mark.parametrize(
    ("ours", "reference", "place"),
    [
        ((1, 2), (1, 2), None),
        ((1, 2), (1, 3), 1),
        ((1,), (1, 2), 1),
        ((1, 2), (1,), 1),
        ((), (), None),
    ],
)
def test_the_first_difference_is_found_even_where_one_text_is_shorter(ours, reference, place):
    assert first_difference(ours, reference) == place


def test_a_right_decoder_is_equal_on_every_prompt():
    record = check_exactness(scripted_pair(cut(3)), PROMPTS, CONFIG)
    assert (record["equal"], record["of"]) == (3, 3)
    assert [row["first_difference"] for row in record["prompts"]] == [None] * 3
    assert record["dtype"] == "float32"


def test_a_broken_decoder_is_told_with_place_and_both_tokens(monkeypatch):
    right = RULES["match"]
    monkeypatch.setitem(RULES, "match", lambda v: min(right(v) + 1, len(v.drafted)))
    record = check_exactness(scripted_pair(cut(3)), PROMPTS, CONFIG)
    assert record["equal"] == 0
    for row in record["prompts"]:
        assert row["first_difference"] == 4  # prefill, three right drafts, then the wrong one
        assert row["ours"] != row["reference"]


def test_a_real_pair_is_compared_with_transformers(toy_pair):
    import warnings

    from dflash_lab.decoding import AcceptanceWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AcceptanceWarning)
        record = check_exactness(toy_pair, PROMPTS, CONFIG)
    assert record["equal"] == 3
