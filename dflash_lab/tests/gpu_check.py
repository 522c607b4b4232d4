"""Does decoding hold on this device? Exactness, rounding, windows, sampling, speed; in minutes.

    python -m dflash_lab.tests.gpu_check [--device auto] [--small] [--out gpu_check.json]

Pairs of random weights in realistic shapes; nothing is fetched. Each check prints a line and its
figures go into the file, which holds what was found so far even where a later check breaks. The
exit code is 0 only if every check held. `--small` is for a look on a CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from dflash_lab.backends.torch_session import pick_device
from dflash_lab.config import DecodeConfig
from dflash_lab.costs import measure_costs
from dflash_lab.decoding import decode
from dflash_lab.exactness import audited
from dflash_lab.load import Pair, load_pair
from dflash_lab.provenance import hardware, versions
from dflash_lab.store import plain
from dflash_lab.tests.told import told_sessions
from dflash_lab.tests.toys import END, ORACLE, WRONG, byte_tokenizer, cut, noise, save_draft
from dflash_lab.trace import Trace

SCRIPTS = {"network": None, "oracle": ORACLE, "wrong": WRONG, "cut 2": cut(2), "noise": noise(0.7)}
SIZES, WINDOWS = (1, 2, 4, 8, 16), (None, 64, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A target of the Qwen3 kind; its draft has three of its layers and reads up to three taps."""

    hidden: int
    layers: int
    heads: int
    vocabulary: int
    new_tokens: int
    prompts: int

    @property
    def layer(self) -> dict[str, int]:
        """What a layer of the target and one of the draft have in common."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": 3 * self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads // 2,
            "head_dim": 2 * self.hidden // self.heads,
            "max_position_embeddings": 4096,
        }


REALISTIC = Shape(hidden=1024, layers=16, heads=16, vocabulary=32768, new_tokens=96, prompts=4)
SMALL = Shape(hidden=128, layers=4, heads=4, vocabulary=1024, new_tokens=18, prompts=1)


def write_pair(shape: Shape, folder: Path, device: str) -> None:
    """Target and draft of random weights as two model folders."""
    config = transformers.Qwen3Config(
        **shape.layer,
        vocab_size=shape.vocabulary,
        num_hidden_layers=shape.layers,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=END,
    )
    torch.manual_seed(0)
    with torch.device(device):
        target = transformers.Qwen3ForCausalLM(config)
    target.save_pretrained(folder / "target")
    byte_tokenizer().save_pretrained(folder / "target")
    taps = sorted({1, shape.layers // 2, shape.layers - 2})
    save_draft(
        folder / "draft",
        config,
        **shape.layer,
        num_hidden_layers=3,
        block_size=16,
        dflash_config={"target_layer_ids": taps, "mask_token_id": shape.vocabulary - 1},
    )


@dataclass(slots=True)
class Findings:
    """Checks in the order in which they were made, written to a file after each."""

    path: Path
    facts: dict[str, Any]
    checks: list[dict[str, Any]] = field(default_factory=list)

    def add(self, name: str, held: bool, **figures: Any) -> None:
        self.checks.append({"check": name, "held": held, **figures})
        self.path.write_text(json.dumps(plain(self.facts | {"checks": self.checks}), indent=1))
        told = ", ".join(f"{key} {value}" for key, value in figures.items() if key != "table")
        print(f"{'held ' if held else 'FAILED'}  {name}: {told}", flush=True)

    @property
    def held(self) -> bool:
        return bool(self.checks) and all(check["held"] for check in self.checks)


class DeviceCheck:
    """The checks on one device, with pairs of one shape."""

    def __init__(self, shape: Shape, device: str, folder: Path, findings: Findings):
        self.shape, self.device, self.folder, self.findings = shape, device, folder, findings
        dice = torch.Generator().manual_seed(1)
        lengths = [100 + 150 * place for place in range(shape.prompts)]
        self.prompts = [torch.randint(256, (n,), generator=dice).tolist() for n in lengths]

    def load(self, dtype: str, device: str | None = None) -> Pair:
        return load_pair(
            target=self.folder / "target",
            draft=self.folder / "draft",
            dtype=dtype,
            device=device or self.device,
        )

    def run(self) -> None:
        pair = self.load("float32")
        self.exactness(pair)
        self.windows(pair)
        self.sampling(pair)
        del pair
        self.rounding()
        self.speed()

    def config(self, **settings: Any) -> DecodeConfig:
        return DecodeConfig(**{"max_new_tokens": self.shape.new_tokens} | settings)

    def references(self, pair: Pair) -> Iterator[tuple[list[int], tuple[int, ...]]]:
        """Prompts, each with the library's own text."""
        for prompt in self.prompts:
            made = pair.models.library_generate(prompt, self.shape.new_tokens, pair.stop_tokens)
            yield prompt, tuple(made.tokens)

    def exactness(self, pair: Pair) -> None:
        """float32: every size and script gives the library's text, or parts within rounding."""
        own, labels, accepted = pair.models.session, [], set()
        for prompt, text in self.references(pair):
            for script in SCRIPTS.values():
                told = script and told_sessions(pair, script, (*prompt, *text))
                pair.models.session = told or own
                for size in SIZES:
                    trace = decode(pair, prompt, self.config(block_size=size))
                    labels.append(_label(pair, trace, text))
                    accepted |= {block.accepted for block in trace.blocks}
        pair.models.session = own
        enough = {0, 2, 15} <= accepted  # else the scripts did not reach the decoder
        self.findings.add(
            "exactness, float32",
            labels.count("mismatch") == 0 and labels.count("equal") > 0 and enough,
            texts=len(labels),
            equal=labels.count("equal"),
            near_tie=labels.count("near tie"),
            mismatch=labels.count("mismatch"),
        )

    def windows(self, pair: Pair) -> None:
        """A window bounds the draft's cache, and the text stays what it is."""
        held, most = True, {}
        prompt = self.prompts[-1]
        plain_text = decode(pair, prompt, self.config(block_size=1)).tokens
        for window in WINDOWS:
            trace = decode(pair, prompt, self.config(block_size=8, draft_window=window))
            label = _label(pair, trace, plain_text)
            with closing(pair.models.session(window, True)) as session:
                session.draft(session.prefill(prompt), 8)
                most[str(window)] = session.draft_cache_tokens
            wanted = len(prompt) if window is None else min(window, len(prompt))
            held &= label != "mismatch" and most[str(window)] == wanted
        self.findings.add("windows, float32", held, positions=most)

    def sampling(self, pair: Pair) -> None:
        """A seed repeats a run, and by the match rule at any block size."""
        prompt, drawn = self.prompts[0], {"temperature": 1.0, "seed": 7}
        by_size = [
            decode(pair, prompt, self.config(block_size=size, **drawn)).tokens for size in (1, 4, 8)
        ]
        other = decode(pair, prompt, self.config(block_size=8, **drawn | {"seed": 8})).tokens
        by_rejection = self.config(
            block_size=8, rule="rejection", proposal="sample", temperature=1.0, seed=7
        )
        again = [decode(pair, prompt, by_rejection).tokens for _ in range(2)]
        self.findings.add(
            "sampling, float32",
            len(set(by_size)) == 1 and other != by_size[0] and again[0] == again[1],
            match_texts=len(set(by_size)),
            rejection_texts=len(set(again)),
        )

    def rounding(self) -> None:
        """bfloat16: where a text parts from the library's, both tokens are nearly the best."""
        pair, labels = self.load("bfloat16"), []
        for prompt in self.prompts:
            trace = decode(pair, prompt, self.config(block_size=8))
            labels.append(audited(pair, "", trace, None).label)
        counted = {label: labels.count(label) for label in ("equal", "near tie", "mismatch")}
        self.findings.add("audit, bfloat16", counted["mismatch"] == 0, **counted)

    def speed(self) -> None:
        """Seconds of a block by size; there is no right value, only a finite one."""
        pair = self.load("bfloat16")
        table = measure_costs(pair, SIZES, contexts=(len(self.prompts[-1]),), repeats=5)
        rows = [
            {"block_size": cost.block_size, "ms": round(1000 * cost.total_s, 2)}
            | {"draft_ms": round(1000 * cost.draft_s, 2)}
            | {"verify_ms": round(1000 * cost.verify_s, 2)}
            for cost in table.costs
        ]
        shown = " ".join(f"{row['block_size']}: {row['ms']}" for row in rows)
        held = len(rows) == len(SIZES) and all(cost.total_s > 0 for cost in table.costs)
        self.findings.add("block times, bfloat16", held, ms_by_size=shown, table=rows)


def _label(pair: Pair, trace: Trace, text: Sequence[int]) -> str:
    """What an audit calls a text; it is asked only about those that part from the reference."""
    return "equal" if trace.tokens == tuple(text) else audited(pair, "", trace, None).label


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every check; 0 if all held, else 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="cuda, mps, cpu or auto")
    parser.add_argument("--small", action="store_true", help="small shapes, for a CPU")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"))
    asked = parser.parse_args(arguments)
    shape = SMALL if asked.small else REALISTIC
    device, began = pick_device(asked.device), time.perf_counter()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    facts = {"device": str(device), "hardware": hardware(name)["class"], "versions": versions()}
    findings = Findings(asked.out, facts)
    with tempfile.TemporaryDirectory() as folder:
        write_pair(shape, Path(folder), str(device))
        DeviceCheck(shape, str(device), Path(folder), findings).run()
    print(f"{time.perf_counter() - began:.0f} s on {facts['hardware']}; written to {asked.out}")
    return 0 if findings.held else 1


if __name__ == "__main__":
    sys.exit(main())
