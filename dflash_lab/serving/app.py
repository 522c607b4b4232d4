"""The routes: they check, hand over to the worker and pass on what comes of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from jinja2 import TemplateError
from prometheus_client import CONTENT_TYPE_LATEST

from dflash_lab.config import DecodeConfig
from dflash_lab.decoding import check_prompt
from dflash_lab.load import Pair
from dflash_lab.serving.answers import (
    CHAT,
    COMPLETION,
    Answer,
    Form,
    block_size_of,
    error_of,
    event,
)
from dflash_lab.serving.bodies import Asked, BadRequest, read_chat, read_completion
from dflash_lab.serving.meters import Meters
from dflash_lab.serving.service import Service
from dflash_lab.serving.worker import Cancelled, Job, Piece, QueueFull, Worker


class BlockSizeHeaders:
    """Around the application: every response, an error too, names the block size and its source."""

    def __init__(self, app: Any, facts: dict[str, Any]):
        self.app = app
        self.headers = [
            (f"x-dflash-{name.replace('_', '-')}".encode(), str(value).encode())
            for name, value in facts.items()
        ]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def named(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *self.headers]
            await send(message)

        await self.app(scope, receive, named)


def make_app(service: Service) -> BlockSizeHeaders:
    """The application. It has no pages: FastAPI's own load scripts from elsewhere."""
    app = FastAPI(title="dflash-lab", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(BadRequest, bad_request)
    app.add_exception_handler(404, no_route)
    app.add_exception_handler(405, no_route)
    app.add_exception_handler(Exception, broken)
    # Routes find the service here: FastAPI keeps their functions, and what those hold, for ever.
    app.state.service, app.state.meters = service, Meters(service.worker.totals)
    for method, path, route in (
        ("GET", "/health", health),
        ("GET", "/metrics", counters),
        ("GET", "/v1/models", models),
        ("GET", "/v1/models/{name:path}", model),
        ("POST", "/v1/chat/completions", chat),
        ("POST", "/v1/completions", completion),
    ):
        app.add_api_route(path, route, methods=[method], response_model=None)
    return BlockSizeHeaders(app, block_size_of(service.resolved))


async def health(request: Request) -> Response:
    facts = request.app.state.service.facts()
    return JSONResponse(facts, 200 if facts["status"] == "ok" else 503)


async def counters(request: Request) -> Response:
    return Response(request.app.state.meters.page(), media_type=CONTENT_TYPE_LATEST)


async def models(request: Request) -> dict[str, Any]:
    return {"object": "list", "data": [model_of(request.app.state.service)]}


async def model(request: Request, name: str) -> dict[str, Any]:
    check_model(request.app.state.service, name)
    return model_of(request.app.state.service)


async def chat(request: Request) -> Response:
    return await answer(request, CHAT, read_chat)


async def completion(request: Request) -> Response:
    return await answer(request, COMPLETION, read_completion)


def model_of(service: Service) -> dict[str, Any]:
    return {
        "id": service.model,
        "object": "model",
        "created": service.created,
        "owned_by": "dflash-lab",
        "max_model_len": service.pair.models.context_limit,
        **block_size_of(service.resolved),
    }


async def answer(
    request: Request, form: Form, read: Callable[[Any, DecodeConfig], Asked]
) -> Response:
    """Read a request, have it decoded, and answer whole or in events."""
    service: Service = request.app.state.service
    body = await json_of(request)
    asked = read(body, service.config)
    check_model(service, body.get("model"))
    ids = encoded(service.pair, asked)
    pieces = Pieces()
    job = Job(ids, service.request(asked.config), pieces.tell)
    said = Answer(form, service.model, job, asked.usage)
    source = pieces.of(job, service.worker, request)
    try:
        service.worker.submit(job)
        first = await anext(source)  # before the headers: until then an error has its own status
        if asked.stream:
            return StreamingResponse(events(said, first, source), media_type="text/event-stream")
        texts, last = [first.text], first
        async with aclosing(source):
            async for last in source:
                texts.append(last.text)
        return JSONResponse(said.whole("".join(texts), last.finish_reason))
    except Exception as error:
        return failure(error)


class Pieces:
    """What the worker tells of a job, from its thread to the loop that answers."""

    def __init__(self) -> None:
        self.loop, self.queue = asyncio.get_running_loop(), asyncio.Queue()

    def tell(self, piece: Piece | Exception) -> None:
        """Called on the worker's thread."""
        with suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self.loop.call_soon_threadsafe(self.queue.put_nowait, piece)

    async def of(self, job: Job, worker: Worker, request: Request) -> AsyncIterator[Piece]:
        """The pieces of a job until its last; raises what ended it instead.

        Who stops listening, or goes away, gives the job up.
        """
        watching = asyncio.create_task(watch(job, worker, request))
        try:
            while True:
                piece = await self.queue.get()
                if isinstance(piece, Exception):
                    raise piece
                yield piece
                if piece.finish_reason is not None:
                    return
        finally:
            watching.cancel()
            worker.cancel(job)


async def watch(job: Job, worker: Worker, request: Request) -> None:
    """Give a job up when its client goes away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    worker.cancel(job)


async def events(said: Answer, first: Piece, rest: AsyncIterator[Piece]) -> AsyncIterator[str]:
    """The events of a stream. One that fails ends with the error, and without the usual end."""
    yield said.opening() + said.piece(first.text)
    last = first
    try:
        async with aclosing(rest):
            async for last in rest:
                if said_so := said.piece(last.text):
                    yield said_so
        yield said.ending(last.finish_reason)
    except Exception as error:
        yield event(error_of(f"{type(error).__name__}: {error}", "server_error"))


async def json_of(request: Request) -> Any:
    try:
        return json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}.") from error


def check_model(service: Service, name: Any) -> None:
    """Raise BadRequest for a model that is not served here; a request may leave it out."""
    if name is not None and (not isinstance(name, str) or name not in service.names):
        raise BadRequest(
            f"there is no model {name!r} here; this server has {service.model!r}.", "model", 404
        )


def encoded(pair: Pair, asked: Asked) -> Sequence[int]:
    """The prompt as token ids, which leave room for an output."""
    try:
        ids = pair.encode(asked.prompt, asked.chat, asked.thinking).ids
        check_prompt(pair, ids)
    except (ValueError, TypeError, TemplateError) as error:
        about_thinking = str(error).startswith("thinking ")
        field = "messages" if asked.chat else "prompt"
        raise BadRequest(str(error), "chat_template_kwargs" if about_thinking else field) from error
    return ids


def failure(error: Exception) -> JSONResponse:
    """The answer where the worker did not come to an end."""
    message = f"{type(error).__name__}: {error}"
    if isinstance(error, QueueFull):
        full = error_of(message, "rate_limit_error", code="queue_full")
        return JSONResponse(full, 429, {"Retry-After": "1"})
    return JSONResponse(
        error_of(message, "server_error"), 503 if isinstance(error, Cancelled) else 500
    )


async def bad_request(request: Request, error: BadRequest) -> JSONResponse:
    code = "model_not_found" if error.status == 404 else None
    found = error_of(str(error), "invalid_request_error", error.param, code)
    return JSONResponse(found, error.status)


async def no_route(request: Request, error: HTTPException) -> JSONResponse:
    said = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse(error_of(said, "invalid_request_error"), error.status_code, error.headers)


async def broken(request: Request, error: Exception) -> JSONResponse:
    return failure(error)
