"""A stream that its reader leaves, or closes from another thread, holds nothing of the target."""

import threading

import pytest

from dflash_lab import DecodeConfig, decode, stream

pytestmark = pytest.mark.usefixtures("quiet")

CONFIG = DecodeConfig(block_size=4, max_new_tokens=8)
LIMIT = 30  # seconds after which a thread counts as hanging


def in_a_thread(work):
    """What `work` returns in a thread of its own; what it raises is raised here."""
    found = []

    def run():
        try:
            found.append((work(), None))
        except BaseException as error:
            found.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT)
    assert found, "it hangs"
    ((result, error),) = found
    if error is not None:
        raise error
    return result


def what_it_is(target):
    """The target's layers and their classes as objects, and what the classes hold."""
    modules = target.model.modules()
    kinds = {type(part) for part in modules}
    return list(target.layers), {kind: dict(vars(kind)) for kind in kinds}


def check_that_an_abandoned_stream_disturbs_nobody(pair, prompts, texts):
    target = pair.models.target
    layers, kinds = what_it_is(target)
    abandoned = [stream(pair, prompts[0], CONFIG) for _ in "ab"]
    for one in abandoned:
        next(one)
        next(one)
    assert decode(pair, prompts[1], CONFIG).tokens == texts[1][:8]
    assert in_a_thread(lambda: decode(pair, prompts[1], CONFIG).tokens) == texts[1][:8]
    assert not target.lock.locked()
    in_a_thread(abandoned[0].close)
    abandoned[1].close()
    assert list(abandoned[0]) == []
    layers_after, kinds_after = what_it_is(target)
    assert all(a is b for a, b in zip(layers, layers_after, strict=True))
    assert kinds == kinds_after
    assert decode(pair, prompts[0], CONFIG).tokens == texts[0][:8]


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_an_abandoned_stream_disturbs_nobody_and_may_be_closed_from_another_thread(
    qwen3_toy, backend
):
    pair = qwen3_toy.load(backend=backend)
    check_that_an_abandoned_stream_disturbs_nobody(pair, qwen3_toy.prompts, qwen3_toy.greedy)


def begun(pair, prompt):
    """The tokens of a whole stream's blocks, and another one after its first block."""
    whole = [record.tokens for record in list(stream(pair, prompt, CONFIG))[1:]]
    other = stream(pair, prompt, CONFIG)
    next(other)
    assert next(other).tokens == whole[0]
    return whole, other


def test_a_torch_stream_begun_in_one_thread_goes_on_in_another(qwen3_toy, toy_pair):
    whole, other = begun(toy_pair, qwen3_toy.prompts[0])
    assert [record.tokens for record in in_a_thread(lambda: list(other))] == whole[1:]


def test_an_mlx_stream_begun_in_one_thread_is_refused_in_another_with_the_way_out(qwen3_toy):
    pair = qwen3_toy.load(backend="mlx")
    _, other = begun(pair, qwen3_toy.prompts[0])
    with pytest.raises(RuntimeError, match="closing it works from any thread"):
        in_a_thread(lambda: next(other))
    assert decode(pair, qwen3_toy.prompts[0], CONFIG).tokens == qwen3_toy.greedy[0][:8]
