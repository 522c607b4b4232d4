"""What a cost table predicts for a run: measured settings, replayed ones, and no others."""

import shutil
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from dflash_lab.costs import CostTable, prediction_frame
from dflash_lab.forecast import OF_A_MAP, forecast
from dflash_lab.kinds import OfPrompts
from dflash_lab.replay import AcceptanceMap, PromptMap, Text, save_map
from dflash_lab.store import open_run
from dflash_lab.tests.runs import HARDWARE, write_run
from dflash_lab.tests.test_what_if import cost

FACTS = {"dtype": "bfloat16", "hardware": HARDWARE}
TABLE = CostTable(costs=tuple(cost(size) for size in (1, 4, 6, 8)), facts=FACTS)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "foretold"
    made = open_run(write_run(path, prompts=2, block_sizes=(1, 4, 8), windows=(16,), windowed=(4,)))
    return made.select(engine="dflash_lab", dtype="bfloat16")


def settings(frame):
    windows = [None if pd.isna(window) else int(window) for window in frame["draft_window"]]
    return dict(
        zip(zip(frame["block_size"], windows, strict=True), frame.to_dict("records"), strict=True)
    )


def test_settings_are_predicted_as_their_cells_are(run):
    made = settings(forecast(run, TABLE))
    assert sorted(made, key=str) == [(1, None), (4, None), (8, None)]  # window 16 has no price
    priced = run.select(draft_window=None)
    for row in prediction_frame(priced, TABLE).to_dict("records"):
        expected = row["predicted_tokens_per_s"]
        assert made[row["block_size"], None]["predicted_tokens_per_s"] == pytest.approx(expected)


@pytest.mark.parametrize(
    "other", [{"dtype": "float32"}, {"hardware": "another"}, {"draft_sha": "d"}]
)
def test_a_table_of_another_dtype_machine_or_pair_predicts_nothing(run, other):
    assert forecast(run, replace(TABLE, facts=FACTS | other)).empty


def stored_map(run, right=2, **facts):
    """A map of the run's own texts at sizes 4 and 6: from every token so many drafts are right."""
    texts = {row["prompt_id"]: row for row in run.prompts().to_pylist()}
    made = AcceptanceMap(
        block_sizes=(4, 6),
        draft_windows=(None,),
        prompts=tuple(mapped(row, right) for row in texts.values()),
        context_limit=4096,
        trained_block_size=16,
        facts={name: run.cells[0].request[name] for name in OF_A_MAP}
        | {"draft_sha": "b" * 16}
        | facts,
    )
    save_map(run, made)


def mapped(row, right):
    names = ("prompt_id", "task")
    text = Text(
        **{name: row[name] for name in names},
        prompt_ids=tuple(row["prompt_ids"]),
        tokens=tuple(row["new_ids"]),
    )
    left = np.minimum(right, text.remaining).astype(np.int32)
    return PromptMap(text=text, accepted=np.tile(left, (2, 1, 1)))


@pytest.fixture
def copied(run, tmp_path):
    """The run in a folder of its own, beside which a map may be stored."""
    shutil.copytree(run.path, tmp_path / "run")
    return open_run(tmp_path / "run").select(engine="dflash_lab", dtype="bfloat16")


def test_a_stored_map_adds_the_settings_that_were_not_measured(run, copied):
    stored_map(copied)
    alone, made = (settings(forecast(each, TABLE)) for each in (run, copied))
    assert set(made) - set(alone) == {(6, None)}
    assert all(made[key] == alone[key] for key in alone)  # size 4 as it was measured
    steps = 3 / (0.9 * 0.071)  # two drafts and one token of the target's own, a block
    assert made[6, None]["predicted_tokens_per_s"] == pytest.approx(steps, rel=0.1)


def test_a_map_of_another_draft_adds_nothing(run, copied):
    stored_map(copied, draft_sha="d" * 16)
    assert set(settings(forecast(copied, TABLE))) == set(settings(forecast(run, TABLE)))


def test_a_map_that_lacks_a_prompt_adds_nothing(run, copied):
    stored_map(OfPrompts(path=copied.path, cells=copied.cells, ids=frozenset(one_of(copied))))
    assert set(settings(forecast(copied, TABLE))) == set(settings(forecast(run, TABLE)))


def one_of(run):
    return run.prompts(("prompt_id",))["prompt_id"].to_pylist()[:1]
