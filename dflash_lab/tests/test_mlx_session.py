"""The MLX verbs on tiny models in float32, beside decoding that shares no code with them."""

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import load_model, quantize_model, save_config, save_model

from dflash_lab import DecodeConfig, decode, load_pair
from dflash_lab.backends import (
    OutOfMemory,
    TargetNotFinite,
    TargetNotReversible,
    mlx_session,
    mlx_target,
)
from dflash_lab.backends.mlx_session import MlxBlock, MlxSession, pick_device, pick_dtype
from dflash_lab.backends.mlx_target import spelled_for_mlx, take_back
from dflash_lab.decoding import AcceptanceWarning
from dflash_lab.tests.toys import ORACLE, WRONG, cut, noise, seen, told_block

pytestmark = pytest.mark.usefixtures("quiet")

SCRIPTS = {"oracle": ORACLE, "wrong": WRONG, "cut 3": cut(3), "noise": noise(0.5)}


@pytest.fixture(scope="module")
def toy(qwen3_toy):
    return qwen3_toy


@pytest.fixture(scope="module")
def pair(toy):
    return toy.load(backend="mlx")


class ScriptedDraft(MlxSession):
    """A real session whose proposals come from a script instead of the network."""

    def follow(self, script, text):
        self.script, self.text = script, text  # prompt and greedy continuation
        return self

    def draft(self, anchor, block_size):
        made = super().draft(anchor, block_size)  # the network runs, its caches stay right
        tokens = told_block(self.script, self.text, anchor, self.committed, block_size)
        return MlxBlock(mx.array([tokens]), made.finite)


def scripted(monkeypatch, pair, script, text):
    def session(draft_window, speculate):
        draft = pair.models.draft if speculate else None
        return ScriptedDraft(pair.models.target, draft, draft_window).follow(script, text)

    monkeypatch.setattr(pair.models, "session", session)


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_tokens_equal_plain_decoding_for_every_draft(monkeypatch, toy, pair, script):
    prompt, text = toy.prompts[0], toy.greedy[0]
    scripted(monkeypatch, pair, script, (*prompt, *text))
    trace = decode(pair, prompt, DecodeConfig(block_size=8, max_new_tokens=25))
    assert trace.tokens == text[:25]
    accepted = {block.accepted for block in trace.blocks}
    if script is ORACLE:
        assert accepted == {7}
    if script is WRONG:
        assert accepted == {0}


def test_tokens_equal_the_librarys_own_generator(toy, pair):
    for prompt, text in zip(toy.prompts[:2], toy.greedy, strict=False):
        made = pair.models.library_generate(prompt, 20, pair.stop_tokens)
        assert made.tokens == text[:20]
        assert 0 < made.ttft_s <= made.total_s
    stops = frozenset(text[3:4])
    made = pair.models.library_generate(prompt, 20, stops)
    assert made.tokens == text[: text.index(text[3]) + 1]  # the stop token among them


def test_keeping_one_rejected_row_does_not_pass_unseen(monkeypatch, toy, pair):
    prompt, text = toy.prompts[0], toy.greedy[0]
    scripted(monkeypatch, pair, cut(2), (*prompt, *text))
    monkeypatch.setattr(
        mlx_session, "take_back", lambda cache, tokens: take_back(cache, max(0, tokens - 1))
    )
    config = DecodeConfig(block_size=8, max_new_tokens=30)
    assert decode(pair, prompt, config).tokens != text[:30]


def test_a_trim_that_does_nothing_is_an_error_and_never_goes_on(monkeypatch, toy, pair):
    monkeypatch.setattr(KVCache, "trim", lambda self, tokens: 0)
    scripted(monkeypatch, pair, cut(2), (*toy.prompts[0], *toy.greedy[0]))
    with pytest.raises(TargetNotReversible, match="positions after"):
        decode(pair, toy.prompts[0], DecodeConfig(block_size=8))


def test_a_cache_that_stops_being_trimmable_in_a_run_is_an_error(monkeypatch, toy, pair):
    scripted(monkeypatch, pair, cut(3), (*toy.prompts[0], *toy.greedy[0]))
    monkeypatch.setattr(KVCache, "is_trimmable", lambda self: False)
    with pytest.raises(TargetNotReversible, match="positions after"):
        decode(pair, toy.prompts[0], DecodeConfig(block_size=8))


def test_proposals_are_slots_1_and_on_and_slot_0_is_never_one(monkeypatch, toy, pair):
    class Slots(type(pair.models.draft)):
        def __call__(self, embedded, *_):
            slots = mx.arange(float(embedded.shape[2])).at[0].add(50.0)
            return mx.broadcast_to(slots.reshape(1, 1, -1, 1), (1, 1, embedded.shape[2], 64))

    def head(states):
        return (mx.arange(512) == 100 + states[..., :1]).astype(mx.float32)

    monkeypatch.setattr(pair.models.target, "head", head)
    session = MlxSession(pair.models.target, Slots(pair.draft_config), None)
    session.prefill(toy.prompts[0])
    block = session.draft(7, 8)
    assert block.tokens.tolist() == [[7, *range(101, 108)]]
    sure = np.e / (np.e + 511)  # one logit of 1 among 511 of 0
    np.testing.assert_allclose(session.confidences(block), [sure] * 7, 1e-5)
    assert session.confidences(session.draft(7, 1)) == []
    assert len(session.verify(block, rows=3).posterior) == 3


def test_plain_decoding_captures_no_features(toy, pair, monkeypatch):
    asked = []
    real = mlx_target.captured
    monkeypatch.setattr(
        mlx_target, "captured", lambda layers, taps: asked.append(taps) or real(layers, taps)
    )
    decode(pair, toy.prompts[0], DecodeConfig(block_size=1, max_new_tokens=5))
    assert set(asked) == {()}


def test_a_pair_used_again_gives_the_first_runs_trace(toy, pair):
    def blocks_of(pair, prompt):
        return seen(decode(pair, prompt, DecodeConfig(block_size=8, max_new_tokens=16)))

    long = tuple(i % 200 for i in range(200))
    first = blocks_of(pair, long)
    short = blocks_of(pair, toy.prompts[0][:5])
    assert blocks_of(pair, long) == first
    assert short == blocks_of(toy.load(backend="mlx"), toy.prompts[0][:5])


@pytest.mark.parametrize("window", [None, 40])
def test_prefill_in_chunks_feeds_the_draft_everything(pair, window):
    prompt = tuple((7 * i) % 250 for i in range(100))
    drafts = []
    for chunk in (1000, 16, 33):
        session = MlxSession(pair.models.target, pair.models.draft, window, prefill_chunk=chunk)
        anchor = session.prefill(prompt)
        drafts.append((anchor, session.draft(anchor, 8).tokens.tolist()))
        assert len(session.context) == min(100, window or 100)
    assert drafts[0] == drafts[1] == drafts[2]


def test_one_row_of_logits_is_computed_however_long_the_prompt(monkeypatch, pair):
    read = []
    real = mlx_session.best
    monkeypatch.setattr(
        mlx_session, "best", lambda logits: read.append(logits.shape) or real(logits)
    )
    asked = []
    target = pair.models.target
    logits = target.logits
    monkeypatch.setattr(
        target, "logits", lambda ids, *rest: asked.append(ids.shape[1]) or logits(ids, *rest)
    )
    MlxSession(target, pair.models.draft, 64, prefill_chunk=50).prefill([1] * 120)
    assert asked == [50, 50, 19, 1]
    assert read == [(512,)]


def draft_logits(session, anchor, monkeypatch):
    """Draft logits of the next block of a session."""
    kept = []
    real = session.target.head
    with monkeypatch.context() as patch:
        patch.setattr(session.target, "head", lambda states: kept.append(real(states)) or kept[-1])
        session.draft(anchor, 8)
    return np.array(kept[0])


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize(
    "k", [0, 7, *(pytest.param(k, marks=pytest.mark.slow) for k in range(1, 7))]
)
def test_draft_logits_after_every_block_equal_those_of_a_fresh_draft(
    monkeypatch, toy, pair, k, window
):
    prompt, text = toy.prompts[0], toy.greedy[0]
    whole, models = (*prompt, *text), pair.models
    session = ScriptedDraft(models.target, models.draft, window).follow(cut(k), whole)
    anchor = session.prefill(prompt)
    for _ in range(3):
        session.verify(session.draft(anchor, 8))
        session.commit(k)
        place = session.committed
        anchor = whole[place]
        assert {part.offset for part in session.cache} == {place}
        fresh = MlxSession(models.target, models.draft, window)
        fresh.prefill(whole[:place])
        live = draft_logits(session, anchor, monkeypatch)
        np.testing.assert_allclose(live, draft_logits(fresh, anchor, monkeypatch), atol=1e-4)
        assert session.draft_cache_tokens == min(place, window or place)


@pytest.mark.parametrize("length", [7, 8, 9, 17])
def test_a_context_position_matters_if_and_only_if_it_is_inside_the_window(
    monkeypatch, pair, length
):
    prompt, window, target = [(11 * i + 3) % 250 for i in range(length)], 8, pair.models.target

    def logits(changed=None):
        """Draft logits of the first block, the target's features changed at one position."""
        session, real, done = MlxSession(target, pair.models.draft, window), target.logits, [0]

        def altered(ids, *rest):
            made, features = real(ids, *rest)
            here = mx.arange(done[0], done[0] + ids.shape[1])
            done[0] += ids.shape[1]
            shift = mx.where(here == (-1 if changed is None else changed), 3.0, 0.0)
            return made, features + shift[None, :, None]

        with monkeypatch.context() as patch:
            patch.setattr(target, "logits", altered)
            anchor = session.prefill(prompt)
        return draft_logits(session, anchor, monkeypatch)

    seen = logits()
    reacts = [not np.array_equal(seen, logits(place)) for place in range(length)]
    inside = min(length, window)
    assert reacts == [False] * (length - inside) + [True] * inside


def test_a_huge_window_gives_the_trace_of_none(toy, pair):
    runs = [
        decode(pair, toy.prompts[0], DecodeConfig(draft_window=window, max_new_tokens=12)).blocks
        for window in (None, 10**9)
    ]
    told = [[(b.start, b.verdict, b.draft_cache_tokens) for b in blocks] for blocks in runs]
    assert told[0] == told[1]


def test_draft_cache_bytes_stay_bounded_with_a_window_and_are_in_the_trace(toy, pair):
    config = DecodeConfig(block_size=4, draft_window=16, max_new_tokens=40, ignore_end=True)
    trace = decode(pair, toy.prompts[0], config)
    per_token = pair.draft_config.context_bytes_per_token(4)
    assert max(block.draft_cache_tokens for block in trace.blocks) == 16
    assert max(block.draft_cache_bytes for block in trace.blocks) <= 64 * per_token


@pytest.mark.parametrize("block_size", [1, 7, 16])
def test_unused_memory_is_given_back_once_for_each_256_tokens_crossed(
    monkeypatch, pair, block_size
):
    cleared = []
    monkeypatch.setattr(mlx_session, "take_back", lambda cache, tokens: None)
    session = MlxSession(pair.models.target, None, None)
    session.committed = 250
    monkeypatch.setattr(mlx_session.mx, "clear_cache", lambda: cleared.append(session.committed))
    while session.committed < 1100:
        session.commit(block_size - 1)
    assert [place // 256 for place in cleared] == [1, 2, 3, 4]
    assert all(place % 256 < block_size for place in cleared)


OUT = {
    "metal": "[metal::malloc] Attempting to allocate 987654321 bytes which is greater than the "
    "maximum allowed buffer size of 5 bytes.",
    "any": "[malloc] Unable to allocate 987654321 bytes.",
}


@pytest.mark.parametrize("said", OUT.values(), ids=OUT)
@pytest.mark.parametrize("window", [None, 64])
def test_running_out_of_memory_names_block_size_window_and_bytes_and_the_ways_out(
    monkeypatch, toy, pair, said, window
):
    def full(*_):
        raise RuntimeError(said)

    session = MlxSession(pair.models.target, pair.models.draft, window)
    block = session.draft(session.prefill(toy.prompts[0]), 16)
    monkeypatch.setattr(pair.models.target, "logits", full)
    named = "no draft window" if window is None else "window 64"
    with pytest.raises(
        OutOfMemory,
        match=rf"block size 16 and {named}.*987,654,321 bytes.*smaller block size.*smaller draft w",
    ):
        session.verify(block)
    monkeypatch.setattr(
        pair.models.target, "logits", lambda *_: (_ for _ in ()).throw(RuntimeError("a bug"))
    )
    with pytest.raises(RuntimeError, match=r"^a bug$"):
        session.verify(block)


@pytest.fixture(scope="module")
def packed(toy, tmp_path_factory):
    """The toy's target folder with weights of 4 and of 8 bits."""
    folders = {}
    for bits in (4, 8):
        folder = tmp_path_factory.mktemp("packed") / "target"
        shutil.copytree(toy.target, folder)
        model, config = load_model(folder, model_config=spelled_for_mlx({}))
        model, config = quantize_model(model, config, group_size=64, bits=bits)
        save_model(folder, model)
        save_config(config, folder / "config.json")
        folders[bits] = folder
    return folders


@pytest.mark.parametrize(("bits", "draft_bits"), [(4, None), (4, 8), (8, 4)])
def test_a_quantised_target_with_any_draft_says_what_it_says_alone(toy, packed, bits, draft_bits):
    settings = {"backend": "mlx", "dtype": "float32", "draft_bits": draft_bits}
    pair = load_pair(target=packed[bits], draft=toy.draft, **settings)
    assert pair.models.describe()["target_quantization"]["bits"] == bits
    assert pair.models.describe()["draft_bits"] == draft_bits
    plain, drafted = (
        decode(pair, toy.prompts[0], DecodeConfig(block_size=size, max_new_tokens=16))
        for size in (1, 8)
    )
    assert drafted.tokens == plain.tokens
    assert len(drafted.blocks[0].drafted) == 7


def test_a_draft_of_other_bits_is_another_draft_in_the_record(toy):
    sha = {
        bits: load_pair(
            target=toy.target, draft=toy.draft, backend="mlx", draft_bits=bits
        ).fingerprint["draft"]
        for bits in (None, 4, 8)
    }
    assert len(set(sha.values())) == 3


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"draft_bits": 4}, "only mlx quantises"),
        ({"draft_bits": 3, "backend": "mlx"}, "draft_bits is 3; expected 4, 8 or None"),
        ({"device": "mps", "backend": "mlx"}, "device is 'mps'.*with mlx auto, cpu or gpu"),
        ({"device": "gpu"}, "device is 'gpu'"),
    ],
)
def test_what_a_backend_does_not_have_is_refused_before_anything_is_read(settings, words):
    with pytest.raises(ValueError, match=words):
        load_pair(target="t", draft="d", **settings)


def test_a_draft_whose_numbers_overflow_is_told_while_the_text_stays_right(toy):
    pair = toy.load(backend="mlx")
    weight = pair.models.draft.layers[0].mlp.down_proj
    weight.weight = weight.weight.at[0, 0].add(mx.inf)
    with pytest.warns(AcceptanceWarning, match="not finite from block 0"):
        trace = decode(pair, toy.prompts[0], DecodeConfig(max_new_tokens=12))
    assert trace.tokens == toy.greedy[0][:12]


def spoiled(monkeypatch, target, first_row):
    """Make the target's logits NaN in all rows of a pass from that one on."""
    real = target.logits

    def logits(ids, cache, taps):
        made, features = real(ids, cache, taps)
        return made.at[:, first_row:, 3].add(mx.nan), features

    monkeypatch.setattr(target, "logits", logits)


def test_target_logits_that_are_not_finite_end_the_run_and_name_the_dtype(monkeypatch, toy, pair):
    prompt, text = toy.prompts[0], toy.greedy[0]
    spoiled(monkeypatch, pair.models.target, 2)
    scripted(monkeypatch, pair, ORACLE, (*prompt, *text))
    with pytest.raises(TargetNotFinite, match=r"not finite numbers in float32. Its weights"):
        decode(pair, prompt, DecodeConfig(block_size=8))
    # what overflows only behind a rejected token is no part of the text
    scripted(monkeypatch, pair, cut(1), (*prompt, *text))
    assert decode(pair, prompt, DecodeConfig(block_size=8, max_new_tokens=9)).tokens == text[:9]


def test_a_prefill_whose_logits_are_not_finite_gives_no_token(monkeypatch, toy, pair):
    spoiled(monkeypatch, pair.models.target, 0)
    with pytest.raises(TargetNotFinite, match="float32"):
        decode(pair, toy.prompts[0], DecodeConfig(max_new_tokens=1))


def test_threads_other_than_the_one_that_loaded_decode_the_same(toy, pair):
    config = DecodeConfig(block_size=4, max_new_tokens=12)
    alone = [decode(pair, prompt, config).tokens for prompt in toy.prompts[:2]]
    found = []
    worker = threading.Thread(
        target=lambda: found.append(decode(pair, toy.prompts[0], config).tokens)
    )
    worker.start()
    worker.join(timeout=60)
    with ThreadPoolExecutor(2) as pool:
        found += pool.map(lambda prompt: decode(pair, prompt, config).tokens, toy.prompts[:2])
        made = pool.submit(pair.models.library_generate, toy.prompts[0], 12, frozenset())
        assert made.result().tokens == alone[0]
    assert found == [alone[0], *alone]


def test_a_draft_that_is_timed_is_computed_when_it_is_waited_for(monkeypatch, toy, pair):
    session = MlxSession(pair.models.target, pair.models.draft, None)
    block = session.draft(session.prefill(toy.prompts[0]), 8)
    waited = []
    monkeypatch.setattr(mlx_session.mx, "eval", lambda *arrays: waited.extend(arrays))
    session.synchronize()
    assert any(array is block.tokens for array in waited)


def test_peak_memory_is_that_of_the_time_since_the_last_call(pair):
    pair.models.peak_bytes()
    mx.eval(mx.ones((30_000_000,)) + 1)
    assert pair.models.peak_bytes() > 100_000_000
    assert pair.models.peak_bytes() < 100_000_000


def test_auto_takes_what_is_there_and_a_missing_device_is_named(monkeypatch):
    monkeypatch.setattr(mlx_session.mx, "is_available", lambda device: device == mx.cpu)
    assert pick_device("auto") == mx.cpu
    assert pick_dtype("auto", mx.cpu) == mx.float32
    assert pick_dtype("auto", mx.gpu) == mx.bfloat16
    with pytest.raises(ValueError, match="MLX has no GPU"):
        pick_device("gpu")
