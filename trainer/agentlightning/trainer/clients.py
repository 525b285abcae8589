"""The trainer's ends of the wire: the gateway's control API, the transition service, the engine.

Each call is retried while the other side is unreachable, because every request is idempotent; what
another component refuses becomes a ServiceError with its sentence.
"""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import aiohttp
import grpc
import grpc.aio
import orjson
import pyarrow as pa
import pyarrow.ipc

from agentlightning.proto import transitions_pb2 as pb
from agentlightning.proto.errors import Conflict, ServiceError, Unavailable
from agentlightning.proto.schemas import TABLES, conform
from agentlightning.proto.transitions_pb2_grpc import TransitionsStub

__all__ = ["EngineClient", "GatewayClient", "TransitionClient"]

PATIENCE = 60.0
"""Seconds to wait for a component that is being restarted."""


class JsonClient:
    """JSON over HTTP with a bearer token."""

    def __init__(self, url: str, *, token: str | None, what: str) -> None:
        self.url = url.rstrip("/")
        self.what = what
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self._session = aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=None))

    async def close(self) -> None:
        await self._session.close()

    async def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        timeout: float = 60.0,
        patience: float = PATIENCE,
    ) -> Any:
        """Send a request until it is answered, and return the answer's JSON."""
        deadline = asyncio.get_running_loop().time() + patience
        delay = 0.05
        while True:
            try:
                return await self._once(method, path, body, timeout)
            except Unavailable:
                if asyncio.get_running_loop().time() + delay > deadline:
                    raise
            await asyncio.sleep(delay)
            delay = min(2 * delay, 2.0)

    async def _once(self, method: str, path: str, body: object, timeout: float) -> Any:
        data = None if body is None else orjson.dumps(body)
        headers = {"content-type": "application/json"} if data is not None else {}
        try:
            async with self._session.request(
                method,
                self.url + path,
                data=data,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=timeout),
            ) as response:
                text = await response.read()
                status = response.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unavailable(f"The {self.what} at {self.url} cannot be reached: {error!r}.") from None
        if status < 400:
            return orjson.loads(text) if text else None
        message = f"The {self.what} refused {method} {path} ({status}): {_message(text)}"
        if status == 409:
            raise Conflict(message, status=status)
        if status in (429, 502, 503, 504):
            raise Unavailable(message, status=status)
        raise ServiceError(message, status=status)


class GatewayClient(JsonClient):
    """The control API, as trainer and (for engines) administrator."""

    def __init__(self, url: str, *, tokens: Mapping[str, str]) -> None:
        super().__init__(url, token=tokens.get("trainer"), what="gateway")
        self._admin = JsonClient(url, token=tokens.get("admin"), what="gateway")

    async def close(self) -> None:
        await super().close()
        await self._admin.close()

    async def enqueue(self, rollouts: Sequence[Mapping[str, Any]]) -> None:
        await self.call("POST", "/api/rollouts", {"rollouts": list(rollouts)})

    async def query(self, rollout_ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Rows of the ledger by rollout id."""
        answer = await self.call("POST", "/api/rollouts/query", {"rollout_ids": list(rollout_ids)})
        return {row["rollout_id"]: row for row in answer["rollouts"]}

    async def peek(self, rollout_ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """As `query`, without patience."""
        body = {"rollout_ids": list(rollout_ids)}
        answer = await self.call("POST", "/api/rollouts/query", body, patience=0)
        return {row["rollout_id"]: row for row in answer["rollouts"]}

    async def policies(self) -> list[dict[str, Any]]:
        """The policies and what holds them, without patience."""
        answer = await self.call("GET", "/api/policies", patience=0)
        return list(answer["policies"])

    async def cancel(self, rollout_ids: Sequence[str]) -> None:
        await self.call("POST", "/api/rollouts/cancel", {"rollout_ids": list(rollout_ids)})

    async def follow(self, run_id: str, cursor: int = 0) -> AsyncIterator[dict[str, Any]]:
        """Rollouts of a run as they become terminal; reconnects, and never ends by itself."""
        deadline = None
        while True:
            try:
                path = f"/api/rollouts/follow?run_id={run_id}&cursor={cursor}"
                async with self._session.get(
                    self.url + path, timeout=aiohttp.ClientTimeout(total=None, sock_read=60.0)
                ) as response:
                    if response.status != 200:
                        raise ServiceError(
                            f"The gateway refused to report rollouts ({response.status}): "
                            f"{_message(await response.read())}",
                            status=response.status,
                        )
                    deadline = None
                    async for line in response.content:
                        if line.startswith(b"data:"):
                            row = orjson.loads(line[5:])
                            cursor = row["change"]
                            yield row
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                now = asyncio.get_running_loop().time()
                deadline = deadline or now + PATIENCE
                if now > deadline:
                    raise Unavailable(f"The gateway at {self.url} cannot be reached: {error!r}.") from None
            await asyncio.sleep(0.2)

    async def set_policy(self, policy: str, model: str, sampling: Mapping[str, Any]) -> None:
        body = {"policy": policy, "base_model": model, "sampling": dict(sampling)}
        await self._admin.call("POST", "/api/policies", body)

    async def register_engine(
        self, engine_id: str, policy: str, url: str, model: str, token_file: str | None
    ) -> None:
        body = {
            "engine_id": engine_id,
            "policy": policy,
            "url": url,
            "model": model,
            "token_file": token_file,
        }
        await self._admin.call("POST", "/api/engines", body)

    async def hold(self, policy: str, *, ttl_s: float, drain_s: float) -> dict[str, Any]:
        body = {"policy": policy, "ttl_s": ttl_s, "drain_s": drain_s}
        return await self.call("POST", "/api/hold", body, timeout=drain_s + 30)

    async def release(self, policy: str, hold_id: str, version: int) -> None:
        await self.call("POST", "/api/release", {"policy": policy, "hold_id": hold_id, "version": version})

    async def stats(self, run_id: str) -> dict[str, int]:
        answer = await self.call("GET", f"/api/stats?run_id={run_id}")
        return dict(answer["counters"])


class EngineClient(JsonClient):
    """An engine whose weights can be replaced."""

    def __init__(self, url: str, *, token: str | None) -> None:
        super().__init__(url, token=token, what="engine")

    async def load_weights(self, path: str, version: int) -> None:
        await self.call("POST", "/weights", {"path": path, "version": version}, timeout=300)

    async def score(self, token_ids: Sequence[Sequence[int]]) -> tuple[int, list[list[float | None]]]:
        """Weight version, and each token's log-probability given those before it (None for the first)."""
        answer = await self.call(
            "POST", "/score", {"token_ids": [list(ids) for ids in token_ids]}, timeout=300
        )
        return answer["version"], answer["logprobs"]

    async def pause(self, ttl_s: float) -> None:
        """Sample nothing until `resume`, at most so many seconds; answers in flight stay where they are."""
        await self.call("POST", "/pause", {"ttl_s": ttl_s})

    async def resume(self) -> None:
        await self.call("POST", "/resume", {})

    async def health(self, *, patience: float = PATIENCE) -> dict[str, Any]:
        return await self.call("GET", "/health", patience=patience)


class TransitionClient:
    """The collector's transition service."""

    def __init__(self, address: str, *, token: str | None) -> None:
        self._address = address
        self._metadata = [("authorization", f"Bearer {token}")] if token else []
        limit = [("grpc.max_receive_message_length", -1)]  # one row may hold a very long conversation
        self._channel = grpc.aio.insecure_channel(address, options=limit)
        self._stub = TransitionsStub(self._channel)

    async def close(self) -> None:
        await self._channel.close()

    async def seal(self, expected: Mapping[tuple[str, int], int], *, timeout_s: float) -> pb.SealResponse:
        """Make attempts final once `expected` calls of each are stored."""
        attempts = [
            pb.Attempt(rollout_id=rollout, attempt=attempt, calls_expected=calls)
            for (rollout, attempt), calls in expected.items()
        ]
        request = pb.SealRequest(attempts=attempts, timeout_s=timeout_s)
        return await self._unary("Seal", request, timeout_s + 30)

    async def fetch(self, table: str, attempts: Sequence[tuple[str, int]]) -> pa.Table:
        """Rows of a table, from Parquet, newest generation."""
        request = pb.FetchRequest(
            table=table, attempts=[pb.Attempt(rollout_id=r, attempt=a) for r, a in attempts]
        )
        batches: list[pa.RecordBatch] = []
        try:
            async for message in self._stub.Fetch(
                request, metadata=self._metadata, wait_for_ready=True, timeout=300
            ):
                with pyarrow.ipc.open_stream(io.BytesIO(message.ipc_stream)) as reader:
                    batches.extend(reader)
        except grpc.aio.AioRpcError as error:
            raise self._error("Fetch", error) from None
        if not batches:
            return conform(table, TABLES[table].empty_table())
        return conform(table, pa.Table.from_batches(batches))

    async def stats(self) -> dict[str, int]:
        response = await self._unary("Stats", pb.StatsRequest(), 30)
        return dict(response.counters)

    async def _unary(self, name: str, request: Any, timeout: float) -> Any:
        deadline = asyncio.get_running_loop().time() + PATIENCE
        while True:
            try:
                method = getattr(self._stub, name)
                return await method(request, metadata=self._metadata, wait_for_ready=True, timeout=timeout)
            except grpc.aio.AioRpcError as error:
                again = error.code() == grpc.StatusCode.UNAVAILABLE
                if not again or asyncio.get_running_loop().time() > deadline:
                    raise self._error(name, error) from None
            await asyncio.sleep(0.2)

    def _error(self, name: str, error: grpc.aio.AioRpcError) -> ServiceError:
        kind = Unavailable if error.code() == grpc.StatusCode.UNAVAILABLE else ServiceError
        return kind(
            f"The collector at {self._address} failed {name}: {error.code().name}: {error.details()}."
        )


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
