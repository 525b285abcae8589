"""Transitions merged into samples per second on one core.

    python benchmarks/samples.py [--rounds 5] [--rollouts 2000]

From an Arrow table of transitions, as it was read from Parquet, to the samples that the optimiser sees: calls whose tokens
continue each other are one sample, everything else breaks a chain for a named reason. Rollouts of four kinds: a
conversation that grows, two interleaved agents, branches, and a history that is edited half-way; four calls each. The
peer does the obvious thing on the same rows: `to_pylist`, prefixes compared as Python lists, Python lists as samples.
The best of several rounds counts, because other programs may share the machine. Target: at least 80,000 transitions
merged a second.
"""

import argparse
import gc
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from agentlightning.proto.schemas import TRANSITIONS
from agentlightning.trainer.samples import build_samples, read_calls

TARGET = 80_000
SIZES = {"short": (80, 20), "long": (1500, 300)}
"""Tokens of the first prompt, and of each answer."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rollouts", type=int, default=2000)
    arguments = parser.parse_args()
    print(
        f"{'':<8}{'tokens per call':>16}{'read/s':>12}{'merge/s':>12}{'both/s':>12}{'peer/s':>10}{'target':>10}"
    )
    for name, (prompt, response) in SIZES.items():
        table = make_table(arguments.rollouts, prompt, response)
        read = [cpu_seconds(read_calls, table) for _ in range(arguments.rounds)]
        calls = read_calls(table)
        merge = [cpu_seconds(build_samples, calls) for _ in range(arguments.rounds)]
        both = [cpu_seconds(lambda t: build_samples(read_calls(t)), table) for _ in range(arguments.rounds)]
        obvious = cpu_seconds(peer, table)
        tokens = sum(len(c.prompt) + len(c.sampled) for c in calls) / len(calls)
        rates = [len(table) / min(seconds) for seconds in (read, merge, both)]
        print(
            f"{name:<8}{tokens:>16,.0f}"
            + "".join(f"{rate:>12,.0f}" for rate in rates)
            + f"{len(table) / obvious:>10,.0f}{TARGET:>10,}"
        )


def cpu_seconds(work: Callable[[Any], Any], argument: Any) -> float:
    gc.collect()
    began = time.process_time()
    work(argument)
    return time.process_time() - began


def peer(table: pa.Table) -> list[list[list[int]]]:
    rollouts: dict[str, list[dict[str, Any]]] = {}
    for row in table.to_pylist():
        rollouts.setdefault(row["rollout_id"], []).append(row)
    samples = []
    for rows in rollouts.values():
        chains: list[list[list[int]]] = []
        for row in sorted(rows, key=lambda row: row["seq"]):
            prompt, response = row["prompt_token_ids"], row["response_token_ids"]
            for chain in chains:
                if prompt[: len(chain[0])] == chain[0]:
                    mask, logprobs = chain[1], chain[2]
                    gap = len(prompt) - len(chain[0])
                    chain[:] = [
                        prompt + response,
                        mask + [0] * gap + [1] * len(response),
                        logprobs + [0.0] * gap + row["response_logprobs"],
                    ]
                    break
            else:
                n = len(prompt)
                chains.append(
                    [prompt + response, [0] * n + [1] * len(response), [0.0] * n + row["response_logprobs"]]
                )
        samples += chains
    return samples


def make_table(rollouts: int, prompt: int, response: int) -> pa.Table:
    chance = random.Random(0)
    numbers = np.random.default_rng(0)
    draw = lambda n: numbers.integers(0, 49152, n, dtype=np.int32)  # noqa: E731
    rows: dict[str, list[Any]] = {field.name: [] for field in TRANSITIONS}
    for r in range(rollouts):
        kind = ("grows", "agents", "branches", "edited")[r % 4]
        context = {None: draw(prompt), "other": draw(prompt)}
        start = context[None]
        for seq in range(4):
            agent = "other" if kind == "agents" and seq % 2 else None
            ids = context[agent]
            if kind == "branches" and seq == 2:
                ids = start
            if kind == "edited" and seq == 2:
                ids = np.concatenate([start[: prompt // 2], draw(prompt // 2)])
            answer = draw(response)
            context[agent] = np.concatenate([ids, answer, draw(response // 2)])
            add_row(rows, r, seq, agent, ids, answer, chance)
    return pa.table([pa.array(rows[f.name], f.type) for f in TRANSITIONS], schema=TRANSITIONS)


def add_row(
    rows: dict[str, list[Any]],
    rollout: int,
    seq: int,
    agent: str | None,
    ids: np.ndarray,
    answer: np.ndarray,
    chance: random.Random,
) -> None:
    values = {
        "run_id": "run",
        "group_id": f"group-{rollout // 8}",
        "task_id": f"task-{rollout // 8}",
        "rollout_id": f"run.00001.0.{rollout:05d}",
        "split": "train",
        "attempt": 0,
        "seq": seq,
        "call_id": f"{chance.getrandbits(128):032x}",
        "span_id": f"{chance.getrandbits(64):016x}",
        "trace_id": f"{chance.getrandbits(128):032x}",
        "agent": agent,
        "policy": "policy",
        "model": "policy",
        "model_version": 3,
        "request": '{"messages": [{"role": "user", "content": "' + f"{rollout} {seq} " * 20 + '"}]}',
        "response": '{"choices": [{"message": {"role": "assistant", "content": "' + "word " * 20 + '"}}]}',
        "sampling": '{"temperature": 1.0, "max_tokens": 256}',
        "prompt_token_ids": ids,
        "response_token_ids": answer,
        "response_logprobs": np.full(len(answer), -1.0, np.float32),
        "token_source": "engine",
        "finish_reason": "stop",
        "done": seq == 3,
        "start_time": seq,
        "duration_ms": 1.0,
        "source": "gateway",
    }
    for name, column in rows.items():
        column.append(values.get(name))


if __name__ == "__main__":
    main()
