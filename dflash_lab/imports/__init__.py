"""Traces from elsewhere in this project's frames: what a source does not tell stays missing.

`quantities` names what is counted, `reading`, `servers` and `decoders` read the forms, `frames`
makes long frames of them, `stored` puts them into a run.
"""

from dflash_lab.imports.forms import COUNTER_FORM, FORMS
from dflash_lab.imports.frames import Imported
from dflash_lab.imports.quantities import (
    SETTINGS,
    block_size_of,
    draft_rate_of,
    draft_share_of,
    setting_of,
    tau_of_counts,
    tau_of_filled_share,
    tokens_per_block_of,
)
from dflash_lab.imports.records import Counters, ImportFault, Request, Step
from dflash_lab.imports.stored import import_traces, save_import

__all__ = [
    "COUNTER_FORM",
    "FORMS",
    "SETTINGS",
    "Counters",
    "ImportFault",
    "Imported",
    "Request",
    "Step",
    "block_size_of",
    "draft_rate_of",
    "draft_share_of",
    "import_traces",
    "save_import",
    "setting_of",
    "tau_of_counts",
    "tau_of_filled_share",
    "tokens_per_block_of",
]
