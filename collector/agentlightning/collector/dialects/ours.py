"""What our gateway and our transport hook add to a model call, whoever opened its span.

The exact bodies, the packed token ids and the identity of the call win over what was rebuilt from the
dialect's messages.
"""

from typing import Any, Final

from agentlightning.collector import tokens
from agentlightning.collector.bodies import structured
from agentlightning.collector.roles import Call, int64, string
from agentlightning.collector.span import Span
from agentlightning.proto import attributes as names

__all__ = ["complete"]

_SAMPLING_IN_REQUEST: Final = (
    "temperature",
    "top_p",
    "top_k",
    "max_tokens",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "n",
    "max_completion_tokens",
    "min_p",
    "repetition_penalty",
    "logit_bias",
)


def complete(call: Call, span: Span) -> None:
    """Lay over a call what its span holds of ours."""
    attributes = span.attributes
    path = structured(attributes.get(names.AGENT_PATH))
    if isinstance(path, list) and path and all(isinstance(name, str) for name in path):
        call.agent_path = path
    call.call_id = string(attributes.get(names.CALL_ID))
    call.policy = string(attributes.get(names.POLICY))
    call.model_version = int64(attributes.get(names.MODEL_VERSION))
    versions = structured(attributes.get(names.MODEL_VERSIONS))
    if isinstance(versions, list) and all(int64(version) is not None for version in versions):
        call.model_versions = versions
    elif versions is not None:
        call.unparsed.append("model_versions")
    call.choice = int64(attributes.get(names.CHOICE)) or 0
    if any(name in attributes for name in tokens.TOKEN_ATTRIBUTES):
        _read_tokens(call, attributes)
    call.request = string(attributes.get(names.REQUEST)) or call.request
    call.response = string(attributes.get(names.RESPONSE)) or call.response
    if not call.sampling:
        call.sampling = _sampling_of_request(string(attributes.get(names.REQUEST)))


def _read_tokens(call: Call, attributes: dict[str, Any]) -> None:
    call.logprobs = None
    call.prompt_ids = _tokens(call, attributes, names.PROMPT_TOKEN_IDS, "prompt_token_ids")
    call.response_ids = _tokens(call, attributes, names.RESPONSE_TOKEN_IDS, "response_token_ids")
    if call.response_ids is None:
        if attributes.get(names.RESPONSE_LOGPROBS) is not None:
            call.unparsed.append("response_logprobs_without_ids")
        return
    call.logprobs = _tokens(call, attributes, names.RESPONSE_LOGPROBS, "response_logprobs")
    if call.logprobs is not None and len(call.logprobs) != len(call.response_ids):
        # Which of the two is wrong cannot be known: neither is used.
        call.response_ids = call.logprobs = None
        call.unparsed.append("response_logprobs_not_parallel")


def _tokens(call: Call, attributes: dict[str, Any], attribute: str, what: str) -> bytes | None:
    try:
        return tokens.pack(attributes.get(attribute), floats=tokens.TOKEN_ATTRIBUTES[attribute])
    except ValueError as error:
        call.unparsed.append(f"{what}_{error}")
        return None


def _sampling_of_request(request: str | None) -> dict[str, Any]:
    body = structured(request)
    if not isinstance(body, dict):
        return {}
    return {name: body[name] for name in _SAMPLING_IN_REQUEST if body.get(name) is not None}
