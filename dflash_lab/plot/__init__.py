"""From frames to figures: drawing only. Nothing is computed here, and no global state is touched.

Each function returns a `Figure` that carries its description in words (`alt`) and shows itself in
a notebook. Colour, marker and dashes say the same thing, so that any one of them suffices. `style`
holds what they share, `curves` figures against block size, `blocks` those of what blocks accepted,
`rounds` those of single blocks, `compare` those that set things side by side, `replayed` those of
replays, `learning` that of a training, `files` the forms on disk.
"""

from dflash_lab.plot.blocks import lengths, survival
from dflash_lab.plot.compare import break_even, depth, heatmap, memory, pairs, tasks
from dflash_lab.plot.curves import acceptance, cost, throughput
from dflash_lab.plot.files import encoded, save
from dflash_lab.plot.learning import training
from dflash_lab.plot.replayed import clipped
from dflash_lab.plot.rounds import conditional, race, stages, timeline
from dflash_lab.plot.style import (
    DRAWING,
    FAINT,
    LOOKS,
    Picture,
    alt_text,
    house_style,
    shown,
    spread,
    to_pdf,
    to_png,
    to_svg,
)

__all__ = [
    "DRAWING",
    "FAINT",
    "LOOKS",
    "Picture",
    "acceptance",
    "alt_text",
    "break_even",
    "clipped",
    "conditional",
    "cost",
    "depth",
    "encoded",
    "heatmap",
    "house_style",
    "lengths",
    "memory",
    "pairs",
    "race",
    "save",
    "shown",
    "spread",
    "stages",
    "survival",
    "tasks",
    "throughput",
    "timeline",
    "to_pdf",
    "to_png",
    "to_svg",
    "training",
]
