"""Who may use the collector: tokens and TLS, on both transports, with the official exporters as clients."""

import ssl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult

from agentlightning.collector.access import TOKENS_VARIABLE, Tls, read_tokens
from agentlightning.proto.errors import ConfigError

STATUS = [
    sys.executable,
    "-c",
    "import sys; from agentlightning.collector.cli import main; sys.exit(main())",
    "status",
]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, a server's and a client's certificate of it, and a client's of another authority."""
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    for name in ("ca", "other"):
        openssl(
            *("req", "-x509", *new, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}"),
            *("-addext", "keyUsage=critical,keyCertSign"),
        )
    for name, authority in (("server", "ca"), ("client", "ca"), ("stranger", "other")):
        extension = folder / f"{name}.ext"
        extension.write_text("subjectAltName=IP:127.0.0.1\nkeyUsage=critical,digitalSignature\n")
        openssl("req", *new, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", f"{authority}.pem", "-CAkey", f"{authority}.key"),
            *("-CAcreateserial", "-out", f"{name}.pem", "-extfile", extension.name),
        )
        (folder / f"{name}.both").write_text(
            (folder / f"{name}.pem").read_text() + (folder / f"{name}.key").read_text()
        )
    for key in folder.glob("*.key"):
        key.chmod(0o600)
    return folder


@pytest.fixture(autouse=True)
def _own_authorities(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):  # requests prefers them to the exporter's setting
        monkeypatch.delenv(name, raising=False)


def export(exporter: Any) -> bool:
    """Whether a span arrived."""
    results: list[SpanExportResult] = []
    inner = exporter.export
    exporter.export = lambda spans: results.append(inner(spans)) or results[-1]
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with provider.get_tracer("test").start_as_current_span("chat"):
        pass
    provider.shutdown()
    return results == [SpanExportResult.SUCCESS]


def over_http(collector: Any, folder: Path, client: str | None = None, **options: Any) -> bool:
    if client is not None:
        options |= {
            "client_certificate_file": f"{folder}/{client}.pem",
            "client_key_file": f"{folder}/{client}.key",
        }
    certificate = str(folder / "ca.pem")
    return export(
        HttpExporter(collector.http + "/v1/traces", certificate_file=certificate, timeout=3, **options)
    )


def over_grpc(collector: Any, folder: Path, client: str | None = None, **options: Any) -> bool:
    def read(name: str) -> bytes:
        return (folder / name).read_bytes()

    own = (read(f"{client}.key"), read(f"{client}.pem")) if client is not None else (None, None)
    credentials = grpc.ssl_channel_credentials(read("ca.pem"), *own)
    return export(GrpcExporter(f"https://{collector.grpc}", credentials=credentials, timeout=3, **options))


def test_over_tls_the_official_exporters_arrive(collectors: Callable[..., Any], certificates: Path) -> None:
    files = ("--tls-cert", str(certificates / "server.pem"), "--tls-key", str(certificates / "server.key"))
    collector = collectors().start(*files)
    assert collector.http.startswith("https://")
    assert over_http(collector, certificates)
    assert over_grpc(collector, certificates)
    assert len(collector.journal()) == 2
    with pytest.raises(httpx.HTTPError):  # plain text is not spoken there
        httpx.get(collector.http.replace("https", "http") + "/healthz", trust_env=False)
    # A body larger than every buffer, with the rest of a request behind it.
    trusted = ssl.create_default_context(cafile=certificates / "ca.pem")
    large = httpx.Client(verify=trusted, trust_env=False)
    answer = large.post(
        collector.http + "/v1/traces",
        content=b"\x0a\x80\x80\xc0\x01" + bytes(3 << 20),
        headers={"content-type": "application/x-protobuf"},
    )
    assert answer.status_code == 400
    assert large.get(collector.http + "/healthz").status_code == 200
    shown = subprocess.run(
        [*STATUS, "--url", collector.http, "--ca", str(certificates / "ca.pem")],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "2 spans" in shown.stdout


def test_mutual_tls_lets_in_whom_the_authority_knows(
    collectors: Callable[..., Any], certificates: Path
) -> None:
    collector = collectors().start(
        *("--tls-cert", str(certificates / "server.pem"), "--tls-key", str(certificates / "server.key")),
        *("--tls-client-ca", str(certificates / "ca.pem")),
    )
    assert over_http(collector, certificates, "client")
    assert over_grpc(collector, certificates, "client")
    for client in (None, "stranger"):
        assert not over_http(collector, certificates, client)
        assert not over_grpc(collector, certificates, client)
    assert len(collector.journal()) == 2


def test_any_of_several_tokens_opens_both_transports(
    collectors: Callable[..., Any], certificates: Path, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("first-secret\nsecond-secret\n")
    tokens.chmod(0o600)
    collector = collectors().start(
        *("--tls-cert", str(certificates / "server.pem"), "--tls-key", str(certificates / "server.key")),
        *("--host", "0.0.0.0", "--token-file", str(tokens)),
    )
    collector.http = collector.http.replace("0.0.0.0", "127.0.0.1")
    collector.grpc = collector.grpc.replace("0.0.0.0", "127.0.0.1")
    for token, opens in (
        ("first-secret", True),
        ("second-secret", True),
        ("first-secre", False),
        ("", False),
    ):
        headers = {"authorization": f"Bearer {token}"}
        assert over_http(collector, certificates, headers=headers) is opens
        assert over_grpc(collector, certificates, headers=headers) is opens
    assert not over_http(collector, certificates)
    assert "secret" not in Path(f"/proc/{collector.pid}/cmdline").read_text()
    assert "secret" not in collector.log.read_text()
    assert len(collector.journal()) == 4


def test_tokens_come_from_a_file_or_the_environment(tmp_path: Path) -> None:
    assert read_tokens(None, {}) is None
    tokens = read_tokens(None, {TOKENS_VARIABLE: "one two"})
    assert tokens is not None
    assert tokens.accept(b"Bearer two")
    assert tokens.accept(b"bearer one")
    assert not tokens.accept(b"Basic one")
    assert not tokens.accept(b"Bearer three")
    path = tmp_path / "tokens"
    path.write_text("\n")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="at least one"):
        read_tokens(path)
    path.write_text("with space\n")
    with pytest.raises(ConfigError, match="one token a line"):
        read_tokens(path)


def test_bad_tls_files_are_one_sentence(certificates: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Tls(tmp_path / "none.pem", certificates / "server.key").context()
    with pytest.raises(ConfigError, match="cannot be used"):
        Tls(certificates / "server.pem", certificates / "client.key").context()
    open_key = tmp_path / "open.key"
    open_key.write_bytes((certificates / "server.key").read_bytes())
    open_key.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        Tls(certificates / "server.pem", open_key).context()
