"""The audit: equal, a near tie or a mismatch, where, by how much, and what is said of it."""

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import dflash_lab as dl
from dflash_lab import exactness
from dflash_lab.accept import RULES
from dflash_lab.analyse import audit_frame
from dflash_lab.backends import mlx_session, torch_session
from dflash_lab.decoding import AcceptanceWarning
from dflash_lab.exactness import first_difference, read_audits, tolerance_of, write_audit
from dflash_lab.tests.toys import ScriptedText, cut, scripted_pair

PROMPTS = [
    dl.Prompt(id=f"p{n}", turns=(f"say {n}",), category="chat", source="test") for n in range(3)
]
CONFIG = dl.DecodeConfig(block_size=8, max_new_tokens=30)


@pytest.fixture(autouse=True)
def drafts_of_random_weights_go_uncommented():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AcceptanceWarning)
        yield


def parting_at(monkeypatch, place, gaps):
    """A pair whose library says another token at `place`; the target's pass finds those gaps."""
    pair = scripted_pair(cut(3))
    own = pair.models.library_generate

    def changed(*asked):
        made = own(*asked)
        tokens = list(made.tokens)
        tokens[place] += 1
        return replace(made, tokens=tuple(tokens))

    def read(prompt, tokens):
        margins = [gaps.get(n, 0.0) for n in range(len(tokens))]
        sizes = [20.0] * len(tokens)
        return ScriptedText(choices=list(tokens), margins=margins, leads=margins, sizes=sizes)

    # set on the class: the models have slots
    monkeypatch.setattr(type(pair.models), "library_generate", lambda self, *asked: changed(*asked))
    monkeypatch.setattr(type(pair.models), "anchors", lambda self, *text: read(*text))
    monkeypatch.setattr(pair.models, "dtype", "bfloat16")
    return pair


@pytest.mark.parametrize(
    ("ours", "reference", "place"),
    [
        ((1, 2), (1, 2), None),
        ((1, 2), (1, 3), 1),
        ((1,), (1, 2), 1),
        ((1, 2), (1,), 1),
        ((), (), None),
    ],
)
def test_the_first_difference_is_found_even_where_one_text_is_shorter(ours, reference, place):
    assert first_difference(ours, reference) == place


def test_a_right_decoder_is_equal_on_every_prompt():
    made = dl.audit(scripted_pair(cut(3)), PROMPTS, config=CONFIG)
    assert (made.count("equal"), len(made.prompts), made.dtype) == (3, 3, "float32")
    assert {(row.first_difference, row.gap, row.told) for row in made.prompts} == {(None, None, "")}
    assert made.sentence == (
        "exact in float32: 3 of 3 prompts equal to transformers' generate at block size 8, "
        "token for token"
    )


def test_a_broken_decoder_is_a_mismatch_with_place_both_tokens_and_margin(monkeypatch):
    right = RULES["match"]
    monkeypatch.setitem(RULES, "match", lambda v: min(right(v) + 1, len(v.drafted)))
    made = dl.audit(scripted_pair(cut(3)), PROMPTS, config=CONFIG)
    assert made.count("mismatch") == 3
    for row in made.prompts:
        assert row.first_difference == 4  # prefill, three right drafts, then the wrong one
        assert row.ours == (row.reference_token + 1) % 512
        assert row.margin == 1.0  # by which the scripted target prefers a token
        assert "mismatch at new token 4" in row.told
    assert made.sentence.startswith("in float32 3 of 3 differ by more than rounding explains")


@pytest.mark.parametrize(
    ("gaps", "label", "worst"),
    [
        ({9: 0.1}, "near tie", 9),
        ({9: 0.375}, "near tie", 9),  # three steps of bfloat16 from 16 to 32
        ({9: 0.38}, "mismatch", 9),
        ({9: 0.1, 20: 2.0}, "mismatch", 20),  # a fault may show only after a near tie
        ({3: 2.0, 9: 0.1}, "near tie", 9),  # before it both texts are one
    ],
)
def test_a_difference_is_a_near_tie_only_while_rounding_explains_all_of_it(
    monkeypatch, gaps, label, worst
):
    made = dl.audit(parting_at(monkeypatch, 9, gaps), PROMPTS[:1], config=CONFIG)
    (row,) = made.prompts
    assert (row.label, row.first_difference, row.gap_at) == (label, 9, worst)
    assert (row.margin, row.gap, row.tolerance) == (gaps[9], gaps[worst], 0.375)


def test_a_tolerance_that_is_named_counts_instead(monkeypatch):
    pair = parting_at(monkeypatch, 9, {9: 0.1})
    for tolerance, label in ((0.1, "near tie"), (0.09, "mismatch"), (0, "mismatch")):
        made = dl.audit(pair, PROMPTS[:1], config=CONFIG, tolerance=tolerance)
        assert (made.prompts[0].label, made.prompts[0].tolerance) == (label, tolerance)


def test_the_tolerance_grows_with_the_spacing_of_the_dtype_at_the_size_of_the_logits():
    assert tolerance_of("bfloat16", 16.0) == tolerance_of("bfloat16", 31.9) == 3 / 8
    assert tolerance_of("bfloat16", 32.0) == 2 * tolerance_of("bfloat16", 31.9)
    assert tolerance_of("float16", 20.0) == tolerance_of("bfloat16", 20.0) / 8
    assert 5e-5 < tolerance_of("float32", 20.0) < 1e-4


@pytest.mark.parametrize("short", ["ours", "the library's"])
def test_an_output_that_ends_too_early_is_a_mismatch(monkeypatch, short):
    pair = scripted_pair(cut(3))
    if short == "ours":
        whole = dl.decode(pair, PROMPTS[0].turns[0], CONFIG)
        lost = replace(whole, blocks=whole.blocks[:2])  # 1 + 4 + 4 tokens
        monkeypatch.setattr(exactness, "decode", lambda *asked, **more: lost)
    else:
        own = exactness.reference_tokens
        monkeypatch.setattr(exactness, "reference_tokens", lambda *asked: own(*asked)[:9])
    (row,) = dl.audit(pair, PROMPTS[:1], config=CONFIG).prompts
    assert (row.label, row.first_difference, row.gap) == ("mismatch", 9, None)
    assert (row.ours is None) == (short == "ours")
    assert "one of the two texts ends there" in row.told


def ruin_a_row(monkeypatch, backend):
    """Wherever rows are taken back, what the layers hold of the position before goes too."""
    session = {"torch": torch_session, "mlx": mlx_session}[backend]
    right = session.take_back

    def wrong(cache, tokens):
        right(cache, tokens)
        if backend == "torch":
            with torch.inference_mode():
                for layer in cache.layers:
                    layer.keys[:, :, layer.get_seq_length() - 1] = 0
                    layer.values[:, :, layer.get_seq_length() - 1] = 0
        else:
            cache[0].keys[:, :, cache[0].offset - 1] = 0

    monkeypatch.setattr(session, "take_back", wrong)


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_a_cache_fault_in_a_real_pair_is_a_mismatch_and_without_it_all_is_equal(
    monkeypatch, qwen3_toy, backend
):
    pair = qwen3_toy.load(backend=backend)
    config = replace(CONFIG, max_new_tokens=16)
    sound = dl.audit(pair, PROMPTS[:1], config=config)
    ruin_a_row(monkeypatch, backend)
    broken = dl.audit(pair, PROMPTS[:1], config=config)
    assert (sound.prompts[0].label, broken.prompts[0].label) == ("equal", "mismatch")
    library = {"torch": "transformers' generate", "mlx": "mlx-lm's generate"}[backend]
    assert library in sound.sentence
    assert "lossless" not in sound.sentence + broken.sentence


@pytest.mark.slow
def test_rounding_in_bfloat16_is_a_near_tie_and_a_cache_fault_beside_it_a_mismatch(
    monkeypatch, qwen3_toy
):
    pair = qwen3_toy.load(dtype="bfloat16")
    prompts = [replace(PROMPTS[0], id=f"p{n}", turns=(f"say {n}",)) for n in range(20)]
    config = replace(CONFIG, max_new_tokens=128)
    sound = dl.audit(pair, prompts, config=config)
    assert sound.count("near tie") >= 1
    assert sound.count("mismatch") == 0
    assert "at a near tie" in sound.sentence
    assert "in bfloat16" in sound.sentence
    ruin_a_row(monkeypatch, "torch")
    assert dl.audit(pair, prompts[:2], config=config).count("mismatch") == 2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_embedded_pair_has_no_mismatch_and_an_injected_one_is_seen(monkeypatch, dtype):
    pair = dl.load_pair("smollm2", dtype=dtype)
    prompts, config = dl.load_prompts(limit=2), replace(CONFIG, max_new_tokens=16)
    sound = dl.audit(pair, prompts, config=config)
    assert sound.count("mismatch") == 0
    assert dtype != "float32" or sound.count("equal") == 2
    ruin_a_row(monkeypatch, "torch")
    assert dl.audit(pair, prompts, config=config).count("mismatch") >= 1


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"temperature": 1.0}, "temperature is 1"),
        ({"repetition_penalty": 1.5}, "repetition_penalty 1.5"),
        ({"stop_strings": ("a",)}, "stop_strings"),
    ],
)
def test_what_the_reference_does_not_do_is_refused_by_name(config, words):
    with pytest.raises(ValueError, match=words):
        dl.audit(scripted_pair(), PROMPTS, config=replace(CONFIG, **config))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"prompts": []}, "no prompt"),
        ({"tolerance": -1}, "tolerance is -1"),
        ({"tolerance": float("nan")}, "tolerance is nan"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
    ],
)
def test_an_audit_of_nothing_or_by_no_measure_is_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        dl.audit(scripted_pair(), **({"prompts": PROMPTS} | settings))


def test_a_pair_is_loaded_anew_in_another_dtype_and_left_alone_in_its_own(qwen3_toy, toy_pair):
    assert exactness.in_dtype(toy_pair, "float32") is toy_pair
    assert exactness.in_dtype(toy_pair, None) is toy_pair
    assert exactness.in_dtype(toy_pair, "bfloat16").models.dtype == "bfloat16"


def test_nothing_that_a_user_reads_calls_decoding_lossless_without_more():
    root = Path(dl.__file__).parent
    read = [*root.rglob("*.py"), *root.rglob("*.js"), *root.rglob("*.html")]
    read += [*root.parent.glob("notebooks/*.ipynb"), *root.parent.glob("README.md")]
    texts = {path: path.read_text(encoding="utf-8") for path in read if "tests" not in path.parts}
    assert len(texts) > 50
    assert not [path.name for path, text in texts.items() if "lossless" in text.lower()]


# --- beside a run -------------------------------------------------------------------------------

SWEEP = dl.SweepConfig(block_sizes=(1, 4), max_prompts=3, max_new_tokens=12, warm_up=False)


def test_a_sweep_keeps_its_audit_and_does_not_make_it_twice(tmp_path):
    pair, labels = scripted_pair(cut(3)), []
    run = dl.sweep(SWEEP, tmp_path, lambda at: labels.append(at.label), pair=pair, audit=True)
    (made,) = read_audits(run)
    assert (made.block_size, made.count("equal")) == (4, 3)
    assert [row.prompt_id for row in made.prompts] == [p.id for p in dl.load_prompts(limit=3)]
    assert "audit: float32" in labels
    asked = len(pair.models.generated)
    dl.sweep(SWEEP, tmp_path, pair=pair, audit=True)
    assert len(pair.models.generated) == asked
    dl.sweep(replace(SWEEP, max_new_tokens=13), tmp_path, pair=pair, audit=True)
    assert len(pair.models.generated) > asked


@pytest.mark.parametrize(
    ("drafts", "plain", "audits"),
    [
        ("bfloat16", ("float32",), {"bfloat16", "float32"}),
        ("float32", ("bfloat16",), {"float32"}),
        ("bfloat16", (), {"bfloat16"}),
    ],
)
def test_a_sweep_audits_the_dtype_that_drafts_and_float32_and_no_other(
    tmp_path, drafts, plain, audits
):
    asked = dl.SweepConfig(
        pair="tiny",
        dtype=drafts,
        device="cpu",
        plain_dtypes=plain,
        block_sizes=(4,),
        max_prompts=1,
        max_new_tokens=4,
        warm_up=False,
    )
    run = dl.sweep(asked, tmp_path, audit=True)
    assert {made.dtype for made in read_audits(run)} == audits


def test_a_sweep_that_draws_tokens_cannot_be_audited_and_says_so_first(tmp_path):
    with pytest.raises(ValueError, match="an audit compares greedy text"):
        dl.sweep(replace(SWEEP, temperature=1.0, seed=0), tmp_path / "run", audit=True)
    assert not (tmp_path / "run").exists()


def test_kept_audits_are_read_back_and_are_a_frame_of_a_row_a_prompt(monkeypatch, tmp_path):
    run = dl.sweep(SWEEP, tmp_path, pair=scripted_pair(cut(3)))
    assert audit_frame(run).empty
    right = dl.audit(scripted_pair(cut(3)), PROMPTS, config=CONFIG)
    parted = dl.audit(parting_at(monkeypatch, 9, {9: 0.25}), PROMPTS[:2], config=CONFIG)
    for made in (parted, right):
        write_audit(run, made)
    assert read_audits(dl.open_run(tmp_path)) == [right, parted]
    frame = audit_frame(run)
    assert list(frame["dtype"]) == ["float32"] * 3 + ["bfloat16"] * 2
    assert list(frame["label"]) == ["equal"] * 3 + ["near tie"] * 2
    assert frame["first_difference"].isna().tolist() == [True] * 3 + [False] * 2
    assert frame["margin"].iloc[-1] == 0.25
