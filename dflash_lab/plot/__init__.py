"""From frames to figures: drawing only. Nothing is computed here, and no global state is touched.

Each function returns a `Figure` that carries its description in words (`alt`) and shows itself in
a notebook. Colour, marker and dashes say the same thing, so that any one of them suffices. `style`
holds what they share, `curves` figures against block size, `blocks` those of what blocks accepted,
`learning` that of a training, `files` what is written to disk.
"""

from dflash_lab.plot.blocks import lengths, survival
from dflash_lab.plot.curves import acceptance, cost, throughput
from dflash_lab.plot.files import save, save_figures
from dflash_lab.plot.learning import training
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
    "cost",
    "house_style",
    "lengths",
    "save",
    "save_figures",
    "shown",
    "spread",
    "survival",
    "throughput",
    "to_pdf",
    "to_png",
    "to_svg",
    "training",
]
