"""Transitions per second to Parquet on one core, against a bare peer in the same run.

    python benchmarks/convert.py [--rounds 5] [--calls 2000]

Ours: OTLP bodies as the journal holds them → transitions, rollouts and spans tables, zstd, on disk.
Peer: the official opentelemetry-proto classes parse the same bodies, and pyarrow's defaults write one
table of the calls alone (ids, log-probabilities, bodies): no joining, no spans, nothing checked.
Figures are CPU seconds of one process; the machine is shared, so ratios count, not absolute numbers.
"""

import argparse
import array
import gc
import random
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage

from agentlightning.collector.assemble import assemble
from agentlightning.collector.otlp import decode_traces
from agentlightning.collector.span import Span
from agentlightning.collector.tables import tables
from agentlightning.proto import attributes as names
from agentlightning.proto import ids
from agentlightning.proto.dataset import write_files
from agentlightning.proto.packed import pack_floats, pack_ids

CALLS_PER_ROLLOUT = 4
PROMPT, RESPONSE = 1900, 300
"""Tokens of a call: 2,200 together, as in the design's measurements."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=2000)
    arguments = parser.parse_args()
    rows: list[tuple[str, float, float]] = []
    for form in ("packed", "arrays"):
        bodies = make_bodies(arguments.calls, form == "packed")
        size = sum(map(len, bodies)) / 1e6
        times: dict[str, list[float]] = {"ours": [], "peer": []}
        for _ in range(arguments.rounds):
            times["ours"].append(cpu_seconds(ours, bodies))
            times["peer"].append(cpu_seconds(peer, bodies))
        for name, measured in times.items():
            rows.append((f"{form}, {size:.0f} MB: {name}", statistics.median(measured), arguments.calls))
    print(f"{'':<28}{'CPU s':>9}{'calls/s':>10}{'vs peer':>9}")
    for index, (name, seconds, calls) in enumerate(rows):
        ratio = seconds / rows[index | 1][1]
        print(f"{name:<28}{seconds:>9.3f}{calls / seconds:>10,.0f}{ratio:>8.2f}x")


def cpu_seconds(work: Callable[[list[bytes], Path], None], bodies: list[bytes]) -> float:
    gc.collect()
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        work(bodies, Path(folder))
        return time.process_time() - began


def ours(bodies: list[bytes], folder: Path) -> None:
    by_attempt: dict[tuple[str, int], list[Span]] = defaultdict(list)
    counters: Counter[str] = Counter()
    for body in bodies:
        for span in decode_traces(body, counters):
            by_attempt[span.key].append(span)
    made = [assemble(*key, spans) for key, spans in by_attempt.items()]
    write_files(folder, "bench", tables(made))


def peer(bodies: list[bytes], folder: Path) -> None:
    rows: list[dict[str, Any]] = []
    for body in bodies:
        request = ExportTraceServiceRequest.FromString(body)
        for resource_spans in request.resource_spans:
            for scope_spans in resource_spans.scope_spans:
                for span in scope_spans.spans:
                    found = {item.key: item.value for item in span.attributes}
                    if names.CALL_ID not in found:
                        continue
                    rows.append(
                        {
                            "trace_id": span.trace_id.hex(),
                            "span_id": span.span_id.hex(),
                            "start": span.start_time_unix_nano,
                            "request": found[names.REQUEST].string_value,
                            "response": found[names.RESPONSE].string_value,
                            "prompt": numbers(found[names.PROMPT_TOKEN_IDS], "i"),
                            "ids": numbers(found[names.RESPONSE_TOKEN_IDS], "i"),
                            "logprobs": numbers(found[names.RESPONSE_LOGPROBS], "f"),
                        }
                    )
    pq.write_table(pa.Table.from_pylist(rows), folder / "peer.parquet")


def numbers(value: AnyValue, code: str) -> list[Any]:
    if value.WhichOneof("value") == "bytes_value":
        return array.array(code, value.bytes_value).tolist()
    if code == "f":
        return [item.double_value for item in value.array_value.values]
    return [item.int_value for item in value.array_value.values]


def make_bodies(calls: int, packed: bool) -> list[bytes]:
    """One request per call, as the gateway sends them under little load, and one per ended attempt."""
    chance = random.Random(0)
    words = [f"word{n}" for n in range(2000)]
    bodies = []
    for number in range(calls):
        rollout, place = divmod(number, CALLS_PER_ROLLOUT)
        bodies.append(call_body(chance, words, f"ro-{rollout}", place, packed))
        if place == CALLS_PER_ROLLOUT - 1:
            bodies.append(rollout_body(f"ro-{rollout}"))
    return bodies


def call_body(chance: random.Random, words: list[str], rollout: str, place: int, packed: bool) -> bytes:
    prompt = [chance.randrange(49152) for _ in range(PROMPT)]
    response = [chance.randrange(49152) for _ in range(RESPONSE)]
    logprobs = [-chance.random() for _ in range(RESPONSE)]
    question, answer = " ".join(chance.choices(words, k=300)), " ".join(chance.choices(words, k=60))
    values: dict[str, Any] = {
        names.RUN_ID: "run", names.GROUP_ID: f"g-{rollout}", names.TASK_ID: f"t-{rollout}",
        names.ROLLOUT_ID: rollout, names.ATTEMPT: 0, names.SPLIT: "train",
        names.CALL_ID: ids.call_id(rollout, 0, str(place)), names.POLICY: "policy",
        names.MODEL_VERSION: 3, names.SOURCE: "gateway", names.OPERATION_NAME: "chat",
        names.PROVIDER_NAME: "agentlightning", names.REQUEST_MODEL: "policy",
        names.RESPONSE_MODEL: "policy", names.RESPONSE_ID: f"chatcmpl-{rollout}-{place}",
        names.USAGE_INPUT: PROMPT, names.USAGE_OUTPUT: RESPONSE, "gen_ai.request.temperature": 1.0,
        "gen_ai.request.top_p": 1.0, "gen_ai.request.max_tokens": 512,
        names.REQUEST: f'{{"model":"policy","messages":[{{"role":"user","content":"{question}"}}]}}',
        names.RESPONSE: f'{{"choices":[{{"index":0,"message":{{"role":"assistant","content":"{answer}"}}}}]}}',
        names.PROMPT_TOKEN_IDS: pack_ids(prompt) if packed else prompt,
        names.RESPONSE_TOKEN_IDS: pack_ids(response) if packed else response,
        names.RESPONSE_LOGPROBS: pack_floats(logprobs) if packed else logprobs,
        names.FINISH_REASONS: ["stop"],
    }  # fmt: skip
    return body(f"chat {place}", ids.derived_span_id(rollout, str(place)), rollout, place + 1, values)


def rollout_body(rollout: str) -> bytes:
    values = {
        names.ROLLOUT_ID: rollout, names.ATTEMPT: 0, names.RUN_ID: "run", names.ROLLOUT_STATE: "succeeded",
        names.CALLS_EXPECTED: CALLS_PER_ROLLOUT, names.TASK_INPUT: '{"question": "how many?"}',
    }  # fmt: skip
    return body(names.ROLLOUT_SPAN_NAME, ids.rollout_span_id(rollout, 0), rollout, 0, values)


def body(name: str, span_id: str, rollout: str, second: int, values: dict[str, Any]) -> bytes:
    request = ExportTraceServiceRequest()
    resource_spans = request.resource_spans.add()
    resource_spans.resource.attributes.add(key="service.name").value.string_value = "gateway"
    scope_spans = resource_spans.scope_spans.add()
    scope_spans.scope.name = "agentlightning.gateway"
    start = (1_790_000_000 + second) * 1_000_000_000
    scope_spans.spans.add(
        trace_id=bytes.fromhex(ids.derived_trace_id(rollout, 0)),
        span_id=bytes.fromhex(span_id),
        parent_span_id=bytes.fromhex(ids.rollout_span_id(rollout, 0)) if second else b"",
        name=name,
        kind=SpanMessage.SPAN_KIND_CLIENT,
        start_time_unix_nano=start,
        end_time_unix_nano=start + 10**9,
        attributes=[KeyValue(key=key, value=any_value(value)) for key, value in values.items()],
    )
    return request.SerializeToString()


def any_value(value: Any) -> AnyValue:
    match value:
        case str():
            return AnyValue(string_value=value)
        case int():
            return AnyValue(int_value=value)
        case float():
            return AnyValue(double_value=value)
        case bytes():
            return AnyValue(bytes_value=value)
    return AnyValue(array_value=ArrayValue(values=[any_value(item) for item in value]))


if __name__ == "__main__":
    main()
