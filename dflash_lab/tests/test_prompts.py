"""Prompts from the bundled set and from files."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash_lab import load_prompts


def written(path, *rows):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def test_the_bundled_set_without_categories_leaves_the_long_prompts_out():
    prompts = load_prompts()
    assert len(prompts) >= 24
    assert "long" not in {prompt.category for prompt in prompts}
    assert len(load_prompts(categories=["long"])) == 4


def test_a_limit_takes_the_first_ones_and_refuses_more_than_there_are():
    assert load_prompts(limit=5) == load_prompts()[:5]
    with pytest.raises(ValueError, match="asked for 1000 prompts"):
        load_prompts(limit=1000)


def test_a_file_may_say_prompt_or_turns_and_leave_id_and_category_out(tmp_path):
    path = written(
        tmp_path / "p.jsonl", {"prompt": "hello"}, {"id": "b", "turns": ["one", "two"]}, ""
    )
    first, second = load_prompts(path)
    assert (first.id, first.turns, first.category) == ("row-1", ("hello",), "none")
    assert second.turns == ("one", "two")


PUBLIC = [  # rows as the public sets have them, and what a user says in them
    ({"question": "Two and two?", "answer": "#### 4"}, "row-1", ("Two and two?",)),
    ({"problem": "Two and two?", "solution": "4", "level": 1}, "row-1", ("Two and two?",)),
    ({"task_id": "HumanEval/0", "prompt": "def f():"}, "HumanEval/0", ("def f():",)),
    ({"task_id": 2, "prompt": "Write f.", "code": "pass"}, "2", ("Write f.",)),
    ({"prompt_id": 81, "prompt": ["one", "two"]}, "row-1", ("one", "two")),
    ({"question_id": 83, "category": "writing", "turns": ["one", "two"]}, "83", ("one", "two")),
]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(("row", "name", "turns"), PUBLIC)
def test_rows_of_the_public_sets_are_read_from_either_kind_of_file(
    tmp_path, kind, row, name, turns
):
    path = tmp_path / f"set.{kind}"
    if kind == "jsonl":
        written(path, row)
    else:
        pq.write_table(pa.Table.from_pylist([row]), path)
    (prompt,) = load_prompts(str(path))
    assert (prompt.id, prompt.turns) == (name, turns)
    assert prompt.category == row.get("category", "none")


def test_a_parquet_file_that_is_none_or_lacks_a_text_is_named(tmp_path):
    path = tmp_path / "p.parquet"
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"p\.parquet is no parquet file"):
        load_prompts(str(path))
    pq.write_table(pa.table({"prompt": ["x", None]}), path)
    with pytest.raises(ValueError, match="row 2: expected `prompt`"):
        load_prompts(str(path))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (["{not json"], "line 1: not JSON"),
        (["[1]"], "line 1: a list"),
        ([{"id": "a"}], "line 1: expected `prompt`"),
        ([{"prompt": "x"}, {"turns": []}], "line 2: expected"),
        ([{"prompt": ""}], "line 1: expected"),
        ([{"prompt": "x", "id": "a"}, {"prompt": "y", "id": "a"}], "id 'a' twice"),
        ([], "holds no prompts"),
    ],
)
def test_a_faulty_file_is_one_error_that_names_the_line(tmp_path, rows, words):
    with pytest.raises(ValueError, match=words):
        load_prompts(written(tmp_path / "p.jsonl", *rows))


def test_a_line_may_hold_the_line_separators_that_json_allows(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt": "a\u2028b\x85c"}, ensure_ascii=False), encoding="utf-8")
    assert load_prompts(str(path))[0].turns == ("a\u2028b\x85c",)


def test_a_file_that_is_not_utf8_says_so(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "caf\xe9"}\n')
    with pytest.raises(ValueError, match="not UTF-8"):
        load_prompts(str(path))


def test_a_missing_file_an_unknown_name_and_an_unknown_category_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"gone\.jsonl"):
        load_prompts(str(tmp_path / "gone.jsonl"))
    with pytest.raises(ValueError, match="'minni'"):
        load_prompts("minni")
    with pytest.raises(ValueError, match="no category poetry"):
        load_prompts(categories=["poetry"])
