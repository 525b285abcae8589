"""A tap on the wire: it passes requests on to a server and answers back, and keeps both as they were."""

import http.client
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

__all__ = ["Exchange", "Tap", "answer_of"]


@dataclass
class Exchange:
    """A request and its answer."""

    method: str
    path: str
    headers: dict[str, str]
    sent: bytes
    status: int = 0
    got: bytes = b""
    kind: str = ""
    """The answer's content type."""
    extra: dict[str, Any] = field(default_factory=dict)


class Tap:
    """Listens on loopback for a server at `target`."""

    def __init__(self, target: str) -> None:
        self.exchanges: list[Exchange] = []
        host = urlsplit(target).netloc
        tap = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def relay(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                headers = {name.lower(): value for name, value in self.headers.items()}
                exchange = Exchange(self.command, self.path, headers, body)
                tap.exchanges.append(exchange)
                passed = {
                    k: v for k, v in headers.items() if k not in ("host", "accept-encoding", "connection")
                }
                server = http.client.HTTPConnection(host, timeout=60)
                try:
                    server.request(self.command, self.path, body, passed)
                    answer = server.getresponse()
                    exchange.status, exchange.kind = answer.status, answer.getheader("content-type") or ""
                    self.send_response(answer.status)
                    for name, value in answer.getheaders():
                        if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                            self.send_header(name, value)
                    self.send_header("connection", "close")  # its end is the answer's end
                    self.end_headers()
                    while piece := answer.read1(65536):
                        exchange.got += piece
                        self.wfile.write(piece)
                        self.wfile.flush()
                except OSError:
                    pass  # one of the two has gone: the other sees it
                finally:
                    server.close()
                    self.close_connection = True

            do_GET = do_POST = do_HEAD = relay

            def log_message(self, *_: Any) -> None:
                """Silence."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def model_calls(self) -> list[Exchange]:
        """The exchanges that are recorded: answered model calls."""
        ends = ("/chat/completions", "/completions", "/responses", "/messages")
        return [
            exchange
            for exchange in self.exchanges
            if urlsplit(exchange.path).path.endswith(ends) and exchange.status == 200
        ]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def answer_of(exchange: Exchange) -> Any:
    """What the client got, as one answer: a stream put together by the rules of its API."""
    if not exchange.kind.startswith("text/event-stream"):
        return json.loads(exchange.got)
    lines = exchange.got.decode().split("\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    path = urlsplit(exchange.path).path
    if path.endswith("/responses"):
        return events[-1]["response"]
    return _message(events) if path.endswith("/messages") else _chat(events)


def _message(events: list[dict[str, Any]]) -> dict[str, Any]:
    message = events[0]["message"]
    assert events[-1] == {"type": "message_stop"}
    partial: dict[int, str] = {}
    for event in events:
        if event["type"] == "content_block_start":
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], message["content"][event["index"]]
            for name in ("text", "thinking", "signature"):
                if name in delta:
                    block[name] += delta[name]
            if "partial_json" in delta:
                partial[event["index"]] = partial.get(event["index"], "") + delta["partial_json"]
        elif event["type"] == "message_delta":
            message |= event["delta"]
            message["usage"] = event["usage"]
    for index, text in partial.items():
        message["content"][index]["input"] = json.loads(text)
    return message


def _chat(events: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    reason = None
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                calls = message.setdefault("tool_calls", [])
                if call["index"] == len(calls):
                    calls.append(
                        {"id": call["id"], "type": "function", "function": {"name": "", "arguments": ""}}
                    )
                for name, value in call["function"].items():
                    calls[call["index"]]["function"][name] += value or ""
            reason = choice["finish_reason"] or reason
    message["content"] = message["content"] or (None if "tool_calls" in message else "")
    return {"choices": [{"message": message, "finish_reason": reason}]}
