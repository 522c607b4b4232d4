"""The draft network: masks against brute force, one forward for training, replay and decoding."""

import pytest
import torch

from dflash_lab.backends.torch_model import (
    ContextCache,
    DraftNetwork,
    context_mask,
    likeliest,
    load_network,
    rotary,
    rotate,
)
from dflash_lab.checkpoint import (
    CheckpointError,
    Rope,
    TensorMismatch,
    parse_draft_config,
    read_draft_config,
)
from dflash_lab.tests.drafts import PUBLISHED, SECOND, save_random, shrunken
from dflash_lab.tests.toys import MASK, draft_json

S, F = "sliding_attention", "full_attention"
FORMS = {
    "full": {},
    "causal": {"is_causal": True},
    "sliding": {"layer_types": [S, S], "sliding_window": 16},
    "mixed": {"layer_types": [S, F], "sliding_window": 16},
    "sliding, bidirectional": {
        "layer_types": [S, S],
        "sliding_window": 16,
        "is_causal": False,
    },
    "bias": {"attention_bias": True},
    "yarn": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "a base for each kind of layer": {
        "layer_types": [S, F],
        "sliding_window": 16,
        "rope_theta": None,
        "rope_parameters": {S: {"rope_theta": 1e3}, F: {"rope_theta": 1e5}},
    },
    "dflash 2": {
        "dflash_config": {
            "target_layer_ids": [1, 2],
            "mask_token_id": MASK,
            "final_logit_softcapping": 20.0,
            "output_multiplier": 0.5,
            "input_embedding_scale": 3.0,
            **SECOND,
            "conv_kernel_size": 3,
            "selector_rank": 6,
        },
        "layer_types": [S, S],
        "sliding_window": 16,
        "is_causal": False,
    },
}


def network(seed=0, **changes):
    torch.manual_seed(seed)
    made = DraftNetwork(parse_draft_config(draft_json(**changes)))
    for name, value in made.named_parameters():
        torch.nn.init.normal_(value, mean=1.0 if "norm" in name else 0.0, std=0.2)
    return made.eval().requires_grad_(False)


def slow_forward(net, embedded, features, anchor, window):
    """One block by the definition: keys of all visible rows gathered one by one, no masks."""
    x = embedded
    for index, layer in enumerate(net.layers):

        def attention(rows, index=index):
            return slow_attention(net, index, rows, features, anchor, window)

        x = x + slow_surround(layer.attention_conv, layer.input_layernorm(x), attention)
        x = x + slow_surround(layer.mlp_conv, layer.post_attention_layernorm(x), layer.mlp)
    return net.norm(x)


def slow_surround(conv, rows, inner):
    """The convolutions of dflash.md 2.5, one number at a time; the inner half between them."""
    if conv is None:
        return inner(rows)
    numbers = conv.kernel_projection(rows)
    return slow_convolve(conv, numbers, 1, inner(slow_convolve(conv, numbers, 0, rows)))


def slow_convolve(conv, numbers, side, x):
    (width, hidden), (_, taps, _) = x.shape, conv.base_kernel.shape
    groups, base = hidden // conv.group, conv.base_kernel.tolist()
    rows, dynamic = x.tolist(), numbers.tolist()
    out = [[0.0] * hidden for _ in range(width)]
    for t in range(width):
        for back in range(min(taps, t + 1)):
            for channel in range(hidden):
                place = (side * taps + back) * groups + channel // conv.group
                kernel = base[side][back][channel] + dynamic[t][place]
                out[t][channel] += kernel * rows[t - back][channel]
    return torch.tensor(out)


def slow_attention(net, index, normed, features, anchor, window):
    config, attention = net.config, net.layers[index].self_attn
    fused = net.hidden_norm(net.fc(features))
    width, rep = normed.shape[0], config.num_heads // config.num_kv_heads
    own_window, causal = config.layer_windows[index], config.layer_causal[index]
    rope = config.layer_ropes[index]
    out = []
    for i in range(width):
        rows = []
        for j in range(anchor):
            by_user = window is None or anchor - j <= window
            by_layer = own_window is None or (anchor + i) - j < own_window
            if by_user and by_layer:
                rows.append((fused[j], j))
        last = i if causal else width - 1
        rows += [(normed[k], anchor + k) for k in range(last + 1)]
        stacked = torch.stack([row for row, _ in rows])
        places = torch.tensor([place for _, place in rows])
        cos, sin = rotary(places, rope, config.head_dim, normed.dtype)
        keys, values = attention.keys_values(stacked, cos, sin)
        query = attention.q_norm(attention.q_proj(normed[i]).view(-1, config.head_dim))
        here = torch.tensor([anchor + i])
        cos, sin = rotary(here, rope, config.head_dim, normed.dtype)
        query = rotate(query, cos, sin)
        heads = []
        for head in range(config.num_heads):
            scores = keys[head // rep] @ query[head] * config.head_dim**-0.5
            heads.append(scores.softmax(-1) @ values[head // rep])
        out.append(torch.cat(heads))
    return attention.o_proj(torch.stack(out))


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_block_sees_what_the_definition_says_and_no_more(form, window):
    net = network(**form)
    features, anchors = torch.randn(24, 128), torch.tensor([[1, 7, 23]])
    embedded = torch.randn(1, 3, 8, 64)
    positions = torch.arange(24)
    context = net.context(features[None], positions)
    states = net(embedded, anchors, context, positions, window)
    for place, anchor in enumerate(anchors[0].tolist()):
        slow = slow_forward(net, embedded[0, place], features, anchor, window)
        torch.testing.assert_close(states[0, place], slow, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_many_anchors_of_many_texts_at_once_equal_one_block_alone(form):
    net = network(**form)
    features, positions = torch.randn(2, 30, 128), torch.arange(30)
    anchors = torch.tensor([[4, 18, 29], [1, 2, 30]])
    embedded = torch.randn(2, 3, 8, 64)
    together = net(embedded, anchors, net.context(features, positions), positions)
    for text in range(2):
        for place in range(3):
            anchor = anchors[text, place : place + 1]
            seen = positions[: int(anchor)]
            context = net.context(features[text : text + 1, : int(anchor)], seen)
            alone = net(embedded[text, place][None, None], anchor[None], context, seen)
            torch.testing.assert_close(alone[0, 0], together[text, place], atol=2e-5, rtol=1e-4)


def test_the_anchors_own_position_is_never_context():
    mask = context_mask(torch.tensor([[5]]), 3, torch.arange(8), None, None)
    assert mask[0, 0].tolist() == [[True] * 5 + [False] * 3] * 3


def test_a_users_window_is_the_same_for_every_row_and_a_layers_own_is_not():
    anchors, positions = torch.tensor([[10]]), torch.arange(10)
    user = context_mask(anchors, 3, positions, 4, None)[0, 0].sum(-1)
    layer = context_mask(anchors, 3, positions, None, 4)[0, 0].sum(-1)
    assert user.tolist() == [4, 4, 4]
    assert layer.tolist() == [3, 2, 1]


@pytest.mark.parametrize(
    "rope",
    [
        Rope(theta=1e4),
        Rope(theta=1e4, kind="linear", factor=4.0),
        Rope(theta=1e4, kind="yarn", factor=32.0, original_length=4096, scale=1.3465736),
    ],
)
def test_a_rotation_turns_by_the_inverse_frequencies_and_scales(rope):
    cos, sin = rotary(torch.tensor([3]), rope, 8, torch.float32)
    angles = torch.tensor([3 * f for f in rope.inverse_frequencies(8)] * 2)
    torch.testing.assert_close(cos[0], angles.cos() * rope.scale)
    torch.testing.assert_close(sin[0], angles.sin() * rope.scale)


def slow_walk(selector, states, logits, anchor):
    """dflash.md 2.5, one candidate at a time; of equals, the lowest id."""
    previous, chosen = anchor, []
    for state, scores in zip(states, logits.tolist(), strict=True):
        best = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
        wanted = selector.hidden_projection(state)
        before, after = selector.predecessor_codebook[previous], selector.successor_codebook
        total = {
            token: scores[token] + float((before * wanted * after[token]).sum())
            for token in best[: selector.top_k]
        }
        previous = min(total, key=lambda token: (-total[token], token))
        chosen.append(previous)
    return chosen


def test_the_selector_walks_as_the_definition_does():
    net = network(**FORMS["dflash 2"])
    changed = 0
    for seed in range(5):
        torch.manual_seed(seed)
        states, logits = torch.randn(7, 64), torch.randn(7, 512).round(decimals=1)
        anchor = torch.tensor(seed)
        walked = net.candidate_selector.walk(states, logits, anchor).tolist()
        assert walked == slow_walk(net.candidate_selector, states, logits, seed)
        changed += sum(a != b for a, b in zip(walked, logits.argmax(-1).tolist(), strict=True))
        stepped = net.candidate_selector.choose(states, logits, torch.tensor([seed, *walked[:-1]]))
        assert stepped.tolist() == walked
    assert changed > 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_candidates_are_the_highest_logits_and_the_lowest_ids_among_equals(dtype):
    logits = torch.tensor([0.0, -1.0, 2.0, -0.0, 2.0, -3.0, 2.0, -1.0]).to(dtype)
    orders = {count: likeliest(logits[None], count)[0].tolist() for count in range(1, 9)}
    assert orders[1] == [2]
    assert orders[2] == [2, 4]
    assert orders[4] == [0, 2, 4, 6]
    assert orders[6] == [0, 1, 2, 3, 4, 6]
    assert orders[7] == [0, 1, 2, 3, 4, 6, 7]
    assert orders[8] == list(range(8))


def test_logits_are_multiplied_and_then_capped():
    net = network(**FORMS["dflash 2"])
    raw = torch.tensor([[-80.0, 0.0, 4.0, 1000.0]])
    torch.testing.assert_close(net.logits(raw), 20 * torch.tanh(raw * 0.5 / 20))
    assert torch.equal(network().logits(raw), raw)


def test_the_embedding_is_scaled_by_the_drafts_own_factor():
    table = torch.nn.Embedding(8, 64)
    tokens = torch.tensor([[1, 2]])
    assert torch.equal(network(**FORMS["dflash 2"]).embed(table, tokens), table(tokens) * 3)
    assert torch.equal(network().embed(table, tokens), table(tokens))


@pytest.mark.parametrize("form", ["full", "dflash 2"])
@pytest.mark.parametrize(
    ("broken", "where"),
    [(torch.inf, (4, 7)), (torch.nan, (4, 7)), (-torch.inf, (4,))],
    ids=["one is infinite", "one is no number", "all of a slot are minus infinity"],
)
def test_logits_that_are_not_finite_are_noticed_before_a_softcap_hides_them(form, broken, where):
    net, logits = network(**FORMS[form]), torch.randn(7, 512)
    states, anchor = torch.randn(7, 64), torch.tensor(3)
    _, finite = net.propose(states, lambda rows: logits, anchor)
    assert finite
    logits[where] = broken
    drafted, finite = net.propose(states, lambda rows: logits, anchor)
    assert not finite
    assert ((drafted >= 0) & (drafted < 512)).all()


@pytest.mark.parametrize("window", [None, 1, 5, 64])
@pytest.mark.parametrize("rows", [1, 3, 8, 70])
def test_a_context_cache_holds_exactly_the_last_rows_whatever_is_appended(window, rows):
    cache, everything = ContextCache(window), torch.arange(300.0)
    for start in range(0, 300 - rows, rows):
        new = everything[start : start + rows].view(1, 1, rows, 1)
        cache.append([(new, -new)])
        end = start + rows
        expected = everything[max(0, end - window) if window else 0 : end]
        (keys, values), *_ = cache.layers()
        assert keys.flatten().tolist() == expected.tolist()
        assert values.flatten().tolist() == (-expected).tolist()
        assert (cache.end, len(cache)) == (end, len(expected))


def test_a_windowed_cache_stays_bounded_over_4000_tokens():
    cache, sizes = ContextCache(64), set()
    for _ in range(1000):
        cache.append([(torch.zeros(1, 2, 4, 16), torch.zeros(1, 2, 4, 16))])
        sizes.add(cache.allocated_bytes)
    assert len(cache) == 64
    assert max(sizes) <= 2 * 2 * (64 + 4) * 2 * 16 * 4


def test_a_draft_folder_is_read_strictly(tmp_path):
    from safetensors.torch import save_file

    config = parse_draft_config(draft_json())
    tensors = {name: torch.zeros(shape) for name, shape in config.tensor_shapes.items()}
    place = (torch.float32, torch.device("cpu"))
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        load_network(tmp_path, config, *place)
    save_file(tensors, tmp_path / "model.safetensors")
    assert load_network(tmp_path, config, *place).config == config
    save_file(
        {f"model.{name}": value for name, value in tensors.items()}, tmp_path / "model.safetensors"
    )
    load_network(tmp_path, config, *place)
    tensors["fc.weight"][3, 3] = torch.inf
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(TensorMismatch, match=r"not finite: fc\.weight"):
        load_network(tmp_path, config, *place)
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 20)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_network(tmp_path, config, *place)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_form_loads_and_drafts(name, tmp_path):
    save_random(tmp_path, shrunken(PUBLISHED[name]), prefix="model.", shards=2)
    config = read_draft_config(tmp_path)
    net = load_network(tmp_path, config, torch.float32, torch.device("cpu"))
    assert sum(value.numel() for value in net.parameters()) == config.parameters
    features = torch.randn(1, 5, 32 * len(config.target_layer_ids))
    context = net.context(features, torch.arange(5))
    states = net(torch.randn(1, 1, 8, 32), torch.tensor([[5]]), context, torch.arange(5))
    head = torch.nn.Linear(32, 64, bias=False)
    drafted, finite = net.propose(states[0, 0, 1:], head, torch.tensor(1))
    assert finite
    assert drafted.shape == (7,)
