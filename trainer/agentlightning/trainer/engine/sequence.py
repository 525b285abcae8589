"""One answer in the making: its tokens, where its keys and values lie, and what the client is told of it."""

from dataclasses import dataclass
from typing import Any

from agentlightning.trainer.engine.arena import Arena
from agentlightning.trainer.engine.grammar import Constraint
from agentlightning.trainer.engine.prefix import NOWHERE, Node
from agentlightning.trainer.engine.sampling import Draw, Sampled, Sampling
from agentlightning.trainer.engine.text import StopFinder, TextStream

__all__ = ["Emitted", "Sequence"]


@dataclass(frozen=True, slots=True)
class Emitted:
    """What one token adds to an answer, or that the answer failed."""

    token: int
    logprob: float
    top: list[tuple[int, float]]
    text: str
    """May be empty, while a character or a stop string is incomplete; may hold what was held back before."""
    version: int
    finish: str | None = None
    """`stop` or `length` with the last token."""


@dataclass(eq=False, slots=True)
class Sequence:
    """A request's one choice. The engine's thread owns it; the server reads `choice` and `prompt_length` alone."""

    tokens: list[int]
    draw: Draw
    end_tokens: frozenset[int]
    text: TextStream
    stops: StopFinder
    client: Any
    """Whom `Emitted` is for; the scheduler hands it back untouched."""
    choice: int = 0
    prompt_length: int = 0
    cached: int = 0
    """Prompt tokens whose keys and values were at hand already."""
    leaf: Node = NOWHERE
    """The lowest node of the prefix tree that this sequence holds (locked)."""
    shared: Node = NOWHERE
    arena: Arena | None = None
    row: int = -1
    tail_length: int = 0

    @classmethod
    def start(
        cls,
        prompt: list[int],
        sampling: Sampling,
        *,
        tokenizer: Any,
        end_tokens: frozenset[int],
        client: Any,
        choice: int = 0,
        constraint: Constraint | None = None,
    ) -> "Sequence":
        return cls(
            tokens=list(prompt),
            draw=Draw.of(sampling, choice, constraint),
            end_tokens=frozenset() if sampling.ignore_eos else end_tokens,
            text=TextStream(tokenizer),
            stops=StopFinder(sampling.stop),
            client=client,
            choice=choice,
            prompt_length=len(prompt),
        )

    def accept(self, sampled: Sampled, version: int) -> Emitted:
        """Append a token; the answer is finished if `finish` is set in what comes back."""
        self.tokens.append(sampled.token)
        self.draw.accept(sampled.token)
        finish = None
        if sampled.token in self.end_tokens:
            piece, finish = self.stops.push(self.text.flush())[0] + self.stops.flush(), "stop"
        else:
            piece, stopped = self.stops.push(self.text.push(sampled.token))
            if stopped:
                finish = "stop"
            elif len(self.tokens) - self.prompt_length >= self.draw.sampling.max_tokens:
                rest, stopped = self.stops.push(self.text.flush())
                piece += rest if stopped else rest + self.stops.flush()
                finish = "stop" if stopped else "length"
        return Emitted(sampled.token, sampled.logprob, sampled.top, piece, version, finish)
