"""The record of a model call: one span and one row of the ledger for each choice of its answer."""

import time
from typing import TYPE_CHECKING, Any

import orjson

from agentlightning.gateway.answer import Answer, BadAnswer, Choice
from agentlightning.gateway.ledger import CallRow
from agentlightning.gateway.otlp import Value, encode_span
from agentlightning.gateway.policies import Policy
from agentlightning.gateway.request import ModelRequest, Writer, sampling_attributes
from agentlightning.gateway.rules import Json
from agentlightning.gateway.spans import CLIENT
from agentlightning.proto import attributes as names
from agentlightning.proto import ids
from agentlightning.proto.packed import pack_ids

if TYPE_CHECKING:
    from agentlightning.gateway.proxy import Caller

__all__ = ["Recorder"]


class Recorder:
    """Makes the records of one call.

    Args:
        nonce: tells this call from all others of its attempt.
    """

    def __init__(
        self, caller: "Caller", request: ModelRequest, policy: Policy, writer: Writer, nonce: str
    ) -> None:
        self.started_ns = time.time_ns()
        self.asked_ns: int | None = None
        """When an engine was asked: before, the call waited."""
        self.first_ns: int | None = None
        """When the first bytes of the answer came."""
        self.asked: Json = {}
        """The body that the engine got."""
        self._caller = caller
        self._request = request
        self._policy = policy
        self._writer = writer
        self._nonce = nonce
        self._call_ids: dict[int, str] = {}
        self._span_ids: dict[int, str] = {}

    def call_id(self, index: int = 0) -> str:
        """The identity of one choice."""
        if index not in self._call_ids:
            identity = self._caller.identity
            self._call_ids[index] = ids.call_id(
                identity.rollout_id, identity.attempt, f"{self._nonce} {index}"
            )
        return self._call_ids[index]

    def _span_id(self, index: int) -> str:
        if index not in self._span_ids:
            self._span_ids[index] = ids.derived_span_id("call", self.call_id(index))
        return self._span_ids[index]

    def records(self, answer: Answer) -> tuple[list[bytes], list[CallRow], list[str]]:
        """Spans and rows of a whole answer, and counters of what is missing in it. Raises BadAnswer."""
        spans, rows, missing = [], [], []
        ended = time.time_ns()
        for choice in sorted(answer.choices.values(), key=lambda choice: choice.index):
            try:
                logprobs = choice.logprobs()
            except BadAnswer:
                missing.append("logprobs_mismatch")
                logprobs = None
            if choice.token_ids is None or answer.prompt_of(choice) is None:
                missing.append("no_token_ids")
            body = orjson.dumps(self._writer.record(answer, choice))
            spans.append(self._span(answer, choice, ended, logprobs, body))
            rows.append(self.row(answer, choice.index))
        return spans, rows, missing

    def failure(self, answer: Answer, code: str, message: str) -> bytes:
        """The span of a call that came to no answer, with what there is of one."""
        choice = next(iter(answer.choices.values()), None)
        body, logprobs = None, None
        try:
            if choice is not None:
                body = orjson.dumps(self._writer.record(answer, choice))
                logprobs = choice.logprobs()
        except BadAnswer:
            pass  # parts of it may be missing: it is an answer that failed
        failed = (code, message)
        try:
            return self._span(answer, choice, time.time_ns(), logprobs, body, failed)
        except BadAnswer:  # what came cannot be told; that it failed can
            return self._span(Answer(), None, time.time_ns(), None, None, failed)

    def row(self, answer: Answer, index: int, error: str | None = None, *, fault: bool = False) -> CallRow:
        caller, call_id = self._caller, self.call_id(index)
        return CallRow(
            call_id=call_id,
            rollout_id=caller.identity.rollout_id,
            attempt=caller.identity.attempt,
            digest=self._request.digest,
            trace_id=caller.trace_id,
            span_id=self._span_id(index),
            response_id=self._writer.response_id(answer),
            started=self.started_ns / 1e9,
            error=error,
            fault=fault,
            fenced=caller.attempt is not None,
        )

    def _span(
        self,
        answer: Answer,
        choice: Choice | None,
        ended: int,
        logprobs: bytes | None,
        body: bytes | None,
        failed: tuple[str, str] | None = None,
    ) -> bytes:
        request, caller = self._request, self._caller
        index = 0 if choice is None else choice.index
        call_id = self.call_id(index)
        attributes: dict[str, Value] = caller.identity.attributes()
        attributes |= {
            names.CALL_ID: call_id,
            names.POLICY: self._policy.name,
            names.SOURCE: "gateway",
            names.CHOICE: index,
            names.OPERATION_NAME: request.api.operation,
            names.PROVIDER_NAME: "agentlightning",
            names.REQUEST_MODEL: request.model,
            names.REQUEST: request.text(caller.token),
            **sampling_attributes(self.asked or request.chat),
        }
        if self.asked_ns is not None:
            attributes[names.TIME_QUEUE] = (self.asked_ns - self.started_ns) / 1e6
        if self.first_ns is not None:
            attributes[names.TIME_FIRST] = (self.first_ns - self.started_ns) / 1e6
        if isinstance(model := answer.head.get("model"), str):
            attributes[names.RESPONSE_MODEL] = model
        if (response_id := self._writer.response_id(answer)) is not None:
            attributes[names.RESPONSE_ID] = response_id
        attributes |= _tokens(answer, choice)
        if logprobs is not None:
            attributes[names.RESPONSE_LOGPROBS] = logprobs
        if choice is not None and choice.finish_reason is not None:
            attributes[names.FINISH_REASONS] = [choice.finish_reason]
        if body is not None:
            text = body.decode()
            attributes[names.RESPONSE] = (
                text if caller.token is None else text.replace(caller.token, "[removed]")
            )
        if failed is not None:
            attributes[names.ERROR_TYPE] = failed[0]
        return encode_span(
            name=f"{request.api.operation} {request.model}",
            trace_id=caller.trace_id,
            span_id=self._span_id(index),
            parent_id=caller.parent_id,
            start_ns=self.started_ns,
            end_ns=ended,
            attributes=attributes,
            kind=CLIENT,
            error=None if failed is None else failed[1],
        )


def _tokens(answer: Answer, choice: Choice | None) -> dict[str, Any]:
    """Ids and versions. Raises BadAnswer if they are none."""
    found: dict[str, Any] = {}
    version, versions = answer.versions_of(choice) if choice is not None else (answer.version, None)
    if version is not None:
        found[names.MODEL_VERSION] = version
    if versions is not None:
        found[names.MODEL_VERSIONS] = versions
    try:
        if (prompt_ids := answer.prompt_of(choice)) is not None:
            found[names.PROMPT_TOKEN_IDS] = pack_ids(prompt_ids)
            found[names.USAGE_INPUT] = len(prompt_ids)
        if choice is not None and choice.token_ids is not None:
            found[names.RESPONSE_TOKEN_IDS] = pack_ids(choice.token_ids)
            found[names.USAGE_OUTPUT] = len(choice.token_ids)
    except (TypeError, OverflowError) as error:
        raise BadAnswer(f"The engine's token ids cannot be read ({error}).") from None
    return found
