"""Who may do what; what strangers and careless callers are told; and how the command behaves."""

import base64
import json
import logging
import re
import time

import pytest

from agentlightning.gateway.cli import main
from agentlightning.gateway.tokens import Claims, Denied, Signer
from agentlightning.proto import process

BODY = {"model": "default", "messages": [{"role": "user", "content": "hello"}]}


def test_an_agents_token_allows_its_own_model_calls_and_nothing_else(gateway):
    claimed = gateway.begin("confined")
    key = claimed["token"]
    assert gateway.chat(key).status_code == 200
    for method, path, body in (
        ("GET", "/api/rollouts/confined", None),  # it holds the reference
        ("GET", "/api/rollouts", None),
        ("GET", "/api/rollouts/follow", None),
        ("POST", "/api/rollouts/query", {"rollout_ids": ["confined"]}),
        ("POST", "/api/rollouts", {"rollouts": []}),
        ("POST", "/api/rollouts/claim", {"controller_id": "c", "limit": 1, "lease_s": 9}),
        ("POST", "/api/rollouts/heartbeat", {"controller_id": "c1", "lease_s": 9, "attempts": []}),
        (
            "POST",
            "/api/rollouts/confined/finish",
            {"attempt": 0, "controller_id": "c1", "state": "succeeded"},
        ),
        ("POST", "/api/rollouts/confined/rewards", {"attempt": 0, "value": 1}),
        ("POST", "/api/rollouts/cancel", {"run_id": "run"}),
        ("POST", "/api/policies", {"policy": "default"}),
        ("POST", "/api/engines", {"engine_id": "evil", "policy": "default", "url": "http://127.0.0.1:1"}),
        ("DELETE", "/api/engines/default-0", None),
        ("POST", "/api/hold", {"policy": "default"}),
        ("GET", "/api/stats", None),
    ):
        assert gateway.send(method, path, body, key=key).status_code == 403, path
    reference = gateway.ask("GET", "/api/rollouts/confined")["rollouts"][0]["reference"]
    assert (
        str(reference) not in gateway.http.get("/v1/models", headers={"authorization": f"Bearer {key}"}).text
    )


def test_a_rollout_with_the_right_may_reward_itself_and_no_other(gateway, sink):
    mine = gateway.begin("own", rights=["reward"])
    gateway.begin("other")
    assert (
        gateway.send("POST", "/api/rollouts/own/rewards", {"value": 0.25}, key=mine["token"]).status_code
        == 200
    )
    assert (
        gateway.send("POST", "/api/rollouts/other/rewards", {"value": 1}, key=mine["token"]).status_code
        == 403
    )
    later = {"attempt": 1, "value": 1}
    assert gateway.send("POST", "/api/rollouts/own/rewards", later, key=mine["token"]).status_code == 403
    assert len([span for span in sink.spans if span["name"] == "gen_ai.evaluation.result"]) == 1


def test_roles_are_kept_apart(gateway):
    for role, method, path, body in (
        ("controller", "POST", "/api/rollouts", {"rollouts": []}),
        ("controller", "GET", "/api/rollouts", None),
        ("controller", "POST", "/api/hold", {"policy": "default"}),
        ("trainer", "POST", "/api/rollouts/claim", {"controller_id": "c", "limit": 1, "lease_s": 9}),
        ("trainer", "POST", "/api/engines", {"engine_id": "e", "policy": "p", "url": "http://127.0.0.1:1"}),
        ("trainer", "DELETE", "/api/engines/default-0", None),
    ):
        answer = gateway.send(method, path, body, role=role)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden"), path
    for key in ("wrong", gateway.tokens["trainer"] + "x", gateway.tokens["trainer"][:-1]):
        answer = gateway.http.get("/api/rollouts", headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 401
    assert gateway.http.get("/api/rollouts").status_code == 401
    assert gateway.send("GET", "/api/rollouts", role="admin").status_code == 200


def test_forged_tokens_are_refused_and_counted(gateway):
    key = gateway.begin("forged")["token"]
    body, _, signature = key.removeprefix("alr_").partition(".")
    payload = json.loads(base64.urlsafe_b64decode(body + "=="))
    richer = (
        base64.urlsafe_b64encode(json.dumps({**payload, "rights": ["reward"]}).encode()).decode().rstrip("=")
    )
    before = gateway.counters().get("invalid_api_key", 0)
    forged = [
        f"alr_{richer}.{signature}",
        f"alr_{body}.",
        f"alr_{body}",
        f"alr_{body}.{signature}=",
        f"alr_{body}.{'A' * 43}",
        "alr_",
        "sk-x",
    ]
    for attempt in forged:
        answer = gateway.chat(attempt)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert gateway.chat(None).status_code == 401
    assert gateway.counters()["invalid_api_key"] == before + len(forged) + 1


def test_an_expired_token_is_refused_by_name(start_gateway):
    gateway = start_gateway("--token-ttl-s", "0.2")
    claimed = gateway.begin("expired")
    time.sleep(0.3)
    answer = gateway.chat(claimed["token"])
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "token_expired")
    assert gateway.counters()["token_expired"] == 1


def test_a_token_says_what_was_signed_and_nothing_else():
    signer = Signer(b"k" * 32)
    claims = Claims("r", 1, "run", "g", "t", "val", "p", time.time() + 9, ("reward",))
    assert signer.verify(signer.sign(claims)) == claims
    with pytest.raises(Denied):
        Signer(b"j" * 32).verify(signer.sign(claims))


@pytest.mark.parametrize(
    ("content", "status", "code", "param"),
    [
        (b"{", 400, "invalid_request", None),
        (b"[]", 400, "invalid_request", None),
        (b'{"messages": []}', 400, "invalid_request", "model"),
        (b'{"model": "default"}', 400, "invalid_request", "messages"),
        (b'{"model": "default", "messages": [], "n": 0}', 400, "invalid_request", "messages"),
        (b'{"model": "default", "messages": [{}], "n": 1000}', 400, "invalid_request", "n"),
        (b'{"model": "default", "messages": [{}], "stream": "yes"}', 400, "invalid_request", "stream"),
        (b'{"model": "default", "messages": [{}], "temperature": NaN}', 400, "invalid_request", None),
        (b'{"model": "default", "messages": [{}], "max_tokens": 0}', 400, "invalid_request", "max_tokens"),
        (b"[" * 100_000, 400, "invalid_request", None),
        (b'{"model": "\xff", "messages": [{}]}', 400, "invalid_request", None),
        (b'{"model": "gpt-none", "messages": [{}]}', 404, "model_not_found", "model"),
        (b" " * (1 << 20) + b"{}", 413, "request_too_large", None),
    ],
)
def test_a_bad_request_gets_openais_error_and_never_reaches_the_engine(
    gateway, engine, sink, content, status, code, param
):
    claimed = gateway.begin(f"bad-{abs(hash(content))}")
    answer = gateway.http.post(
        "/v1/chat/completions", content=content, headers={"authorization": f"Bearer {claimed['token']}"}
    )
    assert answer.status_code == status
    error = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", code, param)
    assert not engine.requests
    assert not sink.calls(claimed["rollout_id"])
    assert gateway.counters()[code] >= 1


def test_an_oversized_body_without_a_length_is_refused_too(gateway):
    claimed = gateway.begin("endless")
    chunks = (b"x" * 65536 for _ in range(20))
    answer = gateway.http.post(
        "/v1/chat/completions", content=chunks, headers={"authorization": f"Bearer {claimed['token']}"}
    )
    assert answer.status_code == 413


def test_a_policys_names_are_those_of_its_token_only(gateway):
    gateway.ask("POST", "/api/policies", {"policy": "default", "base_model": "org/base"})
    gateway.ask("POST", "/api/policies", {"policy": "secret-policy"})
    key = gateway.begin("named")["token"]
    for model in ("default", "org/base", "scripted-model"):
        assert gateway.chat(key, model=model).json()["model"] == model
        assert (
            gateway.http.get(f"/v1/models/{model}", headers={"authorization": f"Bearer {key}"}).json()["id"]
            == model
        )
    answer = gateway.chat(key, model="secret-policy")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"].endswith("Models for this key: default.")
    listed = gateway.http.get("/v1/models", headers={"authorization": f"Bearer {key}"}).json()["data"]
    assert [model["id"] for model in listed] == ["default"]


def test_other_paths_say_what_is_served(gateway):
    key = gateway.begin("elsewhere")["token"]
    answer = gateway.http.post("/v1/images", json={}, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 404
    assert "POST /v1/chat/completions" in answer.json()["error"]["message"]
    assert gateway.http.head("/").status_code == gateway.http.get("/").status_code == 200
    assert gateway.http.get("/nowhere").status_code == 404
    assert gateway.http.delete("/api/rollouts").status_code == 405
    assert gateway.http.get("/healthz").json()["status"] == "ok"
    assert gateway.http.get("/readyz").json() == {"ready": True, "problems": []}
    metrics = gateway.http.get("/metrics").text
    assert 'agentlightning_gateway_engine_up{engine="default-0"} 1.0' in metrics
    assert "agentlightning_gateway_events_total" in metrics


def test_the_callers_token_is_kept_out_of_the_record(gateway, sink):
    claimed = gateway.begin("leaky")
    gateway.chat(
        claimed["token"],
        messages=[{"role": "user", "content": f"my key is {claimed['token']}"}],
        api_key="sk-1",
    )
    (span,) = sink.calls("leaky")
    assert claimed["token"] not in str(span)
    assert "sk-1" not in str(span)
    assert "my key is [removed]" in span["agentlightning.request"]


def test_engines_are_registered_probed_and_removed_by_the_admin(gateway, engine):
    body = {"engine_id": "second", "policy": "another", "url": engine.url + "/v1", "model": None}
    added = gateway.ask("POST", "/api/engines", body, role="admin")
    assert (added["healthy"], added["model"], added["model_version"], added["url"]) == (
        True,
        "scripted-model",
        7,
        engine.url,
    )
    assert (
        gateway.chat(gateway.begin("second", policy="another")["token"], model="another").status_code == 200
    )
    gateway.ask("DELETE", "/api/engines/second", role="admin")
    assert [e["engine_id"] for e in gateway.ask("GET", "/api/engines")["engines"]] == ["default-0"]
    assert gateway.send("DELETE", "/api/engines/second", role="admin").status_code == 404
    assert (
        gateway.send("POST", "/api/engines", {**body, "url": "file:///etc"}, role="admin").status_code == 400
    )
    missing = {**body, "token_file": "/nowhere"}
    assert (
        "cannot be read"
        in gateway.send("POST", "/api/engines", missing, role="admin").json()["error"]["message"]
    )


def test_an_engines_token_comes_from_its_file(start_gateway, engine, tmp_path):
    path = tmp_path / "engine-token"
    path.write_text("engine-secret\n")
    path.chmod(0o600)
    gateway = start_gateway("--engine-token-file", str(path))
    assert gateway.chat(gateway.begin("keyed")["token"]).status_code == 200
    assert engine.headers[0]["authorization"] == "Bearer engine-secret"
    assert "engine-secret" not in gateway.log() + json.dumps(gateway.ask("GET", "/api/engines"))
    assert b"engine-secret" not in (gateway.folder / "state" / "gateway.db").read_bytes()


def test_a_users_mistake_is_one_clear_sentence(gateway, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(logging.root, "handlers", [])  # the command sets up its own
    monkeypatch.setattr(process, "LOCK_WAIT", 0.1)
    loose = tmp_path / "loose.json"
    loose.write_text(json.dumps(gateway.tokens))
    loose.chmod(0o644)
    short = tmp_path / "short.json"
    short.write_text('{"admin": "a", "trainer": "b", "controller": "c"}')
    short.chmod(0o600)
    state = ["--state", tmp_path / "state"]
    base = [*state, "--collector", "http://127.0.0.1:4318"]
    used = ["--state", gateway.folder / "state", "--collector", "http://127.0.0.1:4318"]
    for options, sentence in (
        ([*base, "--port", gateway.port], "cannot listen on 127.0.0.1"),
        ([*base, "--port", 0, "--host", "0.0.0.0"], "without a token"),
        ([*base, "--port", 0, "--token-file", loose], "chmod 600"),
        ([*base, "--port", 0, "--token-file", short], "16 characters"),
        ([*base, "--port", 0, "--token-file", tmp_path / "none"], "cannot be read"),
        ([*base, "--port", 0, "--engine", "ftp://x"], "must begin with http://"),
        ([*base, "--port", 0, "--database", "mysql://x/y"], "database"),
        ([*base, "--port", 0, "--max-body-mib", 0], "above zero"),
        ([*state, "--collector", "127.0.0.1:4318", "--port", 0], "must begin with http://"),
        ([*used, "--port", 0], f"in use by process {gateway.process.pid}"),
    ):
        assert main([str(option) for option in options]) == 2
        assert sentence in capsys.readouterr().err.splitlines()[-1]


def test_the_help_shows_an_example(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "example:" in capsys.readouterr().out


def test_sigterm_ends_followers_and_waiters_and_exits_zero(start_gateway):
    gateway = start_gateway()
    headers = {"authorization": f"Bearer {gateway.tokens['trainer']}"}
    with gateway.http.stream("GET", "/api/rollouts/follow", headers=headers) as events:
        lines = events.iter_lines()
        assert next(lines) == ": following"
        gateway.process.terminate()
        assert not [line for line in lines if line.startswith("data:")]
    start = time.monotonic()
    assert gateway.process.wait(20) == 0
    assert time.monotonic() - start < 5
    assert "Traceback" not in gateway.log()


def test_the_api_describes_itself_and_what_it_says_is_there(gateway):
    answer = gateway.http.get("/api/openapi.json")  # without a key
    assert answer.status_code == 200
    document = answer.json()
    text = json.dumps(document)
    references = set(re.findall(r'"#/components/schemas/(\w+)"', text))
    assert references == set(document["components"]["schemas"])
    served = {(m.upper(), path) for path, methods in document["paths"].items() for m in methods}
    assert ("POST", "/api/rollouts/claim") in served
    for method, path in served:
        unauthorised = gateway.http.request(method, path.replace("{", "").replace("}", ""))
        assert unauthorised.status_code == 401, path
    finish = document["paths"]["/api/rollouts/{rollout_id}/finish"]["post"]
    assert finish["x-roles"] == ["admin", "controller"]
    assert finish["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/Finish")
    assert finish["parameters"][0] == {
        "name": "rollout_id",
        "in": "path",
        "required": True,
        "schema": {"type": "string"},
    }
