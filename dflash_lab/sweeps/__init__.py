"""A grid of block sizes and windows over a set of prompts, filled cell by cell into a run.

`planning` makes the cells, `pairs` loads what they need, `filling` decodes what is missing line by
line (`decodes`), `running` is the call around it, `progress` says how far it is.
"""

from dflash_lab.sweeps.filling import CellInUseWarning, seconds_left
from dflash_lab.sweeps.planning import prompts_of
from dflash_lab.sweeps.progress import ProgressLines, SweepProgress
from dflash_lab.sweeps.running import status, sweep

__all__ = [
    "CellInUseWarning",
    "ProgressLines",
    "SweepProgress",
    "prompts_of",
    "seconds_left",
    "status",
    "sweep",
]
