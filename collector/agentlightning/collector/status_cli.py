"""`agl collector status`: how a running collector is."""

import argparse
import http.client
import json
import ssl
import time
from typing import Any
from urllib.parse import urlsplit

from agentlightning.proto.errors import ConfigError
from agentlightning.proto.process import read_token, run_main

__all__ = ["main"]

TIMEOUT_SECONDS = 10.0
EPILOG = """\
exit code: 0; 1 if it is there and would refuse spans; 2 if it cannot be asked
"""


def main(argv: list[str] | None = None) -> int:
    """The command. Returns its exit code."""
    return run_main(lambda: _main(argv))


def _main(argv: list[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="agl collector status",
        description="Ask a running collector how it is.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:4318", help="its HTTP address (default %(default)s)")
    add("--token-file", metavar="FILE", help="the bearer token, if it wants one")
    add("--ca", metavar="FILE", help="certificate authority to trust for https (default: the system's)")
    add("--client-cert", metavar="FILE", help="our certificate and key in one PEM file, if it wants one")
    add("--json", action="store_true", help="print everything as JSON")
    arguments = parser.parse_args(argv)
    document = _ask(arguments)
    print(json.dumps(document, indent=2) if arguments.json else _text(document))
    return 0 if document["ready"] else 1


def _ask(arguments: argparse.Namespace) -> dict[str, Any]:
    url = urlsplit(arguments.url)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(f"{arguments.url!r} is not an address: give one as http://127.0.0.1:4318.")
    headers = {}
    if arguments.token_file is not None:
        headers["authorization"] = f"Bearer {read_token(arguments.token_file)}"
    try:
        if url.scheme == "https":
            context = ssl.create_default_context(cafile=arguments.ca)
            if arguments.client_cert is not None:
                context.load_cert_chain(arguments.client_cert)
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                url.hostname, url.port or 443, timeout=TIMEOUT_SECONDS, context=context
            )
        else:
            connection = http.client.HTTPConnection(url.hostname, url.port or 80, timeout=TIMEOUT_SECONDS)
        connection.request("GET", "/status", headers=headers)
        answer = connection.getresponse()
        content = answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise ConfigError(f"No collector answers at {arguments.url}: {error}.") from None
    if answer.status == 401:
        raise ConfigError(f"The collector at {arguments.url} wants a token: give --token-file.")
    try:
        document = json.loads(content)
        document["ready"]
    except (ValueError, TypeError, KeyError):
        raise ConfigError(
            f"What answers at {arguments.url} is not a collector: HTTP {answer.status}."
        ) from None
    return dict(document)


def _text(status: dict[str, Any]) -> str:
    ack = status["ack_seconds"]
    rows: list[tuple[str, Any]] = [
        ("state", "ready" if status["ready"] else f"refusing: {status['message']}"),
        ("up for", f"{time.time() - status['started']:,.0f} s"),
        ("accepted", _counts(status["accepted"])),
        ("refused", _counts(status["refused"])),
        ("time to acknowledge", f"half below {_time(ack['p50'])}, 99 % below {_time(ack['p99'])}"),
        ("journal", f"{_size(status['journal_stored_bytes'])} on disk"),
        ("not converted", _size(status["journal_unconverted_bytes"])),
        ("converter", _converter(status)),
        ("attempts", f"{status['sealed_attempts']:,} sealed, {status['open_attempts']:,} open"),
        ("seals that wait", f"{status['pending_seals']:,}"),
        ("data set counts", _counts(status["fidelity"])),
    ]
    forward = status["forward"]
    if forward is not None:
        state = "up" if forward["up"] else f"down: {forward['error'] or 'nothing sent yet'}"
        rows.append(("forwarding to", f"{forward['url']} ({state})"))
        rows.append(("not forwarded", _size(forward["lag_bytes"])))
        rows.append(("forwarded", _counts(forward["counters"])))
    return "\n".join(f"{name:<20} {value}" for name, value in rows)


def _converter(status: dict[str, Any]) -> str:
    if not status["converter_up"]:
        return f"starting again; {status['converter_restarts']} restarts so far"
    unread = status["journal_unread_bytes"]
    restarts = f", {status['converter_restarts']} restarts" if status["converter_restarts"] else ""
    return ("has read everything" if not unread else f"{_size(unread)} behind") + restarts


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items()) if count) or "nothing"


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} GiB"


def _time(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1000 * seconds:g} ms"
