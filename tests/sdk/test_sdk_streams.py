"""The end of a stream is found wherever the network cuts it, and not where a model writes of it; a body is parsed once."""

import json

import httpx2
import pytest

import agentlightning.sdk as agl
from agentlightning.sdk import _streams

TALK = (
    'data: {"choices":[{"delta":{"content":"\\n\\ndata: [DONE]\\n\\n and event: response.completed"}}]}\n\n'
)
CHAT = (TALK * 3 + "data: [DONE]\n\n").encode()
RESPONSES = (
    TALK + 'event: response.completed\ndata: {"type":"response.completed","response":{"id":"r"}}\n\n'
).encode()


def ends(api, body, size):
    """After how many bytes, fed in pieces of `size`, the end is seen."""
    data, looked = bytearray(), 0
    for start in range(0, len(body), size):
        data += body[start : start + size]
        ended, looked = _streams.look(api, data, looked)
        if ended:
            return len(data)
    return None


@pytest.mark.parametrize(
    ("api", "body", "end"), [("chat", CHAT, len(CHAT) - 2), ("responses", RESPONSES, None)]
)
def test_the_end_is_seen_as_soon_as_it_is_there_however_it_is_cut(api, body, end):
    end = end or len(body)
    for size in (1, 2, 3, 7, 64, len(body)):
        seen = ends(api, body, size)
        assert seen is not None
        assert end <= seen < end + size
        assert ends(api, body[: end - 1], size) is None
    windows = body.replace(b"\n", b"\r\n")
    assert ends(api, windows, 5) is not None


def test_a_long_stream_that_speaks_of_the_end_is_not_looked_at_again_and_again():
    data, looked = bytearray(), 0
    for _ in range(500):
        data += TALK.encode()
        _, looked = _streams.look("chat", data, looked)
        assert len(data) - looked < 200


def test_the_caller_gets_the_body_that_was_parsed_for_the_record_then_copies_of_his_own(traced, llm):
    body = {"model": "m", "messages": [], "return_token_ids": True, "logprobs": True}
    with httpx2.Client() as client:
        response = client.post(llm.url + "/chat/completions", json=body)
    first = response.json()
    expected = json.loads(response.content)
    assert first == expected
    first.clear()
    assert response.json() == response.json() == expected
    assert response.json() is not response.json()
    assert agl.flush()
    assert json.loads(traced.one("chat m").attributes["agentlightning.response"]) == expected
