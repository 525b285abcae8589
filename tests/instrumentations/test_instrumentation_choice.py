"""One set of spans per library, whoever makes it; nothing imported for it; everything undone."""

import pytest

from agentlightning.instrumentations import choose
from agentlightning.proto.errors import ConfigError


def test_the_official_spans_carry_the_exact_record_and_are_undone(program):
    lines = program(
        """
agl.instrument()
print([name for name in ("openai", "agents", "langchain_core", "autogen_core") if name in sys.modules])
import openai
client = openai.OpenAI()
agl.instrument()
ask(client)
(span,) = exporter.get_finished_spans()
print("agentlightning.response.token_ids" in span.attributes, spans())
agl.uninstrument()
ask(client)
print(spans(), [n for n in os.environ if n.startswith(("AUTOGEN", "OTEL_INSTRUMENTATION"))])
import httpx2, threading
print([hasattr(f, "__wrapped__") for f in (httpx2.Client.send, httpx2.Response.json, threading.Thread.start)])
agl.instrument()
ask(client)
print(spans())
"""
    )
    assert lines == [
        "[]",
        "True [('openai', 'chat m')]",
        "[] []",
        "[False, False, False]",
        "[('openai', 'chat m')]",
    ]


@pytest.mark.parametrize(
    ("other", "scope", "name"),
    [
        ("opentelemetry.instrumentation.openai", "v1", "openai.chat"),
        ("openinference.instrumentation.openai", "openai", "ChatCompletion"),
    ],
)
def test_another_set_that_runs_already_is_built_on_and_left_running(program, other, scope, name):
    pytest.importorskip(other)
    lines = program(
        f"""
from {other} import OpenAIInstrumentor
OpenAIInstrumentor().instrument()
agl.instrument()
ask()
(span,) = exporter.get_finished_spans()
print("agentlightning.response.token_ids" in span.attributes, spans())
agl.uninstrument()
ask()
print(spans())
"""
    )
    assert lines == [f"True [('{scope}', '{name}')]", f"[('{scope}', '{name}')]"]


def test_openllmetry_can_be_chosen_and_is_undone(program):
    pytest.importorskip("opentelemetry.instrumentation.openai")
    lines = program(
        """
agl.instrument(openai="openllmetry")
ask()
print(spans())
agl.uninstrument()
ask()
print(spans())
agl.instrument()
ask()
print(spans())
"""
    )
    assert lines == ["[('v1', 'openai.chat')]", "[]", "[('openai', 'chat m')]"]


def test_the_environment_chooses_as_arguments_do(monkeypatch):
    assert choose().frameworks == ("langchain", "openai-agents", "autogen")
    monkeypatch.setenv("AGENTLIGHTNING_FRAMEWORKS", "langgraph, autogen")
    monkeypatch.setenv("AGENTLIGHTNING_OPENAI", "none")
    assert (choose().frameworks, choose().openai) == (("langchain", "autogen"), "none")
    assert (choose([], "genai").frameworks, choose([], "genai").openai) == ((), "genai")


@pytest.mark.parametrize(
    ("frameworks", "openai", "sentence"),
    [
        (["langchian"], None, "Did you mean 'langchain'?"),
        ("autogen", None, "must be a list"),
        (None, "openlmetry", "Did you mean 'openllmetry'?"),
    ],
)
def test_a_mistake_is_one_sentence_and_changes_nothing(frameworks, openai, sentence):
    with pytest.raises(ConfigError, match=sentence.replace("?", r"\?")):
        choose(frameworks, openai)


def test_an_untested_version_is_one_warning_with_the_range_that_was_tried(program):
    program(
        """
from agentlightning.sdk import versions
versions.TESTED["openai"] = ((99,), (100,))
agl.instrument()
agl.instrument()
ask()
print(spans())
""",
        complaint="is untested with this release of agentlightning, which was tried with openai>=99,<100.",
    )


def test_what_is_absent_is_no_error(program):
    lines = program(
        """
for name in ("agents", "langchain_core", "langgraph", "autogen_core", "autogen_agentchat"):
    sys.modules[name] = None                       # as if they were not installed
sys.modules["opentelemetry.instrumentation.genai"] = None
agl.instrument()
ask()
print(spans())                                     # the hook needs nobody
"""
    )
    assert lines == ["[('sdk', 'chat m')]"]


def test_the_vendors_upload_is_replaced_and_put_back_and_the_users_own_processors_stay(program):
    lines = program(
        """
import agents
from agents.tracing import add_trace_processor, get_trace_provider
from agents.tracing.processor_interface import TracingProcessor

class Mine(TracingProcessor):
    def on_trace_start(self, trace): pass
    def on_trace_end(self, trace): pass
    def on_span_start(self, span): pass
    def on_span_end(self, span): pass
    def shutdown(self): pass
    def force_flush(self): pass

add_trace_processor(Mine())
def processors():
    return [type(p).__name__ for p in get_trace_provider()._multi_processor._processors]
print(processors())
agl.instrument()
print(processors())
agl.uninstrument()
print(processors())
"""
    )
    assert lines == [
        "['BatchTraceProcessor', 'Mine']",
        "['Mine', 'GenAITracingProcessor']",
        "['BatchTraceProcessor', 'Mine']",
    ]


def test_a_package_of_the_users_named_agents_is_left_alone(program, tmp_path):
    (tmp_path / "agents.py").write_text("name = 'mine'\n")
    lines = program("agl.instrument()\nimport agents\nprint(agents.name, agl.counters())\n")
    assert lines == ["mine {}"]


def test_under_another_distro_our_parts_add_to_the_official_ones_and_double_nothing(program):
    lines = program(
        """
from opentelemetry.instrumentation.genai.openai import OpenAIInstrumentor
from agentlightning.instrumentations import instrumentors as ours
for kind in (ours.LangGraphInstrumentor, OpenAIInstrumentor, ours.TransportInstrumentor, ours.ThreadsInstrumentor,
             ours.AutoGenInstrumentor, ours.OpenAIAgentsInstrumentor):
    kind().instrument(skip_dep_check=True)
ask()
(span,) = exporter.get_finished_spans()
print("agentlightning.response.token_ids" in span.attributes, spans(), os.environ["AUTOGEN_DISABLE_RUNTIME_TRACING"])
ours.AutoGenInstrumentor().uninstrument()
ours.TransportInstrumentor().uninstrument()
ask()
print(spans(), "AUTOGEN_DISABLE_RUNTIME_TRACING" in os.environ)
"""
    )
    assert lines == ["True [('openai', 'chat m')] true", "[('openai', 'chat m')] False"]
