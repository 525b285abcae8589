"""Clients that want too much: of headers, of time, of other addresses; and TLS."""

import json
import os
import socket
import ssl
import subprocess
import threading
import time
from typing import Any

import httpx
import pytest

from agentlightning.gateway.cli import main


@pytest.fixture(scope="module")
def strict(tmp_path_factory: Any, start_shared: Any) -> Any:
    """A gateway with narrow limits."""
    return start_shared("--max-header-kib", "8", "--client-timeout-s", "0.5", "--max-body-mib", "1")


def connect(gateway: Any) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", gateway.port))
    client.settimeout(20)
    return client


def rest(client: socket.socket) -> bytes:
    """All that comes until the gateway closes."""
    answer = b""
    try:
        while part := client.recv(65536):
            answer += part
    except ConnectionResetError:
        pass
    return answer


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"


@pytest.mark.parametrize(
    ("begun", "dripped", "counter"),
    [
        (b"", b"", "slow_headers_dropped"),  # connects, and says nothing
        (HEAD, b"x-a: b\r\n", "slow_headers_dropped"),  # headers for ever
        (HEAD + b"content-length: 100000\r\n\r\n", b"x", "slow_body_dropped"),  # a body, byte by byte
        (
            b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n" + HEAD[:9],
            b"",
            "slow_headers_dropped",
        ),  # a second request
    ],
)
def test_a_client_that_sends_too_slowly_is_dropped_and_counted(strict, begun, dripped, counter):
    before = strict.counters().get(counter, 0)
    with connect(strict) as client:
        client.sendall(begun)
        gone = threading.Event()

        def drip() -> None:
            while dripped and not gone.wait(0.1):
                try:
                    client.sendall(dripped)
                except OSError:
                    return

        thread = threading.Thread(target=drip)
        thread.start()
        rest(client)
        gone.set()
        thread.join()
    assert strict.counters()[counter] == before + 1
    assert strict.http.get("/healthz").status_code == 200


def test_a_client_that_does_not_read_its_answer_is_dropped(strict, until):
    rows = [{"rollout_id": f"big-{n}", "input": {"x": "y" * 20_000}} for n in range(40)]
    for row in rows:
        strict.enqueue(row)
    key = strict.tokens["trainer"]
    request = f"GET /api/rollouts HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n\r\n".encode()
    with connect(strict) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(request * 8)
        until(lambda: strict.counters().get("slow_reader_dropped"))
    strict.ask("POST", "/api/rollouts/cancel", {"run_id": "run"})


def test_an_idle_connection_between_requests_is_kept(strict):
    with connect(strict) as client:
        for _ in range(2):
            client.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
            assert client.recv(65536).startswith(b"HTTP/1.1 200")
            time.sleep(0.8)  # longer than the limit for headers


@pytest.mark.parametrize(
    "head",
    [
        HEAD + b"x-long: " + b"a" * 50_000,  # one header that does not end
        HEAD + b"".join(b"x-%d: aaaaaaaa\r\n" % n for n in range(1000)) + b"\r\n",
        b"GET /" + b"a" * 50_000 + b" HTTP/1.1\r\n\r\n",
    ],
)
def test_headers_beyond_the_limit_are_refused(strict, head):
    with connect(strict) as client:
        client.sendall(head)
        assert rest(client).startswith(b"HTTP/1.1 431 ")
    assert strict.counters()["headers_too_large"] >= 1


def test_no_request_makes_the_gateway_reach_another_address(strict, engine):
    """The engine is where calls go, whatever a request says of addresses."""
    claimed = strict.begin("wanderer")
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        elsewhere.settimeout(0.3)
        evil = f"http://127.0.0.1:{elsewhere.getsockname()[1]}"
        bearer = f"authorization: Bearer {claimed['token']}\r\n"
        body = {"model": "default", "messages": [{"role": "user", "content": "x"}]}
        asked = json.dumps({**body, "base_url": evil, "api_base": evil, "user": evil}).encode()
        length = f"content-length: {len(asked)}\r\n"
        for head in (
            f"POST {evil}/v1/chat/completions HTTP/1.1\r\nhost: {evil[7:]}\r\n{bearer}{length}\r\n",
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {evil[7:]}\r\nx-forwarded-host: {evil[7:]}\r\n"
            f"forwarded: host={evil[7:]}\r\n{bearer}{length}\r\n",
            f"POST /v1/{evil}/v1/chat/completions HTTP/1.1\r\nhost: x\r\n{bearer}{length}\r\n",
            f"CONNECT {evil[7:]} HTTP/1.1\r\nhost: {evil[7:]}\r\n{bearer}\r\n",
        ):
            with connect(strict) as client:
                client.sendall(head.encode() + (asked if "POST" in head else b""))
                client.shutdown(socket.SHUT_WR)
                assert rest(client)
        with pytest.raises(TimeoutError):
            elsewhere.accept()
    for path in ("/v1/../api/rollouts", "/v1/%2e%2e/api/rollouts", "//api/rollouts", "/r/x/../api/rollouts"):
        with connect(strict) as client:
            client.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\n{bearer}connection: close\r\n\r\n".encode())
            answer = rest(client)
            assert answer.split(b" ")[1] in (b"401", b"403", b"404"), path
            assert b"reference" not in answer


def test_a_revoked_token_is_worth_nothing(strict, sink):
    claimed = strict.begin("leaked", rights=["reward"])
    key = claimed["token"]
    assert strict.chat(key).status_code == 200
    assert strict.ask("POST", "/api/rollouts/revoke", {"rollout_ids": ["leaked"]}) == {"revoked": 1}
    assert strict.chat(key).status_code == 403
    assert strict.send("POST", "/api/rollouts/leaked/rewards", {"value": 1}, key=key).status_code == 403
    headers = {"authorization": f"Bearer {key}", "content-type": "application/x-protobuf"}
    assert strict.http.post("/v1/traces", content=b"", headers=headers).status_code == 403
    assert strict.finish("leaked").json()["state"] == "succeeded"  # the attempt itself goes on
    again = strict.begin("leaked-later")
    assert strict.chat(again["token"]).status_code == 200


def test_a_token_in_the_path_is_in_no_log_and_no_error(strict):
    key = strict.begin("pathed")["token"]
    assert strict.http.get(f"/r/{key}/v1/models").status_code == 200
    answer = strict.http.get(f"/r/{key}/nowhere")
    assert answer.status_code == 404
    assert key not in answer.text
    assert key not in strict.log()


def test_tls_serves_https_and_nothing_else(start_gateway, tmp_path, certificate):
    cert, key = certificate
    gateway = start_gateway("--tls-cert", str(cert), "--tls-key", str(key))
    assert gateway.url.startswith("https://")
    with httpx.Client(base_url=gateway.url, verify=ssl.create_default_context(cafile=str(cert))) as client:
        assert client.get("/healthz").json()["status"] == "ok"
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{gateway.url}/healthz")
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://127.0.0.1:{gateway.port}/healthz")


def test_a_certificate_that_cannot_be_used_is_one_clear_sentence(tmp_path, capsys, certificate):
    cert, _ = certificate
    base = ["--state", str(tmp_path / "state"), "--collector", "http://127.0.0.1:1", "--port", "0"]
    for options, sentence in (
        (["--tls-cert", str(cert)], "needed together"),
        (["--tls-cert", str(cert), "--tls-key", str(cert)], "cannot be used"),
        (["--tls-cert", str(cert), "--tls-key", str(tmp_path / "none")], "cannot be used"),
        (["--database", "postgresql://me:s3cret@127.0.0.1/x"], "holds a password"),
    ):
        assert main([*base, *options]) == 2
        said = capsys.readouterr().err
        assert sentence in said
        assert "s3cret" not in said


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: Any) -> tuple[Any, Any]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    make += ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    subprocess.run(
        [*make, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True, env=os.environ
    )
    return cert, key
