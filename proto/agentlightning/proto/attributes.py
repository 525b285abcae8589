"""Attribute names on spans and resources.

Standard OpenTelemetry GenAI names (`gen_ai.*`, semantic-conventions-genai) wherever one exists; ours
carry the prefix `agentlightning.`. A name stands here once and nowhere else.
"""

from typing import Final

# Identity: on the resource or on the span; the span wins.
RUN_ID: Final = "agentlightning.run.id"
GROUP_ID: Final = "agentlightning.group.id"
TASK_ID: Final = "agentlightning.task.id"
ROLLOUT_ID: Final = "agentlightning.rollout.id"
ATTEMPT: Final = "agentlightning.attempt"
SPLIT: Final = "agentlightning.split"
IDENTITY: Final = (RUN_ID, GROUP_ID, TASK_ID, ROLLOUT_ID, ATTEMPT, SPLIT)

# One model call.
CALL_ID: Final = "agentlightning.call.id"
"""Two spans with one call id are one call."""
POLICY: Final = "agentlightning.policy"
MODEL_VERSION: Final = "agentlightning.model.version"
"""Weight version of the first sampled token (int)."""
MODEL_VERSIONS: Final = "agentlightning.model.versions"
"""`[start, version, start, version, …]`, only when weights changed inside the answer."""
PROMPT_TOKEN_IDS: Final = "agentlightning.prompt.token_ids"
RESPONSE_TOKEN_IDS: Final = "agentlightning.response.token_ids"
"""Bytes: little-endian int32 (see `packed`). Also accepted: base64 of it, an int array, a JSON array."""
RESPONSE_LOGPROBS: Final = "agentlightning.response.logprobs"
"""Bytes: little-endian float32, one per response id, as the sampler reported it."""
REQUEST: Final = "agentlightning.request"
RESPONSE: Final = "agentlightning.response"
"""The exact JSON bodies on the wire, secrets removed."""
CHOICE: Final = "agentlightning.choice"
SOURCE: Final = "agentlightning.source"
"""`gateway` or `sdk`: who recorded the call."""
TIME_QUEUE: Final = "agentlightning.time.queue_ms"
"""Milliseconds from the call's start until an engine was asked."""
TIME_FIRST: Final = "agentlightning.time.first_token_ms"
"""Milliseconds from the call's start until the first of a stream, or the whole of an unstreamed answer, came."""
AGENT_PATH: Final = "agentlightning.agent.path"
"""Names of the agents around this span, outermost first (string array)."""

# One attempt, on the span that the gateway writes when the attempt has ended.
ROLLOUT_SPAN_NAME: Final = "agentlightning.rollout"
ROLLOUT_STATE: Final = "agentlightning.rollout.state"
ROLLOUT_CAUSE: Final = "agentlightning.rollout.cause"
ROLLOUT_ERROR: Final = "agentlightning.rollout.error"
TASK_INPUT: Final = "agentlightning.task.input"
CALLS_EXPECTED: Final = "agentlightning.calls.expected"
CALLS_ANSWERED: Final = "agentlightning.calls.answered"
"""Ids of the calls whose answers the agent got, by the gateway's ledger (string array): a recorded call that is not among
them was never handed over."""

# OpenTelemetry GenAI.
OPERATION_NAME: Final = "gen_ai.operation.name"
PROVIDER_NAME: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
RESPONSE_MODEL: Final = "gen_ai.response.model"
RESPONSE_ID: Final = "gen_ai.response.id"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
USAGE_INPUT: Final = "gen_ai.usage.input_tokens"
USAGE_OUTPUT: Final = "gen_ai.usage.output_tokens"
AGENT_NAME: Final = "gen_ai.agent.name"
ERROR_TYPE: Final = "error.type"

# A reward is an evaluation result of the GenAI conventions.
EVALUATION_RESULT: Final = "gen_ai.evaluation.result"
"""Name of the span, span event or log record."""
EVALUATION_NAME: Final = "gen_ai.evaluation.name"
EVALUATION_SCORE: Final = "gen_ai.evaluation.score.value"
EVALUATION_LABEL: Final = "gen_ai.evaluation.score.label"
EVALUATION_EXPLANATION: Final = "gen_ai.evaluation.explanation"
DEFAULT_REWARD: Final = "reward"

LLM_OPERATIONS: Final = frozenset({"chat", "text_completion", "generate_content"})
