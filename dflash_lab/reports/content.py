"""What a report says, as plain values for its template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from markupsafe import Markup

from dflash_lab.analyse import Choice, drift, looping, records
from dflash_lab.config import window_name
from dflash_lab.exactness import read_audits
from dflash_lab.panels import (
    Answer,
    Image,
    Panels,
    facts,
    facts_html,
    place_name,
    written,
)
from dflash_lab.reports.gallery import gallery
from dflash_lab.reports.tables import (
    CELL_COLUMNS,
    MORE_COLUMNS,
    SURVIVAL_COLUMNS,
    Table,
    said,
)
from dflash_lab.store import Run
from dflash_lab.tokens import KINDS, legend_html, text_html, toggle_html
from dflash_lab.viewer import NOTHING, view

MOST_VALUES = 12  # of one setting that are listed one by one
ARM = ("engine", "backend", "dtype")


def content(run: Run) -> dict[str, Any]:
    """Everything the template shows."""
    panels = Panels(run)
    return {
        "title": run.path.resolve().name,
        "subtitle": subtitle(panels),
        "answers": [worded(found, panels) for found in panels.answers],
        "exactness": exactness(run),
        "looped": looping(panels.rows.values()),
        "failed": [
            {"cell": cell.id, "what": asked_of(cell.request), "error": cell.error}
            for cell in run.failed
        ],
        "missing": missing(run, panels.left_out),
        **explorer(panels),
        **gallery(run, panels),
        "settings": settings(run),
        "provenance": provenance(run),
        "measured": measured(panels),
        "order": order(run),
        "drift": told_drift(panels),
        "tables": tables(panels),
    }


def tables(panels: Panels) -> dict[str, Table]:
    """Every number of the report, by heading."""
    rows = panels.rows.values()
    return {
        "Throughput and acceptance": Table.of(CELL_COLUMNS, rows),
        "Further figures of every cell": Table.of(MORE_COLUMNS, rows),
        "Survival by draft position": Table.of(SURVIVAL_COLUMNS, records(panels.survival)),
    }


# The answer


def subtitle(panels: Panels) -> str:
    """What was measured, in one line."""
    cells = panels.run.cells
    target = ", ".join(dict.fromkeys(str(cell.request["target"]) for cell in cells))
    draft = ", ".join(dict.fromkeys(str(c.request["draft"]) for c in cells if c.request["draft"]))
    parts = [
        f"target {target}",
        f"draft {draft}" if draft else "no draft",
        f"{_span(cell.request['prompts']['count'] for cell in cells)} prompts",
        f"up to {_span(cell.request['max_new_tokens'] for cell in cells)} new tokens",
        f"{len(cells)} cells",
    ]
    return " · ".join(parts)


def _span(values: Iterable[int]) -> str:
    low, *rest = sorted(set(values))
    return f"{low} to {rest[-1]}" if rest else str(low)


def worded(found: Answer, panels: Panels) -> dict[str, Any]:
    """One hardware class's answer: the sentence, and what it rests on."""
    choice = found.choice
    if choice is None:
        lead = f"No recommendation: {found.problem}"
        return {"hardware": found.hardware, "sentence": lead, "points": [], "cell": None}
    return {
        "hardware": found.hardware,
        "sentence": choice.sentence,
        "points": [*library_point(choice), *certainty_points(choice)],
        "cell": choice.cell,
    }


def library_point(choice: Choice) -> list[str]:
    if choice.speedup_library is None:
        return ["The library's own generator was not measured."]
    return [
        f"Against the library's own generator in {choice.library_dtype} "
        f"({written(choice.library_tokens_per_s)} tokens/s): {choice.speedup_library:.2f}x"
        f"{_ends(choice.speedup_library_low, choice.speedup_library_high)}."
    ]


def certainty_points(choice: Choice) -> list[str]:
    """How sure the choice is, and what is as good."""
    points = []
    if choice.prompts == 1:
        points.append("One prompt only: there is no interval, and other prompts may differ.")
    else:
        share = f"{choice.p_best:.0%}".replace("%", " %")
        points.append(f"It is the fastest in {share} of the resamples of the prompts.")
    if choice.near:
        near = ", ".join(f"{other.label} (cell {other.cell})" for other in choice.near)
        points.append(f"Within 2 % of it: {near}.")
    if choice.gain_held_out is not None:
        points.append(
            f"Chosen on some prompts and tried on the others, the gain over plain decoding is "
            f"{choice.gain_held_out:.2f}x."
        )
    return points


def _ends(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"


def exactness(run: Run) -> dict[str, Any]:
    """What the audits of the run found, and which prompts parted, if any."""
    audits = read_audits(run)
    if not audits:
        sentence = "Whether the draft changes the text was not audited in this run."
        return {"sentence": sentence, "differences": [], "rest": ""}
    told = "; ".join(made.sentence for made in audits)
    measured = {cell.dtype for cell in run.cells if cell.block_size > 1}
    missing = sorted(measured - {made.dtype for made in audits})
    return {
        "sentence": f"{told[0].upper()}{told[1:]}.",
        "differences": [
            {"dtype": made.dtype, "prompt": row.prompt_id, "told": row.told}
            for made in audits
            for row in made.prompts
            if row.label != "equal"
        ],
        "rest": f"{' and '.join(missing)} was not audited." if missing else "",
    }


def missing(run: Run, left_out: int) -> str:
    """How many cells are in no figure, empty where all are."""
    reasons = (
        (len(run.failed), "failed"),
        (len(run.unfinished), "unfinished"),
        (left_out, "over other prompts, of another draft or with other settings"),
    )
    parts = [
        f"{count} {'cell' if count == 1 else 'cells'} {what}" for count, what in reasons if count
    ]
    return f"{' and '.join(parts)}: in no figure here." if parts else ""


def asked_of(request: Mapping[str, Any]) -> str:
    """A request in a few words."""
    place = place_name(request.get("block_size", "?"), request.get("draft_window"))
    return f"{request.get('engine', '?')}, {request.get('dtype', '?')}, {place}"


# The two sliders, and the text


def explorer(panels: Panels) -> dict[str, Any]:
    """What the sliders show; `grid` is None where no cell drafts anything to look at."""
    if panels.grid is None:
        return {"grid": None, "data": {}}
    grid, start = panels.grid, panels.start
    cells = list(grid.cells.values())
    first = panels.traces.prompts[0]
    shown = panels.run.cell(start.cell).request
    return {
        "grid": {
            "arm": ", ".join((*(shown[n] for n in ARM), panels.main.hardware)),
            "sizes": [str(size) for size in grid.block_sizes],
            "windows": [window_name(window) for window in grid.draft_windows],
            "size": grid.block_sizes.index(start.block_size),
            "window": grid.draft_windows.index(start.draft_window),
            "start": start.cell,
            "place": place_name(start.block_size, start.draft_window),
            "words": start.words,
            "pictures": panels.pictures(start.cell),
            "readouts": {cell: Markup(facts_html(facts(panels.rows[cell]))) for cell in cells},
            "prompts": [prompt.label for prompt in panels.traces.prompts],
            "text": _text(panels, start.cell, first.key),
        },
        "data": {
            "positions": [
                [_position(panels, size, window) for window in grid.draft_windows]
                for size in grid.block_sizes
            ],
            **frames({cell: panels.pictures(cell) for cell in cells}),
            "legend": KINDS,
            "traces": {cell: _views(panels, cell) for cell in cells},
        },
    }


def _position(panels: Panels, block_size: int, window: int | None) -> dict[str, Any]:
    found = panels.grid.find(block_size, window)
    place = place_name(found.block_size, found.draft_window)
    return {"cell": found.cell, "place": place, "words": found.words, "measured": found.measured}


def frames(pictures: Mapping[str, Sequence[Image]]) -> dict[str, Any]:
    """Every cell's pictures, each as places in one table of lines: they have most in common."""
    lines: dict[str, int] = {}

    def packed(image: Image) -> dict[str, Any]:
        places = [lines.setdefault(line, len(lines)) for line in image.svg.splitlines()]
        return {"alt": image.alt, "svg": places}

    made = {cell: [packed(image) for image in images] for cell, images in pictures.items()}
    return {"pictures": made, "lines": list(lines)}


LACKING = "This cell does not hold this prompt."


def _views(panels: Panels, cell: str) -> list[dict[str, Any]]:
    """A trace a prompt, as the viewer's script takes it."""
    traces = (panels.traces.of(cell, prompt.key) for prompt in panels.traces.prompts)
    return [NOTHING | {"note": LACKING} if trace is None else view(trace) for trace in traces]


def _text(panels: Panels, cell: str, key: str) -> Markup:
    """What stands there until the script does, and in its place where scripts do not run."""
    trace = panels.traces.of(cell, key)
    if trace is None:
        return Markup(f'<p class="empty">{LACKING}</p>')
    return Markup(f"{legend_html()}{toggle_html()}{text_html(trace)}")


# How it was measured


def settings(run: Run) -> list[tuple[str, str]]:
    """Every setting of the cells' requests: the value, or the values."""
    return _listed([flat(cell.request) for cell in run.cells])


def provenance(run: Run) -> list[tuple[str, str]]:
    """Machine, versions and dates, as the cells recorded them."""
    return _listed([flat(cell.provenance) for cell in run.cells])


def flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested mappings as one, names joined by a space."""
    found: dict[str, str] = {}
    for name, entry in value.items():
        label = f"{prefix}{name}".replace("_", " ")
        if isinstance(entry, Mapping):
            found |= flat(entry, f"{label} ")
        elif isinstance(entry, list):
            found[label] = ", ".join(map(str, entry)) or "none"
        else:
            found[label] = said(entry)
    return found


def _listed(rows: Sequence[Mapping[str, str]]) -> list[tuple[str, str]]:
    names = dict.fromkeys(name for row in rows for name in row)
    return [(name, _values([row[name] for row in rows if name in row])) for name in names]


def _values(values: Sequence[str]) -> str:
    different = list(dict.fromkeys(values))
    if len(different) <= MOST_VALUES:
        return "; ".join(different)
    return f"{len(different)} values, {different[0]} to {different[-1]}"


VERSIONS = ("torch", "transformers", "mlx", "mlx-lm", "python")  # the ones that times depend on


def measured(panels: Panels) -> str:
    """Machine, versions and day of the cells that the first answer is about, in one line."""
    cells = [cell for cell in panels.run.cells if cell.id in set(panels.frame["cell"])]
    backends = {cell.request["backend"] for cell in cells}
    kept = [name for name in VERSIONS if "mlx" in backends or not name.startswith("mlx")]
    told = (
        f"{name} {' and '.join(sorted(found))}"
        for name in kept
        if (found := {v for cell in cells if (v := cell.provenance["versions"].get(name))})
    )
    days = sorted({cell.provenance["started_utc"][:10] for cell in cells})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return f"Measured on {panels.main.hardware}, with {', '.join(told)}; {when}."


def told_drift(panels: Panels) -> str:
    """How times moved while the cells of the first answer were measured."""
    cells = tuple(cell for cell in panels.run.cells if cell.id in set(panels.frame["cell"]))
    return drift(replace(panels.run, cells=cells)).sentence


def order(run: Run) -> str:
    """Whether the cells were measured beside each other, from the stored places in the sequence."""
    places: dict[str, list[int]] = {}
    for row in run.prompts().select(["cell", "order"]).to_pylist():
        places.setdefault(row["cell"], []).append(row["order"])
    if len(places) < 2:
        return "There is one cell only."
    if max(map(min, places.values())) < min(map(max, places.values())):
        return "The cells were interleaved: each had begun before any had ended."
    return "The cells were not all interleaved: some ended before others began."
