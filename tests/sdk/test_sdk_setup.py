"""`instrument` in every order and company, undone without a trace, and light to import."""

import json

import pytest

import agentlightning.sdk as agl
from agentlightning.proto.errors import ConfigError

HEAVY = [
    "torch",
    "transformers",
    "pydantic",
    "numpy",
    "pyarrow",
    "grpc",
    "requests",
    "httpx",
    "httpx2",
    "opentelemetry.sdk",
]

ASK = """
def ask(library, url):
    body = {"model": "m", "messages": [], "return_token_ids": True, "logprobs": True}
    with library.Client() as client:
        assert client.post(url + "/chat/completions", json=body).status_code == 200
"""


def test_the_import_is_quick_and_light(script):
    done = script(
        "import sys, time\n"
        "start = time.process_time()\n"
        "import agentlightning.sdk\n"
        "took = time.process_time() - start\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], took < 0.5, took)\n"
    )
    assert done.stdout.startswith("[] True"), done.stdout


def test_the_command_line_is_light_too(script):
    done = script(
        "import sys\nfrom agentlightning.cli import main\nmain(['--help'])\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    assert done.stdout.endswith("[]\n")


def test_a_provider_of_the_user_is_kept_and_joined(script, sink, llm):
    done = script(
        ASK
        + """
import sys, httpx
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
theirs = InMemorySpanExporter()
provider = TracerProvider(resource=Resource({"service.name": "mine"}))
provider.add_span_processor(SimpleSpanProcessor(theirs))
trace.set_tracer_provider(provider)
import agentlightning.sdk as agl
for _ in range(3):
    agl.instrument(endpoint=sys.argv[1])
assert trace.get_tracer_provider() is provider
with trace.get_tracer("mine").start_as_current_span("their own"):
    ask(httpx, sys.argv[2])
assert provider.force_flush()
agl.uninstrument()
with trace.get_tracer("mine").start_as_current_span("after"):
    ask(httpx, sys.argv[2])
agl.instrument(endpoint=sys.argv[1])
with trace.get_tracer("mine").start_as_current_span("again"):
    pass
provider.shutdown()
print(sorted(span.name for span in theirs.get_finished_spans()))
""",
        sink.url,
        llm.url,
        OTEL_RESOURCE_ATTRIBUTES="agentlightning.rollout.id=ro-1,agentlightning.attempt=0",
    )
    assert done.stdout == "['after', 'again', 'chat m', 'their own']\n", "each once"
    assert sorted(span.name for span in sink.spans()) == ["again", "chat m", "their own"]
    assert all(span.resource["service.name"] == "mine" for span in sink.spans())
    # The user's resource does not name the rollout, so the spans do.
    assert all(span.attributes["agentlightning.rollout.id"] == "ro-1" for span in sink.spans())
    assert sink.one("chat m").parent == sink.one("their own").span_id


def test_libraries_imported_later_are_patched(script, sink, llm):
    done = script(
        ASK
        + """
import sys
import agentlightning.sdk as agl
agl.instrument()
assert "httpx" not in sys.modules and "httpx2" not in sys.modules
import httpx
import httpx2
ask(httpx, sys.argv[1])
ask(httpx2, sys.argv[1])
import importlib.util, openai
assert importlib.util.find_spec("httpx").origin == httpx.__file__
openai.OpenAI(base_url=sys.argv[1], api_key="some-key-1").chat.completions.create(model="m", messages=[])
agl.uninstrument()
ask(httpx, sys.argv[1])
""",
        llm.url,
        OTEL_EXPORTER_OTLP_ENDPOINT=sink.url,
        OTEL_RESOURCE_ATTRIBUTES="agentlightning.rollout.id=ro-1,agentlightning.attempt=5",
    )
    assert done.stderr == ""
    assert [span.name for span in sink.spans()] == ["chat m"] * 3
    resource = sink.spans()[0].resource
    assert (resource["agentlightning.rollout.id"], resource["agentlightning.attempt"]) == ("ro-1", 5)
    # What the resource says is not said again.
    assert "agentlightning.rollout.id" not in sink.spans()[0].attributes


def test_httpx2_in_the_place_of_httpx_is_patched_once(script, sink, llm):
    script(
        ASK
        + """
import sys
import agentlightning.sdk as agl
agl.instrument(endpoint=sys.argv[1])
import httpx2
httpx2.alias_httpx()
import httpx
assert httpx is httpx2
agl.instrument(endpoint=sys.argv[1])
ask(httpx, sys.argv[2])
""",
        sink.url,
        llm.url,
    )
    assert len(sink.named("chat m")) == 1


def test_nothing_is_evicted_from_a_long_conversations_span(script, sink):
    script(
        """
import sys
import agentlightning.sdk as agl
from opentelemetry import trace
agl.instrument(endpoint=sys.argv[1])
with trace.get_tracer("a.dialect").start_as_current_span("llm") as span:
    for n in range(1000):
        span.set_attribute(f"llm.input_messages.{n}.message.content", "x" * 1000)
""",
        sink.url,
        OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT="10",
    )
    attributes = sink.one("llm").attributes
    assert len(attributes) == 1000
    assert {len(value) for value in attributes.values()} == {1000}


def test_a_disabled_sdk_leaves_the_program_alone(script, sink, llm):
    script(
        ASK
        + """
import sys, httpx2
import agentlightning.sdk as agl
agl.instrument(endpoint=sys.argv[1])
with agl.rollout(rollout_id="ro-1"), agl.agent("a"):
    ask(httpx2, sys.argv[2])
    agl.reward(1)
""",
        sink.url,
        llm.url,
        OTEL_SDK_DISABLED="true",
    )
    assert sink.spans() == []


def test_use_before_instrument_is_told_once(script):
    done = script(
        "import agentlightning.sdk as agl\nfor _ in range(3):\n    agl.reward(1)\nprint(agl.flush(), agl.counters())\n"
    )
    assert done.stdout == "True {'used_before_instrument': 3}\n"
    assert done.stderr.count("agl.reward was used before agl.instrument()") == 1


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4318", "ftp://x", "http://"])
def test_an_address_that_is_none_is_refused(endpoint):
    with pytest.raises(ConfigError, match="no address of an OTLP/HTTP collector"):
        agl.instrument(endpoint=endpoint)


def test_instrument_with_another_address_moves_what_comes_after(traced, sink):
    agl.reward(1)
    agl.instrument(endpoint=sink.url + "/", headers={"x-tenant": "b"})
    agl.reward(2)
    assert agl.flush()
    assert ["x-tenant" in headers for headers in sink.headers] == [False, True]


def test_the_dtype_of_the_doctor_is_the_engines(script):
    done = script(
        """
import json
from agentlightning.sdk.doctor import examine
from agentlightning.trainer.model import choose_device, choose_dtype
(torch,) = [finding for finding in examine() if finding.what == "torch"]
dtype, why = choose_dtype("auto", choose_device("auto")[0])
print(json.dumps([torch.detail, str(dtype).removeprefix("torch."), why]))
""",
        OMP_NUM_THREADS="1",
    )
    detail, dtype, why = json.loads(done.stdout)
    assert detail.endswith(f"the engine would choose {dtype}: {why}")
