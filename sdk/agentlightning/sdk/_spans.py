"""What a program can tell us of itself: a rollout, an agent. (Its rewards: `_rewards`.)"""

import functools
import inspect
import json
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from opentelemetry import context as context_api
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, StatusCode

from agentlightning.proto import attributes as names
from agentlightning.proto.ids import check_id, new_id
from agentlightning.sdk._identity import Identity, from_context, from_environment, into_context
from agentlightning.sdk._instrument import is_instrumented, tracer
from agentlightning.sdk._losses import count, warn_once
from agentlightning.sdk._secrets import redact_text

__all__ = ["Rollout", "Scope", "agent", "rollout", "warn_if_off"]

F = TypeVar("F", bound=Callable[..., Any])


class Scope:
    """A span that is current inside a `with` or `async with` block."""

    def __init__(self) -> None:
        self.span: Span | None = None
        self._token: Any = None

    def _open(self) -> tuple[Span, Context]:
        raise NotImplementedError

    def _close(self, span: Span, error: BaseException | None) -> None:
        _end(span, error)

    def __enter__(self) -> Self:
        if self.span is not None:
            raise RuntimeError(
                f"This {type(self).__name__} has been entered before: make a new one for each block."
            )
        warn_if_off(type(self).__name__)
        self.span, context = self._open()
        self._token = context_api.attach(context)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        context_api.detach(self._token)
        if self.span is not None:
            self._close(self.span, error)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, where)


class Rollout(Scope):
    """One execution of an agent on one task. Made by `rollout`; a context manager, sync or async."""

    def __init__(self, identity: Identity, task: Any, *, owned: bool) -> None:
        super().__init__()
        self.identity = identity
        self._task = task
        # Of a rollout that a controller runs, the gateway tells the state; a second voice would only confuse.
        self._owned = owned

    @property
    def rollout_id(self) -> str:
        """The rollout's name."""
        return self.identity.rollout_id

    @property
    def attempt(self) -> int:
        """Which try at the rollout this is, from 0."""
        return self.identity.attempt or 0

    def _open(self) -> tuple[Span, Context]:
        outer = trace.get_current_span().get_span_context()
        links = [trace.Link(outer)] if outer.is_valid else []
        # A trace of its own, even inside another span: rollouts of one process are not one story.
        context = into_context(self.identity, trace.set_span_in_context(trace.INVALID_SPAN))
        attributes: dict[str, Any] = {**self.identity.attributes(), names.SOURCE: "sdk"}
        if self._task is not None:
            attributes[names.TASK_INPUT] = json.dumps(self._task, ensure_ascii=False, default=str)
        name = names.ROLLOUT_SPAN_NAME if self._owned else "rollout"
        span = tracer().start_span(name, context, SpanKind.INTERNAL, attributes, links)
        return span, trace.set_span_in_context(span, context)

    def _close(self, span: Span, error: BaseException | None) -> None:
        if self._owned:
            state, cause = _outcome(error)
            span.set_attribute(names.ROLLOUT_STATE, state)
            if cause is not None:
                span.set_attribute(names.ROLLOUT_CAUSE, cause)
            if error is not None:
                span.set_attribute(names.ROLLOUT_ERROR, redact_text(f"{type(error).__name__}: {error}"))
        _end(span, error)


def rollout(
    *,
    rollout_id: str | None = None,
    task: Any = None,
    task_id: str | None = None,
    group_id: str | None = None,
    run_id: str | None = None,
    attempt: int | None = None,
    split: str | None = None,
) -> Rollout:
    """Everything inside the block belongs to one rollout; many may run at once in a process.

        async with agl.rollout(task={"question": question}, group_id="q-17") as rollout:
            answer = await agent.run(question)
            agl.reward(float(answer == expected))

    Args:
        rollout_id: Its name. Default: the rollout that the process was started for, else a new name.
        task: The agent's input, anything JSON can hold.
        task_id: Names the task, a row of the data set.
        group_id: Names the rollouts of one task that are compared with each other.
        run_id: Names the training run. Default: that of the surrounding rollout or of the process.
        attempt: Which try at the rollout this is. Default: 0, or the process's.
        split: `train` or `val`. Default: the process's.
    """
    process = from_environment()
    around = from_context() or process
    inherited = process if process is not None and rollout_id in (None, process.rollout_id) else None
    for value, what in (
        (rollout_id, "rollout_id"),
        (task_id, "task_id"),
        (group_id, "group_id"),
        (run_id, "run_id"),
    ):
        if value is not None:
            check_id(value, what)
    if split not in (None, "train", "val"):
        raise ValueError(f"split must be 'train' or 'val', not {split!r}.")
    if attempt is not None and (not isinstance(attempt, int) or attempt < 0):
        raise ValueError(f"attempt must be a whole number from 0, not {attempt!r}.")
    if inherited is not None:
        identity = Identity(
            inherited.rollout_id,
            run_id or inherited.run_id,
            group_id or inherited.group_id,
            task_id or inherited.task_id,
            attempt if attempt is not None else inherited.attempt,
            split or inherited.split,
        )
    else:
        identity = Identity(
            rollout_id or new_id("ro"),
            run_id or (around.run_id if around else None),
            group_id,
            task_id,
            attempt or 0,
            split or (around.split if around else None),
        )
    return Rollout(identity, task, owned=inherited is None)


class agent(Scope):
    """An agent at work: its model calls, tools and inner agents are its subtree.

    A context manager, sync or async, or a decorator of functions, coroutines and (async) generators.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        if not isinstance(name, str) or not name:
            raise ValueError(f"An agent's name must be a text that is not empty, not {name!r}.")
        self._name = name

    def _open(self) -> tuple[Span, Context]:
        attributes = {names.OPERATION_NAME: "invoke_agent", names.AGENT_NAME: self._name}
        span = tracer().start_span(
            f"invoke_agent {self._name}", kind=SpanKind.INTERNAL, attributes=attributes
        )
        return span, trace.set_span_in_context(span)

    def __call__(self, function: F) -> F:
        """Decorate a function: each of its calls is the agent at work."""
        name = self._name
        if inspect.isasyncgenfunction(function):

            @functools.wraps(function)
            async def generate_async(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
                steps = _Steps(agent(name))
                inner = function(*args, **kwargs)
                try:
                    while True:
                        with steps:
                            item = await anext(inner)
                        yield item
                except StopAsyncIteration:
                    return
                except BaseException as error:
                    steps.error = error
                    raise
                finally:
                    with steps:
                        await inner.aclose()
                    steps.end()

            return cast(F, generate_async)
        if inspect.isgeneratorfunction(function):

            @functools.wraps(function)
            def generate(*args: Any, **kwargs: Any) -> Iterator[Any]:
                steps = _Steps(agent(name))
                inner = function(*args, **kwargs)
                try:
                    while True:
                        with steps:
                            item = next(inner)
                        yield item
                except StopIteration as end:
                    return end.value
                except BaseException as error:
                    steps.error = error
                    raise
                finally:
                    with steps:
                        inner.close()
                    steps.end()

            return cast(F, generate)
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def work_async(*args: Any, **kwargs: Any) -> Any:
                with agent(name):
                    return await function(*args, **kwargs)

            return cast(F, work_async)

        @functools.wraps(function)
        def work(*args: Any, **kwargs: Any) -> Any:
            with agent(name):
                return function(*args, **kwargs)

        return cast(F, work)


class _Steps:
    """The span of a generator: current while a step of it runs, not while its consumer does."""

    def __init__(self, scope: agent) -> None:
        self.span, self._context = scope._open()
        self.error: BaseException | None = None

    def __enter__(self) -> None:
        self._token = context_api.attach(self._context)

    def __exit__(self, *_: object) -> None:
        context_api.detach(self._token)

    def end(self) -> None:
        # GeneratorExit is a consumer that has seen enough, not a failure.
        _end(self.span, None if isinstance(self.error, GeneratorExit) else self.error)


def _end(span: Span, error: BaseException | None) -> None:
    if error is not None and span.is_recording():
        kind = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
        message = redact_text(str(error))
        stack = redact_text("".join(traceback.format_exception(error)))
        span.set_attribute(names.ERROR_TYPE, kind)
        span.set_status(StatusCode.ERROR, f"{type(error).__name__}: {message}")
        span.add_event(
            "exception", {"exception.type": kind, "exception.message": message, "exception.stacktrace": stack}
        )
    span.end()


def _outcome(error: BaseException | None) -> tuple[str, str | None]:
    if error is None:
        return "succeeded", None
    if type(error).__name__ == "CancelledError" or isinstance(error, KeyboardInterrupt):
        return "cancelled", "cancelled"
    return "failed", "timeout" if isinstance(error, TimeoutError) else "agent_error"


def warn_if_off(what: str) -> None:
    if not is_instrumented():
        count("used_before_instrument")
        warn_once("off", "agl.%s was used before agl.instrument(): it is not recorded.", what.lower())
