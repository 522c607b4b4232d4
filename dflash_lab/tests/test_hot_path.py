"""What the loop itself costs on the embedded pair, and how it stands beside dflash 0.1.0's loop.

Seconds are those of one thread on its processor, which other programs cannot lengthen; with one
thread and no device to wait for they are the wall time of a machine left alone. They are measured
in a process of their own, since the shape checks of these tests would count as the loop's work:
`python -m dflash_lab.tests.test_hot_path bfloat16` prints them.
"""

import importlib
import json
import subprocess
import sys
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from time import thread_time

import numpy as np
import pytest

from dflash_lab import DecodeConfig, decode, load_pair, load_prompts, stream
from dflash_lab.analyse.resampling import draw_prompts, intervals
from dflash_lab.load import EMBEDDED
from dflash_lab.trace import BlockRecord

pytestmark = pytest.mark.thorough

DTYPES = ["bfloat16", "float32"]
NEW, PROMPTS, ROUNDS = 32, 8, 3
SLOW = {"PROMPTS": 3, "ROUNDS": 1}  # where the processor multiplies bfloat16 by hand
BLOCK = 16  # of the embedded draft
SHARE = 0.03  # of the time may be the loop's own


# --- the measurement, in a process of its own ---------------------------------------------------


@dataclass
class Ledger:
    """Seconds spent in the models: of nested calls the outermost counts, cache work within not."""

    seconds: float = 0.0
    inside: bool = False

    def model(self, call):
        @wraps(call)
        def timed(*args, **named):
            if self.inside:
                return call(*args, **named)
            self.inside, began = True, thread_time()
            try:
                return call(*args, **named)
            finally:
                self.inside = False
                self.seconds += thread_time() - began

        return timed

    def loop(self, call):
        @wraps(call)
        def timed(*args, **named):
            began = thread_time()
            try:
                return call(*args, **named)
            finally:
                self.seconds -= (thread_time() - began) * self.inside

        return timed


@contextmanager
def model_calls(pair):
    """Time the calls of both models and the choice of tokens; all else is the loop's."""
    import torch

    from dflash_lab.backends.torch_target import LayerCache

    ledger, target, draft = Ledger(), pair.models.target, pair.models.draft
    places = [(target.model, "forward"), (target.head, "forward"), (target.embedding, "forward")]
    places += [(draft, name) for name in ("forward", "context", "propose")]
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in places:
            patch.setattr(owner, name, ledger.model(getattr(owner, name)))
        patch.setattr(torch.Tensor, "argmax", ledger.model(torch.Tensor.argmax))
        patch.setattr(LayerCache, "update", ledger.loop(LayerCache.update))
        yield ledger


def settings(new):
    return DecodeConfig(max_new_tokens=new, ignore_end=True)


def own_share(pair, prompts, new):
    """Of each prompt the share of its seconds that was neither model's."""
    shares = []
    for ids in prompts:
        with model_calls(pair) as ledger:
            total, _ = seconds(decode, pair, ids, settings(new))
        shares.append(1 - ledger.seconds / total)
    return shares


def seconds(call, *args):
    began = thread_time()
    made = call(*args)
    return thread_time() - began, made


class Enough(Exception):
    """Ends dflash's loop, which knows no other way out; holds how many tokens it had made."""


def ours(pair, ids, new):
    """Decode until `new` tokens are there, or a few more that the last block brought."""
    made = 0
    with closing(stream(pair, list(ids), settings(new + BLOCK))) as records:
        for record in records:
            made += record.emitted if isinstance(record, BlockRecord) else 1
            if made >= new:
                return made
    raise AssertionError("it ended early")


def upstreams(dtype):
    """dflash 0.1.0's loop with the embedded draft, ended at the same place.

    Near its end it narrows its blocks and ours does not: with a block more to come neither does.
    """
    import torch

    upstream = importlib.import_module("dflash.model")
    kind, number = upstream.DFlashDraftModel, getattr(torch, dtype)
    draft = kind.from_pretrained(EMBEDDED["smollm2"], dtype=number).eval()

    def run(pair, ids, new):
        def look(module, args, named):
            made = int(named["position_ids"][0, -1]) + 2 - BLOCK - len(ids)
            if made >= new:
                raise Enough(made)

        hook = draft.register_forward_pre_hook(look, with_kwargs=True)
        try:
            prompt = torch.tensor([ids])
            upstream.dflash_generate(draft, pair.models.target.model, prompt, new + BLOCK, None)
        except Enough as end:
            return end.args[0]
        finally:
            hook.remove()

    return run


def race(pair, prompts, other, rounds, new):
    """Least seconds a token [ours and theirs, prompts]; who goes first changes at each turn."""
    best = np.full((2, len(prompts)), np.inf)
    for turn in range(rounds):
        for number, ids in enumerate(prompts):
            for who in (0, 1) if (turn + number) % 2 else (1, 0):
                taken, made = seconds((ours, other)[who], pair, ids, new)
                best[who, number] = min(best[who, number], taken / made)
    return best


def measure(dtype, new=NEW, prompts=None, rounds=None):
    import torch

    from dflash_lab.backends.torch_session import fast_bfloat16

    torch.set_num_threads(1)
    pair = load_pair("smollm2", dtype=dtype, device="cpu")
    slow = dtype == "bfloat16" and not fast_bfloat16(torch.device("cpu"))
    prompts = prompts or (SLOW["PROMPTS"] if slow else PROMPTS)
    rounds = rounds or (SLOW["ROUNDS"] if slow else ROUNDS)
    texts = load_prompts()[:: len(load_prompts()) // prompts][:prompts]
    ids = [pair.encode(prompt.turns[0], True, None).ids for prompt in texts]
    decode(pair, ids[0], settings(2))  # what is made once is made here
    shares = own_share(pair, ids, new)
    mine, others = race(pair, ids, upstreams(dtype), rounds, new)
    return {"shares": shares, "ours": mine.tolist(), "theirs": others.tolist()}


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], *map(int, sys.argv[2:]))))


# --- the tests ----------------------------------------------------------------------------------


@cache
def measured(dtype):
    command = [sys.executable, "-m", "dflash_lab.tests.test_hot_path", dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_loops_own_share_of_the_time_is_under_3_percent(dtype):
    share = float(np.median(measured(dtype)["shares"]))
    print(f"{dtype}: the loop's own share is {share:.2%}")
    assert 0 < share < SHARE


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_costs_no_more_than_in_dflashs_loop(dtype):
    found = measured(dtype)
    theirs, ours = np.array([found["theirs"]]), np.array([found["ours"]])
    low, high = intervals(draw_prompts(ours.shape[1], 2000, seed=0), theirs, ours)
    speed = theirs.sum() / ours.sum()
    print(f"{dtype}: {speed:.3f} of dflash's speed, {low[0]:.3f} to {high[0]:.3f}")
    assert high[0] >= 1
