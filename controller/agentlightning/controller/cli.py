"""`agl controller`: run the agents of a gateway's rollouts."""

import argparse
import asyncio
import os
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from agentlightning.proto.errors import ConfigError
from agentlightning.proto.process import (
    die_with_parent,
    lock_directory,
    read_token,
    run_main,
    setup_logging,
    stop_event,
    write_ready,
)

__all__ = ["main"]

LEASE = 30.0
"""Seconds; the controller is heard from three times as often."""

EXAMPLES = """\
AGENT is a Python function, which is imported once and forked for each rollout, and called with the fields of the
task's input; or a command line, in which {field} stands for a field of the task's input (there is no shell), and
whose output is what it prints. Either finds the address and key of its model in OPENAI_BASE_URL and OPENAI_API_KEY.

examples:
  agl controller --gateway http://127.0.0.1:8080 --agent my_agent:solve --evaluator my_rewards:evaluate
  agl controller --gateway http://127.0.0.1:8080 --agent 'node agent.js {question}' --timeout 120 --env SEARCH_KEY
"""


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command."""
    return run_main(lambda: _main(argv))


def _main(argv: list[str] | None) -> int:
    die_with_parent()
    options = _parser().parse_args(argv)
    setup_logging("controller", options.log_level)
    state = Path(options.state)
    with lock_directory(state, "The controller's state"):
        asyncio.run(_run(options, state))
    return 0


async def _run(options: argparse.Namespace, state: Path) -> None:
    stop = stop_event()  # first: a signal during the imports below must not be lost
    from agentlightning.controller import containment
    from agentlightning.controller.attempt import Workshop
    from agentlightning.controller.controller import Controller, controller_id
    from agentlightning.controller.environment import allowed_environment
    from agentlightning.controller.gateway import Gateway
    from agentlightning.controller.processes import Processes
    from agentlightning.controller.spec import CommandAgent, FunctionAgent, check_target, parse_agent

    gateway_url = _address(options.gateway, "--gateway")
    collector = _address(options.collector, "--collector") if options.collector else None
    token = read_token(options.token_file) if options.token_file else None
    agent = parse_agent(options.agent)
    environ = allowed_environment(os.environ, options.env)
    directory = Path(options.cwd).resolve()
    if not directory.is_dir():
        raise ConfigError(f"--cwd {options.cwd}: there is no such folder.")
    if isinstance(agent, CommandAgent):
        agent.check(environ.get("PATH"), directory)
        if options.setup:
            raise ConfigError(
                "--setup is for agents that are Python functions: a command line starts its own interpreter."
            )
    for target, name in ((options.setup, "--setup"), (options.evaluator, "--evaluator")):
        if target:
            check_target(target, name)

    containment.adopt_orphans()
    containment.hide_memory()
    counters: Counter[str] = Counter()
    agents = Processes(
        "agent",
        environ=environ,
        directory=directory,
        counters=counters,
        agent=agent.target if isinstance(agent, FunctionAgent) else None,
        setup=options.setup,
    )
    # The evaluator is the user's, as the controller is: it may need keys that no agent must see.
    evaluators = (
        Processes(
            "evaluator",
            environ=os.environ,
            directory=directory,
            counters=counters,
            evaluator=options.evaluator,
        )
        if options.evaluator
        else None
    )
    started = []
    try:
        async with Gateway(gateway_url, controller_id(state), token) as gateway:
            for processes in (agents, evaluators):
                if processes is not None:
                    started.append(processes)
                    if not await _unless(stop, processes.start()):
                        return
            workshop = Workshop(
                gateway=gateway,
                agent=agent,
                agents=agents,
                evaluator=options.evaluator,
                evaluators=evaluators,
                environ=environ,
                collector=collector,
                directory=Path(options.agents_dir or state / "agents").resolve(),
                timeout=options.timeout,
                grace=options.kill_grace,
                lease_s=options.lease,
                counters=counters,
            )
            workshop.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_ready(options.ready_file, {})
            await Controller(workshop, options.concurrency, state).run(stop)
    finally:
        await asyncio.gather(*(processes.close() for processes in started))


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Whether the work was done; it is given up when `stop` is set, for it may take for ever."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    done = tasks[0].done()
    for task in tasks:
        task.cancel()
    if done:
        tasks[0].result()
    return done


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="agl controller",
        description="Run the agents of a gateway's rollouts: one process each, judged by an evaluator, with none left behind.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--gateway", metavar="URL", required=True, help="the gateway, as http://host:port")
    add("--agent", metavar="AGENT", required=True, help="module:function, or a command line; see below")
    add(
        "--evaluator",
        metavar="MODULE:FUNCTION",
        help="called as f(task, output) for each agent that succeeded, where the agent cannot reach; returns the reward, rewards by name, or None",
    )
    add(
        "--setup",
        metavar="MODULE:FUNCTION",
        help="called in each forked agent before it starts, such as agentlightning.sdk:instrument",
    )
    add("--concurrency", metavar="N", type=_positive(int), default=8, help="agents at a time (default 8)")
    add(
        "--timeout",
        metavar="SECONDS",
        type=_positive(float),
        default=300.0,
        help="time limit of one agent (default 300)",
    )
    add(
        "--kill-grace",
        metavar="SECONDS",
        type=_positive(float),
        default=5.0,
        help="from SIGTERM to SIGKILL (default 5)",
    )
    add(
        "--env",
        metavar="NAME",
        action="append",
        default=[],
        help="pass this variable on to agents; they get no others than PATH, HOME, the locale and the like (may be repeated)",
    )
    add(
        "--cwd",
        metavar="DIR",
        default=".",
        help="where agents run and modules are looked for (default: here)",
    )
    add(
        "--collector",
        metavar="URL",
        help="an open collector's OTLP/HTTP address for the agents' own spans (default: through the gateway)",
    )
    add(
        "--state",
        metavar="DIR",
        default="runs/controller",
        help="what this controller remembers (default runs/controller)",
    )
    add(
        "--agents-dir",
        metavar="DIR",
        help="logs and result of each attempt, as ROLLOUT/ATTEMPT/ (default: STATE/agents)",
    )
    add("--token-file", metavar="FILE", help="holds the gateway's controller token; mode 0600")
    add(
        "--lease",
        metavar="SECONDS",
        type=_positive(float),
        default=LEASE,
        help=f"after so long a silence the gateway gives this controller's rollouts to another (default {LEASE:g})",
    )
    add("--ready-file", metavar="FILE", help="written when the controller works")
    add("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    return parser


def _positive(kind: type[int] | type[float]):  # type: ignore[no-untyped-def]  # what argparse takes as a type
    def read(text: str) -> float:
        number = kind(text)
        if not 0 < number < float("inf"):
            raise argparse.ArgumentTypeError("must be more than zero")
        return number

    return read


def _address(text: str, option: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
        raise ConfigError(f"{option} {text!r} is not an address: give one such as http://127.0.0.1:8080.")
    return text.rstrip("/")


if __name__ == "__main__":
    raise SystemExit(main())
