"""A tiny model on disk, and the engine around it: in a thread, and over HTTP."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from engine_harness import CONTEXT, Collector, Served, make_tokenizer, save_scripted, save_tiny
from transformers import PreTrainedTokenizerFast

from agentlightning.trainer.engine.chat import Template
from agentlightning.trainer.engine.runner import Runner
from agentlightning.trainer.engine.scheduler import Scheduler
from agentlightning.trainer.engine.server import Engine, create_app
from agentlightning.trainer.model import end_tokens, load


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    return save_tiny(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture(scope="session")
def scripted_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_scripted(tmp_path_factory.mktemp("scripted"))


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture
def start(tiny_folder: Path) -> Iterator[Callable[..., Collector]]:
    """Start an engine thread on the tiny model: `start(prefix_tokens=…, max_batch=…)`."""
    started: list[Collector] = []

    def make(*, prefix_tokens: int = 4096, **limits: Any) -> Collector:
        model, tokenizer = load(tiny_folder)
        holder: list[Collector] = []
        scheduler = Scheduler(
            Runner(model, prefix_tokens=prefix_tokens), lambda events: holder[0].deliver(events), **limits
        )
        holder.append(Collector(scheduler, tokenizer, end_tokens(model, tokenizer)))
        scheduler.start()
        started.append(holder[0])
        return holder[0]

    yield make
    for collector in started:
        collector.scheduler.stop()


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Serve a folder over HTTP from a thread of this process: `serve(folder, token=…)`."""
    yield from _serving()


@pytest.fixture(scope="module")
def serve_module() -> Iterator[Callable[..., Served]]:
    """The same for all tests of a module."""
    yield from _serving()


def _serving() -> Iterator[Callable[..., Served]]:
    closing: list[Callable[[], None]] = []

    def make(folder: Path, *, token: str | None = None, **limits: Any) -> Served:
        model, tokenizer = load(folder)
        engine = Engine(
            Runner(model, prefix_tokens=4096),
            tokenizer,
            name="tiny",
            template=Template(tokenizer, verbatim_arguments=True),
            context=CONTEXT,
            end_tokens=end_tokens(model, tokenizer),
            **limits,
        )
        app = create_app(engine, token=token)
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="off"))
        ready = threading.Event()
        address: list[str] = []

        async def run() -> None:
            engine.start()
            config = server.config
            config.load()
            server.lifespan = config.lifespan_class(config)
            await server.startup()
            host, port = server.servers[0].sockets[0].getsockname()[:2]
            address.append(f"http://{host}:{port}")
            ready.set()
            await server.main_loop()
            await asyncio.to_thread(engine.scheduler.stop)
            await server.shutdown()

        thread = threading.Thread(target=lambda: asyncio.run(run()))
        thread.start()
        assert ready.wait(30), "the server did not start"

        def close() -> None:
            server.should_exit = True
            thread.join()

        closing.append(close)
        return Served(address[0], engine)

    yield make
    for close in closing:
        close()
