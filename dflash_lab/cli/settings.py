"""From the text of flags to settings of the library."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

VARIABLE = "DFLASH_BLOCK_SIZE"  # read here at the start of a command, and by serving at its own


def given(**settings: Any) -> dict[str, Any]:
    """The settings that a flag names."""
    return {name: value for name, value in settings.items() if value is not None}


def asked_block_size(flag: str | None) -> dict[str, Any]:
    """The block size of the flag, else of the variable, and its source, as settings."""
    from dflash_lab.decoding import choose_block_size

    size, source = choose_block_size(flag=flag, variable=os.environ.get(VARIABLE))
    return given(block_size=size, block_size_source=source)


def asked_block_sizes(flag: str | None) -> dict[str, Any]:
    """The block sizes of the flag, else the one of the variable, and their source, as settings."""
    asked = [asked_block_size(part) for part in ([None] if flag is None else flag.split(","))]
    sizes = tuple(one["block_size"] for one in asked if one)
    return (
        {"block_sizes": sizes, "block_size_source": asked[0]["block_size_source"]} if sizes else {}
    )


def one_backend(argument: str | None, flag: str | None) -> str | None:
    """The backend named by argument or flag; `transformers` is upstream's name for torch."""
    if argument is not None and flag is not None and argument != flag:
        raise ValueError(f"the backend is {argument!r} and --backend {flag!r}; give one.")
    named = argument or flag
    return "torch" if named == "transformers" else named


def decode_config(
    block_size: str | None, draft_window: str | None, max_new_tokens: int, **settings: Any
) -> Any:
    """How to decode, block size and window as their flags say."""
    from dflash_lab.config import DecodeConfig

    return DecodeConfig(
        **asked_block_size(block_size),
        draft_window=window_of(draft_window),
        max_new_tokens=max_new_tokens,
        **settings,
    )


def whole_numbers(name: str, text: str) -> tuple[int, ...]:
    """Numbers separated by commas."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"{name} is {text!r}; expected whole numbers with commas.") from error


def width_shares(text: str) -> tuple[tuple[int, float], ...]:
    """Block sizes and their shares, as `4:0.2,16:0.8`; a lone one may leave its share out."""
    made = []
    for part in text.split(","):
        width, _, share = part.partition(":")
        try:
            made.append((int(width), float(share or 1)))
        except ValueError as error:
            raise ValueError(
                f"widths is {text!r}; expected block sizes and shares, as 4:0.2,16:0.8."
            ) from error
    return tuple(made)


def window_of(text: str | None) -> int | None:
    """A draft window; `full` or nothing is no window."""
    if text is None or text.strip() == "full":
        return None
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise ValueError(f"draft window is {text.strip()!r}; expected a whole number from 1.")
    return value


def windows_of(text: str) -> tuple[int | None, ...]:
    """Draft windows separated by commas."""
    return tuple(window_of(part) for part in text.split(","))


def policies_of(
    texts: Sequence[str], costs: Path | None, windows: Sequence[int | None]
) -> list[Any]:
    """The policies that the flags name; those that weigh costs take the table's middle context."""
    from dflash_lab.costs import read_costs
    from dflash_lab.policies import read_policy

    if costs is None:
        return [read_policy(text) for text in texts]
    if len(windows) > 1:
        raise ValueError("--costs are of one window; sweep one at a time with a policy of costs.")
    table = read_costs(costs)
    contexts = sorted({cost.context for cost in table.costs})
    by_rows = table.by_rows(windows[0], contexts[len(contexts) // 2])
    return [read_policy(text, by_rows) for text in texts]


def which_pair(
    name: str | None,
    target: str | None,
    draft: str | None,
    shared: dict[str, Any],
    base: Any = None,
) -> Any:
    """The pair that the flags name, else the sweep file's (`base`), else the embedded one."""
    from dflash_lab.config import PairSpec, SweepConfig
    from dflash_lab.load import pair_spec

    base = base or SweepConfig()
    whole = isinstance(base.pair, PairSpec)
    if name is None and target is None and draft is None:
        if whole:
            return replace(base.pair, **shared)
        name = base.pair
    stands = base.pair if whole else base
    filed = {key: getattr(stands, key) for key in ("backend", "dtype", "device")}
    return pair_spec(name, target=target, draft=draft, **(filed | shared))


def pair_or_draft(
    name: str | None, target: str | None, draft: str | None, shared: dict[str, Any]
) -> Any:
    """As `which_pair`; a draft that stands alone finds its target itself."""
    from dflash_lab.load import spec_of_draft

    if draft is not None and target is None and name is None:
        return spec_of_draft(draft, **shared)
    return which_pair(name, target, draft, shared)
