"""Fitting a draft: random anchors, the decoding mask, weighted loss, checkpoints that resume."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from jaxtyping import Float, Int
from torch import Tensor, nn

from dflash_lab.backends.torch_anchors import accepted_counts, walk
from dflash_lab.backends.torch_model import DraftNetwork
from dflash_lab.backends.torch_target import TorchTarget
from dflash_lab.config import number, one_of, whole
from dflash_lab.train.features import LIKELIEST, FeatureCache
from dflash_lab.train.rows import Row

IGNORED = -100
WEIGHTS = ("pace", "decay")
OPTIMIZERS = ("adamw", "muon")
GAMMA_AT, GAMMA = (2, 8, 10, 16), (1.0, 4.0, 5.0, 7.0)  # published for 8, 10 and 16


@dataclass(frozen=True, slots=True, kw_only=True)
class FitConfig:
    """Settings of one fit; what the defaults were chosen by stands in results/README.md."""

    steps: int = 14_000
    # Many small steps: for the same number of labels they brought more than few large ones.
    rows_a_step: int = 4
    labels_a_step: int = 360  # sets the anchors a row, so that every width costs the same
    widths: tuple[tuple[int, float], ...] = ((4, 0.5), (8, 0.3), (16, 0.2))  # width, share of steps
    optimizer: str = "adamw"  # "muon": for the matrices, AdamW for the rest
    learning_rate: float = 1.5e-3
    warm_up: float = 0.04
    weight_decay: float = 0.01
    clip: float = 1.0
    average: float = 0.0  # decay of the averaged weights; 0 keeps the last ones
    weights: str = "pace"  # of draft positions: D-PACE, or "decay" by position
    pace: float = 0.5  # D-PACE's alpha
    soft: float = 0.5  # share of the loss against the target's likeliest tokens
    frequent: int = 6144  # tokens always in the loss's vocabulary; plus labels and a random part
    sampled: int = 2048
    bfloat16: bool = True  # the recipe takes it back where the device is slower with it
    seed: int = 0
    checkpoint_s: float = 45.0
    evaluate_every: int = 0  # steps; 0 is ten times in the fit
    evaluation_block: int = 8
    patience: int = 4  # evaluations without a better held-out tau before the fit stops

    def __post_init__(self) -> None:
        one_of("optimizer", self.optimizer, OPTIMIZERS)
        one_of("weights", self.weights, WEIGHTS)
        for name in ("steps", "rows_a_step", "labels_a_step", "patience"):
            whole(name, getattr(self, name), 1, "")
        whole("evaluate_every", self.evaluate_every, 0, "It counts steps; 0 is ten in the fit.")
        number("learning_rate", self.learning_rate, "a number above 0", lambda rate: rate > 0)
        number("average", self.average, "a number from 0 and below 1", lambda decay: 0 <= decay < 1)
        number("soft", self.soft, "a number from 0 to 1", lambda share: 0 <= share <= 1)
        for width, share in self.widths:
            whole("width", width, 2, "It counts the anchor, so 2 drafts one token.")
            number("a width's share", share, "a number above 0", lambda part: part > 0)


@dataclass(slots=True)
class Progress:
    """Where a fit stands; stored with every checkpoint."""

    step: int = 0
    curve: list[dict[str, Any]] = field(default_factory=list)  # long form: step, name, slot, value
    best: float = 0.0  # held-out tau
    since_best: int = 0  # evaluations
    losses: list[float] = field(default_factory=list)  # since the last evaluation
    right: list[float] = field(default_factory=list)  # by draft position, since then
    counted: list[float] = field(default_factory=list)


def decay_weights(counted: Float[Tensor, "blocks drafted"]) -> Float[Tensor, "blocks drafted"]:
    """Draft position k weighs exp(-(k - 1) / gamma), gamma by block size (arXiv 2602.06036)."""
    drafted = counted.shape[-1]
    gamma = float(np.interp(drafted + 1, GAMMA_AT, GAMMA))
    return counted * torch.exp(-torch.arange(drafted, device=counted.device) / gamma)


def pace_weights(
    likelihood: Float[Tensor, "blocks drafted"],
    counted: Float[Tensor, "blocks drafted"],
    alpha: float,
) -> Float[Tensor, "blocks drafted"]:
    """D-PACE (arXiv 2605.18810): the weight of a position is what accepting it can still bring.

    s = (1 - alpha) * likelihood + alpha; w_j = sum over m >= j of the product of s up to m.
    Positions that are not counted multiply by one and add nothing.
    """
    s = (1 - alpha) * likelihood + alpha
    reach = torch.where(counted > 0, s, torch.ones_like(s)).cumprod(-1) * counted
    return reach.flip(-1).cumsum(-1).flip(-1) * counted


@dataclass(frozen=True, slots=True)
class LossSums:
    """Weighted cross entropy of a batch before its division, so that batches can be joined."""

    loss: Float[Tensor, ""]
    weight: Float[Tensor, ""]
    right: Float[Tensor, " drafted"]  # how often each position was right, of `counted`
    counted: Float[Tensor, " drafted"]


def block_loss(
    logits: Float[Tensor, "blocks drafted vocab"],
    labels: Int[Tensor, "blocks drafted"],
    soft_ids: Int[Tensor, "blocks drafted likeliest"],
    soft_probabilities: Float[Tensor, "blocks drafted likeliest"],
    config: FitConfig,
) -> LossSums:
    """Weighted cross entropy in nats per drafted token.

    A label of -100 weighs nothing, a soft id of -100 likewise. Raises ValueError where every label
    is -100: the mean would be 0 / 0, and training would go on.
    """
    counted = (labels != IGNORED).to(logits.dtype)
    if not counted.any():
        raise ValueError("every label is -100: no anchor has a successor. Check the rows' lengths.")
    safe = labels.clamp_min(0)[..., None]
    log_likelihood = logits.log_softmax(-1)
    hard = -log_likelihood.gather(-1, safe)[..., 0]
    share = soft_probabilities * (soft_ids != IGNORED)
    share = share / share.sum(-1, keepdim=True).clamp_min(1e-6)
    distilled = -(share * log_likelihood.gather(-1, soft_ids.clamp_min(0))).sum(-1)
    if config.weights == "pace":
        weights = pace_weights((-hard).detach().exp(), counted, config.pace)
    else:
        weights = decay_weights(counted)
    loss = weights * ((1 - config.soft) * hard + config.soft * distilled)
    right = (logits.argmax(-1) == labels).to(logits.dtype)
    return LossSums(loss.sum(), weights.sum(), right.sum(0), counted.sum(0))


def warm_start(network: DraftNetwork, target: TorchTarget) -> int:
    """Begin as the target's last layers, reading the last tap; how many tensors were copied.

    With `fc` picking the last tap and `hidden_norm` the first copied layer's input norm, that
    layer's context keys and values are the target's own, but for the norm on keys. What the target
    does not have in the draft's shape keeps its random start.
    """
    hidden, sources = network.config.hidden_size, list(target.layers)[-len(network.layers) :]
    with torch.no_grad():
        network.fc.weight.zero_()
        network.fc.weight[:, -hidden:] = torch.eye(hidden)
        copied = 0
        for layer, source in zip(network.layers, sources, strict=False):
            theirs = _effective_weights(source)
            copied += sum(
                _copy(weight, theirs.get(name)) for name, weight in layer.named_parameters()
            )
            if "self_attn.k_norm.weight" not in theirs and "self_attn.k_proj.weight" in theirs:
                _start_norms(layer, theirs, network.config.head_dim)
        first = _effective_weights(sources[0]).get("input_layernorm.weight")
        last = _effective_weights(target.model.base_model).get("norm.weight")
        copied += _copy(network.hidden_norm.weight, first) + _copy(network.norm.weight, last)
    return copied


def _effective_weights(module: nn.Module) -> dict[str, Tensor]:
    """Parameters by name; a norm's as what it multiplies by (some families store that less 1)."""
    weights = {name: value for name, value in module.named_parameters() if value.ndim}
    for name, part in module.named_modules():
        if type(part).__name__.endswith("RMSNorm") and f"{name}.weight" in weights:
            weights[f"{name}.weight"] = part(torch.ones_like(weights[f"{name}.weight"]))
    return weights


def _copy(weight: Tensor, source: Tensor | None) -> bool:
    if source is None or source.shape != weight.shape:
        return False
    weight.copy_(source)
    return True


def _start_norms(layer: nn.Module, theirs: dict[str, Tensor], head_dim: int) -> None:
    # What the draft's norm divides by, on average, for rows of unit size.
    for norm, name in ((layer.self_attn.q_norm, "q_proj"), (layer.self_attn.k_norm, "k_proj")):
        projection = theirs[f"self_attn.{name}.weight"].float()
        scaled = projection * theirs["input_layernorm.weight"].float()
        per_head = scaled.square().sum(-1).view(-1, head_dim)
        norm.weight.fill_(per_head.mean(-1).sqrt().mean().item())


class LossNotFinite(RuntimeError):
    """The loss became NaN or infinite; nothing after it would be worth keeping."""


class Batches:
    """Training batches by step number alone, so that a resumed fit sees the same ones."""

    def __init__(self, rows: Sequence[Row], cache: FeatureCache, config: FitConfig, vocab: int):
        self.rows, self.cache, self.config, self.vocab = rows, cache, config, vocab
        counts = torch.zeros(vocab, dtype=torch.long)
        for row in rows:
            counts += torch.bincount(torch.tensor(row.answer_ids), minlength=vocab)
        self.frequent = counts.topk(min(config.frequent, vocab)).indices
        self._epoch: tuple[int, list[list[int]]] = (-1, [])  # the one in hand, and its order

    def __len__(self) -> int:
        return len(self.rows) // self.config.rows_a_step

    def rows_of(self, step: int) -> list[int]:
        """Rows of a step: every row once an epoch, those of like length together."""
        epoch, place = divmod(step, len(self))
        if self._epoch[0] != epoch:
            self._epoch = epoch, self._order(epoch)
        order = self._epoch[1]
        return order[place % len(order)]

    def _order(self, epoch: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.rows), generator=generator).tolist()
        size, pool = self.config.rows_a_step, []
        for at in range(0, len(order), size * 16):
            part = sorted(order[at : at + size * 16], key=lambda i: len(self.rows[i].answer_ids))
            pool += [part[i : i + size] for i in range(0, len(part) - size + 1, size)]
        return [pool[i] for i in torch.randperm(len(pool), generator=generator).tolist()]

    def __getitem__(self, step: int) -> dict[str, Tensor]:
        config = self.config
        generator = torch.Generator().manual_seed(config.seed * 7_919 + 104_729 * (step + 1))
        widths, shares = zip(*config.widths, strict=True)
        width = widths[int(torch.multinomial(torch.tensor(shares), 1, generator=generator))]
        chosen = self.rows_of(step)
        anchors_a_row = max(1, config.labels_a_step // (len(chosen) * (width - 1)))
        texts = [self.rows[i].prompt_ids + self.rows[i].answer_ids for i in chosen]
        longest = max(map(len, texts))
        fused = self.cache.features.shape[1]
        features = torch.zeros(len(chosen), longest, fused, dtype=torch.bfloat16)
        anchors = torch.zeros(len(chosen), anchors_a_row, dtype=torch.long)
        labels = torch.full((len(chosen), anchors_a_row, width - 1), IGNORED)
        first = torch.zeros(len(chosen), anchors_a_row, dtype=torch.long)
        soft_ids = torch.full((len(chosen), anchors_a_row, width - 1, LIKELIEST), IGNORED)
        soft = torch.zeros(len(chosen), anchors_a_row, width - 1, LIKELIEST)
        for place, index in enumerate(chosen):
            text = torch.tensor(texts[place])
            states, likeliest, probabilities = self.cache.row(index)
            features[place, : len(text)] = states
            start, end = len(self.rows[index].prompt_ids), len(text) - 1
            order = torch.randperm(end - start, generator=generator)[:anchors_a_row]
            at = (start + order).sort().values
            anchors[place, : len(at)] = at
            first[place, : len(at)] = text[at]
            goal = at[:, None] + torch.arange(1, width)
            inside = goal <= end
            goal = goal.clamp_max(end)
            labels[place, : len(at)] = torch.where(inside, text[goal], IGNORED)
            soft_ids[place, : len(at)] = likeliest[goal - 1]  # row j gives the token at j + 1
            soft[place, : len(at)] = probabilities[goal - 1]
        random_part = torch.randint(self.vocab, (config.sampled,), generator=generator)
        kept = torch.cat((self.frequent, labels[labels != IGNORED], random_part)).unique()
        place_of = torch.full((self.vocab + 1,), IGNORED)  # the last entry stands for IGNORED
        place_of[kept] = torch.arange(len(kept))
        labels = labels.where(labels >= 0, self.vocab)
        soft_ids = soft_ids.where(soft_ids >= 0, self.vocab)
        return {
            "features": features,
            "anchors": anchors,
            "first": first,
            "vocabulary": kept,
            "labels": place_of[labels],
            "soft_ids": place_of[soft_ids],
            "soft": soft,
        }


class BlockLoss(nn.Module):
    """The network and its loss in one module, which is what several processes can share."""

    def __init__(self, network: DraftNetwork, target: TorchTarget, config: FitConfig):
        super().__init__()
        self.network, self.target, self.config = network, target, config

    def forward(self, batch: dict[str, Tensor]) -> LossSums:
        """The sums of one batch."""
        seq, anchors, drafted = batch["labels"].shape
        device = batch["features"].device
        tokens = torch.full(
            (seq, anchors, drafted + 1), self.network.config.mask_token, device=device
        )
        tokens[:, :, 0] = batch["first"]
        positions = torch.arange(batch["features"].shape[1], device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=self.config.bfloat16):
            features = batch["features"] if self.config.bfloat16 else batch["features"].float()
            context = self.network.context(features, positions)
            embedded = self.network.embed(self.target.embedding, tokens).to(features.dtype)
            states = self.network(embedded, batch["anchors"], context, positions)
            # Flat and contiguous: a product of the slice itself would be one for each block.
            drafts = states[:, :, 1:].flatten(0, 2)
            head = self.target.head.weight[batch["vocabulary"]]
            if not self.config.bfloat16:  # else there and back again: a tenth of a step
                head = head.to(drafts.dtype)
            logits = self.network.logits(nn.functional.linear(drafts, head))
        return block_loss(
            logits.float().view(seq * anchors, drafted, -1),
            batch["labels"].flatten(0, 1),
            batch["soft_ids"].flatten(0, 1),
            batch["soft"].flatten(0, 1),
            self.config,
        )


def learning_rate(config: FitConfig, step: int) -> float:
    """Linear warm-up, then a cosine to zero."""
    warm = max(1, int(config.warm_up * config.steps))
    if step < warm:
        return config.learning_rate * (step + 1) / warm
    done = (step - warm) / max(1, config.steps - warm)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


def optimizers(network: nn.Module, config: FitConfig) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for the matrices and AdamW for the norms."""
    matrices = [p for p in network.parameters() if p.ndim == 2 and config.optimizer == "muon"]
    others = [p for p in network.parameters() if p.ndim != 2 or config.optimizer == "adamw"]
    made: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            others,
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            betas=(0.9, 0.95),
            fused=True,  # one pass over the weights instead of some ten
        )
    ]
    if matrices:
        made.append(
            torch.optim.Muon(
                matrices,
                lr=config.learning_rate,
                weight_decay=config.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    return made


class Fit:
    """One fit under way: network, optimizers, averaged weights, progress and their checkpoint."""

    def __init__(
        self,
        folder: Path,
        network: DraftNetwork,
        target: TorchTarget,
        config: FitConfig,
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.network, self.config = folder, network, config
        self.accelerator = Accelerator(cpu=target.device.type == "cpu")
        self.optimizers = optimizers(network, config)
        self.loss = self.accelerator.prepare_model(BlockLoss(network, target, config))
        # Empty where nothing is averaged: the last weights are the average then.
        self.average = {
            name: value.clone() for name, value in network.state_dict().items() if config.average
        }
        self.state = Progress()
        self._resume()

    def step(self, batch: dict[str, Tensor]) -> None:
        """One optimizer step on this process's part of a batch."""
        part = self._part(batch)
        sums = self.loss(part)
        weight = self.accelerator.reduce(sums.weight.detach(), "sum")
        # Processes average their gradients, so the sum over all of them needs their number back.
        loss = sums.loss * self.accelerator.num_processes / weight
        value = self.accelerator.reduce(sums.loss.detach() / weight, "sum").item()
        if not math.isfinite(value):
            raise LossNotFinite(
                f"the loss is {value} at step {self.state.step}. The last checkpoint in "
                f"{self.folder} is from before; start again with a lower learning rate."
            )
        self.accelerator.backward(loss)
        nn.utils.clip_grad_norm_(self.network.parameters(), self.config.clip)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(self.config, self.state.step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._update_average()
        self.state.step += 1
        self._count(value, sums)

    def _part(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        mine = slice(self.accelerator.process_index, None, self.accelerator.num_processes)
        device = self.accelerator.device
        return {
            name: (value if name == "vocabulary" else value[mine]).to(device)
            for name, value in batch.items()
        }

    def _update_average(self) -> None:
        # Early on the average follows closely: it would remember the random start for long.
        step = self.state.step
        decay = min(self.config.average, (1 + step) / (10 + step))
        weights = self.network.state_dict()
        for name, value in self.average.items():
            value.lerp_(weights[name], 1 - decay)

    def _count(self, value: float, sums: LossSums) -> None:
        self.state.losses.append(value)
        right = self.accelerator.reduce(sums.right, "sum").tolist()
        counted = self.accelerator.reduce(sums.counted, "sum").tolist()
        for held, new in ((self.state.right, right), (self.state.counted, counted)):
            held += [0.0] * (len(new) - len(held))
            for slot, count in enumerate(new):
                held[slot] += count

    def evaluate(self, held_out: Callable[[DraftNetwork], list[float]]) -> str:
        """Add a point to the curve, and remember the weights where they are the best so far."""
        state, step = self.state, self.state.step
        with self._averaged():
            survival = held_out(self.network)
            tau = 1 + sum(survival)
            state.since_best += 1
            if tau > state.best or not self._best.exists():
                state.best, state.since_best = tau, 0
                self._write(self._best, self.network.state_dict())
        loss = sum(state.losses) / max(1, len(state.losses))
        row = {"step": step, "slot": None}
        state.curve += [
            {**row, "name": "loss", "value": loss},
            {**row, "name": "held-out tau", "value": tau},
        ]
        for slot, (right, counted) in enumerate(zip(state.right, state.counted, strict=True), 1):
            value = right / counted if counted else None
            state.curve.append({"step": step, "slot": slot, "name": "accuracy", "value": value})
        for slot, value in enumerate(survival, 1):
            state.curve.append(
                {"step": step, "slot": slot, "name": "held-out survival", "value": value}
            )
        state.losses, state.right, state.counted = [], [], []
        return f"step {step}: loss {loss:.3f}, held-out tau {tau:.3f} (best {state.best:.3f})"

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        if not self.average:
            yield
            return
        own = {name: value.clone() for name, value in self.network.state_dict().items()}
        self.network.load_state_dict(self.average)
        try:
            yield
        finally:
            self.network.load_state_dict(own)

    @property
    def finished(self) -> bool:
        return self.state.step >= self.config.steps or self.state.since_best >= self.config.patience

    def load_best(self) -> None:
        """Put the weights of the best held-out tau into the network."""
        self.network.load_state_dict(torch.load(self._best, weights_only=True))

    def save(self) -> None:
        """The whole state, atomically; what a resumed fit needs to go on as if nothing happened."""
        content = {
            "network": self.network.state_dict(),
            "average": self.average,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "state": asdict(self.state),
            "config": asdict(self.config),
        }
        self._write(self.folder / "checkpoint.pt", content)

    @property
    def _best(self) -> Path:
        return self.folder / "best.pt"

    def _write(self, path: Path, content: Any) -> None:
        if self.accelerator.is_main_process:
            beside = path.with_name(f"{path.name}.tmp.{os.getpid()}")
            torch.save(content, beside)
            os.replace(beside, path)

    def _resume(self) -> None:
        path = self.folder / "checkpoint.pt"
        if not path.exists():
            self._best.unlink(missing_ok=True)
            return
        content = torch.load(path, weights_only=True, map_location=self.accelerator.device)
        begun = content["config"]
        other = [
            f"{name} {begun.get(name)} (now {value})"
            for name, value in asdict(self.config).items()
            if begun.get(name) != value
        ]
        if other:
            raise ValueError(
                f"{path} was made with other settings: the fit was begun with {', '.join(other)}. "
                "Give the same settings to go on with it, delete it, or name another folder."
            )
        self.network.load_state_dict(content["network"])
        self.average = content["average"]
        for optimizer, stored in zip(self.optimizers, content["optimizers"], strict=True):
            optimizer.load_state_dict(stored)
        self.state = Progress(**content["state"])


def fit(
    folder: Path,
    network: DraftNetwork,
    target: TorchTarget,
    batches: Batches,
    held_out: Callable[[DraftNetwork], list[float]],
    config: FitConfig,
    progress: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """Run or resume the fit whose checkpoint lies in `folder`; its curve.

    The network ends with the weights of the best held-out tau. Several processes (started by
    accelerate) share every step and get one process's result, but for rounding.
    """
    run = Fit(folder, network, target, config)
    every = config.evaluate_every or max(1, config.steps // 10)
    if run.state.step and not run.finished:
        progress(f"going on from step {run.state.step} of {config.steps}")
    saved_at = time.monotonic()
    while not run.finished:
        run.step(batches[run.state.step])
        due = run.state.step % every == 0 or run.state.step == config.steps
        if due:
            progress(run.evaluate(held_out))
        if due or time.monotonic() - saved_at > config.checkpoint_s:
            run.save()
            saved_at = time.monotonic()
    run.load_best()
    return run.state.curve


def held_out_survival(
    target: TorchTarget,
    rows: Sequence[Row],
    cache: FeatureCache,
    first_index: int,
    block_size: int,
    bfloat16: bool = True,
) -> Callable[[DraftNetwork], list[float]]:
    """A function that walks the held-out answers with the draft as it stands.

    It gives the share of blocks in which at least k drafts were accepted, k = 1 and on.
    """

    def measure(network: DraftNetwork) -> list[float]:
        accepted: list[int] = []
        for offset, row in enumerate(rows):
            features, _, _ = cache.row(first_index + offset)
            tokens = torch.tensor(row.prompt_ids + row.answer_ids)
            with torch.autocast(target.device.type, torch.bfloat16, enabled=bfloat16):
                counts = accepted_counts(
                    network,
                    target.embedding,
                    target.head,
                    features.to(target.device, torch.bfloat16 if bfloat16 else torch.float32),
                    tokens.to(target.device),
                    len(row.prompt_ids),
                    block_size,
                )
            accepted += walk(counts)
        return [sum(a >= k for a in accepted) / len(accepted) for k in range(1, block_size)]

    return measure
