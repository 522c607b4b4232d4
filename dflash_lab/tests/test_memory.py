"""What a long prefill keeps in memory: the features of the tapped layers and the target's cache."""

import mlx.core as mx
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dflash_lab.backends import mlx_target
from dflash_lab.backends.mlx_model import DraftNetwork as MlxDraftNetwork
from dflash_lab.backends.mlx_session import MlxSession
from dflash_lab.backends.torch_model import DraftNetwork
from dflash_lab.backends.torch_session import TorchSession
from dflash_lab.backends.torch_target import TorchTarget
from dflash_lab.checkpoint import parse_draft_config
from dflash_lab.tests.toys import MASK, draft_json, toy_target

PROMPT, CHUNK = 1000, 125
ROW = 4 * 64  # bytes of a feature of one layer


class MostBytes(TorchDispatchMode):
    """The most bytes that tensors made under it held at once, whatever name they went by."""

    def __init__(self):
        super().__init__()
        self.most, self._held = 0, {}

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        made = function(*arguments, **(named or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._held.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self._held = {k: held for k, held in self._held.items() if not held[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._held.values()))
        return made


@pytest.fixture(scope="module")
def targets():
    """Targets of 4 and of 16 layers, alike in all else."""
    return {layers: target_of(layers) for layers in (4, 16)}


def target_of(layers):
    model = toy_target("qwen3", True)
    config = model.config.__class__.from_dict(
        model.config.to_dict() | {"num_hidden_layers": layers, "layer_types": None}
    )
    return TorchTarget(type(model)(config))


def most_bytes(target, taps, length=PROMPT):
    """At the highest point of a prefill, without the target's own cache."""
    config = parse_draft_config(
        draft_json(dflash_config={"target_layer_ids": list(taps), "mask_token_id": MASK})
    )
    session = TorchSession(target, DraftNetwork(config), None, prefill_chunk=CHUNK)
    with MostBytes() as seen:
        session.prefill([i % 250 for i in range(length)])
    cache = sum(b.untyped_storage().nbytes() for c in session.cache.layers for b in c._buffers)
    return seen.most - cache


@pytest.mark.parametrize("length", [PROMPT, pytest.param(8000, marks=pytest.mark.slow)])
def test_a_prefill_grows_with_the_tapped_layers_and_with_no_other(targets, length):
    few, many = (most_bytes(targets[layers], (0, 1, 2), length) for layers in (4, 16))
    one = most_bytes(targets[4], (0,), length)
    features = length * ROW
    assert many == pytest.approx(few, abs=0.5 * features)
    assert few - one == pytest.approx(2 * features, rel=0.25)


def test_features_of_every_layer_would_not_pass_unseen(targets):
    few, many = (most_bytes(targets[layers], tuple(range(layers))) for layers in (4, 16))
    assert many - few > 10 * PROMPT * ROW


@pytest.mark.slow
@pytest.mark.parametrize(("every", "grows"), [(False, False), (True, True)])
def test_a_prefill_in_mlx_grows_with_the_tapped_layers_and_with_no_other(
    targets, tmp_path, every, grows
):
    peaks = []
    for layers in (4, 16):
        targets[layers].model.save_pretrained(tmp_path / str(layers))
        target = mlx_target.load_target(tmp_path / str(layers), mx.float32, mx.cpu)
        peaks.append(most_bytes_in_mlx(target, range(layers) if every else (0, 1, 2)))
    features = PROMPT * ROW
    assert (peaks[1] - peaks[0] > 10 * features) == grows
    assert (peaks[1] - peaks[0] < 0.5 * features) != grows


def most_bytes_in_mlx(target, taps):
    """At the highest point of a prefill, without the target's own cache."""
    config = parse_draft_config(
        draft_json(dflash_config={"target_layer_ids": list(taps), "mask_token_id": MASK})
    )
    session = MlxSession(target, MlxDraftNetwork(config), None, prefill_chunk=CHUNK)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    session.prefill([i % 250 for i in range(PROMPT)])
    cache = sum(layer.keys.nbytes + layer.values.nbytes for layer in session.cache)
    return mx.get_peak_memory() - before - cache
