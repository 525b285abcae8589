"""Write `docs/configuration.md` and the tables of `docs/data.md`, `docs/engine.md` and `docs/control-api.md` from the code, or check that they are current.

python docs/generate.py            # write
python docs/generate.py --check    # exit 1 if a page differs
"""

import json
import sys
from pathlib import Path
from typing import get_args

import pyarrow as pa
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from agentlightning.gateway.control import openapi
from agentlightning.gateway.control.table import OPERATIONS
from agentlightning.gateway.embeddings import Embeddings
from agentlightning.gateway.proxy import APIS
from agentlightning.proto.schemas import TABLES
from agentlightning.trainer.config import TrainConfig
from agentlightning.trainer.engine.fields import FIELDS, Only

HERE = Path(__file__).parent

CONTROL_API = """\
# Control API of the gateway

JSON over HTTP, for trainers, controllers and administrators; agents have no business here. The tables are generated from
`gateway/agentlightning/gateway/control/`; a running gateway serves the same as an OpenAPI 3.1 document at
`GET /api/openapi.json`. Every request may be repeated: it changes nothing the second time, and gets the same answer. A field
that is null is as one that is absent; an unknown field is refused.

## Roles

`--token-file` names a JSON file (mode 0600) with the bearer tokens of `admin`, `trainer` and `controller`; without it all is
open, which is possible on loopback only. The admin may do everything, and alone registers engines: nobody else says where
calls go, and a redirect of an engine is not followed. An agent's key is the **rollout's token** that a claim brings: signed, of
one attempt, for that attempt's model calls and spans, and, where the rollout was enqueued with `rights: ["reward"]`, its
rewards. It ends with its attempt, with `--token-ttl-s`, or with `POST /api/rollouts/revoke`. Clients that cannot set a key use it
as a path, `/r/<token>/v1/…`; paths are never logged.

## Errors

`{"error": {"message", "code"}}`. 400 says which field is wrong, 401 and 403 who may, 404 what is not there, 409 that something
newer has won (a stale attempt, a hold that another has taken over: nothing was changed), 413 and 431 what is too large, 503 that
trying again helps. All are counted by code under `GET /api/stats` and `/metrics`.

## States

A rollout is `queued`, `running`, then `succeeded`, `failed` or `cancelled`, which is final. A claim starts the next attempt
under a lease that heartbeats extend. An attempt that is `lost` (no heartbeat) or an `infra_error` is tried again, up to
`max_attempts`; `agent_error`, `timeout` and `context_overflow` are results. An agent's failure counts as an `infra_error` if a
model call had failed by the engine's or the gateway's fault, and no retry had mended it. Every change is compare-and-set on the
attempt and its version.

The end of an attempt goes to the collector as a span, with the ids of the calls whose answers the agent got. A call that was
recorded, but whose answer never left (the gateway was killed in between), is `unanswered` in the data set, and counts neither as
expected nor as stored. Followers see a rollout (`change`) when the collector has that span.

## Database

SQLite under `--state` by default: a killed process loses nothing; with `--durability power` every commit is synced to disk, and
a power cut loses nothing either. Or PostgreSQL (`pip install "agentlightning[postgres]"`,
`--database postgresql://USER@HOST/NAME`, the password in `~/.pgpass`): then several gateways may share it, behind any load
balancer, each with its own `--state`. What one is told, the others know within a second: engines, policies, holds (a hold waits for
the calls of all gateways), and attempts that ended. Spans that a dead gateway had not sent yet are sent by another. Their clocks
must agree to a second.

Ended rollouts of a run are forgotten when nothing of it is open and nothing was added to it for `--keep-days` (30), and beyond
`--keep-rollouts`, the oldest runs first; counted as `rollouts_forgotten`. A run that is resumed within that time finds its
outcomes. The data set is not touched.

## Engines and holds

A rollout keeps its engine, for its prefix cache, unless that has more than four calls more in flight than the least busy one.
An engine is asked for its `/health` every two seconds. After `--engine-failures` (5) failed calls in a row its **breaker** opens: no
call for a second, then one that decides; the pause doubles up to 30 s. `GET /api/engines` and `/metrics` show state and reason. A
call is given to another engine only while nothing can have been sampled: it could not connect, or was refused with 429 or 503.

During a **hold** calls wait: streams have their headers and get comments, plain requests just take longer; a client's own
timeout (ten minutes in OpenAI's and Anthropic's) is the only limit. `drain_s` bounds the wait for calls in flight; what
is left goes on, or is kept by an engine that is paused (`POST /pause` of the embedded engine) and finished on the new weights. A
hold ends by itself after `ttl_s`.

## Limits

`--max-body-mib` (16), `--max-header-kib` (64), and `--client-timeout-s` (60): for the headers to come, for a body to begin (it may
take longer by a second for every 16 KiB), and for a client to read what it is sent. Counted as `headers_too_large`,
`slow_headers_dropped`, `slow_body_dropped`, `slow_reader_dropped`. `--tls-cert` and `--tls-key` serve HTTPS, and nothing else.
"""

CONFIGURATION = """\
# Configuration

`agl train CONFIG.yaml [section.key=value …]` reads one YAML file. Every setting has a default; an unknown key, or
a value that cannot be honoured, is an error before anything starts. Overrides are written with dots:
`train.steps=20`, `policy.lora.rank=8`, `evaluate.tasks=0`. The resolved configuration of a run is in
`runs/NAME/config.yaml`, and can be used again.

This page is generated from `trainer/agentlightning/trainer/config.py`.
"""

DATA = """\
# The data set

A data set is a folder of four tables in Parquet (zstd) and the manifests that name their files:

```
data/
  transitions/*.parquet  rollouts/*.parquet  spans/*.parquet  samples/*.parquet
  manifests/00000001.json …  checkpoints/00000064.json
```

Files appear whole, and never change. Only what a manifest names exists: a file that a crash left behind is named by
none. A manifest's number is taken by put-if-absent, so that collectors, trainers and compaction need no other agreement;
a checkpoint says what all manifests up to one add up to, and readers begin there. When a span arrives after its attempt
was written, the attempt is written again, whole, as a new generation.

Token lists are null, not empty, where they are unknown. Times are UTC. What is large stands once: a span's token ids,
log-probabilities and bodies are in its call's row of `transitions`, and `spans.in_transitions` names them.

## Reading

```python
from agentlightning.proto.dataset import open_dataset

data = open_dataset("runs/demo/data", run="demo", split="train", sealed=True)
calls = data.table("transitions", columns=["rollout_id", "seq", "response_token_ids", "reward"])
```

`open_dataset` takes a folder, a run's folder or the URL of an object store, and returns the newest generation of each
attempt. Parts of it: `run`, `split`, `rollouts`, `agent`, `since` and `until` (when an attempt began), `sealed` (without
attempts that were written only because nothing more came). pyarrow, DuckDB and Polars read the files that
`data.files("transitions")` lists; where attempts have several generations these hold the older rows too, until
compaction. Data sets of every older version are read: what they lacked is null.

## Object stores

`--data s3://bucket/prefix` (`gs://`, `az://`; credentials from the environment or the store's own profile) puts the data
set into an object store that knows conditional writes. Several collectors may write into one data set. The journal stays
on the collector's own disk.

## Compaction and retention

A collector that has nothing else to do makes one file of 64 small commits (`--compact-files N`, 0: never), and takes away
what is older than `--keep-days` or beyond `--keep-gib`. `agl collector compact DATA` does the same by hand, beside
running collectors and readers, and also leaves out the rows that later generations have replaced. Both are manifests
first; a file is deleted 15 minutes after it stopped to exist for readers. Spans that come for an attempt that retention has
taken away are counted as `expired`.

## The transition service

The collector's gRPC port serves `agentlightning.v1.Transitions` (`proto/agentlightning/proto/transitions.proto`) too:

- `Seal` waits until every expected call of some attempts is in the data set, or says what is missing.
- `Fetch` streams rows of a table as Arrow IPC, by attempts, run and columns; the server holds one file at a time.
- `Follow` streams attempts as they are sealed. Each carries a `cursor`; a client that was cut off gives the last one
  it has, and goes on behind that attempt.

This page's tables are generated from `proto/agentlightning/proto/schemas.py`; `agl inspect DATA` prints a summary,
`agl inspect DATA --rollout ID` a conversation.
"""

ENGINE = """\
# The embedded engine

`agl engine --model FOLDER` serves one model to OpenAI's clients at `/v1/chat/completions`; `agl train` starts it with
`engine: embedded`. For models beyond a few billion weights use `engine: vllm`.

## What an answer must look like

`tool_choice` (`required`, or one tool by name), `strict` tools, `parallel_tool_calls: false` and `response_format`
become a grammar, and at each token only what keeps the answer within it can be drawn. Calls have the Hermes form,
`<tool_call>{"name": …, "arguments": …}</tool_call>`; JSON is written on one line with a space after `,` and `:`, so that
a call that is rendered again in the next prompt gives the same tokens. Where a grammar is in force, the arguments of
tools that are not strict keep to their schema too, as far as it can be made a grammar; a schema of a strict tool or
of `response_format` that cannot is refused with its name. An answer that reaches `max_tokens` is cut, and so is its JSON.

## Log-probabilities

They are those of the distribution that was really drawn from: after the grammar, biases, penalties, temperature, top-k
and top-p, renormalised. A forced token has log-probability 0. In training, the policy's own probability of such a
token is smaller than the sampler's, and w = π_old / μ makes up for it: drawing from π restricted to a set A, with
Z = π(A), gives E_μ[w·f] = Σ_A (π/μ)·μ·f = Σ_A π·f, the part of the policy's own expectation that the answer was
allowed to have. A policy that puts less than 1e-4 on what a grammar wants has its sample vetoed, and counted as that, so ask
for forms that the model nearly writes by itself.

A request with a `seed` gets the same answer whatever else the engine is doing, under the same weights. (In bfloat16 the last bits of a
matrix product depend on the batch; exact repetition needs `--dtype float32`.)

## Request fields

What is not listed is refused with its name.
"""

GATEWAY = """\
# The model proxy

`agl gateway` stands between agents and engines. An agent that knows nothing of us calls it as it would call OpenAI or
Anthropic, and every token that it is given is on record before it has the last byte of the answer.

| | |
|---|---|
| `POST /v1/chat/completions`, `/v1/completions`, `/v1/responses`, `/v1/messages` | streamed or not; recorded, one span for each choice |
| `POST /v1/messages/count_tokens`, `/v1/embeddings` | passed through; nothing is sampled for the agent, so nothing is recorded |
| `GET /v1/models` | the policies that the key may call |

The key is the rollout's token, as `Authorization: Bearer` or `x-api-key`; for clients that cannot set one, it is put
before the path: `http://GATEWAY/r/TOKEN/v1/…`.

## Agents

| agent | what to set |
|---|---|
| anything with OpenAI's or Anthropic's client | `OPENAI_BASE_URL=http://GATEWAY/v1`, `OPENAI_API_KEY`; `ANTHROPIC_BASE_URL=http://GATEWAY`, `ANTHROPIC_API_KEY` |
| Codex | `CODEX_HOME` with a `config.toml`: a model provider with `base_url`, `env_key = "OPENAI_API_KEY"`, `wire_api = "responses"`; `codex exec --dangerously-bypass-approvals-and-sandbox` in a sandbox of your own |
| Claude Code | `ANTHROPIC_BASE_URL`, `ANTHROPIC_API_KEY`, `--model POLICY` (not `default`, which is a name of its own), `CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1`; it asks for up to 128,000 tokens: let the run's `max_tokens` bound that |
| mini-SWE-agent | `OPENAI_API_BASE=http://GATEWAY/v1`, `-m openai/POLICY`, `MSWEA_COST_TRACKING=ignore_errors` |

Each of these runs unchanged in `tests/gateway/test_real_clients.py`, where what it sent and got is compared with the
record.

## How requests are translated

Engines are always asked by their chat (or completions) API, for only these tell token ids; log-probabilities and ids
are taken out of the answer unless the client asked for them. A Responses or Messages conversation becomes chat messages: reasoning, text
and tool calls of one answer become one assistant message again, so that the next prompt continues the last. The text of a
tool call's arguments is kept as the model wrote it, and put back when a Messages client returns the parsed input.
Reasoning that a client may not read (`display: omitted`, `reasoning.encrypted_content`) travels in the opaque field that it
gives back. The result of a failed tool (`is_error`) begins with `Error: `. Functions in a namespace are shown to the model as
`NAMESPACE__NAME`.

In a stream, text and arguments are relayed as they come; what ends a block, an item or the answer waits until the
collector has the call on disk. A failure in the middle of a stream is the API's own error event.

A client that tries again (`x-stainless-retry-count`, or the same bytes after an answer that never reached it) gets the
same bytes again, and the model is not asked. A client that leaves stops the engine; the record says `aborted`.

## Request fields

`honoured`: it does what the API says. `accepted`: it may be given, and says nothing about the answer. `refused`, a value
other than those after `only`, and a field that is not in the table: status 400 with the field's name. `null` is
absent.
"""

ABOUT = {
    "transitions": "One row per model call: state, action, reward.",
    "rollouts": "One row per attempt at a rollout.",
    "spans": "Everything as received: `agl convert data/ --out again/` derives the other tables from it again.",
    "samples": "What the optimiser saw, written by the trainer: calls whose tokens continue each other, merged.",
}


def configuration() -> str:
    parts = [CONFIGURATION]
    for name, field in TrainConfig.model_fields.items():
        parts.append(f"\n## `{name}`\n\n| setting | default | |\n|---|---|---|\n")
        parts.extend(_rows(name, field))
    return "".join(parts)


def _rows(prefix: str, field: FieldInfo) -> list[str]:
    model = _model(field)
    if model is None:
        default = "" if field.is_required() else f"`{_default(field.get_default(call_default_factory=True))}`"
        return [f"| `{prefix}` | {default} | {_words(field)} |\n"]
    rows = []
    if field.description:
        rows.append(f"| `{prefix}` | `{_default(field.default)}` | {_words(field)} |\n")
    for name, inner in model.model_fields.items():
        rows.extend(_rows(f"{prefix}.{name}", inner))
    return rows


def _words(field: FieldInfo) -> str:
    return " ".join((field.description or "").split()).replace("|", "\\|")


def _model(field: FieldInfo) -> type[BaseModel] | None:
    candidates = [field.annotation, *get_args(field.annotation)]
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def _default(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(map(str, value)) + "]"
    return str(value) or '""'


def data() -> str:
    parts = [DATA]
    for name, schema in TABLES.items():
        parts.append(f"\n## {name}\n\n{ABOUT[name]}\n\n| column | type | |\n|---|---|---|\n")
        comments = _comments(schema)
        for field in schema:
            parts.append(
                f"| `{field.name}` | {_type(field.type)} | {comments.get((name, field.name), '')} |\n"
            )
    return "".join(parts)


def _type(kind: pa.DataType) -> str:
    return str(kind).replace("item: ", "").replace(" not null", "")


def _comments(schema: pa.Schema) -> dict[tuple[str, str], str]:
    """The comments that stand behind the fields in the schema's source."""
    import agentlightning.proto.schemas as source

    text = Path(source.__file__).read_text()
    comments = {}
    table = ""
    for line in text.splitlines():
        if ": Final = pa.schema(" in line:
            table = line.split(":")[0].lower()
        elif "pa.field(" in line and "#" in line and table:
            column = line.split('"')[1]
            comments[table, column] = line.split("#", 1)[1].strip().replace("|", "or")
    return comments


def engine() -> str:
    parts = [ENGINE, "\n| field | |\n|---|---|\n"]
    for name, rule in sorted(FIELDS.items()):
        said = rule
        if isinstance(rule, Only):
            said = " or ".join(f"`{json.dumps(value)}`" for value in rule.values) + " only"
        parts.append(f"| `{name}` | {said} |\n")
    return "".join(parts)


def gateway() -> str:
    parts = [GATEWAY]
    for api in (*APIS, Embeddings()):
        parts.append(f"\n### `POST /v1/{api.path}`\n\n| field | | |\n|---|---|---|\n")
        for name, rule in api.fields.items():
            fate = rule.fate
            if fate == "only":
                fate = "only " + " or ".join(f"`{json.dumps(value)}`" for value in rule.values)
            parts.append(f"| `{name}` | {fate} | {rule.says} |\n")
    return "".join(parts)


def control_api() -> str:
    parts = [CONTROL_API, "\n## Operations\n\n| request | for | |\n|---|---|---|\n"]
    for operation in OPERATIONS:
        who = ", ".join(("admin", *operation.roles))
        if operation.right is not None:
            who += f"; the rollout's token with the right `{operation.right}`"
        parts.append(f"| `{operation.method} {operation.path}` | {who} | {openapi.summary(operation)} |\n")
    done: set[type[BaseModel]] = set()
    for operation in OPERATIONS:
        if operation.asks is not None and operation.asks not in done:
            done.add(operation.asks)
            where = "parameter" if operation.method == "GET" else "field"
            parts.append(
                f"\n### `{operation.method} {operation.path}`\n\n| {where} | default | |\n|---|---|---|\n"
            )
            parts.extend(_fields("", operation.asks))
    return "".join(parts)


def _fields(prefix: str, model: type[BaseModel]) -> list[str]:
    rows = []
    for name, field in model.model_fields.items():
        default = "needed" if field.is_required() else f"`{json.dumps(field.default)}`"
        rows.append(f"| `{prefix}{name}` | {default} | {_words(field)} |\n")
        inner = [
            part
            for part in _parts(field.annotation)
            if isinstance(part, type) and issubclass(part, BaseModel)
        ]
        for part in inner:
            many = "[]" if "list" in str(field.annotation) else ""
            rows.extend(_fields(f"{prefix}{name}{many}.", part))
    return rows


def _parts(annotation: object) -> list[object]:
    """A type and those that it is made of."""
    return [annotation, *(part for inner in get_args(annotation) for part in _parts(inner))]


def main() -> int:
    pages = {
        HERE / "configuration.md": configuration(),
        HERE / "data.md": data(),
        HERE / "engine.md": engine(),
        HERE / "control-api.md": control_api(),
        HERE / "gateway.md": gateway(),
    }
    if sys.argv[1:] != ["--check"]:
        for path, text in pages.items():
            path.write_text(text)
        return 0
    stale = [path for path, text in pages.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        print(f"{path} is not current: run `python docs/generate.py`.", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
