"""The rollout queue: leases, fenced attempts, idempotent requests, and spans that follow every committed change."""

import json
import threading
import time
from typing import Any

import httpx
import pytest

from agentlightning.proto import ids

pytestmark = pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True, scope="session")


def ended(sink: Any, rollout_id: str) -> list[dict[str, Any]]:
    return [span for span in sink.of(rollout_id) if span["name"] == "agentlightning.rollout"]


def test_a_rollout_runs_from_enqueue_to_follow(gateway, sink, until):
    claimed = gateway.begin("whole", sampling={"temperature": 1.0}, max_attempts=2)
    assert claimed["input"] == {"question": "6 × 7?"}
    assert claimed["reference"] == {"answer": 42}
    assert claimed["sampling"] == {"temperature": 1.0}
    assert (claimed["attempt"], claimed["token"][:4]) == (0, "alr_")
    assert gateway.row("whole")["state"] == "running"
    gateway.chat(claimed["token"])
    gateway.send(
        "POST", "/api/rollouts/whole/rewards", {"attempt": 0, "name": "reward", "value": 1}, role="controller"
    )
    answer = gateway.finish("whole", output={"text": "42"})
    assert answer.json() == {"state": "succeeded", "attempt": 0, "will_retry": False}
    row = until(lambda: (r := gateway.row("whole"))["change"] and r)
    assert (row["state"], row["output"], row["calls"], row["cause"]) == ("succeeded", {"text": "42"}, 1, None)
    (span,) = ended(sink, "whole")
    assert span["trace_id"] == ids.derived_trace_id("whole", 0)
    assert span["span_id"] == ids.rollout_span_id("whole", 0)
    assert span["parent_id"] == ""
    assert span["agentlightning.rollout.state"] == "succeeded"
    assert json.loads(span["agentlightning.task.input"]) == {"question": "6 × 7?"}
    assert span["agentlightning.calls.expected"] == 1
    (judged,) = [span for span in sink.of("whole") if span["name"] == "gen_ai.evaluation.result"]
    assert (judged["gen_ai.evaluation.name"], judged["gen_ai.evaluation.score.value"]) == ("reward", 1.0)
    assert judged["parent_id"] == span["span_id"]
    with gateway.http.stream(
        "GET",
        f"/api/rollouts/follow?run_id=run&cursor={row['change'] - 1}",
        headers={"authorization": f"Bearer {gateway.tokens['trainer']}"},
    ) as events:
        lines = events.iter_lines()
        assert next(line for line in lines if line.startswith("id:")) == f"id: {row['change']}"
        assert json.loads(next(lines).removeprefix("data: ")) == row


def test_every_request_may_be_repeated(gateway, sink, until):
    assert gateway.enqueue({"rollout_id": "twice"}) == {"created": 1, "existing": 0}
    assert gateway.enqueue({"rollout_id": "twice"}) == {"created": 0, "existing": 1}
    other = gateway.send(
        "POST", "/api/rollouts", {"rollouts": [gateway_task("twice", input={"question": "other"})]}
    )
    assert (other.status_code, other.json()["error"]["code"]) == (409, "rollout_conflict")
    (claimed,) = gateway.claim()
    reward = {"attempt": 0, "value": 0.5}
    for _ in range(2):
        assert (
            gateway.send("POST", "/api/rollouts/twice/rewards", reward, role="controller").status_code == 200
        )
    conflict = gateway.send("POST", "/api/rollouts/twice/rewards", {**reward, "value": 1}, role="controller")
    assert (conflict.status_code, conflict.json()["error"]["code"]) == (409, "reward_conflict")
    answers = [gateway.finish("twice", state="failed", cause="infra_error") for _ in range(2)]
    assert answers[0].status_code == answers[1].status_code == 200
    assert answers[0].json() == answers[1].json() == {"state": "queued", "attempt": 0, "will_retry": True}
    until(lambda: gateway.claim())
    assert gateway.finish("twice", state="failed", cause="infra_error").json() == answers[0].json()
    stale = gateway.finish("twice", state="succeeded")
    assert (stale.status_code, stale.json()["error"]["attempt"]) == (409, 1)
    assert gateway.finish("twice", 1).status_code == 200
    assert gateway.finish("twice", 1, output="another").status_code == 409
    until(lambda: gateway.row("twice")["change"])
    assert len(ended(sink, "twice")) == 2
    assert len([span for span in sink.of("twice") if span["name"] == "gen_ai.evaluation.result"]) == 1
    assert gateway.ask("POST", "/api/rollouts/cancel", {"rollout_ids": ["twice"]}) == {"cancelled": 0}
    assert claimed["attempt"] == 0


def gateway_task(rollout_id: str, **fields: Any) -> dict[str, Any]:
    made = {
        "rollout_id": rollout_id,
        "run_id": "run",
        "group_id": "group",
        "task_id": "task",
        "policy": "default",
    }
    return {**made, "split": "train", "input": {}, "reference": None, **fields}


def test_a_lost_lease_starts_a_fresh_attempt_and_fences_the_old_one(gateway, sink, until):
    old = gateway.begin("lost", max_attempts=2)
    beat = {"controller_id": "c1", "lease_s": 1, "attempts": [{"rollout_id": "lost", "attempt": 0}]}
    assert gateway.ask("POST", "/api/rollouts/heartbeat", beat, role="controller")["lost"] == []
    (new,) = gateway.claim(
        controller="c2", lease=1, wait=20
    )  # c1 is silent; the long poll gets the second attempt
    assert (new["rollout_id"], new["attempt"]) == ("lost", 1)
    assert gateway.chat(old["token"]).json()["error"]["code"] == "attempt_ended"
    assert gateway.chat(new["token"]).status_code == 200
    answer = gateway.ask("POST", "/api/rollouts/heartbeat", beat, role="controller")
    assert answer["lost"] == [{"rollout_id": "lost", "attempt": 0}]
    late = gateway.finish("lost", 0)
    assert (late.status_code, late.json()["error"]["attempt"]) == (409, 1)
    late = gateway.send("POST", "/api/rollouts/lost/rewards", {"attempt": 0, "value": 1}, role="controller")
    assert late.status_code == 409
    until(lambda: gateway.row("lost")["state"] == "failed")  # c2 is silent, too, and there is no third
    row = gateway.row("lost")
    assert (row["cause"], row["attempt"]) == ("lost", 1)
    until(lambda: len(ended(sink, "lost")) == 2)
    assert [span["agentlightning.rollout.cause"] for span in ended(sink, "lost")] == ["lost", "lost"]
    assert [span["agentlightning.calls.expected"] for span in ended(sink, "lost")] == [0, 1]


def test_many_claimers_never_get_the_same_attempt(gateway):
    gateway.enqueue(*({"rollout_id": f"race-{number}"} for number in range(200)))
    taken: list[str] = []

    def claim(name: str) -> None:
        while claimed := gateway.claim(7, controller=name):
            taken.extend(row["rollout_id"] for row in claimed)

    threads = [threading.Thread(target=claim, args=(f"c{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == sorted(f"race-{number}" for number in range(200))


def test_a_report_in_pythons_json_is_taken_and_counted(gateway):
    gateway.begin("python-json")
    body = b'{"attempt": 0, "controller_id": "c1", "state": "succeeded", "output": [NaN, "\\ud800"]}'
    assert (
        gateway.send("POST", "/api/rollouts/python-json/finish", body, role="controller").status_code == 200
    )
    assert gateway.row("python-json")["output"] == [None, "?"]
    assert gateway.counters()["json_repaired"] >= 1
    assert (
        gateway.send("POST", "/api/rollouts/x/finish", b"[" * 100_000, role="controller").status_code == 400
    )


def test_of_many_finishes_one_wins(gateway):
    gateway.begin("contested")
    statuses: list[int] = []
    threads = [
        threading.Thread(
            target=lambda n=number: statuses.append(gateway.finish("contested", output=n).status_code)
        )
        for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(statuses) == [200] + [409] * 7


def test_priority_goes_first_and_order_is_kept(gateway):
    gateway.enqueue({"rollout_id": "p-a"}, {"rollout_id": "p-b"}, {"rollout_id": "p-c", "priority": 5})
    assert [row["rollout_id"] for row in gateway.claim(3)] == ["p-c", "p-a", "p-b"]


def test_a_claim_waits_for_work_and_ends_empty(gateway):
    assert gateway.claim(wait=0.2) == []
    threading.Timer(0.2, lambda: gateway.enqueue({"rollout_id": "awaited"})).start()
    start = time.monotonic()
    (claimed,) = gateway.claim(wait=20)
    assert claimed["rollout_id"] == "awaited"
    assert time.monotonic() - start < 5


def test_cancel_reaches_queued_and_running_rollouts(gateway, until):
    gateway.begin("cancel-running")
    gateway.enqueue({"rollout_id": "cancel-queued"})
    assert gateway.ask("POST", "/api/rollouts/cancel", {"run_id": "run"}) == {"cancelled": 2}
    beat = {"controller_id": "c1", "lease_s": 5, "attempts": [{"rollout_id": "cancel-running", "attempt": 0}]}
    answer = gateway.ask("POST", "/api/rollouts/heartbeat", beat, role="controller")
    assert answer["cancelled"] == [{"rollout_id": "cancel-running", "attempt": 0}]
    assert gateway.finish("cancel-running", state="cancelled").json()["state"] == "cancelled"
    assert gateway.finish("cancel-running", state="succeeded").status_code == 409
    assert gateway.row("cancel-queued")["attempt"] is None
    until(lambda: all(gateway.row(name)["change"] for name in ("cancel-running", "cancel-queued")))
    assert gateway.claim() == []


def test_a_rollout_may_be_cancelled_between_two_attempts(gateway, sink, until):
    gateway.begin("between")
    report = {"state": "failed", "cause": "infra_error"}
    first = gateway.finish("between", **report).json()
    assert first["will_retry"] is True
    assert gateway.ask("POST", "/api/rollouts/cancel", {"rollout_ids": ["between"]}) == {"cancelled": 1}
    row = until(lambda: (r := gateway.row("between"))["change"] and r)
    assert (row["state"], row["attempt"]) == ("cancelled", 0)
    assert (
        gateway.finish("between", **report).json() == first
    )  # the report of the attempt is still answered so
    assert ended(sink, "between")[-1]["agentlightning.rollout.state"] == "cancelled"


def test_lists_are_paged_and_filtered(gateway):
    gateway.enqueue(
        *(
            {"rollout_id": f"page-{n}", "run_id": "paged", "split": "val" if n % 2 else "train"}
            for n in range(7)
        )
    )
    seen, cursor = [], 0
    while cursor is not None:
        page = gateway.ask("GET", f"/api/rollouts?run_id=paged&limit=3&cursor={cursor}")
        seen += [row["rollout_id"] for row in page["rollouts"]]
        cursor = page["next_cursor"]
    assert seen == [f"page-{n}" for n in range(7)]
    page = gateway.ask("GET", "/api/rollouts?run_id=paged&split=val&state=queued")
    assert [row["rollout_id"] for row in page["rollouts"]] == ["page-1", "page-3", "page-5"]
    found = gateway.ask("POST", "/api/rollouts/query", {"rollout_ids": ["page-5", "nowhere", "page-0"]})
    assert [row["rollout_id"] for row in found["rollouts"]] == ["page-0", "page-5"]
    assert gateway.ask("POST", "/api/rollouts/cancel", {"run_id": "paged"}) == {"cancelled": 7}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"rollout_id": "../x"}, "not a valid identifier"),
        ({"split": "test"}, "split must be 'train' or 'val'"),
        ({"input": "text"}, "input must be an object"),
        (
            {"sampling": {"temprature": 1}},
            "sampling.temprature is not a known field. Did you mean 'temperature'?",
        ),
        ({"sampling": {"top_p": 2}}, "sampling.top_p must be less than or equal to 1"),
        ({"max_attempts": 0}, "max_attempts must be greater than or equal to 1"),
        ({"max_atempts": 1}, "Did you mean 'max_attempts'?"),
        ({"rights": ["everything"]}, "rights"),
        ({"policy": None}, "policy is missing"),
    ],
)
def test_a_bad_rollout_is_refused_with_the_field_that_is_wrong(gateway, change, sentence):
    body = {"rollouts": [gateway_task("good-one"), {**gateway_task("bad"), **change}]}
    answer = gateway.send("POST", "/api/rollouts", body)
    assert answer.status_code == 400
    assert "rollouts[1]." in answer.json()["error"]["message"]
    assert sentence in answer.json()["error"]["message"]
    assert gateway.send("GET", "/api/rollouts/good-one").status_code == 404  # all or nothing


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", '"1"', "true", "null"])
def test_a_reward_that_is_no_number_is_refused_and_counted(gateway, sink, value):
    gateway.begin(f"nan-{abs(hash(value))}")
    (row,) = gateway.ask("GET", "/api/rollouts?run_id=run&state=running")["rollouts"]
    before = gateway.counters().get("reward_not_finite", 0)
    body = b'{"attempt": 0, "value": %s}' % value.encode()
    answer = gateway.send("POST", f"/api/rollouts/{row['rollout_id']}/rewards", body, role="controller")
    assert answer.status_code == 400
    if value in ("NaN", "Infinity", "-Infinity", "1e999"):
        assert answer.json()["error"]["code"] == "reward_not_finite"
        assert gateway.counters()["reward_not_finite"] == before + 1
    assert not [span for span in sink.spans if span["name"] == "gen_ai.evaluation.result"]


def test_a_reward_of_one_call_is_a_child_of_its_span(gateway, sink):
    claimed = gateway.begin("judged")
    call_id = gateway.chat(claimed["token"]).headers["x-agentlightning-call-id"]
    reward = {
        "attempt": 0,
        "name": "style",
        "value": -1,
        "label": "poor",
        "explanation": "too long",
        "call_id": call_id,
    }
    gateway.ask("POST", "/api/rollouts/judged/rewards", reward, role="controller")
    (judged,) = [span for span in sink.of("judged") if span["name"] == "gen_ai.evaluation.result"]
    (call,) = sink.calls("judged")
    assert (judged["trace_id"], judged["parent_id"]) == (call["trace_id"], call["span_id"])
    assert judged["gen_ai.response.id"] == call["gen_ai.response.id"]
    assert (judged["gen_ai.evaluation.score.label"], judged["gen_ai.evaluation.explanation"]) == (
        "poor",
        "too long",
    )
    unknown = gateway.send(
        "POST", "/api/rollouts/judged/rewards", {**reward, "call_id": "call-x"}, role="controller"
    )
    assert unknown.status_code == 404


def test_a_reward_is_confirmed_only_when_the_collector_has_it(gateway, sink):
    gateway.begin("unconfirmed")
    sink.mode = "busy"
    reward = {"attempt": 0, "value": 1}
    assert (
        gateway.send("POST", "/api/rollouts/unconfirmed/rewards", reward, role="controller").status_code
        == 503
    )
    sink.mode = "ok"
    assert (
        gateway.send("POST", "/api/rollouts/unconfirmed/rewards", reward, role="controller").status_code
        == 200
    )
    assert len([span for span in sink.of("unconfirmed") if span["name"] == "gen_ai.evaluation.result"]) == 1


def test_the_end_of_an_attempt_outlives_kill_9_before_its_span_was_sent(start_gateway, sink, until):
    gateway = start_gateway()
    gateway.begin("unsent")
    sink.mode = "hang"
    assert gateway.finish("unsent").status_code == 200
    until(lambda: sink.waiting)
    row = gateway.row("unsent")
    assert (row["state"], row["change"]) == ("succeeded", None)  # committed, but followers do not see it yet
    gateway.kill()
    sink.mode = "ok"
    sink.proceed.set()
    sink.spans.clear()
    gateway.start()
    until(lambda: ended(sink, "unsent"))
    assert until(lambda: gateway.row("unsent")["change"]) == 1


def test_leases_tokens_and_holds_survive_a_restart_and_the_boot_id_changes(start_gateway, engine):
    gateway = start_gateway()
    claimed = gateway.begin("continues")
    gateway.enqueue({"rollout_id": "waiting"})
    first = gateway.ask("POST", "/api/rollouts/heartbeat", beat("continues", lease=1), role="controller")[
        "boot_id"
    ]
    hold = gateway.ask("POST", "/api/hold", {"policy": "default", "ttl_s": 60, "drain_s": 0})
    gateway.kill()
    time.sleep(1.1)  # longer than the lease: nobody could extend it meanwhile
    gateway.start()
    again = gateway.ask("POST", "/api/rollouts/heartbeat", beat("continues", lease=30), role="controller")
    assert again["boot_id"] != first
    assert again["lost"] == []
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{gateway.url}/v1/chat/completions",
            json={"model": "default", "messages": [{"role": "user", "content": "x"}]},
            headers={"authorization": f"Bearer {claimed['token']}"},
            timeout=0.5,
        )
    gateway.ask("POST", "/api/release", {"policy": "default", "hold_id": hold["hold_id"], "version": 3})
    assert gateway.chat(claimed["token"]).status_code == 200
    assert [row["rollout_id"] for row in gateway.claim(5)] == ["waiting"]


def beat(rollout_id: str, *, lease: float) -> dict[str, Any]:
    return {"controller_id": "c1", "lease_s": lease, "attempts": [{"rollout_id": rollout_id, "attempt": 0}]}


def test_two_thousand_rollouts_go_through(gateway, sink, until):
    count = 2000
    gateway.enqueue(*({"rollout_id": f"bulk-{n}", "run_id": "bulk"} for n in range(count)))
    done: list[str] = []

    def work(name: str) -> None:
        with httpx.Client(
            base_url=gateway.url, headers={"authorization": f"Bearer {gateway.tokens['controller']}"}
        ) as client:
            while True:
                body = {"controller_id": name, "limit": 50, "lease_s": 60}
                rows = client.post("/api/rollouts/claim", json=body).json()["rollouts"]
                if not rows:
                    return
                for row in rows:
                    finish = {"attempt": 0, "controller_id": name, "state": "succeeded", "output": "x"}
                    assert (
                        client.post(f"/api/rollouts/{row['rollout_id']}/finish", json=finish).status_code
                        == 200
                    )
                    done.append(row["rollout_id"])

    threads = [threading.Thread(target=work, args=(f"w{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == len(set(done)) == count
    until(lambda: len([s for s in sink.spans if s.get("agentlightning.run.id") == "bulk"]) >= count)
    assert gateway.counters("bulk")["rollouts_succeeded"] == count
    changes, cursor = [], 0
    while len(changes) < count:
        page = gateway.ask("GET", f"/api/rollouts?run_id=bulk&cursor={cursor}")
        changes += [row["change"] for row in page["rollouts"]]
        cursor = page["next_cursor"]
    assert len(set(changes)) == count
