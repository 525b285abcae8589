"""No key, cookie or password leaves the process in any exported byte."""

import gzip
import json
from typing import Any

import httpx2
import openai
import pytest
from opentelemetry import trace

import agentlightning.sdk as agl
from agentlightning.sdk._secrets import redact_body

OTHERS = ["mcp-secret-token-1", "hunter2-hunter2", "sessionid=abcdef123456", "az-key-000111222"]


def everything(sink: Any) -> bytes:
    return b"".join(gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body for body in sink.bodies)


def test_secrets_are_absent_from_every_exported_byte(traced, llm, exact):
    headers = {"authorization": f"Bearer {exact.key}", "cookie": OTHERS[2], "api-key": OTHERS[3]}
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": f"My key is {exact.key}, keep it."}],
        "tools": [{"type": "mcp", "authorization": OTHERS[0], "headers": {"X-Api-Key": OTHERS[1]}}],
    }
    with httpx2.Client() as client, agl.rollout(rollout_id="ro-1"):
        client.post(llm.url + "/chat/completions", json=body, headers=headers)
        client.post(llm.url + "/chat/completions", json={**body, "model": "broken"}, headers=headers)
        client.post(llm.url + f"/{exact.key}/chat/completions", json=body, headers=headers)
        with (
            pytest.raises(RuntimeError),
            agl.agent("leaky"),
        ):
            raise RuntimeError(f"could not log in with {exact.key}")
        with trace.get_tracer("another").start_as_current_span(f"span {exact.key}") as span:
            span.set_attribute("gen_ai.headers", json.dumps(headers))
            span.set_attribute("list", ["a", exact.key])
            span.add_event("e", {"key": exact.key})
            span.set_status(trace.StatusCode.ERROR, f"key {exact.key}")
    assert agl.flush()
    sent = everything(traced)
    for secret in [exact.key, *OTHERS]:
        assert secret.encode() not in sent, secret
    texts = [
        span.attributes["agentlightning.request"]
        for span in traced.spans()
        if span.scope == "agentlightning.sdk" and "agentlightning.request" in span.attributes
    ]
    assert len(texts) == 3
    for text in texts:  # still the body, but for the secrets
        read = json.loads(text)
        assert read["messages"][0]["content"] == "My key is [redacted], keep it."
        assert read["tools"][0]["authorization"] == "[redacted]"
    failed = next(span for span in traced.spans() if span.attributes.get("error.type") == "500")
    assert (
        json.loads(failed.attributes["agentlightning.response"])["error"]["message"]
        == "bad key Bearer [redacted]"
    )


def test_a_key_that_the_client_adds_itself_is_absent(traced, llm, exact):
    with httpx2.Client(auth=("user", "correct-horse")) as client:
        client.post(llm.url + "/chat/completions", json={"model": "broken", "messages": []})
    basic = llm.requests[0].headers["authorization"].removeprefix("Basic ")
    assert agl.flush()
    assert traced.one("chat broken").attributes["agentlightning.response"].count("[redacted]") == 1
    assert basic.encode() not in everything(traced)


def test_a_key_of_the_environment_is_absent_before_the_first_call(sink, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "key-of-the-environment")
    agl.instrument(endpoint=sink.url)
    try:
        with pytest.raises(RuntimeError), agl.agent("solver"):
            raise RuntimeError("no such key: key-of-the-environment")
        assert agl.flush()
        assert b"key-of-the-environment" not in everything(sink)
    finally:
        agl.uninstrument()


def test_the_openai_clients_key_is_absent(traced, llm, exact):
    client = openai.OpenAI(base_url=llm.url, api_key=exact.key, max_retries=0)
    with pytest.raises(openai.InternalServerError), agl.rollout(rollout_id="ro-1"):
        client.chat.completions.create(model="broken", messages=[{"role": "user", "content": "x"}])
    assert agl.flush()
    assert (
        traced.one("agentlightning.rollout").attributes["agentlightning.rollout.error"].count("[redacted]")
        == 1
    )
    assert exact.key.encode() not in everything(traced)


def test_what_is_not_secret_stays_exact():
    bodies = [
        {
            "max_tokens": 5,
            "token_ids": [1],
            "prompt_token_ids": [2],
            "logprobs": True,
            "note": "secret password cookie",
        },
        {"parameters": {"properties": {"password": {"type": "string"}, "api_key": {"type": "string"}}}},
        {
            "messages": [
                {"role": "assistant", "content": 'say {"password": "open sesame"} and "api_key": "x"'}
            ]
        },
        {"arguments": json.dumps({"authorization": "Bearer of good news"})},
    ]
    for body in bodies:
        text = json.dumps(body)
        assert redact_body(text, []) == text


@pytest.mark.parametrize(
    "name",
    [
        "Authorization",
        "api_key",
        "api-key",
        "apiKey",
        "X-Api-Key",
        "access_token",
        "Set-Cookie",
        "client_secret",
        "password",
    ],
)
def test_fields_that_hold_credentials_by_their_name_are_emptied(name):
    for value in ('s3cr3t\\"quoted', ["s3cr3t", "s3cr3t2"]):
        text = json.dumps({"before": 1, name: value, "after": [2]}, indent=1)
        cleaned = redact_body(text, [])
        assert "s3cr3t" not in cleaned
        assert json.loads(cleaned) == {"before": 1, name: "[redacted]", "after": [2]}


def test_short_place_holders_are_no_secrets():
    from agentlightning.sdk._secrets import remember

    assert remember({"authorization": "Bearer EMPTY", "x-api-key": "none"}) == []
