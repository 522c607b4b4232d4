"""Prompts from the bundled set, from files and from public sets."""

import json
import random
import time
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash_lab import load_prompts
from dflash_lab.public_sets import DataSetUnavailable


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
    ({"prompt_id": 81, "prompt": ["one", "two"]}, "81", ("one", "two")),
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


# CSV, templates, samples


def test_a_csv_file_keeps_commas_quotes_and_line_ends_inside_a_field(tmp_path):
    path = tmp_path / "p.csv"
    path.write_text(
        'id,prompt,category\r\na,"one, ""two""\nthree",chat\r\nb,plain,\r\n', encoding="utf-8"
    )
    first, second = load_prompts(str(path))
    assert (first.id, first.turns, first.category) == ("a", ('one, "two"\nthree',), "chat")
    assert (second.turns, second.category) == (("plain",), "none")


def test_a_csv_file_may_hold_turns_as_a_json_list_and_begin_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "p.csv"
    path.write_text('turns\n"[""one"", ""two""]"\n', encoding="utf-8-sig")
    assert load_prompts(str(path))[0].turns == ("one", "two")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"id,prompt\na,b,c\n", "record 1: more or fewer than the 2 fields"),
        (b"id,prompt\na\n", "record 1: more or fewer"),
        (b'prompt\n"open\n', "not CSV"),
        (b"prompt\ncaf\xe9\n", "not UTF-8"),
        (b"prompt\n", "holds no prompts"),
        (b"id\na\n", "record 1: expected `prompt`"),
    ],
)
def test_a_faulty_csv_file_is_one_error_that_names_the_place(tmp_path, text, words):
    path = tmp_path / "p.csv"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=words):
        load_prompts(str(path))


def test_a_template_makes_a_prompt_of_any_columns(tmp_path):
    path = written(tmp_path / "p.jsonl", {"title": "Bees {wild}", "n": 3})
    prompt = load_prompts(path, template="{n} lines on {title}, {{braces}} kept")[0]
    assert prompt.turns == ("3 lines on Bees {wild}, {braces} kept",)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{question} {topic}", "line 1: the template asks for question, topic, but the row has n"),
        ("{n", "cannot be read"),
        ("no field", r"has the fields \[\]"),
        ("{n.__class__}", "expected names of columns"),
        ("{}", "expected names of columns"),
    ],
)
def test_a_template_that_does_not_fit_is_one_error(tmp_path, template, words):
    path = written(tmp_path / "p.jsonl", {"n": 3, "title": "x"})
    with pytest.raises(ValueError, match=words):
        load_prompts(path, template=template)


def test_a_sample_depends_on_its_random_state_alone_and_grows_without_changing(tmp_path):
    path = written(tmp_path / "p.jsonl", *({"id": n, "prompt": f"p{n}"} for n in range(100)))

    def ids(limit, random_state):
        random.random()
        return [p.id for p in load_prompts(path, limit=limit, random_state=random_state)]

    ten = ids(10, 0)
    assert ten == ids(10, 0) == ids(20, 0)[:10] != ids(10, 1)
    assert ten != [str(n) for n in range(10)] and len(set(ten)) == 10
    random.seed(7)
    before = random.getstate()
    load_prompts(path, random_state=0)
    assert random.getstate() == before


# Public sets


ROWS = [{"question": "Two and two?", "answer": "2+2=<<2+2=4>>4\n#### 4"}, {"question": "One?"}]


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub that holds two rows under every name, and counts what it is asked."""
    monkeypatch.setenv("DFLASH_LAB_CACHE", str(tmp_path / "cache"))
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    asked = []

    def load_dataset(path, name=None, split=None, revision=None):
        asked.append((path, name, split, revision))
        return ROWS

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    monkeypatch.setattr(
        "huggingface_hub.HfApi.dataset_info",
        lambda self, repo, timeout: SimpleNamespace(sha="c0ffee"),
    )
    return asked


def test_a_public_set_is_fetched_once_at_the_commit_the_hub_has_then(hub, tmp_path):
    first = load_prompts("gsm8k")
    assert hub == [("openai/gsm8k", "main", "test", "c0ffee")]
    assert first[0].turns[0].startswith("Two and two?\n") and "\\boxed{}" in first[0].turns[0]
    assert (first[0].category, first[0].source) == ("maths", "gsm8k")
    assert first[0].answer.endswith("#### 4")
    assert load_prompts("gsm8k") == first
    assert len(hub) == 1
    kept = list((tmp_path / "cache" / "datasets").iterdir())
    assert [path.name for path in kept] == ["openai--gsm8k--main--test@c0ffee.jsonl"]


def test_a_revision_can_be_asked_for_and_is_passed_on(hub):
    load_prompts("gsm8k@abc123")
    load_prompts("hf:somebody/set:small:train@v2")
    load_prompts("hf:somebody/set")
    assert hub == [
        ("openai/gsm8k", "main", "test", "abc123"),
        ("somebody/set", "small", "train", "v2"),
        ("somebody/set", None, "test", "c0ffee"),
    ]


def test_a_local_file_of_a_sets_rows_is_asked_the_same_way(hub, tmp_path):
    path = written(tmp_path / "mine.jsonl", *ROWS)
    wanted = [(p.id, p.turns, p.category, p.answer) for p in load_prompts("gsm8k")]
    local = load_prompts(f"gsm8k={path}")
    assert [(p.id, p.turns, p.category, p.answer) for p in local] == wanted
    assert load_prompts(path)[0].turns == ("Two and two?",)


def test_without_a_network_a_public_set_is_one_error_at_once(hub, monkeypatch):
    def dead(self, repo, timeout):
        raise ConnectionError("no route\nto anywhere")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", dead)
    with pytest.raises(
        DataSetUnavailable, match=r"openai/gsm8k .*no route.*local \.jsonl"
    ) as caught:
        load_prompts("gsm8k")
    assert "\n" not in str(caught.value)
    assert hub == []


def test_offline_a_public_set_fails_within_seconds_and_files_still_load(monkeypatch, tmp_path):
    monkeypatch.setenv("DFLASH_LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    began = time.monotonic()
    with pytest.raises(DataSetUnavailable, match="Fetch it once with network"):
        load_prompts("gsm8k")
    assert time.monotonic() - began < 10
    assert load_prompts(written(tmp_path / "p.jsonl", {"prompt": "x"}))
    assert load_prompts()


def test_a_folder_on_this_disk_stands_for_a_hub_set(monkeypatch, tmp_path):
    monkeypatch.setenv("DFLASH_LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    (tmp_path / "set").mkdir()
    written(tmp_path / "set" / "train.jsonl", {"prompt": "x", "id": "a"})
    (prompt,) = load_prompts(f"hf:{tmp_path / 'set'}::train")
    assert (prompt.id, prompt.turns) == ("a", ("x",))


def test_a_hub_name_that_cannot_be_read_is_named():
    with pytest.raises(ValueError, match=r"expected hf:org/name"):
        load_prompts("hf:")
