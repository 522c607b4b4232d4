"""The command that trains a draft."""

from __future__ import annotations

from typing import Annotated

import typer

from dflash_lab.cli.flags import (
    Device,
    Dtype,
    app,
)
from dflash_lab.cli.printing import (
    say,
)
from dflash_lab.cli.settings import (
    given,
    whole_numbers,
    width_shares,
)


@app.command()
def train(
    target: Annotated[str, typer.Option("--target", "--model", help="Model folder or hub id.")],
    out: Annotated[str, typer.Option("--out", help="Folder for the draft.")] = "results/draft",
    work: Annotated[
        str | None, typer.Option(help="Folder for shards, features and checkpoints.")
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="Fit the whole run into this time.")] = None,
    prompts: Annotated[
        list[str] | None, typer.Option(help="JSONL or parquet file, or hub data set; may repeat.")
    ] = None,
    rows: Annotated[
        list[str] | None, typer.Option(help="JSONL of this target's answers; may repeat.")
    ] = None,
    forbidden: Annotated[
        list[str] | None, typer.Option(help="JSONL whose texts are kept out; may repeat.")
    ] = None,
    evaluate: Annotated[
        list[str] | None, typer.Option(help="JSONL of prompts for the card; may repeat.")
    ] = None,
    framed_prompts: Annotated[
        int | None, typer.Option(help="Requests about everyday things; 0 leaves them out.")
    ] = None,
    written_prompts: Annotated[
        int | None, typer.Option(help="Prompts that the target writes itself.")
    ] = None,
    answer_tokens: Annotated[
        int | None, typer.Option(help="Tokens of answers to write; 0 leaves it out.")
    ] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Of the answers; 0 is greedy.")] = None,
    slots: Annotated[int | None, typer.Option(help="Texts written at once.")] = None,
    held_out: Annotated[
        int | None, typer.Option(help="Prompts kept out of the fit, to measure it by.")
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(help="Draft to go on from, folder or hub id; else the target's last layers."),
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Layers of the draft.")] = None,
    block_size: Annotated[
        int | None, typer.Option(help="Largest block, the anchor included.")
    ] = None,
    taps: Annotated[
        str | None, typer.Option(help="Target layers to read, separated by commas.")
    ] = None,
    mask_token: Annotated[int | None, typer.Option(help="Id that stands for 'not known'.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    rows_a_step: Annotated[int | None, typer.Option(help="Answers that a step draws from.")] = None,
    labels_a_step: Annotated[
        int | None, typer.Option(help="Drafted tokens that a step learns from; more suit a GPU.")
    ] = None,
    widths: Annotated[
        str | None, typer.Option(help="Block sizes of the steps and their shares, as 4:0.2,16:0.8.")
    ] = None,
    learning_rate: Annotated[float | None, typer.Option(help="At its highest.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="adamw, or muon for the matrices.")] = None,
    average: Annotated[
        float | None, typer.Option(help="Decay of the averaged weights; 0 takes the last.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="Of draft positions: pace, or decay by position.")
    ] = None,
    soft: Annotated[
        float | None, typer.Option(help="Share of the loss against the target's likeliest tokens.")
    ] = None,
    evaluate_every: Annotated[
        int | None, typer.Option(help="Steps between held-out taus; 0 is ten of them in the fit.")
    ] = None,
    dtype: Dtype = None,
    device: Device = None,
    until: Annotated[
        str | None, typer.Option(help="Last stage: prompts, answers, features or fit.")
    ] = None,
) -> None:
    """Train a draft for a target; the same command goes on where it was stopped."""
    from dflash_lab.train.fit import FitConfig
    from dflash_lab.train.recipe import TrainConfig, train_draft

    fit = given(
        steps=steps,
        rows_a_step=rows_a_step,
        labels_a_step=labels_a_step,
        widths=None if widths is None else width_shares(widths),
        learning_rate=learning_rate,
        optimizer=optimizer,
        average=average,
        weights=weights,
        soft=soft,
        evaluate_every=evaluate_every,
    )
    several = {"prompts": prompts, "rows": rows, "forbidden": forbidden, "evaluate": evaluate}
    settings = given(
        work=work,
        minutes=minutes,
        framed_prompts=framed_prompts,
        written_prompts=written_prompts,
        answer_tokens=answer_tokens,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        slots=slots,
        held_out=held_out,
        draft=draft,
        layers=layers,
        block_size=block_size,
        taps=None if taps is None else whole_numbers("taps", taps),
        mask_token=mask_token,
        dtype=dtype,
        device=device,
        until=until,
    )
    lists = {name: tuple(values or ()) for name, values in several.items()}
    folder = train_draft(
        TrainConfig(target=target, out=out, fit=FitConfig(**fit), **lists, **settings), say
    )
    if folder is not None:
        typer.echo(folder)
