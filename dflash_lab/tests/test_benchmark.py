"""The benchmark command: its figures are those of its stored run, baselines and odd cases too."""

import csv
import json
import math
import statistics
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from types import SimpleNamespace

import pytest

from dflash_lab import DecodeConfig, benchmark, decode, open_run, recommend
from dflash_lab.scoring import final_number
from dflash_lab.tests.toys import ORACLE, cut, hash_target, scripted_pair

QUESTIONS = [
    {"question": f"How many are {n} and {n}?", "answer": f"{n}+{n}=<<2*{n}={2 * n}>>\n#### {2 * n}"}
    for n in range(1, 6)
]


class Bench:
    """`python -m dflash_lab.benchmark` in this process, on a scripted pair."""

    def __init__(self, monkeypatch, capsys):
        self.monkeypatch, self.capsys, self.loads = monkeypatch, capsys, 0

    def use(self, pair):
        def load(spec, say=None):
            self.loads += 1
            return pair

        for home in ("load", "sweeps.pairs"):
            self.monkeypatch.setattr(f"dflash_lab.{home}.load_spec", load)
        self.pair = pair

    def __call__(self, *arguments, code=0):
        self.monkeypatch.setattr(sys, "argv", ["benchmark", *map(str, arguments)])
        with warnings.catch_warnings(), pytest.raises(SystemExit) as end:
            warnings.simplefilter("error")
            benchmark.main()
        shown = self.capsys.readouterr()
        assert (end.value.code or 0) == code, shown
        return shown

    def json(self, *arguments):
        return json.loads(self(*arguments, "--json").out, parse_constant=pytest.fail)


@pytest.fixture
def bench(monkeypatch, capsys, tmp_path):
    """The command in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("DFLASH_BLOCK_SIZE", raising=False)
    made = Bench(monkeypatch, capsys)
    made.use(scripted_pair(cut(3), block_size=8))
    return made


def rows(*records, name="rows.jsonl"):
    with open(name, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    return name


def cells(told):
    (part,) = told["parts"]
    return {(row["engine"], row["block_size"]): row for row in part["cells"]}


SMALL = ("--block-size", "4,8", "--max-samples", 4, "--max-new-tokens", 24, "--out", "run")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The command twice: what it told as JSON, the run and stderr, and a second call's Markdown."""
    folder = tmp_path_factory.mktemp("measured")
    pair, loads = scripted_pair(cut(3), block_size=8, verify_s=0.0003), []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("DFLASH_BLOCK_SIZE", raising=False)
        patch.setattr("dflash_lab.load.load_spec", lambda *_: (loads.append(1), pair)[1])
        forms = []
        for form in ("--json", "--markdown"):
            out, err = StringIO(), StringIO()
            patch.setattr(sys, "argv", ["benchmark", *map(str, SMALL), form])
            with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as end:
                benchmark.main()
            assert not end.value.code, err.getvalue()
            forms.append((out.getvalue(), err.getvalue()))
    (told, said), (markdown, _) = forms
    return SimpleNamespace(
        told=json.loads(told, parse_constant=pytest.fail),
        run=open_run(folder / "run"),
        said=said,
        markdown=markdown,
        loads=len(loads),
    )


# What is measured


def test_every_table_has_plain_decoding_by_our_loop_by_the_library_and_prompt_lookup(measured):
    found = cells(measured.told)
    assert set(found) == {
        *(("dflash_lab", size) for size in (1, 4, 8)),
        *(("transformers", 1), ("prompt-lookup", 1)),
    }
    against = {"": "dflash_lab", "_library": "transformers", "_lookup": "prompt-lookup"}
    for column, base in against.items():
        assert found[base, 1][f"speedup{column}"] == 1
        for row in found.values():
            ratio = row["tokens_per_s"] / found[base, 1]["tokens_per_s"]
            assert row[f"speedup{column}"] == pytest.approx(ratio)
    request = {cell.engine: cell.request for cell in measured.run.cells}["prompt-lookup"]
    assert (request["lookup"], request["draft"]) == (10, None)


def test_several_sizes_share_one_load_and_the_same_prompts_interleaved(measured):
    assert measured.loads == 2  # one a call
    decodes = sorted(measured.run.prompts().to_pylist(), key=lambda row: row["order"])
    groups = [decodes[start : start + 5] for start in range(0, 20, 5)]
    for group in groups:  # all five arms of a prompt before the next prompt
        assert len({row["prompt_id"] for row in group}) == 1
        assert len({row["cell"] for row in group}) == 5
    assert len({group[0]["cell"] for group in groups}) == 4  # which is first rotates


def test_a_slow_down_is_called_one(bench):
    bench.use(scripted_pair(lambda *_: False, block_size=8, draft_s=0.004, verify_s=0.001))
    shown = bench("--block-size", 4, "--max-samples", 2, "--max-new-tokens", 6, "--out", "run").out
    line = next(line for line in shown.splitlines() if "│ 4 " in line)
    assert line.count("slower") == 3


def test_a_baseline_that_the_library_does_not_have_is_said(bench, monkeypatch):
    drawn = bench.json(*SMALL, "--temperature", 1, "--top-k", 5, "--rule", "rejection")
    assert set(cells(drawn)) == {("dflash_lab", size) for size in (1, 4, 8)}
    assert "No baseline by transformers" in drawn["remarks"][0]
    made = type(bench.pair.models).library_generate

    def without_lookup(self, *arguments, lookup=None):
        if lookup:
            raise ValueError("mlx-lm has no prompt-lookup decoding.")
        return made(self, *arguments[:4])

    monkeypatch.setattr(type(bench.pair.models), "library_generate", without_lookup)
    told = bench.json(*SMALL[:-1], "other")
    assert ("transformers", 1) in cells(told) and ("prompt-lookup", 1) not in cells(told)
    said = "No baseline by prompt lookup: mlx-lm has no prompt-lookup decoding."
    assert told["remarks"][0] == said


def test_upstreams_spellings_and_sampling_reach_the_stored_request(bench):
    bench(
        *("transformers", "--draft", "d", "--model", "t", "--temperature", 0.7, "--top-p", 0.9),
        *("--top-k", 5, "--seed", 3, "--min-new-tokens", 9, "--block-size", 4),
        *("--max-samples", 1, "--max-new-tokens", 12, "--out", "run"),
    )
    for cell in open_run("run").cells:
        assert (cell.request["temperature"], cell.request["min_new_tokens"]) == (0.7, 9)
        assert cell.request["sampling"] == {"top_k": 5, "top_p": 0.9, "seed": 3}
    error = bench("--reasoning", "--max-samples", 1, "--out", "other", code=1).err
    assert "thinking is True, but this chat template has no such switch" in error


def test_calls_with_one_folder_join_and_other_limits_stand_in_a_table_of_their_own(bench):
    bench("--block-size", 4, *SMALL[2:])
    told = bench.json("--block-size", 8, *SMALL[2:])
    assert ("dflash_lab", 4) in cells(told) and ("dflash_lab", 8) in cells(told)
    short = ("--block-size", 8, "--max-samples", 3, "--max-new-tokens", 5, "--out", "run")
    shown = bench(*short).out
    assert [f"up to {count} new tokens" in shown for count in (24, 5)] == [True, True]
    assert shown.count("Speed: ") == 2


# What is printed


def test_the_printed_times_are_those_of_the_stored_run(measured):
    prompts = measured.run.prompts().to_pylist()
    for row in cells(measured.told).values():
        mine = [one for one in prompts if one["cell"] == row["cell"]]
        tokens = sum(len(one["new_ids"]) for one in mine)
        seconds, total = (sum(one[name] for one in mine) for name in ("decode_s", "total_s"))
        wanted = {
            "tokens_per_s": (tokens - 4) / seconds,
            "tpot_s": seconds / (tokens - 4),
            "end_to_end_per_s": tokens / total,
            "ttft_s": statistics.median(one["ttft_s"] for one in mine),
        }
        assert row["prompts"] == len(mine) == 4
        for name, value in wanted.items():
            assert row[name] == pytest.approx(value)
            assert row[f"{name}_low"] <= row[name] <= row[f"{name}_high"]


def test_the_printed_acceptance_is_that_of_the_stored_run(measured):
    blocks = measured.run.blocks().to_pylist()
    for row in cells(measured.told).values():
        every = [one for one in blocks if one["cell"] == row["cell"]]
        whole = [one for one in every if not one["cut"]]
        if row["engine"] != "dflash_lab":
            assert row["tau"] is row["draft_rate"] is row["tokens_per_block"] is None
            continue
        accepted = sum(one["accepted"] for one in whole)
        drafted = sum(len(one["drafted"]) for one in whole)
        assert row["tau"] == pytest.approx(1 + accepted / len(whole))
        assert row["draft_rate"] == (pytest.approx(accepted / drafted) if drafted else None)
        for name, counted in (("tokens_per_block", "emitted"), ("seconds_per_block", "total_s")):
            mean = sum(one[counted] for one in every) / len(every)
            assert row[name] == pytest.approx(mean)
            assert row[f"{name}_low"] <= mean * 1.000001 and mean <= row[f"{name}_high"] * 1.000001
        reached = range(1, row["block_size"])
        shares = [sum(one["accepted"] >= k for one in whole) / len(whole) for k in reached]
        assert [at["survival"] for at in row["acceptance_by_position"]] == pytest.approx(shares)
        assert all(at["prompts"] == 4 for at in row["acceptance_by_position"])


def test_json_and_markdown_are_all_of_stdout_and_progress_goes_to_stderr(bench, measured):
    assert "20 of 20 decodes" in measured.said
    stored = cells(measured.told)["dflash_lab", 4]
    lines = measured.markdown.splitlines()
    titles = [line.split(":")[0] for line in lines if line.startswith("#")]
    names = ("Speed", "Acceptance", "Acceptance by position", "Waiting, memory")
    assert titles == [f"### {name}" for name in names]
    row = next(line for line in lines if line.startswith("| dflash_lab | float32 | 4 | full |"))
    assert f"| {stored['tokens_per_s']:.2f} [{stored['tokens_per_s_low']:.2f}, " in row
    assert all(line == "" or line.startswith(("|", "- ", "### ")) for line in lines)
    assert bench(*SMALL, "--json", "--markdown", code=1).err.startswith("error: --json and")


def test_the_stored_run_opens_in_recommend_and_figures_and_tells_the_baselines_apart(measured):
    from dflash_lab.figures import Material

    run = measured.run
    choice = recommend(run).choice
    assert f"measured: {choice.sentence}" == measured.told["remarks"][-1]
    library = cells(measured.told)["transformers", 1]["tokens_per_s"]
    assert choice.library_tokens_per_s == pytest.approx(library)  # not that of prompt lookup
    assert "prompt-lookup" in set(Material(run).cells["engine"])


@pytest.mark.slow
def test_the_stored_run_opens_in_report_and_explorer(measured, tmp_path):
    from dflash_lab.explorer import explore
    from dflash_lab.reports import report

    assert "prompt-lookup" in report(measured.run, tmp_path / "report.html").read_text()
    explore(measured.run)


@pytest.mark.thorough
def test_every_figure_of_the_stored_run_is_written(measured, tmp_path):
    from dflash_lab.figures import write_figures

    written = write_figures(measured.run, tmp_path / "figures")
    assert "throughput" in {path.stem for path in written.folder.iterdir()}


# The library's generators


def test_the_librarys_generator_prompt_lookup_and_our_loop_end_at_the_same_token(
    toy_pair, qwen3_toy
):
    prompt, text = qwen3_toy.prompts[0], qwen3_toy.greedy[0]
    stop = text[4]
    last = max(place for place, token in enumerate(text[:20], start=1) if token == stop)
    for least in (0, 5, last + 1):
        ours = DecodeConfig(
            block_size=4, max_new_tokens=20, stop_tokens=(stop,), min_new_tokens=least
        )
        wanted = decode(toy_pair, prompt, ours).tokens
        assert len(wanted) == (20 if least > last else text.index(stop, max(0, least - 1)) + 1)
        for lookup in (None, 10):
            stops = toy_pair.stop_tokens | {stop}
            made = toy_pair.models.library_generate(prompt, 20, stops, least, lookup)
            assert made.tokens == wanted == text[: len(wanted)]


def test_mlx_heeds_the_shortest_output_and_says_that_it_has_no_prompt_lookup(qwen3_toy):
    models = qwen3_toy.load(backend="mlx").models
    prompt, text = qwen3_toy.prompts[0], qwen3_toy.greedy[0]
    for least in (0, 6):
        made = models.library_generate(prompt, 8, frozenset(text[:3]), least)
        assert len(made.tokens) >= max(1, least)
        assert made.tokens == text[: len(made.tokens)]
    with pytest.raises(ValueError, match="mlx-lm has no prompt-lookup decoding"):
        models.library_generate(prompt, 8, frozenset(), lookup=10)


# Little to measure


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ({"--max-new-tokens": 1}, ("Outputs of one token", "Nothing was drafted")),
        ({"--max-samples": 1}, ("One prompt: no interval",)),
        ({"--max-new-tokens": 2}, ("Every block was cut",)),
        ({}, ("Outputs of one token", "--min-new-tokens")),
    ],
    ids=["one token", "one prompt", "two tokens", "all stop at once"],
)
def test_what_cannot_be_known_is_said_and_nothing_is_divided_by_zero(bench, case, words):
    if not case:
        bench.use(scripted_pair(cut(3), block_size=8, end_tokens=frozenset(range(512))))
    usual = {"--block-size": "4,8", "--max-samples": 3, "--max-new-tokens": 12, "--out": "run"}
    asked = [part for pair in (usual | case).items() for part in pair]
    told = bench.json(*asked)
    numbers = [value for row in cells(told).values() for value in row.values()]
    assert not any(isinstance(value, float) and not math.isfinite(value) for value in numbers)
    shown = bench(*asked).out
    assert all(word in shown for word in words)
    assert not {"nan", "inf", "nanx"} & set(shown.replace("[", " ").replace(",", " ").split())
    if "One prompt" in words[0]:
        assert all(row["tokens_per_s_low"] is None for row in cells(told).values())
    if "Outputs" in words[0]:
        assert all(row["tokens_per_s"] is None for row in cells(told).values())


def test_one_token_two_hundred_times_is_flagged_beside_its_splendid_figures(bench):
    asked = ("--block-size", 8, "--max-samples", 2, "--max-new-tokens", 200, "--out", "run")
    words = "2 of 2 outputs repeat themselves"
    assert words not in bench(*asked).out
    bench.use(scripted_pair(ORACLE, block_size=8, target=lambda tokens: 7))
    asked = (*asked[:-1], "loops")
    assert words in bench(*asked).out
    told = bench.json(*asked)
    assert any(words in line for line in told["remarks"])
    assert {row["looped"] for row in cells(told).values()} == {2}


def test_outputs_that_stop_at_once_go_on_with_min_new_tokens_alike_in_every_arm(bench):
    bench.use(scripted_pair(cut(3), block_size=8, end_tokens=frozenset(range(512))))
    bench(*SMALL, "--min-new-tokens", 7)
    decodes = open_run("run").prompts().to_pylist()
    assert len(decodes) == 20
    assert {(len(row["new_ids"]), row["finish_reason"]) for row in decodes} == {(7, "stop")}
    error = bench(*SMALL, "--min-new-tokens", 25, code=1).err
    assert "min_new_tokens is 25, above the 24 of max_new_tokens" in error


# Data sets


def test_later_turns_see_the_models_own_earlier_answers_in_every_arm(bench):
    name = rows({"prompt_id": 1, "prompt": ["First?", "And then?"]})
    bench("--dataset", name, "--block-size", 4, "--max-new-tokens", 8, "--out", "run")
    turns = open_run("run").prompts().to_pylist()
    assert len(turns) == 2 * 4
    for cell in {row["cell"] for row in turns}:
        first, second = sorted((r for r in turns if r["cell"] == cell), key=lambda r: r["turn"])
        messages = [
            {"role": "user", "content": "First?"},
            {"role": "assistant", "content": first["text"]},
            {"role": "user", "content": "And then?"},
        ]
        assert second["prompt_ids"] == list(bench.pair.encode(messages).ids)
    assert len({tuple(row["prompt_ids"]) for row in turns if row["turn"] == 1}) == 1


def test_which_prompts_thinking_and_template_are_recorded_and_ten_begin_twenty(bench):
    name = rows(*({"id": f"r{n}", "prompt": f"Say {n}."} for n in range(100)))
    ids = {}
    for count in (10, 20):
        few = ("--block-size", 4, "--max-new-tokens", 2, "--no-baseline", "--out", f"run{count}")
        bench("--dataset", name, "--max-samples", count, *few)
        (cell,) = open_run(f"run{count}").cells
        asked = cell.request["prompts"]
        ids[count] = asked["ids"]
        assert (asked["random_state"], asked["count"]) == (0, count)
        assert cell.request["thinking"] == "template default"
        assert cell.request["template_sha"] == "c" * 64
    assert ids[10] == ids[20][:10] != [f"r{n}" for n in range(10)]


@pytest.mark.parametrize(
    ("content", "template", "words"),
    [
        (b'{"prompt": "a", "id": "x"}\n{"prompt": "b", "id": "x"}\n', None, "the id 'x' twice"),
        (b"", None, "holds no prompts"),
        (b'{"prompt": "caf\xe9"}\n', None, "is not UTF-8"),
        (b'{"question": "a"}\n', "{query} Be brief.", "the template asks for query"),
    ],
)
def test_a_faulty_data_set_is_one_line_before_anything_is_loaded(bench, content, template, words):
    with open("rows.jsonl", "wb") as file:
        file.write(content)
    asked = () if template is None else ("--template", template)
    error = bench("--dataset", "rows.jsonl", *asked, "--out", "run", code=1).err
    assert words in error
    assert error.count("\n") == 1
    assert bench.loads == 0


def test_a_csv_file_with_commas_and_line_ends_is_decoded_as_it_stands(bench):
    with open("rows.csv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["id", "prompt"], ["a", 'one, "two"\nthree']])
    bench("--dataset", "rows.csv", "--block-size", 4, "--max-new-tokens", 3, "--out", "run")
    for row in open_run("run").prompts().to_pylist():
        assert row["prompt_ids"] == list(bench.pair.encode('one, "two"\nthree').ids)


# Accuracy


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 18", 18),
        ("so \\boxed{42} of the 50", 42),
        ("That makes $1,234.50.", 1234.5),
        ("It is -3.", -3),
        ("7 and 8\\boxed{none}", 8),
        ("no number", None),
    ],
)
def test_the_final_number_of_an_answer_is_found(text, number):
    assert final_number(text) == number


def saying(text):
    """A target that answers the text to anything, then goes on somehow."""

    def target(tokens):
        said = bytes(token if token < 256 else 0 for token in tokens)
        new = next((n for n in range(len(text) - 1, 0, -1) if said.endswith(text[:n])), 0)
        return hash_target(tokens) if said.endswith(text) else text[new]

    return target


def test_accuracy_stands_in_table_and_run_and_is_the_same_in_every_arm(bench):
    bench.use(scripted_pair(cut(3), block_size=8, target=saying(b"It's 4")))
    asked = ("--dataset", f"gsm8k={rows(*QUESTIONS)}", "--block-size", 4, "--max-new-tokens", 6)
    told = bench.json(*asked, "--out", "run")
    assert {(row["accuracy"], row["scored"]) for row in cells(told).values()} == {(0.2, 5)}
    kept = open_run("run").check("accuracy")
    assert kept["rule"] == "final number"
    assert {sum(map(sum, one.values())) for one in kept["cells"].values()} == {1}
    assert "right answers" in bench(*asked, "--markdown", "--out", "run").out
    error = bench("--score", "--max-samples", 2, "--out", "third", code=1).err
    assert "accuracy is asked for, but 2 of 2 prompts have no number" in error
