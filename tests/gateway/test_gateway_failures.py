"""What goes wrong is told to the client, recorded, and blamed on whom it belongs to."""

import json
import socket
import threading
import time
from typing import Any

import openai
import pytest

from agentlightning.proto.packed import unpack_ids

MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]
BODY = {"model": "default", "messages": MESSAGES}


def client_of(gateway: Any, claimed: dict[str, Any], **options: Any) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{gateway.url}/v1", api_key=claimed["token"], **{"max_retries": 0, **options}
    )


@pytest.mark.parametrize(
    ("mode", "status", "code"),
    [
        ("die", 502, "engine_failed"),
        ("error_500", 502, "engine_failed"),
        ("bad_json", 502, "bad_engine_answer"),
        ("bad_shape", 502, "bad_engine_answer"),
        ("busy", 503, "no_engine"),
    ],
)
def test_a_failing_engine_is_an_error_to_the_client_and_makes_the_agents_failure_an_infra_error(
    gateway, engine, sink, mode, status, code
):
    claimed = gateway.begin(f"fails-{mode}")
    engine.mode = mode
    answer = gateway.chat(claimed["token"])
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code
    (span,) = sink.calls(claimed["rollout_id"])
    assert (span["status"], span["error.type"]) == (2, code)
    engine.mode = "ok"
    finished = gateway.finish(
        claimed["rollout_id"], state="failed", cause="agent_error", error="it raised"
    ).json()
    assert finished == {"state": "queued", "attempt": 0, "will_retry": True}
    row = gateway.row(claimed["rollout_id"])
    assert row["cause"] == "infra_error"
    assert "it raised" in row["error"]
    assert (row["calls"], row["calls_failed"]) == (0, 1)


@pytest.mark.parametrize("mode", ["die", "end_early", "bad_json", "bad_shape"])
def test_a_stream_that_breaks_ends_in_an_error_event_and_never_in_a_finish_reason(
    gateway, engine, sink, mode
):
    claimed = gateway.begin(f"breaks-{mode}")
    engine.mode = mode
    reasons = []
    with pytest.raises(openai.APIError):  # noqa: PT012  the stream is consumed inside
        for chunk in client_of(gateway, claimed).chat.completions.create(
            model="default", messages=MESSAGES, stream=True
        ):
            reasons.append(chunk.choices[0].finish_reason)
    assert not any(reasons)
    (span,) = sink.calls(claimed["rollout_id"])
    assert span["status"] == 2
    if mode in ("die", "end_early"):  # what had come is on record
        assert len(unpack_ids(span["agentlightning.response.token_ids"])) == {"die": 3, "end_early": 4}[mode]
    assert gateway.row(claimed["rollout_id"])["calls"] == 0


def test_a_prompt_that_does_not_fit_is_passed_on_as_such_and_is_no_infra_error(gateway, engine, sink):
    claimed = gateway.begin("too-long")
    engine.mode = "error_400"
    with pytest.raises(openai.BadRequestError) as caught:
        client_of(gateway, claimed).chat.completions.create(model="default", messages=MESSAGES)
    assert caught.value.code == "context_length_exceeded"
    assert sink.calls("too-long")[0]["error.type"] == "context_length_exceeded"
    assert gateway.finish("too-long", state="failed", cause="agent_error").json()["state"] == "failed"
    assert gateway.row("too-long")["cause"] == "context_overflow"


def test_a_fault_that_a_retry_mended_is_no_excuse(gateway, engine):
    claimed = gateway.begin("mended")
    engine.mode = "error_500"
    assert gateway.chat(claimed["token"]).status_code == 502
    engine.mode = "ok"
    assert gateway.chat(claimed["token"]).status_code == 200
    gateway.finish("mended", state="failed", cause="agent_error")
    assert gateway.row("mended")["cause"] == "agent_error"


def test_a_stock_client_rides_out_an_engine_that_is_busy_for_a_moment(gateway, engine):
    claimed = gateway.begin("patient")
    engine.mode = "busy"
    threading.Timer(0.3, lambda: setattr(engine, "mode", "ok")).start()
    answer = client_of(gateway, claimed, max_retries=3).chat.completions.create(
        model="default", messages=MESSAGES
    )
    assert answer.choices[0].finish_reason == "stop"


def test_a_call_moves_to_another_engine_only_if_nothing_was_sampled(start_gateway, engine):
    gateway = start_gateway("--engine", "http://127.0.0.1:9")  # nothing listens there
    claimed = gateway.begin("moved")
    gateway.ask("POST", "/api/engines/default-1/probe")
    for _ in range(4):
        assert gateway.chat(claimed["token"]).status_code == 200
    engine.mode = "error_500"
    before = len(engine.requests)
    assert gateway.chat(claimed["token"]).status_code == 502
    assert len(engine.requests) == before + 1
    (dead,) = [e for e in gateway.ask("GET", "/api/engines")["engines"] if not e["healthy"]]
    assert dead["engine_id"] == "default-1"
    assert "Connect" in dead["reason"]


def test_without_a_well_engine_the_answer_says_which_and_why(start_gateway):
    gateway = start_gateway("--engine", "other=http://127.0.0.1:9", engines=False)
    claimed = gateway.begin("nobody", policy="other")
    answer = gateway.chat(claimed["token"], model="other")
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert "other-0: Client" in answer.json()["error"]["message"]
    assert gateway.http.get("/readyz").status_code == 503


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_stops_the_engine_and_the_record_says_aborted(
    gateway, engine, sink, until, stream
):
    claimed = gateway.begin(f"leaves-{stream}")
    engine.mode = "wait"
    body = json.dumps({**BODY, "stream": stream}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {claimed['token']}\r\n"
    with socket.create_connection(("127.0.0.1", gateway.port)) as client:
        client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: engine.waiting)
    until(lambda: engine.left)
    (span,) = until(lambda: sink.calls(claimed["rollout_id"]))
    assert (span["status"], span["error.type"]) == (2, "aborted")
    if stream:
        assert len(unpack_ids(span["agentlightning.response.token_ids"])) == 2
    row = until(lambda: (r := gateway.row(claimed["rollout_id"]))["calls_failed"] and r)
    assert (row["calls"], row["calls_failed"]) == (0, 1)
    gateway.finish(claimed["rollout_id"], state="failed", cause="agent_error")
    assert gateway.row(claimed["rollout_id"])["cause"] == "agent_error"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", ["busy", "refuse"])
def test_an_answer_that_cannot_be_recorded_is_not_given(gateway, sink, mode, stream):
    claimed = gateway.begin(f"unrecorded-{mode}-{stream}")
    sink.mode = mode
    answer = gateway.chat(claimed["token"], stream=stream)
    if stream:
        assert answer.text.rstrip().rpartition("data: ")[2].startswith('{"error"')
        assert '"finish_reason":"stop"' not in answer.text
        assert "[DONE]" not in answer.text
    else:
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "capture_failed"
    sink.mode = "ok"
    assert (
        gateway.finish(claimed["rollout_id"], state="failed", cause="agent_error").json()["will_retry"]
        is True
    )
    assert gateway.row(claimed["rollout_id"])["calls"] == 0


def test_best_effort_lets_the_answer_through_and_counts(start_gateway, sink):
    gateway = start_gateway("--capture", "best_effort", "--collector-timeout-s", "0.3")
    claimed = gateway.begin("unsafe")
    sink.mode = "busy"
    assert gateway.chat(claimed["token"]).status_code == 200
    assert gateway.counters("run")["capture_skipped"] == 1
    assert gateway.row("unsafe")["calls"] == 1  # so the rollout shows as incomplete, and is not trained on


def test_calls_share_requests_to_the_collector_and_one_that_is_refused_spoils_no_other(gateway, sink, until):
    claimed = gateway.begin("crowd")
    sink.mode = "picky"  # the first two requests wait, so that the rest gather
    answers: dict[int, int] = {}

    def ask(number: int) -> None:
        content = "poison" if number == 7 else "fine"
        answers[number] = gateway.chat(
            claimed["token"], messages=[{"role": "user", "content": content}]
        ).status_code

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
    for thread in threads[:2]:
        thread.start()
    until(lambda: sink.waiting == 2)
    for thread in threads[2:]:
        thread.start()
    time.sleep(0.3)  # nothing tells that the gateway has queued them
    sink.proceed.set()
    for thread in threads:
        thread.join()
    assert {number for number, status in answers.items() if status != 200} == {7}
    assert len([span for span in sink.calls("crowd") if span["status"] == 0]) == 11


def test_answers_without_token_ids_are_recorded_so_and_counted(gateway, engine, sink):
    claimed = gateway.begin("idless")
    engine.mode = "no_ids"
    assert gateway.chat(claimed["token"]).status_code == 200
    assert "agentlightning.response.token_ids" not in sink.calls("idless")[0]
    assert gateway.counters("run")["no_token_ids"] >= 1


def test_an_ended_attempt_gets_no_answers_and_its_calls_in_flight_are_stopped(gateway, engine, sink, until):
    claimed = gateway.begin("ends")
    engine.mode = "wait"
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(gateway.chat(claimed["token"])))
    thread.start()
    until(lambda: engine.waiting)
    assert gateway.ask("POST", "/api/rollouts/cancel", {"rollout_ids": ["ends"]}) == {"cancelled": 1}
    thread.join()
    assert answers[0].status_code == 403
    assert answers[0].json()["error"]["code"] == "attempt_ended"
    until(lambda: engine.left)
    engine.mode = "ok"
    assert gateway.chat(claimed["token"]).status_code == 403


def test_a_call_recorded_after_its_attempt_ended_is_not_given(gateway, sink, until):
    claimed = gateway.begin("too-late")
    sink.mode = "hang"
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(gateway.chat(claimed["token"])))
    thread.start()
    until(lambda: sink.waiting)
    gateway.ask("POST", "/api/rollouts/cancel", {"rollout_ids": ["too-late"]})
    sink.proceed.set()
    thread.join()
    assert answers[0].status_code == 403
    assert gateway.row("too-late")["calls"] == 0
    assert gateway.counters("run")["stale_call"] >= 1


def test_the_clients_headers_and_key_do_not_reach_the_engine(gateway, engine):
    claimed = gateway.begin("private")
    headers = {"authorization": f"Bearer {claimed['token']}", "x-secret": "s3cret", "cookie": "a=b"}
    body = {**BODY, "api_key": "sk-hidden"}
    assert gateway.http.post("/v1/chat/completions", json=body, headers=headers).status_code == 200
    assert "s3cret" not in json.dumps(engine.headers) + json.dumps(engine.requests)
    assert claimed["token"] not in json.dumps(engine.headers)
    assert "sk-hidden" not in json.dumps(engine.requests)
