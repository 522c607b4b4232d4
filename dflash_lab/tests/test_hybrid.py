"""Targets with recurrent layers (Qwen3-Next, Qwen3.5), beside decoding without any cache.

What a state must be is told by the libraries' own caches, after a fresh prefill.
"""

import functools
import random
import threading
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
import torch
import transformers
from mlx_lm.models.cache import make_prompt_cache

from dflash_lab import DecodeConfig, decode, stream
from dflash_lab.accept import matched_prefix
from dflash_lab.backends import (
    TargetNotReversible,
    UnsupportedTarget,
    mlx_recurrent,
    mlx_target,
    torch_recurrent,
    torch_target,
)
from dflash_lab.backends.mlx_session import MlxBlock, MlxSession
from dflash_lab.backends.torch_session import TorchSession
from dflash_lab.tests.test_abandoned import check_that_an_abandoned_stream_disturbs_nobody
from dflash_lab.tests.test_torch_target import Told, decoded
from dflash_lab.tests.toys import (
    HYBRIDS,
    STANDARD_RUN,
    cut,
    greedy,
    is_varied,
    seen,
    toy_models,
    toy_target,
)
from dflash_lab.train.generate import Writer

pytestmark = pytest.mark.usefixtures("quiet")

SAMPLE = [(2, "noise 0"), (3, "wrong"), (8, "cut 3"), (16, "noise 1")]
GRID = [
    (size, script)
    for size in range(1, 17)
    for script in STANDARD_RUN
    if (size, script) not in SAMPLE
]
NETS = (0, 1, 2)  # the layers that are recurrent; 3 is not


class ToldMlx(MlxSession):
    """An MLX session without a draft, whose proposals come from a script."""

    follow = Told.follow

    def draft(self, anchor, block_size):
        return MlxBlock(mx.array(Told.draft(self, anchor, block_size).tokens.numpy()))


class Torch:
    """What the tests ask of the torch backend."""

    session, told, name = TorchSession, Told, "torch"
    recurrent, target = torch_recurrent, torch_target

    @staticmethod
    def read(target, ids, cache):
        return target.logits(torch.tensor([ids]), cache, ())[0].numpy()

    @staticmethod
    def states(parts):
        """Of each recurrent layer: inputs of the convolution and the matrix."""
        return [
            (parts[n].conv_states[0].numpy(), parts[n].recurrent_states[0].numpy()) for n in NETS
        ]

    @classmethod
    @torch.inference_mode()
    def fresh(cls, target, ids):
        """States and next logits after a prefill into the library's own cache."""
        cache = transformers.DynamicCache(config=target.config)
        logits = target.model(torch.tensor([ids]), **{target._cache_name: cache}).logits
        return cls.states(cache.layers), logits[0, -1].numpy()

    @classmethod
    def held(cls, cache):
        return cls.states(cache.layers)

    @staticmethod
    def lengths(cache):
        return {layer.get_seq_length() for layer in cache.layers}

    @staticmethod
    def load(model):
        return torch_target.TorchTarget(model)


class Mlx:
    """The twin of `Torch`."""

    session, told, name = MlxSession, ToldMlx, "mlx"
    recurrent, target = mlx_recurrent, mlx_target

    @staticmethod
    def read(target, ids, cache):
        return np.array(target.logits(mx.array([ids]), cache, ())[0])

    @staticmethod
    def held(cache):
        return [tuple(np.array(state) for state in cache[n].cache) for n in NETS]

    @staticmethod
    def lengths(cache):
        return {part.offset for part in cache}

    @classmethod
    def fresh(cls, target, ids):
        cache = make_prompt_cache(target.model)
        logits = target.model(mx.array([ids]), cache=cache)
        return cls.held(cache), np.array(logits[0, -1])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Toys by kind and cases by kind and backend, each made once."""

    @functools.cache
    def toy(kind):
        return toy_models(tmp_path_factory.mktemp(kind), kind=kind, prompts=2)

    @functools.cache
    def case(kind, backend):
        pair = toy(kind).load(backend=backend.name)
        target = pair.models.target
        return SimpleNamespace(backend=backend, toy=toy(kind), pair=pair, target=target)

    return SimpleNamespace(toy=toy, case=case)


@pytest.fixture(params=HYBRIDS)
def toy(request, made):
    return made.toy(request.param)


CASES = [
    # the older kind has the parts of the newer one
    pytest.param((kind, backend), marks=[pytest.mark.slow] * (kind == "qwen3_next"))
    for kind in HYBRIDS
    for backend in (Torch, Mlx)
]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]} {case[1].name}")
def case(request, made):
    """A backend, its pair of a hybrid toy, and the toy."""
    return made.case(*request.param)


def check_tokens(case, size, script):
    prompt, text = case.toy.prompts[0], case.toy.greedy[0]
    session = case.backend.told(case.target, None, None).follow(
        STANDARD_RUN[script], (*prompt, *text)
    )
    count = 30 if script != "wrong" else 10
    assert decoded(session, prompt, size, count) == text[:count]


@pytest.mark.parametrize(("size", "script"), SAMPLE)
def test_tokens_equal_decoding_without_a_cache(case, size, script):
    check_tokens(case, size, script)


@pytest.mark.thorough
@pytest.mark.parametrize(("size", "script"), GRID)
def test_tokens_of_every_size_and_draft_equal_decoding_without_a_cache(case, size, script):
    check_tokens(case, size, script)


def test_tokens_of_the_public_calls_equal_decoding_without_a_cache(case):
    for prompt, text in zip(case.toy.prompts, case.toy.greedy, strict=True):
        for size in (1, 6):
            config = DecodeConfig(block_size=size, max_new_tokens=7, timing="stages")
            assert decode(case.pair, prompt, config).tokens == text[:7]
    assert case.pair.models.library_generate(prompt, 7, frozenset()).tokens == text[:7]


@pytest.mark.parametrize("size", [4, 16])
def test_state_and_next_logits_after_every_block_are_those_of_a_fresh_prefill(case, size):
    text = [*case.toy.prompts[0], *case.toy.greedy[0]]
    cache, place = case.target.new_cache(), 5
    case.backend.read(case.target, text[:place], cache)
    keeps = [1, size - 1, size // 2, size, 2, 3]
    for keep in keeps:
        step = text[place : place + keep] + [7] * (size - keep)
        case.backend.read(case.target, step, cache)
        case.backend.target.take_back(cache, size - keep)
        place += keep
        wanted, _ = case.backend.fresh(case.target, text[:place])
        for found, states in zip(case.backend.held(cache), wanted, strict=True):
            for ours, theirs in zip(found, states, strict=True):
                np.testing.assert_allclose(ours, theirs, atol=1e-4)
        live = case.backend.read(case.target, text[place : place + 1], cache)
        _, logits = case.backend.fresh(case.target, text[: place + 1])
        np.testing.assert_allclose(live[0, 0], logits, atol=1e-4, rtol=1e-4)
        case.backend.target.take_back(cache, 1)


@pytest.fixture(scope="module")
def dozen(made):
    """A prompt of 12 tokens, and 64 tokens after it by reading the whole text at each."""
    model = made.case("qwen3_5", Torch).target.model
    for seed in range(20):
        prompt = tuple(random.Random(seed).choices(range(256), k=12))
        text, gap = greedy(model, prompt, 64)
        if is_varied(text, gap):
            return prompt, text
    raise AssertionError("no prompt whose text is varied and has no near tie")


@pytest.mark.slow
@pytest.mark.parametrize("script", STANDARD_RUN)
@pytest.mark.parametrize("backend", [Torch, Mlx], ids=lambda backend: backend.name)
def test_64_tokens_and_the_logits_after_each_block_know_nothing_of_rejected_tokens(
    made, dozen, backend, script
):
    target, (prompt, text) = made.case("qwen3_5", backend).target, dozen
    session = backend.told(target, None, None).follow(STANDARD_RUN[script], (*prompt, *text))
    tokens = [session.prefill(prompt)]
    while len(tokens) < 64:
        verdict = session.verify(session.draft(tokens[-1], 8))
        accepted = matched_prefix(verdict)
        session.commit(accepted)
        tokens += [*verdict.drafted[:accepted], verdict.posterior[accepted]]
        live = backend.read(target, tokens[-1:], session.cache)[0, 0]
        backend.target.take_back(session.cache, 1)
        _, logits = backend.fresh(target, [*prompt, *tokens])
        np.testing.assert_allclose(live, logits, atol=1e-4, rtol=0)
    assert tuple(tokens[:64]) == text


@pytest.mark.slow
def test_a_pair_used_again_gives_the_first_runs_trace(case):
    def blocks_of(pair, prompt):
        return seen(decode(pair, prompt, DecodeConfig(block_size=8, max_new_tokens=12)))

    long, short = tuple(i % 200 for i in range(200)), case.toy.prompts[0][:5]
    first, second = blocks_of(case.pair, long), blocks_of(case.pair, short)
    assert blocks_of(case.pair, long) == first
    assert blocks_of(case.toy.load(backend=case.backend.name), short) == second


def test_ten_rows_less_three_are_the_first_seven_in_every_layer(case):
    ids, cache = list(case.toy.greedy[0][:10]), case.target.new_cache()
    case.backend.read(case.target, ids, cache)
    case.backend.target.take_back(cache, 3)
    assert case.backend.lengths(cache) == {7}
    wanted, _ = case.backend.fresh(case.target, ids[:7])
    for found, states in zip(case.backend.held(cache), wanted, strict=True):
        for ours, theirs in zip(found, states, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-4)
    live = case.backend.read(case.target, ids[7:8], cache)
    _, logits = case.backend.fresh(case.target, ids[:8])
    np.testing.assert_allclose(live[0, 0], logits, atol=1e-4, rtol=1e-4)


def test_prefill_in_chunks_of_any_size_gives_one_state_and_one_draft(case):
    prompt, drafts = case.toy.prompts[0], []
    wanted, _ = case.backend.fresh(case.target, list(prompt))
    for chunk in (1000, 1, 2, 7):
        session = case.backend.session(case.target, case.pair.models.draft, None, chunk)
        anchor = session.prefill(prompt)
        for found, states in zip(case.backend.held(session.cache), wanted, strict=True):
            for ours, theirs in zip(found, states, strict=True):
                np.testing.assert_allclose(ours, theirs, atol=1e-4)
        drafts.append(session.draft(anchor, 8).tokens.tolist())
    assert all(draft == drafts[0] for draft in drafts)


def test_both_backends_draft_the_same_after_a_block_that_was_kept_in_part(toy):
    prompt, text = toy.prompts[1], toy.greedy[1]
    drafts = []
    for backend, block in ((Torch, torch.tensor), (Mlx, mx.array)):
        models = toy.load(backend=backend.name).models
        session = models.session(None, speculate=True)
        anchor = session.prefill(prompt)
        made = session.draft(anchor, 6)
        session.verify(type(made)(block([[*text[:3], 7, 7, 7]]), made.finite))
        session.commit(2)
        drafts.append(session.draft(text[3], 8).tokens.tolist())
    assert drafts[0] == drafts[1]


def test_rows_are_taken_back_from_the_last_step_alone(case):
    cache, text = case.target.new_cache(), list(case.toy.greedy[0])
    case.backend.read(case.target, text[:6], cache)
    case.backend.read(case.target, text[6:9], cache)
    with pytest.raises(TargetNotReversible, match="taken back"):
        case.backend.target.take_back(cache, 4)


def test_a_prompt_cannot_be_taken_back(case):
    session = case.backend.session(case.target, None, None)
    session.prefill(case.toy.prompts[0])
    with pytest.raises(TargetNotReversible, match="taken back"):
        case.backend.target.take_back(session.cache, 1)


def test_rows_of_one_step_are_taken_back_in_several_times_as_in_one(case):
    text, found = list(case.toy.greedy[0]), []
    for parts in ((7,), (1, 4, 2), (9,)):
        cache = case.target.new_cache()
        case.backend.read(case.target, text[:6], cache)
        case.backend.read(case.target, text[6:15], cache)
        for tokens in parts:
            case.backend.target.take_back(cache, tokens)
        found.append(case.backend.held(cache))
    for one, several in zip(found[0], found[1], strict=True):
        np.testing.assert_allclose(one[1], several[1], atol=1e-5)
    wanted, _ = case.backend.fresh(case.target, text[:6])
    np.testing.assert_allclose(found[2][2][1], wanted[2][1], atol=1e-5)


def test_sessions_on_one_target_do_not_meet(case):
    prompts, texts = case.toy.prompts, case.toy.greedy
    config = DecodeConfig(block_size=5, max_new_tokens=5)
    streams = [stream(case.pair, prompt, config) for prompt in prompts]
    left = [[record] for record in map(next, streams)]
    for _ in range(5):
        for records, one in zip(left, streams, strict=True):
            records += [record for record in [next(one, None)] if record]
    for (prefill, *blocks), text in zip(left, texts, strict=True):
        tokens = (prefill.token, *(token for block in blocks for token in block.tokens))
        assert tokens == text[:5]
    found = {}

    def run(number):
        found[number] = decode(case.pair, prompts[number], config).tokens

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: texts[number][:5] for number in range(2)}


def test_an_abandoned_stream_disturbs_nobody(case):
    check_that_an_abandoned_stream_disturbs_nobody(case.pair, case.toy.prompts, case.toy.greedy)


def test_a_text_read_at_once_for_replay_is_what_was_decoded(toy):
    models = toy.load().models
    anchors = models.anchors(toy.prompts[0], toy.greedy[0][:12])
    assert tuple(anchors.choices) == toy.greedy[0][:12]


def test_the_target_is_left_as_it_was_found_by_a_pass_that_breaks_too(toy, monkeypatch):
    target = toy.load().models.target
    parts = list(target.model.modules())
    kinds = {type(part) for part in parts}
    before = [dict(vars(kind)) for kind in kinds]
    abandoned = stream(toy.load(), toy.prompts[0], DecodeConfig(block_size=4, max_new_tokens=20))
    next(abandoned), next(abandoned)

    def boom(*_, **__):
        raise RuntimeError("boom")

    monkeypatch.setattr(target.layers[3], "forward", boom)
    with pytest.raises(RuntimeError, match="boom"):
        target.logits(torch.tensor([[1, 2]]), target.new_cache(), (1,))
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in parts)
    assert [dict(vars(kind)) for kind in kinds] == before


def test_only_a_block_kept_in_part_is_read_again_and_by_the_recurrent_layers_alone(toy):
    target = toy.load().models.target
    read = []
    for layer, part in enumerate(target.layers):
        net = part.linear_attn if layer in NETS else part.self_attn
        right = net.forward
        net.forward = lambda *args, right=right, layer=layer, **named: (
            read.append((layer, named.get("hidden_states", *args[:1]).shape[1]))
            or right(*args, **named)
        )
    prompt, text = toy.prompts[0], toy.greedy[0]
    session = Told(target, None, None).follow(cut(2), (*prompt, *text))
    session.prefill(prompt)
    for size, again in ((6, [(n, 3) for n in NETS]), (3, []), (1, [])):
        session.verify(session.draft(session.text[session.committed], size))
        read.clear()
        session.commit(min(2, size - 1))
        assert read == again


def test_a_folder_with_the_image_tower_of_qwen_3_5_loads_as_its_text_model_alone(tmp_path):
    text = toy_target("qwen3_5", False)
    tower = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
    config = transformers.Qwen3_5Config(
        text_config=text.config.to_dict(), vision_config={**tower, "out_hidden_size": 64}
    )
    whole = transformers.Qwen3_5ForConditionalGeneration(config)
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    whole.save_pretrained(tmp_path)
    ids = list(range(20))
    with torch.inference_mode():
        wanted = text(input_ids=torch.tensor([ids])).logits.numpy()
    targets = (
        (Torch, torch_target.load_target(tmp_path, torch.float32, torch.device("cpu"))),
        (Mlx, mlx_target.load_target(tmp_path, mx.float32, mx.cpu)),
    )
    for backend, target in targets:
        found = backend.read(target, ids, target.new_cache())
        np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", HYBRIDS)
def test_rounding_in_16_bits_is_no_fault(kind):
    assert Torch.load(toy_target(kind, False).bfloat16()).dtype == torch.bfloat16


def test_a_writer_of_training_texts_refuses_a_recurrent_target_by_name(toy):
    with pytest.raises(UnsupportedTarget, match=r"Qwen3.*ForCausalLM has recurrent layers"):
        Writer(toy.load().models.target, 8, frozenset())


# --- take-backs that are wrong fail the self-test -----------------------------------------------


def keep_all(layer, tokens):
    layer.length -= tokens


def forget_the_kept_rows_too(layer, tokens):
    if tokens:
        layer.length -= tokens
        for name, states in layer._before.items():
            setattr(layer, name, states)


def keep_one_more(layer, tokens, right=torch_recurrent.RecurrentCache.take_back):
    right(layer, max(0, tokens - 1))
    layer.length -= min(1, tokens)


def leave(*names):
    """As it should be, save for one part of the state: what a cropping cache does."""

    def take_back(layer, tokens, right=torch_recurrent.RecurrentCache.take_back):
        states = {name: dict(getattr(layer, name)) for name in names}
        right(layer, tokens)
        for name, kept in states.items():
            setattr(layer, name, kept)

    return take_back


@pytest.mark.parametrize(
    "broken",
    [
        keep_all,
        keep_one_more,
        forget_the_kept_rows_too,
        leave("recurrent_states"),
        leave("conv_states"),
    ],
    ids=["all", "one more", "none", "matrix", "convolution"],
)
@pytest.mark.parametrize("kind", HYBRIDS)
def test_a_torch_state_that_is_taken_back_wrongly_fails_the_self_test(monkeypatch, kind, broken):
    model = toy_target(kind, False)
    monkeypatch.setattr(torch_recurrent.RecurrentCache, "take_back", broken)
    with pytest.raises(TargetNotReversible, match="ForCausalLM cannot be decoded in blocks"):
        Torch.load(model)


def keep_all_mlx(part, n):
    part.offset -= n
    return n


def keep_one_more_mlx(part, n, right=mlx_recurrent.RecurrentCache.trim):
    right(part, n - 1)
    part.offset -= 1
    return n


def leave_mlx(number):
    def trim(part, n, right=mlx_recurrent.RecurrentCache.trim):
        kept = part.cache[number]
        right(part, n)
        part.cache[number] = kept
        return n

    return trim


@pytest.mark.parametrize(
    "broken",
    [keep_all_mlx, keep_one_more_mlx, leave_mlx(0), leave_mlx(1)],
    ids=["all", "one more", "convolution", "matrix"],
)
def test_an_mlx_state_that_is_taken_back_wrongly_fails_the_self_test(toy, monkeypatch, broken):
    monkeypatch.setattr(mlx_recurrent.RecurrentCache, "trim", broken)
    with pytest.raises(TargetNotReversible, match="cannot be decoded in blocks"):
        toy.load(backend="mlx")
