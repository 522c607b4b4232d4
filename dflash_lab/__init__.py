"""The workbench for block sizes in DFlash speculative decoding.

Every public name is imported on first use: `import dflash_lab` loads no framework.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "PairSpec": "config",
    "DecodeConfig": "config",
    "SweepConfig": "config",
    "Prompt": "prompts",
    "load_prompts": "prompts",
    "Trace": "trace",
    "tau": "trace",
    "load_pair": "load",
    "inspect_draft": "inspection",
    "stream": "decoding",
    "decode": "decoding",
    "audit": "exactness",
    "Run": "store",
    "open_run": "store",
    "sweep": "sweeps",
    "ProgressLines": "sweeps",
    "block_frame": "analyse",
    "prompt_frame": "analyse",
    "cell_frame": "analyse",
    "choose": "analyse",
    "paired_frame": "analyse",
    "drift": "analyse",
    "import_traces": "imports",
    "save_import": "imports",
    "acceptance_map": "replay",
    "replay_traces": "replay",
    "replay_frame": "replay",
    "acceptance_frame": "replay",
    "clip_frame": "replay",
    "policy_frame": "replay",
    "save_map": "replay",
    "load_map": "replay",
    "measure_costs": "costs",
    "read_costs": "costs",
    "recommend": "recommendation",
    "confirm": "recommendation",
    "lock_block_size": "locking",
    "unlock_block_size": "locking",
    "examine": "doctor",
    "explore": "explorer",
    "live": "live_panel",
    "show_trace": "viewer",
    "show_stored_trace": "viewer",
    "write_figures": "figures",
    "check_figures": "figures",
    "report": "reports",
    "compare": "reports",
    "export_notebook": "reports",
    "serve": "serving",
    "TrainConfig": "train.recipe",
    "train_draft": "train.recipe",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dflash_lab' has no attribute {name!r}")
    value = getattr(import_module(f"dflash_lab.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
