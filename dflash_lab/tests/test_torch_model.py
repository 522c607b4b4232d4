"""The draft network: masks against brute force, one forward for training, replay and decoding."""

import pytest
import torch

from dflash_lab.backends.torch_anchors import accepted_counts, walk
from dflash_lab.backends.torch_model import (
    ContextCache,
    DraftNetwork,
    context_mask,
    load_network,
    rotary,
    rotate,
)
from dflash_lab.checkpoint import CheckpointError, TensorMismatch, parse_draft_config
from dflash_lab.tests.toys import draft_json

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
}


def network(seed=0, **changes):
    torch.manual_seed(seed)
    made = DraftNetwork(parse_draft_config(draft_json(**changes)))
    for name, value in made.named_parameters():
        torch.nn.init.normal_(value, mean=1.0 if "norm" in name else 0.0, std=0.2)
    return made.eval().requires_grad_(False)


def slow_forward(net, embedded, features, anchor, window):
    """One block by the definition: keys of all visible rows gathered one by one, no masks."""
    config = net.config
    fused = net.hidden_norm(net.fc(features))
    x, width, rep = embedded, embedded.shape[0], config.num_heads // config.num_kv_heads
    for index, layer in enumerate(net.layers):
        attention, normed = layer.self_attn, layer.input_layernorm(x)
        own_window, causal = config.layer_windows[index], config.layer_causal[index]
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
            cos, sin = rotary(places, config.head_dim, config.rope_theta, x.dtype)
            keys, values = attention.keys_values(stacked, cos, sin)
            query = attention.q_norm(attention.q_proj(normed[i]).view(-1, config.head_dim))
            cos, sin = rotary(
                torch.tensor([anchor + i]), config.head_dim, config.rope_theta, x.dtype
            )
            query = rotate(query, cos, sin)
            heads = []
            for head in range(config.num_heads):
                scores = keys[head // rep] @ query[head] * config.head_dim**-0.5
                heads.append(scores.softmax(-1) @ values[head // rep])
            out.append(torch.cat(heads))
        x = x + attention.o_proj(torch.stack(out))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return net.norm(x)


@pytest.mark.parametrize("window", [None, 1, 3, 16, 100])
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


def test_rope_frequencies_are_the_hand_computed_ones():
    cos, sin = rotary(torch.tensor([3]), 4, 10000.0, torch.float32)
    angles = torch.tensor([3.0, 3.0 * 10000.0**-0.5, 3.0, 3.0 * 10000.0**-0.5])
    torch.testing.assert_close(cos[0], angles.cos())
    torch.testing.assert_close(sin[0], angles.sin())


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


def test_the_batched_anchor_pass_counts_leading_matches_and_stops_at_the_texts_end():
    net = network()
    embedding, head = torch.nn.Embedding(512, 64), torch.nn.Linear(64, 512, bias=False)
    torch.nn.init.normal_(head.weight, std=0.5)
    tokens, features = torch.randint(0, 511, (30,)), torch.randn(30, 128)
    positions = torch.arange(29)
    context = net.context(features[None, :29], positions)
    drafted = {}
    for anchor in range(10, 29):
        block = torch.full((1, 8), net.config.mask_token)
        block[0, 0] = tokens[anchor]
        states = net(embedding(block)[None], torch.tensor([[anchor]]), context, positions)
        drafted[anchor] = head(states[0, 0, 1:]).argmax(-1)
    # Make some anchors agree with the text for a while: the text then follows the draft.
    counts = []
    for anchor in range(10, 29):
        matches = 0
        for k in range(1, 8):
            if anchor + k > 29 or int(drafted[anchor][k - 1]) != int(tokens[anchor + k]):
                break
            matches += 1
        counts.append(matches)
    found = accepted_counts(net, embedding, head, features, tokens, 10, 8, anchors_at_once=5)
    assert found == counts

    tokens[12:16] = drafted[11][:4]  # features stand still, so anchor 11 now matches four or more
    found = accepted_counts(net, embedding, head, features, tokens, 10, 8, anchors_at_once=5)
    assert found[1] >= 4


@pytest.mark.parametrize(
    ("counts", "visited"),
    [([0, 0, 0], [0, 0, 0]), ([2, 5, 5], [2]), ([1, 9, 0], [1, 0]), ([3, 0, 0], []), ([], [])],
)
def test_a_walk_visits_what_decoding_would_and_leaves_the_cut_block_out(counts, visited):
    assert walk(counts) == visited


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
