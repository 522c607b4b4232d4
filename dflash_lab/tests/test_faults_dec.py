"""What a real pair carries from one decode to the next, and where its end tokens come from."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest

from dflash_lab import DecodeConfig, SweepConfig, decode, load_pair, sweep
from dflash_lab.backends import mlx_session, torch_session
from dflash_lab.tests.toys import END, ByteTokenizer, scripted_pair, seen

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.mark.parametrize("backend", ["torch", pytest.param("mlx", marks=pytest.mark.slow)])
def test_one_prompt_gives_one_trace_twenty_times(qwen3_toy, backend):
    pair, config = qwen3_toy.load(backend=backend), DecodeConfig(block_size=8, max_new_tokens=4)
    first, *others = (decode(pair, qwen3_toy.prompts[0], config) for _ in range(20))
    assert first.tokens == qwen3_toy.greedy[0][:4]
    assert all(seen(other) == seen(first) for other in others)


def test_runs_of_other_settings_in_between_leave_no_mark(qwen3_toy, toy_pair):
    plain = DecodeConfig(block_size=8, max_new_tokens=10)
    others = (
        replace(plain, draft_window=2),
        replace(plain, temperature=2.0, seed=1, rule="rejection", proposal="sample"),
        replace(plain, repetition_penalty=5.0, probabilities=True),
        replace(plain, block_size=1, stop_strings=("a",)),
    )
    first = seen(decode(toy_pair, qwen3_toy.prompts[0], plain))
    for other in others:
        decode(toy_pair, qwen3_toy.prompts[1], other)
        assert seen(decode(toy_pair, qwen3_toy.prompts[0], plain)) == first


def with_end(folder, name, ids):
    """Write the end token or tokens of one of a target's configurations."""
    path = folder / name
    raw = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(raw | {"eos_token_id": ids}))


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_end_tokens_of_every_source_end_speculative_and_plain_runs_alike(
    qwen3_toy, tmp_path, backend
):
    text = qwen3_toy.greedy[0]
    place = next(n for n in range(4, 64) if text[n] not in text[:n])
    target = shutil.copytree(qwen3_toy.target, tmp_path / "target")
    with_end(target, "config.json", 501)
    with_end(target, "generation_config.json", [text[place], 500])
    pair = load_pair(
        target=target, draft=qwen3_toy.draft, backend=backend, dtype="float32", device="cpu"
    )
    for size in (1, 8):
        config = DecodeConfig(block_size=size, max_new_tokens=64, stop_tokens=(502,))
        trace = decode(pair, qwen3_toy.prompts[0], config)
        assert trace.request.stop_tokens == {text[place], 500, 501, END, 502}
        assert (trace.tokens, trace.finish_reason) == (text[: place + 1], "stop")


@pytest.mark.parametrize(
    ("own", "generation", "ends"),
    [(None, None, []), (3, None, [3]), ([3, 4], 5, [3, 4, 5]), (None, [6], [6]), (0, [], [0])],
)
def test_end_tokens_are_a_number_a_list_or_missing_in_both_backends(
    tmp_path, own, generation, ends
):
    one, other = SimpleNamespace(eos_token_id=own), SimpleNamespace(eos_token_id=generation)
    model = SimpleNamespace(config=one, generation_config=other)
    assert torch_session.end_tokens(model) == ends
    with_end(tmp_path, "config.json", own)
    with_end(tmp_path, "generation_config.json", generation)
    assert mlx_session.end_tokens(tmp_path) == ends


def test_a_stored_cell_tells_which_tokens_end_its_outputs(tmp_path):
    pair = scripted_pair(end_tokens=frozenset({3, 2}), tokenizer=ByteTokenizer(eos_token_id=1))
    config = SweepConfig(block_sizes=(4,), max_prompts=1, max_new_tokens=3, warm_up=False)
    (cell,) = sweep(config, tmp_path, pair=pair).cells
    assert cell.provenance["stop_tokens"] == [1, 2, 3]
