"""Toy pairs for the tests: tiny real models on disk, and a scripted pair without any framework.

    toy = toy_models(tmp_path)              a Qwen3-type target and a random draft, in two folders
    pair = toy.load()                       what load_pair(target=..., draft=...) makes of them
    greedy(toy.load().models.target.model, ids, 64)     plain decoding, whole sequence each step

    pair = scripted_pair(cut(3))            a target that is a hash, a draft right where told
    scripted_greedy(pair, ids, 40)          what it must emit

Scripts say where the draft is right: ORACLE, WRONG, `cut(k)`, `noise(p, seed)`, or any function of
(position, slot): absolute position of the drafted token, and its place 1, 2, ... in the block.
"""

from __future__ import annotations

import json
import random
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_lab.accept import Verdict
from dflash_lab.backends import Generated
from dflash_lab.checkpoint import DraftConfig, Rope
from dflash_lab.config import PairSpec
from dflash_lab.load import Pair, load_pair
from dflash_lab.sampling import Sampling
from dflash_lab.trace import Trace

VOCABULARY, MASK, CONTEXT = 512, 511, 1024
WINDOW = 16  # of the sliding layers of toy targets that have some
START, END, PAD = 256, 257, 258  # special tokens after the 256 bytes
DISTINCT, CHECKED, GAP = 30, 64, 2e-4  # what a prompt's greedy text must show to test anything

Script = Callable[[int, int], bool]
Target = Callable[[Sequence[int]], int]

# --- tiny real models ---------------------------------------------------------------------------

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SWITCH = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Toy:
    """Two model folders, and prompts whose greedy text is varied and has no near tie in fp32."""

    target: Path
    draft: Path
    prompts: tuple[tuple[int, ...], ...]  # token ids
    greedy: tuple[tuple[int, ...], ...]  # the target's own first 64 new tokens after each

    def load(self, **settings: Any) -> Pair:
        """The pair in memory, float32 on the CPU unless told otherwise."""
        settings = {"dtype": "float32", "device": "cpu"} | settings
        return load_pair(target=self.target, draft=self.draft, **settings)


def toy_models(
    folder: Path,
    *,
    kind: str = "qwen3",
    tied: bool = True,
    switch: bool = False,
    seed: int = 0,
    prompts: int = 4,
) -> Toy:
    """Build target and draft under `folder`; `switch` adds a thinking switch to the template."""
    import torch

    target, draft = Path(folder) / "target", Path(folder) / "draft"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = toy_target(kind, tied)
        model.save_pretrained(target)
        save_draft(draft, model.config, seed)
    byte_tokenizer(TEMPLATE + SWITCH * switch).save_pretrained(target)
    chosen, texts = good_prompts(model, prompts, seed)
    return Toy(target=target, draft=draft, prompts=chosen, greedy=texts)


YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "original_max_position_embeddings": CONTEXT // 32,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
GEMMA = {"sliding_window": WINDOW, "query_pre_attn_scalar": 1}  # sharp: its queries are small
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
FAMILIES = {  # the prefix of the transformers classes, and settings that no other family has
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "qwen3_sliding": (
        "Qwen3",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 4} | MOE),
    "gemma2": ("Gemma2", GEMMA),
    "gemma3": ("Gemma3", GEMMA | {"sliding_window_pattern": 3}),
    "gpt_oss": (
        "GptOss",
        {"sliding_window": WINDOW, "num_local_experts": 4, "rope_parameters": YARN} | MOE,
    ),
    "qwen3_next": (
        "Qwen3Next",
        DELTA | {"num_experts": 4, "shared_expert_intermediate_size": 64} | MOE,
    ),
    "qwen3_5": ("Qwen3_5", DELTA),
}
HYBRIDS = ("qwen3_next", "qwen3_5")  # three gated delta nets and one layer of full attention


def toy_target(kind: str, tied: bool) -> Any:
    """A random transformers model of a family of `FAMILIES`; its weights are worth 0.2 MB or so."""
    import torch
    import transformers

    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": tied,
        "initializer_range": 0.2,  # with the usual 0.02 a tied model repeats one token for ever
        "bos_token_id": None,
        "eos_token_id": END,
        "pad_token_id": PAD,
    }
    name, own = FAMILIES[kind]
    made = getattr(transformers, f"{name}ForCausalLM")
    model = made(made.config_class(**settings | own)).eval()
    with torch.no_grad():
        for weight in (w for n, w in model.named_parameters() if n.endswith("bias")):
            weight.normal_(std=0.2)  # fresh models have none that is not zero
        for weight in (w for n, w in model.named_parameters() if n.endswith("A_log")):
            weight.uniform_(-5, -1)  # so that a state remembers more than the last few rows
        if name.startswith("Gemma"):
            # its embedding is multiplied by sqrt(64): each token would be followed by itself
            model.get_input_embeddings().weight /= 8
    return model


def draft_json(**changes: Any) -> dict[str, Any]:
    """The toy draft's `config.json` in the upstream form; `changes` replace top-level keys."""
    return {
        "architectures": ["DFlashDraftModel"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": CONTEXT,
        "block_size": 8,
        "dflash_config": {"target_layer_ids": [1, 2], "mask_token_id": MASK},
    } | changes


def save_draft(folder: Path, target: Any, seed: int = 0, **changes: Any) -> None:
    """Write a draft of random weights in the upstream checkpoint format."""
    import torch
    from safetensors.torch import save_file

    from dflash_lab.checkpoint import parse_draft_config

    raw = draft_json(vocab_size=target.vocab_size, **changes)
    config = parse_draft_config(raw)
    maker = torch.Generator().manual_seed(seed + 1)
    tensors = {
        name: torch.ones(shape) if "norm" in name else torch.randn(shape, generator=maker) * 0.2
        for name, shape in config.tensor_shapes.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw, indent=2), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")


def byte_tokenizer(template: str = TEMPLATE) -> Any:
    """256 byte tokens, three special ones, and a visible name for every other id up to 511."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    alphabet = dict(zip(byte_characters(), range(256), strict=True))
    plain = Tokenizer(BPE(vocab=alphabet, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    plain.decoder = decoders.ByteLevel()
    special = {START: "<|im_start|>", END: "<|im_end|>", PAD: "<|pad|>", MASK: "<|mask|>"}
    names = [special.get(token, f"<{token}>") for token in range(256, VOCABULARY)]
    plain.add_special_tokens([AddedToken(name, special=True) for name in names])
    return PreTrainedTokenizerFast(
        tokenizer_object=plain,
        eos_token=special[END],
        pad_token=special[PAD],
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies, in order."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256)]


def greedy(model: Any, ids: Sequence[int], count: int) -> tuple[tuple[int, ...], float]:
    """`count` new tokens of a transformers model and the smallest top-two logit gap on the way.

    The whole sequence is read anew at each step, without any cache.
    """
    import torch

    tokens, smallest = list(ids), float("inf")
    for _ in range(count):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
        first, second = logits.float().topk(2).values.tolist()
        smallest = min(smallest, first - second)
        tokens.append(int(logits.argmax()))
    return tuple(tokens[len(ids) :]), smallest


def good_prompts(
    model: Any, count: int, seed: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Random prompts that pass the checks, and their greedy texts."""
    dice = random.Random(seed)
    prompts: list[tuple[int, ...]] = []
    texts: list[tuple[int, ...]] = []
    for _ in range(20 * count):
        ids = tuple(dice.randrange(256) for _ in range(dice.randint(4, 24)))
        tokens, gap = greedy(model, ids, CHECKED)
        if is_varied(tokens, gap):
            prompts.append(ids)
            texts.append(tokens)
        if len(prompts) == count:
            return tuple(prompts), tuple(texts)
    raise AssertionError(f"only {len(prompts)} of {20 * count} prompts are varied; another seed?")


def is_varied(tokens: Sequence[int], gap: float) -> bool:
    """Whether a greedy text can show a fault: no loop, no near tie, no end before it is over."""
    return len(set(tokens)) >= DISTINCT and gap > GAP and END not in tokens


# --- a scripted pair ----------------------------------------------------------------------------


def ORACLE(position: int, slot: int) -> bool:
    """Every drafted token is the target's own."""
    return True


def WRONG(position: int, slot: int) -> bool:
    """No drafted token is."""
    return False


def cut(k: int) -> Script:
    """The first `k` of each block are right, the rest wrong."""
    return lambda position, slot: slot <= k


def noise(p: float, seed: int = 0) -> Script:
    """Each is right with probability `p`, always the same for one position and slot."""
    return lambda position, slot: random.Random(f"{seed} {position} {slot}").random() < p


STANDARD_RUN: dict[str, Script] = {  # what every greedy check is run with
    "oracle": ORACLE,
    "wrong": WRONG,
    **{f"cut {k}": cut(k) for k in range(8)},
    **{f"noise {seed}": noise(0.5, seed) for seed in range(5)},
}


def told_block(
    script: Script, text: Sequence[int], anchor: int, committed: int, block_size: int
) -> list[int]:
    """A block after `committed` positions that is right where the script says; `text` is all."""
    tokens = [anchor]
    for slot in range(1, block_size):
        place = committed + slot
        right = text[place] if place < len(text) else 0
        tokens.append(right if script(place, slot) else (right + 1) % VOCABULARY)
    return tokens


def hash_target(tokens: Sequence[int]) -> int:
    """The scripted target's next token: a hash of all tokens so far."""
    return zlib.crc32(json.dumps(list(tokens)).encode()) % VOCABULARY


def replay_target(prompt_length: int, ids: Sequence[int]) -> Target:
    """A target that says `ids` after a prompt of that length whatever is drafted, then the last."""
    return lambda tokens: ids[min(len(tokens) - prompt_length, len(ids) - 1)]


def spend(seconds: float) -> None:
    if seconds:  # even a sleep of nothing gives the processor away
        time.sleep(seconds)


class ByteTokenizer:
    """Text to UTF-8 bytes and back; ids from 256 on are shown as `<id>`."""

    chat_template = "{role}: {content}"

    def __init__(self, eos_token_id: int | None = None):
        self.eos_token_id = eos_token_id

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def apply_chat_template(
        self,
        messages: Iterable[Mapping[str, str]],
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
    ) -> dict[str, list[int]]:
        turns = [f"{message['role']}: {message['content']}\n" for message in messages]
        return self("".join(turns) + "assistant: " * add_generation_prompt)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        parts = [bytes([token]) if token < 256 else f"<{token}>".encode() for token in ids]
        return b"".join(parts).decode(errors="replace")


@dataclass(slots=True, kw_only=True, eq=False)
class ScriptedModels:
    """A target function and a script in the place of two models. Keeps count of what was asked."""

    script: Script = ORACLE
    target: Target = hash_target
    vocabulary: int = VOCABULARY
    context_limit: int = 4096
    end_tokens: frozenset[int] = frozenset()
    dtype: str = "float32"
    device: str = "cpu"
    prefill_s: float = 0.0  # what each pass takes, slept away
    draft_s: float = 0.0
    verify_s: float = 0.0
    sessions: list[ScriptedSession] = field(default_factory=list)  # every one ever opened
    generated: list[tuple[int, ...]] = field(default_factory=list)  # library_generate's prompts

    def session(
        self, draft_window: int | None, speculate: bool, sampling: Sampling | None = None
    ) -> ScriptedSession:
        self.sessions.append(ScriptedSession(self, draft_window, speculate, sampling))
        return self.sessions[-1]

    def library_generate(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        stop_tokens: frozenset[int],
        min_new_tokens: int = 0,
        lookup: int | None = None,
    ) -> Generated:
        self.generated.append(tuple(prompt))
        began = time.perf_counter()
        spend(self.prefill_s)
        tokens = [*prompt, self.target(prompt)]
        ttft = time.perf_counter() - began
        end = min(len(prompt) + max_new_tokens, self.context_limit)
        least = len(prompt) + min_new_tokens
        while len(tokens) < end and (tokens[-1] not in stop_tokens or len(tokens) < least):
            spend(self.verify_s * (lookup is None))  # what is looked up comes for nothing
            tokens.append(self.target(tokens))
        total = time.perf_counter() - began
        return Generated(tokens=tuple(tokens[len(prompt) :]), ttft_s=ttft, total_s=total)

    def anchors(self, prompt: Sequence[int], tokens: Sequence[int]) -> ScriptedText:
        choices = [self.target([*prompt, *tokens[:n]]) for n in range(len(tokens))]
        margins = [float(a != b) for a, b in zip(choices, tokens, strict=True)]
        even = [1.0] * len(tokens)
        return ScriptedText(choices=choices, margins=margins, leads=even, sizes=even)

    def peak_bytes(self) -> int | None:
        return None

    def describe(self) -> dict[str, Any]:
        return {"attention": "scripted", "threads": 1, "device": self.device, "gpu": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedText:
    """A text that the scripted target has read: its choice is one logit above all others."""

    choices: list[int]
    margins: list[float]
    leads: list[float]
    sizes: list[float]


class ScriptedSession:
    """One prompt on `ScriptedModels`; asserts that the verbs are called in their order."""

    BYTES_PER_TOKEN = 8

    def __init__(
        self,
        models: ScriptedModels,
        draft_window: int | None,
        speculate: bool,
        sampling: Sampling | None = None,
    ):
        self.models, self.draft_window, self.speculate = models, draft_window, speculate
        self.sampling = sampling  # all of a scripted target's mass is on one token
        self.prompt: tuple[int, ...] = ()
        self.tokens: list[int] = []  # committed: prompt and output before the anchor
        self.draft_cache_tokens = 0
        self.calls: list[str] = []
        self._block: list[int] = []
        self._verified = 0

    def prefill(self, prompt: Sequence[int]) -> int:
        self._called("prefill", after=())
        spend(self.models.prefill_s)
        self.prompt, self.tokens = tuple(prompt), list(prompt)
        return self.models.target(self.tokens)

    def draft(self, anchor: int, block_size: int) -> tuple[int, ...]:
        self._called("draft", after=("prefill", "commit"))
        assert self.speculate or block_size == 1, "opened without a draft"
        if block_size > 1:
            spend(self.models.draft_s)
            self.draft_cache_tokens = min(len(self.tokens), self.draft_window or len(self.tokens))
        truth = [*self.tokens, anchor]
        block = [anchor]
        for slot in range(1, block_size):
            right = self.models.target(truth)
            fits = self.models.script(len(truth), slot)
            block.append(right if fits else (right + 1) % self.models.vocabulary)
            truth.append(right)
        return tuple(block)

    def verify(self, block: tuple[int, ...], rows: int | None = None) -> Verdict:
        self._called("verify", after=("draft",))
        spend(self.models.verify_s)
        self._block = list(block[:rows])
        choices = [
            self.models.target(self.tokens + self._block[: row + 1])
            for row in range(len(self._block))
        ]
        drafted = self._block[1:]
        sure = [float(a == b) for a, b in zip(drafted, choices, strict=False)]
        first = len(self.tokens) + 1
        parts = self.sampling.told(first, sure, [1.0] * len(sure)) if self.sampling else {}
        return Verdict(drafted=tuple(drafted), posterior=tuple(choices), **parts)

    def commit(self, accepted: int) -> None:
        self._called("commit", after=("verify",))
        assert 0 <= accepted < len(self._block)
        self.tokens += self._block[: accepted + 1]

    def synchronize(self) -> None:
        pass

    def close(self) -> None:
        self.calls.append("close")

    @property
    def closed(self) -> bool:
        return self.calls[-1:] == ["close"]

    @property
    def draft_cache_bytes(self) -> int:
        return self.BYTES_PER_TOKEN * self.draft_cache_tokens

    def _called(self, verb: str, after: tuple[str, ...]) -> None:
        before = self.calls[-1:]
        assert not before if not after else before and before[0] in after, f"{verb} after {before}"
        self.calls.append(verb)


def scripted_pair(
    script: Script = ORACLE,
    *,
    block_size: int = 16,
    trained_block_size: int | None = None,
    tokenizer: Any = "bytes",
    **models: Any,
) -> Pair:
    """A pair for `decode`, `stream` and `sweep` that takes microseconds a token.

    `models` are fields of `ScriptedModels`. The tokenizer is `ByteTokenizer()`; None for none.
    """
    made = ScriptedModels(script=script, **models)
    return Pair(
        spec=PairSpec(target="scripted-target", draft="scripted-draft", dtype=made.dtype),
        models=made,
        draft_config=scripted_config(block_size, trained_block_size or block_size),
        tokenizer=ByteTokenizer() if tokenizer == "bytes" else tokenizer,
        fingerprint={"target": "t" * 64, "draft": "d" * 64, "template": "c" * 64},
    )


def seen(trace: Trace) -> list[tuple[Any, ...]]:
    """What a trace tells of its blocks, times aside."""
    return [(b.start, b.drafted, b.posterior, b.accepted, b.emitted) for b in trace.blocks]


def scripted_config(block_size: int, trained_block_size: int) -> DraftConfig:
    return DraftConfig(
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        vocab_size=VOCABULARY,
        rms_norm_eps=1e-6,
        target_layer_ids=(0,),
        mask_token=MASK,
        block_size=block_size,
        trained_block_size=trained_block_size,
        layer_windows=(None,),
        layer_causal=(False,),
        layer_ropes=(Rope(theta=10000.0),),
        sources={"block_size": "block_size", "rope_theta": "rope_theta", "layer_types": "default"},
    )


def scripted_greedy(pair: Pair, ids: Sequence[int], count: int) -> tuple[int, ...]:
    """What the scripted target says by itself, its end tokens not heeded."""
    tokens = list(ids)
    for _ in range(count):
        tokens.append(pair.models.target(tokens))
    return tuple(tokens[len(ids) :])
