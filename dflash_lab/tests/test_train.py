"""Training: rows, loss, batches, and a fit that resumes to the same weights."""

import json
from collections import namedtuple
from dataclasses import replace

import pytest
import torch

from dflash_lab.backends.torch_model import DraftNetwork
from dflash_lab.checkpoint import parse_draft_config
from dflash_lab.tests.toys import draft_json
from dflash_lab.train.features import cache_features, missing_of_cache
from dflash_lab.train.fit import (
    IGNORED,
    Batches,
    BlockLoss,
    FitConfig,
    LossNotFinite,
    LossSums,
    block_loss,
    decay_weights,
    fit,
    held_out_survival,
    pace_weights,
    warm_start,
)
from dflash_lab.train.rows import (
    Row,
    imported_rows,
    loop_start,
    ngram_hashes,
    split,
    usable,
)

SMALL = FitConfig(
    steps=6,
    rows_a_step=2,
    labels_a_step=56,
    widths=((4, 0.5), (8, 0.5)),
    frequent=40,
    sampled=8,
    checkpoint_s=0.0,
    evaluate_every=3,
)


def test_pace_weights_are_those_of_the_paper():
    weights = pace_weights(torch.full((1, 3), 0.5), torch.ones(1, 3), 0.5)
    torch.testing.assert_close(weights, torch.tensor([[1.734375, 0.984375, 0.421875]]))


def test_a_position_that_is_not_counted_multiplies_by_one_and_adds_nothing():
    likelihood = torch.tensor([[0.5, 0.1, 0.5]])
    weights = pace_weights(likelihood, torch.tensor([[1.0, 0.0, 1.0]]), 0.5)
    torch.testing.assert_close(weights, torch.tensor([[0.75 + 0.75**2, 0.0, 0.75**2]]))


def loss_inputs(labels, vocabulary=7):
    torch.manual_seed(0)
    logits = torch.randn(*labels.shape, vocabulary)
    nothing = torch.full((*labels.shape, 2), IGNORED)
    return logits, labels, nothing, torch.zeros(*labels.shape, 2)


def test_the_loss_is_the_weighted_mean_of_the_cross_entropies():
    labels = torch.tensor([[1, 2, IGNORED]])
    logits, *rest = loss_inputs(labels)
    sums = block_loss(logits, *rest, replace(SMALL, soft=0.0))
    entropy = -logits.log_softmax(-1)[0, [0, 1], [1, 2]]
    s = 0.5 * (-entropy).exp() + 0.5
    weights = torch.stack((s[0] + s[0] * s[1], s[0] * s[1]))
    torch.testing.assert_close(sums.loss / sums.weight, (weights * entropy).sum() / weights.sum())
    assert sums.counted.tolist() == [1, 1, 0]


def test_decay_weights_are_those_of_the_paper():
    for drafted, last in ((7, 0.223), (9, 0.202), (15, 0.135)):
        weights = decay_weights(torch.ones(1, drafted))[0]
        assert weights[0] == 1
        assert weights[-1].item() == pytest.approx(last, abs=5e-4)


def test_soft_labels_pull_towards_the_targets_likeliest_tokens():
    labels = torch.tensor([[1]])
    logits = torch.zeros(1, 1, 7, requires_grad=True)
    ids, share = torch.tensor([[[3, 4]]]), torch.tensor([[[0.75, 0.25]]])
    block_loss(logits, labels, ids, share, replace(SMALL, soft=1.0)).loss.backward()
    pull = -logits.grad[0, 0]
    assert pull[3] > pull[4] > 0 > pull[1]


def test_a_batch_without_one_label_is_an_error_and_not_a_nan():
    with pytest.raises(ValueError, match="every label is -100"):
        block_loss(*loss_inputs(torch.full((2, 3), IGNORED)), SMALL)


def test_a_repetition_loop_is_found_where_it_begins():
    varied = [(7 * n) % 101 for n in range(100)]
    assert loop_start(varied) is None
    start = loop_start([*varied, *([5, 6, 7] * 40)])
    assert 90 <= start <= 125
    assert loop_start([1] * 30) is None  # shorter than a span: nothing to say


class WordTokenizer:
    chat_template = "{{ messages }}"

    def apply_chat_template(self, messages, add_generation_prompt, return_dict):
        return {"input_ids": [len(word) for word in messages[0]["content"].split()]}

    def decode(self, ids):
        return " ".join(f"w{token}" for token in ids)


def test_rows_are_cut_dropped_and_counted(tmp_path):
    varied = [(7 * n) % 101 for n in range(100)]
    closed = " ".join(f"word{n}" for n in range(13))
    rows = [
        {"prompt": "one", "response_ids": varied},
        {"prompt": "one", "response_ids": varied},
        {"prompt": "short", "response_ids": [1, 2]},
        {"prompt": "loop", "response_ids": [*varied, *([5, 6, 7] * 40)]},
        {"prompt": f"say {closed} now", "response_ids": varied},
        {"prompt": "echo", "response_ids": list(range(50, 80))},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    forbidden = [closed, " ".join(f"w{n}" for n in range(55, 68))]
    kept, counts = usable(imported_rows(path, WordTokenizer(), 512), WordTokenizer(), forbidden)
    assert [row.prompt for row in kept] == ["one", "loop"]
    assert (counts.read, counts.used, counts.duplicates) == (6, 2, 1)
    assert (counts.too_short, counts.loops_cut, counts.overlapping) == (1, 1, 2)
    assert counts.answer_tokens == sum(len(row.answer_ids) for row in kept)


def test_ngrams_ignore_case_and_punctuation_and_need_13_words():
    text = "One two, three four five six seven eight nine ten eleven twelve thirteen!"
    assert len(ngram_hashes(text)) == 1
    assert ngram_hashes(text) == ngram_hashes(text.upper().replace(",", " --"))
    assert ngram_hashes("too short") == set()


def test_the_split_depends_on_the_prompts_and_not_on_their_order():
    rows = [Row(prompt=f"p{n}", prompt_ids=(n,), answer_ids=(2,)) for n in range(20)]
    train, held = split(rows, 5)
    assert len(held) == 5
    again, held_again = split(rows[::-1], 5)
    assert (train, held) == (again, held_again)


@pytest.fixture(scope="module")
def stage(tmp_path_factory, llama_toy):
    """Target, rows the target wrote itself, and their features."""
    target = llama_toy.load().models.target
    rows = [
        Row(prompt=str(n), prompt_ids=prompt, answer_ids=text[: 20 + 7 * n])
        for n, (prompt, text) in enumerate(zip(llama_toy.prompts, llama_toy.greedy, strict=True))
    ]
    cache = cache_features(tmp_path_factory.mktemp("features"), rows, target, (1, 2))
    return target, rows, cache


def new_network(seed=0):
    torch.manual_seed(seed)
    return DraftNetwork(parse_draft_config(draft_json()))


def test_cached_features_are_the_targets_and_likeliest_tokens_its_choices(stage):
    target, rows, cache = stage
    for index, row in enumerate(rows):
        features, likeliest, probabilities = cache.row(index)
        ids = torch.tensor([row.prompt_ids + row.answer_ids])
        logits, real = target.logits(ids, target.new_cache(), (1, 2))
        torch.testing.assert_close(features.float(), real[0], atol=0.05, rtol=0.02)
        first = len(row.prompt_ids) - 1
        said = logits[0].softmax(-1).gather(-1, likeliest)[first:]
        torch.testing.assert_close(probabilities[first:], said, atol=1e-3, rtol=1e-3)
        assert likeliest[first:-1, 0].tolist() == list(row.answer_ids)
        assert (probabilities[first:-1].diff() <= 0).all()


def test_features_resume_and_refuse_other_rows(stage, tmp_path, monkeypatch):
    target, rows, whole = stage
    reads = []
    real = type(target).read
    monkeypatch.setattr(type(target), "read", lambda *a: reads.append(1) or real(*a))
    cache_features(tmp_path, rows, target, (1, 2), tokens_at_once=1)
    assert len(reads) == len(rows)
    again = cache_features(tmp_path, rows, target, (1, 2))
    assert len(reads) == len(rows)
    assert (again.features == whole.features).mean() > 0.99
    with pytest.raises(ValueError, match="other rows or taps"):
        cache_features(tmp_path, rows[:2], target, (1, 2))


def test_what_lies_in_the_cache_needs_no_room_and_no_time_again(stage, tmp_path, monkeypatch):
    target, rows, whole = stage
    lengths = sorted(len(row.prompt_ids) + len(row.answer_ids) for row in rows)
    fused = 2 * target.hidden_size
    positions, size = missing_of_cache(tmp_path, rows, fused)
    assert positions == sum(lengths)
    assert size == sum(part.nbytes for part in (whole.features, whole.likeliest)) + (
        whole.probabilities.nbytes
    )
    cache_features(tmp_path, rows, target, (1, 2), tokens_at_once=1)
    assert missing_of_cache(tmp_path, rows, fused) == (0, 0)
    (tmp_path / "done.json").write_text(str(len(rows) - 1))
    assert missing_of_cache(tmp_path, rows, fused)[0] == lengths[-1]
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(10, 10, 0))
    with pytest.raises(OSError, match="Use fewer rows"):
        cache_features(tmp_path, rows, target, (1, 2))
    (tmp_path / "done.json").write_text(str(len(rows)))
    cache_features(tmp_path, rows, target, (1, 2))


def test_too_small_a_disk_is_told_before_anything_is_written(stage, tmp_path, monkeypatch):
    target, rows, _ = stage
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(10, 10, 0))
    with pytest.raises(OSError, match=r"take .* GB and .* has 0\.0 GB free"):
        cache_features(tmp_path, rows, target, (1, 2))


def test_batches_depend_on_the_step_alone_and_label_what_follows_the_anchor(stage):
    _, rows, cache = stage
    batches = Batches(rows, cache, SMALL, 512)
    for step in range(6):
        batch, again = batches[step], batches[step]
        assert all(torch.equal(batch[key], again[key]) for key in batch)
        kept = batch["vocabulary"]
        for place, index in enumerate(batches.rows_of(step)):
            text = torch.tensor(rows[index].prompt_ids + rows[index].answer_ids)
            for anchor, first, labels in zip(
                batch["anchors"][place], batch["first"][place], batch["labels"][place], strict=True
            ):
                if anchor == 0:
                    assert (labels == IGNORED).all()  # padding
                    continue
                assert anchor >= len(rows[index].prompt_ids)
                assert first == text[anchor]
                for k, label in enumerate(labels.tolist(), start=1):
                    if anchor + k < len(text):
                        assert kept[label] == text[anchor + k]
                    else:
                        assert label == IGNORED


def test_every_row_comes_once_an_epoch(stage):
    _, rows, cache = stage
    batches = Batches(rows, cache, SMALL, 512)
    seen = [row for step in range(len(batches)) for row in batches.rows_of(step)]
    assert sorted(seen) == list(range(len(rows)))


def test_the_training_forward_is_the_decoding_forward(stage, llama_toy):
    """Masked training states of an anchor equal what a live session drafts from."""
    from dflash_lab.backends.torch_session import TorchSession

    target, rows, _ = stage
    network = new_network().eval()
    row = rows[3]
    text = row.prompt_ids + row.answer_ids
    session = TorchSession(target, network, None)
    session.prefill(text[:-1])
    _, features = target.logits(torch.tensor([text]), target.new_cache(), (1, 2))
    positions = torch.arange(len(text))
    with torch.inference_mode():
        context = network.context(features, positions)
        for anchor in (len(row.prompt_ids), len(text) - 1):
            live = TorchSession(target, network, None)
            live.prefill(text[:anchor])
            drafted = live.draft(text[anchor], 8).tokens[0, 1:]
            block = torch.full((1, 1, 8), network.config.mask_token)
            block[0, 0, 0] = text[anchor]
            states = network(target.embedding(block), torch.tensor([[anchor]]), context, positions)
            assert torch.equal(target.head(states[0, 0, 1:]).argmax(-1), drafted)


def run_fit(folder, stage, stop_at=None, **settings):
    target, rows, cache = stage
    network = new_network()
    warm_start(network, target)
    batches = Batches(rows, cache, SMALL, 512)
    if stop_at is not None:
        real = batches.__class__.__getitem__

        class Stopped(Batches):
            def __getitem__(self, step):
                if step == stop_at:
                    raise KeyboardInterrupt
                return real(self, step)

        batches = Stopped(rows, cache, SMALL, 512)
    measure = held_out_survival(target, rows[:1], cache, 0, 8)
    curve = fit(folder, network, target, batches, measure, replace(SMALL, **settings))
    return network, curve


@pytest.mark.parametrize(
    "settings", [{}, {"optimizer": "muon", "average": 0.9, "weights": "decay"}]
)
def test_a_fit_stopped_and_resumed_gives_the_weights_of_an_undisturbed_one(
    stage, tmp_path, settings
):
    whole, curve = run_fit(tmp_path / "whole", stage, **settings)
    with pytest.raises(KeyboardInterrupt):
        run_fit(tmp_path / "parts", stage, stop_at=4, **settings)
    resumed, resumed_curve = run_fit(tmp_path / "parts", stage, **settings)
    for (name, a), b in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert curve == resumed_curve
    assert [row["step"] for row in curve if row["name"] == "held-out tau"] == [3, 6]
    assert {row["slot"] for row in curve if row["name"] == "accuracy"} == set(range(1, 8))


def test_a_fit_stops_when_the_held_out_tau_no_longer_rises_and_gives_the_best_weights(
    stage, tmp_path
):
    target, rows, cache = stage
    network, settings = new_network(), replace(SMALL, steps=50, evaluate_every=1, patience=2)
    taus, seen = iter([0.1, 0.5, 0.3, 0.2]), []

    def measure(network):
        seen.append({name: value.clone() for name, value in network.state_dict().items()})
        return [next(taus)]

    batches = Batches(rows, cache, settings, 512)
    curve = fit(tmp_path, network, target, batches, measure, settings)
    assert max(row["step"] for row in curve) == 4
    for name, value in network.state_dict().items():
        assert torch.equal(value, seen[1][name])


def test_a_checkpoint_of_other_settings_is_refused(stage, tmp_path):
    run_fit(tmp_path, stage, steps=2)
    with pytest.raises(ValueError, match="other settings"):
        run_fit(tmp_path, stage, steps=3)


def test_a_fit_learns_what_it_is_shown(stage):
    target, rows, cache = stage
    network = new_network()
    warm_start(network, target)
    batches = Batches(rows, cache, SMALL, 512)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    measured = BlockLoss(network, target, SMALL)
    losses = []
    for step in range(60):
        sums = measured(batches[step])
        loss = sums.loss / sums.weight
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])


def test_a_loss_that_is_not_finite_stops_the_fit_and_keeps_the_checkpoint(
    stage, tmp_path, monkeypatch
):
    run_fit(tmp_path, stage, steps=6)
    before = (tmp_path / "checkpoint.pt").read_bytes()
    one = torch.ones(())
    nothing = LossSums(torch.tensor(float("nan"), requires_grad=True), one, one[None], one[None])
    monkeypatch.setattr("dflash_lab.train.fit.BlockLoss.forward", lambda *_: nothing)
    with pytest.raises(LossNotFinite, match="loss is nan at step 0"):
        run_fit(tmp_path / "new", stage)
    assert (tmp_path / "checkpoint.pt").read_bytes() == before
