"""The tiny pair with its draft in other forms: the same trained weights, so drafts are often right.

pair = variant("mixed")         the first layer slides, float32 on the CPU
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import torch
from safetensors.torch import load_file

from dflash_lab import DecodeConfig, decode, load_pair, load_prompts
from dflash_lab.backends.torch_model import DraftNetwork
from dflash_lab.backends.torch_session import TorchModels
from dflash_lab.checkpoint import parse_draft_config
from dflash_lab.load import EMBEDDED, Pair
from dflash_lab.tests.drafts import SECOND, TWO, F, S

WINDOW = 16
SELECTS = {**SECOND, "selector_rank": 6, "selector_top_k": 4, "conv_kernel_size": 3}


def slides(*types: str, **changes: Any) -> dict[str, Any]:
    return {"layer_types": list(types), "sliding_window": WINDOW} | changes


FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # at top level, in dflash_config
    "full": ({}, {}),
    "causal": ({"is_causal": True}, {}),
    "sliding": (slides(S, S), {}),
    "sliding, bidirectional": (slides(S, S, is_causal=False), {}),
    "mixed": (slides(S, F), {}),
    "softcap": ({}, {"final_logit_softcapping": 20.0, "output_multiplier": 0.5}),
    "dflash 2": ({"architectures": TWO}, SELECTS),
    "dflash 2, sliding": (slides(S, S, is_causal=False, architectures=TWO), SELECTS),
}


@cache
def tiny() -> Pair:
    return load_pair("tiny", dtype="float32", device="cpu")


@cache
def prompts(count: int) -> tuple[tuple[int, ...], ...]:
    """Bundled prompts as ids, the shortest first."""
    encoded = (tiny().encode(prompt.turns[0]).ids for prompt in load_prompts())
    return tuple(sorted(encoded, key=len)[:count])


@cache
def text(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The first new tokens of the target after a prompt, whatever the draft."""
    return decode(tiny(), prompt, DecodeConfig(block_size=8, max_new_tokens=count)).tokens


def network(form: str) -> DraftNetwork:
    """The tiny draft's weights in another form; what only that form has is random and small."""
    raw = json.loads((EMBEDDED["tiny"] / "config.json").read_text(encoding="utf-8"))
    top, nested = FORMS[form]
    raw |= top | {"dflash_config": raw["dflash_config"] | nested}
    made = DraftNetwork(parse_draft_config(raw))
    dice = torch.Generator().manual_seed(0)
    for name, value in made.named_parameters():
        value.data.normal_(std=0.01, generator=dice)
        if name.endswith("base_kernel"):
            value.data[:, 0] += 1  # a convolution that does little
    trained = load_file(EMBEDDED["tiny"] / "model.safetensors")
    made.load_state_dict(trained, strict=not nested)
    return made.float().eval().requires_grad_(False)


def variant(form: str) -> Pair:
    """The pair with its draft in that form; its models are its own, so a test may change them."""
    made, own = network(form), tiny()
    return Pair(
        spec=own.spec,
        models=TorchModels(own.models.target, made),
        draft_config=made.config,
        tokenizer=own.tokenizer,
        fingerprint=own.fingerprint,
    )
