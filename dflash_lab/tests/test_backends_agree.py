"""Torch and MLX tell the same story of the same pair: block by block, and in what is stored."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from dflash_lab import DecodeConfig, SweepConfig, decode, load_pair, open_run, sweep
from dflash_lab.analyse import block_frame, cell_frame, prompt_frame
from dflash_lab.config import PairSpec
from dflash_lab.prompts import load_prompts
from dflash_lab.reports import report
from dflash_lab.tests.test_torch_model import FORMS
from dflash_lab.tests.toys import CONTEXT, HYBRIDS, WINDOW, save_draft, toy_target

pytestmark = pytest.mark.usefixtures("quiet")

WINDOWS = (None, 64, 16, 4)
CASES = [(1, None), (2, None), (2, 4), (3, 16), (5, 64), (8, 16), (8, None), (16, 4), (16, 64)]
OTHERS = [(size, w) for size in range(2, 17) for w in WINDOWS if (size, w) not in CASES]
BUDGETS = [1, 2, 4, 32, *(pytest.param(budget, marks=pytest.mark.slow) for budget in (8, 16))]


def both(toy):
    """The toy's pair in torch and in MLX."""
    return [toy.load(backend=name) for name in ("torch", "mlx")]


@pytest.fixture(scope="module")
def pairs():
    """The trained tiny pair in torch and in MLX."""
    settings = {"dtype": "float32", "device": "cpu"}
    return [load_pair("tiny", backend=name, **settings) for name in ("torch", "mlx")]


def story(pair, prompt, **settings):
    """Tokens of a decode and, block by block, everything that is a whole number."""
    trace = decode(pair, prompt, DecodeConfig(beyond_trained=True, **settings))
    blocks = [
        (b.start, b.anchor, b.verdict, b.accepted, b.emitted, b.draft_cache_bytes)
        for b in trace.blocks
    ]
    return trace.tokens, trace.finish_reason, blocks


@pytest.mark.parametrize(
    ("size", "window"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)],
)
def test_blocks_agree_for_every_size_and_window(pairs, size, window):
    settings = {"block_size": size, "draft_window": window, "max_new_tokens": 12}
    told = [story(pair, "Give me five tips.", **settings) for pair in pairs]
    assert told[0] == told[1]
    if size > 4 and window is None:
        assert max(accepted for _, _, _, accepted, *_ in told[1][2]) > 1


@pytest.mark.parametrize("budget", BUDGETS)
def test_blocks_agree_for_every_budget(pairs, budget):
    settings = {"block_size": 8, "draft_window": 16, "max_new_tokens": budget}
    told = [story(pair, "Name a river.", **settings) for pair in pairs]
    assert told[0] == told[1]
    assert len(told[1][0]) == budget


@pytest.mark.parametrize("form", ["dflash 2", "mixed", "yarn", "bias"])
def test_blocks_agree_for_other_drafts(qwen3_toy, tmp_path, form):
    target = AutoConfig.from_pretrained(qwen3_toy.target)
    save_draft(tmp_path / "draft", target, **FORMS[form])
    other = replace(qwen3_toy, draft=tmp_path / "draft")
    settings = {"block_size": 8, "draft_window": 12, "max_new_tokens": 6}
    told = [story(pair, other.prompts[2], **settings) for pair in both(other)]
    assert told[0] == told[1]


FAMILIES = (
    *("llama", "qwen3", "qwen2", "qwen3_moe", "mistral", "gemma2", "gemma3", "gpt_oss"),
    *HYBRIDS,
)
WIDE = ("mistral", "gemma2")  # mlx-lm's code for them knows no window; up to it the two are equal


@pytest.mark.parametrize("kind", FAMILIES)
def test_blocks_agree_for_a_random_target_of_every_family(tmp_path, kind):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = toy_target(kind, tied="gemma" in kind)
    if kind in WIDE:
        model.config.sliding_window = CONTEXT
    model.save_pretrained(tmp_path / "torch")
    save_draft(tmp_path / "draft", model.config)
    for_mlx(tmp_path / "torch", tmp_path / "mlx")
    prompt = [(37 * place + 11) % 250 for place in range(WINDOW + 9)]
    told = [
        story(
            load_pair(
                target=tmp_path / name,
                draft=tmp_path / "draft",
                backend=name,
                dtype="float32",
                device="cpu",
            ),
            prompt,
            block_size=7,
            max_new_tokens=6,
        )
        for name in ("torch", "mlx")
    ]
    assert told[0] == told[1]


def for_mlx(folder, copy):
    """A copy of a model folder as mlx-lm writes it: the experts of gpt-oss apart, rows first."""
    shutil.copytree(folder, copy)
    tensors = {}
    for name, value in load_file(copy / "model.safetensors").items():
        kind = name.removesuffix("_bias").rpartition(".")[2]
        bias = name.endswith("_bias")
        if ".experts." not in name or kind not in ("gate_up_proj", "down_proj"):
            tensors[name] = value
            continue
        rows = value if bias else value.transpose(1, 2)
        end = "bias" if bias else "weight"
        at = name.removesuffix("_bias").removesuffix(kind)
        if kind == "down_proj":
            tensors[f"{at}down_proj.{end}"] = rows.contiguous()
        else:
            tensors[f"{at}gate_proj.{end}"] = rows[:, ::2].contiguous()
            tensors[f"{at}up_proj.{end}"] = rows[:, 1::2].contiguous()
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})


def test_a_stored_mlx_run_opens_in_frames_and_report(qwen3_toy, tmp_path):
    prompts = tmp_path / "two.jsonl"
    lines = [{"id": f"p{n}", "category": "x", "turns": [text]} for n, text in enumerate("ab")]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    config = SweepConfig(
        pair=PairSpec(
            target=str(qwen3_toy.target), draft=str(qwen3_toy.draft), backend="mlx", draft_bits=4
        ),
        block_sizes=(1, 4),
        prompts=str(prompts),
        max_new_tokens=6,
        library_baseline=True,
        warm_up=False,
    )
    sweep(config, tmp_path / "run")
    run = open_run(tmp_path / "run")
    assert not run.failed and not run.unfinished
    cells = cell_frame(run)
    assert set(cells["backend"]) == {"mlx"}
    assert sorted(cells["engine"]) == ["dflash_lab", "dflash_lab", "mlx-lm"]
    blocks, decodes = block_frame(run), prompt_frame(run)
    assert (blocks.loc[blocks["block_size"] > 1, "draft_cache_bytes"] > 0).all()
    assert (decodes["peak_bytes"] > 0).all()
    own = decodes[(decodes["engine"] == "dflash_lab") & (decodes["block_size"] == 1)]
    theirs = decodes[decodes["engine"] == "mlx-lm"]
    assert [list(ids) for ids in own["new_ids"]] == [list(ids) for ids in theirs["new_ids"]]
    page = report(run).read_text(encoding="utf-8")
    assert "mlx" in page and "mlx-lm" in page


@pytest.fixture(scope="module")
def embedded():
    return [load_pair("smollm2", backend=name, dtype="float32") for name in ("torch", "mlx")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "window"),
    [
        (8, 16),
        *(
            pytest.param(size, window, marks=pytest.mark.thorough)
            for size, window in ((1, None), (4, None), (4, 16), (8, None), (16, None), (16, 16))
        ),
    ],
)
def test_the_embedded_pair_tells_one_story_in_both_backends(embedded, size, window):
    for prompt in load_prompts("mini")[:3]:
        ids = embedded[0].encode(prompt.turns[0]).ids
        settings = {"block_size": size, "draft_window": window, "max_new_tokens": 16}
        told = [story(pair, ids, **settings) for pair in embedded]
        assert told[0] == told[1]
