"""The draft network in MLX beside its torch twin on the same weights, and its context cache."""

import ast
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import torch

from dflash_lab.backends import mlx_model, torch_model
from dflash_lab.backends.mlx_model import ContextCache, best, likeliest, load_network, rotary
from dflash_lab.checkpoint import CheckpointError, Rope, TensorMismatch, parse_draft_config
from dflash_lab.tests.test_torch_model import FORMS
from dflash_lab.tests.toys import draft_json


@pytest.mark.parametrize("part", ["model", "target", "session"])
def test_the_backends_are_twins_with_their_common_names_in_one_order(part):
    ours, theirs = (names(backend, part) for backend in ("mlx", "torch"))
    assert [name for name in theirs if name in ours] == [name for name in ours if name in theirs]
    assert len(set(ours) & set(theirs)) > 15
    if part == "model":
        assert set(theirs) - set(ours) == set()


def names(backend, part):
    """Classes, their methods and functions of a backend's file, without the framework's word."""
    file, found = Path(mlx_model.__file__).with_name(f"{backend}_{part}.py"), []
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = node.name.removeprefix(backend.title())
            inner = node.body if isinstance(node, ast.ClassDef) else []
            methods = [part.name for part in inner if isinstance(part, ast.FunctionDef)]
            found += [name, *(f"{name}.{method}" for method in methods)]
    return [name.replace(".forward", ".__call__") for name in found]


def twins(seed=0, **changes):
    """A torch network of random weights and the MLX network with the same."""
    torch.manual_seed(seed)
    config = parse_draft_config(draft_json(**changes))
    network = torch_model.DraftNetwork(config)
    for name, value in network.named_parameters():
        torch.nn.init.normal_(value, mean=1.0 if "norm" in name else 0.0, std=0.2)
    twin = mlx_model.DraftNetwork(config)
    twin.load_weights([(name, as_mlx(value)) for name, value in network.state_dict().items()])
    return network.eval().requires_grad_(False), twin


def as_mlx(tensor):
    return mx.array(tensor.numpy())


def same(array, tensor):
    np.testing.assert_allclose(np.array(array), tensor.numpy(), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_of_draft_computes_what_its_torch_twin_computes(form):
    network, twin = twins(**form)
    features, positions = torch.randn(2, 24, 128), torch.arange(24)
    anchors = torch.tensor([[1, 7, 23], [2, 3, 24]])
    embedded = torch.randn(2, 3, 8, 64)
    context = network.context(features, positions)
    twin_context = twin.context(as_mlx(features), as_mlx(positions))
    for pair, twin_pair in zip(context, twin_context, strict=True):
        same(twin_pair[0], pair[0])
        same(twin_pair[1], pair[1])
    for window in (None, 1, 5):
        states = network(embedded, anchors, context, positions, window)
        made = twin(as_mlx(embedded), as_mlx(anchors), twin_context, as_mlx(positions), window)
        same(made, states)


@pytest.mark.parametrize("form", ["full", "dflash 2"])
def test_proposals_and_choices_are_those_of_the_torch_twin(form):
    network, twin = twins(**FORMS[form])
    states, head = torch.randn(7, 64), torch.randn(512, 64)
    anchor, previous = torch.tensor(5), torch.randint(0, 512, (7,))
    drafted, finite = network.propose(states, lambda rows: rows @ head.T, anchor)
    made = twin.propose(as_mlx(states), lambda rows: rows @ as_mlx(head).T, as_mlx(anchor))
    assert (made[0].tolist(), made[1].item()) == (drafted.tolist(), finite.item())
    logits = torch.randn(7, 512) * 5
    same(twin.confidences(as_mlx(logits)), network.confidences(logits))
    chosen = network.choose(states, lambda rows: rows @ head.T, previous)
    again = twin.choose(as_mlx(states), lambda rows: rows @ as_mlx(head).T, as_mlx(previous))
    assert again.tolist() == chosen.tolist()
    tokens = torch.arange(6).view(2, 3)
    embedding = torch.nn.Embedding.from_pretrained(head)
    rows = twin.embed(lambda ids: as_mlx(head)[ids], as_mlx(tokens))
    same(rows, network.embed(embedding, tokens))


def test_among_equals_the_lowest_ids_are_taken_in_both_backends():
    rows = torch.tensor([[0.0, 2.0, 2.0, 1.0] * 50, [5.0] * 200, [1.0, -0.0, 0.0, -3.0] * 50])
    for dtype in (mx.float32, mx.bfloat16):
        array = as_mlx(rows).astype(dtype)
        assert best(array).tolist() == rows.argmax(-1).tolist() == [1, 0, 0]
        for count in (1, 7, 120):
            wanted = torch_model.likeliest(rows, count).tolist()
            assert likeliest(array, count).tolist() == wanted
            assert wanted[1] == list(range(count))


def test_a_network_of_a_lower_precision_stays_in_it():
    _, twin = twins()
    twin.set_dtype(mx.bfloat16)
    positions = mx.arange(4)
    context = twin.context(mx.ones((1, 4, 128), mx.bfloat16), positions)
    states = twin(mx.ones((1, 1, 3, 64), mx.bfloat16), mx.array([[4]]), context, positions)
    assert {context[0][0].dtype, context[0][1].dtype, states.dtype} == {mx.bfloat16}


def test_rope_frequencies_are_the_hand_computed_ones():
    cos, sin = rotary(mx.array([3]), Rope(theta=10000.0), 4, mx.float32)
    angles = np.array([3.0, 3.0 * 10000.0**-0.5, 3.0, 3.0 * 10000.0**-0.5])
    np.testing.assert_allclose(np.array(cos[0]), np.cos(angles), atol=1e-6)
    np.testing.assert_allclose(np.array(sin[0]), np.sin(angles), atol=1e-6)


@pytest.mark.parametrize("window", [None, 1, 5, 64])
@pytest.mark.parametrize("rows", [1, 8, 70])
def test_a_context_cache_holds_exactly_the_last_rows_whatever_is_appended(window, rows):
    cache, everything = ContextCache(window), mx.arange(300, dtype=mx.float32)
    for start in range(0, 300 - rows, rows):
        new = everything[start : start + rows].reshape(1, 1, rows, 1)
        cache.append([(new, -new)])
        end = start + rows
        expected = everything[max(0, end - window) if window else 0 : end].tolist()
        assert (cache.end, len(cache)) == (end, len(expected))
        if end % 40 < rows or end + rows >= 300:
            (keys, values), *_ = cache.layers()
            assert keys.flatten().tolist() == expected
            assert values.flatten().tolist() == [-number for number in expected]


def test_a_windowed_cache_stays_bounded_over_4000_tokens():
    cache, sizes = ContextCache(64), set()
    new = mx.zeros((1, 2, 4, 16))
    for _ in range(1000):
        cache.append([(new, new)])
        mx.eval(cache.layers())
        sizes.add(cache.allocated_bytes)
    assert len(cache) == 64
    assert max(sizes) <= 2 * 2 * (64 + 4) * 2 * 16 * 4


def test_a_draft_folder_is_read_strictly(tmp_path):
    config = parse_draft_config(draft_json())
    tensors = {name: mx.zeros(shape) for name, shape in config.tensor_shapes.items()}
    file = tmp_path / "model.safetensors"
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        load_network(tmp_path, config, mx.float32)
    mx.save_safetensors(str(file), {f"model.{name}": value for name, value in tensors.items()})
    assert load_network(tmp_path, config, mx.float32).config == config
    mx.save_safetensors(str(file), tensors | {"extra": mx.zeros(1)})
    with pytest.raises(TensorMismatch, match="left over: extra"):
        load_network(tmp_path, config, mx.float32)
    mx.save_safetensors(str(file), tensors | {"norm.weight": mx.full((64,), mx.nan)})
    with pytest.raises(TensorMismatch, match=r"not finite: norm\.weight"):
        load_network(tmp_path, config, mx.float32)
    file.write_bytes(b"\x00" * 20)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_network(tmp_path, config, mx.float32)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_draft_is_near_the_whole_one_and_smaller(bits, tmp_path):
    network, twin = twins()
    embedded, features = torch.randn(1, 1, 8, 64), torch.randn(1, 5, 128)
    positions = torch.arange(5)
    mx.save_safetensors(
        str(tmp_path / "model.safetensors"),
        {name: as_mlx(value) for name, value in network.state_dict().items()},
    )
    quantised = load_network(tmp_path, twin.config, mx.float32, draft_bits=bits)
    states = [
        np.array(
            net(
                as_mlx(embedded),
                mx.array([[5]]),
                net.context(as_mlx(features), as_mlx(positions)),
                as_mlx(positions),
            )
        )
        for net in (twin, quantised)
    ]
    error = np.abs(states[0] - states[1]).mean() / np.abs(states[0]).mean()
    assert 1e-5 < error < {4: 0.5, 8: 0.05}[bits]
    assert quantised.fc.bits == bits
    assert quantised.layers[1].mlp.down_proj.bits == bits


def test_a_draft_whose_widths_cannot_be_quantised_is_refused_by_the_layers_names():
    config = parse_draft_config(draft_json(intermediate_size=96))
    with pytest.raises(CheckpointError, match=r"draft_bits is 4.*layers\.0\.mlp\.down_proj"):
        mlx_model.quantise(mlx_model.DraftNetwork(config), 4)
