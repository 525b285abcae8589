"""Two gateways on one PostgreSQL: no rollout is claimed twice, none is lost, and what one is told, both know."""

import threading
import time
from collections import Counter
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.parametrize("database", ["postgresql"], indirect=True, scope="session")


def in_threads(*works: Any) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_claims_race_and_every_rollout_is_run_once(pair, sink, until):
    count, claimed, finished = 400, Counter[str](), Counter[str]()

    def enqueue(gateway: Any, half: int) -> None:
        for start in range(half, count, 40):  # both gateways are sent every rollout
            gateway.enqueue(
                *({"rollout_id": f"race-{(start + n) % count}", "run_id": "race"} for n in range(40))
            )

    def work(gateway: Any, name: str) -> None:
        while sum(claimed.values()) < count:
            for row in gateway.claim(7, controller=name):
                claimed[row["rollout_id"]] += 1
                body = {"attempt": row["attempt"], "controller_id": name, "state": "succeeded"}
                path = f"/api/rollouts/{row['rollout_id']}/finish"
                # The other gateway hears of it.
                other = pair[0] if gateway is pair[1] else pair[1]
                assert other.send("POST", path, body, role="controller").status_code == 200
                finished[row["rollout_id"]] += 1

    enqueuers = [lambda g=gateway, h=half: enqueue(g, h) for gateway in pair for half in (0, 20)]
    workers = [lambda g=pair[n % 2], n=n: work(g, f"c{n}") for n in range(6)]
    in_threads(*enqueuers, *workers)
    assert claimed == finished == Counter({f"race-{n}": 1 for n in range(count)})
    rows = pair[0].ask("GET", "/api/rollouts?run_id=race")["rollouts"]
    assert [row["state"] for row in rows] == ["succeeded"] * count
    changes = until(lambda: (found := [r["change"] for r in listed(pair[1])]) and all(found) and found)
    assert len(set(changes)) == count
    ends = Counter(
        s["agentlightning.rollout.id"] for s in sink.spans if s["name"] == "agentlightning.rollout"
    )
    assert ends == finished  # each span was sent once, by one of the two


def listed(gateway: Any) -> list[dict[str, Any]]:
    return gateway.ask("GET", "/api/rollouts?run_id=race")["rollouts"]


def test_of_two_controllers_that_report_one_attempt_one_wins(pair):
    pair[0].begin("contested")
    statuses: list[int] = []
    in_threads(
        *(
            lambda g=pair[n % 2], n=n: statuses.append(g.finish("contested", output=n).status_code)
            for n in range(8)
        )
    )
    assert sorted(statuses) == [200] + [409] * 7


def test_a_hold_at_one_gateway_holds_both_and_waits_for_the_calls_of_both(pair, engine, until):
    first, second = pair
    key = first.begin("held")["token"]
    engine.mode = "wait"
    answers: list[Any] = []
    call = threading.Thread(target=lambda: answers.append(second.chat(key)))
    call.start()
    until(lambda: engine.waiting)
    short = first.ask("POST", "/api/hold", {"policy": "default", "drain_s": 1})
    assert (short["drained"], short["in_flight"]) == (False, 1)
    holding: list[Any] = []
    body = {"policy": "default", "drain_s": 20}
    hold = threading.Thread(target=lambda: holding.append(first.ask("POST", "/api/hold", body)))
    hold.start()
    engine.proceed.set()
    hold.join()
    call.join()
    assert answers[0].status_code == 200
    assert holding[0]["drained"] is True
    engine.mode = "ok"
    late = threading.Thread(target=lambda: answers.append(second.chat(key)))
    late.start()
    until(
        lambda: (
            'agentlightning_gateway_events_total{name="calls_held"} 1.0' in second.http.get("/metrics").text
        )
    )
    before = len(engine.requests)
    stale = {"policy": "default", "hold_id": short["hold_id"], "version": 9}
    assert second.send("POST", "/api/release", stale).json()["error"]["code"] == "stale_hold"
    assert len(engine.requests) == before
    released = second.ask("POST", "/api/release", {**stale, "hold_id": holding[0]["hold_id"]})
    assert (released["version"], released["expired"]) == (9, False)
    late.join()
    assert answers[1].status_code == 200


def test_what_one_gateway_is_told_the_other_knows(pair, engine, until):
    first, second = pair
    first.ask("POST", "/api/engines", {"engine_id": "new", "policy": "p2", "url": engine.url}, role="admin")
    until(lambda: any(e["engine_id"] == "new" and e["healthy"] for e in engines(second)))
    key = second.begin("shared", policy="p2", rights=["reward"])["token"]
    assert second.chat(key, model="p2").status_code == first.chat(key, model="p2").status_code == 200
    assert first.row("shared")["calls"] == 2
    assert first.send("POST", "/api/rollouts/shared/rewards", {"value": 1}, key=key).status_code == 200
    second.ask("DELETE", "/api/engines/new", role="admin")
    until(lambda: not any(e["engine_id"] == "new" for e in engines(first)))


def engines(gateway: Any) -> list[dict[str, Any]]:
    return gateway.ask("GET", "/api/engines")["engines"]


@pytest.mark.parametrize("how", ["cancel", "revoke"])
def test_an_attempt_that_ends_at_one_gateway_stops_its_calls_at_the_other(pair, engine, until, how):
    first, second = pair
    key = first.begin(how)["token"]
    engine.mode = "wait"
    answers: list[httpx.Response] = []
    call = threading.Thread(target=lambda: answers.append(second.chat(key)))
    call.start()
    until(lambda: engine.waiting)
    first.ask("POST", f"/api/rollouts/{how}", {"rollout_ids": [how]})
    call.join()
    assert answers[0].json()["error"]["code"] == "attempt_ended"
    until(lambda: engine.left)
    assert second.chat(key).status_code == first.chat(key).status_code == 403


def test_a_gateway_that_dies_leaves_its_unsent_spans_to_the_other_and_changes_the_boot_id(
    start_gateway, database, sink, until
):
    options = database()
    first, second = start_gateway(*options), start_gateway(*options)
    first.begin("orphaned")
    before = beat(second)
    sink.mode = "hang"
    assert first.finish("orphaned").status_code == 200
    until(lambda: sink.waiting)
    first.kill()
    sink.mode = "ok"
    sink.proceed.set()
    sink.spans.clear()
    assert second.row("orphaned")["change"] is None
    start = time.monotonic()
    assert until(lambda: second.row("orphaned")["change"], 30) == 1
    assert time.monotonic() - start > 5  # not before its silence was long enough
    ends = [span for span in sink.of("orphaned") if span["agentlightning.rollout.state"] == "succeeded"]
    assert len({span["span_id"] for span in ends}) == 1
    assert beat(second) != before


def beat(gateway: Any) -> str:
    body = {"controller_id": "c1", "lease_s": 30, "attempts": []}
    return gateway.ask("POST", "/api/rollouts/heartbeat", body, role="controller")["boot_id"]
