"""The bundled prompts: their form, and that they are nobody else's."""

import gzip
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

PROMPTS = Path(__file__).parents[2] / "data" / "prompts"
SHORT = ("math", "code", "chat", "rewrite", "extract")
GRAM = 13
SAMPLES = (
    "gsm8k/test-sample.jsonl",
    "humaneval/test-sample.jsonl",
    "mt-bench/question-sample.jsonl",
    "spec-bench/question-sample.jsonl",
    "smollm2-selfgen/greedy-256.jsonl.gz",
)


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    lines = (PROMPTS / "mini.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def words(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\w+", text.lower()))


def grams(text: str) -> set[tuple[str, ...]]:
    """Every run of 13 words; the whole text where it is shorter than that."""
    run = words(text)
    return {run[i : i + GRAM] for i in range(max(1, len(run) - GRAM + 1))}


def strings(value: object) -> Iterator[str]:
    """Every text in a row of a data set, whatever the row calls its fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from strings(list(value.values()))
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)


def read_lines(path: Path) -> Iterator[str]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        yield from lines


def test_every_row_has_the_three_fields_and_a_text_without_stray_space(rows):
    for row in rows:
        assert set(row) == {"id", "category", "turns"}
        assert re.fullmatch(rf"{row['category']}-\d\d", row["id"])
        assert row["turns"]
        for turn in row["turns"]:
            assert turn == turn.strip() != ""


def test_ids_and_texts_are_unique(rows):
    assert len({row["id"] for row in rows}) == len(rows)
    assert len({words(row["turns"][0]) for row in rows}) == len(rows)


def test_there_are_at_least_24_short_prompts_with_five_a_category_and_four_long_ones(rows):
    counts = Counter(row["category"] for row in rows)
    assert set(counts) == {*SHORT, "long"}
    assert counts["long"] == 4
    assert counts.total() - counts["long"] >= 24
    assert all(counts[category] >= 5 for category in SHORT)


def test_the_first_twelve_prompts_cover_the_five_categories(rows):
    assert {row["category"] for row in rows[:12]} == set(SHORT)


def test_short_prompts_are_short_and_long_ones_grow_to_thousands_of_words(rows):
    lengths = [len(words(row["turns"][0])) for row in rows if row["category"] != "long"]
    assert max(lengths) <= 60
    long = [len(words(row["turns"][0])) for row in rows if row["category"] == "long"]
    assert long == sorted(long)
    assert long[0] >= 800  # 1,000 tokens and more: see the slow test
    assert long[-1] >= 3000


@pytest.mark.slow
def test_long_prompts_have_the_number_of_target_tokens_that_the_readme_says(rows):
    from dflash_lab import load_pair

    tokenizer = load_pair("smollm2", backend="torch").tokenizer
    long = {row["id"]: row["turns"][0] for row in rows if row["category"] == "long"}
    counted = {
        name: len(tokenizer.encode(text, add_special_tokens=False)) for name, text in long.items()
    }
    assert counted == stated_tokens()
    assert all(1000 <= count <= 6000 for count in counted.values())


def stated_tokens() -> dict[str, int]:
    table = re.findall(r"\| `(long-\d\d)` \| (\d+) \|", (PROMPTS / "README.md").read_text())
    return {name: int(count) for name, count in table}


def test_readme_counts_are_those_of_the_file(rows):
    table = re.findall(r"\| (\w+) \| (\d+) \|", (PROMPTS / "README.md").read_text())
    counts = Counter(row["category"] for row in rows)
    assert {name: int(count) for name, count in table} == counts


def test_a_run_of_13_words_and_a_whole_short_text_are_both_found():
    text = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
    assert grams(text) & grams("Well: " + text.upper() + "!")
    assert not grams(text) & grams(text.replace("seven", "7"))
    assert grams("Give me five tips.") == grams("give me FIVE tips")


@pytest.mark.parametrize("sample", SAMPLES)
def test_no_run_of_13_words_is_shared_with(sample, rows):
    folder = os.environ.get("DFLASH_LAB_DATASETS")
    if not folder:
        pytest.skip("DFLASH_LAB_DATASETS is not set: no sample data to compare with")
    bundled = {gram: row["id"] for row in rows for turn in row["turns"] for gram in grams(turn)}
    read, shared = 0, []
    for line in read_lines(Path(folder) / sample):
        for text in strings(json.loads(line)):
            read += 1
            shared += [(bundled[gram], text[:80]) for gram in grams(text) & bundled.keys()]
    assert read >= 40, f"{sample} holds only {read} texts"
    assert not shared
