"""Which kinds of cells and prompts a run holds, and which of them a choice means."""

import pytest

from dflash_lab.kinds import NoPrompts, band, kinds, lengths, like, nearest, some_prompts, values
from dflash_lab.panels import Panels
from dflash_lab.store import open_run
from dflash_lab.tests.runs import prompt, request_of, write_cell

KINDS = ({}, {"dtype": "float32"}, {"dtype": "float32", "temperature": 0.7})


def written(path, settings=KINDS, sizes=(1, 4), prompts=("p0",), **columns):
    for each in settings:
        for size in sizes:
            rows = [prompt(name, **columns) for name in prompts]
            write_cell(path, request_of(list(prompts), block_size=size, **each), rows)
    return open_run(path)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    return written(tmp_path_factory.mktemp("runs") / "three")


def test_a_kind_tells_only_what_differs_between_kinds(three):
    told = {tuple(kind.told.items()) for kind in kinds(three)}
    assert told == {
        (("dtype", "bfloat16"), ("temperature", "0.0")),
        (("dtype", "float32"), ("temperature", "0.0")),
        (("dtype", "float32"), ("temperature", "0.7")),
    }
    (alone,) = kinds(three.select(temperature=0.7))
    assert alone.told == {}


def test_cells_of_a_kind_are_shown_without_those_of_another(three):
    warm = next(kind for kind in kinds(three) if kind.told["temperature"] == "0.7")
    assert {cell.request["temperature"] for cell in like(three, warm.cell).cells} == {0.7}
    assert set(Panels(three, warm.cell).grid.cells) == {(1, None), (4, None)}


def test_values_of_a_property_are_in_order(three):
    assert values(kinds(three), "dtype") == ["bfloat16", "float32"]
    assert values(kinds(three), "temperature") == ["0.0", "0.7"]


def test_the_picker_that_is_moved_wins_and_the_others_give_way(three):
    wanted = {"dtype": "bfloat16", "temperature": "0.7"}
    found = kinds(three)
    assert nearest(found, wanted, "dtype").told == {"dtype": "bfloat16", "temperature": "0.0"}
    assert nearest(found, wanted, "temperature").told == {"dtype": "float32", "temperature": "0.7"}


@pytest.mark.parametrize("temperature", ["0.0", "0.7"])
def test_of_two_that_fit_the_nearer_is_taken(three, temperature):
    wanted = {"dtype": "float32", "temperature": temperature}
    assert nearest(kinds(three), wanted, "dtype").told == wanted


def test_a_pair_is_its_target_and_its_draft(tmp_path):
    other = {"draft": "other", "draft_sha": "d" * 16, "dtype": "float32"}
    run = written(tmp_path, ({}, other), sizes=(4,))
    assert {kind.told["pair"].split(" with ")[1] for kind in kinds(run)} == {
        "smollm2-135m-dflash-b16",
        "other",
    }


def test_kinds_that_have_all_this_in_common_are_told_apart_by_the_rest_and_a_cell(tmp_path):
    run = written(tmp_path, ({}, {"max_new_tokens": 96}), sizes=(4,))
    told = [kind.told for kind in kinds(run)]
    assert {name for each in told for name in each} == {"cells"}
    assert {each["cells"] for each in told} == {
        f"max_new_tokens {cell.request['max_new_tokens']}, like {cell.id}" for cell in run.cells
    }


def test_two_drafts_of_one_name_are_told_apart(tmp_path):
    run = written(tmp_path, ({}, {"draft_sha": "d" * 16}), sizes=(4,))
    assert len({kind.told["cells"] for kind in kinds(run)}) == 2


@pytest.mark.parametrize(
    ("tokens", "name"),
    [
        (1, "under 256 tokens"),
        (255, "under 256 tokens"),
        (256, "256 to 1,023 tokens"),
        (1023, "256 to 1,023 tokens"),
        (1024, "1,024 to 4,095 tokens"),
        (20_000, "16,384 to 65,535 tokens"),
    ],
)
def test_each_band_reaches_four_times_as_far(tokens, name):
    assert band(tokens) == name


@pytest.fixture(scope="module")
def long_and_short(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "lengths"
    rows = [
        prompt("short", task="chat", prompt_ids=[7] * 200),
        prompt("long", task="code", prompt_ids=[7] * 300),
        prompt("long", task="code", turn=1, prompt_ids=[7] * 2000),
        prompt("longest", task="chat", prompt_ids=[7] * 1024),
    ]
    write_cell(path, request_of(["short", "long", "longest"], block_size=4), rows)
    return open_run(path)


BANDS = ["under 256 tokens", "256 to 1,023 tokens", "1,024 to 4,095 tokens"]


def test_bands_are_those_that_prompts_fall_in_by_their_first_turn(long_and_short):
    assert lengths(long_and_short) == BANDS
    assert some_prompts(long_and_short, None, BANDS[1]) == {"long"}
    assert some_prompts(long_and_short, None, BANDS[2]) == {"longest"}


def test_task_and_length_go_together(long_and_short):
    assert some_prompts(long_and_short, "chat", None) == {"short", "longest"}
    assert some_prompts(long_and_short, "chat", BANDS[0]) == {"short"}


def test_no_prompt_of_both_is_said_in_one_line(long_and_short):
    with pytest.raises(NoPrompts, match=r"of task code and under 256 tokens long"):
        some_prompts(long_and_short, "code", BANDS[0])
