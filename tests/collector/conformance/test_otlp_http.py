"""OTLP/HTTP: what the transport adds. `docs/conformance.md` lists the cases."""

import contextlib
import gzip
import socket
import threading
import time
from typing import Any

import httpx
import pytest
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]
from otlp_clients import JSON, PROTOBUF, address, encode, export, spans, to_json

CLIENT = httpx.Client(trust_env=False)
HEAD = b"POST /v1/traces HTTP/1.1\r\nhost: x\r\ncontent-type: application/x-protobuf\r\n"


def post(collector: Any, body: bytes, **headers: str) -> httpx.Response:
    named = {"content-type": PROTOBUF} | {key.replace("_", "-"): value for key, value in headers.items()}
    return CLIENT.post(collector.http + "/v1/traces", content=body, headers=named, timeout=60)


def body_of(count: int = 1, **options: Any) -> bytes:
    return bytes(spans(count, **options).SerializeToString())


class Connection:
    """A connection on which a test sends what it likes."""

    def __init__(self, collector: Any) -> None:
        self.socket = socket.create_connection(address(collector), timeout=30)
        self._file = self.socket.makefile("rb")

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()  # the file keeps the socket open
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def answer(self) -> tuple[int, dict[str, str], bytes]:
        """The next answer; (0, {}, b"") if the connection ended instead."""
        line = self._file.readline()
        if not line:
            return 0, {}, b""
        headers = {}
        while header := self._file.readline().strip():
            name, _, value = header.decode().partition(":")
            headers[name.lower()] = value.strip()
        return int(line.split()[1]), headers, self._file.read(int(headers.get("content-length", 0)))

    def ended(self) -> bool:
        return self._file.read(1) == b""


def whole(body: bytes, head: bytes = HEAD) -> bytes:
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


def test_h01_the_default_paths_take_post(shared: Any) -> None:
    assert post(shared, body_of()).status_code == 200
    for method in ("GET", "PUT", "DELETE"):
        answer = CLIENT.request(method, shared.http + "/v1/traces")
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert len(shared.journal()) == 1


def test_h02_another_path_is_not_found(shared: Any) -> None:
    for path in ("/", "/v1/traces/", "/v1/profiles", "/V1/TRACES", "/v1/traces/x"):
        answer = CLIENT.post(shared.http + path, content=b"", headers={"content-type": PROTOBUF})
        assert answer.status_code == 404
        assert Status.FromString(answer.content).code == 5
    assert CLIENT.post(shared.http + "/v1/traces?x=1", headers={"content-type": PROTOBUF}).status_code == 200


@pytest.mark.parametrize("media", [PROTOBUF, JSON])
def test_h03_the_answer_has_the_content_type_of_the_request(shared: Any, media: str) -> None:
    good = body_of() if media == PROTOBUF else to_json(spans())
    for body, status in ((good, 200), (b"", 200), (b"\xff", 400)):
        answer = post(shared, body, content_type=media)
        assert (answer.status_code, answer.headers["content-type"]) == (status, media)


def test_h04_content_types_have_parameters_and_any_case(shared: Any) -> None:
    for media in ("Application/JSON; charset=utf-8", "application/json;charset=UTF-8", "APPLICATION/JSON"):
        assert post(shared, to_json(spans()), content_type=media).status_code == 200
    assert post(shared, body_of(), content_type="application/x-protobuf; proto=x").status_code == 200
    assert len(shared.journal()) == 4


def test_h05_another_content_type_is_refused_for_good(shared: Any) -> None:
    for media in ("text/plain", "application/octet-stream", "application/grpc", "", "application/jsonx"):
        answer = post(shared, body_of(), content_type=media)
        assert answer.status_code == 415
        assert PROTOBUF in answer.json()["message"]
    with Connection(shared) as c:
        c.send(b"POST /v1/traces HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
        assert c.answer()[0] == 415


def test_h06_a_refusal_is_a_status_in_the_encoding_of_the_request(shared: Any) -> None:
    answer = post(shared, b"\xff")
    status = Status.FromString(answer.content)
    assert (answer.status_code, status.code, len(status.details)) == (400, 3, 0)
    assert "cannot be parsed" in status.message
    answer = post(shared, b"{", content_type=JSON)
    assert (answer.status_code, answer.json()["code"]) == (400, 3)
    assert "not JSON" in answer.json()["message"]


def test_h07_gzip_has_members_and_padding(shared: Any) -> None:
    body = body_of(2)
    packed = gzip.compress(body[:20]) + gzip.compress(body[20:])
    assert post(shared, packed, content_encoding="gzip").status_code == 200
    assert post(shared, gzip.compress(body) + bytes(10), content_encoding="GZip").status_code == 200
    assert post(shared, body, content_encoding="identity").status_code == 200
    assert post(shared, b"", content_encoding="gzip").status_code == 200
    assert [record.body for record in shared.journal()] == [body] * 3


def test_h08_damaged_gzip_is_refused_for_good(shared: Any) -> None:
    packed = gzip.compress(body_of(size=5000))
    flipped = bytearray(packed)
    flipped[-6] ^= 1  # in the checksum
    for bad in (packed[:-9], bytes(flipped), body_of(), packed + b"junk", b"\x1f\x8b"):
        assert post(shared, bad, content_encoding="gzip").status_code == 400
    assert post(shared, body_of(), content_encoding="br").status_code == 415
    assert shared.journal() == []


def test_h09_a_bomb_costs_the_limit_and_no_more(collectors: Any) -> None:
    collector = collectors().start("--max-body-mib", "4")
    assert post(collector, gzip.compress(body_of()), content_encoding="gzip").status_code == 200
    before = resident(collector.pid)
    bomb = gzip.compress(bytes(800 << 20), 9)
    assert len(bomb) < 4 << 20
    for _ in range(3):
        answer = post(collector, bomb, content_encoding="gzip")
        assert answer.status_code == 413
        assert "retry-after" not in answer.headers
    nested = gzip.compress(gzip.compress(bytes(100 << 20)))
    assert post(collector, nested, content_encoding="gzip").status_code == 400
    assert resident(collector.pid) - before < 40 << 20


def resident(pid: int) -> int:
    """The most memory that a process has had."""
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))


def test_h10_too_large_is_said_before_the_body_is_sent(shared: Any) -> None:
    with Connection(shared) as c:
        c.send(HEAD + b"content-length: 99999999999\r\n\r\n")
        status, headers, body = c.answer()
        assert (status, headers["connection"]) == (413, "close")
        assert Status.FromString(body).code == 8
        assert c.ended()


def test_h11_a_client_that_sends_everything_first_still_sees_its_refusal(collectors: Any) -> None:
    """Cut off while it sends, it would see a broken connection, and try again for ever."""
    collector = collectors().start("--max-body-mib", "1")
    assert post(collector, bytes(60 << 20)).status_code == 413
    with Connection(collector) as c:  # chunked: that it is too large shows only while it comes
        chunk = b"10000\r\n" + bytes(0x10000) + b"\r\n"
        c.send(HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk * 40 + b"0\r\n\r\n")
        assert c.answer()[0] == 413
    assert CLIENT.get(collector.http + "/healthz").status_code == 200


def test_h12_a_connection_outlives_a_refusal(shared: Any) -> None:
    with Connection(shared) as c:
        c.send(whole(b"\xff") + whole(body_of(), HEAD.replace(b"x-protobuf", b"other")) + whole(body_of()))
        assert [c.answer()[0] for _ in range(3)] == [400, 415, 200]


def test_h13_connections_are_kept_alive(shared: Any) -> None:
    with Connection(shared) as c:
        for _ in range(20):
            c.send(whole(body_of()))
            status, headers, _ = c.answer()
            assert (status, "connection" in headers) == (200, False)
        c.send(whole(body_of(), HEAD + b"connection: close\r\n"))
        status, headers, _ = c.answer()
        assert (status, headers["connection"]) == (200, "close")
        assert c.ended()
    assert len(shared.journal()) == 21


def test_h14_pipelined_requests_are_answered_in_order(shared: Any) -> None:
    with Connection(shared) as c:
        bodies = [body_of(size=n * 3000) for n in range(1, 40)]
        requests = b"".join(whole(body) + whole(b"\xff") for body in bodies)
        sender = threading.Thread(target=c.send, args=(requests,))
        sender.start()
        assert [c.answer()[0] for _ in range(78)] == [200, 400] * 39
        sender.join()
    assert [record.body for record in shared.journal()] == bodies


def test_h15_chunks_of_any_size_are_joined(shared: Any) -> None:
    body = body_of(size=100_000)
    for size in (1, 7, 4096, 70_000):
        part = body if size > 1 else body_of()
        chunks = b"".join(
            b"%x\r\n%b\r\n" % (len(part[i : i + size]), part[i : i + size]) for i in range(0, len(part), size)
        )
        with Connection(shared) as c:
            c.send(HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n" + whole(body_of()))
            assert (c.answer()[0], c.answer()[0]) == (200, 200)
        assert shared.journal()[-2].body == part


def test_h16_chunk_extensions_and_trailers_are_ignored(shared: Any) -> None:
    body = body_of()
    chunked = b"%X;name=value\r\n%b\r\n000;last\r\nx-checksum: 1\r\nx-other: 2\r\n\r\n" % (len(body), body)
    with Connection(shared) as c:
        c.send(HEAD + b"transfer-encoding: Chunked\r\n\r\n" + chunked)
        assert c.answer()[0] == 200
    assert [record.body for record in shared.journal()] == [body]


@pytest.mark.parametrize(
    "chunks",
    [b"zz\r\n", b"-1\r\nx\r\n", b"0x5\r\nhello\r\n", b"5\r\nhellooo\r\n", b"\r\n", b"1" * 400, b"1_0\r\n"],
)
def test_h17_bad_chunks_are_refused(shared: Any, chunks: bytes) -> None:
    with Connection(shared) as c:
        c.send(HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunks)
        status, headers, _ = c.answer()
        assert (status, headers["connection"]) == (400, "close")
    assert shared.journal() == []


def test_h18_the_body_is_sent_when_100_continue_came(shared: Any) -> None:
    body = body_of()
    with Connection(shared) as c:
        c.send(HEAD + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(body))
        assert c.answer() == (100, {}, b"")
        c.send(body)
        assert c.answer()[0] == 200
    with Connection(shared) as c:  # and not when it would be refused
        c.send(HEAD + b"expect: 100-continue\r\ncontent-length: 99999999999\r\n\r\n")
        assert c.answer()[0] == 413
    with Connection(shared) as c:
        c.send(HEAD + b"expect: the-unexpected\r\ncontent-length: 1\r\n\r\n")
        assert c.answer()[0] == 417
    assert len(shared.journal()) == 1


def test_h19_a_slow_client_is_waited_for_and_holds_nobody_up(shared: Any) -> None:
    request = whole(body_of(size=500))
    with Connection(shared) as slow:
        for n in range(0, len(request), 50):
            slow.send(request[n : n + 50])
            began = time.monotonic()
            assert post(shared, body_of()).status_code == 200
            assert time.monotonic() - began < 10
        assert slow.answer()[0] == 200


def test_h20_a_client_that_stalls_is_cut_off_and_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    import asyncio

    from agentlightning.collector import http_server
    from agentlightning.collector.http_server import HttpServer
    from agentlightning.collector.intake import Intake
    from agentlightning.collector.journal import Journal
    from agentlightning.collector.receiver_http import HttpReceiver, listen

    for name in ("HEAD_SECONDS", "BODY_SECONDS", "SWEEP_SECONDS", "IDLE_SECONDS"):
        monkeypatch.setattr(http_server, name, 0.2)

    async def main() -> list[bytes]:
        journal = Journal(tmp_path)
        intake = Intake(journal)
        sock = listen("127.0.0.1", 0, "test")
        port = sock.getsockname()[1]
        server = HttpServer(HttpReceiver(intake), sock)
        await server.start()
        answers = []
        stalled = (
            b"POST /v1/tr",
            HEAD + b"content-length: 10\r\n\r\nhalf",
            HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\nab",
            b"",
        )
        for part in stalled:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(part)
            answers.append(await asyncio.wait_for(reader.read(), 20))  # the server ends the connection
            writer.close()
        assert intake.refused == {"slow": 3}
        await server.stop()
        journal.close()
        return answers

    answers = asyncio.run(main())
    assert [answer[:12] for answer in answers] == [b"HTTP/1.1 408"] * 3 + [b""]


def test_h21_a_client_that_dies_in_its_body_leaves_nothing(shared: Any) -> None:
    for part in (
        HEAD + b"content-length: 1000\r\n\r\n" + body_of()[:20],
        HEAD + b"transfer-encoding: chunked\r\n\r\nffff\r\nabc",
        HEAD[:30],
    ):
        with Connection(shared) as c:
            c.send(part)
    assert post(shared, body_of()).status_code == 200
    assert len(shared.journal()) == 1
    deadline = time.monotonic() + 10
    while 'reason="client_gone"} 2' not in CLIENT.get(shared.http + "/metrics").text:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_h22_a_half_closed_client_gets_its_answer(shared: Any) -> None:
    with Connection(shared) as c:
        c.send(whole(body_of()))
        c.socket.shutdown(socket.SHUT_WR)
        assert c.answer()[0] == 200
        assert c.ended()


def test_h23_http_1_0_is_answered_and_closed(shared: Any) -> None:
    with Connection(shared) as c:
        c.send(whole(body_of(), HEAD.replace(b"HTTP/1.1", b"HTTP/1.0")))
        assert c.answer()[0] == 200
        assert c.ended()


@pytest.mark.parametrize(
    "fields",
    [
        b"content-length: 5\r\ntransfer-encoding: chunked\r\n",
        b"content-length: 5\r\ncontent-length: 6\r\n",
        b"content-length: +5\r\n",
        b"content-length: 99999999999999999999999\r\n",
        b"content-length: 5\r\n folded: x\r\n",
        b"bad header\r\n",
        b"transfer-encoding: chunked, gzip\r\n",
    ],
)
def test_h24_heads_that_could_be_read_in_two_ways_are_refused(shared: Any, fields: bytes) -> None:
    """Request smuggling, RFC 9112 §11.2."""
    with Connection(shared) as c:
        c.send(HEAD + fields + b"\r\n0\r\n\r\n")
        status, headers, _ = c.answer()
        assert (status, headers["connection"]) == (400, "close")
        assert c.ended()
    assert shared.journal() == []


def test_h25_an_endless_head_and_foreign_protocols_are_refused(shared: Any) -> None:
    with Connection(shared) as c:
        c.send(HEAD + b"x: " + b"y" * 40_000)
        assert c.answer()[0] == 431
    for junk, status in (
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    ):
        with Connection(shared) as c:
            c.send(junk)
            assert c.answer()[0] == status
    with Connection(shared) as c:
        c.send(HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n")
        assert c.answer()[0] == 501
    with Connection(shared) as c:  # an offer to upgrade may be ignored, RFC 9110 §7.8
        c.send(whole(body_of(), HEAD + b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\n"))
        assert c.answer()[0] == 200


def test_h26_hundreds_of_connections_are_served(shared: Any) -> None:
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(Connection(shared)) for _ in range(300)]
        for c in opened:
            c.send(whole(body_of()))
        assert [c.answer()[0] for c in opened] == [200] * 300
    assert len(shared.journal()) == 300


def test_h27_a_client_that_reads_no_answers_is_held_back(shared: Any) -> None:
    """Else it could fill the memory with answers."""
    head = b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n"
    with Connection(shared) as c:
        c.socket.settimeout(2)
        sent = 0
        with contextlib.suppress(TimeoutError):
            for _ in range(3000):
                c.send(head * 100)
                sent += 100
        assert sent < 300_000
    assert CLIENT.get(shared.http + "/healthz").status_code == 200


def test_h28_more_than_memory_allows_is_asked_to_wait(collectors: Any) -> None:
    collector = collectors().start()
    half = 40 << 20
    with contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(Connection(collector)) for _ in range(3)]
        for c in waiting:
            c.send(HEAD + b"content-length: %d\r\n\r\n" % (50 << 20))
            with contextlib.suppress(OSError):
                c.send(bytes(half))
        # What they hold is the limit: another one waits, and the clients say so by themselves.
        answer = export(collector, "http", spans(size=30 << 20))
        assert (answer.code, answer.delay) == ("503", 1)
        assert export(collector, "http", b"").ok
    deadline = time.monotonic() + 20
    while not export(collector, "http", spans(size=30 << 20)).ok:  # they have gone: there is room again
        assert time.monotonic() < deadline


def test_h29_logs_have_their_path_and_their_partial_success(shared: Any) -> None:
    from otlp_clients import log_records

    for transport in ("http", "json"):
        body = encode(transport, log_records("a", "b"))
        assert export(shared, transport, body, signal="logs").ok
    assert post(shared, encode("http", log_records("a"))).status_code in (200, 400)  # they are no spans
    assert [record.kind.name for record in shared.journal()[:2]] == ["LOGS", "LOGS_JSON"]
