"""Whether outputs end in the right number: accuracy beside speed, kept with the run.

Speculation must not change what the target says; a reader of a benchmark sees here that it did not.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from decimal import Decimal
from typing import Any

from dflash_lab.prompts import Prompt
from dflash_lab.store import Run

CHECK = "accuracy"  # the name under which a run keeps it
NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|-?\.\d+")
BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


def final_number(text: str) -> Decimal | None:
    """The number an answer ends in: the one in the last `\\boxed{}`, else the last of the text.

    Commas of thousands, units and a point at the end of a sentence are no part of it; None where
    there is no number.
    """
    boxed = BOXED.findall(text)
    for part in (*boxed[-1:], text):
        if found := NUMBER.findall(part):
            return Decimal(found[-1].replace(",", ""))
    return None


def check_answers(prompts: Sequence[Prompt]) -> None:
    """Raise ValueError unless every prompt comes with an answer that ends in a number."""
    lacking = [one.id for one in prompts if one.answer is None or final_number(one.answer) is None]
    if lacking:
        raise ValueError(
            f"accuracy is asked for, but {len(lacking)} of {len(prompts)} prompts have no number "
            f"as their answer, {lacking[0]!r} first. Use rows with an `answer`, as gsm8k has, or "
            "leave --score out."
        )


def score_run(run: Run, prompts: Sequence[Prompt], cells: Collection[str]) -> dict[str, Any]:
    """Judge the last turns of these cells by their final number and keep that with the run.

    What was kept of other cells stays. Raises ValueError as `check_answers`.
    """
    check_answers(prompts)
    right = {prompt.id: final_number(prompt.answer or "") for prompt in prompts}
    last = {prompt.id: len(prompt.turns) - 1 for prompt in prompts}
    before = run.check(CHECK) or {}
    judged: dict[str, Any] = {name: {} for name in sorted(cells)}
    for row in run.prompts(("cell", "prompt_id", "turn", "text")).to_pylist():
        name = row["prompt_id"]
        if row["cell"] in judged and row["turn"] == last.get(name):
            found = final_number(row["text"])
            judged[row["cell"]].setdefault(name, []).append(found == right[name])
    kept = {"rule": "final number", "cells": before.get("cells", {}) | judged}
    run.write_check(CHECK, kept)
    return kept


def right_of(check: Mapping[str, Any] | None, cell: str) -> dict[str, tuple[int, int]]:
    """By prompt: how many of a cell's outputs were right, of how many; empty where not judged."""
    judged = ((check or {}).get("cells") or {}).get(cell) or {}
    return {name: (sum(outputs), len(outputs)) for name, outputs in judged.items()}
