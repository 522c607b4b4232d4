"""Draws: the law of every token is the target's own, whatever rule, proposal, filters and draft."""

import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
import torch

from dflash_lab import DecodeConfig, SweepConfig, calls, decode, stream, sweep
from dflash_lab.accept import RULES, Verdict
from dflash_lab.backends import mlx_sampling, torch_sampling
from dflash_lab.decoding import run_blocks, sampling_of
from dflash_lab.sampling import ACCEPT, DRAFT, Sampling, uniforms
from dflash_lab.tests.toys import greedy
from dflash_lab.trace import DecodeRequest

pytestmark = pytest.mark.usefixtures("quiet")

DRAWS = 20_000
LIKELY = 1e-4  # a right sampler is called wrong once in ten thousand times
RULE_PAIRS = [(rule, proposal) for rule in RULES for proposal in ("argmax", "sample")]
FILTERS = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.6": {"temperature": 0.6},
    "top-k": {"temperature": 1.0, "top_k": 3},
    "top-p": {"temperature": 1.0, "top_p": 0.7},
    "min-p": {"temperature": 1.0, "min_p": 0.5},
    "all of them": {"temperature": 1.3, "top_k": 6, "top_p": 0.8, "min_p": 0.3},
}
BACKENDS = {
    "torch": SimpleNamespace(
        array=torch.tensor,
        sampling=torch_sampling,
        sampler=lambda s: torch_sampling.TorchSampler(s, 8, torch.device("cpu")),
    ),
    "mlx": SimpleNamespace(
        array=mx.array, sampling=mlx_sampling, sampler=lambda s: mlx_sampling.MlxSampler(s, 8)
    ),
}


@pytest.fixture(params=BACKENDS)
def backend(request):
    return BACKENDS[request.param]


def table(seed, size=8):
    """Rows of next-token probabilities, all between 0.05 and 0.3."""
    dice = np.random.default_rng(seed)
    while True:
        rows = dice.dirichlet(np.full(size, 6.0), size=4 * size)
        rows = rows[(rows.min(1) > 0.05) & (rows.max(1) < 0.3)]
        if len(rows) >= size:
            return rows[:size].astype(np.float32)


P, Q = table(1), table(2)


def chi_square(counts, law):
    """The chance of counts at least so far from the law; one that the law forbids has none."""
    counts, law = np.asarray(counts, float), np.asarray(law, float)
    if counts[law == 0].any():
        return 0.0
    expected = law[law > 0] * counts.sum()
    distance = ((counts[law > 0] - expected) ** 2 / expected).sum()
    free = torch.tensor((len(expected) - 1) / 2)
    return float(torch.special.gammaincc(free, torch.tensor(distance / 2)))


def filtered(p, settings):
    """A row of probabilities after temperature, top-k, top-p and min-p, token by token."""
    p = p.astype(float) ** (1 / settings.temperature)
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda token: (-p[token], token))
    order = order[: settings.top_k]
    total, kept, before = sum(p[t] for t in order), [], 0.0
    for token in order:
        if before < settings.top_p:
            kept.append(token)
        before += p[token] / total
    kept = [token for token in kept if p[token] >= settings.min_p * p[order[0]]]
    law = np.zeros_like(p)
    law[kept] = p[kept] / p[kept].sum()
    return law


# --- the law of one token -----------------------------------------------------------------------


def emitted_at_one_place(backend, settings, p, q, draws=DRAWS):
    """What a first draft position emits, so many times: rows that know nothing of each other."""
    rows = backend.array(np.tile(np.log(np.float32(p)), (draws + 1, 1)))
    weighed = backend.sampling.probabilities(backend.array(np.log(np.float32([q]))), settings)
    weights = backend.array(np.tile(np.float32(weighed.tolist()), (draws, 1)))
    if settings.proposal == "sample":
        numbers = backend.array(uniforms(settings.seed, DRAFT, 1, draws))
        drafted = backend.sampling.pick(weights, numbers).tolist()
    else:
        drafted = [int(np.argmax(q))] * draws
    sampler = backend.sampler(settings)
    made = sampler.judge(rows, backend.array([0, *drafted]), weights, 1)
    parts, chosen = sampler.verdict_parts(made.told, 1), made.chosen.tolist()
    for place, token in enumerate(drafted):
        alone = {name: values[place : place + 1] for name, values in parts.items()}
        verdict = Verdict(drafted=(token,), posterior=(chosen[place], 0), **alone)
        yield token if RULES[settings.rule](verdict) else chosen[place]


def histogram(tokens, size=8):
    return np.bincount(list(tokens), minlength=size)


# MLX has all filters at once in the quick tests, and each by itself in the slow ones.
LAWS = [
    pytest.param(
        name, filters, marks=[pytest.mark.slow] * (name == "mlx" and words != "all of them")
    )
    for name in BACKENDS
    for words, filters in FILTERS.items()
]


@pytest.mark.parametrize(("name", "filters"), LAWS)
@pytest.mark.parametrize(("rule", "proposal"), RULE_PAIRS)
def test_a_token_has_the_filtered_law_of_the_target(name, rule, proposal, filters):
    settings = Sampling(rule=rule, proposal=proposal, seed=5, **filters)
    counts = histogram(emitted_at_one_place(BACKENDS[name], settings, P[0], Q[0]))
    assert chi_square(counts, filtered(P[0], settings)) > LIKELY


def test_the_share_of_a_token_is_the_targets_where_the_draft_always_says_the_other_one(backend):
    # p = [0.6, 0.4], q = [0.5, 0.5]: scoring the argmax draft with q accepts token 0 every time
    p, q = np.array([0.6, 0.4]), np.array([0.5, 0.5])
    for rule in RULES:
        settings = Sampling(temperature=1.0, rule=rule, seed=2)
        share = np.mean([t == 0 for t in emitted_at_one_place(backend, settings, p, q, 4000)])
        assert abs(share - 0.6) < 0.03


BREAKS = {
    "no residual": lambda p, q: p,
    "residual the wrong way round": lambda p, q: (q - p).clip(0),
    "residual not cut at 0": lambda p, q: abs(p - q),
}


@pytest.mark.parametrize("broken", BREAKS.values(), ids=BREAKS)
def test_a_residual_broken_on_purpose_is_noticed(broken, monkeypatch):
    monkeypatch.setattr(torch_sampling, "left_over", broken)
    settings = Sampling(temperature=1.0, rule="rejection", proposal="sample", seed=5)
    counts = histogram(emitted_at_one_place(BACKENDS["torch"], settings, P[0], Q[0]))
    assert chi_square(counts, filtered(P[0], settings)) < LIKELY


def test_argmax_drafts_scored_with_their_softmax_are_noticed(backend, monkeypatch):
    real = Sampling.told

    def wrong_q(self, first, p, q):
        odds = tuple(over / under for over, under in zip(p, q, strict=True))
        return real(self, first, p, q) | {"odds": odds}

    monkeypatch.setattr(Sampling, "told", wrong_q)
    settings = Sampling(temperature=1.0, rule="rejection", seed=5)
    counts = histogram(emitted_at_one_place(backend, settings, P[0], Q[0]))
    assert chi_square(counts, filtered(P[0], settings)) < LIKELY


def test_drafts_filtered_otherwise_than_their_q_are_noticed(backend):
    settings = Sampling(temperature=1.0, rule="rejection", proposal="sample", seed=5)
    sharp = Sampling(temperature=0.5, rule="rejection", proposal="sample", seed=5)
    rows = backend.sampling.probabilities(backend.array(np.log(Q[:1]).tolist()), sharp)
    drawn = backend.array(np.tile(np.float32(rows.tolist()), (DRAWS, 1)))
    numbers = backend.array(uniforms(5, DRAFT, 1, DRAWS))
    drafted = backend.sampling.pick(drawn, numbers).tolist()
    weights = backend.array(np.tile(Q[0], (DRAWS, 1)))
    logits = backend.array(np.tile(np.log(P[0]), (DRAWS + 1, 1)))
    sampler = backend.sampler(settings)
    made = sampler.judge(logits, backend.array([0, *drafted]), weights, 1)
    parts = sampler.verdict_parts(made.told, 1)
    passed = np.array(parts["draws"]) < np.array(parts["odds"])
    tokens = np.where(passed, drafted, made.chosen.tolist()[:-1])
    assert chi_square(histogram(tokens), P[0]) < LIKELY


# --- whole texts of a known table ---------------------------------------------------------------


class TableSession:
    """A pair whose next token depends on the last one only; the sampler is a backend's own.

    The draft knows the token before each slot, so its q is a row of its own table.
    """

    draft_cache_tokens = draft_cache_bytes = 0

    def __init__(self, backend, target, draft, sampling):
        self.array = backend.array
        self.target = [backend.array(row) for row in np.log(target).tolist()]
        self.draft_rows = [backend.array(row) for row in np.log(draft).tolist()]
        self.best = draft.argmax(1).tolist()
        self.sampler = backend.sampler(sampling)
        self.stack = torch.stack if backend.array is torch.tensor else mx.stack

    def prefill(self, prompt):
        self.at = len(prompt)
        return int(self.sampler.first(self.target[prompt[-1]], self.array(list(prompt))))

    def draft(self, anchor, block_size):
        best = [anchor]
        for _ in range(block_size - 1):
            best.append(self.best[best[-1]])
        if not self.sampler.settings.weighs_drafts or block_size == 1:
            return best, None
        tokens, weights = self.sampler.propose(
            lambda slot, previous: self.draft_rows[int(previous)],
            self.array(best[1:]),
            self.array(anchor),
            self.at + 1,
        )
        return [anchor, *tokens.tolist()], weights

    def verify(self, block, rows=None):
        tokens, weights = block
        logits = self.stack([self.target[token] for token in tokens])
        made = self.sampler.judge(logits, self.array(tokens), weights, self.at + 1)
        parts = self.sampler.verdict_parts(made.told, self.at + 1)
        return Verdict(drafted=tuple(tokens[1:]), posterior=tuple(made.chosen.tolist()), **parts)

    def commit(self, accepted):
        self.at += accepted + 1
        self.sampler.keep(accepted + 1)

    def synchronize(self):
        pass


def request(block_size, max_new_tokens, **settings):
    return DecodeRequest(
        block_size=block_size,
        block_size_requested=block_size,
        block_size_source="argument",
        trained_block_size=block_size,
        beyond_trained=False,
        draft_window=None,
        window_rule="per_block",
        layer_windows=(),
        max_new_tokens=max_new_tokens,
        context_limit=10**9,
        stop_tokens=frozenset(),
        timing="whole",
        **({"rule": "match", "proposal": "argmax", "temperature": 1.0, "seed": 7} | settings),
    )


def table_text(backend, target, draft, asked):
    """Tokens of one long text, and for each the place in its block where it was emitted."""
    session = TableSession(backend, target, draft, sampling_of(asked))
    prefill, *blocks = run_blocks(session, (3,), asked, read=lambda tokens: "")
    tokens, places = [3, prefill.token], [0, 0]
    for block in blocks:
        tokens += block.tokens
        places += range(len(block.tokens))
    return np.array(tokens), np.array(places)


def far_from(tokens, places, law, slots):
    """The least chance of any row of transitions, over all places in a block and in each."""
    chances = []
    for chosen in [places >= 0, *(places == slot for slot in slots)]:
        for row in range(len(law)):
            after = tokens[1:][(tokens[:-1] == row) & chosen[1:]]
            chances.append(chi_square(histogram(after), law[row]) if len(after) else 1.0)
    return min(chances) * len(chances)


DRAFTS = {"good": P, "other": Q, "oracle": P, "wrong": np.roll(P, 1, axis=1)}


@pytest.mark.parametrize(("rule", "proposal"), RULE_PAIRS)
def test_every_row_and_slot_of_a_text_has_the_targets_law(rule, proposal):
    asked = request(4, 1_500, rule=rule, proposal=proposal)
    tokens, places = table_text(BACKENDS["torch"], P, Q, asked)
    assert len(tokens) == 1_501
    assert far_from(tokens, places, P, slots=range(4)) > LIKELY


@pytest.mark.thorough
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize(("rule", "proposal"), RULE_PAIRS)
def test_20000_tokens_have_the_targets_law_in_every_row_and_slot(backend, rule, proposal, draft):
    asked = request(4, DRAWS, rule=rule, proposal=proposal)
    tokens, places = table_text(backend, P, DRAFTS[draft], asked)
    assert far_from(tokens, places, P, slots=range(4)) > LIKELY


def test_reusing_the_draws_of_one_decision_for_another_is_noticed(monkeypatch):
    monkeypatch.setattr(torch_sampling, "DRAFT", ACCEPT)
    asked = request(4, 1_500, rule="rejection", proposal="sample")
    tokens, places = table_text(BACKENDS["torch"], P, Q, asked)
    assert far_from(tokens, places, P, slots=range(4)) < LIKELY


@pytest.mark.parametrize("proposal", ["argmax", "sample"])
def test_a_penalty_counts_the_drafts_before_each_row_and_what_is_committed(backend, proposal):
    peak = [0.3, 0.2, 0.1, 0.1, 0.1, 0.1, 0.05, 0.05]
    sharp = np.float32([np.roll(peak, place) for place in range(8)])

    def tokens(size, **penalty):
        asked = request(size, 60, temperature=0.7, proposal=proposal, **penalty)
        return table_text(backend, sharp, P, asked)[0].tolist()

    plain = tokens(1, repetition_penalty=3.0)
    assert tokens(2, repetition_penalty=3.0) == tokens(5, repetition_penalty=3.0) == plain
    assert tokens(1) != plain


def test_a_penalty_that_does_not_count_the_drafts_is_noticed(monkeypatch):
    sampler = torch_sampling.TorchSampler
    monkeypatch.setattr(sampler, "_counted", lambda self, tokens: self.seen.repeat(len(tokens), 1))
    asked = [request(size, 60, repetition_penalty=3.0, temperature=0.0) for size in (1, 5)]
    plain, blocks = (table_text(BACKENDS["torch"], P, P, one)[0].tolist() for one in asked)
    assert plain != blocks


# --- filters ------------------------------------------------------------------------------------

LOGITS = np.float32([2.0, 1.5, 1.5, 0.3, -0.2, 1.9, -3.0, 0.0])


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.5, "top_p": 0.8, "top_k": 4, "min_p": 0.1},
        {"temperature": 0.5, "top_p": 0.8},
        {"temperature": 1.7, "top_k": 2},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_k": 3, "top_p": 0.99},  # two equal ones: the lower id stays
        {"temperature": 3.0, "min_p": 0.4},
        {"temperature": 1.0, "top_k": 100},
        {"temperature": 1.0, "min_p": 1.0},
    ],
)
def test_filters_apply_in_the_documented_order_in_both_backends(settings):
    p = np.exp(LOGITS.astype(float))
    law = filtered(p / p.sum(), Sampling(**settings))
    for backend in BACKENDS.values():
        rows = backend.sampling.probabilities(
            backend.array([LOGITS.tolist()]), Sampling(**settings)
        )
        made = np.array(rows.tolist()[0])
        assert [t for t in range(8) if made[t] > 0] == [t for t in range(8) if law[t] > 0]
        np.testing.assert_allclose(made, law, atol=1e-6)


def test_a_penalty_divides_logits_above_0_and_multiplies_the_others(backend):
    row = backend.array([[2.0, -1.0, 0.0, 4.0]])
    seen = backend.array([True, True, True, False])
    made = backend.sampling.penalised(row, seen, 2.0)
    assert made.tolist() == [[1.0, -2.0, 0.0, 4.0]]
    assert backend.sampling.penalised(row, seen, 0.5).tolist() == [[4.0, -0.5, 0.0, 4.0]]


def test_a_pick_never_takes_a_token_of_no_weight(backend):
    weights = backend.array([[0.0, 0.5, 0.0, 0.25, 0.0]] * 4)
    draws = backend.array([0.0, 0.6, 0.7, 1 - 2**-24])
    assert backend.sampling.pick(weights, draws).tolist() == [1, 1, 3, 3]


def test_a_tiny_temperature_takes_the_best_token_and_no_number_overflows(backend):
    for temperature in (1e-300, 1e-30, 1e-6):
        settings = Sampling(temperature=temperature)
        rows = backend.sampling.probabilities(backend.array([LOGITS.tolist()]), settings)
        assert rows.tolist() == [[1.0] + [0.0] * 7]


# --- random numbers -----------------------------------------------------------------------------


def test_random_numbers_are_even_and_independent_of_what_is_beside_them():
    numbers = np.array(uniforms(3, "token", 0, DRAWS))
    assert 0 <= numbers.min() < numbers.max() < 1
    assert np.float32(numbers).astype(float).tolist() == numbers.tolist()
    even = np.full(16, 1 / 16)
    assert chi_square(histogram((numbers * 16).astype(int), 16), even) > LIKELY
    for other in (uniforms(3, "token", 1, DRAWS), uniforms(4, "token", 0, DRAWS)):
        both = (numbers * 4).astype(int) * 4 + (np.array(other) * 4).astype(int)
        assert chi_square(histogram(both, 16), even) > LIKELY
    for purpose in (DRAFT, ACCEPT):
        assert abs(np.corrcoef(numbers, uniforms(3, purpose, 0, DRAWS))[0, 1]) < 0.03


# --- real models --------------------------------------------------------------------------------

MIXED = {"temperature": 1.2, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.3}


@pytest.fixture(scope="module")
def pairs(qwen3_toy):
    return {name: qwen3_toy.load(backend=name) for name in BACKENDS}


def tokens_of(pair, prompt, **settings):
    return decode(pair, prompt, DecodeConfig(**({"max_new_tokens": 14} | settings))).tokens


@pytest.mark.parametrize("settings", [{"temperature": 1.0}, MIXED], ids=["temperature 1", "all"])
@pytest.mark.parametrize("proposal", ["argmax", "sample"])
def test_by_the_match_rule_a_seed_gives_the_same_text_at_every_block_size_and_in_both_backends(
    pairs, qwen3_toy, proposal, settings
):
    prompt = qwen3_toy.prompts[0]
    plain = tokens_of(pairs["torch"], prompt, block_size=1, seed=11, **settings)
    assert plain != qwen3_toy.greedy[0][:14]
    asked = {"seed": 11, "proposal": proposal} | settings
    for name, sizes in (("torch", (2, 8)), ("mlx", (5,))):
        for size in sizes:
            assert tokens_of(pairs[name], prompt, block_size=size, **asked) == plain


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("proposal", ["argmax", "sample"])
def test_a_seed_repeats_a_run_and_another_one_gives_another(pairs, qwen3_toy, rule, proposal):
    for pair in pairs.values():
        settings = {"temperature": 1.0, "rule": rule, "proposal": proposal, "max_new_tokens": 10}
        runs = [tokens_of(pair, qwen3_toy.prompts[1], seed=seed, **settings) for seed in (1, 1, 2)]
        assert runs[0] == runs[1] != runs[2]


def test_a_run_without_a_seed_says_which_it_took(pairs, qwen3_toy):
    config = DecodeConfig(temperature=1.0, max_new_tokens=12)
    first, second = (decode(pairs["torch"], qwen3_toy.prompts[0], config) for _ in range(2))
    assert first.request.seed != second.request.seed
    again = tokens_of(
        pairs["torch"],
        qwen3_toy.prompts[0],
        temperature=1.0,
        max_new_tokens=12,
        seed=first.request.seed,
    )
    assert again == first.tokens
    assert (first.request.rule, first.request.proposal) == ("match", "argmax")


@pytest.mark.slow
def test_no_generator_of_the_process_is_touched():
    # in a process of its own: the shape checks of the tests draw numbers themselves
    code = """
import random
import mlx.core as mx, numpy as np, torch
from dflash_lab import DecodeConfig, decode, load_pair

def states():
    mlx = [key.tolist() for key in mx.random.state]
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state()), mlx

pairs = [load_pair("tiny", backend=name, device="cpu") for name in ("torch", "mlx")]
asked = {"rule": "rejection", "proposal": "sample", "temperature": 1.0, "max_new_tokens": 6}
before = states()
for pair in pairs:
    decode(pair, (5, 3, 8), DecodeConfig(**asked))
assert states() == before
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKENDS)
def test_interleaved_sessions_and_threads_do_not_disturb_each_others_draws(pairs, qwen3_toy, name):
    pair, prompts = pairs[name], qwen3_toy.prompts[:2]
    configs = [
        DecodeConfig(temperature=1.0, seed=seed, rule=rule, proposal="sample", max_new_tokens=20)
        for seed, rule in ((1, "match"), (2, "rejection"))
    ]
    alone = [decode(pair, *both).tokens for both in zip(prompts, configs, strict=True)]
    open_streams = [stream(pair, *both) for both in zip(prompts, configs, strict=True)]
    mixed = [[next(records).token] for records in open_streams]
    for _ in range(40):
        for tokens, records in zip(mixed, open_streams, strict=True):
            tokens += getattr(next(records, None), "tokens", ())
    assert [tuple(tokens) for tokens in mixed] == alone
    made = {}
    threads = [
        threading.Thread(target=lambda i=i: made.update({i: decode(pair, prompts[i], configs[i])}))
        for i in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert [made[i].tokens for i in range(2)] == alone


def test_top_k_1_is_greedy_at_any_temperature_and_so_is_temperature_0(pairs, qwen3_toy):
    prompt, text = qwen3_toy.prompts[0], qwen3_toy.greedy[0]
    for pair in pairs.values():
        for rule, proposal in RULE_PAIRS:
            asked = {"temperature": 2.0, "top_k": 1, "rule": rule, "proposal": proposal}
            assert tokens_of(pair, prompt, max_new_tokens=6, **asked) == text[:6]
        assert tokens_of(pair, prompt, top_p=0.5, top_k=7, max_new_tokens=6) == text[:6]


def test_greedy_decoding_with_a_penalty_is_that_of_an_independent_loop(pairs, qwen3_toy):
    model, ids = pairs["torch"].models.target.model, list(qwen3_toy.prompts[0])
    tokens = list(ids)
    for _ in range(20):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
        scores = logits.tolist()
        for token in set(tokens):
            scores[token] = scores[token] / 2 if scores[token] > 0 else scores[token] * 2
        tokens.append(int(np.argmax(scores)))
    right = tuple(tokens[len(ids) :])
    assert right != greedy(model, ids, 20)[0]
    for pair in pairs.values():
        for size in (1, 8):
            made = tokens_of(pair, ids, block_size=size, repetition_penalty=2.0, max_new_tokens=20)
            assert made == right


@pytest.mark.parametrize("rule", RULES)
def test_probabilities_are_those_of_target_and_draft_and_are_told_only_where_asked_for(
    pairs, qwen3_toy, rule
):
    model, prompt = pairs["torch"].models.target.model, qwen3_toy.prompts[0]
    settings = {"rule": rule, "proposal": "sample", "temperature": 0.8, "top_k": 50, "seed": 1}
    config = DecodeConfig(probabilities=True, max_new_tokens=12, **settings)
    for pair in pairs.values():
        trace = decode(pair, prompt, config)
        block = trace.blocks[0]
        text = torch.tensor([[*prompt, trace.prefill.token, *block.drafted]])
        logits = model(input_ids=text, use_cache=False).logits[0, len(prompt) : -1].float()
        law = torch_sampling.probabilities(logits.detach(), Sampling(temperature=0.8, top_k=50))
        wanted = law.gather(-1, text[0, len(prompt) + 1 :, None])[:, 0].tolist()
        assert block.target_prob == pytest.approx(wanted, abs=1e-5)
        assert len(block.draft_prob) == len(block.drafted) == 7
        assert all(0 < q <= 1 for q in block.draft_prob)
        if rule == "rejection":
            odds = [p / q for p, q in zip(block.target_prob, block.draft_prob, strict=True)]
            assert block.verdict.odds == pytest.approx(odds)
        plain = decode(pair, prompt, DecodeConfig(max_new_tokens=12, **settings))
        assert plain.tokens == trace.tokens
        assert {block.draft_prob for block in plain.blocks} == {None}


def test_probabilities_of_greedy_decoding_are_the_models_own(pairs, qwen3_toy):
    for pair in pairs.values():
        config = DecodeConfig(probabilities=True, max_new_tokens=12, block_size=4)
        trace = decode(pair, qwen3_toy.prompts[0], config)
        assert trace.tokens == qwen3_toy.greedy[0][:12]
        session = pair.models.session(None, True)
        anchor = session.prefill(qwen3_toy.prompts[0])
        sure = session.confidences(session.draft(anchor, 4))
        assert trace.blocks[0].draft_prob == pytest.approx(sure, rel=1e-4)
        plain = decode(pair, qwen3_toy.prompts[0], DecodeConfig(block_size=1, probabilities=True))
        assert {(b.draft_prob, b.target_prob) for b in plain.blocks} == {((), ())}


def test_probabilities_are_columns_of_a_stored_run(pairs, qwen3_toy):
    from dflash_lab.store import block_row, block_table

    config = DecodeConfig(probabilities=True, temperature=1.0, seed=0, max_new_tokens=8)
    trace = decode(pairs["torch"], qwen3_toy.prompts[0], config)
    keys = {"prompt_id": "a", "turn": 0, "repeat": 0}
    line = {"prompt": keys, "blocks": [block_row(block) for block in trace.blocks]}
    rows = block_table("c", [line]).to_pylist()
    for row, block in zip(rows, trace.blocks, strict=True):
        assert row["draft_prob"] == pytest.approx(block.draft_prob)
        assert row["target_prob"] == pytest.approx(block.target_prob)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("rule", RULES)
def test_a_draft_of_nan_changes_the_speed_and_never_the_law(pairs, qwen3_toy, name, rule):
    pair, prompt = pairs[name], qwen3_toy.prompts[0]
    real = pair.models.draft.logits
    settings = {"temperature": 1.0, "seed": 3, "rule": rule, "proposal": "sample"}
    try:
        pair.models.draft.logits = lambda raw: real(raw) * float("nan")
        asked = DecodeConfig(probabilities=True, max_new_tokens=14, **settings)
        trace = decode(pair, prompt, asked)
    finally:
        del pair.models.draft.logits
    rows = pair.models.vocabulary
    told = [q for block in trace.blocks for q in block.draft_prob]
    assert told == pytest.approx([1 / rows] * len(told))
    if rule == "match":
        assert trace.tokens == tokens_of(pair, prompt, block_size=1, **settings)


def test_a_draft_2_proposes_its_candidates_alone_and_weighs_them_to_1():
    from dflash_lab.tests.variants import prompts, variant

    pair = variant("dflash 2")
    config = DecodeConfig(temperature=1.0, seed=0, rule="rejection", proposal="sample")
    session = pair.models.session(None, True, Sampling(temperature=1.0, proposal="sample"))
    block = session.draft(session.prefill(prompts(1)[0]), 8)
    assert ((block.weights > 0).sum(-1) <= pair.models.draft.candidate_selector.top_k).all()
    torch.testing.assert_close(block.weights.sum(-1), torch.ones(7))
    assert decode(pair, prompts(1)[0], config).tokens


@pytest.mark.slow
def test_the_default_proposal_is_accepted_at_least_as_often_as_the_other():
    from dflash_lab.tests.variants import prompts, tiny

    def tau(proposal):  # 50 texts
        asked = {"temperature": 1.0, "max_new_tokens": 12, "proposal": proposal}
        blocks = [
            block
            for seed in (1, 2)
            for one in prompts(25)
            for block in decode(tiny(), one, DecodeConfig(seed=seed, **asked)).blocks
        ]
        return sum(block.accepted for block in blocks) / len(blocks)

    assert DecodeConfig().proposal == "argmax"
    assert tau("argmax") >= 0.9 * tau("sample")


# --- sweeps -------------------------------------------------------------------------------------


def test_a_sweep_draws_alike_in_all_its_cells_and_anew_in_each_repeat(tmp_path):
    from dflash_lab.tests.variants import tiny

    asked = SweepConfig(block_sizes=(1, 4), max_prompts=1, max_new_tokens=12, warm_up=False)
    hot = replace(asked, temperature=3.0, top_k=50, seed=4, repeats=2, probabilities=True)
    run = sweep(hot, tmp_path, pair=tiny())
    told = {"top_k": 50, "seed": 4, "probabilities": True}
    for cell in run.cells:
        assert (cell.request["temperature"], cell.request["sampling"]) == (3.0, told)
    texts = {}
    for row in run.prompts().to_pylist():
        texts.setdefault(row["repeat"], set()).add(tuple(row["new_ids"]))
    assert [len(found) for found in texts.values()] == [1, 1]
    assert texts[0] != texts[1]
    drafted = [row for row in run.blocks().to_pylist() if row["block_size"] == 4]
    assert all(len(row["target_prob"]) == len(row["drafted"]) for row in drafted)
    assert "sampling" not in sweep(asked, tmp_path / "greedy", pair=tiny()).cells[0].request


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"temperature": 1.0, "library_baseline": True}, "greedy and without a penalty"),
        ({"repetition_penalty": 2.0, "library_baseline": True}, "greedy and without a penalty"),
        ({"seed": None}, "seed is None"),
        ({"rule": "rejection"}, "rule is 'rejection', but the temperature is 0"),
    ],
)
def test_a_sweep_refuses_what_it_cannot_draw(settings, words):
    with pytest.raises(ValueError, match=words):
        SweepConfig(**settings)


@pytest.mark.parametrize("name", ["logit_bias", "presence_penalty", "top_logprobs", "n"])
@pytest.mark.parametrize(
    "call",
    [
        DecodeConfig,
        SweepConfig,
        lambda **more: calls.stream_generate(None, None, None, "hi", **more),
        lambda **more: calls.dflash_generate(None, None, [[1]], 8, None, 1.0, **more),
        lambda **more: calls.Draft.spec_generate(None, None, [[1]], **more),
    ],
    ids=["DecodeConfig", "SweepConfig", "stream_generate", "dflash_generate", "spec_generate"],
)
def test_a_setting_that_nothing_honours_is_refused_by_its_name(call, name):
    with pytest.raises(TypeError, match=name):
        call(**{name: {7: 100.0}})
