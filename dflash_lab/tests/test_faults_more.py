"""Known faults on real pairs in both backends: ends, what a draft sees, windows, known tables."""

import random
from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
import torch
import transformers

from dflash_lab import DecodeConfig, decode, load_pair, stream
from dflash_lab.accept import RULES
from dflash_lab.backends import (
    mlx_model,
    mlx_session,
    mlx_target,
    torch_model,
    torch_sampling,
    torch_session,
)
from dflash_lab.backends.mlx_session import MlxSession
from dflash_lab.backends.torch_model import DraftNetwork
from dflash_lab.backends.torch_session import TorchBlock, TorchSession
from dflash_lab.backends.torch_target import TorchTarget
from dflash_lab.checkpoint import CheckpointError, parse_draft_config
from dflash_lab.decoding import run_blocks, sampling_of
from dflash_lab.sampling import Sampling
from dflash_lab.tests.drafts import F, S
from dflash_lab.tests.test_mlx_model import as_mlx, twins
from dflash_lab.tests.test_mlx_session import ScriptedDraft
from dflash_lab.tests.test_sampling import BACKENDS as SAMPLERS
from dflash_lab.tests.test_sampling import (
    LIKELY,
    RULE_PAIRS,
    P,
    Q,
    TableSession,
    chi_square,
    far_from,
)
from dflash_lab.tests.test_sampling import request as asking
from dflash_lab.tests.test_torch_model import slow_forward
from dflash_lab.tests.told import ToldSession
from dflash_lab.tests.toys import (
    GAP,
    MASK,
    ORACLE,
    STANDARD_RUN,
    VOCABULARY,
    WRONG,
    ScriptedSession,
    cut,
    draft_json,
    greedy,
    save_draft,
    scripted_pair,
    seen,
    toy_target,
)

pytestmark = pytest.mark.usefixtures("quiet")

HOT = {"temperature": 1.0, "seed": 7}
BACKENDS = {
    "torch": SimpleNamespace(
        models=torch_session.TorchModels,
        session=TorchSession,
        told=ToldSession,
        target=TorchTarget,
        network=DraftNetwork,
        held=lambda cache: cache.get_seq_length(),
        ones=lambda ids: torch.nn.functional.one_hot(torch.tensor(ids), VOCABULARY),
        shifted=lambda features, chosen: features + 3.0 * chosen[None, :, None],
        floats=lambda flags: flags.float(),
    ),
    "mlx": SimpleNamespace(
        models=mlx_session.MlxModels,
        session=MlxSession,
        told=ScriptedDraft,
        target=mlx_target.MlxTarget,
        network=mlx_model.DraftNetwork,
        held=lambda cache: cache[0].offset,
        ones=lambda ids: mx.array(ids)[:, None] == mx.arange(VOCABULARY),
        shifted=lambda features, chosen: features + 3.0 * chosen[None, :, None],
        floats=lambda flags: flags.astype(mx.float32),
    ),
}


@pytest.fixture(scope="module")
def pairs(qwen3_toy):
    return {name: qwen3_toy.load(backend=name) for name in BACKENDS}


@pytest.fixture(params=BACKENDS)
def backend(request, pairs):
    """A backend's classes, and its pair of the toy."""
    return SimpleNamespace(**vars(BACKENDS[request.param]), pair=pairs[request.param])


def follow(monkeypatch, backend, script, text):
    """Every session of the backend drafts what the script says; `text` is prompt and output."""

    def session(models, window, speculate, **more):
        draft = models.draft if speculate else None
        return backend.told(models.target, draft, window, **more).follow(script, text)

    monkeypatch.setattr(backend.models, "session", session)


def replay(monkeypatch, backend, start, said):
    """The target says these ids from a position on, whatever it is given."""
    real = backend.target.logits

    def logits(target, ids, cache, taps, *rest, **named):
        made, features = real(target, ids, cache, taps, *rest, **named)
        end = backend.held(cache)
        places = range(end - made.shape[1] + 1, end + 1)
        wanted = [said[min(max(place - start, 0), len(said) - 1)] for place in places]
        return made + 1e4 * backend.ones(wanted)[None], features

    monkeypatch.setattr(backend.target, "logits", logits)


# --- where an output ends -----------------------------------------------------------------------


def test_a_real_pair_gives_as_many_tokens_as_are_asked_for(monkeypatch, backend, qwen3_toy):
    prompt, text = qwen3_toy.prompts[0], qwen3_toy.greedy[0]
    follow(monkeypatch, backend, ORACLE, (*prompt, *text))
    for limit in (1, 2, 7, 8, 9, 15, 16, 17):
        trace = decode(backend.pair, prompt, DecodeConfig(block_size=8, max_new_tokens=limit))
        assert (trace.tokens, trace.finish_reason) == (text[:limit], "length")


@pytest.mark.parametrize("size", [1, 8])
def test_a_first_token_that_ends_the_output_of_a_real_pair_is_all_of_it(backend, qwen3_toy, size):
    prompt, text = qwen3_toy.prompts[0], qwen3_toy.greedy[0]
    config = DecodeConfig(block_size=size, max_new_tokens=20, stop_tokens=text[:1])
    trace = decode(backend.pair, prompt, config)
    assert (trace.tokens, trace.blocks, trace.finish_reason) == (text[:1], (), "stop")
    assert trace.text == ""


def test_a_real_pair_ends_at_an_end_token_wherever_it_stands_in_a_block(
    monkeypatch, backend, qwen3_toy
):
    prompt, text = qwen3_toy.prompts[0], qwen3_toy.greedy[0]
    follow(monkeypatch, backend, ORACLE, (*prompt, *text))
    for place in range(1, 25):
        first = text.index(text[place - 1]) + 1
        config = DecodeConfig(block_size=8, max_new_tokens=40, stop_tokens=(text[place - 1],))
        trace = decode(backend.pair, prompt, config)
        assert (trace.tokens, trace.finish_reason) == (text[:first], "stop")
        assert 1 + sum(block.emitted for block in trace.blocks) == first
    ends = tuple(set(prompt) - set(text[:20]))
    config = DecodeConfig(block_size=8, max_new_tokens=20, stop_tokens=ends)
    assert ends and decode(backend.pair, prompt, config).tokens == text[:20]


def test_a_stop_token_that_is_the_mask_ends_a_real_output_only_where_it_is_emitted(
    monkeypatch, backend, qwen3_toy
):
    prompt, text = qwen3_toy.prompts[0], qwen3_toy.greedy[0]
    config = DecodeConfig(block_size=8, max_new_tokens=20, stop_tokens=(MASK,))
    assert MASK not in text[:20]
    assert decode(backend.pair, prompt, config).tokens == text[:20]
    said = tuple(MASK if n == 12 else 7 * n % 250 for n in range(40))
    replay(monkeypatch, backend, len(prompt), said)
    for script in (ORACLE, WRONG, cut(4)):
        follow(monkeypatch, backend, script, (*prompt, *said))
        trace = decode(backend.pair, prompt, config)
        assert (trace.tokens, trace.finish_reason) == (said[:13], "stop")


# --- what the draft is given --------------------------------------------------------------------


def test_chunks_of_a_prompt_change_neither_the_drafts_logits_nor_the_trace(monkeypatch, backend):
    models, prompt = backend.pair.models, tuple((7 * i) % 250 for i in range(100))
    config, logits, traces = DecodeConfig(block_size=8, max_new_tokens=8), [], []
    for chunk in (1000, 16, 33):

        def session(models, window, speculate, chunk=chunk):
            return backend.session(models.target, models.draft, window, prefill_chunk=chunk)

        alone = session(models, None, True)
        logits.append(alone.draft(alone.prefill(prompt), 8).raw.tolist())
        monkeypatch.setattr(backend.models, "session", session)
        traces.append(seen(decode(backend.pair, prompt, config)))
    for one in logits[1:]:
        np.testing.assert_allclose(one, logits[0], atol=1e-4)
    assert traces[0] == traces[1] == traces[2]


def reacting(monkeypatch, backend, network, window, length, k, places):
    """For each of these context positions, which slots of a block notice that it is another one.

    The block comes after a prompt of that length and two blocks of which `k` drafts were kept.
    """
    target, text = backend.pair.models.target, [(11 * i + 3) % 250 for i in range(length + 40)]
    real = backend.network.context

    def logits(changed):
        def context(net, features, positions):
            chosen = backend.floats(positions == changed)
            return real(net, backend.shifted(features, chosen), positions)

        with monkeypatch.context() as patch:
            patch.setattr(backend.network, "context", context)
            session = backend.told(target, network, window).follow(cut(k), text)
            session.prefill(text[:length])
            for _ in range(2):
                session.verify(session.draft(text[session.committed], 8))
                session.commit(k)
            made = backend.session.draft(session, text[session.committed], 8).raw
            return np.array(made.tolist()), session.committed

    usual, committed = logits(-1)
    assert committed == length + 2 * (k + 1)
    return [(logits(place)[0] != usual).any(-1).tolist() for place in places], committed


def check_window(monkeypatch, backend, network, window, length, k, kept):
    """Exactly the last `kept` positions, or all where there are fewer, matter to every slot."""
    committed = length + 2 * (k + 1)
    border = max(0, committed - kept)
    places = sorted({0, border // 2, border - 1, border, committed - k - 2, committed - 1} - {-1})
    found, told = reacting(monkeypatch, backend, network, window, length, k, places)
    assert told == committed
    assert found == [[place >= border] * 7 for place in places]


@pytest.mark.parametrize(("length", "k"), [(15, 0), (48, 3)])
def test_a_window_holds_exactly_its_size_after_blocks_of_any_kept_length(
    monkeypatch, backend, length, k
):
    check_window(monkeypatch, backend, backend.pair.models.draft, 16, length, k, kept=16)


@pytest.mark.slow
@pytest.mark.parametrize("window", [8, 16, 64])
def test_every_window_holds_exactly_its_size_at_every_length_and_kept_length(
    monkeypatch, backend, window
):
    for length in (window - 1, window, window + 1, 3 * window):
        for k in range(8) if backend.session is TorchSession else (0, 7):
            check_window(monkeypatch, backend, backend.pair.models.draft, window, length, k, window)


@pytest.mark.parametrize("causal", [True, False])
def test_a_checkpoints_own_window_counts_from_each_row_and_holds_its_own_position(
    monkeypatch, backend, causal
):
    # of two layers, the anchor's row sees most: its own position and window - 1 before it
    ours, twin = twins(layer_types=[S, S], sliding_window=16, is_causal=causal)
    network = ours if backend.session is TorchSession else twin
    for window, kept in ((None, 15), (5, 5)):
        check_window(monkeypatch, backend, network, window, 40, 2, kept)


def test_each_row_of_a_sliding_layer_sees_one_position_less_than_the_row_before(
    monkeypatch, backend
):
    ours, twin = twins(layer_types=[S], sliding_window=16, num_hidden_layers=1)
    network = ours if backend.session is TorchSession else twin
    found, anchor = reacting(monkeypatch, backend, network, None, 18, 2, range(8, 18))
    slots = range(1, 8)
    assert found == [[anchor - place + slot < 16 for slot in slots] for place in range(8, 18)]


@pytest.mark.parametrize("name", BACKENDS)
def test_what_is_outside_a_sliding_layers_window_acts_through_the_full_layer_alone(
    monkeypatch, name
):
    ours, twin = twins(layer_types=[S, F], sliding_window=16)
    net, as_own = (ours, torch.Tensor.detach) if name == "torch" else (twin, as_mlx)
    owner, call = {
        "torch": (torch_model.Layer, "forward"),
        "mlx": (mlx_model.Layer, "__call__"),
    }[name]
    outputs, real = [], getattr(owner, call)

    def noted(layer, *args):
        made = real(layer, *args)
        outputs.append(made.tolist())
        return made

    monkeypatch.setattr(owner, call, noted)
    embedded, features = torch.randn(1, 1, 8, 64), torch.randn(1, 64, 128)
    changed = features.clone()
    changed[0, 5] += 3
    anchor, positions = as_own(torch.tensor([[64]])), as_own(torch.arange(64))
    for each in (features, changed):
        context = net.context(as_own(each), positions)
        states = net(as_own(embedded), anchor, context, positions)
        slow = slow_forward(ours, embedded[0, 0], each[0], 64, None)
        np.testing.assert_allclose(states.tolist()[0][0], slow.tolist(), atol=1e-4)
    sliding, full, sliding_again, full_again = outputs
    assert sliding == sliding_again
    assert full != full_again


# --- targets past their window ------------------------------------------------------------------


@pytest.fixture(scope="module")
def sliding(tmp_path_factory):
    """A pair of each backend on a target with sliding layers, a prompt of 10 and its 80 tokens."""
    folder = tmp_path_factory.mktemp("sliding")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = toy_target("gemma3", tied=True)
    model.save_pretrained(folder / "target")
    save_draft(folder / "draft", model.config)
    for seed in range(20):
        prompt = tuple(random.Random(seed).choices(range(256), k=10))
        text, gap = greedy(model, prompt, 80)
        if gap > GAP and len(set(text)) >= 30:
            break
    else:
        raise AssertionError("no prompt whose text is varied and has no near tie")
    place = {"target": folder / "target", "draft": folder / "draft"}
    made = {
        name: load_pair(**place, backend=name, dtype="float32", device="cpu") for name in BACKENDS
    }
    return SimpleNamespace(pairs=made, prompt=prompt, text=text)


@pytest.mark.slow
@pytest.mark.parametrize("script", STANDARD_RUN)
@pytest.mark.parametrize("name", BACKENDS)
def test_text_past_the_window_of_a_target_is_that_of_decoding_without_a_cache(
    monkeypatch, sliding, name, script
):
    follow(monkeypatch, BACKENDS[name], STANDARD_RUN[script], (*sliding.prompt, *sliding.text))
    ends = DecodeConfig(block_size=8, max_new_tokens=80, ignore_end=True)
    trace = decode(sliding.pairs[name], sliding.prompt, ends)
    assert trace.tokens == sliding.text
    whole = {block.accepted for block in trace.blocks if not block.cut}
    if script.startswith("cut"):
        assert whole == {min(7, int(script.split()[1]))}


# --- a table of known probabilities, by a real target -------------------------------------------


def table_target(rows):
    """A transformers model whose next token has the row of the last one as its law."""
    settings = {"hidden_size": 8, "intermediate_size": 8, "head_dim": 8, "vocab_size": 8}
    config = transformers.Qwen3Config(
        **settings,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=10_000,
        tie_word_embeddings=False,
    )
    model = transformers.Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(8))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        # the final norm makes a one-hot row sqrt(8) times itself
        model.lm_head.weight.copy_(torch.tensor(np.log(rows)).T / 8**0.5)
    return TorchTarget(model)


def table_draft():
    """A draft of random weights on that target; 7 is its mask, and a token like any other."""
    raw = draft_json(
        hidden_size=8,
        intermediate_size=8,
        head_dim=8,
        vocab_size=8,
        num_attention_heads=1,
        num_key_value_heads=1,
        num_hidden_layers=1,
        block_size=4,
        dflash_config={"target_layer_ids": [0], "mask_token_id": 7},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return DraftNetwork(parse_draft_config(raw)).eval().requires_grad_(False)


class BestOfTable(TorchSession):
    """A session that drafts the likeliest token after each, or the one beside it."""

    beside = 0

    def draft(self, anchor, block_size):
        tokens = [anchor]
        for _ in range(block_size - 1):
            tokens.append((int(P[tokens[-1]].argmax()) + self.beside) % 8)
        return TorchBlock(torch.tensor([tokens]))


class WrongOfTable(BestOfTable):
    beside = 1


@pytest.fixture(scope="module")
def table():
    return table_target(P), table_draft()


def table_records(table, kind, asked):
    target, draft = table
    session = kind(target, draft, None, sampling=sampling_of(asked))
    return list(run_blocks(session, (3,), asked, read=lambda tokens: ""))


def table_text(table, kind, asked):
    """Tokens of one text, the prompt's first, and each one's place in its block."""
    prefill, *blocks = table_records(table, kind, asked)
    tokens, places = [3, prefill.token], [0, 0]
    for block in blocks:
        tokens += block.tokens
        places += range(len(block.tokens))
    return np.array(tokens), np.array(places)


def all_rows(tokens, law):
    """The chance of all transitions together: less is needed of a fault than in one row."""
    counts = np.zeros((8, 8))
    np.add.at(counts, (tokens[:-1], tokens[1:]), 1)
    return chi_square(counts.ravel(), (counts.sum(1, keepdims=True) / counts.sum() * law).ravel())


TABLE_CASES = [
    *((TorchSession, *case) for case in RULE_PAIRS),
    *((kind, rule, "argmax") for kind in (BestOfTable, WrongOfTable) for rule in RULES),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rule", "proposal"), TABLE_CASES)
def test_a_text_of_a_real_target_has_its_tables_law_in_every_row_and_slot(
    table, kind, rule, proposal
):
    tokens, places = table_text(table, kind, asking(4, 2_000, rule=rule, proposal=proposal))
    assert len(tokens) == 2_001
    assert far_from(tokens, places, P, slots=range(4)) > LIKELY
    assert all_rows(tokens, P) > LIKELY


@pytest.mark.slow
def test_a_table_that_is_another_one_or_sharper_is_noticed(monkeypatch, table):
    tokens, places = table_text(table, TorchSession, asking(4, 2_000))
    assert far_from(tokens, places, Q, slots=()) < LIKELY
    right = torch_sampling.probabilities

    def sharper(logits, settings):
        return right(logits, replace(settings, temperature=0.6))

    monkeypatch.setattr(torch_sampling, "probabilities", sharper)
    tokens, _ = table_text(table, TorchSession, asking(4, 2_000))
    assert all_rows(tokens, P) < LIKELY


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "rule", "proposal"), TABLE_CASES)
def test_second_and_third_tokens_of_4000_runs_have_their_joint_law(table, kind, rule, proposal):
    counts = np.zeros((8, 8))
    for seed in range(4000):
        asked = asking(4, 4, rule=rule, proposal=proposal, seed=seed)
        prefill, *blocks = table_records(table, kind, asked)
        tokens = [prefill.token, *(token for block in blocks for token in block.tokens)]
        counts[tokens[1], tokens[2]] += 1
    law = (P[3] @ P)[:, None] * P
    assert chi_square(counts.ravel(), law.ravel()) > LIKELY


# --- windows of layers in the record ------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, (None, None)),
        ({"layer_types": [F, F]}, (None, None)),
        ({"layer_types": [S, S], "sliding_window": 32}, (32, 32)),
        ({"layer_types": [S, F], "sliding_window": 32}, (32, None)),
    ],
)
def test_a_trace_tells_the_window_of_every_layer_and_the_users_beside_it(changes, windows, window):
    draft = parse_draft_config(draft_json(**changes))
    pair = replace(scripted_pair(), draft_config=draft)
    asked = decode(pair, (1, 2), DecodeConfig(max_new_tokens=2, draft_window=window)).request
    assert (asked.layer_windows, asked.draft_window) == (windows, window)
    assert asked.window_rule == "per_block"


def test_a_checkpoints_own_window_below_the_block_is_refused_and_a_users_is_not():
    draft = parse_draft_config(draft_json(layer_types=[F, S], sliding_window=4))
    pair = replace(scripted_pair(cut(3)), draft_config=draft)
    with pytest.raises(CheckpointError, match=r"layer 1 of the draft slides over 4.* at most 4"):
        decode(pair, (1, 2), DecodeConfig(block_size=8))
    assert not pair.models.sessions
    decode(pair, (1, 2), DecodeConfig(block_size=4, max_new_tokens=9))
    config = DecodeConfig(block_size=8, draft_window=4, max_new_tokens=20)
    assert decode(scripted_pair(cut(3)), (1, 2), config).draft_window == 4


# --- proposals ----------------------------------------------------------------------------------


def test_the_default_proposal_is_at_most_a_tenth_worse_where_drafts_are_right_by_chance():
    blind = np.full_like(P, 0.2 / 8)  # right with probability 0.8, else any token
    blind[np.arange(8), P.argmax(1)] += 0.8
    taken = {}
    for proposal in ("argmax", "sample"):
        session = TableSession(SAMPLERS["torch"], P, blind, Sampling(proposal=proposal, **HOT))
        _, *blocks = run_blocks(session, (3,), asking(8, 600, proposal=proposal), read=str)
        taken[proposal] = sum(block.accepted for block in blocks) / len(blocks)
    assert DecodeConfig().proposal == "argmax"
    assert taken["argmax"] >= 0.9 * taken["sample"]


# --- measuring ----------------------------------------------------------------------------------


def test_the_clock_waits_for_the_device_it_is_on(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waited.append(device.type))
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waited.append("mps"))
    for name in ("cuda", "cpu", "mps"):
        torch_session.synchronize(torch.device(name))
    assert waited == ["cuda", "mps"]


@pytest.mark.parametrize(("timing", "waits"), [("whole", 1), ("stages", 4)])
def test_the_device_is_waited_for_wherever_a_figure_is_read(monkeypatch, timing, waits):
    waited = []
    monkeypatch.setattr(ScriptedSession, "synchronize", lambda session: waited.append(session))
    config = DecodeConfig(block_size=4, max_new_tokens=13, timing=timing)
    blocks = decode(scripted_pair(ORACLE), (1, 2), config).blocks
    assert len(waited) == 1 + waits * len(blocks)


def test_plain_and_library_baselines_run_on_a_target_without_hooks(monkeypatch, backend, qwen3_toy):
    layers, found = backend.pair.models.target.layers, []
    before = state_of(layers)
    real = backend.target.logits

    def logits(target, ids, cache, taps, *rest, **named):
        found.append((bool(taps), state_of(layers) == before))
        return real(target, ids, cache, taps, *rest, **named)

    monkeypatch.setattr(backend.target, "logits", logits)
    abandoned = stream(backend.pair, qwen3_toy.prompts[0], DecodeConfig(block_size=4))
    next(abandoned), next(abandoned)
    for size in (4, 1):
        config = DecodeConfig(block_size=size, max_new_tokens=4)
        decode(backend.pair, qwen3_toy.prompts[0], config)
    assert set(found) == {(True, True), (False, True)}
    watched = []

    class Watched(frozenset):
        """Stop tokens that look at the layers while the library generates."""

        def __contains__(self, token):
            watched.append(state_of(layers) == before)
            return False

    made = backend.pair.models.library_generate(qwen3_toy.prompts[0], 4, Watched(), 2)
    assert made.tokens == qwen3_toy.greedy[0][:4]
    assert watched and all(watched)
    abandoned.close()


def state_of(layers):
    """Of each layer: itself, its class, what that does when it is called, and its hooks."""
    return [
        (id(layer), type(layer), type(layer).__call__, len(getattr(layer, "_forward_hooks", ())))
        for layer in layers
    ]
