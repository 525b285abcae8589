"""`agl engine`: serve a model to agents, on this machine, with transformers."""

import argparse
import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentlightning.proto.errors import ConfigError
from agentlightning.proto.process import (
    die_with_parent,
    read_token,
    require_token,
    run_main,
    setup_logging,
    stop_event,
    write_ready,
)

if TYPE_CHECKING:
    from agentlightning.trainer.engine.server import Engine

__all__ = ["main"]

log = logging.getLogger(__name__)

HELP = """\
Serve a language model over OpenAI's chat completions API, with exact token ids and log-probabilities.
It batches concurrent requests, computes prompts that share a beginning once, streams, parses tool calls, and takes
new weights while it serves (POST /weights). Made for small models on a laptop; for large ones use vLLM.
"""

EXAMPLE = """\
example:
  agl engine --model smollm2-135m --port 8000
  curl -s http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\
       -d '{"model": "smollm2-135m", "messages": [{"role": "user", "content": "What is 2 + 3?"}]}'
"""


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    return run_main(lambda: _serve(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="agl engine",
        description=HELP,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, help="smollm2-135m, a .gguf file, or a folder with safetensors")
    add("--name", help="the model's name towards clients (default: as --model, the last part of a path)")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8000, help="port to listen on, 0 for a free one (default: %(default)s)")
    add("--token-file", type=Path, help="file (mode 600) with the bearer token that callers must send")
    add("--ready-file", type=Path, help="file to write the address to, once it serves")
    add(
        "--dtype",
        choices=["auto", "float32", "bfloat16"],
        default="auto",
        help="auto: bfloat16 where it is fast",
    )
    add("--device", default="auto", help="auto, cpu or cuda (default: %(default)s)")
    add("--threads", type=_positive, help="CPU threads for the model (default: torch's choice)")
    add("--max-batch", type=_positive, default=64, help="answers sampled at once (default: %(default)s)")
    add(
        "--max-model-len",
        type=_positive,
        default=2048,
        help="tokens of prompt and answer (default: %(default)s)",
    )
    add(
        "--max-waiting",
        type=_positive,
        default=1024,
        help="requests that may queue; more get 503 (default: %(default)s)",
    )
    add(
        "--prefill-tokens",
        type=_positive,
        default=512,
        help="prompt tokens read in one step (default: %(default)s)",
    )
    add(
        "--prefix-tokens",
        type=_positive,
        default=16384,
        help="tokens kept to be shared by prompts (default: %(default)s)",
    )
    add(
        "--tool-parser",
        choices=["hermes", "none"],
        default="hermes",
        help="form of tool calls (default: %(default)s)",
    )
    add(
        "--chat-template",
        type=Path,
        help="Jinja file (default: the model's, or ours if that one ignores tools)",
    )
    add("--load-weights", type=Path, metavar="DIR", help="start with the published weights in this folder")
    add(
        "--version", type=int, default=0, help="version number of the weights at start (default: %(default)s)"
    )
    add(
        "--log-level",
        default="info",
        choices=["debug", "info", "warning", "error"],
        help="default: %(default)s",
    )
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _serve(arguments: argparse.Namespace) -> int:
    die_with_parent()
    setup_logging("engine", arguments.log_level)
    require_token(arguments.host, arguments.token_file, "agl engine")
    token = read_token(arguments.token_file) if arguments.token_file else None
    # Before torch is imported, because OpenMP reads it once. Waiting threads that spin take the core from agents on
    # the same machine, and these then from the model: measured, up to 100 times slower on two busy cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with _listen(arguments.host, arguments.port) as listener:
        engine = _load(arguments)
        return asyncio.run(_run(engine, listener, token, arguments.ready_file))


def _load(arguments: argparse.Namespace) -> "Engine":
    try:
        import torch

        from agentlightning.trainer import model as models
        from agentlightning.trainer.engine.chat import Template
        from agentlightning.trainer.engine.runner import Runner, read_weights
        from agentlightning.trainer.engine.server import Engine
    except ImportError as error:
        raise ConfigError(
            f"The engine needs the trainer's extra: pip install 'agentlightning[trainer]' ({error})."
        ) from error
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    device, why_device = models.choose_device(arguments.device)
    dtype, why_dtype = models.choose_dtype(arguments.dtype, device)
    folder = models.resolve_model(arguments.model)
    tokenizer = models.load_tokenizer(folder, chat_template=arguments.chat_template)
    model = models.load_model(folder, dtype=dtype, device=device)
    name = arguments.name or Path(arguments.model).name
    log.info(
        "serving %s on %s (%s) in %s (%s), %d threads", name, device, why_device, str(dtype)[6:], why_dtype,
        torch.get_num_threads(),
    )  # fmt: skip
    runner = Runner(model, prefix_tokens=arguments.prefix_tokens)
    if arguments.load_weights:
        runner.load(read_weights(arguments.load_weights, model), arguments.version)
    runner.version = arguments.version
    longest = int(getattr(model.config.get_text_config(), "max_position_embeddings", arguments.max_model_len))
    if arguments.max_model_len > longest:
        log.warning(
            "the model knows %d positions; --max-model-len %d is cut to that",
            longest,
            arguments.max_model_len,
        )
    runner.score([0] * 8)  # the first forward builds kernels; the first client need not wait for it
    return Engine(
        runner,
        tokenizer,
        name=name,
        template=Template(tokenizer, verbatim_arguments=models.is_our_template(tokenizer)),
        context=min(arguments.max_model_len, longest),
        end_tokens=models.end_tokens(model, tokenizer),
        tool_parser=arguments.tool_parser == "hermes",
        max_batch=arguments.max_batch,
        max_waiting=arguments.max_waiting,
        prefill_tokens=arguments.prefill_tokens,
    )


async def _run(engine: "Engine", listener: socket.socket, token: str | None, ready_file: Path | None) -> int:
    import uvicorn

    from agentlightning.trainer.engine.server import create_app

    class Server(uvicorn.Server):
        """Leaves signals to us: uvicorn would raise them again at the end, and the exit code would not be 0."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            host, port = listener.getsockname()[:2]
            log.info("ready on http://%s:%d", host, port)
            write_ready(ready_file, {"http": f"http://{host}:{port}"})

    engine.start()
    config: dict[str, Any] = {
        "log_config": None,
        "access_log": False,
        "lifespan": "off",
        "timeout_graceful_shutdown": 5,
    }
    server = Server(uvicorn.Config(create_app(engine, token=token), **config))
    stop = stop_event()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await asyncio.wait({serving, asyncio.create_task(stop.wait())}, return_when=asyncio.FIRST_COMPLETED)
    # Unfinished answers end with an error now, so that their connections can close.
    await asyncio.to_thread(engine.scheduler.stop)
    server.should_exit = True
    await serving
    return 0


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        raise ConfigError(f"agl engine cannot listen on {host}:{port}: {error.strerror or error}.") from error
    return listener


if __name__ == "__main__":
    sys.exit(main())
