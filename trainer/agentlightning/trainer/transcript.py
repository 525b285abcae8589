"""Calls from text: a recorded conversation through the chat template, as the model would have seen and said it.

The prompt is the template's text up to the answer, the response what the template writes for the answer, up to its end
token: so only what the assistant said in that call has mask 1, whoever said it first. Calls that continue each other merge
into one sample as sampled ones do.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jinja2
import numpy as np

from agentlightning.trainer.calls import Call
from agentlightning.trainer.conversation import Exchange, Message, read_exchange, with_parsed_arguments

__all__ = ["Transcriber"]


class Transcriber:
    """Writes calls with ids of the model that is trained.

    Args:
        tokenizer: of transformers (its classes share no typed interface), with a chat template.
        policy: whose ids on record are this model's: they are taken as they are. Other calls go through the template.
        verbatim_arguments: whether the template takes a tool call's arguments as text.
        longest: tokens that prompt and answer may have.
    """

    def __init__(self, tokenizer: Any, *, policy: str, verbatim_arguments: bool, longest: int) -> None:
        self._tokenizer = tokenizer
        self._policy = policy
        self._verbatim = verbatim_arguments
        self._longest = longest
        self._ends = {tokenizer.eos_token_id} - {None}

    def calls(
        self, calls: Iterable[Call], rows: Iterable[Mapping[str, Any]]
    ) -> tuple[list[Call], Counter[str], Counter[str]]:
        """The calls that can be learnt from; how many came from `ids` and from `text`; and how many did not, and why."""
        by_id = {(row["rollout_id"], row["attempt"], row["call_id"]): row for row in rows}
        written, sources, left_out = [], Counter[str](), Counter[str]()
        for call in calls:
            outcome = self._call(call, by_id[call.rollout_id, call.attempt, call.call_id])
            if isinstance(outcome, str):
                left_out[outcome] += 1
            else:
                sources["ids" if outcome.prompt_ids is call.prompt_ids else "text"] += 1
                written.append(outcome)
        return written, sources, left_out

    def _call(self, call: Call, row: Mapping[str, Any]) -> Call | str:
        if call.error is not None:
            return "call_error"
        if call.policy == self._policy and call.has_tokens and self._known(call):
            prompt, response = call.prompt_ids, call.response_ids
        else:
            exchange = read_exchange(row)
            if isinstance(exchange, str):
                return exchange
            ids = self.ids(exchange)
            if isinstance(ids, str):
                return ids
            prompt, response = (np.asarray(part, np.int32) for part in ids)
        assert prompt is not None
        assert response is not None
        if len(prompt) + len(response) > self._longest:
            return "too_long"
        # There is no sampler to correct for: every answer is taken as it is, at the model's own temperature.
        logprobs = np.zeros(len(response), np.float32)
        return replace(
            call,
            policy=self._policy,
            prompt_ids=prompt,
            response_ids=response,
            logprobs=logprobs,
            temperature=1.0,
        )

    def ids(self, exchange: Exchange) -> tuple[list[int], list[int]] | str:
        """Ids of prompt and answer, or why the template cannot write them."""
        try:
            prompt = self._render(exchange.messages, exchange.tools, prompt=True)
            whole = self._render(exchange.whole, exchange.tools, prompt=False)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError):
            return "template_failed"
        if not whole.startswith(prompt):
            return "template_rewrites_the_prompt"  # the answer cannot be told from what came before
        encode = self._tokenizer
        # The template has written the special tokens; the tokenizer must not add its own.
        response: list[int] = encode(whole[len(prompt) :], add_special_tokens=False).input_ids
        ends = [place for place, token in enumerate(response) if token in self._ends]
        if ends:
            response = response[: ends[-1] + 1]  # what the template writes after it is the next prompt's
        if not response:
            return "no_answer"
        return encode(prompt, add_special_tokens=False).input_ids, response

    def _render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, prompt: bool) -> str:
        if not self._verbatim:
            messages = [with_parsed_arguments(message) for message in messages]
        text: str = self._tokenizer.apply_chat_template(
            list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=prompt
        )
        return text

    def _known(self, call: Call) -> bool:
        highest = max(int(call.prompt.max(initial=0)), int(call.sampled.max(initial=0)))
        return highest < len(self._tokenizer)
