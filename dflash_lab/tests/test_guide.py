"""The calls, flags and workflows of public guides to DFlash: one test a row of their table.

Rows 11 (memory on MLX: test_mlx_session.py), 13 and 14 (locking, the notebook) are not
here.
"""

import json
import shutil
import sys
import warnings
from types import SimpleNamespace

import httpx
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_lab import DecodeConfig, benchmark, cell_frame, decode, open_run, serving
from dflash_lab.calls import Draft, GenerationStats, stream_generate
from dflash_lab.decoding import BlockSizeWarning
from dflash_lab.load import DraftConfigWarning
from dflash_lab.tests.toys import MASK, ByteTokenizer, cut, replay_target, scripted_pair


@pytest.fixture(scope="module")
def torch_calls(qwen3_toy):
    import torch

    from dflash_lab import model

    return SimpleNamespace(
        target=AutoModelForCausalLM.from_pretrained(qwen3_toy.target, dtype=torch.float32).eval(),
        tokenizer=AutoTokenizer.from_pretrained(qwen3_toy.target),
        draft=model.DFlashDraftModel.from_pretrained,
        ids=lambda ids: torch.tensor([ids]),
        generate=model.dflash_generate,
        stream=model.stream_generate,
    )


@pytest.fixture(scope="module")
def mlx_calls(qwen3_toy):
    import mlx.core as mx

    from dflash_lab import model_mlx

    target, tokenizer = model_mlx.load(qwen3_toy.target)
    return SimpleNamespace(
        target=target,
        tokenizer=tokenizer,
        draft=model_mlx.load_draft,
        ids=lambda ids: mx.array([ids]),
        generate=model_mlx.dflash_generate,
        stream=model_mlx.stream_generate,
    )


@pytest.fixture(params=["torch_calls", "mlx_calls"])
def calls(request):
    """Target, tokenizer and upstream's calls of each backend."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def draft_of_6(qwen3_toy, tmp_path_factory):
    """The toy's draft, its config.json edited by a user."""
    return edited(qwen3_toy.draft, tmp_path_factory.mktemp("six"), block_size=6)


def edited(draft, folder, **changes):
    shutil.copytree(draft, folder, dirs_exist_ok=True)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | changes))
    return folder


def own_sizes(run):
    """Block sizes of our own loop's cells; the libraries' baselines have none to speak of."""
    return [cell.block_size for cell in run.cells if cell.engine == "dflash_lab"]


def used(responses):
    """Block sizes of the blocks of a stream."""
    return {one.record.block_size for one in responses if one.accepted is not None}


@pytest.fixture
def bench(monkeypatch, capsys, tmp_path):
    """`python -m dflash_lab.benchmark` in this process and an empty folder: stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DFLASH_BLOCK_SIZE", raising=False)

    def main(*arguments, code=0):
        monkeypatch.setattr(sys, "argv", ["benchmark", *map(str, arguments)])
        with warnings.catch_warnings(), pytest.raises(SystemExit) as end:
            warnings.simplefilter("default")  # as in a process of its own: shown, not raised
            benchmark.main()
        shown = capsys.readouterr()
        assert (end.value.code or 0) == code, shown.err
        return shown

    return main


@pytest.fixture
def scripted(monkeypatch):
    """Every pair that is loaded is a scripted one, three drafts right in each block, trained at 16;
    returns the list of what was asked for."""
    asked = []
    pair = scripted_pair(cut(3), block_size=16)
    for home in ("load", "sweeps.pairs"):
        monkeypatch.setattr(
            f"dflash_lab.{home}.load_spec", lambda spec, say=None: (asked.append(spec), pair)[1]
        )
    return asked


def test_row_1_the_block_size_in_config_json_is_the_default_of_both_backends(
    calls, draft_of_6, qwen3_toy, tmp_path
):
    from dflash_lab.model_mlx import DFlashConfig

    draft = calls.draft(draft_of_6)
    assert draft.block_size == draft.config.block_size == 6
    assert isinstance(draft.config, DFlashConfig)
    asked = calls.ids(qwen3_toy.prompts[0])
    made = calls.generate(draft, calls.target, asked, 12, return_stats=True)
    assert {block.block_size for block in made.trace.blocks} == {6}
    assert made.trace.block_size_source == "draft config: block_size"
    nested = json.loads((draft_of_6 / "config.json").read_text())["dflash_config"]
    both = edited(draft_of_6, tmp_path / "both", dflash_config=nested | {"block_size": 4})
    with pytest.warns(DraftConfigWarning, match=r"block_size = 4 .*block_size = 6") as heard:
        assert calls.draft(both).block_size == 4
    assert heard[0].filename == __file__


def test_row_2_text_streams_and_the_argument_beats_the_config(calls, draft_of_6, qwen3_toy):
    draft, prompt = calls.draft(draft_of_6), "Wie heißt du? 你好"
    call = (calls.target, draft, calls.tokenizer, prompt)
    responses = list(calls.stream(*call, block_size=4, max_tokens=24))
    config = DecodeConfig(max_new_tokens=24, block_size=1)
    whole = decode(qwen3_toy.load(), prompt, config, chat=False)
    assert [token for one in responses for token in one.tokens] == list(whole.tokens)
    assert "".join(one.text for one in responses) == whole.text
    assert len([one for one in responses if one.text]) > 3
    assert used(responses) == {4}
    assert used(calls.stream(*call, max_tokens=12)) == {6}
    last = responses[-1]
    assert last.generation_tokens == len(whole.tokens)
    assert last.prompt_tokens == len(prompt.encode())
    assert last.peak_memory > 0


class ScriptedDraft(Draft):
    """A draft that is right three times in each block, whatever target it is given."""

    def models(self, target):
        return scripted_pair(cut(3), target=target).models


def test_row_2_responses_count_what_blocks_gave_and_no_character_is_torn():
    text = "Grüße, 你好! 🙂🙂 ж" * 3
    said = [*text.encode(), 300]
    draft = ScriptedDraft("draft", scripted_pair().draft_config)
    call = (replay_target(2, said), draft, ByteTokenizer(eos_token_id=300), [1, 2])
    responses = list(stream_generate(*call, block_size=8))
    assert "".join(one.text for one in responses) == text
    assert all("\ufffd" not in one.text for one in responses)
    assert [token for one in responses for token in one.tokens] == said
    first, *rest = responses
    assert (first.accepted, first.tokens, first.generation_tps) == (None, (said[0],), 0)
    assert {one.accepted for one in rest} == {3}  # the target's own token is one more
    assert {len(one.tokens) for one in rest[:-1]} == {4}
    assert [one.finish_reason for one in responses] == [None] * len(rest) + ["stop"]
    assert [one.generation_tokens for one in responses[:3]] == [1, 5, 9]
    spent = sum(one.record.seconds.total for one in rest)
    assert rest[-1].generation_tps == pytest.approx((len(said) - 1) / spent)
    assert first.prompt_tps == pytest.approx(2 / first.record.seconds)


def test_row_2_settings_are_checked_at_the_call_and_an_abandoned_stream_disturbs_nothing(
    calls, draft_of_6, qwen3_toy
):
    draft, ids = calls.draft(draft_of_6), qwen3_toy.prompts[0]
    call = (calls.target, draft, calls.tokenizer)
    with pytest.raises(ValueError, match=r"temperature is -1; expected a number from 0"):
        calls.stream(*call, ids, temperature=-1)
    with pytest.raises(ValueError, match="prompt is empty"):
        calls.stream(*call, "")
    abandoned = calls.stream(*call, ids, max_tokens=20)
    next(abandoned)
    next(abandoned)
    messages = [{"role": "user", "content": "hello"}]
    templated = calls.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    texts = [
        "".join(one.text for one in calls.stream(*call, prompt, max_tokens=8, seed=1))
        for prompt in (templated, messages, calls.ids(calls.tokenizer.encode(templated)))
    ]
    assert len(set(texts)) == 1
    abandoned.close()
    whole = [token for one in calls.stream(*call, ids, max_tokens=20) for token in one.tokens]
    assert whole == list(qwen3_toy.greedy[0][:20])


@pytest.mark.parametrize("window", [None, 5])
def test_row_3_a_window_bounds_the_drafts_history_and_none_does_not(calls, qwen3_toy, window):
    draft = calls.draft(qwen3_toy.draft, sliding_window_size=window)
    prompt = list(qwen3_toy.prompts[0])
    stream = calls.stream(calls.target, draft, calls.tokenizer, prompt, max_tokens=12)
    records = [one.record for one in stream if one.accepted is not None]
    assert len(records) > 3
    for record in records:
        assert record.draft_cache_tokens == min(record.start, window or record.start)
    with pytest.raises(ValueError, match=r"draft_window is 0; expected a whole number from 1"):
        calls.draft(qwen3_toy.draft, sliding_window_size=0)


def test_row_4_spec_generate_returns_prompt_and_new_ids(calls, qwen3_toy):
    draft = calls.draft(qwen3_toy.draft)
    ids, text = qwen3_toy.prompts[0], qwen3_toy.greedy[0]
    asked = calls.ids(ids)
    out = draft.spec_generate(calls.target, asked, block_size=5, max_new_tokens=20)
    assert (type(out), out.dtype) == (type(asked), asked.dtype)
    assert tuple(out.shape) == (1, len(ids) + 20)
    assert out.tolist() == [[*ids, *text[:20]]]
    out = draft.spec_generate(calls.target, asked, 20, [text[11]], 0.0)
    assert out.tolist() == [[*ids, *text[: text.index(text[11]) + 1]]]
    narrow = draft.spec_generate(calls.target, asked, 10, sliding_window_size=3, seed=7)
    assert narrow.tolist() == [[*ids, *text[:10]]]


def test_row_4_what_cannot_be_done_is_refused_by_name(calls, qwen3_toy):
    draft, asked = calls.draft(qwen3_toy.draft), calls.ids(qwen3_toy.prompts[0])
    with pytest.raises(ValueError, match=r"temperature is -0.7; expected a number from 0"):
        draft.spec_generate(calls.target, asked, 20, [1], -0.7)
    with pytest.raises(ValueError, match=r"block_size is 0; expected a whole number from 1"):
        draft.spec_generate(calls.target, asked, block_size=0)
    with pytest.raises(ValueError, match=r"draft_window is 0"):
        draft.spec_generate(calls.target, asked, sliding_window_size=0)
    with pytest.raises(ValueError, match=r"the shape \[\d+\]; expected an array \[1, length\]"):
        draft.spec_generate(calls.target, asked[0])
    with pytest.raises(ValueError, match=r"prompt is empty"):
        draft.spec_generate(calls.target, asked[:, :0])


def test_rows_2_and_4_temperature_and_seed_draw_the_same_text_at_every_block_size(calls, qwen3_toy):
    draft, ids = calls.draft(qwen3_toy.draft), list(qwen3_toy.prompts[0])
    asked = calls.ids(ids)

    def drawn(size, seed):
        out = draft.spec_generate(calls.target, asked, 12, [], 1.0, block_size=size, seed=seed)
        return out.tolist()[0][len(ids) :]

    assert drawn(8, 5) == drawn(1, 5) != drawn(8, 6)
    assert drawn(8, 5) != list(qwen3_toy.greedy[0][:12])
    call = (calls.target, draft, calls.tokenizer, ids, 4, 12, 1.0)
    stream = calls.stream(*call, seed=5)
    assert [token for one in stream for token in one.tokens] == drawn(8, 5)


def test_row_4_a_torch_target_is_left_as_it_was_found(torch_calls, qwen3_toy):
    target = AutoModelForCausalLM.from_pretrained(qwen3_toy.target)
    target.train()
    target.model.layers[0].eval()
    target.model.norm.weight.requires_grad_(False)
    target.generation_config.repetition_penalty = 1.5

    def state():
        return (
            [module.training for module in target.modules()],
            [parameter.requires_grad for parameter in target.parameters()],
            [len(module._forward_hooks) for module in target.modules()],
            [len(module._forward_pre_hooks) for module in target.modules()],
            target.config.to_dict(),
            target.generation_config,
            target.generation_config.to_dict(),
        )

    before = state()
    draft = torch_calls.draft(qwen3_toy.draft)
    draft.spec_generate(target, torch_calls.ids(qwen3_toy.prompts[0]), max_new_tokens=8)
    assert state() == before
    responses = torch_calls.stream(target, draft, torch_calls.tokenizer, "hello", max_tokens=30)
    next(responses)
    next(responses)
    assert state() == before
    responses.close()
    with pytest.raises(ValueError, match="whole number"):
        draft.spec_generate(target, torch_calls.ids(qwen3_toy.prompts[0]), block_size=-1)
    assert state() == before


def test_row_4_a_target_of_mlx_lms_own_loader_does_as_well(mlx_calls, qwen3_toy):
    import mlx_lm

    raw = json.loads((qwen3_toy.target / "config.json").read_text())
    rope = {"rope_theta": raw["rope_parameters"]["rope_theta"]}  # mlx-lm reads the older spelling
    target, tokenizer = mlx_lm.load(str(qwen3_toy.target), model_config=rope)
    layers, ids = list(target.model.layers), qwen3_toy.prompts[0]
    draft = mlx_calls.draft(qwen3_toy.draft)
    out = draft.spec_generate(target, mlx_calls.ids(ids), block_size=5, max_new_tokens=20)
    assert out.tolist() == [[*ids, *qwen3_toy.greedy[0][:20]]]
    pieces = [one.text for one in mlx_calls.stream(target, draft, tokenizer, "hello", max_tokens=9)]
    ours = mlx_calls.stream(mlx_calls.target, draft, mlx_calls.tokenizer, "hello", max_tokens=9)
    assert pieces == [one.text for one in ours]
    assert target.model.layers == layers


def test_row_5_dflash_generate_gives_its_figures_by_upstreams_names(calls, qwen3_toy):
    draft, ids = calls.draft(qwen3_toy.draft), qwen3_toy.prompts[1]
    call = (draft, calls.target, calls.ids(ids), 24, None, 0.0)
    made = calls.generate(*call, block_size=5, return_stats=True)
    assert isinstance(made, GenerationStats)
    assert made.output_ids.tolist() == calls.generate(*call, block_size=5).tolist()
    assert (made.num_input_tokens, made.num_output_tokens) == (len(ids), 24)
    blocks = made.trace.blocks
    assert made.acceptance_lengths == [block.accepted + 1 for block in blocks]
    assert sum(made.acceptance_lengths[:-1]) + 1 + blocks[-1].emitted == 24
    assert made.time_to_first_token == made.trace.prefill.seconds > 0
    assert made.time_per_output_token == pytest.approx(made.trace.decode_s / 23)
    one = calls.generate(draft, calls.target, calls.ids(ids), 1, None, 0.0, return_stats=True)
    assert (one.acceptance_lengths, one.time_per_output_token) == ([], None)


@pytest.fixture
def questions(tmp_path):
    """A data set in the form of a public one."""
    path = tmp_path / "gsm8k.jsonl"
    rows = [{"question": f"How many are {n} and {n}?", "answer": f"#### {2 * n}"} for n in range(9)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_4_and_5_end_at_a_first_token_that_is_a_stop_and_at_no_mask(calls, qwen3_toy):
    draft, prompt, text = calls.draft(qwen3_toy.draft), qwen3_toy.prompts[0], qwen3_toy.greedy[0]
    asked = (draft, calls.target, calls.ids(prompt), 12)
    made = calls.generate(*asked, list(text[:1]), return_stats=True)
    assert (made.trace.tokens, made.num_output_tokens) == (text[:1], 1)
    assert (made.trace.finish_reason, made.acceptance_lengths) == ("stop", [])
    assert MASK not in text[:12]
    assert calls.generate(*asked, [MASK]).tolist() == [[*prompt, *text[:12]]]


@pytest.mark.parametrize("backend", ["transformers", "mlx"])
def test_row_6_the_benchmark_prints_its_figures_and_keeps_a_run(
    bench, qwen3_toy, questions, backend
):
    models = ("--model", qwen3_toy.target, "--draft-model", qwen3_toy.draft, "--dtype", "float32")
    shown, _ = bench(
        *("--backend", backend, *models, "--block-size", 6, "--dataset", questions),
        *("--max-samples", 2, "--max-new-tokens", 12, "--out", "run"),
    )
    run = open_run("run")
    assert {cell.request["backend"] for cell in run.cells} == {"torch", "mlx"} & {
        backend.replace("transformers", "torch")
    }
    assert own_sizes(run) == [1, 6]
    row = cell_frame(run).iloc[1]
    for figure in ("tokens_per_s", "tau"):
        assert f" {row[figure]:.2f} " in shown
    assert f" {row.draft_rate:.0%} " in shown
    assert "prompts: 2 of the 9 of" in shown
    counted = [b for b in run.blocks().to_pylist() if b["drafted"] and not b["cut"]]
    share = f"0: {sum(b['accepted'] == 0 for b in counted) / len(counted):.0%}"
    assert f"window full, 2 prompts, {len(counted)} blocks: {share}" in shown


def test_row_7_a_loop_that_names_the_draft_alone_finds_the_rest_and_joins_one_run(
    bench, scripted, qwen3_toy, tmp_path
):
    draft = edited(qwen3_toy.draft, tmp_path / "Toy-DFlash")
    (draft / "README.md").write_text("---\nbase_model: example/Toy\ntags: [x]\n---\n# A draft\n")
    for size in (4, 8, 12, 16):
        loop = ("--backend", "torch", "--draft-model", draft, "--block-size", size)
        shown, _ = bench(*loop, "--max-samples", 2)
    assert {spec.target for spec in scripted} == {"example/Toy"}
    run = open_run("results/benchmark-Toy-DFlash")
    assert own_sizes(run) == [1, 4, 8, 12, 16]
    assert {cell.request["prompts"]["count"] for cell in run.cells} == {2}
    assert "target: example/Toy" in shown
    assert "of mini" in shown
    for size in (1, 4, 8, 12, 16):
        assert f" {size} " in shown


@pytest.mark.parametrize(
    ("card", "config", "found"),
    [
        ("---\nbase_model: [a/B]\n---\n", {}, "a/B"),
        ("# no front matter\n", {"base_model": "c/D"}, "c/D"),
        ("---\nbase_model: a/B\n---\n", {"base_model": "c/D"}, "a/B"),
        (None, {}, "names none"),
        ("---\nbase_model: [a/B, c/D]\n---\n", {}, "names a/B and c/D"),
        ("---\nbase_model: [\n---\n", {}, "cannot be read"),
    ],
)
def test_row_7_the_target_is_the_one_the_draft_names_else_an_error_says_how(
    bench, scripted, qwen3_toy, tmp_path, card, config, found
):
    draft = edited(qwen3_toy.draft, tmp_path / "d", **config)
    if card is not None:
        (draft / "README.md").write_text(card)
    call = ("mlx", "--draft", draft, "--block-size", 4, "--max-samples", 1, "--out", "run")
    if "/" in found and " " not in found:
        bench(*call)
        assert [(spec.target, spec.backend) for spec in scripted] == [(found, "mlx")]
        return
    error = bench(*call, code=1).err
    assert found in error
    assert "--model" in error or "cannot be read" in error
    assert scripted == []


def test_row_7_the_draft_that_comes_with_the_project_belongs_to_its_pair(bench, scripted):
    from dflash_lab.load import EMBEDDED

    bench("--draft-model", EMBEDDED["smollm2"], "--max-samples", 2, "--no-baseline")
    assert [spec.name for spec in scripted] == ["smollm2"]
    run = open_run("results/benchmark-smollm2")
    assert [cell.block_size for cell in run.cells] == [16]  # the draft's own, as none was named
    _, said = bench("--max-samples", 9999, "--block-size", 4, "--max-new-tokens", 2)
    assert "are used" in said


@pytest.fixture
def server(monkeypatch, capsys):
    """`dflash-lab serve` on a scripted pair whose config says 10, trained at 16, asked and stopped:
    exit code, stderr, and what /health, an answer and the events of a stream say."""
    pair = scripted_pair(cut(3), block_size=10, trained_block_size=16)
    loaded = []
    monkeypatch.setattr(serving, "load_spec", lambda *_: (loaded.append(1), pair)[1])

    def main(*arguments):
        told = []

        def ask(started):
            asked = {"prompt": "hello", "max_tokens": 20}
            for path, extra in (("completions", {}), ("completions", {"stream": True})):
                told.append(httpx.post(f"{started.url}/v1/{path}", json=asked | extra))
            told.append(httpx.get(f"{started.url}/health"))

        monkeypatch.setattr(serving.Server, "wait", ask)
        with pytest.raises(SystemExit) as end:
            benchmark.cli.main(["serve", "tiny", "--port", "0", *arguments])
        assert bool(loaded) == bool(told)
        return end.value.code or 0, capsys.readouterr().err, told

    return main


@pytest.mark.parametrize(
    ("variable", "flags", "size", "source"),
    [
        ("12", (), 12, "DFLASH_BLOCK_SIZE"),
        ("12", ("--block-size", "6"), 6, "flag --block-size"),
        (None, ("--block-size", "6"), 6, "flag --block-size"),
        (None, (), 10, "draft config: block_size"),
    ],
)
def test_row_8_the_server_takes_flag_before_variable_before_config_and_says_so(
    server, monkeypatch, variable, flags, size, source
):
    monkeypatch.delenv("DFLASH_BLOCK_SIZE", raising=False)
    if variable is not None:
        monkeypatch.setenv("DFLASH_BLOCK_SIZE", variable)
    code, said, (whole, stream, health) = server(*flags)
    assert code == 0
    assert f"block size {size} (from {source})" in said
    lines = [line for line in stream.text.splitlines() if line.startswith("data: {")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert len(events) > 3
    for answer in (whole.json(), health.json(), *events):
        assert (answer["block_size"], answer["block_size_source"]) == (size, source)
    for answer in (whole, stream, health):
        assert answer.headers["x-dflash-block-size"] == str(size)
    drafted = whole.json()["metrics"]["speculative_decoding"]["per_step_drafted"]
    assert set(drafted) == {size - 1}


def test_row_8_a_server_in_a_notebook_reads_the_variable_too_and_settings_beat_it(monkeypatch):
    monkeypatch.setenv("DFLASH_BLOCK_SIZE", "12")
    pair = scripted_pair(block_size=10, trained_block_size=16)
    for config, size in ((None, 12), (DecodeConfig(), 12), (DecodeConfig(block_size=6), 6)):
        with serving.serve(pair, config, port=0) as started:
            monkeypatch.setenv("DFLASH_BLOCK_SIZE", "x")  # it was read when the server started
            assert httpx.get(f"{started.url}/health").json()["block_size"] == size
        monkeypatch.setenv("DFLASH_BLOCK_SIZE", "12")


@pytest.mark.parametrize("text", ["", " ", "abc", "0", "-1", "12.5"])
def test_row_8_an_empty_or_bad_variable_stops_the_start_with_one_line(server, monkeypatch, text):
    monkeypatch.setenv("DFLASH_BLOCK_SIZE", text)
    code, said, told = server()
    assert (code, told) == (1, [])
    assert said.startswith(f"error: DFLASH_BLOCK_SIZE is {text!r}; expected a whole number from 1.")
    assert said.count("\n") == 1
    with pytest.raises(ValueError, match=r"^DFLASH_BLOCK_SIZE is"):
        serving.serve("tiny", port=0)


def test_row_9_above_the_trained_size_one_warning_one_cell_and_the_reason(bench, scripted):
    shown, said = bench("--block-size", "16,32", "--max-samples", 2, "--max-new-tokens", 40)
    assert said.count("warning:") == 1
    assert "warning: block size 32 is above the 16" in said
    assert "--beyond-trained" in said
    (cell,) = (cell for cell in open_run("results/benchmark-smollm2").cells if cell.block_size > 1)
    assert (cell.block_size, cell.requested_block_sizes) == (16, (16, 32))
    assert "block size 16 stands for 32 too: above the size that the draft was trained" in shown
    bench("--block-size", "32", "--max-samples", 2, "--beyond-trained", "--out", "beyond")
    assert own_sizes(open_run("beyond")) == [1, 32]


def test_row_9_the_calls_lower_with_one_warning_and_can_insist(calls, qwen3_toy):
    draft, asked = calls.draft(qwen3_toy.draft), calls.ids(qwen3_toy.prompts[0])
    call = (draft, calls.target, asked, 20)
    with pytest.warns(BlockSizeWarning, match=r"block size 32 is above the 8 ") as heard:
        made = calls.generate(*call, block_size=32, return_stats=True)
    assert len(heard) == 1
    assert (made.trace.block_size_requested, made.trace.block_size) == (32, 8)
    made = calls.generate(*call, block_size=12, return_stats=True, beyond_trained=True)
    assert {block.block_size for block in made.trace.blocks} == {12}


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_row_10_the_benchmark_bounds_the_drafts_history_and_shows_memory(
    bench, qwen3_toy, questions, backend
):
    models = ("--model", qwen3_toy.target, "--draft-model", qwen3_toy.draft, "--dtype", "float32")
    shown, _ = bench(
        *(backend, *models, "--block-size", 4, "--draft-sliding-window-size", 5, "--no-baseline"),
        *("--dataset", questions, "--max-samples", 1, "--max-new-tokens", 8, "--out", "run"),
    )
    run = open_run("run")
    assert set(run.blocks()["draft_cache_tokens"].to_pylist()) == {5}
    row = cell_frame(run).iloc[0]
    assert f"{row.draft_cache_bytes / 1e6:.2f} MB" in shown
    assert f"{row.peak_bytes / 1e6:.2f} MB" in shown


def test_row_12_throughput_tau_and_draft_rate_stand_beside_the_two_lines(bench, scripted):
    shown, _ = bench("--block-size", "4,8,16", "--max-samples", 3)
    table = shown.splitlines()
    for size, tau, rate in (("4", "4.00", "100%"), ("8", "4.00", "43%"), ("16", "4.00", "20%")):
        assert any({size, tau, rate} <= set(line.replace("│", " ").split()) for line in table)
    assert "above 60% is comfortable (block size 4), below 30% go back" in shown
    assert "smaller block (16)" in shown
    assert "measured: " in shown
