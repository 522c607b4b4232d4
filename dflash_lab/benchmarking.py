"""A benchmark: block sizes and baselines over one set of prompts, kept as an ordinary run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_lab import load
from dflash_lab.backends import LIBRARIES, LOOKUP_TOKENS
from dflash_lab.config import PairSpec, SweepConfig
from dflash_lab.load import Pair
from dflash_lab.prompts import BUNDLED, Prompt, load_prompts
from dflash_lab.scoring import check_answers, score_run
from dflash_lab.store import Run
from dflash_lab.sweeps import SweepProgress, prompts_of, sweep

SCORED = "gsm8k"  # the public set whose answers are numbers: judged unless asked not to


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """What was measured, the cells of earlier calls into the same folder included."""

    run: Run
    spec: PairSpec
    trained_block_size: int
    source: str  # of the prompts
    prompts: int  # decoded
    held: int  # prompts that the source has
    notes: tuple[str, ...]  # what was left out or is other than asked for, a sentence each


def benchmark_pair(
    spec: PairSpec,
    settings: Mapping[str, Any],
    *,
    out: Path | None = None,
    baselines: bool = True,
    score: bool | None = None,
    say: Callable[[str], None] = lambda line: None,
    progress: Callable[[SweepProgress], None] | None = None,
) -> Benchmark:
    """Measure block sizes beside plain decoding, the library's generator and its prompt lookup.

    `settings` are fields of `SweepConfig`: without `block_sizes` the draft's own is measured,
    without `prompts` the bundled ones; more `max_prompts` than there are take all. Public sets and
    files are drawn from by `random_state` 0 unless told otherwise, since many are sorted. `score`
    judges final numbers, which is so for gsm8k unless it is False. `out` may hold a run already.
    Raises ValueError for settings that do not fit, before the pair is loaded where it can.
    """
    asked = dict(settings)
    source = asked.setdefault("prompts", BUNDLED[0])
    if source not in BUNDLED:
        asked.setdefault("random_state", 0)  # the bundled set begins with some of each kind
    every, notes = load_prompts(source, template=asked.get("template")), []
    wanted = asked.pop("max_prompts", len(every))
    if wanted > len(every):
        notes.append(f"{source} has {len(every)} prompts; all of them are used.")
    sizes = asked.pop("block_sizes", None)
    config = SweepConfig(
        pair=spec, block_sizes=sizes or (1,), max_prompts=min(wanted, len(every)), **asked
    )
    prompts = prompts_of(config)
    if score is None:
        score = source.partition("@")[0].partition("=")[0] == SCORED
    if score:
        check_answers(prompts)
    pair = load.load_spec(spec, say)
    sizes = sizes or (pair.draft_config.block_size,)
    libraries = {}
    if baselines:
        sizes = (1, *sizes)
        libraries, why = library_baselines(pair, config, prompts[0])
        notes += why
    for note in notes:
        say(note)
    config = replace(config, block_sizes=tuple(dict.fromkeys(sizes)), **libraries)
    run = sweep(config, out or usual_folder(spec), progress, pair)
    if score:
        score_run(run, prompts, _cells_of(run, prompts))
    return Benchmark(
        run=run,
        spec=spec,
        trained_block_size=pair.draft_config.trained_block_size,
        source=source,
        prompts=len(prompts),
        held=len(every),
        notes=tuple(notes),
    )


def usual_folder(spec: PairSpec) -> Path:
    """Where the run of a pair lies if nobody names a folder."""
    return Path("results") / f"benchmark-{spec.name or Path(spec.draft).name}"


def _cells_of(run: Run, prompts: Sequence[Prompt]) -> list[str]:
    """The cells over just these prompts; those of other calls may have decoded others."""
    ids = [prompt.id for prompt in prompts]
    return [cell.id for cell in run.cells if cell.request["prompts"].get("ids") == ids]


def library_baselines(
    pair: Pair, config: SweepConfig, prompt: Prompt
) -> tuple[dict[str, bool], list[str]]:
    """Which baselines the library can give here, as settings of a sweep; why not the others."""
    library = LIBRARIES[pair.spec.backend]
    if (config.temperature, config.repetition_penalty) != (0, 1) or config.timing == "stages":
        return {}, [
            f"No baseline by {library}: its generator is timed greedy, without a penalty and "
            "without stages. Plain decoding by our loop draws as the blocks do."
        ]
    ids = pair.encode(prompt.turns[0], config.chat, config.thinking).ids
    try:
        pair.models.library_generate(ids, 2, frozenset(), lookup=LOOKUP_TOKENS)
    except ValueError as error:
        why = " ".join(str(error).split())
        return {"library_baseline": True}, [f"No baseline by prompt lookup: {why}"]
    return {"library_baseline": True, "lookup_baseline": True}, []
