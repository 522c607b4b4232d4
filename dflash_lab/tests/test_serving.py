"""The server: OpenAI's words around the one loop, one thread that decodes, ends of every kind."""

import ast
import asyncio
import gc
import json
import logging
import socket
import subprocess
import sys
import threading
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

import dflash_lab as dl
from dflash_lab import DecodeConfig, cli, load_pair, serving
from dflash_lab.decoding import BlockSizeWarning
from dflash_lab.imports import import_traces
from dflash_lab.tests.toys import (
    ORACLE,
    ByteTokenizer,
    cut,
    replay_target,
    scripted_greedy,
    scripted_pair,
)

PROMPT = "hello"
HELLO = [{"role": "user", "content": PROMPT}]
LONG = 4000  # tokens: a thousand blocks, more than any test waits for
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
http = httpx.Client(timeout=20)  # one, since each reads the machine's certificates when made


@pytest.fixture(scope="module", autouse=True)
def closing():
    yield
    http.close()


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv("DFLASH_BLOCK_SIZE", raising=False)


@pytest.fixture(scope="module")
def tiny():
    return load_pair("tiny", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def tiny_server(tiny):
    with serving.serve(tiny, DecodeConfig(block_size=8, max_new_tokens=24), port=0) as server:
        yield server


@contextmanager
def served(pair=None, config=None, **settings):
    """A server of a scripted pair, and the pair."""
    pair = pair or scripted_pair(cut(3), block_size=8)
    with serving.serve(pair, config, port=0, **settings) as server:
        yield server, pair


def body(path, **settings):
    said = {"messages": HELLO} if path == CHAT else {"prompt": PROMPT}
    return said | settings


def ask(server, path=CHAT, **settings):
    return http.post(server.url + path, json=body(path, **settings))


def health(server):
    return http.get(server.url + "/health").json()


def raw_events(server, path=CHAT, **settings):
    """What follows `data: ` in each event of a stream."""
    asked = body(path, stream=True, **settings)
    with http.stream("POST", server.url + path, json=asked) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    return [line.removeprefix("data: ") for line in lines]


def events(server, path=CHAT, **settings):
    """The events of a stream that comes to its end."""
    *told, done = raw_events(server, path, **settings)
    assert done == "[DONE]"
    return [json.loads(one) for one in told]


def text_of(told):
    """The text of a stream's events."""
    choices = [choice for one in told for choice in one["choices"]]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


def wait_for(condition, seconds=5):
    end = time.perf_counter() + seconds
    while not condition():
        assert time.perf_counter() < end, "waited in vain"
        time.sleep(0.005)


# --- what is said -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_an_answer_is_what_decode_gives_whole_and_in_a_stream(tiny, tiny_server, path):
    config = DecodeConfig(block_size=8, max_new_tokens=24)
    trace = dl.decode(tiny, PROMPT, config, chat=path == CHAT)
    answer = ask(tiny_server, path).json()
    (choice,) = answer["choices"]
    assert (choice["message"]["content"] if path == CHAT else choice["text"]) == trace.text
    assert choice["finish_reason"] == trace.finish_reason
    read, written = len(trace.prompt_ids), len(trace.tokens)
    assert answer["usage"] == {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
    }
    told = events(tiny_server, path)
    assert text_of(told) == trace.text
    assert len([one for one in told if text_of([one])]) > 3
    assert told[-1]["choices"][0]["finish_reason"] == trace.finish_reason


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("options", [{"include_usage": True}, {"include_usage": False}, None])
def test_usage_comes_in_a_last_chunk_of_its_own_where_it_is_asked_for(path, options):
    asked = {} if options is None else {"stream_options": options}
    with served() as (server, _):
        told = events(server, path, max_tokens=12, **asked)
        whole = ask(server, path, max_tokens=12).json()
    if options == {"include_usage": True}:
        assert (told[-1]["choices"], told[-1]["usage"]) == ([], whole["usage"])
        assert all(one["usage"] is None for one in told[:-1])
        told = told[:-1]
    assert not any(one.get("usage") for one in told)
    assert options or not any("usage" in one for one in told)
    assert [one["choices"][0]["finish_reason"] for one in told] == [None] * (len(told) - 1) + [
        "length"
    ]
    assert len({(one["id"], one["model"], one["created"], one["object"]) for one in told}) == 1
    assert all((told[0]["id"], told[0]["model"], told[0]["created"]))
    if path == CHAT:
        assert told[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert told[-1]["choices"][0]["delta"] == {}


def test_the_official_client_reads_it():
    import openai

    with served() as (server, _):
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        (model,) = client.models.list().data
        assert client.models.retrieve(model.id) == model
        settings = {"model": model.id, "messages": HELLO, "max_tokens": 12}
        whole = client.chat.completions.create(**settings)
        assert whole.choices[0].finish_reason == "length"
        told = list(
            client.chat.completions.create(
                **settings, stream=True, stream_options={"include_usage": True}
            )
        )
        text = "".join(c.delta.content or "" for one in told for c in one.choices)
        assert text == whole.choices[0].message.content
        assert told[-1].usage == whole.usage
        # its answer goes back as a message, empty fields and all
        again = [*HELLO, whole.choices[0].message.model_dump(), *HELLO]
        client.chat.completions.create(model=model.id, messages=again, max_completion_tokens=3)
        told = client.completions.create(model=model.id, prompt="a", max_tokens=4, stream=True)
        assert [one.choices[0].finish_reason for one in told][-1] == "length"
        with pytest.raises(openai.NotFoundError, match="there is no model 'gpt'"):
            client.chat.completions.create(model="gpt", messages=HELLO)
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**settings, n=2)
        assert refused.value.param == "n"
        client.close()


def test_every_answer_says_the_block_size_used_and_where_it_came_from():
    size = {"block_size": 8, "block_size_source": "draft config: block_size"}
    headers = {"x-dflash-block-size": "8", "x-dflash-block-size-source": size["block_size_source"]}
    with served() as (server, _):
        answers = [
            http.get(server.url + "/health"),
            http.get(server.url + "/v1/models"),
            http.get(server.url + "/nowhere"),
            ask(server, max_tokens=4),
            ask(server, temperature="hot"),
            ask(server, COMPLETION, stream=True, max_tokens=4),
        ]
        for answer in answers:
            assert headers.items() <= dict(answer.headers).items()
        told = [answers[0].json(), answers[1].json()["data"][0], answers[3].json()]
        for said in (*told, *events(server, max_tokens=9)):
            assert size.items() <= said.items()


def test_metrics_have_the_form_of_vllm_and_agree_with_the_trace(tiny, tiny_server, tmp_path):
    trace = dl.decode(tiny, PROMPT, DecodeConfig(block_size=8, max_new_tokens=24))
    *_, ending, last = events(tiny_server, stream_options={"include_usage": True})
    assert ending["metrics"] == last["metrics"]
    (tmp_path / "answer.json").write_text(ask(tiny_server).text)
    request = import_traces("vllm", tmp_path / "answer.json").requests[0]
    for told in (request, import_traces("vllm", saved(tmp_path / "last.json", last)).requests[0]):
        assert told.block_size == 8
        assert [step.accepted for step in told.steps] == [b.accepted for b in trace.blocks]
        assert [step.drafted for step in told.steps] == [len(b.drafted) for b in trace.blocks]
        assert told.tokens == len(trace.tokens)
    speculation = last["metrics"]["speculative_decoding"]
    assert speculation["mean_acceptance_length"] == pytest.approx(dl.tau(trace.blocks, True))
    assert sum(speculation["acceptance_histogram"]) == len(trace.blocks)


def saved(path, value):
    path.write_text(json.dumps(value))
    return path


def test_plain_decoding_has_no_acceptance_to_tell():
    with served(config=DecodeConfig(block_size=1)) as (server, _):
        answer = ask(server, max_tokens=3).json()
        assert answer["metrics"]["speculative_decoding"] is None
        assert answer["usage"]["completion_tokens"] == 3
        assert ask(server, max_tokens=1).json()["metrics"]["mean_itl_ms"] is None


def test_the_servers_counters_have_vllms_names_and_our_importer_reads_them(tmp_path):
    with served() as (server, _):
        assert "num_drafts_total 0.0" in http.get(server.url + "/metrics").text
        ask(server, max_tokens=13)
        events(server, max_tokens=9)
        answer = http.get(server.url + "/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    page = answer.text.replace("dflash_lab_spec_decode_", "vllm:spec_decode_")
    (tmp_path / "page").write_text(page)
    told = import_traces("vllm-counters", tmp_path / "page").counters
    assert (told.blocks, told.drafted, told.accepted) == (5, 35, 15)
    assert told.accepted_per_position == (5, 5, 5, 0, 0, 0, 0)


def test_a_draft_that_is_of_no_use_is_said_although_the_text_is_right():
    with served(scripted_pair(cut(0), block_size=8)) as (server, _):
        assert "0 accepted in 39 blocks" in ask(server, max_tokens=40).json()["warnings"][0]
        assert "0 accepted in 39 blocks" in events(server, max_tokens=40)[-1]["warnings"][0]
        assert "warnings" not in ask(server, max_tokens=4).json()


SAID = "Grüße, 你好! 🙂👩‍👩‍👧 ď" * 3


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("block_size", [1, 3, 8])
def test_no_character_is_torn_and_the_end_token_is_counted_but_not_shown(path, block_size):
    prompt = b"user: hello\nassistant: " if path == CHAT else b"hello"
    target = replay_target(len(prompt), [*SAID.encode(), 300])
    pair = scripted_pair(cut(3), target=target, tokenizer=ByteTokenizer(eos_token_id=300))
    with served(pair, DecodeConfig(block_size=block_size, max_new_tokens=999)) as (server, _):
        told = events(server, path, stream_options={"include_usage": True})
    assert text_of(told) == SAID
    assert not any("\ufffd" in text_of([one]) for one in told)
    assert told[-2]["choices"][0]["finish_reason"] == "stop"
    assert told[-1]["usage"]["completion_tokens"] == len(SAID.encode()) + 1


@pytest.mark.parametrize("block_size", [1, 2, 5, 8])
@pytest.mark.parametrize("stop", ["ef", ["ef", "efg"], ["zz", "ef"]])
def test_a_stop_string_ends_text_tokens_and_usage_alike_at_every_block_size(block_size, stop):
    pair = scripted_pair(ORACLE, target=replay_target(5, b"abcdefghijklmnop"))
    with served(pair, DecodeConfig(block_size=block_size)) as (server, _):
        whole = ask(server, COMPLETION, stop=stop, max_tokens=16).json()
        told = events(server, COMPLETION, stop=stop, max_tokens=16)
    assert (whole["choices"][0]["text"], text_of(told)) == ("abcd", "abcd")
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert told[-1]["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] == 6


@pytest.mark.slow
def test_an_answer_has_as_many_tokens_as_are_asked_for_by_every_count():
    pair = scripted_pair(
        ORACLE, block_size=8, target=replay_target(5, b"abcdefghijklmnopqrstuvwxyz")
    )
    usage = {"include_usage": True}
    with served(pair) as (server, _):
        for limit in range(1, 25):
            whole = ask(server, COMPLETION, max_tokens=limit).json()
            told = events(server, COMPLETION, max_tokens=limit, stream_options=usage)
            trace = dl.decode(pair, PROMPT, DecodeConfig(max_new_tokens=limit), chat=False)
            counts = {one["usage"]["completion_tokens"] for one in (whole, told[-1])}
            assert counts == {limit} == {len(trace.tokens)}
            assert len(whole["choices"][0]["text"]) == len(text_of(told)) == limit


# --- what is asked ------------------------------------------------------------------------------

PARTS = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
IMAGE = [{"type": "image_url", "image_url": {"url": "data:"}}]


@pytest.mark.parametrize(
    ("path", "settings"),
    [
        (CHAT, {"messages": [{"role": "user", "content": PARTS}]}),
        (CHAT, {"max_tokens": None, "max_completion_tokens": 5}),
        (CHAT, {"max_tokens": 5, "max_completion_tokens": 5}),
        (CHAT, {"temperature": None, "top_p": None, "stop": None, "stream": None, "seed": None}),
        (CHAT, {"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}}),
        (CHAT, {"response_format": {"type": "text"}, "tools": [], "logprobs": False}),
        (CHAT, {"user": "me", "metadata": {"a": "b"}, "temperature": 0, "top_k": 1, "seed": 1}),
        (CHAT, {"model": "scripted-target", "stop": "\ue000", "max_tokens": 5}),
        (CHAT, {"stop": ["\ue000"] * 4, "chat_template_kwargs": {}}),
        (COMPLETION, {"prompt": list(b"hello"), "max_tokens": 5}),
        (COMPLETION, {"prompt": [list(b"hello")]}),
        (COMPLETION, {"prompt": ["hello"], "echo": False, "best_of": 1, "suffix": ""}),
    ],
)
def test_what_asks_for_nothing_else_gives_the_usual_answer(path, settings):
    with served(config=DecodeConfig(max_new_tokens=5)) as (server, _):
        answer = ask(server, path, **settings)
        assert answer.status_code == 200, answer.text
        usual = ask(server, path, max_tokens=5).json()
        assert answer.json()["choices"] == usual["choices"]
        assert answer.json()["usage"] == usual["usage"]


def test_developer_is_the_newer_name_of_system():
    turn = {"content": "be brief"}
    with served() as (server, _):
        system, developer = (
            ask(server, messages=[turn | {"role": role}, *HELLO], max_tokens=4).json()
            for role in ("system", "developer")
        )
    assert system["choices"] == developer["choices"]


@pytest.mark.parametrize(
    ("path", "settings", "param", "words"),
    [
        (CHAT, {"temperature": "hot"}, "temperature", "temperature is 'hot'; expected a number"),
        (CHAT, {"temperature": -1}, "temperature", "from 0"),
        (CHAT, {"temperature": True}, "temperature", "True"),
        (CHAT, {"top_p": 0}, "top_p", "above 0"),
        (CHAT, {"top_k": -1}, "top_k", "from 1"),
        (CHAT, {"min_p": 2}, "min_p", "0 to 1"),
        (CHAT, {"repetition_penalty": 0}, "repetition_penalty", "above 0"),
        (CHAT, {"seed": "x"}, "seed", "seed is 'x'"),
        (CHAT, {"max_tokens": 0}, "max_tokens", "max_tokens is 0; expected a whole number from 1"),
        (CHAT, {"max_tokens": 2.5}, "max_tokens", "2.5"),
        (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens is 0"),
        (CHAT, {"max_tokens": 4, "max_completion_tokens": 5}, "max_completion_tokens", "differ"),
        (CHAT, {"messages": []}, "messages", "one message at least"),
        (CHAT, {"messages": None}, "messages", "missing"),
        (CHAT, {"messages": "hello"}, "messages", "a list"),
        (CHAT, {"messages": ["hello"]}, "messages[0]", "an object"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", "None"),
        (CHAT, {"messages": [*HELLO, HELLO[0] | {"content": 7}]}, "messages[1].content", "7"),
        (CHAT, {"messages": [{"role": "user", "content": []}]}, "messages[0].content", "parts"),
        (CHAT, {"messages": [HELLO[0] | {"content": IMAGE}]}, "messages[0].content[0]", "image"),
        (CHAT, {"messages": [HELLO[0] | {"role": "tool"}]}, "messages[0].role", "'tool'"),
        (CHAT, {"messages": [HELLO[0] | {"role": ["user"]}]}, "messages[0].role", "one of"),
        (CHAT, {"messages": [HELLO[0] | {"name": "Ann"}]}, "messages[0].name", "not supported"),
        (CHAT, {"n": 2}, "n", "n is 2; expected 1"),
        (CHAT, {"n": True}, "n", "True"),
        (CHAT, {"logprobs": True}, "logprobs", "True"),
        (COMPLETION, {"logprobs": 0}, "logprobs", "logprobs is 0"),
        (CHAT, {"logit_bias": {"7": 100}}, "logit_bias", "logit_bias"),
        (CHAT, {"presence_penalty": 0.5}, "presence_penalty", "0.5"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools", "function"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format", "json_object"),
        (CHAT, {"block_size": 4}, "block_size", "Known fields: "),
        (CHAT, {"prompt": "x"}, "prompt", "not supported here"),
        (CHAT, {"stop": ["a"] * 5}, "stop", "4 strings at most"),
        (CHAT, {"stop": ""}, "stop", "one character at least"),
        (CHAT, {"stop": 7}, "stop", "stop is 7"),
        (CHAT, {"stream": "yes"}, "stream", "true or false"),
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options", "set stream"),
        (CHAT, {"stream": True, "stream_options": 1}, "stream_options", "include_usage"),
        (CHAT, {"stream": True, "stream_options": {"x": 1}}, "stream_options", "include_usage"),
        (CHAT, {"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs", "enable_thinking"),
        (
            CHAT,
            {"chat_template_kwargs": {"enable_thinking": True}},
            "chat_template_kwargs",
            "no such switch",
        ),
        (CHAT, {"model": 7}, "model", "no model 7"),
        (CHAT, {"model": ["gpt"]}, "model", "no model ['gpt']"),
        (CHAT, {"model": "gpt-4"}, "model", "this server has 'scripted-target'"),
        (COMPLETION, {"prompt": ""}, "prompt", "empty"),
        (COMPLETION, {"prompt": []}, "prompt", "empty"),
        (COMPLETION, {"prompt": [1, 99999]}, "prompt", "token id 99999"),
        (COMPLETION, {"prompt": [1, "a"]}, "prompt", "expected text"),
        (COMPLETION, {"prompt": ["a", "b"]}, "prompt", "holds 2 prompts"),
        (COMPLETION, {"prompt": "x" * 5000}, "prompt", "has 5000 tokens"),
        (CHAT, {"messages": [HELLO[0] | {"content": "x" * 5000}]}, "messages", "holds 4096"),
    ],
)
def test_a_bad_request_is_refused_by_the_name_of_its_field(refusing, path, settings, param, words):
    for stream in ({}, {"stream": True}):
        answer = ask(refusing, path, **(stream | settings))
        assert answer.status_code == (404 if param == "model" else 400)
        error = answer.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert words in error["message"]
        if settings.get("stream_options"):
            break


@pytest.fixture(scope="module")
def refusing():
    """A server at which nothing is decoded."""
    with served() as (server, pair):
        yield server
    assert pair.models.sessions == []


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"",
        b"[]",
        b"null",
        b"\xff",
        b"[" * 100_000,
        b'{"prompt": "\\ud800"}',
        b'{"\\ud800": 1}',
    ],
)
def test_a_body_that_is_no_request_is_a_bad_request(refusing, content):
    answer = http.post(refusing.url + COMPLETION, content=content)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_other_addresses_and_methods_are_errors_of_the_same_form(refusing):
    for method, path, status in (("GET", "/docs", 404), ("GET", CHAT, 405), ("POST", "/", 404)):
        answer = http.request(method, refusing.url + path)
        assert answer.status_code == status
        assert path in answer.json()["error"]["message"]
    assert http.get(refusing.url + "/v1/models/gpt").status_code == 404


def test_more_tokens_than_the_context_holds_end_with_it():
    with served(scripted_pair(cut(3), context_limit=64)) as (server, _):
        answer = ask(server, COMPLETION, max_tokens=10**9).json()
    assert answer["usage"]["total_tokens"] == 64
    assert answer["choices"][0]["finish_reason"] == "length"


def test_sampling_settings_have_their_effect_and_a_seed_repeats(tiny, tiny_server):
    def said(**settings):
        return ask(tiny_server, COMPLETION, max_tokens=10, **settings).json()["choices"][0]["text"]

    greedy = said()
    assert said(temperature=2, top_k=1, seed=3) == greedy
    seeds = [said(temperature=1.5, seed=seed) for seed in (1, 1, 2, 3)]
    assert seeds[0] == seeds[1]
    assert len(set(seeds)) > 1
    penalty = {"repetition_penalty": 2.0, "temperature": 1.5, "seed": 4, "top_p": 0.9}
    config = DecodeConfig(block_size=8, max_new_tokens=10, **penalty)
    assert said(**penalty) == dl.decode(tiny, PROMPT, config, chat=False).text != greedy


def test_what_a_request_leaves_out_is_as_the_servers_settings_have_it():
    with served(config=DecodeConfig(max_new_tokens=7, stop_tokens=(1,), draft_window=5)) as (
        server,
        pair,
    ):
        assert ask(server).json()["usage"]["completion_tokens"] == 7
        assert pair.models.sessions[-1].draft_window == 5
        told = health(server)
        assert (told["max_tokens"], told["draft_window"]) == (7, 5)
    with served() as (server, _):
        assert health(server)["max_tokens"] == serving.LONGEST


# --- one thread, a queue, clients that go -------------------------------------------------------


def slow_pair(seconds=0.05):
    """Four tokens a block, and a pause in each."""
    return scripted_pair(cut(3), block_size=8, verify_s=seconds)


def verified(pair):
    return sum(session.calls.count("verify") for session in pair.models.sessions)


def ended(pair, count):
    """Whether so many sessions were opened and all are closed."""
    sessions = pair.models.sessions
    return len(sessions) == count and all(session.closed for session in sessions)


def test_a_client_that_goes_stops_its_generation_within_one_block():
    with served(slow_pair()) as (server, pair):
        asked = body(CHAT, stream=True, max_tokens=LONG)
        for count in range(1, 11):
            with http.stream("POST", server.url + CHAT, json=asked) as response:
                lines = (line for line in response.iter_lines() if line)
                next(lines), next(lines)
            before = verified(pair)
            wait_for(lambda count=count: ended(pair, count))
            assert verified(pair) <= before + 1
        assert ask(server, max_tokens=4).status_code == 200
        wait_for(lambda: health(server)["active"] == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_before_the_first_token_is_noticed_too(stream):
    pair = slow_pair()
    pair.models.prefill_s = 0.2
    with served(pair) as (server, _):
        asked = body(CHAT, stream=stream, max_tokens=LONG)
        with pytest.raises(httpx.ReadTimeout):
            http.post(server.url + CHAT, json=asked, timeout=0.1)
        wait_for(lambda: ended(pair, 1))
        assert verified(pair) == 0


@contextmanager
def held():
    """A server whose first request is held up until the gate is opened."""
    gate = threading.Event()

    def target(tokens):
        assert gate.wait(20)
        return len(tokens) % 200

    made = scripted_pair(target=target)
    with served(made, room=1) as (server, pair), ThreadPoolExecutor(2) as pool:
        try:
            first = pool.submit(ask, server, max_tokens=8)
            wait_for(lambda: health(server)["active"] == 1)
            yield server, pair, pool, first, gate
        finally:
            gate.set()


def test_a_client_that_waits_and_goes_leaves_its_place():
    with held() as (server, pair, _, first, gate):
        for _ in range(3):
            with pytest.raises(httpx.ReadTimeout):
                http.post(server.url + CHAT, json=body(CHAT), timeout=0.05)
            wait_for(lambda: health(server)["waiting"] == 0)
        gate.set()
        assert first.result().json()["usage"]["completion_tokens"] == 8
        assert len(pair.models.sessions) == 1


def test_where_too_many_wait_the_next_is_told_to_come_again():
    with held() as (server, _, pool, first, gate):
        second = pool.submit(ask, server, max_tokens=8)
        wait_for(lambda: health(server)["waiting"] == 1)
        refused = ask(server)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "1 requests wait already" in refused.json()["error"]["message"]
        time.sleep(0.05)
        gate.set()
        assert second.result().json()["choices"] == first.result().json()["choices"]
        assert second.result().json()["metrics"]["queue_time_ms"] > 50


def test_requests_at_once_get_the_answers_that_each_gets_alone(tiny_server):
    prompts = [
        f"{word} tasks in {place}" * 3 for word in "ab" for place in ("Bath", "Rome", "Köln")
    ]
    settings = {"max_tokens": 6, "temperature": 1, "seed": 1}

    def said(prompt):
        messages = [{"role": "user", "content": prompt}]
        return ask(tiny_server, messages=messages, **settings).json()["choices"]

    alone = list(map(said, prompts))
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(said, prompts)) == alone
    assert len({choices[0]["message"]["content"] for choices in alone}) > 3


def breaking(at):
    """A pair whose target breaks once there are so many tokens."""

    def target(tokens):
        if len(tokens) >= at:
            raise RuntimeError("the device <broke>")
        return len(tokens) % 200

    return scripted_pair(cut(3), block_size=8, target=target)


def test_an_error_in_a_stream_is_its_last_event_and_the_log_has_the_trace(caplog):
    import openai

    with served(breaking(40)) as (server, pair):
        with caplog.at_level(logging.ERROR):
            told = [json.loads(one) for one in raw_events(server, max_tokens=LONG)]
        assert told[-1]["error"]["message"] == "RuntimeError: the device <broke>"
        assert "choices" not in told[-1]
        assert text_of(told[:-1])
        assert "Traceback" in caplog.text
        assert "a request failed after" in caplog.text
        with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            stream = client.chat.completions.create(
                model="scripted-target", messages=HELLO, stream=True
            )
            with pytest.raises(openai.APIError, match="the device <broke>"):
                list(stream)
        whole = ask(server, max_tokens=LONG)
        assert (whole.status_code, whole.json()["error"]["type"]) == (500, "server_error")
        assert ask(server, max_tokens=2).status_code == 200
        assert health(server)["active"] == 0
        assert all(session.closed for session in pair.models.sessions)


def test_an_error_before_the_first_token_has_a_status_in_a_stream_too():
    with served(breaking(1)) as (server, _):
        assert ask(server, stream=True).status_code == 500


def test_a_thread_that_died_shows_in_the_health(monkeypatch):
    with served() as (server, _):
        monkeypatch.setattr(type(server._worker), "alive", False)
        answer = http.get(server.url + "/health")
    assert (answer.status_code, answer.json()["status"]) == (503, "failed")


# --- start and stop -----------------------------------------------------------------------------


def port_of(server):
    return int(server.url.rpartition(":")[2])


def test_it_starts_and_stops_where_a_loop_runs_already_and_the_port_is_free_again():
    async def notebook():
        pair, before = scripted_pair(), set(threading.enumerate())
        server = dl.serve(pair, port=0)
        async with httpx.AsyncClient() as client:
            for _ in range(3):
                answer = await client.post(server.url + CHAT, json=body(CHAT, max_tokens=3))
                assert answer.status_code == 200
                server.stop()
                server.stop()
                assert "stopped" in repr(server)
                assert set(threading.enumerate()) == before
                with pytest.raises(httpx.ConnectError):
                    await client.get(server.url + "/health")
                server = dl.serve(pair, port=port_of(server))
        server.stop()

    asyncio.run(notebook())


def test_stopping_ends_what_is_streamed_and_what_waits():
    with served(slow_pair()) as (server, pair), ThreadPoolExecutor(2) as pool:
        streaming = pool.submit(raw_events, server, max_tokens=LONG)
        wait_for(lambda: verified(pair) > 1)
        waiting = pool.submit(ask, server)
        wait_for(lambda: health(server)["waiting"] == 1)
        began = time.perf_counter()
        server.stop()
        assert time.perf_counter() - began < 2
        last = json.loads(streaming.result()[-1])
        assert last["error"]["message"] == "Cancelled: the server is stopping"
        assert waiting.result().status_code == 503
        assert ended(pair, 1)


def test_a_stopped_server_holds_the_pair_no_longer(monkeypatch):
    loaded = []

    def load(*_):
        pair = scripted_pair()
        loaded.append(weakref.ref(pair.tokenizer))
        return pair

    monkeypatch.setattr(serving, "load_spec", load)
    server = dl.serve("tiny", port=0)
    ask(server, max_tokens=3)
    assert loaded[0]() is not None
    server.stop()
    gc.collect()
    assert loaded[0]() is None


def test_a_port_that_is_taken_is_said_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr(serving, "load_spec", lambda *_: pytest.fail("loaded"))
    with served() as (server, _), pytest.raises(OSError, match=r"at 127.0.0.1 .*port=") as said:
        dl.serve("tiny", port=port_of(server))
    assert str(said.value).startswith(f"port {port_of(server)} ")
    for settings, words in (
        ({"port": -1}, "port is -1"),
        ({"port": 65536}, "65536; expected a whole number from 0 to 65535"),
        ({"port": "x"}, "port is 'x'"),
        ({"room": -1}, "room is -1"),
    ):
        with pytest.raises(ValueError, match=words):
            dl.serve("tiny", **settings)
    with pytest.raises(ValueError, match="there is no pair 'tinny'"):
        dl.serve("tinny", port=0)
    with pytest.raises(OSError, match=r"no server can listen at nowhere\.invalid"):
        dl.serve("tiny", host="nowhere.invalid")


def test_what_loading_raises_is_raised_by_serve_and_nothing_is_left(monkeypatch):
    def load(*_):
        raise OSError("no such weights")

    monkeypatch.setattr(serving, "load_spec", load)
    before = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(OSError, match="no such weights"):
        dl.serve("tiny", port=port)
    with pytest.raises(ValueError, match="no tokenizer"):
        dl.serve(scripted_pair(tokenizer=None), port=port)
    wait_for(lambda: set(threading.enumerate()) == before)
    dl.serve(scripted_pair(), port=port).stop()


def test_the_pair_is_loaded_and_run_by_one_thread(monkeypatch):
    threads = []

    def here(pair):
        threads.append(threading.current_thread().name)
        return pair

    pair = scripted_pair(target=lambda tokens: here(7))
    monkeypatch.setattr(serving, "load_spec", lambda *_: here(pair))
    with served("tiny") as (server, _):
        ask(server, max_tokens=3)
    assert set(threads) == {"dflash-lab decode"}


def test_a_size_above_the_trained_one_is_lowered_with_one_warning_at_the_start():
    words = "block size 32 is above the 8 .*beyond-trained"
    large = DecodeConfig(block_size=32, max_new_tokens=9)
    with pytest.warns(BlockSizeWarning, match=words) as heard, served(config=large) as (server, _):
        assert ask(server).json()["block_size"] == 8
        told = health(server)
    assert len(heard) == 1
    sizes = ("block_size", "block_size_requested", "trained_block_size")
    assert [told[name] for name in sizes] == [8, 32, 8]
    with served(config=DecodeConfig(block_size=12, beyond_trained=True)) as (server, _):
        assert health(server)["block_size"] == 12
        told = ask(server, max_tokens=9).json()["metrics"]
        assert told["speculative_decoding"]["num_spec_tokens"] == 11


@pytest.mark.parametrize("missing", serving.PACKAGES)
def test_without_its_packages_a_line_says_what_to_install_and_the_rest_works(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    words = rf"extra \[serve\]: pip install fastapi uvicorn prometheus_client .*{missing}"
    with pytest.raises(ImportError, match=words):
        dl.serve("tiny")


def test_the_package_and_its_command_line_load_none_of_it():
    code = "import sys, dflash_lab.serving, dflash_lab.cli; print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert {"dflash_lab.serving.worker"} <= set(shown.stdout.split())
    assert not {"fastapi", "uvicorn", "torch", "mlx"} & set(shown.stdout.split())


@pytest.mark.slow
def test_it_works_in_an_executed_notebook(tmp_path):
    import nbformat
    import papermill

    cells = (
        "import httpx, dflash_lab as dl\npair = dl.load_pair('tiny')",
        "server = dl.serve(pair, port=0)\nserver",
        "ask = {'prompt': 'hello', 'max_tokens': 8}\n"
        "first = httpx.post(server.url + '/v1/completions', json=ask).json()",
        "server.stop()\nserver = dl.serve(pair, port=int(server.url.rpartition(':')[2]))",
        "second = httpx.post(server.url + '/v1/completions', json=ask).json()\nserver.stop()\n"
        "assert first['choices'] == second['choices']\nfirst['usage']['completion_tokens']",
    )
    notebook = nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, cells)))
    nbformat.write(notebook, tmp_path / "in.ipynb")
    made = papermill.execute_notebook(
        tmp_path / "in.ipynb", tmp_path / "out.ipynb", kernel_name="python3", progress_bar=False
    )
    assert made.cells[-1].outputs[0].data["text/plain"] == "8"


# --- MLX's streams belong to threads ------------------------------------------------------------


def test_no_module_of_ours_makes_a_stream_when_it_is_imported():
    for path in Path(dl.__file__).parent.glob("backends/mlx_*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        outside = [
            node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.ClassDef)
        ]
        calls = [ast.unparse(node) for part in outside for node in ast.walk(part)]
        assert not any("stream(" in call for call in calls), path.name


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_tokens_are_the_same_in_the_main_thread_a_thread_a_pool_and_the_server(backend):
    config = DecodeConfig(block_size=4, max_new_tokens=12)
    pair = load_pair("tiny", backend=backend, dtype="float32", device="cpu")

    def said(_=None):
        return dl.decode(pair, PROMPT, config).text

    texts = [said()]
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(2) as two:
        texts += [one.submit(said).result(), *two.map(said, range(2))]
    for served_pair in (pair, pair.spec):  # loaded here, and by the server's own thread
        with served(served_pair, config) as (server, _):
            texts.append(ask(server).json()["choices"][0]["message"]["content"])
            texts.append(text_of(events(server)))
    assert len(texts) == 8
    assert len(set(texts)) == 1


# --- the command line ---------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch, capsys):
    """`dflash-lab serve` on a scripted pair, asked once and stopped: exit code, stderr, health."""
    monkeypatch.setattr(serving, "load_spec", lambda spec, progress=None: scripted_pair())

    def main(*arguments):
        told = []

        def wait(server):
            told.append(health(server) | {"url": server.url})
            raise KeyboardInterrupt

        monkeypatch.setattr(serving.Server, "wait", wait)
        with warnings.catch_warnings(), pytest.raises(SystemExit) as end:
            warnings.simplefilter("default")  # as in a process of its own: shown, not raised
            cli.main(["serve", *map(str, arguments)])
        return end.value.code or 0, capsys.readouterr().err, *told

    return main


def test_the_command_serves_until_it_is_stopped(command):
    code, said, told = command("tiny", "--port", 0, "--draft-window", 9, "--max-new-tokens", 77)
    assert code == 0
    assert (told["draft_window"], told["max_tokens"]) == (9, 77)
    assert f"serving scripted-target at {told['url']}, block size 16" in said
    with pytest.raises(httpx.ConnectError):
        http.get(told["url"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("tinny",), "there is no pair 'tinny'"),
        (("tiny", "--draft", "d"), "not both"),
        (("--target", "t"), "both target= and draft="),
        (("tiny", "--port", "-1"), "port is -1"),
        (("tiny", "--block-size", "0"), "flag --block-size is '0'"),
        (("tiny", "--dtype", "float8"), "dtype is 'float8'"),
    ],
)
def test_what_cannot_be_served_is_one_line(command, arguments, words):
    code, said = command(*arguments)
    assert code == 1
    assert said.startswith("error: ")
    assert words in said
    assert said.count("\n") == 1


def test_a_missing_package_is_one_line_of_the_command(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    code, said = command("tiny")
    assert code == 1
    assert said.startswith("error: the server needs the extra [serve]: pip install fastapi")


def test_a_scripted_answer_is_the_targets_own_text():
    with served() as (server, pair):
        answer = ask(server, COMPLETION, max_tokens=20).json()
    tokens = scripted_greedy(pair, list(b"hello"), 20)
    assert answer["choices"][0]["text"] == pair.text(tokens)
