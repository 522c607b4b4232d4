"""The figure of a training: loss, held-out tau and accuracy."""

from __future__ import annotations

import pandas as pd
from matplotlib.ticker import PercentFormatter

from dflash_lab.plot.style import (
    LOOKS,
    SMALL,
    TINY,
    Picture,
    add_axes,
    add_caption,
    in_words,
    new_figure,
    styled,
)


@styled
def training(curve: pd.DataFrame) -> Picture:
    """Loss and held-out tau by step, and accuracy by draft position at the first and last look.

    `curve` is the table `curve.parquet` of a trained draft: step, name, slot, value.
    """
    fig = new_figure()
    by_name = {name: part.dropna(subset="value") for name, part in curve.groupby("name")}
    tau, loss = by_name["held-out tau"], by_name["loss"]
    gap, width = 0.5, fig.get_figwidth()
    part = (width - 3 * gap - 0.15) / 3  # inches of a panel
    starts = [gap + k * (part + gap) for k in range(3)]
    panels = [add_axes(fig, left=x, right=width - x - part, top=0.66) for x in starts]
    for axes, rows, look in ((panels[0], loss, LOOKS[0]), (panels[1], tau, LOOKS[1])):
        axes.plot(rows["step"], rows["value"], **look)
        axes.set_xlabel("step")
    names = ("loss (nats per token)", "held-out tau (tokens)", "accuracy in training")
    for axes, name in zip(panels, names, strict=True):
        axes.set_title(name, fontsize=SMALL)
    accuracy = by_name["accuracy"]
    looks = dict(zip((tau["step"].min(), tau["step"].max()), (LOOKS[3], LOOKS[2]), strict=True))
    for step, look in looks.items():
        rows = accuracy[accuracy["step"] == step]
        panels[2].plot(rows["slot"], rows["value"], label=f"step {step}", **look)
    panels[2].set(xlabel="draft position", ylim=(0, None))
    panels[2].yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0, symbol=" %"))
    panels[2].legend(fontsize=TINY, frameon=False)
    best = tau.loc[tau["value"].idxmax()]
    title = f"Held-out tau {best['value']:.2f} at step {best['step']}"
    fig.text(starts[0] / width, 0.94, title, fontsize=10)
    add_caption(fig, ["Tau: walks over held-out answers. Accuracy: the steps before a look"])
    fig.alt = in_words(
        "Training by step",
        "loss: " + ", ".join(f"{v:.2f}" for v in loss["value"]),
        "held-out tau: " + ", ".join(f"{v:.2f}" for v in tau["value"]),
        f"steps {', '.join(map(str, tau['step']))}",
    )
    return fig
