"""An OpenAI-compatible server over the one loop: `serve` starts it and gives its URL.

    server = serve("tiny", port=0)
    server.url, server.stop()

`service` is what is served, `bodies` reads requests, `worker` decodes them one after another on one
thread, `answers` words what came of it, `meters` counts, `app` has the routes.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

from dflash_lab.config import BLOCK_SIZE_SOURCES, DecodeConfig, PairSpec, whole
from dflash_lab.decoding import choose_block_size, resolve_request
from dflash_lab.load import Pair, load_spec, pair_spec
from dflash_lab.serving.service import Service
from dflash_lab.serving.worker import Worker

PACKAGES = ("fastapi", "uvicorn", "prometheus_client")
HOST, PORT = "127.0.0.1", 8000
ROOM = 16  # requests that may wait
LONGEST = 2048  # new tokens where neither a request nor the settings say how many
PATIENCE_S = 5.0  # that connections are given to end when the server stops


def serve(
    pair: str | PairSpec | Pair,
    config: DecodeConfig | None = None,
    *,
    host: str = HOST,
    port: int = PORT,
    room: int = ROOM,
    progress: Callable[[str], None] | None = None,
) -> Server:
    """Start a server and return it; it runs beside the caller, in a notebook too.

    A pair that is not loaded yet is loaded by the thread that will decode with it. `config` holds
    for what a request leaves out; its block size goes before the variable DFLASH_BLOCK_SIZE, which
    is read now and goes before the draft's own. Port 0 takes a free one; `room` requests may wait
    for the one that runs. Before anything is loaded it raises ImportError where the server's
    packages are missing, ValueError for a bad setting or variable, OSError where the port is taken.
    """
    check_packages()
    config = with_block_size(config or DecodeConfig(max_new_tokens=LONGEST))
    whole("room", room, 0, "So many requests may wait for the one that runs.")
    load = loader(pair, progress)
    listener = bound(host, port)
    worker = Worker(load, room)
    try:
        return Server(settled(worker, config), host, listener)
    except BaseException:
        worker.close()
        listener.close()
        raise


class Server:
    """A running server: `url`, `stop()`, `wait()`; in a `with` it stops at the end."""

    def __init__(self, service: Service, host: str, listener: socket.socket):
        size = service.resolved
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
        self.about = (
            f"{service.model} at {self.url}, block size {size.block_size} "
            f"(from {size.block_size_source})"
        )
        self._worker: Worker | None = service.worker
        self._lock = threading.Lock()
        self._web, self._thread = started(service, listener)

    @property
    def running(self) -> bool:
        return self._worker is not None

    def wait(self) -> None:
        """Return when the server has stopped."""
        self._thread.join()

    def stop(self) -> None:
        """Give up what is being decoded, end every connection, free the port and the pair."""
        with self._lock:
            worker, self._worker = self._worker, None
            if worker is None:
                return
            self._web.should_exit = True
            worker.close()
            self._thread.join()
            self._web = None

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<server of {self.about}{'' if self.running else ', stopped'}>"


def check_packages() -> None:
    """Raise ImportError with the way out where the extra's packages are missing."""
    try:
        for name in PACKAGES:
            import_module(name)
    except ImportError as error:
        raise ImportError(
            f"the server needs the extra [serve]: pip install {' '.join(PACKAGES)} ({error})."
        ) from error


def with_block_size(config: DecodeConfig) -> DecodeConfig:
    """The settings with the variable's block size where they name none themselves."""
    if config.block_size is not None:
        return config
    variable = os.environ.get(BLOCK_SIZE_SOURCES["variable"])
    size, source = choose_block_size(variable=variable)
    return config if size is None else replace(config, block_size=size, block_size_source=source)


def loader(
    pair: str | PairSpec | Pair, progress: Callable[[str], None] | None
) -> Callable[[], Pair]:
    """What gives the pair; its name or description is checked now."""
    if isinstance(pair, Pair):
        return lambda: pair
    spec = pair if isinstance(pair, PairSpec) else pair_spec(pair)
    return partial(load_spec, spec, progress)


def settled(worker: Worker, config: DecodeConfig) -> Service:
    """What is served, once the pair is loaded; a size above the trained one is lowered here."""
    pair = worker.pair()
    if pair.tokenizer is None:
        raise ValueError(
            "the server speaks text, but this pair has no tokenizer: the target's folder holds no "
            "tokenizer.json."
        )
    resolved = resolve_request(pair, config)
    config = replace(config, block_size=resolved.block_size)
    return Service(pair=pair, worker=worker, config=config, resolved=resolved)


def bound(host: str, port: int) -> socket.socket:
    """A socket at the address; it does not listen yet. OSError where it is taken or not ours."""
    if whole("port", port, 0, "0 takes a free one.") > 65535:
        raise ValueError(f"port is {port}; expected a whole number from 0 to 65535.")
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
    except OSError as error:
        raise OSError(f"no server can listen at {host}: {error.strerror}.") from error
    # The port of a server that was just stopped is free, although its last packets may be about.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with taken(host, port, listener):
        listener.bind(address)
    return listener


@contextmanager
def taken(host: str, port: int, listener: socket.socket) -> Iterator[None]:
    """Say which port it was that could not be had."""
    try:
        yield
    except OSError as error:
        listener.close()
        raise OSError(
            f"port {port} at {host} cannot be had: {error.strerror}. Choose another by port= "
            "(--port); 0 takes a free one."
        ) from error


def started(service: Service, listener: socket.socket) -> tuple[Any, threading.Thread]:
    """uvicorn in a thread and a loop of its own: one that runs already is left alone."""
    import uvicorn

    from dflash_lab.serving.app import make_app

    with taken(*listener.getsockname()[:2], listener):
        listener.listen()  # not before the pair is loaded: nobody should wait for that unawares
    settings = uvicorn.Config(
        make_app(service),
        loop="asyncio",
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,  # handlers are the command line's
        timeout_graceful_shutdown=PATIENCE_S,
    )
    web = uvicorn.Server(settings)
    run = partial(web.run, sockets=[listener])
    thread = threading.Thread(target=run, name="dflash-lab server", daemon=True)
    thread.start()
    while not web.started:
        if not thread.is_alive():
            raise RuntimeError("the server ended while it started; its log says why.")
        time.sleep(0.005)
    return web, thread
