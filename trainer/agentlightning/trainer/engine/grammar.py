"""What an answer must look like, and which tokens may therefore come next.

A request's tools, `tool_choice`, `parallel_tool_calls` and `response_format` become one grammar (Lark, with JSON
schemas in it), and llguidance says at each step which tokens keep the answer within it. JSON is written as Python's
json.dumps writes it, so that a call that is rendered again in the next prompt gives the same tokens.
"""

import json
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

import llguidance.hf
import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from agentlightning.trainer.engine.errors import RequestError
from agentlightning.trainer.engine.tools import CLOSE, OPEN

__all__ = ["Constraint", "Form", "Grammars", "Offer"]

REMEMBERED = 64
"""Compiled forms."""
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class Offer:
    """A tool that the model may call, and where the request speaks of it."""

    name: str
    schema: dict[str, Any]
    """Of its arguments, an object."""
    where: str
    strict: bool
    """Whether the schema is a promise; else it is kept to as far as it can be made a grammar."""


@dataclass(frozen=True, slots=True)
class Form:
    """What an answer may consist of: text, calls, or both."""

    offers: tuple[Offer, ...] = ()
    must_call: bool = False
    parallel: bool = True
    """Whether more than one call may come."""
    schema: dict[str, Any] | None = None
    """Of an answer that is no call; None: any text."""

    def lark(self, *, special_marks: bool) -> str:
        """As a grammar. `special_marks`: the tokenizer has tokens of its own for the marks of a call."""
        rules = ["%llguidance {}", f"start: {self._start()}", "TEXT: /(.|\\n)*/"]
        if self.schema is not None:
            rules.append(f"answer: %json {_spaced(self.schema)}")
        if self.offers:
            opens, closes = _literal(OPEN), _literal(CLOSE)
            if special_marks:
                opens, closes = f"({opens} | {OPEN})", f"({closes} | {CLOSE})"
            rules += [
                f"call: {opens} offered {closes}",
                # Text up to the mark, and no further: what looks like a call must be one.
                f"spelt[lazy]: TEXT {_literal(OPEN)}",
                f"told: (spelt{f' | TEXT {OPEN}' if special_marks else ''}) offered {closes}",
                "offered: " + " | ".join(f"offer_{i}" for i in range(len(self.offers))),
            ]
            for i, offer in enumerate(self.offers):
                begin = f'{{"name": {json.dumps(offer.name)}, "arguments": '
                rules += [
                    f'offer_{i}: {_literal(begin)} arguments_{i} "}}"',
                    f"arguments_{i}: %json {_spaced(offer.schema)}",
                ]
        return "\n".join(rules) + "\n"

    def _start(self) -> str:
        calls = 'call ("\\n" call)*' if self.parallel else "call"
        if self.must_call:
            return calls
        if self.schema is not None:
            return f"answer | {calls}" if self.offers else "answer"
        return "told* TEXT" if self.parallel else "TEXT | told"


class Constraint:
    """Where one answer stands in its grammar."""

    def __init__(self, matcher: LLMatcher, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    def copy(self) -> "Constraint":
        """Another answer at the same place."""
        return Constraint(self._matcher.deep_copy(), self._vocabulary)

    def forbidden(self) -> Tensor:
        """(vocabulary,) bool: tokens that may not come next; all of them if the grammar cannot go on."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, bitorder="little", count=self._vocabulary)
        return (
            torch.from_numpy(allowed == 0)
            if not self.problem
            else torch.ones(self._vocabulary, dtype=torch.bool)
        )

    def accept(self, token: int) -> None:
        """Go on by a token that was not forbidden."""
        self._matcher.consume_token(token)

    @property
    def problem(self) -> str:
        """Why the grammar cannot go on; empty while it can."""
        return self._matcher.get_error()


class Grammars:
    """Compiles the forms of requests for one tokenizer, which it reads when the first one comes."""

    def __init__(self, tokenizer: Any, *, vocabulary: int, end_tokens: frozenset[int]) -> None:
        self.vocabulary = vocabulary
        self._tokenizer, self._ends = tokenizer, end_tokens
        self._read: LLTokenizer | None = None
        self._compiled: OrderedDict[str, Constraint] = OrderedDict()

    def compile(self, form: Form) -> Constraint:
        """Raises RequestError, with the schema that cannot be honoured. An agent asks for the same again and again."""
        key = repr(form)
        found = self._compiled.get(key)
        if found is None:
            found = self._compiled[key] = self._compile(form)
            if len(self._compiled) > REMEMBERED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        return found.copy()

    def _compile(self, form: Form) -> Constraint:
        tokenizer = self._known()
        if form.schema is not None:
            self._refuse_bad(form.schema, "response_format.json_schema.schema")
        offers = []
        for offer in form.offers:
            if offer.strict:
                self._refuse_bad(offer.schema, offer.where)
            elif self._problem(offer.schema):
                offer = replace(offer, schema={"type": "object"})
            offers.append(offer)
        form = replace(form, offers=tuple(offers))
        vocabulary = self._tokenizer.get_vocab()
        special = all(
            mark in vocabulary and tokenizer.is_special_token(vocabulary[mark]) for mark in (OPEN, CLOSE)
        )
        matcher = LLMatcher(tokenizer, form.lark(special_marks=special), log_level=0)
        if matcher.is_error():
            raise RequestError(
                f"These tools cannot be made a grammar: {matcher.get_error()[:300]}", param="tools"
            )
        return Constraint(matcher, self.vocabulary)

    def _refuse_bad(self, schema: dict[str, Any], where: str) -> None:
        problem = self._problem(schema)
        if problem:
            raise RequestError(
                f"{where} is no JSON schema that this engine can hold an answer to: {problem[:300]}.",
                code="unsupported_value",
                param=where,
            )

    def _problem(self, schema: dict[str, Any]) -> str:
        grammar = f"%llguidance {{}}\nstart: %json {_spaced(schema)}\n"
        failed, said = LLMatcher.validate_grammar_with_warnings(grammar, self._known())
        return said[0] if failed else ""

    def _known(self) -> LLTokenizer:
        if self._read is None:
            try:
                self._read = llguidance.hf.from_tokenizer(
                    self._tokenizer, n_vocab=self.vocabulary, eos_token=sorted(self._ends)
                )
            except ValueError as error:
                raise RequestError(
                    f"This model's tokenizer cannot be constrained: {error}. Send no strict tools, no "
                    "tool_choice and no response_format, or serve it with vLLM.",
                    code="unsupported_value",
                ) from error
        return self._read


def _spaced(schema: dict[str, Any]) -> str:
    return json.dumps(schema | {"x-guidance": _SPACING})


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
