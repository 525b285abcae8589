"""An update of the weights, as stock clients with default settings see it: calls take longer, and none fails."""

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest

HOLD_SECONDS = float(os.environ.get("TORTURE_HOLD_S", "0.5"))
MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]
pytestmark = pytest.mark.timeout(300 + HOLD_SECONDS)


def clients(url: str, key: str, opened: Callable[[], None]) -> dict[str, Callable[[], str]]:
    """Stock clients; streams say when their headers have come."""
    ours = openai.OpenAI(base_url=f"{url}/v1", api_key=key)
    claude = anthropic.Anthropic(base_url=url, api_key=key)

    def chat() -> str:
        answer = ours.chat.completions.create(model="default", messages=MESSAGES)
        return answer.choices[0].message.content or ""

    def chat_stream() -> str:
        stream = ours.chat.completions.create(model="default", messages=MESSAGES, stream=True)
        opened()
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    def responses() -> str:
        return ours.responses.create(model="default", input="hello").output_text

    def responses_stream() -> str:
        stream = ours.responses.create(model="default", input="hello", stream=True)
        opened()
        return "".join(event.delta for event in stream if event.type == "response.output_text.delta")

    def messages() -> str:
        answer = claude.messages.create(model="default", messages=MESSAGES, max_tokens=50)
        return "".join(block.text for block in answer.content if block.type == "text")

    def messages_stream() -> str:
        stream = claude.messages.create(model="default", messages=MESSAGES, max_tokens=50, stream=True)
        opened()
        deltas = (event.delta for event in stream if event.type == "content_block_delta")
        return "".join(delta.text for delta in deltas if delta.type == "text_delta")

    made = (chat, chat_stream, responses, responses_stream, messages, messages_stream)
    return {work.__name__: work for work in made}


def test_stock_clients_live_through_an_update_streams_included(start_gateway, engine, sink, until):
    gateway = start_gateway()
    gateway.enqueue({"rollout_id": "updated"})
    (claimed,) = gateway.claim(lease=HOLD_SECONDS + 120)
    hold = gateway.ask("POST", "/api/hold", {"policy": "default", "ttl_s": 120, "drain_s": 1})
    assert hold["drained"] is True
    opened: list[None] = []
    answers: dict[str, str] = {}
    failures: list[BaseException] = []

    def run(name: str, work: Callable[[], str]) -> None:
        try:
            answers[name] = work()
        except Exception as error:  # noqa: BLE001  whatever it is, the test fails for it
            failures.append(error)

    works = clients(gateway.url, claimed["token"], lambda: opened.append(None))
    threads = [threading.Thread(target=run, args=item) for item in works.items()]
    for thread in threads:
        thread.start()
    until(lambda: len(opened) == 3)  # streams have their headers while they wait
    until(lambda: gateway.counters("run").get("calls_held") == len(works))
    time.sleep(HOLD_SECONDS)
    assert not engine.requests
    assert not answers
    engine.version = 8
    gateway.ask("POST", "/api/release", {"policy": "default", "hold_id": hold["hold_id"], "version": 8})
    for thread in threads:
        thread.join()
    assert not failures
    assert sorted(answers) == sorted(works)
    assert all(answers.values())
    assert len(engine.requests) == len(works)  # nobody gave up and asked again
    spans = sink.calls("updated")
    assert [span["agentlightning.model.version"] for span in spans] == [8] * len(works)
    assert gateway.row("updated")["calls"] == len(works)


def test_a_hold_waits_for_calls_in_flight_no_longer_than_it_was_told(start_gateway, engine, until):
    gateway = start_gateway()
    claimed = gateway.begin("draining")
    engine.mode = "wait"
    answers: list[Any] = []
    call = threading.Thread(target=lambda: answers.append(gateway.chat(claimed["token"])))
    call.start()
    until(lambda: engine.waiting)
    body = {"policy": "default", "drain_s": 0.2}
    hold = gateway.ask("POST", "/api/hold", body)
    assert (hold["drained"], hold["in_flight"]) == (False, 1)
    engine.proceed.set()
    call.join()  # what was in flight is finished: the trainer pauses the engine if it must not go on
    assert answers[0].status_code == 200
    again = gateway.ask("POST", "/api/hold", {**body, "drain_s": 20})
    assert (again["drained"], again["in_flight"]) == (True, 0)
