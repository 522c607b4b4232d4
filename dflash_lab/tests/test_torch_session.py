"""The torch verbs on tiny models in float32, beside decoding that shares no code with them."""

import threading

import pytest
import torch

from dflash_lab import DecodeConfig, decode, stream
from dflash_lab.backends import torch_session, torch_target
from dflash_lab.backends.torch_model import DraftNetwork
from dflash_lab.backends.torch_session import TorchSession, pick_device, pick_dtype
from dflash_lab.backends.torch_target import (
    LayerCache,
    TargetNotFinite,
    TargetNotReversible,
    captured,
    take_back,
)
from dflash_lab.checkpoint import MaskIdOutOfRange, WidthMismatch
from dflash_lab.decoding import AcceptanceWarning
from dflash_lab.tests.told import ToldSession, told_sessions
from dflash_lab.tests.toys import (
    ORACLE,
    STANDARD_RUN,
    WRONG,
    cut,
    draft_json,
    seen,
    toy_models,
)

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture(
    scope="module",
    params=[
        "qwen3",
        pytest.param("qwen3 untied", marks=pytest.mark.slow),
        pytest.param("llama", marks=pytest.mark.slow),
    ],
)
def toy(request, tmp_path_factory):
    kind, _, untied = request.param.partition(" ")
    return toy_models(tmp_path_factory.mktemp("toy"), kind=kind, tied=not untied)


@pytest.fixture(scope="module")
def pair(toy):
    return toy.load()


def scripted(monkeypatch, pair, script, text):
    monkeypatch.setattr(pair.models, "session", told_sessions(pair, script, text))


@pytest.mark.parametrize("script", STANDARD_RUN.values(), ids=STANDARD_RUN)
def test_tokens_equal_plain_decoding_for_every_draft(monkeypatch, toy, pair, script):
    for prompt, text, size in zip(toy.prompts, toy.greedy, (8, 3), strict=False):
        scripted(monkeypatch, pair, script, (*prompt, *text))
        config = DecodeConfig(block_size=size, max_new_tokens=36)
        assert decode(pair, prompt, config).tokens == text[:36]


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_tokens_equal_plain_decoding_for_every_block_size_and_window(toy, pair, size, window):
    config = DecodeConfig(
        block_size=size, draft_window=window, max_new_tokens=24, beyond_trained=True
    )
    assert decode(pair, toy.prompts[0], config).tokens == toy.greedy[0][:24]


def test_tokens_equal_the_librarys_own_generator(toy, pair):
    for prompt, text in zip(toy.prompts, toy.greedy, strict=True):
        made = pair.models.library_generate(prompt, 40, pair.stop_tokens)
        assert made.tokens == text[:40]
        assert 0 < made.ttft_s <= made.total_s


def test_keeping_one_rejected_row_does_not_pass_unseen(monkeypatch, toy, pair):
    prompt, text = toy.prompts[0], toy.greedy[0]

    def keep_one_more(cache, tokens):
        take_back(cache, max(0, tokens - 1))

    scripted(monkeypatch, pair, cut(2), (*prompt, *text))
    monkeypatch.setattr(torch_session, "take_back", keep_one_more)
    config = DecodeConfig(block_size=8, max_new_tokens=40)
    assert decode(pair, prompt, config).tokens != text[:40]


def test_a_trim_that_does_nothing_is_an_error_and_never_goes_on(monkeypatch, toy, pair):
    monkeypatch.setattr(LayerCache, "take_back", lambda self, tokens: None)
    scripted(monkeypatch, pair, cut(2), (*toy.prompts[0], *toy.greedy[0]))
    with pytest.raises(TargetNotReversible, match="positions after"):
        decode(pair, toy.prompts[0], DecodeConfig(block_size=8))


def test_proposals_are_slots_1_and_on_and_slot_0_is_never_one(monkeypatch, toy, pair):
    target = pair.models.target

    class Slots(DraftNetwork):
        shift = 0.0

        def forward(self, embedded, *_):
            slots = torch.arange(float(embedded.shape[2]))
            slots[0] += self.shift
            return slots.view(1, 1, -1, 1).expand(-1, -1, -1, 64)

    class Head(torch.nn.Module):
        def forward(self, states):
            wanted = 100 + states[..., 0].long()
            return torch.nn.functional.one_hot(wanted.clamp(0, 511), 512).float()

    monkeypatch.setattr(target, "head", Head())
    for shift in (0.0, 50.0):
        network = Slots(pair.draft_config)
        network.shift = shift
        session = TorchSession(target, network, None)
        session.prefill(toy.prompts[0])
        block = session.draft(7, 8)
        assert block.tokens.tolist() == [[7, *range(101, 108)]]


def test_features_are_the_output_of_the_layer_with_that_number(toy, pair):
    target = pair.models.target
    ids = torch.tensor([toy.prompts[0]])
    hidden = target.model(ids, output_hidden_states=True, use_cache=False).hidden_states
    _, features = target.logits(ids, target.new_cache(), (0, 1, 2))
    assert torch.equal(features, torch.cat([hidden[tap + 1] for tap in (0, 1, 2)], dim=-1))


def test_no_hook_outlives_a_pass_even_one_that_breaks(toy, pair):
    layers = pair.models.target.layers

    def hooks():
        return sum(len(layer._forward_hooks) for layer in layers)

    before = hooks()
    decode(pair, toy.prompts[0], DecodeConfig(block_size=4, max_new_tokens=8))
    abandoned = stream(pair, toy.prompts[0], DecodeConfig(block_size=4, max_new_tokens=20))
    next(abandoned)
    assert hooks() == before
    with pytest.raises(RuntimeError, match="boom"), captured(layers, (1, 2)):
        raise RuntimeError("boom")
    assert hooks() == before


def test_plain_decoding_captures_no_features(toy, pair, monkeypatch):
    asked = []
    real = torch_target.captured
    monkeypatch.setattr(
        torch_target, "captured", lambda layers, taps: asked.append(taps) or real(layers, taps)
    )
    decode(pair, toy.prompts[0], DecodeConfig(block_size=1, max_new_tokens=5))
    assert set(asked) == {()}


def test_two_streams_interleaved_and_two_threads_give_what_each_gives_alone(toy, pair):
    config = DecodeConfig(block_size=4, max_new_tokens=30)
    alone = [decode(pair, prompt, config) for prompt in toy.prompts[:2]]
    streams = [stream(pair, prompt, config) for prompt in toy.prompts[:2]]
    seen = [[], []]
    for _ in range(31):
        for source, records in zip(streams, seen, strict=True):
            record = next(source, None)
            if record is not None:
                records.append(record)
    for trace, records in zip(alone, seen, strict=True):
        assert [r.tokens for r in records[1:]] == [b.tokens for b in trace.blocks]
        assert [r.drafted for r in records[1:]] == [b.drafted for b in trace.blocks]

    results = {}

    def work(number):
        results[number] = decode(pair, toy.prompts[number], config)

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for number, trace in enumerate(alone):
        assert results[number].tokens == trace.tokens
        assert [b.drafted for b in results[number].blocks] == [b.drafted for b in trace.blocks]


def test_a_pair_used_again_gives_the_first_runs_trace(toy, pair):
    config = DecodeConfig(block_size=8, max_new_tokens=24)
    long = tuple(i % 200 for i in range(200))
    first = decode(pair, long, config)
    short = decode(pair, toy.prompts[0][:5], config)
    assert seen(decode(pair, long, config)) == seen(first)
    assert seen(short) == seen(decode(toy.load(), toy.prompts[0][:5], config))


@pytest.mark.parametrize("window", [None, 8, 40, 200])
def test_prefill_in_chunks_feeds_the_draft_everything(toy, pair, window):
    prompt = tuple((7 * i) % 250 for i in range(100))
    drafts = []
    for chunk in (1000, 16, 33):
        session = TorchSession(pair.models.target, pair.models.draft, window, prefill_chunk=chunk)
        anchor = session.prefill(prompt)
        drafts.append(session.draft(anchor, 8).tokens.tolist())
        assert len(session.context) == min(100, window or 100)
    assert drafts[0] == drafts[1] == drafts[2]


def test_features_of_a_long_prompt_are_never_twice_in_memory(monkeypatch, pair):
    network, rows = pair.models.draft, []
    session = TorchSession(pair.models.target, network, None, prefill_chunk=16)
    anchor = session.prefill([i % 250 for i in range(100)])
    real = network.context

    def context(features, positions):
        waiting = sum(part.shape[1] for part in session.pending)
        rows.append((features.shape[1], positions.tolist()[0], waiting))
        return real(features, positions)

    monkeypatch.setattr(network, "context", context)
    session.draft(anchor, 8)
    assert rows == [(16, first, 84 - first) for first in range(0, 96, 16)] + [(4, 96, 0)]


def draft_states(session, anchor, monkeypatch):
    """Draft logits of the next block of a session."""
    kept = []
    real = session.target.head

    class Head(torch.nn.Module):
        def forward(self, states):
            kept.append(real(states))
            return kept[-1]

    monkeypatch.setattr(session.target, "head", Head())
    session.draft(anchor, 8)
    monkeypatch.setattr(session.target, "head", real)
    return kept[0]


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize(
    "k", [0, 2, 7, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 3, 4, 5, 6))]
)
def test_draft_logits_after_every_block_equal_those_of_a_fresh_draft(
    monkeypatch, toy, pair, k, window
):
    prompt, text = toy.prompts[0], toy.greedy[0]
    whole = (*prompt, *text)
    models = pair.models
    session = ToldSession(models.target, models.draft, window).follow(cut(k), whole)
    anchor = session.prefill(prompt)
    for _ in range(5):
        accepted = min(k, 7)
        session.verify(session.draft(anchor, 8))
        session.commit(accepted)
        place = session.committed
        anchor = whole[place]
        assert session.cache.get_seq_length() == place
        fresh = TorchSession(models.target, models.draft, window)
        fresh.prefill(whole[:place])
        live_logits = draft_states(session, anchor, monkeypatch)
        fresh_logits = draft_states(fresh, anchor, monkeypatch)
        torch.testing.assert_close(live_logits, fresh_logits, atol=1e-4, rtol=1e-4)
        assert session.draft_cache_tokens == min(place, window or place)


@pytest.mark.parametrize("window", [8])
@pytest.mark.parametrize("extra", ["w-1", "w", "w+1", "3w"])
def test_a_context_position_matters_if_and_only_if_it_is_inside_the_window(
    monkeypatch, pair, window, extra
):
    length = {"w-1": window - 1, "w": window, "w+1": window + 1, "3w": 3 * window}[extra]
    prompt = tuple((11 * i + 3) % 250 for i in range(length))

    def logits(changed=None):
        """Draft logits of the first block, the target's features changed at one position."""
        session = TorchSession(pair.models.target, pair.models.draft, window)
        real = pair.models.target.logits

        def altered(*arguments, **settings):
            made, features = real(*arguments, **settings)
            if changed is not None:
                features = features.index_add(
                    1, torch.tensor([changed]), torch.full_like(features[:, :1], 3.0)
                )
            return made, features

        monkeypatch.setattr(pair.models.target, "logits", altered)
        anchor = session.prefill(prompt)
        monkeypatch.setattr(pair.models.target, "logits", real)
        return draft_states(session, anchor, monkeypatch)

    seen = logits()
    reacts = [not torch.equal(seen, logits(place)) for place in range(length)]
    inside = min(length, window)
    assert reacts == [False] * (length - inside) + [True] * inside


def test_a_huge_window_gives_the_trace_of_none(toy, pair):
    runs = [
        decode(pair, toy.prompts[0], DecodeConfig(draft_window=window, max_new_tokens=40))
        for window in (None, 10**9)
    ]
    assert seen(runs[0]) == seen(runs[1])


def test_draft_cache_bytes_stay_bounded_with_a_window_and_are_in_the_trace(toy, pair):
    config = DecodeConfig(block_size=2, draft_window=16, max_new_tokens=150, ignore_end=True)
    trace = decode(pair, toy.prompts[0], config)
    per_token = pair.draft_config.context_bytes_per_token(4)
    assert max(block.draft_cache_tokens for block in trace.blocks) == 16
    assert max(block.draft_cache_bytes for block in trace.blocks) <= 64 * per_token


def test_a_draft_whose_numbers_overflow_is_told_while_the_text_stays_right(toy):
    pair = toy.load()
    with torch.no_grad():
        pair.models.draft.layers[0].mlp.down_proj.weight[0, 0] = torch.inf
    with pytest.warns(AcceptanceWarning, match="not finite from block 0"):
        trace = decode(pair, toy.prompts[0], DecodeConfig(max_new_tokens=40))
    assert trace.tokens == toy.greedy[0][:40]
    assert not trace.blocks[0].verdict.finite


def spoiled(monkeypatch, target, first_row):
    """Make the target's logits NaN in all rows of a block from that one on."""
    real = target.logits

    def logits(ids, cache, taps, last_only=False):
        made, features = real(ids, cache, taps, last_only)
        if not last_only:
            made[:, first_row:, 3] = torch.nan
        return made, features

    monkeypatch.setattr(target, "logits", logits)


def test_target_logits_that_are_not_finite_end_the_run_and_name_the_dtype(monkeypatch, toy, pair):
    text = (*toy.prompts[0], *toy.greedy[0])
    spoiled(monkeypatch, pair.models.target, 2)
    scripted(monkeypatch, pair, ORACLE, text)
    with pytest.raises(TargetNotFinite, match=r"not finite numbers in float32. Its weights"):
        decode(pair, toy.prompts[0], DecodeConfig(block_size=8))
    # what overflows only behind a rejected token is no part of the text
    for script in (WRONG, cut(1)):
        scripted(monkeypatch, pair, script, text)
        config = DecodeConfig(block_size=8, max_new_tokens=20)
        assert decode(pair, toy.prompts[0], config).tokens == toy.greedy[0][:20]


def test_a_prefill_whose_logits_are_not_finite_gives_no_token(toy):
    pair = toy.load()
    with torch.no_grad():
        pair.models.target.model.lm_head.weight[5] = torch.inf
    with pytest.raises(TargetNotFinite, match="float32"):
        decode(pair, toy.prompts[0], DecodeConfig(max_new_tokens=1))


def test_a_prompt_of_8000_tokens_makes_no_logits_of_its_length(monkeypatch, toy, pair):
    kept = []
    monkeypatch.setattr(pair.models.target.model.config, "max_position_embeddings", 9000)
    real = pair.models.target.model.lm_head.forward
    monkeypatch.setattr(
        pair.models.target.model.lm_head, "forward", lambda x: kept.append(x.shape[1]) or real(x)
    )
    session = TorchSession(pair.models.target, pair.models.draft, 64)
    session.prefill([i % 250 for i in range(8000)])
    assert set(kept) == {1}
    assert sum(part.shape[1] for part in session.pending) == 64


def test_a_draft_of_another_width_is_refused_with_both_numbers(toy, tmp_path):
    from dflash_lab import load_pair
    from dflash_lab.tests.toys import save_draft, toy_target

    config = toy_target("qwen3", True).config
    save_draft(tmp_path / "wide", config, hidden_size=128)
    with pytest.raises(WidthMismatch, match=r"128.*64"):
        load_pair(target=toy.target, draft=tmp_path / "wide")
    nested = draft_json()["dflash_config"]
    save_draft(tmp_path / "deep", config, dflash_config=nested | {"target_layer_ids": [1, 4]})
    with pytest.raises(WidthMismatch, match="layers 0 to 3"):
        load_pair(target=toy.target, draft=tmp_path / "deep")
    save_draft(tmp_path / "mask", config, dflash_config=nested | {"mask_token_id": 512})
    with pytest.raises(MaskIdOutOfRange, match="512 rows"):
        load_pair(target=toy.target, draft=tmp_path / "mask")


def test_auto_takes_what_is_there_and_a_missing_device_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert pick_device("auto").type == "cpu"
    assert pick_dtype("auto", torch.device("cpu")) == torch.float32
    assert pick_dtype("auto", torch.device("cuda")) == torch.bfloat16
    with pytest.raises(ValueError, match="no cuda"):
        pick_device("cuda")
    with pytest.raises(ValueError, match="device is 'gpu'"):
        pick_device("gpu")


def test_the_reference_is_plain_greedy_whatever_the_model_was_saved_with(toy, tmp_path):
    import json
    import shutil

    from dflash_lab import load_pair

    folder = shutil.copytree(toy.target, tmp_path / "target")
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"repetition_penalty": 2.0}))
    models = load_pair(target=folder, draft=toy.draft).models
    made = models.library_generate(toy.prompts[0], 40, frozenset())
    assert made.tokens == toy.greedy[0][:40]
    assert models.end_tokens  # they were read before the settings were dropped


def test_peak_memory_is_that_of_the_time_since_the_last_call(pair):
    if pair.models.peak_bytes() is None:
        pytest.skip("this system does not tell a process its peak memory")
    before = pair.models.peak_bytes()
    much = torch.ones(60_000_000)
    del much
    with_it, after = pair.models.peak_bytes(), pair.models.peak_bytes()
    assert with_it > before + 150_000_000
    assert after < with_it - 150_000_000


def test_nothing_on_a_cpu_asks_cuda_for_anything(monkeypatch, toy, pair):
    def boom(*_):
        raise AssertionError("cuda on a CPU")

    monkeypatch.setattr(torch.cuda, "synchronize", boom)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", boom)
    trace = decode(pair, toy.prompts[0], DecodeConfig(max_new_tokens=8, timing="stages"))
    assert trace.peak_bytes > 0
