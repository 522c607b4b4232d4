"""Commands that measure into a run, or fetch one from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from dflash_lab.cli.flags import (
    Backend,
    Beyond,
    BlockSize,
    BlockSizes,
    Dataset,
    Device,
    Draft,
    DraftBits,
    Dtype,
    MaxPrompts,
    MinP,
    NewTokens,
    Out,
    PairName,
    Penalty,
    Policies,
    Proposal,
    RandomState,
    Rule,
    Seed,
    Target,
    Temperature,
    Template,
    TopK,
    TopP,
    Window,
    Windows,
    app,
)
from dflash_lab.cli.printing import (
    end_sweep,
    figure,
    print_benchmark,
    print_cells,
    print_costs,
    progress_bar,
    say,
)
from dflash_lab.cli.settings import (
    asked_block_sizes,
    decode_config,
    given,
    one_backend,
    pair_or_draft,
    policies_of,
    which_pair,
    whole_numbers,
    window_of,
    windows_of,
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
    from dflash_lab import exactness, load
    from dflash_lab.prompts import load_prompts
    from dflash_lab.store import open_run

    settings = decode_config(
        block_size, draft_window, max_new_tokens, beyond_trained=beyond_trained
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
    from dflash_lab import benchmarking, store

    if as_json and markdown:
        raise ValueError("--json and --markdown are two forms of one answer; give one of them.")
    shared = given(
        backend=one_backend(engine, backend), dtype=dtype, device=device, draft_bits=draft_bits
    )
    spec = pair_or_draft(pair, target, draft, shared)
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
