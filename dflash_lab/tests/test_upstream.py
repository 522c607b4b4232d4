"""Beside other people's code on the same weights: dflash 0.1.0, and transformers' own decoder.

Where the other code does not do what a checkpoint says, a test shows what it does instead.
"""

import importlib
import time

import pytest
import torch
import transformers

from dflash_lab import DecodeConfig, decode, load_pair
from dflash_lab.backends.torch_model import load_network
from dflash_lab.checkpoint import read_draft_config
from dflash_lab.load import EMBEDDED
from dflash_lab.tests.drafts import SECOND, TWO, F, S, save_random
from dflash_lab.tests.toys import draft_json

pytestmark = [
    # transformers 5.24 renamed the keyword that dflash 0.1.0 uses; until a dflash that knows.
    pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:0 accepted in"),  # the drafts are random
]

VOCABULARY = 4  # so few that random drafts are right now and then
PROMPT = [1, 0, 2, 1, 2, 0, 1]
NEW = 32


def form(vocabulary=VOCABULARY, extras=None, **changes):
    """A draft's config.json as upstream's class reads it, with taps 1 and 2 of 4 layers."""
    nested = {"target_layer_ids": [1, 2], "mask_token_id": vocabulary - 1} | (extras or {})
    return draft_json(
        model_type="qwen3",
        num_target_layers=4,
        vocab_size=vocabulary,
        dflash_config=nested,
        **changes,
    )


def without(raw, *keys):
    return {key: value for key, value in raw.items() if key not in keys}


def slides(*types, **changes):
    return {"layer_types": list(types), "sliding_window": 16, "use_sliding_window": True} | changes


SCALED = {
    "final_logit_softcapping": 5.0,
    "output_multiplier": 0.5,
    "input_embedding_scale": 3.0,
}
SELECTS = {**SECOND, "selector_rank": 6, "selector_top_k": 2, "conv_kernel_size": 3}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
FORMS = {
    "old": form(),
    "new": without(
        form(extras={"block_size": 8}, rope_parameters={"rope_theta": 1e5, "rope_type": "default"}),
        "block_size",
        "rope_theta",
    ),
    "bias": form(attention_bias=True),
    "yarn": form(rope_scaling=YARN),
    "linear": form(rope_scaling={"rope_type": "linear", "factor": 4.0}),
    "sliding": form(**slides(S, S)),
    "sliding and full": form(**slides(S, F)),
    "sliding, not causal": form(**slides(S, F, is_causal=False)),
    "causal": form(is_causal=True),
    "top-level causality goes first": form(extras={"causal": True}, is_causal=False),
    "softcap, multiplier and embedding scale": form(extras=SCALED),
    "DFlash 2": form(extras=SELECTS, architectures=TWO),
    "DFlash 2, sliding, softcap": form(
        extras={**SELECTS, **SCALED}, architectures=TWO, **slides(S, S, is_causal=False)
    ),
}


@pytest.fixture(scope="module")
def upstream():
    """dflash 0.1.0's PyTorch module; without it these tests fail, so that none is left out unseen.

    It pins versions of other packages and is therefore installed without its dependencies.
    """
    try:
        return importlib.import_module("dflash.model")
    except ModuleNotFoundError:
        pytest.fail("not installed: pip install --no-deps dflash==0.1.0")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A folder of a target of four layers whose text is varied although it has four tokens."""
    folder = tmp_path_factory.mktemp("target")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        config = transformers.Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=1024,
            tie_word_embeddings=False,
            initializer_range=0.2,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
        transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def target_model(target):
    return transformers.Qwen3ForCausalLM.from_pretrained(target, dtype=torch.float32).eval()


def theirs(upstream, folder, raw):
    two = raw["architectures"] == TWO
    kind = upstream.DFlash2DraftModel if two else upstream.DFlashDraftModel
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


def ours(folder):
    place = (torch.float32, torch.device("cpu"))
    return load_network(folder, read_draft_config(folder), *place)


def states_of(network, features, embedded):
    """Ours and upstream's states of one block after a context."""
    length = features.shape[1]
    if hasattr(network, "rotary_emb"):
        positions = torch.arange(length + embedded.shape[1])[None]
        return network(target_hidden=features, noise_embedding=embedded, position_ids=positions)
    positions = torch.arange(length)
    context = network.context(features, positions)
    return network(embedded[None], torch.tensor([[length]]), context, positions)[0]


def inputs(seed=1, length=40):
    maker = torch.Generator().manual_seed(seed)
    features = torch.randn(1, length, 128, generator=maker)
    return features, torch.randn(1, 8, 64, generator=maker)


def close(a, b):
    return torch.allclose(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", FORMS)
@torch.inference_mode()
def test_draft_states_logits_and_choices_equal_upstreams(name, upstream, tmp_path):
    raw = {**FORMS[name], "vocab_size": 512}
    split = {"prefix": "model.", "shards": 2} if len(name) % 2 else {}
    save_random(tmp_path, raw, **split)
    network, other = ours(tmp_path), theirs(upstream, tmp_path, raw)
    mine, others = states_of(network, *inputs()), states_of(other, *inputs())
    torch.testing.assert_close(mine, others, atol=1e-5, rtol=1e-5)

    head = torch.nn.Linear(64, 512, bias=False)
    torch.nn.init.normal_(head.weight, std=0.1)
    logits = other.compute_logits(others[:, 1:], head)
    torch.testing.assert_close(network.logits(head(mine[:, 1:])), logits, atol=1e-5, rtol=1e-5)
    anchor = torch.tensor([3])
    chosen = logits.argmax(-1)
    if hasattr(other, "candidate_selector"):
        chosen, _, _ = other.propose(others[:, 1:], anchor, head, 0.0)
    drafted, finite = network.propose(mine[0, 1:], head, anchor[0])
    assert drafted.tolist() == chosen[0].tolist()
    assert finite


def full_width(trace, block_size):
    """Emitted tokens of the blocks that upstream, too, drafts at full width: not at the tail."""
    end = len(trace.prompt_ids) + len(trace.tokens)
    return [block.emitted for block in trace.blocks if block.start + block_size <= end]


@pytest.mark.parametrize(
    ("name", "block_size"),
    [
        ("old", 1),
        ("old", 3),
        ("old", 8),
        ("yarn", 3),
        ("sliding and full", 8),
        ("softcap, multiplier and embedding scale", 5),
        ("DFlash 2", 3),
        ("DFlash 2, sliding, softcap", 8),
    ],
)
def test_tokens_and_acceptance_lengths_equal_dflash_generates(
    name, block_size, upstream, target, target_model, tmp_path, monkeypatch
):
    monkeypatch.setattr(upstream, "_cuda_time", time.perf_counter)
    save_random(tmp_path, FORMS[name])
    stats = upstream.dflash_generate(
        theirs(upstream, tmp_path, FORMS[name]),
        target_model,
        torch.tensor([PROMPT]),
        NEW,
        None,
        block_size=block_size,
        return_stats=True,
    )
    trace = run(target, tmp_path, block_size)
    assert stats.output_ids[0].tolist() == [*PROMPT, *trace.tokens]
    lengths = full_width(trace, block_size)
    assert stats.acceptance_lengths[: len(lengths)] == lengths
    assert sum(stats.acceptance_lengths) == NEW - 1
    assert len(lengths) >= 8
    assert block_size == 1 or len(set(lengths)) > 1


def run(target, draft, block_size, **settings):
    pair = load_pair(target=target, draft=draft, dtype="float32", device="cpu")
    config = DecodeConfig(block_size=block_size, max_new_tokens=NEW, **settings)
    return decode(pair, PROMPT, config)


@pytest.mark.parametrize("stop", range(3))
def test_both_end_at_the_first_stop_token_wherever_it_stands_in_a_block(
    stop, upstream, target, target_model, tmp_path
):
    save_random(tmp_path, FORMS["old"])
    made = upstream.dflash_generate(
        theirs(upstream, tmp_path, FORMS["old"]), target_model, torch.tensor([PROMPT]), NEW, [stop]
    )
    trace = run(target, tmp_path, 8, stop_tokens=(stop,))
    assert made[0].tolist() == [*PROMPT, *trace.tokens]
    assert (trace.tokens[-1] == stop) == (trace.finish_reason == "stop")


# --- what upstream does otherwise ---------------------------------------------------------------


@torch.inference_mode()
def both(upstream, folder, raw):
    """Whether ours and upstream's states of one block are equal."""
    save_random(folder, raw)
    others = states_of(theirs(upstream, folder, raw), *inputs())
    return close(states_of(ours(folder), *inputs()), others), others


def test_upstream_slides_only_where_use_sliding_window_says_so_and_is_wrong(upstream, tmp_path):
    equal, _ = both(upstream, tmp_path / "a", form(**slides(S, F)))
    assert equal
    equal, others = both(upstream, tmp_path / "b", form(**slides(S, F, use_sliding_window=False)))
    assert not equal
    # It is causal all the same, and sees the whole context: a window nobody reaches.
    equal, wide = both(upstream, tmp_path / "c", form(**slides(S, F, sliding_window=4096)))
    assert equal
    assert close(others, wide)


def test_upstream_does_not_look_at_dflash_config_causal(upstream, tmp_path):
    equal, others = both(upstream, tmp_path / "a", form(extras={"causal": True}))
    assert not equal
    equal, plain = both(upstream, tmp_path / "b", form())
    assert equal
    assert close(others, plain)


def test_upstream_asks_for_num_target_layers_although_the_taps_are_given(upstream, tmp_path):
    raw = without(form(), "num_target_layers")
    save_random(tmp_path, raw)
    assert ours(tmp_path).config.target_layer_ids == (1, 2)
    with pytest.raises(AttributeError, match="num_target_layers"):
        theirs(upstream, tmp_path, raw)


def test_upstream_reads_one_rope_base_for_all_layers(upstream, tmp_path):
    each = {S: {"rope_theta": 1e3, "rope_type": "default"}, F: {"rope_theta": 1e5}}
    raw = without(form(rope_parameters=each, **slides(S, F)), "rope_theta")
    save_random(tmp_path, raw)
    assert [rope.theta for rope in ours(tmp_path).config.layer_ropes] == [1e3, 1e5]
    with pytest.raises(KeyError, match="rope_type"):
        theirs(upstream, tmp_path, raw)


def test_upstream_narrows_its_last_blocks_and_we_do_not(
    upstream, target, target_model, tmp_path, monkeypatch
):
    save_random(tmp_path, FORMS["old"])
    widths = []

    def noted(module, args, kwargs):
        widths.append(args[0].shape[1])

    handle = target_model.register_forward_pre_hook(noted, with_kwargs=True)
    draft = theirs(upstream, tmp_path, FORMS["old"])
    upstream.dflash_generate(draft, target_model, torch.tensor([PROMPT]), NEW, None)
    handle.remove()
    assert widths[1] == 8
    assert 1 < widths[-1] < 8
    assert {block.block_size for block in run(target, tmp_path, 8).blocks} == {8}


# --- transformers -------------------------------------------------------------------------------

OWN = {
    "full": form(),
    "sliding, not causal": form(**slides(S, S, is_causal=False)),
    "yarn, sliding and full, not causal": form(rope_scaling=YARN, **slides(S, F, is_causal=False)),
}


def assistant(raw, tensors):
    """The same draft as transformers' own class, whose blocks are bidirectional.

    Its window for such layers takes in the position at that very distance, so 15 of its is our 16.
    """
    if not hasattr(transformers, "MuseGlimmerAssistantModel"):
        pytest.skip(f"transformers {transformers.__version__} has no DFlash decoder")
    rope = {"rope_theta": raw["rope_theta"], "rope_type": "default", **raw.get("rope_scaling", {})}
    config = transformers.MuseGlimmerAssistantConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope_parameters=rope,
        max_position_embeddings=1024,
        sliding_window=raw.get("sliding_window", 4096) - 1,
        layer_types=raw.get("layer_types", [F, F]),
        block_size=8,
        mask_token_id=VOCABULARY - 1,
        target_layer_ids=[1, 2],
    )
    names = {"fc.weight": "encoder.fc.weight"}
    names["hidden_norm.weight"] = "encoder.output_norm_enc.weight"
    model = transformers.MuseGlimmerAssistantModel(config).eval()
    model.load_state_dict({names.get(name, name): value for name, value in tensors.items()})
    return model


@pytest.mark.parametrize("name", OWN)
def test_tokens_and_every_drafted_token_equal_those_of_transformers(
    name, target, target_model, tmp_path, monkeypatch
):
    model = assistant(OWN[name], save_random(tmp_path, OWN[name]))
    generator = importlib.import_module("transformers.generation.candidate_generator")
    kind = generator.DFlashTokenCandidateGenerator
    drafted, plain = [], kind.get_candidates

    def noted(self, input_ids, *args, **kwargs):
        candidates, logits = plain(self, input_ids, *args, **kwargs)
        drafted.append(tuple(candidates[0, input_ids.shape[1] :].tolist()))
        return candidates, logits

    monkeypatch.setattr(kind, "get_candidates", noted)
    ids = torch.tensor([PROMPT])
    made = target_model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        assistant_model=model,
        speculation_type="dflash",
        max_new_tokens=NEW,
        do_sample=False,
    )
    trace = run(target, tmp_path, 8)
    assert made[0].tolist() == [*PROMPT, *trace.tokens]
    blocks = [tokens for tokens in drafted if tokens]  # none before prefill, none for the last
    assert [block.drafted for block in trace.blocks][: len(blocks)] == blocks
    assert len(blocks) >= len(trace.blocks) - 1
    assert len({block.accepted for block in trace.blocks}) > 2


@pytest.mark.parametrize("name", EMBEDDED)
@torch.inference_mode()
def test_the_drafts_trained_here_load_in_upstreams_code_and_draft_the_same(name, upstream):
    folder = EMBEDDED[name]
    config = read_draft_config(folder)
    network, other = ours(folder), upstream.DFlashDraftModel.from_pretrained(folder)
    other = other.float().eval()
    maker = torch.Generator().manual_seed(3)
    fused = len(config.target_layer_ids) * config.hidden_size
    features = torch.randn(1, 40, fused, generator=maker)
    embedded = torch.randn(1, config.block_size, config.hidden_size, generator=maker)
    mine, others = (states_of(one, features, embedded) for one in (network, other))
    # Trained norms are large, and rounding grows with them: 1e-5 of the largest state.
    assert (mine - others).abs().max() < 1e-5 * others.abs().max()
    head = torch.randn(config.vocab_size, config.hidden_size, generator=maker)
    assert torch.equal((mine @ head.T).argmax(-1), (others @ head.T).argmax(-1))
