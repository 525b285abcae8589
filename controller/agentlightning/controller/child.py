"""What happens in a forked process: it becomes an agent, or an evaluation, and ends.

Nothing here returns to the launcher. The environment, the standard streams, the session and the random state are
the attempt's own before any of the user's code runs; exit handlers run before the end, so that exporters flush.
"""

import asyncio
import atexit
import contextlib
import inspect
import json
import numbers
import os
import random
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from agentlightning.controller import containment

__all__ = ["Loaded", "become", "rewards_of"]

OPEN_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)
"""The limit that agents get, as it was when the launcher began."""


@dataclass(frozen=True)
class Loaded:
    """The user's functions, imported once by the launcher."""

    agent: Callable[..., Any] | None = None
    setup: Callable[[], Any] | None = None
    evaluator: Callable[..., Any] | None = None


def become(
    job: Mapping[str, Any], loaded: Loaded, launcher: int, stdout: int, stderr: int, result: int
) -> NoReturn:
    """Run a job in this freshly forked process, and end.

    Written to the descriptor `result`: a line with the result as JSON, empty if there is none; and a line with the
    names of the modules that were imported on the way, which the launcher may import once for all that follow.
    """
    code, me, imported = 1, os.getpid(), frozenset(sys.modules)
    try:
        _begin(launcher, stdout, stderr)
        if job["kind"] == "command":
            _exec(job["argv"], job["environ"])
        if job["environ"] is not None:
            os.environ.clear()
            os.environ.update(job["environ"])
        _reseed(int(job["seed"]))
        if job["kind"] == "function":
            assert loaded.agent is not None
            code, text = _run(loaded.agent, (), job["arguments"], loaded.setup, _encode_output)
        else:
            assert loaded.evaluator is not None
            code, text = _run(loaded.evaluator, (job["task"], job["output"]), {}, None, _encode_rewards)
        if os.getpid() != me:  # the user's code forked, and its child came back as well
            os._exit(code)
        _write(result, text)
        _end()
        _write(result, json.dumps([name for name in list(sys.modules) if name not in imported]))
    except BaseException:  # noqa: BLE001 - an error here must end this process, not run on as a second launcher
        traceback.print_exc()
    finally:
        os._exit(code)


def rewards_of(value: Any) -> dict[str, float]:
    """Rewards by name, from whatever an evaluator may return."""
    if value is None:
        return {}
    named = value if isinstance(value, Mapping) else {"reward": value}
    rewards = {}
    for name, number in named.items():
        # numpy's and torch's numbers are no numbers.Real, but convert.
        if not isinstance(name, str) or not (
            isinstance(number, numbers.Real) or hasattr(number, "__float__")
        ):
            raise TypeError(
                f"the evaluator returned {value!r:.200}: it must return a number, a dict of numbers by name, or None"
            )
        rewards[name] = float(number)
    return rewards


def _begin(launcher: int, stdout: int, stderr: int) -> None:
    containment.die_with(launcher)
    containment.adopt_orphans()
    os.setsid()
    resource.setrlimit(resource.RLIMIT_NOFILE, OPEN_FILES)  # the launcher has raised its own
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (stdout, 1), (stderr, 2)):
        os.dup2(source, target, inheritable=True)
    for handle in {null, stdout, stderr} - {0, 1, 2}:
        os.close(handle)
    # Lines appear in the log as they are printed: an agent that is stopped has not lost them.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _exec(argv: list[str], environ: dict[str, str]) -> NoReturn:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and a program would inherit that
    os.closerange(3, 1 << 20)
    try:
        os.execvpe(argv[0], argv, environ)
    except OSError as error:
        os.write(2, f"cannot run {argv[0]!r}: {error.strerror}\n".encode())
        os._exit(127)


def _reseed(seed: int) -> None:
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed % 2**63)


def _run(
    function: Callable[..., Any],
    positional: tuple[Any, ...],
    named: Mapping[str, Any],
    setup: Callable[[], Any] | None,
    encode: Callable[[Any], str],
) -> tuple[int, str]:
    """The exit code of a call, and its value as JSON."""
    try:
        if setup is not None:
            setup()
        value = function(*positional, **named)
        if inspect.isawaitable(value):
            value = asyncio.run(_wait_for(value))
        return 0, encode(value)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF, ""
        print(end.code, file=sys.stderr)
        return 1, ""
    except BaseException as error:  # noqa: BLE001 - whatever the user's code raises is its outcome
        outer = error.__traceback__  # begins here, which is of no interest to the user
        traceback.print_exception(error.with_traceback(outer.tb_next if outer else None))
        return 1, ""


def _write(handle: int, line: str) -> None:
    data = memoryview(f"{line}\n".encode())
    while data:
        data = data[os.write(handle, data) :]


async def _wait_for(value: Any) -> Any:
    return await value


def _encode_output(value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return json.dumps(str(value))


def _encode_rewards(value: Any) -> str:
    return json.dumps(rewards_of(value))


def _end() -> None:
    """What the interpreter does at its end, without the teardown of everything that was imported."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
