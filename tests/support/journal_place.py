"""A journal, a data set, and the converter between them, without processes."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import spans

from agentlightning.collector.conversion import Converter
from agentlightning.collector.journal import Journal
from agentlightning.collector.records import JournalReader, Kind
from agentlightning.proto.dataset import Dataset, open_dataset
from agentlightning.proto.stores import Location


class Told:
    """What the converter says to the receiver."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any]) -> None:
        self.messages.append(message)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [message for message in self.messages if message["type"] == kind]


class Place:
    """A journal, a data set, and the converter between them."""

    def __init__(self, root: Path, data: Location | None = None) -> None:
        self.root = root
        self.data: Location = root / "data" if data is None else data
        self.told = Told()
        self.write()  # the journal exists
        self.restart()

    def write(self, *records: tuple[Kind, bytes]) -> None:
        async def append() -> None:
            journal = Journal(self.root / "journal", durability="os", segment_bytes=1 << 16)
            for kind, body in records:
                await journal.append(kind, body)
            journal.close()

        asyncio.run(append())

    def send(self, *pieces: spans.Piece) -> None:
        self.write((Kind.TRACES, spans.body(*pieces)))

    def seal(self, rollout_id: str, expected: int | None, attempt: int = 0) -> None:
        wanted = {"rollout_id": rollout_id, "attempt": attempt, "calls_expected": expected}
        self.write((Kind.SEAL, json.dumps({"attempts": [wanted]}).encode()))

    def restart(self, idle_timeout: float = 300.0) -> None:
        """As after kill -9: nothing of the old converter is left but files."""
        reader = JournalReader(self.root / "journal")
        self.converter = Converter(self.data, reader, self.told, idle_timeout=idle_timeout)

    def run(self, *, later: float = 0.0) -> None:
        """Until there is nothing more to do, `later` seconds from now."""
        while self.converter.step(time.time() + later):
            pass

    @property
    def dataset(self) -> Dataset:
        return open_dataset(self.data)

    def rows(self, table: str = "transitions") -> list[dict[str, Any]]:
        return self.dataset.table(table).to_pylist()  # type: ignore[no-any-return]

    def calls(self, rollout_id: str) -> int:
        return sum(row["rollout_id"] == rollout_id for row in self.rows())
