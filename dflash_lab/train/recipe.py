"""Train a draft for a target: prompts, answers, features, fit. Every stage resumes where it was."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from dflash_lab.backends.torch_model import DraftNetwork, load_network
from dflash_lab.backends.torch_session import (
    check_fit,
    end_tokens,
    fast_bfloat16,
    pick_device,
    pick_dtype,
)
from dflash_lab.backends.torch_target import TorchTarget, load_target
from dflash_lab.checkpoint import (
    DraftConfig,
    UnsupportedDraft,
    draft_fingerprint,
    parse_draft_config,
    read_draft_config,
    read_json,
)
from dflash_lab.config import number, one_of, whole
from dflash_lab.doctor import write_reference
from dflash_lab.lease import Leases
from dflash_lab.load import (
    DRAFT_FILES,
    find_target,
    load_pair,
    load_tokenizer,
    resolve,
    target_fingerprint,
)
from dflash_lab.prompts import DATA
from dflash_lab.provenance import short_name
from dflash_lab.train.evaluate import evaluate, question, questions, tau_table
from dflash_lab.train.export import (
    card,
    draft_json,
    pick_mask_token,
    pick_taps,
    read_ngrams,
    write_draft,
    write_manifest,
)
from dflash_lab.train.features import FeatureCache, cache_features, missing_of_cache
from dflash_lab.train.fit import (
    Batches,
    BlockLoss,
    FitConfig,
    fit,
    held_out_survival,
    warm_start,
)
from dflash_lab.train.generate import Sampling, Text, Writer, tokens_per_second
from dflash_lab.train.prompts import (
    LONGEST,
    WRITTEN,
    PromptWriter,
    TrainingPrompt,
    framed_prompts,
    read_openings,
    without_repeats,
)
from dflash_lab.train.rows import (
    Row,
    RowCounts,
    imported_rows,
    prompt_ids,
    read_jsonl,
    split,
    usable,
)
from dflash_lab.train.shards import Shards, named_by, read_shards, write_shards

STAGES = ("prompts", "answers", "features", "fit")
# Of `minutes`: prompts, answers, features end at these shares; the fit takes the rest.
ENDS = {"prompts": 0.1, "answers": 0.5, "features": 0.6, "fit": 0.92}
BYTES_A_TOKEN = 2  # of a compressed shard, about
FEWEST_ROWS = 4
SEED = 1  # of the order in which openings come
LEAST_TOKENS = 2000  # of a stage: with less, time being up does not end it

# What decides a draft's form, and what it is where nothing is said; taps and mask token are picked.
FORM = ("layers", "block_size", "taps", "mask_token")
LAYERS, BLOCK_SIZE = 2, 16

# What the card's command names where it is not the usual value.
SETTINGS = (
    "minutes",
    "framed_prompts",
    "written_prompts",
    "answer_tokens",
    "max_new_tokens",
    "temperature",
    "held_out",
    *FORM,
)
FIT_SETTINGS = (
    "steps",
    "rows_a_step",
    "labels_a_step",
    "widths",
    "learning_rate",
    "optimizer",
    "average",
    "weights",
    "soft",
    "evaluate_every",
)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """What to train, on what, and for how long."""

    target: str  # a model folder, a hub id, or the name of a pair that comes along
    out: str  # the draft's folder
    work: str | None = None  # shards, features, checkpoints; by default `out` with `.work` behind
    prompts: tuple[str, ...] = ()  # .jsonl, .jsonl.gz or .parquet files, or hub data sets
    rows: tuple[str, ...] = ()  # JSONL with `prompt` and `response_ids`, answered by this target
    forbidden: tuple[str, ...] = ()  # JSONL files whose texts must not be trained on
    evaluate: tuple[str, ...] = ()  # JSONL files of prompts for the card; never trained on either
    minutes: float | None = None  # the whole run fits in; without it the numbers below hold
    framed_prompts: int = 4000  # requests about everyday things, without any model
    written_prompts: int = 8000  # that the target writes itself
    answer_tokens: int = 2_500_000
    max_new_tokens: int = 256
    temperature: float = 0.0  # of the answers
    slots: int = 128  # texts written at once
    held_out: int = 120  # prompts
    draft: str | None = None  # to go on from, in its own form; by default the target's last layers
    layers: int | None = None  # 2
    block_size: int | None = None  # 16
    taps: tuple[int, ...] | None = None
    mask_token: int | None = None
    dtype: str = "auto"  # of the target; "auto" is bfloat16 where that is faster
    device: str = "auto"
    until: str = "fit"  # the last stage to run
    fit: FitConfig = field(default_factory=FitConfig)

    def __post_init__(self) -> None:
        for name in ("framed_prompts", "written_prompts", "answer_tokens"):
            whole(name, getattr(self, name), 0, "0 leaves the stage out.")
        for name in ("max_new_tokens", "slots", "held_out"):
            whole(name, getattr(self, name), 1, "")
        if self.layers is not None:
            whole("layers", self.layers, 1, "")
        if self.block_size is not None:
            whole("block_size", self.block_size, 2, "It counts the anchor, so 2 drafts one token.")
        shaped = [name for name in FORM if getattr(self, name) is not None]
        if self.draft is not None and shaped:
            raise ValueError(
                f"{' and '.join(shaped)} cannot be given beside draft {self.draft!r}, which keeps "
                "its own form. Leave out one or the other."
            )
        one_of("until", self.until, STAGES)
        number("temperature", self.temperature, "a number from 0", lambda value: value >= 0)
        if self.minutes is not None:
            number("minutes", self.minutes, "a number above 0", lambda value: value > 0)
        if Path(self.out).exists() and not Path(self.out).is_dir():
            raise ValueError(f"out is {self.out}, which is a file; expected a folder.")

    @property
    def work_folder(self) -> Path:
        """Where the stages keep what they made."""
        return Path(self.work) if self.work else Path(f"{self.out.rstrip('/')}.work")


def train_draft(config: TrainConfig, say: Say = print) -> Path | None:
    """Run or resume the whole recipe; the draft's folder, or None where `until` stopped it before.

    Raises `ModelUnavailable` or `UnsupportedTarget` for a target that cannot be used, ValueError
    for prompts or rows that cannot, OSError for too small a disk, LossNotFinite for a loss
    that is not finite. Run it again to go on: at most a minute of work is lost.
    """
    state = PartialState(cpu=config.device == "cpu")
    with closing(Leases(cells=config.work_folder)) as leases:
        # With several processes the first prepares everything, and the others find it done.
        with state.main_process_first():
            recipe = _Recipe(config, say if state.is_main_process else lambda line: None)
            # A second run would overwrite what the first wrote.
            if state.is_main_process and not leases.take(config.work_folder):
                raise RuntimeError(
                    f"another run is at work in {config.work_folder}. Wait until it has ended, or "
                    "name another folder with --work."
                )
            prepared = recipe.prepare()
        if prepared is None:
            return None
        network, curve = recipe.fit(prepared)
        return recipe.write(prepared, network, curve) if state.is_main_process else Path(config.out)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """What the fit needs."""

    train: list[Row]
    held_out: list[Row]
    counts: RowCounts
    cache: FeatureCache
    raw: Mapping[str, Any]  # the draft's config.json
    network: DraftNetwork
    settings: FitConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """The draft that a fit goes on from."""

    network: DraftNetwork
    raw: dict[str, Any]  # its config.json, which the new draft gets too
    fingerprint: str
    facts: dict[str, Any]  # for the card and training.json; with its own `training.json`, if any
    ngrams: set[bytes]  # of the prompts that it was trained on, as far as it says

    @classmethod
    def read(cls, where: str, target: TorchTarget) -> _Start:
        """Raises `CheckpointError` kinds for a draft that is faulty or not this target's."""
        folder = resolve(where, None, "draft", (*DRAFT_FILES, "training*"))
        config = read_draft_config(folder)
        check_fit(target, config)
        if config.dflash2 is not None:
            raise UnsupportedDraft(
                f"the draft in {where} is a DFlash 2 draft; training goes on from DFlash 1 drafts."
            )
        fingerprint, told = draft_fingerprint(folder), folder / "training.json"
        network = load_network(folder, config, torch.float32, target.device)
        return cls(
            network=network.train().requires_grad_(True),
            raw=read_json(folder / "config.json"),
            fingerprint=fingerprint,
            facts={
                "draft": short_name(where),
                "fingerprint": fingerprint,
                "training": read_json(told) if told.is_file() else None,
            },
            ngrams=read_ngrams(folder),
        )


class _Recipe:
    """One run of the recipe: the loaded target and the stages in order."""

    def __init__(self, config: TrainConfig, say: Say):
        self.config, self.say, self.work = config, say, config.work_folder
        folder = find_target(config.target, progress=say)
        self.folder, self.tokenizer = folder, load_tokenizer(folder)
        self.sources = [(name, _read_prompts(name)) for name in config.prompts]
        self.closed = [*_bundled_texts(), *_texts_of(config.forbidden), *_texts_of(config.evaluate)]
        if config.evaluate and self.tokenizer is None:
            raise self._no_tokenizer()
        for name in config.evaluate:
            questions(Path(name))
        device = pick_device(config.device)
        self.bfloat16 = fast_bfloat16(device)
        wanted = "bfloat16" if config.dtype == "auto" and self.bfloat16 else config.dtype
        dtype = pick_dtype(wanted, device)
        self.target = load_target(folder, dtype, device)
        self.stops = frozenset(end_tokens(self.target.model)) | (
            {self.tokenizer.eos_token_id} - {None} if self.tokenizer is not None else frozenset()
        )
        self.vocabulary = self.target.embedding.weight.shape[0]
        self.start = None if config.draft is None else _Start.read(config.draft, self.target)
        self._check_draft()
        self.given = [
            row
            for name in config.rows
            for row in imported_rows(Path(name), self.tokenizer, self.vocabulary)
        ]
        self.began = time.monotonic()

    def _check_draft(self) -> None:
        """What the draft's form asks of this target; the stages that use it come hours later."""
        taps, mask, layers = self.config.taps, self.config.mask_token, len(self.target.layers)
        if taps is not None and not (
            0 < len(set(taps)) == len(taps) and set(taps) <= set(range(layers))
        ):
            raise ValueError(
                f"taps is {taps}; expected different layers of the target, 0 to {layers - 1}."
            )
        if mask is not None and mask not in range(self.vocabulary):
            raise ValueError(
                f"mask_token is {mask!r}; expected a token of the target, 0 to "
                f"{self.vocabulary - 1}."
            )
        longest, context = self.config.max_new_tokens, self.target.context_limit
        if longest >= context:
            raise ValueError(
                f"max_new_tokens is {longest}; expected fewer than the target's context of "
                f"{context} tokens, which holds the prompt too."
            )

    def prepare(self) -> _Prepared | None:
        """All stages before the fit, each of which is skipped where it is done."""
        self.plan = _Plan(self.work, self._name())  # the work folder is ours by now
        self._spare_other_drafts()
        self._same_start()
        prompts = self._prompts()
        if self.config.until == "prompts":
            return None
        self._answers(prompts)
        if self.config.until == "answers":
            return None
        rows, counts = self._rows(prompts)
        train, held_out = split(rows, min(self.config.held_out, max(1, len(rows) // 10)))
        raw = self._draft_json(rows) if self.start is None else self.start.raw
        draft = parse_draft_config(raw)
        cache = self._features([*train, *held_out], draft.target_layer_ids)
        if self.config.until == "features":
            return None
        network = self._network(draft)
        return _Prepared(
            train=train,
            held_out=held_out,
            counts=counts,
            cache=cache,
            raw=raw,
            network=network,
            settings=self._settings(network, train, cache),
        )

    def _network(self, draft: DraftConfig) -> DraftNetwork:
        """The network as the fit begins."""
        if self.start is not None:
            self.say(f"the fit begins with the draft {self.config.draft}")
            return self.start.network
        torch.manual_seed(self.config.fit.seed)
        network = DraftNetwork(draft)
        copied = warm_start(network, self.target)
        self.say(f"warm start: {copied} of {len(network.state_dict())} tensors from the target")
        return network.to(self.target.device)

    def fit(self, prepared: _Prepared) -> tuple[DraftNetwork, list[dict[str, Any]]]:
        """The trained network and its curve; the stage that several processes share."""
        network, settings = prepared.network, prepared.settings
        measure = held_out_survival(
            self.target,
            prepared.held_out,
            prepared.cache,
            len(prepared.train),
            settings.evaluation_block,
            settings.bfloat16,
        )
        batches = Batches(prepared.train, prepared.cache, settings, self.vocabulary)
        curve = fit(self.work / "fit", network, self.target, batches, measure, settings, self.say)
        return network.eval(), curve

    def write(
        self, prepared: _Prepared, network: DraftNetwork, curve: list[dict[str, Any]]
    ) -> Path:
        """The draft's folder: weights, configuration, curve, evaluation, card."""
        out = Path(self.config.out)
        self.plan.put("written", [*self._written_before(), str(out.resolve())])
        write_draft(out, network, prepared.raw)
        taus = None
        if self.config.evaluate:
            wide = load_target(self.folder, torch.float32, self.target.device)
            network.float()
            files = [Path(name) for name in self.config.evaluate]
            frame = evaluate(network, wide, self.tokenizer, files, self.stops)
            frame.to_parquet(out / "evaluation.parquet", index=False)
            taus = tau_table(frame)
        facts = self._facts(prepared)
        if self.start is not None:  # what that draft was trained on, this one was too
            prepared.counts.ngrams |= self.start.ngrams
        write_manifest(out, prepared.counts, curve, facts)
        (out / "README.md").write_text(card(facts, prepared.counts, taus, self._command()))
        self._reference(out)
        self.say(f"draft: {out}")
        return out

    def _written_before(self) -> list[str]:
        return self.plan.get("written") or []

    def _spare_other_drafts(self) -> None:
        out = Path(self.config.out)
        if (out / "model.safetensors").exists() and str(out.resolve()) not in (
            self._written_before()
        ):
            raise FileExistsError(
                f"{out} holds a draft that was not made from {self.work}. Name another folder "
                "with --out, or take that draft away."
            )

    def _same_start(self) -> None:
        # A fit that was begun is gone on with from its checkpoint, whatever is named now.
        start = None if self.start is None else self.start.fingerprint
        if self.plan.get("start", start) != start:
            raise ValueError(
                f"the run in {self.work} was begun with another draft to go on from, or with none "
                f"(now {self.config.draft}). Name the same one, or another folder with --work."
            )
        self.plan.put("start", start)

    def _reference(self, out: Path) -> None:
        """What the doctor later goes by, where the bundled prompts can be asked."""
        try:
            where = {"target": self.folder, "draft": out, "device": str(self.target.device)}
            write_reference(load_pair(dtype="float32", **where), out)
        except ValueError as error:  # no tokenizer, no template, too short a context
            self.say(f"no reference for dflash-lab doctor: {error}")

    # --- stages -----------------------------------------------------------------------------

    def _prompts(self) -> list[TrainingPrompt]:
        """Prompts from files, then framed ones and those that the target writes itself, mixed."""
        given = [
            TrainingPrompt(text=text, ids=self._ids(text), source=name)
            for name, texts in self.sources
            for text in texts
        ]
        own = self._written()
        if self.tokenizer is not None:
            own += [
                TrainingPrompt(text=text, ids=self._ids(text), source=category)
                for category, text in framed_prompts(self.config.framed_prompts, SEED)
            ]
        # Time may end the answers early: what is answered by then should be of every kind.
        own.sort(key=lambda prompt: named_by(prompt.ids))
        made = list(without_repeats([*given, *own]))
        self.say(f"{len(made)} different prompts, {len(given)} of them from files")
        room = self.target.context_limit - self.config.max_new_tokens
        short = [prompt for prompt in made if len(prompt.ids) <= room]
        if len(short) < len(made):
            self.say(
                f"{len(made) - len(short)} of them left out: with {self.config.max_new_tokens} new "
                f"tokens they are longer than the target's context of {self.target.context_limit}"
            )
        return short

    def _written(self) -> list[TrainingPrompt]:
        """Prompts that the target writes after short openings."""
        wanted = self.config.written_prompts
        if not wanted:
            return []
        writer = PromptWriter(self.tokenizer, self.vocabulary, read_openings(), SEED)
        shards = Shards(
            self.work / "prompts",
            {"of": self._name(), "longest": LONGEST, **asdict(WRITTEN)},
            self.vocabulary,
        )
        left = wanted - len(shards.done)
        self._announce("prompts", left * LONGEST * 6 // 10, "prompts")
        if left > 0 and not self.plan.ended("prompts"):
            engine = Writer(self.target, LONGEST, self.stops, WRITTEN, slots=self.config.slots)
            texts = islice(writer.texts(), wanted)
            write_shards(shards, engine, texts, self._enough("prompts"), self.say)
            self.plan.end("prompts")
        written = sorted(read_shards(shards.folder), key=lambda text: text.index)
        return [prompt for text in written if (prompt := writer.prompt(text)) is not None]

    def _answers(self, prompts: Sequence[TrainingPrompt]) -> None:
        """The target's answers, until there are tokens enough or no more prompts."""
        goal = self.config.answer_tokens
        if not goal:
            return
        shards = self._answer_shards()
        left = min(goal - shards.tokens, (len(prompts) - len(shards.done)) * 200)
        self._announce("answers", left, "answers")
        if left <= 0 or self.plan.ended("answers"):
            return
        sampling = Sampling(temperature=self.config.temperature, top_p=1.0)
        engine = Writer(
            self.target, self.config.max_new_tokens, self.stops, sampling, self.config.slots
        )
        texts = (Text(index=named_by(prompt.ids), prompt_ids=prompt.ids) for prompt in prompts)
        write_shards(shards, engine, texts, self._enough("answers", goal), self.say)
        self.plan.end("answers")

    def _rows(self, prompts: Sequence[TrainingPrompt]) -> tuple[list[Row], RowCounts]:
        """Usable rows: imported ones, then the answers written here."""
        rows, counts = usable(self._all_rows(prompts), self.tokenizer, self.closed)
        if len(rows) < FEWEST_ROWS:
            raise ValueError(
                f"{len(rows)} of {counts.read} answers can be trained on ({counts.too_short} are "
                f"too short, {counts.duplicates} repeat a prompt, {counts.overlapping} overlap "
                f"with evaluation prompts); {FEWEST_ROWS} is the least. Give more prompts or time."
            )
        self.say(
            f"{counts.used} of {counts.read} answers, {counts.answer_tokens} tokens; "
            f"{counts.loops_cut} cut at a loop, {counts.too_short} too short, "
            f"{counts.duplicates} repeated, {counts.overlapping} overlapping"
        )
        return rows, counts

    def _all_rows(self, prompts: Sequence[TrainingPrompt]) -> Iterator[Row]:
        yield from self.given
        if self.config.answer_tokens:
            said = {prompt.ids: prompt.text for prompt in prompts}
            for text in sorted(read_shards(self._answer_shards().folder), key=lambda t: t.index):
                prompt = said.get(text.prompt_ids)
                if prompt is None:  # answered by an earlier run with other prompts
                    prompt = self.tokenizer.decode(text.prompt_ids) if self.tokenizer else ""
                yield Row(prompt=prompt, prompt_ids=text.prompt_ids, answer_ids=tuple(text.tokens))

    def _features(self, rows: Sequence[Row], taps: Sequence[int]) -> FeatureCache:
        """The target's features of all rows, on disk."""
        folder = self.work / "features"
        fused = len(taps) * self.target.hidden_size
        positions, size = missing_of_cache(folder, rows, fused)
        if positions:
            self._tell("features", positions / self._reading_speed(), size)
        else:
            self.say("features: done before")
        return cache_features(folder, rows, self.target, taps, self._now_and_then())

    def _settings(
        self, network: DraftNetwork, train: Sequence[Row], cache: FeatureCache
    ) -> FitConfig:
        """The fit's settings, with as many steps as the time allows; decided once and kept."""
        limit = network.config.trained_block_size
        settings = replace(
            self.config.fit,
            rows_a_step=min(self.config.fit.rows_a_step, len(train)),
            widths=_widths(self.config.fit.widths, limit),
            evaluation_block=min(self.config.fit.evaluation_block, limit),
            bfloat16=self.config.fit.bfloat16 and self.bfloat16,
        )
        if (steps := self.plan.get("steps")) is not None:  # time would now give another number
            return settings if self.config.minutes is None else replace(settings, steps=steps)
        seconds = _step_seconds(
            network, self.target, Batches(train, cache, settings, self.vocabulary)
        )
        if self.config.minutes is not None:
            left = 60 * self.config.minutes * ENDS["fit"] - (time.monotonic() - self.began)
            # a tenth for the evaluations
            settings = replace(settings, steps=max(10, int(left / seconds / 1.1)))
        self._tell("fit", settings.steps * seconds * 1.1, 3 * 4 * 4 * network.config.parameters)
        self.plan.put("steps", settings.steps)
        return settings

    # --- what the stages share --------------------------------------------------------------

    def _ids(self, text: str) -> tuple[int, ...]:
        if self.tokenizer is None:
            raise self._no_tokenizer()
        return prompt_ids(self.tokenizer, text)

    def _no_tokenizer(self) -> ValueError:
        return ValueError(
            f"the target in {self.folder} has no tokenizer, so prompts given as text cannot be "
            "used. Add its tokenizer files."
        )

    def _name(self) -> str:
        return target_fingerprint(self.folder)[:16]

    def _answer_shards(self) -> Shards:
        settings = {
            "of": self._name(),
            "max_new_tokens": self.config.max_new_tokens,
            "temperature": self.config.temperature,
        }
        return Shards(self.work / "answers", settings, self.vocabulary)

    def _draft_json(self, rows: Sequence[Row]) -> dict[str, Any]:
        taps, mask = self.config.taps, self.config.mask_token
        if mask is None:
            used = {token for row in rows for token in (*row.prompt_ids, *row.answer_ids)}
            mask = pick_mask_token(self.tokenizer, self.vocabulary, used)
        taps = pick_taps(len(self.target.layers)) if taps is None else taps
        layers, block_size = self.config.layers or LAYERS, self.config.block_size or BLOCK_SIZE
        return draft_json(self.target, layers, block_size, taps, mask)

    def _announce(self, stage: str, tokens: int, what: str) -> None:
        if self.plan.ended(stage) or tokens <= 0:
            self.say(f"{what}: done before")
            return
        speed = tokens_per_second(self.target, self.config.slots)
        self._tell(stage, tokens / speed, tokens * BYTES_A_TOKEN)

    def _tell(self, stage: str, seconds: float, size: int) -> None:
        if self.config.minutes is not None:
            seconds = min(seconds, 60 * self.config.minutes * ENDS[stage])
        free = shutil.disk_usage(self.work).free
        if size + (64 << 20) > free:
            raise OSError(
                f"stage {stage} takes {size / 1e6:.0f} MB in {self.work}, which has "
                f"{free / 1e6:.0f} MB free. Make room or name another folder with --work."
            )
        self.say(
            f"stage {STAGES.index(stage) + 1} of {len(STAGES)}, {stage}: about "
            f"{seconds / 60:.1f} min and {size / 1e6:.0f} MB in {self.work}"
        )

    def _enough(self, stage: str, goal: int | None = None) -> Callable[[int], bool]:
        """Whether a stage may end with so many tokens: its goal is reached, or its time is up."""
        until = None
        if self.config.minutes is not None:
            until = self.began + 60 * self.config.minutes * ENDS[stage]

        def enough(tokens: int) -> bool:
            reached = goal is not None and tokens >= goal
            late = until is not None and time.monotonic() > until
            return reached or (late and tokens >= LEAST_TOKENS)

        return enough

    def _reading_speed(self) -> float:
        ids = torch.zeros(4, 256, dtype=torch.long, device=self.target.device)
        with torch.inference_mode():
            self.target.read(ids, (0,))
            began = time.monotonic()
            self.target.read(ids, (0,))
        return ids.numel() / (time.monotonic() - began)

    def _now_and_then(self, every_s: float = 20.0) -> Say:
        last = [time.monotonic()]

        def tell(line: str) -> None:
            if time.monotonic() - last[0] > every_s:
                last[0] = time.monotonic()
                self.say(line)

        return tell

    def _facts(self, prepared: _Prepared) -> dict[str, Any]:
        draft = prepared.network.config
        return {
            "target": short_name(self.config.target),
            "target_fingerprint": target_fingerprint(self.folder),
            "license": _license(self.folder),
            "layers": draft.num_layers,
            "block_size": draft.trained_block_size,
            "taps": list(draft.target_layer_ids),
            "mask_token": draft.mask_token,
            "parameters": draft.parameters,
            "start": None if self.start is None else self.start.facts,
            "held_out": len(prepared.held_out),
            "fit": asdict(prepared.settings),
        }

    def _command(self) -> str:
        """The command for the card, which may go elsewhere: files without their folders."""
        given = {
            "--target": [self.config.target],
            "--prompts": self.config.prompts,
            "--rows": self.config.rows,
            "--forbidden": self.config.forbidden,
            "--evaluate": self.config.evaluate,
            "--draft": [self.config.draft] if self.config.draft else [],
            "--out": [self.config.out],
        }
        for part, names in ((self.config, SETTINGS), (self.config.fit, FIT_SETTINGS)):
            usual = type(part)() if part is self.config.fit else TrainConfig(target="", out="")
            for name in names:
                value = getattr(part, name)
                if value != getattr(usual, name):
                    given[f"--{name.replace('_', '-')}"] = [typed(value)]
        words = [
            f"{flag} {short_name(value)}" for flag, values in given.items() for value in values
        ]
        return " \\\n    ".join(["dflash-lab train", *words])


class _Plan:
    """What was decided once and must not change when a run is resumed."""

    def __init__(self, work: Path, target: str):
        work.mkdir(parents=True, exist_ok=True)
        self.path = work / "plan.json"
        self.content: dict[str, Any] = (
            json.loads(self.path.read_text()) if self.path.exists() else {"target": target}
        )
        if self.content["target"] != target:
            raise ValueError(
                f"{work} holds the work for another target. Name another folder with --work."
            )
        self._save()

    def get(self, name: str, otherwise: Any = None) -> Any:
        return self.content.get(name, otherwise)

    def put(self, name: str, value: Any) -> None:
        self.content[name] = value
        self._save()

    def ended(self, stage: str) -> bool:
        return bool(self.content.get(f"{stage}_ended"))

    def end(self, stage: str) -> None:
        self.put(f"{stage}_ended", True)

    def _save(self) -> None:
        beside = self.path.with_name(f"{self.path.name}.tmp.{os.getpid()}")
        beside.write_text(json.dumps(self.content, indent=1) + "\n")
        os.replace(beside, self.path)


def typed(value: Any) -> str:
    """A setting as the command line takes it."""
    if isinstance(value, tuple):
        parts = (part if isinstance(part, tuple) else (part,) for part in value)
        return ",".join(":".join(map(str, part)) for part in parts)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _widths(widths: Sequence[tuple[int, float]], limit: int) -> tuple[tuple[int, float], ...]:
    """Training widths no wider than the draft's block size, which is always among them."""
    kept = [(width, share) for width, share in widths if width < limit]
    rest = sum(share for width, share in widths if width >= limit)
    return (*kept, (limit, rest or 0.4))


def _step_seconds(network: DraftNetwork, target: TorchTarget, batches: Batches) -> float:
    """Seconds of one step, without changing the network: forward and backward of the widest."""
    loss = BlockLoss(network, target, batches.config)
    for step in range(2):
        began = time.monotonic()
        batch = {name: value.to(target.device) for name, value in batches[step].items()}
        sums = loss(batch)
        (sums.loss / sums.weight).backward()
        seconds = time.monotonic() - began
    network.zero_grad(set_to_none=True)
    return 1.1 * seconds


def _read_prompts(name: str) -> list[str]:
    """Prompts of a JSONL or parquet file, or of a hub data set's `train` split."""
    path = Path(name)
    if path.suffix in (".jsonl", ".gz"):
        if not path.is_file():
            raise FileNotFoundError(f"there is no prompt file {path}.")
        return questions(path)
    from datasets import load_dataset

    if path.suffix == ".parquet":
        rows = load_dataset("parquet", data_files=str(path), split="train")
    else:
        rows = load_dataset(name, split="train")
    texts = [question(row, f"{name}, row {number}") for number, row in enumerate(rows, 1)]
    if not texts:
        raise ValueError(f"{name} holds no prompts.")
    return texts


def _bundled_texts() -> list[str]:
    return _texts_of(str(DATA / "prompts" / name) for name in ("mini.jsonl",))


def _texts_of(files: Any) -> list[str]:
    """Every text of JSONL files, whatever its columns are called."""
    texts: list[str] = []
    for name in files:
        for row in read_jsonl(Path(name)):
            for value in row.values():
                parts = value if isinstance(value, list) else [value]
                texts += [part for part in parts if isinstance(part, str)]
    return texts


def _license(folder: Path) -> str | None:
    card_file = folder / "README.md"
    if not card_file.is_file():
        return None
    for line in card_file.read_text("utf-8", "replace").splitlines():
        if line.startswith("license:"):
            return line.partition(":")[2].strip()
    return None
