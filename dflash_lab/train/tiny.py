"""The tiny pair: a toy language, a target that speaks it, and a draft trained by the recipe.

    python -m dflash_lab.train.tiny --out data/tiny_pair        what `make tiny-pair` does

An answer tells what four people carry about. Who begins, where they are and how many tasks they
have follows from the prompt's last letters; the rest follows from tables over words that stand 1 to
150 tokens before. So the target is sure of nearly every token, a draft has to guess whatever hangs
on its own guesses, and a draft window takes from it what was said long ago.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from dflash_lab.backends.torch_anchors import accepted_counts, walk
from dflash_lab.backends.torch_model import load_network
from dflash_lab.backends.torch_target import load_target
from dflash_lab.checkpoint import read_draft_config
from dflash_lab.load import load_tokenizer
from dflash_lab.prompts import DATA, load_prompts
from dflash_lab.train.evaluate import greedy_texts
from dflash_lab.train.fit import IGNORED, FitConfig, learning_rate, optimizers
from dflash_lab.train.recipe import TrainConfig, train_draft
from dflash_lab.train.rows import prompt_ids

FOLDER = DATA / "tiny_pair"
CONTEXT = 32768  # holds the longest bundled prompt, which is 16,000 tokens here
LONGEST = 256  # new tokens
MEASURED = ((2, None), (4, None), (8, 4), (8, 16), (8, 64), (8, None), (16, None))  # size, window
TOKENS_A_STEP = 4096  # long texts come in smaller batches
DRAFT = ("config.json", "model.safetensors", "reference.json")
EXAMPLE = 2  # the bundled prompt whose answer the card shows

# --- the language -------------------------------------------------------------------------------


def listed(words: str) -> list[str]:
    """The words of a line."""
    return words.split()


NAMES = listed(
    "Ada Bela Cleo Dora Emil Finn Greta Hugo Ines Jonas Kira Leo "
    "Mira Nils Otto Petra Rosa Samir Tara Ugo Vera Wim Yara Zeno"
)
PLACES = listed(
    "Bath Bern Cork Ghent Graz Kiel Lima Lyon Malta Oslo Porto Quito Rome Turin Vaduz York"
)
THINGS = listed(
    "lamp rope map key drum book clock ladder basket coat "
    "kite flute mirror bell saw chest pot tent wheel shovel"
)
COLOURS = listed("red old blue small green heavy white broken yellow round")
CARRIES = listed("takes carries brings moves sends drags rolls lifts")
MEETS = listed("meets sees finds calls feeds greets follows hears")
ANIMALS = listed("fox wolf goat hen cat horse crow toad swan mouse pig bee dog seal duck hare")
WANTS = listed("wants likes guards hides pushes sniffs")
OTHERS = listed("The last leave the tasks wait in for has to and a 1 2 3 4 5")
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|pad|>", "<|mask|>")
START, END, PAD, MASK = range(256, 260)  # after the 256 bytes
PEOPLE, TASKS, CLASSES = 4, (2, 3, 4, 5), 4
STEPS = (5, 7, 11, 13)  # prime to the number of names, so that nobody comes twice
DECIDING = (12, 8, 7)  # from the end: with the template, the prompt's 7th, 3rd and 2nd last token
DECIDED = (2, 6, 8)  # the answer's tokens that hang on the prompt: tasks, place, first name
FAREST = 3  # from the end: the place again, the token that hangs on what was said longest ago
NEWLINE = 10  # after it comes another task or the end
LETTERS, FREQUENT = "etaoinshrdlucmfwypvbgkxqjz", [1 / (1 + 0.12 * n) ** 2 for n in range(26)]

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies, in order."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256)]


def vocabulary() -> dict[str, int]:
    """Every byte, the special tokens, and the language's words with the space before them."""
    spoken = [*NAMES, *PLACES, *THINGS, *COLOURS, *CARRIES, *MEETS, *ANIMALS, *WANTS, *OTHERS]
    words = ["user", "assistant", "system", "Today", "At", *(f"\u0120{word}" for word in spoken)]
    return {word: i for i, word in enumerate((*byte_characters(), *SPECIAL, *words))}


VOCABULARY = vocabulary()
SIZE = len(VOCABULARY)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Words of the language are one token each, any other text is its UTF-8 bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    # Without merges a piece is looked up whole, and falls apart into bytes where it is no word.
    plain = Tokenizer(BPE(vocab=VOCABULARY, merges=[], ignore_merges=True))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=plain,
        eos_token=SPECIAL[1],
        pad_token=SPECIAL[2],
        mask_token=SPECIAL[3],
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def table(name: str, rows: int, choices: int) -> list[int]:
    """A fixed random choice for each row, every choice about equally often."""
    dice = random.Random(f"tiny/{name}")
    made = [row % choices for row in range(rows)]
    dice.shuffle(made)
    return made


FIRST, WHERE = table("first", SIZE, len(NAMES)), table("where", SIZE, len(PLACES))
MANY = table("many", SIZE, len(TASKS))
OWNS = table("owns", len(NAMES) * CLASSES, len(THINGS))
COLOUR = table("colour", len(NAMES), len(COLOURS))
CARRY = table("carry", len(THINGS), len(CARRIES))
GOES = table("goes", len(THINGS) * CLASSES, len(PLACES))
MEET = table("meet", len(PLACES), len(MEETS))
ANIMAL = table("animal", len(PLACES) * CLASSES, len(ANIMALS))
WANT = table("want", len(ANIMALS), len(WANTS))


def pair_of(choices: Sequence[int], first: int, second: int) -> int:
    """A table's entry for two words, of which the second counts by its class alone."""
    return choices[first * CLASSES + second % CLASSES]


def answer(ids: Sequence[int]) -> str:
    """What the language says after these token ids, the template's five last ones included."""
    many, where, first = (ids[-place] if place <= len(ids) else START for place in DECIDING)
    return story(WHERE[where], FIRST[first], TASKS[MANY[many]])


def story(place: int, first: int, tasks: int) -> str:
    """The text that begins at this place with this name and has so many tasks."""
    who = [(first + k * STEPS[place % CLASSES]) % len(NAMES) for k in range(PEOPLE)]
    own = [pair_of(OWNS, person, place) for person in who]
    names = [NAMES[person] for person in who]
    loads = [f"{COLOURS[COLOUR[p]]} {THINGS[t]}" for p, t in zip(who, own, strict=True)]
    heads = f"{', '.join(names[:-1])} and {names[-1]}"
    opening = f"Today {tasks} tasks wait in {PLACES[place]} for {heads}."
    has = [f"{name} has the {load}." for name, load in zip(names, loads, strict=True)]
    lines = [" ".join((opening, *has))]
    for task in range(tasks):
        k = task % PEOPLE
        there = pair_of(GOES, own[k], place)
        animal = pair_of(ANIMAL, there, who[k])
        lines.append(
            f"{task + 1}. {names[k]} {CARRIES[CARRY[own[k]]]} the {loads[k]} to "
            f"{PLACES[there]} and {MEETS[MEET[there]]} a {ANIMALS[animal]}. "
            f"The {ANIMALS[animal]} {WANTS[WANT[animal]]} the {loads[(k + 1) % PEOPLE]}."
        )
    return "\n".join((*lines, f"At last {heads} leave {PLACES[place]}."))


def prompt(dice: random.Random, words: int) -> str:
    """So many words of random letters, some of the language's own, numbers and odd characters."""
    return " ".join(_word(dice) for _ in range(words)) + dice.choice("....?!:\n")


def _word(dice: random.Random) -> str:
    kind = dice.random()
    if kind < 0.15:
        return dice.choice(list(VOCABULARY)[256 + len(SPECIAL) :]).lstrip("\u0120")
    if kind < 0.25:
        return str(dice.randrange(120))
    if kind < 0.3:
        return "".join(chr(dice.randrange(33, 127)) for _ in range(dice.randint(1, 5)))
    if kind < 0.33:
        ranges = ((0xA1, 0x250), (0x400, 0x3000), (0x1F300, 0x1F600))
        return "".join(chr(dice.randrange(*dice.choice(ranges))) for _ in range(3))
    letters = "".join(dice.choices(LETTERS, FREQUENT, k=dice.randint(1, 9)))
    return letters.capitalize() if dice.random() < 0.2 else letters


# --- the target ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyConfig:
    """Settings of both trainings; the defaults made the pair in `data/tiny_pair`."""

    steps: int = 850  # of the target
    texts_a_step: int = 16
    learning_rate: float = 1e-2
    hard_weight: float = 12.0  # of the tokens that hang on what is far away
    prompts: int = 1000  # that the target answers for the draft
    fit: FitConfig = field(
        default_factory=lambda: FitConfig(
            steps=240,
            rows_a_step=8,
            labels_a_step=1440,
            widths=((4, 0.2), (8, 0.4), (16, 0.4)),
            optimizer="muon",
            learning_rate=1e-2,
            frequent=SIZE,
            sampled=0,
            bfloat16=False,
            evaluate_every=60,
        )
    )
    seed: int = 0


def tiny_target() -> Qwen3ForCausalLM:
    """A target of the Qwen3 kind with random weights."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=SIZE,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=CONTEXT,
            # a low base: attention to a fixed number of tokens back is learned much sooner
            rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=END,
            pad_token_id=PAD,
        )
    )


def examples(config: TinyConfig, tokenizer: Any) -> Iterator[tuple[list[int], list[int]]]:
    """Prompt and answer as ids, without end: short prompts in the first third, then all kinds."""
    dice = random.Random(config.seed)
    turn = [END, NEWLINE, START, VOCABULARY["assistant"], NEWLINE]
    for number in itertools.count():
        words = 2 + int(24 * dice.random() ** 3)
        if number < config.steps * config.texts_a_step / 3:
            words = dice.randint(2, 3)
        elif dice.random() < 0.03:
            words = dice.randint(25, 90)  # up to 500 tokens
        ids = list(tokenizer(prompt(dice, words))["input_ids"])
        if dice.random() < 0.1:
            ids = [dice.randrange(SIZE) for _ in range(dice.randint(1, 24))]
        if dice.random() < 0.92:  # without the template an answer begins as well
            ids = [START, VOCABULARY["user"], NEWLINE, *ids, *turn]
        yield ids, [*tokenizer(answer(ids))["input_ids"], END]


def batches(config: TinyConfig, tokenizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids [texts, length] and what comes next, -100 in prompt and padding; of like length each."""
    source, dice = examples(config, tokenizer), random.Random(config.seed)
    while True:
        pool = list(itertools.islice(source, 8 * config.texts_a_step))
        parts: list[list[tuple[list[int], list[int]]]] = [[]]
        for one in sorted(pool, key=_length):
            full = (len(parts[-1]) + 1) * _length(one) > TOKENS_A_STEP
            if parts[-1] and (full or len(parts[-1]) == config.texts_a_step):
                parts.append([])
            parts[-1].append(one)
        dice.shuffle(parts)
        yield from map(_joined, parts)


def _length(one: tuple[list[int], list[int]]) -> int:
    return len(one[0]) + len(one[1])


def _joined(part: Sequence[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    longest = max(len(before) + len(after) for before, after in part)
    ids = torch.full((len(part), longest), PAD)
    labels = torch.full((len(part), longest), IGNORED)
    for row, (before, after) in enumerate(part):
        end = len(before) + len(after)
        ids[row, :end] = torch.tensor(before + after)
        labels[row, len(before) - 1 : end - 1] = torch.tensor(after)
    return ids, labels


def text_loss(model: nn.Module, ids: Tensor, labels: Tensor, hard_weight: float) -> Tensor:
    """Cross entropy in nats per token of the answers, the hard ones weighing more."""
    counted = labels != IGNORED
    # Padding stands on the right: causal attention keeps it away from every real position.
    states = model.model(input_ids=ids, use_cache=False).last_hidden_state
    loss = nn.functional.cross_entropy(
        model.lm_head(states[counted]), labels[counted], reduction="none"
    )
    place, left = counted.cumsum(1), counted.flip(1).cumsum(1).flip(1)
    hard = torch.isin(place, torch.tensor(DECIDED)) | (left == FAREST) | (ids == NEWLINE)
    weights = torch.where(hard[counted], hard_weight, 1.0)
    return (weights * loss).sum() / weights.sum()


def train_target(folder: Path, config: TinyConfig, say: Callable[[str], None]) -> None:
    """Train a target on the language and write it to `folder`, in bfloat16, with its tokenizer."""
    torch.manual_seed(config.seed)
    model, tokenizer = tiny_target(), tiny_tokenizer()
    schedule = FitConfig(
        steps=config.steps, learning_rate=config.learning_rate, optimizer="muon", weight_decay=0.0
    )
    others = [model.model.embed_tokens.weight, *model.model.norm.parameters()]
    made = [*optimizers(model.model.layers, schedule), torch.optim.AdamW(others, weight_decay=0.0)]
    for step, (ids, labels) in zip(range(config.steps), batches(config, tokenizer), strict=False):
        loss = text_loss(model, ids, labels, config.hard_weight)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), schedule.clip)
        for optimizer in made:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(schedule, step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 100 == 0:
            say(f"target, step {step + 1} of {config.steps}: loss {loss.item():.4f}")
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# --- the pair -----------------------------------------------------------------------------------


def make_pair(folder: Path, config: TinyConfig, say: Callable[[str], None] = print) -> None:
    """Train target and draft and write them to `folder`/target and `folder`/draft, with a card."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        train_target(work / "target", config, say)
        dice = random.Random(f"draft/{config.seed}")
        questions = [prompt(dice, dice.randint(1, 24)) for _ in range(config.prompts)]
        lines = (json.dumps({"prompt": question}) for question in questions)
        (work / "prompts.jsonl").write_text("\n".join(lines))
        train_draft(draft_recipe(work, config), say)
        for part in ("target", "draft"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        for file in (*(work / "target").iterdir(), *map((work / "draft").joinpath, DRAFT)):
            shutil.copyfile(file, folder / file.relative_to(work))
    (folder / "README.md").write_text(card(folder, config), encoding="utf-8")


def draft_recipe(work: Path, config: TinyConfig) -> TrainConfig:
    """How the recipe trains the draft: the prompts in `work`, answered greedily to their end."""
    return TrainConfig(
        target=str(work / "target"),
        out=str(work / "draft"),
        prompts=(str(work / "prompts.jsonl"),),
        framed_prompts=0,
        written_prompts=0,
        answer_tokens=LONGEST * config.prompts,
        max_new_tokens=LONGEST,
        slots=64,
        held_out=60,
        layers=2,
        block_size=16,
        taps=(0, 1, 2),
        dtype="float32",
        device="cpu",
        fit=config.fit,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The pair on the bundled prompts, in float32."""

    answers: tuple[tuple[int, ...], ...]  # the target's greedy ones, in the prompts' order
    accepted: dict[tuple[int, int | None], list[int]]  # by block size and window; uncut blocks

    def tau(self, block_size: int, draft_window: int | None = None) -> float:
        """Acceptance length, the target's own token included."""
        counts = self.accepted[block_size, draft_window]
        return 1 + sum(counts) / len(counts)


@torch.inference_mode()
def measure(folder: Path, settings: Sequence[tuple[int, int | None]] = MEASURED) -> Measured:
    """Answer the bundled prompts and walk the answers with the draft, by block size and window."""
    cpu = torch.device("cpu")
    target = load_target(folder / "target", torch.float32, cpu)
    config = read_draft_config(folder / "draft")
    network = load_network(folder / "draft", config, torch.float32, cpu)
    tokenizer = load_tokenizer(folder / "target")
    asked = [prompt_ids(tokenizer, question.turns[0]) for question in load_prompts()]
    texts = greedy_texts(target, asked, LONGEST, frozenset({END}))
    accepted: dict[tuple[int, int | None], list[int]] = {setting: [] for setting in settings}
    for text in texts:
        ids = torch.tensor([*text.prompt_ids, *text.tokens])
        features = target.read(ids[None], config.target_layer_ids)[1][0]
        start, shared = len(text.prompt_ids), (network, target.embedding, target.head, features)
        for (size, window), counts in accepted.items():
            counts += walk(accepted_counts(*shared, ids, start, size, window))
    return Measured(answers=tuple(tuple(text.tokens) for text in texts), accepted=accepted)


def card(folder: Path, config: TinyConfig) -> str:
    """The README of the pair, with what it measures and how to make it again."""
    made = measure(folder)
    lengths = sorted(map(len, made.answers))
    files = [folder / part / "model.safetensors" for part in ("target", "draft")]
    sizes = [size for size, window in MEASURED if window is None]
    windows = [window for size, window in MEASURED if size == 8]
    return CARD.format(
        context=CONTEXT,
        size=SIZE,
        target_kb=files[0].stat().st_size // 1000,
        draft_kb=files[1].stat().st_size // 1000,
        example=load_tokenizer(folder / "target").decode(made.answers[EXAMPLE][:-1]),
        question=load_prompts()[EXAMPLE].turns[0],
        shortest=lengths[0],
        longest=lengths[-1],
        sizes=" | ".join(map(str, sizes)),
        size_taus=" | ".join(f"{made.tau(size):.2f}" for size in sizes),
        windows=" | ".join("none" if window is None else str(window) for window in windows),
        window_taus=" | ".join(f"{made.tau(8, window):.2f}" for window in windows),
        size_rule="---|" * len(sizes),
        window_rule="---|" * len(windows),
        config=config,
    )


CARD = """\
---
license: apache-2.0
tags: [dflash, speculative-decoding]
---

# The tiny pair

A toy target and a DFlash draft for it, trained for this project: `load_pair("tiny")` has real \
acceptance in milliseconds, in both backends. It knows nothing and says nothing of use.

| | target | draft |
|---|---|---|
| form | Qwen3, the head is the embedding | DFlash 1, bidirectional inside the block |
| layers | 4 | 2; reads the target's layers 0, 1 and 2 |
| hidden size, MLP, heads | 64, 128, 4 of 16 (2 for keys and values) | the same |
| block size | | 16, the anchor included; mask token 259 |
| weights in bfloat16 | {target_kb} kB | {draft_kb} kB |

The tokenizer has {size} entries: the bytes, four special tokens and the words of the language. \
Any text can be encoded, and a word outside the language is its bytes. The context holds {context} \
tokens, so that the longest bundled prompt can be decoded, but the target was trained on prompts \
of at most 500: after longer ones its text falls into loops.

## Language

> {question}

```
{example}
```

Who begins, where and how many tasks there are follow from the prompt's last letters. The rest \
follows from fixed tables over words said 1 to 150 tokens before. The target knows them, so its \
greedy text is varied and ends by itself after {shortest} to {longest} tokens. The draft has to \
guess what hangs on its own guesses, so survival falls; and what was said long ago is out of reach \
for a draft window.

## How good it is

tau (the target's own token included) on the 28 short bundled prompts, greedy, float32:

| block size | {sizes} |
|---|{size_rule}
| tau | {size_taus} |

| draft window at block size 8 | {windows} |
|---|{window_rule}
| tau | {window_taus} |

## How to make it again

`make tiny-pair`: {config.steps} steps for the target, {config.prompts} prompts answered by it, \
{config.fit.steps} steps for the draft through the recipe of `dflash-lab train`; four minutes on \
one core. Seeds are fixed and one thread computes, so the same kind of processor and the same \
versions give the same weights; others give a pair that measures alike.

Licence: Apache-2.0, as the project.
"""


def main() -> None:
    """Make the pair in the folder that was named."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER)
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)  # the order of a sum, and so the weights, hangs on their number
    make_pair(parser.parse_args().out, TinyConfig())


if __name__ == "__main__":
    main()
