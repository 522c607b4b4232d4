"""A torch pair of random weights in a given shape: what costs depend on is here, no more."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dflash_lab.backends import UnsupportedTarget
from dflash_lab.backends.torch_model import DraftNetwork
from dflash_lab.backends.torch_session import TorchModels, pick_device, pick_dtype
from dflash_lab.backends.torch_target import TorchTarget
from dflash_lab.checkpoint import DraftConfig


def random_models(target: Path, draft: DraftConfig, dtype: str, device: str) -> TorchModels:
    """A pair with the shapes of a target's config.json, or its folder, and of a draft's.

    Raises `UnsupportedTarget` where no model can be made of the configuration.
    """
    place = pick_device(device)
    number = pick_dtype(dtype, place)
    try:
        config = AutoConfig.from_pretrained(os.fspath(target), local_files_only=True)
        with torch.random.fork_rng(devices=[]), torch.device(place):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=number)
    except Exception as error:  # the configuration classes raise their own kinds
        raise UnsupportedTarget(f"no target can be made of {target}: {error}") from error
    network = DraftNetwork(draft)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for weight in network.parameters():
            torch.nn.init.ones_(weight) if weight.dim() == 1 else torch.nn.init.normal_(
                weight, std=0.02
            )
    network = network.to(device=place, dtype=number).eval().requires_grad_(False)
    return TorchModels(TorchTarget(model.to(place)), network)
