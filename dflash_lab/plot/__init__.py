"""From frames to figures: drawing only. Nothing is computed here, and no global state is touched.

Each function returns a `Figure` that carries its description in words (`alt`) and shows itself in
a notebook. Colour, marker and dashes say the same thing, so that any one of them suffices. `style`
holds what they share, `curves` figures against block size, `blocks` those of what blocks accepted,
`rounds` those of single blocks, `compare` those that set things side by side, `beside` what was
predicted or published beside what was measured, `replayed` replays and policies, `audited` margins,
`learning` a training, `files` the forms on disk.
"""

from dflash_lab.plot.audited import margins
from dflash_lab.plot.beside import predicted, published
from dflash_lab.plot.blocks import lengths, survival
from dflash_lab.plot.compare import break_even, depth, heatmap, memory, pairs, tasks
from dflash_lab.plot.curves import acceptance, cost, throughput
from dflash_lab.plot.files import encoded, save
from dflash_lab.plot.learning import training
from dflash_lab.plot.replayed import clipped, policies
from dflash_lab.plot.rounds import conditional, race, stages, timeline
from dflash_lab.plot.style import (
    DRAWING,
    FAINT,
    LOOKS,
    SIZES,
    Picture,
    alt_text,
    house_style,
    shown,
    sized,
    spread,
    to_pdf,
    to_png,
    to_svg,
)

__all__ = [
    "DRAWING",
    "FAINT",
    "LOOKS",
    "SIZES",
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
    "margins",
    "memory",
    "pairs",
    "policies",
    "predicted",
    "published",
    "race",
    "save",
    "shown",
    "sized",
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
