"""Prompts to train on: frames filled with topics, or written by the target after openings."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_lab.load import flat_ids
from dflash_lab.prompts import DATA
from dflash_lab.train.generate import Sampling, Text
from dflash_lab.train.rows import prompt_ids, words

OPENINGS = DATA / "prompts" / "openings.jsonl"
FRAMES = DATA / "prompts" / "frames.jsonl"
TOPICS = DATA / "prompts" / "topics.txt"
MARK = "\x00user\x00"  # stands for the user's turn, to find where a template puts it
WRITTEN = Sampling(temperature=0.9, top_p=0.95)
LONGEST = 96  # new tokens
FEWEST_TOKENS = 4  # written after the opening


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """How a prompt begins, and what stands around it."""

    category: str
    opening: str
    before: str = ""
    closing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPrompt:
    """A prompt to be answered. Without a tokenizer it is ids alone, and `text` is empty."""

    text: str
    ids: tuple[int, ...]
    source: str  # opening's category, or file


def read_openings(path: Path = OPENINGS) -> list[Opening]:
    """The bundled openings."""
    return [Opening(**json.loads(line)) for line in path.read_text("utf-8").splitlines()]


class PromptWriter:
    """Turns openings into texts for the target to continue, and what it wrote into prompts."""

    def __init__(self, tokenizer: Any, vocabulary: int, openings: Sequence[Opening], seed: int):
        self.tokenizer, self.vocabulary, self.seed = tokenizer, vocabulary, seed
        self.openings = list(openings)
        self.prefix = "" if tokenizer is None else template_prefix(tokenizer)

    def opening(self, index: int) -> Opening:
        """The opening of the prompt with this number: every one in turn, in shuffled rounds."""
        turn, place = divmod(index, len(self.openings))
        order = list(range(len(self.openings)))
        random.Random(f"{self.seed}/{turn}").shuffle(order)
        return self.openings[order[place]]

    def texts(self) -> Iterator[Text]:
        """Texts without end; whoever reads them stops when there is enough."""
        index = 0
        while True:
            yield Text(index=index, prompt_ids=self._begun(index))
            index += 1

    def _begun(self, index: int) -> tuple[int, ...]:
        if self.tokenizer is None:
            return (random.Random(f"{self.seed}/{index}").randrange(self.vocabulary),)
        opening = self.opening(index)
        begun = self.prefix + opening.before + opening.opening
        return flat_ids(self.tokenizer(begun, add_special_tokens=not self.prefix))

    def prompt(self, text: Text) -> TrainingPrompt | None:
        """What the target wrote as a prompt; None where that is too little to ask anything."""
        if self.tokenizer is None:
            return TrainingPrompt(text="", ids=(*text.prompt_ids, *text.tokens), source="ids")
        opening = self.opening(text.index)
        tokens = text.tokens[:-1] if text.stop == "end" else text.tokens
        written = opening.opening + self.tokenizer.decode(tokens)
        if text.stop != "end":
            written = whole_sentences(written)
        if text.stop == "loop" or len(text.tokens) < FEWEST_TOKENS or "<|" in written:
            return None
        full = opening.before + written.strip() + opening.closing
        return TrainingPrompt(
            text=full, ids=prompt_ids(self.tokenizer, full), source=opening.category
        )


def framed_prompts(count: int, seed: int) -> list[tuple[str, str]]:
    """Category and text of `count` requests about everyday things, in shuffled order.

    Every bundled frame ("Explain {topic} to a child.") with every topic; fewer where these are all.
    """
    frames = [json.loads(line) for line in FRAMES.read_text("utf-8").splitlines()]
    topics = TOPICS.read_text("utf-8").splitlines()
    dice = random.Random(seed)
    made = []
    for frame in frames:
        for topic in topics:
            other = dice.choice([name for name in topics if name != topic])
            made.append((frame["category"], frame["frame"].format(topic=topic, other=other)))
    dice.shuffle(made)
    return made[:count]


def template_prefix(tokenizer: Any) -> str:
    """What the chat template puts before the user's turn; empty without a template."""
    if not getattr(tokenizer, "chat_template", None):
        return ""
    message = [{"role": "user", "content": MARK}]
    before, _, _ = tokenizer.apply_chat_template(message, tokenize=False).partition(MARK)
    return before


def whole_sentences(text: str) -> str:
    """The text up to its last full stop, question mark, colon or line end, if it has one."""
    ends = [match.end() for match in re.finditer(r"[.?!:](?=\s)|\n", text)]
    return text[: ends[-1]] if ends else text


def without_repeats(prompts: Iterable[TrainingPrompt]) -> Iterator[TrainingPrompt]:
    """Each wording once: case, spaces and punctuation make no other prompt."""
    seen: set[tuple[Any, ...]] = set()
    for prompt in prompts:
        # A toy's text may hold no words at all.
        said = tuple(words(prompt.text))
        key = said if len(said) > 2 else (prompt.text, prompt.ids)
        if key not in seen:
            seen.add(key)
            yield prompt
