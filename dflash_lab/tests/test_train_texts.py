"""Texts written by the target: many at once, refilled, stored in shards, resumed."""

from itertools import islice

import pytest

from dflash_lab.tests.toys import END, TEMPLATE, byte_tokenizer, toy_models
from dflash_lab.train.generate import Sampling, Text, Writer
from dflash_lab.train.prompts import (
    Opening,
    PromptWriter,
    TrainingPrompt,
    framed_prompts,
    read_openings,
    template_prefix,
    whole_sentences,
    without_repeats,
)
from dflash_lab.train.shards import OtherSettings, Shards, read_shards, write_shards


@pytest.fixture(scope="module")
def target(llama_toy):
    return llama_toy.load().models.target


def texts_of(toy):
    """Prompts of different lengths, each several times, so that slots are refilled."""
    return [
        Text(index=index, prompt_ids=prompt[: 3 + index] if index >= 4 else prompt)
        for index, prompt in enumerate(toy.prompts * 3)
    ]


def written(writer, texts):
    ended = [text for batch in writer.write(texts) for text in batch]
    return {text.index: text for text in ended}


@pytest.mark.parametrize("slots", [1, 3, 16])
def test_every_text_is_the_targets_own_greedy_text_however_many_share_a_pass(
    target, llama_toy, slots
):
    texts = [Text(index=i, prompt_ids=ids) for i, ids in enumerate(llama_toy.prompts)]
    # Different lengths: slots become free at different passes.
    texts += [
        Text(index=4 + i, prompt_ids=(*ids, *text[:8]), tokens=list(text[8 : 9 + 5 * i]))
        for i, (ids, text) in enumerate(zip(llama_toy.prompts, llama_toy.greedy, strict=True))
    ]
    writer = Writer(target, 40, frozenset(), slots=slots, keep_loops=True)
    found = written(writer, texts)
    assert sorted(found) == list(range(8))
    for index, greedy in enumerate(llama_toy.greedy):
        assert found[index].tokens == list(greedy[:40])
        assert found[4 + index].tokens == list(greedy[8:48])
        assert found[index].stop == "length"
    assert writer.active == []


@pytest.mark.parametrize("kind", [pytest.param("gpt_oss", marks=pytest.mark.slow), "gemma3"])
def test_texts_of_a_target_with_sliding_layers_are_its_greedy_texts(kind, tmp_path):
    toy = toy_models(tmp_path, kind=kind, prompts=3)
    texts = [Text(index=i, prompt_ids=ids[: 40 - 9 * i]) for i, ids in enumerate(toy.prompts)]
    texts += [Text(index=3 + i, prompt_ids=ids) for i, ids in enumerate(toy.prompts)]
    target = toy.load().models.target
    found = written(Writer(target, 40, frozenset(), slots=4, keep_loops=True), texts)
    for i, greedy in enumerate(toy.greedy):
        assert found[3 + i].tokens == list(greedy[:40])


def test_a_stop_token_and_a_loop_end_a_text(target, llama_toy):
    greedy = llama_toy.greedy[0]
    stop = greedy[20]
    ended = written(Writer(target, 64, frozenset({stop})), texts_of(llama_toy)[:1])[0]
    assert (ended.stop, ended.tokens) == ("end", list(greedy[: greedy.index(stop) + 1]))
    looping = Text(index=0, prompt_ids=llama_toy.prompts[0], tokens=[5, 6, 7] * 26 + [5])
    assert written(Writer(target, 200, frozenset()), [looping])[0].stop == "loop"


def test_a_sampled_text_depends_on_its_seed_and_index_and_not_on_its_neighbours(target, llama_toy):
    prompt = llama_toy.prompts[0]
    texts = lambda: [Text(index=i, prompt_ids=prompt) for i in range(6)]  # noqa: E731
    hot = Sampling(temperature=1.0, top_p=0.9, seed=3)
    alone = written(Writer(target, 20, frozenset(), hot, slots=1), texts())
    together = written(Writer(target, 20, frozenset(), hot, slots=6), texts())
    assert {i: t.tokens for i, t in alone.items()} == {i: t.tokens for i, t in together.items()}
    assert len({tuple(text.tokens) for text in alone.values()}) > 3
    other = written(Writer(target, 20, frozenset(), Sampling(temperature=1.0, seed=4)), texts())
    assert any(other[i].tokens != alone[i].tokens for i in range(6))


def test_a_tiny_nucleus_is_greedy(target, llama_toy):
    cold = Sampling(temperature=1.0, top_p=1e-6)
    texts = [Text(index=0, prompt_ids=llama_toy.prompts[0])]
    assert written(Writer(target, 30, frozenset(), cold), texts)[0].tokens == list(
        llama_toy.greedy[0][:30]
    )


def test_settings_of_sampling_are_checked():
    with pytest.raises(ValueError, match="temperature is -1"):
        Sampling(temperature=-1.0)
    with pytest.raises(ValueError, match="top_p 0"):
        Sampling(top_p=0.0)


class Killed(Exception):
    """Stands for a kill between two passes."""


def run_and_kill(folder, toy, target, passes):
    """Write until a kill after some passes; whether it came. Nothing is saved after the kill."""
    left, disk = iter(range(passes)), {}

    def enough(tokens):
        if next(left, None) is None:
            disk.update({path: path.read_bytes() for path in folder.iterdir()})
            raise Killed
        return False

    writer = Writer(target, 30, frozenset(), slots=2, keep_loops=True)
    try:
        write_shards(
            Shards(folder, {"of": "toy"}, 512), writer, texts_of(toy), enough, lambda line: None
        )
    except Killed:
        for path in folder.iterdir():
            path.unlink()
        for path, content in disk.items():
            path.write_bytes(content)
    return bool(disk)


def test_a_killed_writer_goes_on_with_what_was_finished_and_under_way(
    target, llama_toy, tmp_path, monkeypatch
):
    monkeypatch.setattr("dflash_lab.train.shards.SAVE_S", 0.0)
    monkeypatch.setattr("dflash_lab.train.shards.ROWS_A_SHARD", 3)
    whole = written(Writer(target, 30, frozenset(), slots=2, keep_loops=True), texts_of(llama_toy))
    assert run_and_kill(tmp_path, llama_toy, target, 5)
    assert run_and_kill(tmp_path, llama_toy, target, 60)
    assert 0 < len(list(read_shards(tmp_path))) < 12
    assert not run_and_kill(tmp_path, llama_toy, target, 10_000)
    found = {text.index: text for text in read_shards(tmp_path)}
    assert {i: t.tokens for i, t in found.items()} == {i: t.tokens for i, t in whole.items()}
    assert {i: t.prompt_ids for i, t in found.items()} == {
        t.index: t.prompt_ids for t in texts_of(llama_toy)
    }
    assert len(list(tmp_path.glob("shard-*.parquet"))) == 4
    assert not list(tmp_path.glob("*.tmp.*"))


def test_shards_of_other_settings_are_refused(tmp_path):
    Shards(tmp_path, {"max_new_tokens": 30}, 512)
    with pytest.raises(OtherSettings, match="other settings"):
        Shards(tmp_path, {"max_new_tokens": 31}, 512)


def test_openings_are_varied_and_every_one_comes_in_turn():
    openings = read_openings()
    assert {"maths", "code", "chat", "rewriting", "extraction"} <= {o.category for o in openings}
    writer = PromptWriter(byte_tokenizer(TEMPLATE), 512, openings, seed=0)
    first = [writer.opening(index) for index in range(len(openings))]
    assert sorted(first, key=repr) == sorted(openings, key=repr)
    assert first != openings
    tokenizer = byte_tokenizer(TEMPLATE)
    begun = tokenizer.decode(next(writer.texts()).prompt_ids)
    assert begun == template_prefix(tokenizer) + first[0].before + first[0].opening


def test_framed_prompts_are_many_all_different_and_the_first_ones_stay_the_first():
    many = framed_prompts(20_000, seed=1)
    assert len(many) == len({text for _, text in many}) > 10_000
    assert {"writing", "chat", "reasoning", "code", "maths"} <= {kind for kind, _ in many}
    assert not [text for _, text in many if "{" in text or "}" in text]
    assert framed_prompts(50, seed=1) == many[:50] != framed_prompts(50, seed=2)


def test_what_the_target_wrote_becomes_a_prompt_or_is_left_out():
    tokenizer = byte_tokenizer(TEMPLATE)
    opening = Opening(category="code", opening="def ", before="Solve:\n", closing="\n```")
    writer = PromptWriter(tokenizer, 512, [opening], seed=0)
    ids = tokenizer("add(a, b) gives the sum of two numbers. And th")["input_ids"]

    def prompt(stop, tokens=ids):
        return writer.prompt(Text(index=0, prompt_ids=(), tokens=list(tokens), stop=stop))

    assert prompt("length").text == "Solve:\ndef add(a, b) gives the sum of two numbers.\n```"
    assert prompt("end", [*ids, END]).text.endswith("And th\n```")
    assert prompt("loop") is None
    assert prompt("end", [*tokenizer("x")["input_ids"], END]) is None  # two tokens
    assert prompt("length").source == "code"
    assert whole_sentences("no end") == "no end"


def test_a_target_without_a_tokenizer_writes_prompts_of_ids():
    writer = PromptWriter(None, 512, read_openings(), seed=0)
    begun = list(islice(writer.texts(), 50))
    assert len({text.prompt_ids for text in begun}) > 30
    made = writer.prompt(Text(index=0, prompt_ids=(7,), tokens=[8, 9]))
    assert (made.text, made.ids) == ("", (7, 8, 9))


def test_prompts_that_differ_in_case_and_punctuation_alone_are_one():
    made = [
        TrainingPrompt(text=text, ids=(n,), source="chat")
        for n, text in enumerate(["What is it?", "what is it", "Why is it?"])
    ]
    assert [p.text for p in without_repeats(made)] == ["What is it?", "Why is it?"]
