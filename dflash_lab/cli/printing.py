"""What commands print: tables and results to stdout, progress and errors to stderr."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import typer

WIDE = 140  # columns of a table that goes to a file or a pipe


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


def drawn_line(request: Any) -> str:
    """How tokens were drawn, what repeats them included; nothing of greedy decoding."""
    if request.temperature == 0:
        return ""
    return (
        f"temperature {request.temperature:g} by the {request.rule} rule with "
        f"{request.proposal} proposals, seed {request.seed}, "
    )


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
