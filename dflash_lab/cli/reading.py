"""Commands that read a run: the choice, pages and figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dflash_lab.cli.flags import (
    Draft,
    app,
)
from dflash_lab.cli.printing import (
    say,
)


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
