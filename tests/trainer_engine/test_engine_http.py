"""The engine as its clients see it: over HTTP, by the openai package and by hand."""

import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from engine_harness import SCRIPT, Served
from safetensors.torch import load_file, save_file

Serve = Callable[..., Served]

BODY = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "What is the sum?"}],
    "seed": 3,
    "max_tokens": 20,
}
EXACT = BODY | {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
    }
]


def post(served: Served, path: str, body: Any, **options: Any) -> httpx.Response:
    return httpx.post(served.url + path, json=body, timeout=60, **options)


def chat(served: Served, **fields: Any) -> dict[str, Any]:
    response = post(served, "/v1/chat/completions", EXACT | fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def chunks_of(served: Served, **fields: Any) -> list[dict[str, Any]]:
    body = EXACT | {"stream": True, "stream_options": {"include_usage": True}} | fields
    with httpx.stream("POST", served.url + "/v1/chat/completions", json=body, timeout=60) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def client_of(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)


def idle(served: Served) -> bool:
    scheduler = served.engine.scheduler
    return scheduler.running == 0 and scheduler.waiting == 0


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@pytest.fixture
def tiny(serve: Serve, tiny_folder: Path) -> Served:
    return serve(tiny_folder)


@pytest.fixture
def scripted(serve: Serve, scripted_folder: Path) -> Served:
    return serve(scripted_folder)


@pytest.mark.parametrize(
    "fields", [{}, {"n": 3}, {"stop": ["e", "ab"]}, {"temperature": 0.5, "max_tokens": 60}]
)
def test_streamed_equals_unstreamed(tiny: Served, fields: dict[str, Any]) -> None:
    plain, chunks = chat(tiny, **fields), chunks_of(tiny, **fields)
    assert chunks[0]["prompt_token_ids"] == plain["prompt_token_ids"]
    assert chunks[0]["model_version"] == plain["model_version"] == 0
    assert chunks[-1]["usage"] | {"prompt_tokens_details": None} == plain["usage"] | {
        "prompt_tokens_details": None
    }
    for choice in plain["choices"]:
        told = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["delta"].get("content", "") for c in told) == choice["message"]["content"]
        assert [i for c in told for i in c["token_ids"]] == choice["token_ids"]
        streamed = [entry for c in told for entry in c["logprobs"]["content"]]
        assert [e["token"] for e in streamed] == [e["token"] for e in choice["logprobs"]["content"]]
        assert [e["logprob"] for e in streamed] == pytest.approx(
            [e["logprob"] for e in choice["logprobs"]["content"]], abs=1e-5
        )
        assert [c["finish_reason"] for c in told] == [None] * (len(told) - 1) + [choice["finish_reason"]]
        assert len(streamed) == len(choice["token_ids"])
    assert len({tuple(c["token_ids"]) for c in plain["choices"]}) == len(plain["choices"])


def test_ids_and_logprobs_come_only_when_asked_for(tiny: Served) -> None:
    plain = post(tiny, "/v1/chat/completions", BODY).json()
    assert "prompt_token_ids" not in plain
    assert "token_ids" not in plain["choices"][0]
    assert plain["choices"][0]["logprobs"] is None


def test_the_end_token_is_among_the_ids_and_not_in_the_text(scripted: Served, tokenizer: Any) -> None:
    choice = chat(scripted, temperature=0)["choices"][0]
    assert choice["token_ids"] == [*tokenizer.convert_tokens_to_ids(SCRIPT), tokenizer.eos_token_id]
    assert choice["message"]["content"] == "".join(SCRIPT)
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"]["content"][-1]["token"] == "<|im_end|>"


def test_a_stop_string_ends_the_answer_before_it(scripted: Served) -> None:
    choice = chat(scripted, temperature=0, stop='"b"')["choices"][0]
    assert choice["message"]["content"] == "".join(SCRIPT[:2]) + '{"a":  1, '
    assert choice["finish_reason"] == "stop"
    assert len(choice["token_ids"]) == 3


def test_a_tool_call_is_parsed_letter_by_letter(scripted: Served) -> None:
    choice = chat(scripted, temperature=0, tools=TOOLS)["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": SCRIPT[2]}
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    streamed = [c for chunk in chunks_of(scripted, temperature=0, tools=TOOLS) for c in chunk["choices"]]
    (delta,) = [call for c in streamed for call in c["delta"].get("tool_calls", [])]
    assert (delta["index"], delta["function"]) == (0, call["function"])
    assert delta["id"] != call["id"]
    assert streamed[-1]["finish_reason"] == "tool_calls"
    assert [i for c in streamed for i in c["token_ids"]] == choice["token_ids"]
    assert not any(c["delta"].get("content") for c in streamed)


def test_without_leave_to_call_a_call_is_text(scripted: Served) -> None:
    choice = chat(scripted, temperature=0, tools=TOOLS, tool_choice="none")["choices"][0]
    assert choice["message"]["content"] == "".join(SCRIPT)
    assert choice["finish_reason"] == "stop"


def test_a_truncated_call_stays_content(scripted: Served) -> None:
    choice = chat(scripted, temperature=0, tools=TOOLS, max_tokens=3)["choices"][0]
    assert choice["message"]["content"] == "".join(SCRIPT[:3])
    assert choice["finish_reason"] == "length"


def test_the_openai_client_works(tiny: Served, scripted: Served) -> None:
    client: Any = client_of(tiny)
    arguments: Any = {
        "model": "tiny",
        "messages": BODY["messages"],
        "seed": 3,
        "max_tokens": 20,
        "logprobs": True,
    }
    plain = client.chat.completions.create(**arguments)
    pieces = list(client.chat.completions.create(**arguments, stream=True))
    assert "".join(p.choices[0].delta.content or "" for p in pieces) == plain.choices[0].message.content
    assert plain.usage is not None
    assert plain.usage.completion_tokens == len(plain.choices[0].logprobs.content) == 20
    assert [model.id for model in client.models.list()] == ["tiny"]
    called: Any = client_of(scripted).chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "add"}], tools=TOOLS, temperature=0
    )
    assert called.choices[0].message.tool_calls[0].function.name == "add"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**arguments | {"model": "gpt-5"})
    with pytest.raises(openai.BadRequestError, match="min_p"):
        client.chat.completions.create(**arguments | {"extra_body": {"min_p": 0.1}})


def test_thirty_two_clients_at_once_get_what_each_gets_alone(tiny: Served) -> None:
    def ask(i: int) -> list[int]:
        question = [{"role": "user", "content": f"Question {i % 4}: what is the sum?"}]
        choice = chat(tiny, messages=question, seed=i, max_tokens=10 + i)["choices"][0]
        ids: list[int] = choice["token_ids"]
        return ids

    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(ask, range(32)))
    assert together == [ask(i) for i in range(32)]
    until(lambda: idle(tiny))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_place(tiny: Served, stream: bool) -> None:
    body = json.dumps(BODY | {"max_tokens": 400, "ignore_eos": True, "stream": stream, "n": 2}).encode()
    host, port = tiny.url.removeprefix("http://").split(":")
    scheduler = tiny.engine.scheduler
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s"
            % (len(body), body)
        )
        until(lambda: scheduler.running == 2)
    until(lambda: scheduler.running == 0)
    assert scheduler.counts["cancelled"] == 2
    assert scheduler.counts["sampled_tokens"] < 800
    assert all(node.locks == 0 for node in scheduler.runner.tree._nodes())
    assert not list(scheduler.runner.arenas)


def test_too_many_requests_are_asked_to_come_back(serve: Serve, tiny_folder: Path) -> None:
    served = serve(tiny_folder, max_batch=1, max_waiting=1)
    response = post(served, "/v1/chat/completions", BODY | {"n": 3})
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert "overloaded" in response.json()["error"]["message"]
    assert chat(served)["choices"][0]["token_ids"]


def test_new_weights_are_served_at_once_and_bad_ones_refused(
    tiny: Served, other_folder: Path, tmp_path: Path
) -> None:
    before = chat(tiny, temperature=0)["choices"][0]["token_ids"]
    weights = load_file(other_folder / "model.safetensors")
    names = sorted(weights)
    bad = {
        "missing, such as": {name: weights[name] for name in names[1:]},
        "unknown, such as extra": weights | {"extra": torch.zeros(1)},
        f"{names[0]} has shape [3, 3]": weights | {names[0]: torch.zeros(3, 3)},
        "NaN": weights | {names[0]: weights[names[0]] * torch.nan},
    }
    for i, (said, tensors) in enumerate(bad.items()):
        folder = tmp_path / str(i)
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        refused = post(tiny, "/weights", {"path": str(folder), "version": 1})
        assert refused.status_code == 400
        assert said in refused.json()["error"]["message"]
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "model.safetensors").write_bytes(b"not safetensors at all")
    for path in (tmp_path / "nowhere", tmp_path / "torn", tmp_path):
        assert post(tiny, "/weights", {"path": str(path), "version": 1}).status_code == 400
    bodies: list[Any] = [
        {"path": str(other_folder)},
        {"path": str(other_folder), "version": -1},
        [],
        {"version": 1},
    ]
    for body in bodies:
        assert post(tiny, "/weights", body).status_code == 400
    same = chat(tiny, temperature=0)
    assert (same["choices"][0]["token_ids"], same["model_version"]) == (before, 0)

    published = post(tiny, "/weights", {"path": str(other_folder), "version": 5}).json()
    assert published["version"] == 5
    after = chat(tiny, temperature=0)
    assert after["model_version"] == 5
    assert after["choices"][0]["token_ids"] != before
    assert "model_versions" not in after["choices"][0]
    assert httpx.get(tiny.url + "/v1/models").json()["data"][0]["model_version"] == 5


def test_a_swap_in_mid_stream_is_told_in_the_last_chunk(tiny: Served, other_folder: Path) -> None:
    published = threading.Event()
    chunks: list[dict[str, Any]] = []
    body = EXACT | {"stream": True, "max_tokens": 300, "ignore_eos": True}
    with httpx.stream("POST", tiny.url + "/v1/chat/completions", json=body, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunks.append(json.loads(line.removeprefix("data: ")))
                if not published.is_set():
                    assert (
                        post(tiny, "/weights", {"path": str(other_folder), "version": 4}).status_code == 200
                    )
                    published.set()
    last = chunks[-1]["choices"][0]
    start, first, at, then = last["model_versions"]
    assert (start, first, then) == (0, 0, 4)
    assert 0 < at < 300
    assert sum(len(chunk["choices"][0]["token_ids"]) for chunk in chunks) == 300


def test_a_pause_keeps_answers_in_flight_and_they_go_on_with_new_weights(
    tiny: Served, other_folder: Path
) -> None:
    def sampled() -> int:
        count: int = httpx.get(tiny.url + "/health").json()["counters"]["sampled_tokens"]
        return count

    chunks: list[dict[str, Any]] = []
    body = EXACT | {"stream": True, "max_tokens": 300, "ignore_eos": True}
    with httpx.stream("POST", tiny.url + "/v1/chat/completions", json=body, timeout=60) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunks.append(json.loads(line.removeprefix("data: ")))
            if len(chunks) == 2:
                assert post(tiny, "/pause", {"ttl_s": 60}).json() == {"paused": True, "running": 1}
                before = sampled()
                assert post(tiny, "/score", {"token_ids": [[5, 6, 7]]}).json()["version"] == 0
                assert post(tiny, "/weights", {"path": str(other_folder), "version": 4}).status_code == 200
                assert sampled() == before
                assert httpx.get(tiny.url + "/health").json()["paused"]
                assert post(tiny, "/resume", {}).json()["paused"] is False
    last = chunks[-1]["choices"][0]
    assert last["model_versions"][0:2] == [0, 0]
    assert last["model_versions"][3] == 4
    assert sum(len(chunk["choices"][0]["token_ids"]) for chunk in chunks) == 300


def test_a_pause_ends_by_itself(tiny: Served) -> None:
    assert post(tiny, "/pause", {"ttl_s": 0.2}).status_code == 200
    assert chat(tiny)["choices"][0]["token_ids"]  # waits, and is answered
    for bad in ({}, {"ttl_s": 0}, {"ttl_s": "x"}, []):
        assert post(tiny, "/pause", bad).status_code == 400


def test_score_gives_the_logprobs_that_sampling_gave(tiny: Served) -> None:
    answer = chat(tiny, temperature=0.8, max_tokens=30)
    ids = answer["prompt_token_ids"] + answer["choices"][0]["token_ids"]
    scored = post(tiny, "/score", {"token_ids": [ids, ids[:1]], "temperature": 0.8}).json()
    assert scored["version"] == 0
    assert scored["logprobs"][0][0] is None
    assert scored["logprobs"][1] == [None]
    sampled = [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]]
    assert scored["logprobs"][0][len(answer["prompt_token_ids"]) :] == pytest.approx(sampled, abs=1e-4)
    wrong: list[Any] = [[[]], [[10**6]], [[1] * 1000], "x"]
    for bad in [*({"token_ids": ids} for ids in wrong), 3]:
        assert post(tiny, "/score", bad).status_code == 400


def test_with_a_token_only_health_is_open(serve: Serve, tiny_folder: Path) -> None:
    served = serve(tiny_folder, token="secret")
    assert httpx.get(served.url + "/health").json()["status"] == "ok"
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
        refused = httpx.get(served.url + "/v1/models", headers=headers)
        assert refused.status_code == 401
        assert "secret" not in refused.text
    assert httpx.get(served.url + "/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200


@pytest.mark.parametrize(
    ("content", "status", "said"),
    [
        (b"{not json", 400, "not JSON"),
        (b"[1]", 400, "JSON object"),
        (b"", 400, "not JSON"),
        (b"\xff\xfe", 400, "not JSON"),
        (b'{"model": "tiny"}', 400, "messages"),
        (b'"' + b"x" * (33 << 20) + b'"', 413, "larger than 32 MiB"),
    ],
)
def test_bad_bodies_get_a_sentence(tiny: Served, content: bytes, status: int, said: str) -> None:
    response = httpx.post(tiny.url + "/v1/chat/completions", content=content)
    assert response.status_code == status
    assert said in response.json()["error"]["message"]
    assert httpx.get(tiny.url + "/nowhere").json()["error"]["message"] == "There is no /nowhere here."
    assert httpx.get(tiny.url + "/weights").status_code == 405


def test_a_dying_engine_thread_ends_the_process(serve: Serve, tiny_folder: Path) -> None:
    died = threading.Event()
    served = serve(tiny_folder, on_death=died.set)
    served.engine.scheduler.runner.model = None

    def ask() -> None:
        with pytest.raises(httpx.HTTPError):
            httpx.post(served.url + "/v1/chat/completions", json=BODY, timeout=2)

    asking = threading.Thread(target=ask)
    asking.start()
    assert died.wait(10)
    asking.join()
