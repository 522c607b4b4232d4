"""A target says the same with every way of computing attention that its library offers on a CPU."""

import random

import pytest
import torch

from dflash_lab.backends.torch_session import TorchSession
from dflash_lab.backends.torch_target import TorchTarget
from dflash_lab.tests.test_torch_target import Told, decoded
from dflash_lab.tests.toys import WINDOW, cut, toy_target


@pytest.mark.parametrize("kind", ["qwen3_sliding", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_blocks_over_a_sliding_cache_are_masked_alike_by_every_attention(kind):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = toy_target(kind, tied="gemma" in kind)
    prompt = tuple(random.Random(0).choices(range(256), k=WINDOW + 3))
    texts = []
    for attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        target = TorchTarget(model)
        text = decoded(TorchSession(target, None, None), prompt, 1, 3 * WINDOW)
        session = Told(target, None, None).follow(cut(3), (*prompt, *text))
        assert decoded(session, prompt, 8, 3 * WINDOW) == text
        logits = model(torch.tensor([[*prompt, *text]]), use_cache=False).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == list(text)
        texts.append(text)
    assert texts[0] == texts[1]
