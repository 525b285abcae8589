"""Which engine a call goes to: affinity, load, health, and a breaker that says why."""

import socket
import struct
import threading
import time
from typing import Any

import pytest

from agentlightning.gateway.breaker import LONGEST_PAUSE, Breaker
from agentlightning.gateway.engines import SLACK, Engine, Engines


def test_a_breaker_opens_after_failures_in_a_row_tries_once_and_waits_longer_each_time():
    now = 0.0
    breaker = Breaker(3, clock=lambda: now)
    for outcome in ("failed", "failed", "ok", "failed", "failed"):  # never three in a row
        breaker.begin()
        if outcome == "ok":
            breaker.succeeded()
        else:
            assert not breaker.failed("it broke")
    assert (breaker.state, breaker.allows, breaker.why) == ("closed", True, None)
    breaker.begin()
    assert breaker.failed("it broke again")
    assert (breaker.state, breaker.allows) == ("open", False)
    assert breaker.why == "set aside after 3 failures in a row, the last: it broke again"
    pauses = []
    for _ in range(7):
        since = now
        while not breaker.allows:
            now += 0.5
        pauses.append(now - since)
        assert breaker.state == "half_open"
        breaker.begin()
        assert not breaker.allows  # one trial at a time
        assert breaker.failed("still")
    assert pauses == [1, 2, 4, 8, 16, LONGEST_PAUSE, LONGEST_PAUSE]
    now += LONGEST_PAUSE
    breaker.begin()
    breaker.left()  # its client went away: that tells nothing
    assert breaker.allows
    breaker.begin()
    breaker.succeeded()
    assert (breaker.state, breaker.failures, breaker.reason) == ("closed", 0, None)


def pool(*names: str) -> tuple[Engines, dict[str, Engine]]:
    engines = Engines(None, None)  # type: ignore[arg-type]  # neither database nor network is needed to choose
    rows = [
        {"engine_id": n, "policy": "p", "url": "http://x", "model": "m", "token_file": None} for n in names
    ]
    engines.refresh(rows)
    for engine in engines:
        engine.reason = None
    return engines, {engine.engine_id: engine for engine in engines}


def test_a_rollout_keeps_its_engine_and_few_move_when_one_leaves():
    engines, by_name = pool("a", "b", "c", "d")
    rollouts = [f"r{n}" for n in range(400)]
    first = {r: engines.choose("p", r, without=set()) for r in rollouts}
    assert first == {r: engines.choose("p", r, without=set()) for r in rollouts}
    counts = [list(first.values()).count(engine) for engine in by_name.values()]
    assert min(counts) > 60  # of 100 each: spread evenly enough
    by_name["d"].reason = "away"
    moved = {r for r in rollouts if engines.choose("p", r, without=set()) is not first[r]}
    assert moved == {r for r in rollouts if first[r] is by_name["d"]}
    assert engines.choose("other", "r0", without=set()) is None


def test_load_wins_over_affinity_when_the_engine_is_clearly_busier():
    engines, by_name = pool("a", "b")
    mine = engines.choose("p", "r", without=set())
    assert mine is not None
    mine.in_flight = SLACK
    assert engines.choose("p", "r", without=set()) is mine
    mine.in_flight = SLACK + 1
    assert engines.choose("p", "r", without=set()) is not mine
    assert {e for e in by_name.values() if e is not mine} == {engines.choose("p", "r", without=set())}


@pytest.fixture
def two(start_gateway: Any, engine: Any) -> Any:
    """A gateway with two engines, both of them the scripted one, and a breaker that opens after three."""
    return start_gateway("--engine", engine.url, "--engine-failures", "3", "--engine-wait-s", "20")


def test_an_open_breaker_is_seen_says_why_and_closes_by_itself(two, engine, until):
    claimed = two.begin("broken")
    engine.mode = "error_500"
    statuses = []
    while any(breaker(e)["state"] == "closed" for e in engines_of(two)) and len(statuses) < 30:
        statuses.append(two.chat(claimed["token"]).status_code)
    assert set(statuses) == {502}
    states = [breaker(e) for e in engines_of(two)]
    assert [state["failures"] for state in states] == [3, 3]
    assert "500: out of order" in states[0]["reason"]
    metrics = two.http.get("/metrics").text
    assert 'agentlightning_gateway_engine_breaker{engine="default-0",state="' in metrics
    assert "set aside after 3 failures in a row" in two.log()
    engine.mode = "ok"
    answers: list[Any] = []
    threads = [threading.Thread(target=lambda: answers.append(two.chat(claimed["token"]))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {answer.status_code for answer in answers} == {200}  # they waited for the trials
    assert {breaker(e)["state"] for e in engines_of(two)} <= {"closed", "half_open"}


def engines_of(gateway: Any) -> list[dict[str, Any]]:
    return gateway.ask("GET", "/api/engines")["engines"]


def breaker(engine: dict[str, Any]) -> dict[str, Any]:
    return engine["breaker"]


def test_what_an_engine_refuses_for_its_content_does_not_open_its_breaker(two, engine):
    claimed = two.begin("too-long")
    engine.mode = "error_400"
    for _ in range(8):
        assert two.chat(claimed["token"]).status_code == 400
    assert {breaker(e)["state"] for e in engines_of(two)} == {"closed"}


def test_several_policies_are_served_at_once_each_by_its_own_engines(start_gateway, engine):
    gateway = start_gateway("--engine", f"other={engine.url}")
    keys = {name: gateway.begin(f"of-{name}", policy=name)["token"] for name in ("default", "other")}
    hold = gateway.ask("POST", "/api/hold", {"policy": "other", "drain_s": 0})
    assert gateway.chat(keys["default"]).status_code == 200  # the hold is of the other policy
    assert gateway.chat(keys["default"], model="other").status_code == 404
    gateway.ask("POST", "/api/release", {"policy": "other", "hold_id": hold["hold_id"], "version": 8})
    assert gateway.chat(keys["other"], model="other").status_code == 200


class ResettingEngine:
    """Is well, but answers every call with a reset of its connection, before a byte or after the first ones."""

    def __init__(self, first: bytes) -> None:
        self.calls = 0
        self._first = first
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            client, _ = self._socket.accept()
            request = client.recv(65536)
            if request.startswith(b"POST"):
                self.calls += 1
                if self._first:
                    client.sendall(self._first)
                    time.sleep(0.1)  # so that it comes before the reset
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            else:
                body = b'{"data": [{"id": "m"}]}'
                head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n"
                client.sendall(head + b"content-length: %d\r\n\r\n%s" % (len(body), body))
            client.close()


HALF = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 999\r\n\r\n{"id": "chat'


@pytest.mark.parametrize("first", [b"", HALF])
def test_a_connection_that_is_reset_is_no_reason_to_sample_elsewhere(start_gateway, engine, sink, first):
    resetting = ResettingEngine(first)
    gateway = start_gateway("--engine", f"reset={resetting.url}", "--engine", f"reset={engine.url}")
    rollout = next(f"r{n}" for n in range(99) if prefers(f"r{n}", "reset-1", "reset-2") == "reset-1")
    claimed = gateway.begin(rollout, policy="reset")
    answer = gateway.chat(claimed["token"], model="reset")
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_failed")
    assert (resetting.calls, len(engine.requests)) == (1, 0)  # it may have sampled
    (span,) = sink.calls(rollout)
    assert span["error.type"] == "engine_failed"


def prefers(rollout: str, *names: str) -> str:
    engines, _ = pool(*names)
    chosen = engines.choose("p", rollout, without=set())
    assert chosen is not None
    return chosen.engine_id


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_stalls_is_given_up_after_its_time(start_gateway, engine, sink, until, stream):
    gateway = start_gateway("--engine-timeout-s", "0.4")
    claimed = gateway.begin("stalled")
    engine.mode = "wait"  # before an answer; of a stream, after two tokens
    answer = gateway.chat(claimed["token"], stream=stream)
    if stream:
        assert '"code":"engine_timeout"' in answer.text
        assert "[DONE]" not in answer.text
    else:
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "engine_timeout")
    (span,) = sink.calls("stalled")
    assert span["error.type"] == "engine_timeout"
    until(lambda: engine.left)  # and it was told to stop
    finished = gateway.finish("stalled", state="failed", cause="agent_error").json()
    assert finished["will_retry"] is True
