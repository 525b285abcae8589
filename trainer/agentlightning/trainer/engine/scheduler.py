"""Continuous batching: the one thread that owns the model, and who takes part in its next step.

Requests join and leave between two steps; new weights and scores are slipped in there, too. Prompts are read in
chunks beside the decoding of others, so that a long one does not stop the rest. When weights change, what is running
is read again under the new ones: each sampled token's log-probability is that of one version over its whole context.
A pause leaves everything where it is and samples nothing, so that whoever shares the hardware has it for himself; it
ends by itself, because he may die.
"""

import logging
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from agentlightning.trainer.engine.attention import Segment
from agentlightning.trainer.engine.errors import RequestError
from agentlightning.trainer.engine.prefix import NOWHERE
from agentlightning.trainer.engine.runner import Runner
from agentlightning.trainer.engine.sampling import sample
from agentlightning.trainer.engine.sequence import Emitted, Sequence

__all__ = ["Scheduler"]

log = logging.getLogger(__name__)

Event = tuple[Sequence, Emitted | RequestError]

SHARED_WORK = 768
"""Sequences × tokens of a prefix node below which each sequence keeps a copy in its own tail instead: one more
attention call (60 µs on a CPU) then costs more than it saves."""


def _no_token(sequence: Sequence) -> str:
    """Why nothing could be drawn."""
    constraint = sequence.draw.constraint
    if constraint is not None and constraint.problem:
        return f"The answer cannot go on as it must look: {constraint.problem[:300]}"
    return "The model's logits are not finite."


def _die() -> None:
    """A server whose model has gone must not keep its clients waiting."""
    logging.shutdown()
    os._exit(70)


class Scheduler:
    """Owns `runner`. All methods may be called from any thread."""

    def __init__(
        self,
        runner: Runner,
        deliver: Callable[[list[Event]], None],
        *,
        max_batch: int = 64,
        max_waiting: int = 1024,
        prefill_tokens: int = 512,
        on_death: Callable[[], None] = _die,
    ) -> None:
        """`deliver` is called after each step, on the engine's thread, with what the step brought."""
        self.runner = runner
        self.max_batch, self.max_waiting, self.prefill_tokens = max_batch, max_waiting, prefill_tokens
        self.counts = {
            "steps": 0,
            "prompt_tokens": 0,
            "cached_tokens": 0,
            "sampled_tokens": 0,
            "cancelled": 0,
        }
        self._deliver = deliver
        self._on_death = on_death
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[Sequence] = deque()
        self._prefilling: list[Sequence] = []
        self._decoding = 0
        self._submitted = 0
        self._lock = threading.Lock()
        self._stopping = False
        self._paused_until = 0.0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # ------------------------------------------------------------------ from any thread

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End after the current step; unfinished sequences fail as unavailable."""
        self._inbox.put(self._shut_down)
        self._thread.join()

    @property
    def running(self) -> int:
        return self._decoding + len(self._prefilling)

    @property
    def waiting(self) -> int:
        return max(0, self._submitted - self.running)

    @property
    def paused(self) -> bool:
        return time.monotonic() < self._paused_until

    def pause(self, seconds: float) -> None:
        """Sample nothing for so long, 0 to go on at once. Requests wait; scores and new weights do not. Only inside `call`."""
        self._paused_until = time.monotonic() + seconds

    def submit(self, sequences: list[Sequence]) -> None:
        """Queue new sequences, all or none. Raises RequestError (503) when too many wait already."""
        with self._lock:
            if self._submitted + len(sequences) > self.max_batch + self.max_waiting:
                raise RequestError(
                    f"The engine is overloaded: {self.waiting} requests wait already. Try again later.",
                    status=503,
                    code="overloaded",
                )
            self._submitted += len(sequences)
        self._inbox.put(lambda: self._waiting.extend(sequences))

    def cancel(self, sequences: list[Sequence]) -> None:
        """Drop sequences before the next step; nothing more is delivered for those not finished."""
        if sequences:
            self._inbox.put(lambda: self._drop(sequences))

    def call(self, function: Callable[[], Any]) -> "Future[Any]":
        """Run a function between two steps, on the engine's thread. An error it raises goes to the future."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                result = function()
            except Exception as error:  # noqa: BLE001  whatever it is, it is for the one who asked
                future.set_exception(error)
            else:
                future.set_result(result)

        self._inbox.put(run)
        return future

    def load(self, weights: dict[str, Tensor], version: int) -> None:
        """Swap in weights that `read_weights` accepted. Only inside `call`."""
        again = [s for arena in self.runner.arenas for s in arena.rows] + self._prefilling
        for sequence in again:
            self._release(sequence)
        self._decoding = 0
        self._prefilling = again
        self.runner.load(weights, version)
        log.info("weights of version %d in place; %d answers in flight go on with them", version, len(again))

    # ------------------------------------------------------------------ on the engine's thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._read_inbox()
                if (self.running or self._waiting) and not self.paused:
                    self._step()
        except BaseException:
            log.critical(
                "the engine's thread died; the process ends, so that no client waits in vain", exc_info=True
            )
            self._on_death()

    def _read_inbox(self) -> None:
        pause = self._paused_until - time.monotonic()
        idle = pause > 0 or not (self.running or self._waiting)
        while True:
            try:
                command = self._inbox.get(block=idle, timeout=pause if pause > 0 else None)
            except queue.Empty:
                return
            command()
            idle = False

    def _step(self) -> None:
        segments, joined = self._admit()
        for arena in self.runner.arenas:
            for full in [s for s in arena.rows if s.tail_length == arena.length]:
                self.runner.arenas.prepend(full, [])
        rows = [s for arena in self.runner.arenas for s in arena.rows]
        logits = self.runner.forward(segments)
        events: list[Event] = []
        sampled = sample(logits, [s.draw for s in rows]) if rows else []
        for sequence, drawn in zip(rows, sampled, strict=True):
            if math.isnan(drawn.logprob):
                self._leave(sequence, remember=False)
                events.append((sequence, RequestError(_no_token(sequence), status=500)))
                continue
            emitted = sequence.accept(drawn, self.runner.version)
            events.append((sequence, emitted))
            if emitted.finish:
                self._leave(sequence, remember=True)
        for sequence in joined:
            if sequence.arena is not None:
                self._settle(sequence)
        self.runner.tree.evict()
        if not self.running:
            self.runner.arenas.release_memory()
        self.counts["steps"] += 1
        self.counts["sampled_tokens"] += len(sampled)
        self._deliver(events)

    def _admit(self) -> tuple[list[Segment], list[Sequence]]:
        """What of the prompts is read in this step, and which sequences decode for the first time."""
        segments: list[Segment] = []
        joined: list[Sequence] = []
        budget = self.prefill_tokens
        candidates = self._prefilling
        self._prefilling = []
        while True:
            if candidates:
                sequence = candidates.pop(0)
            elif self._waiting and budget > 0 and self.running < self.max_batch:
                sequence = self._waiting.popleft()
                self.counts["prompt_tokens"] += sequence.prompt_length
            else:
                break
            segment = self._read_prompt(sequence, budget)
            if segment is not None:
                segments.append(segment)
                budget -= len(segment.tokens)
            if sequence.leaf.end == len(sequence.tokens) - 1:
                self.runner.arenas.place(sequence, 1)
                self._decoding += 1
                joined.append(sequence)
            else:
                self._prefilling.append(sequence)
        return segments, joined

    def _read_prompt(self, sequence: Sequence, budget: int) -> Segment | None:
        """Find what is known of a sequence's tokens but the last, and plan to compute at most `budget` more."""
        tree, tokens = self.runner.tree, sequence.tokens
        goal = len(tokens) - 1
        fresh = sequence.leaf is NOWHERE
        node = tree.match(tokens, goal, sequence.leaf)
        if fresh and goal == sequence.prompt_length - 1:
            sequence.cached = node.end
            self.counts["cached_tokens"] += node.end
        segment = None
        if node.end < goal and budget > 0:
            parent, start = node, node.end
            new = tokens[start : min(goal, start + budget)]
            node = tree.add(parent, new)
            segment = Segment(node, node.kv, parent, new, start)
        tree.lock(node)
        tree.unlock(sequence.leaf)
        sequence.leaf = sequence.shared = node
        return segment

    def _settle(self, sequence: Sequence) -> None:
        """Copy into the tail those prefix nodes that too few share for an attention call of their own."""
        node = sequence.shared
        blocks: list[Tensor] = []
        while node.parent is not None and node.locks * len(node.tokens) < SHARED_WORK:
            blocks.insert(0, node.kv)
            node = node.parent
        if blocks:
            sequence.shared = node
            self.runner.arenas.prepend(sequence, blocks)

    def _leave(self, sequence: Sequence, *, remember: bool) -> None:
        """A decoding sequence ends; what it computed may be the beginning of a later prompt."""
        if remember and sequence.arena is not None:
            known = sequence.tokens[: sequence.leaf.end + self._own(sequence)]
            node = self.runner.tree.match(known, len(known), sequence.leaf)
            rest = known[node.end :]
            if rest:
                end = sequence.tail_length
                kv = sequence.arena.tokens(sequence, end - len(rest), end).clone()
                self.runner.tree.add(node, rest, kv)
        self._release(sequence)
        self._decoding -= 1
        self._done(1)

    def _own(self, sequence: Sequence) -> int:
        """Tokens of the tail that lie below the prefix tree's leaf."""
        return sequence.tail_length - (sequence.leaf.end - sequence.shared.end)

    def _release(self, sequence: Sequence) -> None:
        """Take back a sequence's place in arena and tree."""
        if sequence.arena is not None:
            sequence.arena.remove(sequence)
        sequence.tail_length = 0
        self.runner.tree.unlock(sequence.leaf)
        sequence.leaf = sequence.shared = NOWHERE

    def _drop(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if sequence.arena is not None:
                self._leave(sequence, remember=True)
            elif sequence in self._prefilling:
                self._prefilling.remove(sequence)
                self._release(sequence)
                self._done(1)
            elif sequence in self._waiting:
                self._waiting.remove(sequence)
                self._done(1)
            else:
                continue  # it had finished when its client left
            self.counts["cancelled"] += 1

    def _done(self, count: int) -> None:
        with self._lock:
            self._submitted -= count

    def _shut_down(self) -> None:
        self._stopping = True
        rows = [s for arena in self.runner.arenas for s in arena.rows]
        unfinished = [*rows, *self._prefilling, *self._waiting]
        gone = RequestError("The engine is shutting down.", status=503, code="shutting_down")
        self._deliver([(sequence, gone) for sequence in unfinished])
