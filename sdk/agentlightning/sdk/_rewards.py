"""Rewards: a program's own verdict on what it has just done, in the words of the conventions' evaluation results.

One verdict is one span. Its parent says what it judges, unless it names a model's response.
"""

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar, cast, overload

from opentelemetry import context as context_api
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind

from agentlightning.proto import attributes as names
from agentlightning.sdk._identity import Identity, into_context
from agentlightning.sdk._instrument import tracer
from agentlightning.sdk._losses import count
from agentlightning.sdk._spans import Rollout, Scope, warn_if_off

__all__ = ["Judgement", "reward"]

Scores = float | Mapping[str, float]
F = TypeVar("F", bound=Callable[..., Any])
_LATER = object()
"""No value yet. None is none either, but rather a mistake."""


@overload
def reward(
    value: Scores,
    name: str = ...,
    of: Any = ...,
    *,
    label: str | None = ...,
    explanation: str | None = ...,
) -> None: ...
@overload
def reward(value: F) -> F: ...
@overload
def reward(
    *,
    name: str = ...,
    of: Any = ...,
    label: str | None = ...,
    explanation: str | None = ...,
) -> "Judgement": ...
def reward(
    value: Any = _LATER,
    name: str = names.DEFAULT_REWARD,
    of: Any = None,  # a Rollout, a span, a response or a response's id
    *,
    label: str | None = None,
    explanation: str | None = None,
) -> Any:
    """Judge what has just been done.

        agl.reward(0.5)
        agl.reward({"reward": 1.0, "style": 0.3}, of=answer)   # several dimensions, of one model call

        @agl.reward                                            # what the function returns is the reward
        def score(answer): ...

        with agl.reward(name="speed") as judged:               # set inside, of what was current before
            judged.value = 1.0 if work() else 0.0

    Args:
        value: The score, a finite number; or scores by name; or a function that returns either. Left
            out: a `Judgement`, to decorate a function with or to enter.
        name: What is judged, when there is more than one reward.
        of: What it judges. Default: the span that is current, so inside `agl.agent(...)` that agent's work, else
            the rollout. Or a rollout, a span, a model's response, or a response's id.
        label: A word for the score, such as `pass`.
        explanation: Why.
    """
    judgement = Judgement(name, of, label, explanation)
    if value is _LATER:
        return judgement
    if callable(value):
        return judgement(value)
    judgement.record(value)
    return None


class Judgement:
    """A reward whose value comes later. A decorator, and a context manager, sync or async."""

    def __init__(self, name: str, of: Any, label: str | None, explanation: str | None) -> None:
        if not isinstance(name, str) or not name:
            raise ValueError(f"A reward's name must be a text that is not empty, not {name!r}.")
        self.value: Scores | None = None
        """Set it before the block ends: a number, or numbers by name."""
        self._name, self._of = name, of
        self._more = {names.EVALUATION_LABEL: label, names.EVALUATION_EXPLANATION: explanation}
        self._around: Context | None = None

    def __enter__(self) -> Self:
        self._around = context_api.get_current()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is not None:  # there is nothing to judge
            return
        if self.value is None:
            raise ValueError(
                f"The block of the reward {self._name!r} has ended without a value: set `.value`."
            )
        self.record(self.value)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, where)

    def __call__(self, function: F) -> F:
        """Decorate a function or coroutine: what it returns is the reward."""
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def judge_async(*args: Any, **kwargs: Any) -> Any:
                scores = await function(*args, **kwargs)
                self.record(scores)
                return scores

            return cast(F, judge_async)

        @functools.wraps(function)
        def judge(*args: Any, **kwargs: Any) -> Any:
            scores = function(*args, **kwargs)
            self.record(scores)
            return scores

        return cast(F, judge)

    def record(self, scores: Scores) -> None:
        """Send the verdict. Raises ValueError for what is no finite number, and then sends nothing."""
        if isinstance(scores, Mapping) and self._name != names.DEFAULT_REWARD:
            raise ValueError(f"The scores name themselves: the reward cannot be called {self._name!r} too.")
        given = scores if isinstance(scores, Mapping) else {self._name: scores}
        verdicts = {_name(name): _finite(name, score) for name, score in given.items()}
        context, response_id = _judged(self._of)
        warn_if_off("reward")
        for name, score in verdicts.items():
            attributes: dict[str, Any] = {names.EVALUATION_NAME: name, names.EVALUATION_SCORE: score}
            if response_id is not None:
                attributes[names.RESPONSE_ID] = response_id
            attributes.update({key: value for key, value in self._more.items() if value is not None})
            span = tracer().start_span(
                names.EVALUATION_RESULT, context or self._around, SpanKind.INTERNAL, attributes
            )
            span.end()


def _name(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise ValueError(f"A reward's name must be a text that is not empty, not {name!r}.")
    return name


def _finite(name: str, value: object) -> float:
    if value is None or isinstance(value, str | bytes):
        raise ValueError(f"A reward must be a number, not {value!r}.")
    score = float(cast(float, value))
    if not math.isfinite(score):
        count("rewards_not_finite")
        raise ValueError(
            f"The reward {name!r} is {score}: it must be a finite number, or training would learn nothing."
        )
    return score


def _judged(of: Any) -> tuple[Context | None, str | None]:
    """The parent context of a reward, and the response id that it names."""
    if of is None:
        return None, None
    if isinstance(of, Rollout):
        if of.span is None:
            raise ValueError("The rollout has not begun: use it as a context manager before it is rewarded.")
        return into_context(of.identity, trace.set_span_in_context(of.span)), None
    if isinstance(of, Scope) and of.span is not None:
        of = of.span
    if isinstance(of, Span):
        context = trace.set_span_in_context(of)
        identity = Identity.from_attributes(getattr(of, "attributes", None) or {})
        return (into_context(identity, context) if identity else context), None
    response_id = of if isinstance(of, str) else getattr(of, "id", None)
    if isinstance(response_id, str) and response_id:
        return None, response_id
    raise ValueError(f"A reward can be of a rollout, a span, a response or a response's id, not of {of!r}.")
