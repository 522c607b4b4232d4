"""Fitting a draft: random anchors, the decoding mask, weighted loss, checkpoints that resume."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dflash_lab.backends.torch_anchors import accepted_counts, walk
from dflash_lab.backends.torch_model import DraftNetwork
from dflash_lab.backends.torch_target import TorchTarget
from dflash_lab.train.features import FeatureCache
from dflash_lab.train.rows import Row

IGNORED = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class FitConfig:
    """Settings of one fit; the defaults made the embedded draft."""

    steps: int = 2400
    rows_a_step: int = 8
    labels_a_step: int = 1440  # sets the anchors a row, so that every width costs the same
    widths: tuple[tuple[int, float], ...] = ((4, 0.2), (8, 0.4), (16, 0.4))  # width, share of steps
    learning_rate: float = 6e-4
    warm_up: float = 0.04
    weight_decay: float = 0.01
    clip: float = 1.0
    soft: float = 0.5  # share of the loss against the target's likeliest tokens
    pace: float = 0.5  # D-PACE's alpha
    frequent: int = 6144  # tokens always in the loss's vocabulary; plus labels and a random part
    sampled: int = 2048
    seed: int = 0
    checkpoint_s: float = 60.0
    evaluate_every: int = 300
    evaluation_block: int = 8


@dataclass(slots=True)
class Progress:
    """Where a fit stands; stored with every checkpoint."""

    step: int = 0
    curve: list[dict[str, int | float]] = field(default_factory=list)
    losses: float = 0.0  # sums since the last row of the curve
    first_right: float = 0.0
    seen: int = 0


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


def block_loss(
    logits: Float[Tensor, "blocks drafted vocab"],
    labels: Int[Tensor, "blocks drafted"],
    soft_ids: Int[Tensor, "blocks drafted likeliest"],
    soft_probabilities: Float[Tensor, "blocks drafted likeliest"],
    soft: float,
    alpha: float,
) -> tuple[Float[Tensor, ""], Float[Tensor, "blocks drafted"]]:
    """Weighted cross entropy in nats per drafted token, and whether each one was right.

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
    weights = pace_weights((-hard).detach().exp(), counted, alpha)
    loss = (weights * ((1 - soft) * hard + soft * distilled)).sum() / weights.sum()
    return loss, (logits.argmax(-1) == labels).to(logits.dtype)


def warm_start(network: DraftNetwork, target: TorchTarget) -> None:
    """Begin as the target's last layers, reading the last tap (for targets of the Llama kind).

    With `fc` picking the last tap and `hidden_norm` the first copied layer's input norm, that
    layer's context keys and values are the target's own, but for the norm on keys.
    """
    copied = list(target.layers)[-len(network.layers) :]
    hidden = network.config.hidden_size
    with torch.no_grad():
        network.fc.weight.zero_()
        network.fc.weight[:, -hidden:] = torch.eye(hidden)
        network.hidden_norm.weight.copy_(copied[0].input_layernorm.weight)
        network.norm.weight.copy_(target.model.base_model.norm.weight)
        for layer, source in zip(network.layers, copied, strict=True):
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                getattr(layer.self_attn, name).weight.copy_(getattr(source.self_attn, name).weight)
            for name in ("gate_proj", "up_proj", "down_proj"):
                getattr(layer.mlp, name).weight.copy_(getattr(source.mlp, name).weight)
            layer.input_layernorm.weight.copy_(source.input_layernorm.weight)
            layer.post_attention_layernorm.weight.copy_(source.post_attention_layernorm.weight)
            for norm, projection in (
                (layer.self_attn.q_norm, source.self_attn.q_proj),
                (layer.self_attn.k_norm, source.self_attn.k_proj),
            ):
                # What the new norm divides by, on average, for rows of unit size.
                scaled = projection.weight.float() * source.input_layernorm.weight.float()
                per_head = scaled.square().sum(-1).view(-1, network.config.head_dim)
                norm.weight.fill_(per_head.mean(-1).sqrt().mean().item())


class Batches:
    """Training batches by step number alone, so that a resumed fit sees the same ones."""

    def __init__(self, rows: Sequence[Row], cache: FeatureCache, config: FitConfig, vocab: int):
        self.rows, self.cache, self.config, self.vocab = rows, cache, config, vocab
        counts = torch.zeros(vocab, dtype=torch.long)
        for row in rows:
            counts += torch.bincount(torch.tensor(row.answer_ids), minlength=vocab)
        self.frequent = counts.topk(min(config.frequent, vocab)).indices

    def __len__(self) -> int:
        return len(self.rows) // self.config.rows_a_step

    def rows_of(self, step: int) -> list[int]:
        """Rows of a step: every row once an epoch, those of like length together."""
        epoch, place = divmod(step, len(self))
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.rows), generator=generator).tolist()
        size, pool = self.config.rows_a_step, []
        for at in range(0, len(order), size * 16):
            part = sorted(order[at : at + size * 16], key=lambda i: len(self.rows[i].answer_ids))
            pool += [part[i : i + size] for i in range(0, len(part) - size + 1, size)]
        picks = torch.randperm(len(pool), generator=generator).tolist()
        return pool[picks[place % len(pool)]]

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
        soft_ids = torch.full((len(chosen), anchors_a_row, width - 1, 16), IGNORED)
        soft = torch.zeros(len(chosen), anchors_a_row, width - 1, 16)
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


def loss_of(
    network: DraftNetwork, target: TorchTarget, batch: dict[str, Tensor], config: FitConfig
) -> tuple[Tensor, Tensor]:
    """The loss of one batch, and which drafted tokens were right [blocks, drafted]."""
    seq, anchors, drafted = batch["labels"].shape
    tokens = torch.full((seq, anchors, drafted + 1), network.config.mask_token)
    tokens[:, :, 0] = batch["first"]
    positions = torch.arange(batch["features"].shape[1])
    with torch.autocast("cpu", torch.bfloat16):
        context = network.context(batch["features"], positions)
        embedded = target.embedding(tokens)
        states = network(embedded, batch["anchors"], context, positions)[:, :, 1:]
        logits = nn.functional.linear(states, target.head.weight[batch["vocabulary"]])
    return block_loss(
        logits.float().flatten(0, 1),
        batch["labels"].flatten(0, 1),
        batch["soft_ids"].flatten(0, 1),
        batch["soft"].flatten(0, 1),
        config.soft,
        config.pace,
    )


def learning_rate(config: FitConfig, step: int) -> float:
    """Linear warm-up, then a cosine to zero."""
    warm = max(1, int(config.warm_up * config.steps))
    if step < warm:
        return config.learning_rate * (step + 1) / warm
    done = (step - warm) / max(1, config.steps - warm)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


def fit(
    folder: Path,
    network: DraftNetwork,
    target: TorchTarget,
    batches: Batches,
    held_out: Callable[[DraftNetwork], dict[str, float]],
    config: FitConfig,
    progress: Callable[[str], None] = lambda line: None,
) -> Progress:
    """Run or resume the fit whose checkpoint lies in `folder`; the network is changed in place."""
    folder.mkdir(parents=True, exist_ok=True)
    optimizer = torch.optim.AdamW(
        network.parameters(),
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        betas=(0.9, 0.95),
    )
    state = _resume(folder, network, optimizer, config)
    saved_at = time.monotonic()
    while state.step < config.steps:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, state.step)
        loss, right = loss_of(network, target, batches[state.step], config)
        if not torch.isfinite(loss):
            raise FloatingPointError(
                f"the loss is {loss.item()} at step {state.step}. "
                f"The last checkpoint in {folder} is from before; lower the learning rate."
            )
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        state.step += 1
        state.losses += loss.item()
        state.first_right += right[:, 0].mean().item()
        state.seen += 1
        if state.step % config.evaluate_every == 0 or state.step == config.steps:
            state.curve.append({**_means(state), **held_out(network)})
            progress(json.dumps(state.curve[-1]))
        if time.monotonic() - saved_at > config.checkpoint_s or state.step == config.steps:
            _save(folder, network, optimizer, state, config)
            saved_at = time.monotonic()
    return state


def _means(state: Progress) -> dict[str, int | float]:
    row = {
        "step": state.step,
        "loss": state.losses / state.seen,
        "first_right": state.first_right / state.seen,
    }
    state.losses, state.first_right, state.seen = 0.0, 0.0, 0
    return row


def held_out_tau(
    target: TorchTarget, rows: Sequence[Row], cache: FeatureCache, first_index: int, block_size: int
) -> Callable[[DraftNetwork], dict[str, float]]:
    """A function that walks the held-out answers with the draft as it stands."""

    def measure(network: DraftNetwork) -> dict[str, float]:
        accepted: list[int] = []
        for offset, row in enumerate(rows):
            features, _, _ = cache.row(first_index + offset)
            tokens = torch.tensor(row.prompt_ids + row.answer_ids)
            with torch.autocast("cpu", torch.bfloat16):
                counts = accepted_counts(
                    network,
                    target.embedding,
                    target.head,
                    features,
                    tokens,
                    len(row.prompt_ids),
                    block_size,
                )
            accepted += walk(counts)
        share = [sum(a >= k for a in accepted) / len(accepted) for k in range(1, block_size)]
        return {"tau": 1 + sum(share), "first": share[0], "second": share[1]}

    return measure


def _save(
    folder: Path,
    network: DraftNetwork,
    optimizer: torch.optim.Optimizer,
    state: Progress,
    config: FitConfig,
) -> None:
    beside = folder / f"checkpoint.tmp.{os.getpid()}"
    content = {
        "network": network.state_dict(),
        "optimizer": optimizer.state_dict(),
        "state": asdict(state),
        "config": asdict(config),
    }
    torch.save(content, beside)
    os.replace(beside, folder / "checkpoint.pt")


def _resume(
    folder: Path, network: DraftNetwork, optimizer: torch.optim.Optimizer, config: FitConfig
) -> Progress:
    path = folder / "checkpoint.pt"
    if not path.exists():
        return Progress()
    content = torch.load(path, weights_only=True)
    if content["config"] != asdict(config):
        raise ValueError(f"{path} was made with other settings. Delete it or name another folder.")
    network.load_state_dict(content["network"])
    optimizer.load_state_dict(content["optimizer"])
    return Progress(**content["state"])
