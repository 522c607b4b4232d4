"""The flags that several commands share, and the program that they belong to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="dflash-lab",
    help="Measure DFlash speculative decoding and choose a block size.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # help in plain columns: loading rich would take half the time
)

BlockSize = Annotated[
    str | None,
    typer.Option(
        "--block-size", help="Tokens in a block, the anchor included; 1 is plain decoding."
    ),
]

Window = Annotated[
    str | None,
    typer.Option(
        "--draft-sliding-window-size",
        "--draft-window",
        help="Committed positions the draft may see; without it, all.",
    ),
]

PairName = Annotated[
    str | None, typer.Option("--pair", help="A pair that comes with the project; smollm2.")
]

Target = Annotated[
    str | None, typer.Option("--model", "--target", help="Target: a model folder or a hub id.")
]

Draft = Annotated[
    str | None, typer.Option("--draft-model", "--draft", help="Draft: a folder or a hub id.")
]

Dtype = Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")]

Device = Annotated[
    str | None, typer.Option(help="auto, cpu; with torch cuda or mps, with mlx gpu.")
]

Backend = Annotated[str | None, typer.Option(help="What runs the pair: torch or mlx.")]

DraftBits = Annotated[
    int | None, typer.Option("--draft-bits", help="4 or 8 quantises the draft; mlx only.")
]

Policies = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        help="Beside blocks of one size: fixed, confidence:threshold=0.5, survival (with --costs), "
        "back-off:start=8,ceiling=16, or MODULE:NAME; may repeat.",
    ),
]

BlockSizes = Annotated[
    str | None,
    typer.Option("--block-sizes", "--block-size", help="Sizes, separated by commas."),
]

Windows = Annotated[
    str | None,
    typer.Option(
        "--draft-windows",
        "--draft-sliding-window-size",
        help="Windows, separated by commas; 'full' is no window.",
    ),
]

Dataset = Annotated[
    str | None,
    typer.Option(
        "--prompts",
        "--dataset",
        help="mini, gsm8k, math500, humaneval, mbpp, mt-bench, hf:org/name:config:split@revision, "
        "a .jsonl, .parquet or .csv file, or gsm8k=FILE for a file of such rows.",
    ),
]

Template = Annotated[
    str | None,
    typer.Option(help="Makes the prompt of a row's columns, as in '{question} Be brief.'"),
]

RandomState = Annotated[
    int | None, typer.Option("--random-state", help="Draws which prompts; else as in the file.")
]

MaxPrompts = Annotated[
    int | None, typer.Option("--max-prompts", "--max-samples", help="Take the first so many.")
]

Temperature = Annotated[float | None, typer.Option(help="Above 0 draws tokens; 0 is greedy.")]

TopK = Annotated[int | None, typer.Option("--top-k", help="So many of the likeliest tokens.")]

TopP = Annotated[float | None, typer.Option("--top-p", help="The likeliest tokens up to this sum.")]

MinP = Annotated[
    float | None, typer.Option("--min-p", help="No token below this share of the likeliest's.")
]

Penalty = Annotated[
    float | None, typer.Option("--repetition-penalty", help="Of tokens seen; 1 is none.")
]

Seed = Annotated[int | None, typer.Option(help="Of the draws; the same one repeats a run.")]

Rule = Annotated[str | None, typer.Option(help="match or rejection: which drafts are accepted.")]

Proposal = Annotated[str | None, typer.Option(help="argmax or sample: how drafts are chosen.")]

NewTokens = Annotated[int, typer.Option("--max-new-tokens", help="Longest output, in tokens.")]

Beyond = Annotated[
    bool, typer.Option("--beyond-trained", help="Insist on a block size above the trained one.")
]

Out = Annotated[Path, typer.Option("--out", help="Folder of the run.")]
