"""Targets of every family in float32, far past their windows, beside reading the text at once."""

import random
from dataclasses import dataclass

import pytest
import torch
import transformers
from transformers import Cache, DynamicCache, GenerationConfig, StaticCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from dflash_lab.accept import matched_prefix
from dflash_lab.backends import (
    TargetNotFinite,
    TargetNotReversible,
    UnsupportedTarget,
    torch_target,
)
from dflash_lab.backends.torch_model import DraftNetwork
from dflash_lab.backends.torch_session import TorchBlock, TorchSession
from dflash_lab.backends.torch_target import LayerCache, TorchTarget, captured, take_back
from dflash_lab.checkpoint import parse_draft_config
from dflash_lab.tests.toys import (
    GAP,
    ORACLE,
    WINDOW,
    WRONG,
    cut,
    draft_json,
    noise,
    toy_target,
)

SLIDING = ("qwen3_sliding", "mistral", "gemma2", "gemma3", "gpt_oss")
FAMILIES = ("qwen2", "qwen3_moe", *SLIDING)
COUNT = 62  # new tokens of a text


@dataclass(frozen=True, kw_only=True)
class Case:
    """A target, a prompt within its window and one of twice its window, and its greedy texts."""

    target: TorchTarget
    prompts: tuple[tuple[int, ...], ...]
    texts: tuple[tuple[int, ...], ...]


class Told(TorchSession):
    """A session without a draft, whose proposals come from a script."""

    def follow(self, script, text):
        self.script, self.text = script, (*text, *(0,) * 32)
        return self

    def draft(self, anchor, block_size):
        places = range(self.committed + 1, self.committed + block_size)
        right = [self.script(place, slot) for slot, place in enumerate(places, start=1)]
        drafted = [self.text[place] if ok else 7 for place, ok in zip(places, right, strict=True)]
        return TorchBlock(torch.tensor([[anchor, *drafted]]), None)


def decoded(session, prompt, block_size, count=COUNT):
    """New tokens of a session, without the loop of the library."""
    tokens = [session.prefill(prompt)]
    while len(tokens) < count:
        verdict = session.verify(session.draft(tokens[-1], block_size))
        accepted = matched_prefix(verdict)
        session.commit(accepted)
        tokens += [*verdict.drafted[:accepted], verdict.posterior[accepted]]
    return tuple(tokens[:count])


QUICK = ("qwen2", "gemma3", "gpt_oss")  # one without sliding layers, two kinds that have some


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(kind, marks=[pytest.mark.slow] * (kind not in QUICK)) for kind in FAMILIES
    ],
)
def case(request):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        target = TorchTarget(toy_target(request.param, tied="gemma" in request.param))
    dice = random.Random(0)
    prompts = tuple(tuple(dice.choices(range(256), k=k)) for k in (WINDOW - 6, 2 * WINDOW + 8))
    texts = tuple(decoded(TorchSession(target, None, None), prompt, 1) for prompt in prompts)
    return Case(target=target, prompts=prompts, texts=texts)


@pytest.fixture(scope="module")
def network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return DraftNetwork(parse_draft_config(draft_json())).eval().requires_grad_(False)


def test_single_steps_choose_what_reading_the_whole_text_at_once_chooses(case):
    for prompt, text in zip(case.prompts, case.texts, strict=True):
        logits = case.target.model(torch.tensor([[*prompt, *text]]), use_cache=False).logits[0]
        rows = logits[len(prompt) - 1 : -1]
        best = rows.topk(2).values
        assert rows.argmax(-1).tolist() == list(text)
        assert float((best[:, 0] - best[:, 1]).min()) > GAP
        assert len(set(text)) > 20


def test_tokens_equal_the_librarys_own_generator(case):
    ids = torch.tensor([case.prompts[0]])
    settings = GenerationConfig(do_sample=False, max_new_tokens=COUNT, pad_token_id=0)
    mask = torch.ones_like(ids)
    made = case.target.model.generate(ids, attention_mask=mask, generation_config=settings)
    assert tuple(made[0, ids.shape[1] :].tolist()) == case.texts[0]


@pytest.mark.parametrize(
    "size, script, which",
    [
        (2, ORACLE, 1),
        (5, cut(2), 0),
        (8, cut(5), 1),
        (16, cut(2), 1),
        (16, noise(0.8), 0),
        (20, WRONG, 0),
    ],
)
def test_tokens_of_every_block_size_are_those_of_single_steps(case, size, script, which):
    prompt, text = case.prompts[which], case.texts[which]
    count = COUNT if script is not WRONG else 14
    session = Told(case.target, None, None).follow(script, (*prompt, *text))
    assert decoded(session, prompt, size, count) == text[:count]


def test_tokens_with_a_draft_of_random_weights_are_those_of_single_steps(case, network):
    session = TorchSession(case.target, network, None)
    assert decoded(session, case.prompts[1], 8, 12) == case.texts[1][:12]


@pytest.mark.parametrize("size", [7, 20])
def test_next_logits_after_every_block_are_those_of_a_fresh_prefill(monkeypatch, case, size):
    monkeypatch.setattr(torch_target, "SPARE", 1)
    target, ids = case.target, torch.tensor([[*case.prompts[0], *case.texts[0]]])
    cache, place = target.new_cache(), len(case.prompts[0])
    target.logits(ids[:, :place], cache, ())
    while place + size < ids.shape[1]:
        keep = 1 + place % size
        step = ids[:, place : place + size].clone()
        step[:, keep:] = (step[:, keep:] + 1) % 512
        target.logits(step, cache, ())
        take_back(cache, size - keep)
        place += keep
        live, _ = target.logits(ids[:, place : place + 1], cache, ())
        take_back(cache, 1)
        fresh = target.model(ids[:, : place + 1], use_cache=False).logits
        torch.testing.assert_close(live[0, 0], fresh[0, -1], atol=1e-4, rtol=1e-4)
    assert place > 3 * WINDOW
    for layer in cache.layers:
        held = layer.keys.shape[2]
        assert layer.length == place
        assert layer.first + held == place
        assert held < place if layer.window else held == place


def test_prefill_in_chunks_of_any_size_gives_one_draft(case, network):
    drafts = []
    for chunk in (1000, 7, WINDOW, WINDOW + 1):
        session = TorchSession(case.target, network, None, prefill_chunk=chunk)
        drafts.append(session.draft(session.prefill(case.prompts[1]), 8).tokens.tolist())
    assert drafts[0][0][0] == case.texts[1][0]
    assert all(draft == drafts[0] for draft in drafts)


def test_a_draft_is_fed_what_the_targets_first_layer_is_fed(case, network, monkeypatch):
    fed = []
    monkeypatch.setattr(network, "forward", lambda embedded, *_: fed.append(embedded) or embedded)
    session = TorchSession(case.target, network, None)
    session.prefill(case.prompts[0])
    session.draft(7, 4)
    ids = torch.tensor([[7, 511, 511, 511]])
    states = case.target.model(ids, use_cache=False, output_hidden_states=True).hidden_states
    torch.testing.assert_close(fed[0][0], states[0], atol=0, rtol=1e-6)


def test_features_are_the_output_of_the_layer_with_that_number(case):
    ids = torch.tensor([case.prompts[0]])
    hidden = case.target.model(ids, output_hidden_states=True, use_cache=False).hidden_states
    _, features = case.target.logits(ids, case.target.new_cache(), (0, 1, 2))
    wanted = torch.cat([hidden[tap + 1] for tap in (0, 1, 2)], dim=-1)
    torch.testing.assert_close(features, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", FAMILIES)
def test_rounding_in_16_bits_is_no_fault(kind):
    assert TorchTarget(toy_target(kind, False).bfloat16()).dtype == torch.bfloat16


def test_loading_and_decoding_leave_the_librarys_classes_and_the_configuration_alone():
    model = toy_target("gpt_oss", False)
    kinds = (Cache, DynamicCache, DynamicSlidingWindowLayer, type(model), type(model.model))
    before = [dict(vars(kind)) for kind in kinds]
    parts = [(part, part.sliding_window) for part in model.modules() if hasattr(part, "sinks")]
    target = TorchTarget(model)
    target.logits(torch.tensor([[*range(40)]]), target.new_cache(), (1, 2))
    assert [dict(vars(kind)) for kind in kinds] == before
    assert target.windows == (WINDOW, None, WINDOW, None)
    assert model.config.sliding_window == WINDOW
    assert parts and all(part.sliding_window == window for part, window in parts)


def test_a_softcap_inside_of_attention_is_computed_whatever_the_library_would_load(
    monkeypatch, tmp_path
):
    toy_target("gemma2", tied=True).save_pretrained(tmp_path)
    real = transformers.AutoModelForCausalLM.from_pretrained

    def loaded(*asked, **settings):
        model, told = real(*asked, **settings)
        model.config._attn_implementation = "sdpa"
        return model, told

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", loaded)
    target = torch_target.load_target(tmp_path, torch.float32, torch.device("cpu"))
    assert target.config._attn_implementation == "eager"


# --- one layer's keys and values ----------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 1, 2, 5, 16])
def test_a_step_is_given_exactly_the_rows_it_may_see(monkeypatch, window):
    monkeypatch.setattr(torch_target, "SPARE", 1)
    dice, layer, held = random.Random(0), LayerCache(window), []
    for serial in range(300):
        new = [1000 * serial + row for row in range(dice.choice([1, 1, 2, 8, 20]))]
        seen = 0 if window is None else max(0, len(held) - window + 1)
        assert layer.get_mask_sizes(len(new)) == (len(held) - seen + len(new), seen)
        rows = torch.tensor(new).view(1, 1, -1, 1)
        keys, values = layer.update(rows, -rows)
        held += new
        assert keys.flatten().tolist() == held[seen:]
        assert values.flatten().tolist() == [-row for row in held[seen:]]
        back = dice.randint(0, len(new))
        layer.take_back(back)
        held = held[: len(held) - back]
        assert layer.get_seq_length() == len(held)
    assert layer.keys.shape[2] == len(held) if window is None else layer.keys.shape[2] < 100


def test_a_step_copies_its_own_rows_and_the_text_before_it_stays_where_it_is():
    layer, row, places = LayerCache(None), torch.ones(1, 2, 1, 4), set()
    for _ in range(1000):
        keys, _ = layer.update(row, row)
        places.add(keys.data_ptr())
    assert len(places) < 12


def cache_of(*windows):
    return Cache(layers=[LayerCache(window) for window in windows])


def test_take_back_leaves_the_first_rows_as_they_were():
    cache, rows = cache_of(None, 4, 16), torch.arange(10.0).view(1, 1, 10, 1)
    for number in range(3):
        cache.update(rows, rows, number)
    take_back(cache, 0)
    take_back(cache, 3)
    assert [layer.get_seq_length() for layer in cache.layers] == [7, 7, 7]
    assert [layer.keys.flatten().tolist() for layer in cache.layers] == [list(range(7))] * 3
    with pytest.raises(ValueError, match="8 tokens back from a cache that holds 7"):
        take_back(cache, 8)


@pytest.mark.parametrize("kind", [StaticCache, DynamicCache])
def test_a_cache_of_the_librarys_own_kind_is_refused_by_name(kind):
    model = toy_target("qwen2", False)
    settings = {"max_cache_len": 64} if kind is StaticCache else {}
    cache = kind(config=model.config, **settings)
    target = TorchTarget(model)
    target.logits(torch.tensor([[*range(10)]]), cache, ())
    with pytest.raises(TargetNotReversible, match=r"taken back from a (Static|Dynamic)Layer"):
        take_back(cache, 3)


def test_rows_that_are_gone_are_never_taken_back_in_silence(monkeypatch):
    monkeypatch.setattr(torch_target, "SPARE", 1)
    cache, row = cache_of(None, 4), torch.ones(1, 1, 1, 1)
    for _ in range(40):
        for number in range(2):
            cache.update(row, row, number)
    with pytest.raises(TargetNotReversible, match="30 tokens cannot be taken back from 40"):
        take_back(cache, 30)


def test_a_cache_without_windows_is_refused_by_a_target_that_has_them():
    target = TorchTarget(toy_target("mistral", False))
    with pytest.raises(UnsupportedTarget, match="MistralForCausalLM has layers that see a window"):
        target.cached(cache_of(None, None, None, None))


# --- what cannot be decoded in blocks is refused ------------------------------------------------


RIGHT = LayerCache.take_back


def keep_one_more(layer, tokens):
    RIGHT(layer, max(0, tokens - 1))


def keep_a_rejected_row_in_place_of_the_last(layer, tokens):
    RIGHT(layer, tokens)
    end = layer.length - layer.first
    for buffer in layer._buffers if tokens else ():
        buffer[:, :, end - 1] = buffer[:, :, end]


def keep_all(layer, tokens):
    pass


@pytest.mark.parametrize(
    "broken, told",
    [
        (keep_one_more, "positions after"),
        (keep_a_rejected_row_in_place_of_the_last, "ForCausalLM cannot be decoded in blocks"),
        (keep_all, "positions after"),
    ],
)
@pytest.mark.parametrize("kind", ["qwen2", "gpt_oss"])
def test_a_cache_that_takes_back_wrongly_fails_the_self_test(monkeypatch, kind, broken, told):
    model = toy_target(kind, False)
    monkeypatch.setattr(LayerCache, "take_back", broken)
    with pytest.raises(TargetNotReversible, match=told):
        TorchTarget(model)
    assert getattr(model.config, "sliding_window", None) in (None, WINDOW)


@pytest.mark.parametrize("kind", SLIDING)
def test_a_window_short_by_one_fails_the_self_test(monkeypatch, kind):
    model, right = toy_target(kind, False), LayerCache._seen_from

    def late(layer, position):
        seen = right(layer, position)
        return seen + 1 if seen else 0

    monkeypatch.setattr(LayerCache, "_seen_from", late)
    with pytest.raises(TargetNotReversible, match="ForCausalLM cannot be decoded in blocks"):
        TorchTarget(model)
    assert model.config.sliding_window == WINDOW


def test_model_code_whose_rows_of_a_step_see_the_wrong_past_is_refused_by_name():
    model = toy_target("llama", False)

    def without_mask(module, args, settings):
        return args, settings | {"attention_mask": None}  # a step is then masked like a prefill

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(without_mask, with_kwargs=True)
    with pytest.raises(
        TargetNotReversible, match=r"LlamaForCausalLM .* in a step of \d+ tokens at position"
    ):
        TorchTarget(model)


def test_model_code_that_fails_in_a_cached_step_is_refused_by_name():
    model = toy_target("llama", False)

    def boom(module, args, settings):
        if settings["position_ids"][0, 0] > 0:
            raise RuntimeError("boom")

    model.model.layers[0].register_forward_pre_hook(boom, with_kwargs=True)
    with pytest.raises(TargetNotReversible, match=r"LlamaForCausalLM .* RuntimeError: boom"):
        TorchTarget(model)


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}
LINEAR = {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 2}
MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 2, "mamba_d_head": 16, "mamba_d_state": 8}
LONG = {
    "max_position_embeddings": 128,
    "original_max_position_embeddings": 64,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 64,
    },
}
CHUNKED = {"layer_types": ["chunked_attention"] * 2, "attention_chunk_size": 8}
REFUSED = {
    "Mamba": ({"state_size": 4}, "the state of MambaMixer"),
    "Lfm2": ({"layer_types": ["conv", "full_attention"]}, "the state of Lfm2ShortConv"),
    "MiniMax": (LINEAR, "the state of MiniMaxLightningAttention"),
    "FalconH1": (MAMBA, "the state of FalconH1Mixer"),
    "Llama": (CHUNKED, "layers that see 8 positions by another rule"),
    "Phi3": (LONG, "longrope"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_target_that_cannot_be_taken_back_is_refused_by_the_name_of_what_it_keeps(name):
    settings, told = REFUSED[name]
    made = getattr(transformers, f"{name}ForCausalLM")
    with pytest.raises(TargetNotReversible, match=rf"{name}ForCausalLM has .*{told}"):
        TorchTarget(made(made.config_class(**SMALL | settings)))


def test_a_target_whose_layers_are_elsewhere_is_refused_by_name():
    settings = {key: SMALL[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")}
    with pytest.raises(UnsupportedTarget, match="RwkvForCausalLM has no decoder layers"):
        TorchTarget(transformers.RwkvForCausalLM(transformers.RwkvConfig(**settings)))


def test_a_multimodal_wrapper_is_refused_by_name():
    config = transformers.Gemma3Config(
        text_config=SMALL,
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "image_size": 28,
            "patch_size": 14,
        },
    )
    with pytest.raises(UnsupportedTarget, match="Gemma3ForConditionalGeneration has no decoder"):
        TorchTarget(transformers.Gemma3ForConditionalGeneration(config))


# --- embedding, features, numbers that overflow -------------------------------------------------


def test_a_scale_outside_of_the_embedding_is_applied_once():
    config = transformers.GraniteConfig(**SMALL, embedding_multiplier=12.0)
    model = transformers.GraniteForCausalLM(config).eval()
    target, ids = TorchTarget(model), torch.tensor([[3, 60, 3]])
    torch.testing.assert_close(target.embedding(ids), 12 * model.model.embed_tokens(ids))
    assert target.embedding.weight is model.model.embed_tokens.weight


def test_an_embedding_that_is_more_than_scaled_is_refused_by_name():
    model = transformers.BioGptForCausalLM(transformers.BioGptConfig(**SMALL)).eval()
    with pytest.raises(UnsupportedTarget, match="first layer of BioGptForCausalLM reads"):
        TorchTarget(model)


def test_of_a_layer_that_returns_a_tuple_the_first_entry_is_the_feature():
    class Layer(torch.nn.Module):
        def forward(self, x):
            return x + 1, "router logits"

    layers, x = torch.nn.ModuleList([Layer(), Layer()]), torch.zeros(1, 3, 2)
    with captured(layers, (1, 0)) as features:
        layers[1](layers[0](x)[0])
        assert features().tolist() == [[[2.0, 2.0, 1.0, 1.0]] * 3]


def test_a_target_that_overflows_in_float16_is_refused_with_the_way_out():
    model = toy_target("qwen3", False)
    with torch.no_grad():
        model.lm_head.weight.mul_(3e4)
    with pytest.raises(TargetNotFinite, match=r"not finite numbers in float16.*bfloat16"):
        TorchTarget(model.half())
