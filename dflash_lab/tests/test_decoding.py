"""The loop on a scripted pair: right tokens, right counts, right ends, whatever the draft says."""

import warnings

import pytest

from dflash_lab import DecodeConfig, decode, stream
from dflash_lab.accept import RULES, Verdict
from dflash_lab.decoding import AcceptanceWarning
from dflash_lab.tests.toys import (
    STANDARD_RUN,
    WRONG,
    ByteTokenizer,
    cut,
    replay_target,
    scripted_greedy,
    scripted_pair,
)
from dflash_lab.trace import BlockRecord, PrefillRecord

PROMPT = (5, 3, 8, 13, 21)


def quiet_decode(pair, prompt=PROMPT, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AcceptanceWarning)
        return decode(pair, prompt, DecodeConfig(**settings))


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 7, 8, 16])
@pytest.mark.parametrize("script", STANDARD_RUN.values(), ids=STANDARD_RUN)
def test_decode_emits_what_greedy_decoding_emits(script, block_size):
    pair = scripted_pair(script)
    for limit in (1, 2, 7, 8, 9, 15, 16, 17, 40):
        trace = quiet_decode(pair, block_size=block_size, max_new_tokens=limit)
        assert trace.tokens == scripted_greedy(pair, PROMPT, limit)
        assert trace.finish_reason == "length"


@pytest.mark.parametrize("script", STANDARD_RUN.values(), ids=STANDARD_RUN)
def test_both_rules_emit_what_a_target_that_is_sure_says(script):
    pair = scripted_pair(script)
    for rule in RULES:
        trace = quiet_decode(pair, block_size=8, max_new_tokens=20, temperature=1.0, rule=rule)
        assert trace.tokens == scripted_greedy(pair, PROMPT, 20)
        assert trace.request.rule == rule


@pytest.mark.parametrize("k", range(8))
def test_tau_counts_what_the_script_made_right_and_the_targets_own_token(k):
    trace = quiet_decode(scripted_pair(cut(k)), block_size=8, max_new_tokens=41)
    whole = [block for block in trace.blocks if not block.cut]
    assert {block.accepted for block in whole} == {min(k, 7)}
    assert trace.tau == min(k, 7) + 1


def test_a_block_holds_its_size_of_entries_and_drafts_one_fewer():
    trace = quiet_decode(scripted_pair(), block_size=8, max_new_tokens=40)
    assert {len(block.drafted) for block in trace.blocks} == {7}
    assert {len(block.posterior) for block in trace.blocks} == {8}
    assert {block.block_size for block in trace.blocks} == {8}
    assert max(block.emitted for block in trace.blocks) == 8


def test_block_size_1_is_plain_decoding_and_opens_no_draft():
    pair = scripted_pair()
    trace = quiet_decode(pair, block_size=1, max_new_tokens=9)
    assert not pair.models.sessions[-1].speculate
    assert [block.drafted for block in trace.blocks] == [()] * 8
    assert trace.tau == 1


def test_the_last_block_has_full_width_and_is_cut_in_whole_numbers():
    trace = quiet_decode(scripted_pair(), block_size=8, max_new_tokens=12)
    last = trace.blocks[-1]
    assert last.block_size == 8
    assert (last.accepted, last.emitted, last.cut) == (7, 3, True)
    assert len(trace.tokens) == 12


@pytest.mark.parametrize("i", range(1, 25))
def test_the_output_ends_at_the_first_end_token_wherever_it_stands(i):
    texts = scripted_greedy(scripted_pair(), PROMPT, 40)
    end = texts[i - 1]
    first = texts.index(end) + 1
    pair = scripted_pair(end_tokens=frozenset({end}))
    trace = quiet_decode(pair, block_size=8, max_new_tokens=40)
    assert trace.tokens == texts[:first]
    assert trace.finish_reason == "stop"
    assert sum(block.emitted for block in trace.blocks) + 1 == first


def test_an_end_token_in_the_prompt_stops_nothing():
    pair = scripted_pair(end_tokens=frozenset({PROMPT[2]}))
    assert len(quiet_decode(pair, max_new_tokens=10).tokens) == 10


def test_a_first_token_that_is_an_end_gives_one_token_and_no_block():
    pair = scripted_pair(target=replay_target(len(PROMPT), [9, 8, 7]))
    trace = decode(pair, PROMPT, DecodeConfig(stop_tokens=(9,)))
    assert trace.tokens == (9,)
    assert trace.blocks == ()
    assert (trace.finish_reason, trace.tau) == ("stop", None)


def test_an_end_token_as_the_last_one_allowed_is_a_stop():
    pair = scripted_pair(target=replay_target(len(PROMPT), [4, 5, 6, 7]))
    assert quiet_decode(pair, max_new_tokens=3, stop_tokens=(6,)).finish_reason == "stop"


def test_a_mask_id_is_an_ordinary_token_that_only_counts_where_it_is_emitted():
    mask = scripted_pair().draft_config.mask_token
    ids = [n for n in range(1, 41)]
    pair = scripted_pair(target=replay_target(len(PROMPT), ids))
    assert len(quiet_decode(pair, max_new_tokens=20, stop_tokens=(mask,)).tokens) == 20
    ids[12] = mask
    trace = quiet_decode(pair, max_new_tokens=20, stop_tokens=(mask,))
    assert len(trace.tokens) == 13
    assert trace.finish_reason == "stop"


def test_end_tokens_of_model_tokenizer_and_caller_are_joined():
    pair = scripted_pair(end_tokens=frozenset({2, 3}), tokenizer=ByteTokenizer(eos_token_id=1))
    trace = quiet_decode(pair, max_new_tokens=4, stop_tokens=(5,))
    assert trace.request.stop_tokens == {1, 2, 3, 5}
    trace = quiet_decode(pair, max_new_tokens=4, stop_tokens=(5,), ignore_end=True)
    assert trace.request.stop_tokens == {5}


def test_text_leaves_out_the_token_that_ended_it_and_no_other():
    text = [*b"abc", 7]
    pair = scripted_pair(target=replay_target(len(PROMPT), text), end_tokens=frozenset({98}))
    trace = quiet_decode(pair, max_new_tokens=9, stop_tokens=(7,), ignore_end=True)
    assert (trace.text, trace.finish_reason) == ("abc", "stop")
    trace = quiet_decode(pair, max_new_tokens=2, ignore_end=True)
    assert (trace.text, trace.finish_reason) == ("ab", "length")  # 98 is b, and ended nothing


@pytest.mark.parametrize("prompt_length", [10, 17, 18, 19, 20, 21, 22, 23])
def test_blocks_are_narrower_only_where_the_context_would_overflow(prompt_length):
    pair = scripted_pair(context_limit=24)
    prompt = tuple(range(1, prompt_length + 1))
    trace = quiet_decode(pair, prompt, block_size=8, max_new_tokens=50)
    assert trace.tokens == scripted_greedy(pair, prompt, 24 - prompt_length)
    assert trace.finish_reason == "context"
    for block in trace.blocks:
        assert block.block_size == min(8, 24 - block.start)


@pytest.mark.parametrize("length", [24, 25, 100])
def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(length):
    pair = scripted_pair(context_limit=24)
    with pytest.raises(ValueError, match=f"{length} tokens.*holds 24"):
        decode(pair, tuple(range(1, length + 1)))


@pytest.mark.parametrize("prompt", ["", (), []])
def test_an_empty_prompt_is_refused(prompt):
    with pytest.raises(ValueError, match="prompt is empty"):
        decode(scripted_pair(), prompt)
    with pytest.raises(ValueError, match="prompt is empty"):
        stream(scripted_pair(), prompt)  # at the call, not at the first record


def test_stream_yields_the_prefill_and_then_the_blocks_of_the_trace():
    pair, config = scripted_pair(cut(2)), DecodeConfig(block_size=4, max_new_tokens=20)
    prefill, *blocks = stream(pair, PROMPT, config)
    trace = decode(pair, PROMPT, config)
    assert isinstance(prefill, PrefillRecord)
    assert all(isinstance(block, BlockRecord) for block in blocks)
    assert [b.tokens for b in blocks] == [b.tokens for b in trace.blocks]
    starts = [block.start for block in blocks]
    assert starts == [len(PROMPT) + sum(b.emitted for b in blocks[:i]) for i in range(len(blocks))]


def test_an_abandoned_stream_closes_its_session_and_disturbs_no_other():
    pair = scripted_pair(cut(2))
    config = DecodeConfig(block_size=4, max_new_tokens=30)
    abandoned = stream(pair, PROMPT, config)
    next(abandoned)
    next(abandoned)
    whole = decode(pair, PROMPT, config)
    assert whole.tokens == scripted_greedy(pair, PROMPT, 30)
    first = pair.models.sessions[0]
    assert not first.closed
    abandoned.close()
    assert first.closed
    assert all(session.closed for session in pair.models.sessions)


def test_a_stopped_decode_keeps_what_it_has_and_says_cancelled():
    pair, asked = scripted_pair(cut(2)), iter([False, False, False, True])
    config = DecodeConfig(block_size=4, max_new_tokens=90)
    trace = decode(pair, PROMPT, config, should_stop=lambda: next(asked))
    assert trace.finish_reason == "cancelled"
    assert len(trace.blocks) == 3
    assert trace.tokens == scripted_greedy(pair, PROMPT, len(trace.tokens))
    assert pair.models.sessions[-1].closed


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_a_decode_that_breaks_in_a_block_closes_its_session(kind):
    pair = scripted_pair()
    asked = iter([False, False])

    def boom():
        if next(asked, True):
            raise kind("boom")
        return False

    with pytest.raises(kind):
        decode(pair, PROMPT, DecodeConfig(block_size=2, max_new_tokens=30), should_stop=boom)
    assert pair.models.sessions[-1].closed


def test_times_add_up_in_mode_stages_and_are_not_guessed_in_mode_whole():
    pair = scripted_pair(cut(2), prefill_s=0.02, draft_s=0.01, verify_s=0.02)
    for timing in ("stages", "whole"):
        trace = quiet_decode(pair, block_size=4, max_new_tokens=20, timing=timing)
        for block in trace.blocks:
            seconds = block.seconds
            if timing == "whole":
                assert seconds.draft is seconds.verify is seconds.commit is None
            else:
                stages = seconds.draft + seconds.verify + seconds.commit
                assert 0.010 <= seconds.draft < seconds.verify
                assert stages == pytest.approx(seconds.total, rel=0.05)
        assert trace.ttft_s >= 0.02
        assert trace.ttft_s + trace.decode_s == pytest.approx(trace.total_s, rel=0.05)


def test_what_a_reader_does_between_two_records_is_not_counted():
    import time

    records = []
    config = DecodeConfig(block_size=4, max_new_tokens=12)
    for record in stream(scripted_pair(cut(2)), PROMPT, config):
        time.sleep(0.02)
        records.append(record)
    assert all(record.seconds.total < 0.015 for record in records[1:])


def test_a_useless_draft_is_complained_about_with_the_usual_causes():
    config = DecodeConfig(block_size=8, max_new_tokens=40)
    with pytest.warns(AcceptanceWarning, match="0 accepted in 39 blocks.*target_layer_ids"):
        trace = decode(scripted_pair(WRONG), PROMPT, config)
    assert len(trace.warnings) == 1
    assert decode(scripted_pair(cut(1)), PROMPT, config).warnings == ()
    assert decode(scripted_pair(), PROMPT, DecodeConfig(block_size=1)).warnings == ()


def test_accepting_one_too_many_or_one_too_few_does_not_pass_unseen(monkeypatch):
    pair = scripted_pair(cut(3))
    right = RULES["match"]

    def one_more(verdict: Verdict) -> int:
        return min(right(verdict) + 1, len(verdict.drafted))

    def one_fewer(verdict: Verdict) -> int:
        return max(right(verdict) - 1, 0)

    monkeypatch.setitem(RULES, "match", one_more)
    trace = quiet_decode(pair, block_size=8, max_new_tokens=40)
    assert trace.tokens != scripted_greedy(pair, PROMPT, 40)
    monkeypatch.setitem(RULES, "match", one_fewer)
    trace = quiet_decode(pair, block_size=8, max_new_tokens=40)
    assert trace.tokens == scripted_greedy(pair, PROMPT, 40)  # slower, and only tau tells
    assert trace.tau == 3
