"""Text comes in whole characters, without stop strings, and calls are told from content however it is cut."""

import itertools
import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.trainer.engine.text import StopFinder, TextStream, TokenNames
from agentlightning.trainer.engine.tools import HermesParser, ToolCall, parse_call

RELAXED = settings(deadline=None, max_examples=50)  # the machine may be busy with other tests

CALL = '<tool_call>{"name": "add", "arguments": {"a":  1}}</tool_call>'
ADD = ToolCall("add", '{"a":  1}')


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def parse(pieces: list[str]) -> list[str | ToolCall]:
    """What the parser gives, with neighbouring content joined."""
    parser = HermesParser()
    found: list[str | ToolCall] = []
    for piece in [part for text in pieces for part in parser.push(text)] + list(parser.flush()):
        if isinstance(piece, str) and found and isinstance(found[-1], str):
            found[-1] += piece
        else:
            found.append(piece)
    return found


@pytest.mark.parametrize("text", ["plain", "naïve 中文 🙂🙂 end", "a🙂", "  spaces  and\nlines\n"])
def test_streamed_text_is_the_text_and_holds_no_half_character(tokenizer: Any, text: str) -> None:
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in tokenizer(text, add_special_tokens=False).input_ids]
    assert "".join(pieces) + stream.flush() == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_any_tokens_stream_to_what_they_decode_to(tokenizer: Any) -> None:
    draw = random.Random(0)
    for _ in range(50):
        tokens = [draw.randrange(len(tokenizer)) for _ in range(30)]
        stream = TextStream(tokenizer)
        text = "".join(stream.push(token) for token in tokens) + stream.flush()
        assert text == tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_the_bytes_of_tokens_join_to_the_text(tokenizer: Any) -> None:
    names = TokenNames(tokenizer)
    text = "naïve 中文 🙂"
    spelled = [
        byte for token in tokenizer(text, add_special_tokens=False).input_ids for byte in names(token)[1]
    ]
    assert bytes(spelled).decode() == text
    assert names(tokenizer.eos_token_id)[0] == "<|im_end|>"


@RELAXED
@given(st.lists(st.integers(0, 30), max_size=6))
def test_a_stop_string_is_found_however_the_text_is_cut(cuts: list[int]) -> None:
    finder = StopFinder(("END", "\n\n"))
    given_out = ""
    for piece in pieces_of("one ENtwo E\n three END four", cuts):
        text, stopped = finder.push(piece)
        given_out += text
        if stopped:
            break
    assert given_out == "one ENtwo E\n three "


def test_what_only_began_like_a_stop_string_comes_out_at_the_end() -> None:
    finder = StopFinder(("STOP",))
    assert finder.push("see STO") == ("see ", False)
    assert finder.flush() == "STO"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CALL, [ADD]),
        (f"Let me see. {CALL}", ["Let me see. ", ADD]),
        (f"{CALL}\n{CALL}\n", [ADD, ADD]),
        (f"{CALL}\nand so", [ADD, "\nand so"]),
        (CALL.removesuffix("</tool_call>"), [ADD]),
        ("1 < 2 <tool", ["1 < 2 <tool"]),
        ("<tool_call>{bad json}</tool_call> x", ["<tool_call>{bad json}</tool_call> x"]),
        ('<tool_call>{"name": "add"', ['<tool_call>{"name": "add"']),
        (f"<tool_call>oops</tool_call>{CALL}", ["<tool_call>oops</tool_call>", ADD]),
    ],
)
@RELAXED
@given(cuts=st.lists(st.integers(0, 140), max_size=8))
def test_calls_are_found_however_the_text_is_cut(text: str, expected: list[Any], cuts: list[int]) -> None:
    assert parse(pieces_of(text, cuts)) == expected


@pytest.mark.parametrize(
    "body",
    ['{"name": "f", "arguments": {"x": NaN}}', '{"name": "f", "arguments": [1]}', '{"name": "", "arguments": {}}',
     '{"name": 3, "arguments": {}}', '["f"]', '{"arguments": {}}', '{"name": "f"}', "", "{" * 100_000],
)  # fmt: skip
def test_what_is_no_call_is_none(body: str) -> None:
    assert parse_call(body) is None


@RELAXED
@given(
    st.dictionaries(st.text(), st.recursive(st.integers() | st.text() | st.none(), st.lists)), st.booleans()
)
def test_arguments_keep_their_letters(arguments: dict[str, Any], spaced: bool) -> None:
    written = json.dumps(arguments, indent=3 if spaced else None, ensure_ascii=not spaced)
    for body in (f'{{"name": "f", "arguments": {written}}}', f'\n{{ "arguments" : {written} ,"name":"f" }} '):
        assert parse_call(body) == ToolCall("f", written)
