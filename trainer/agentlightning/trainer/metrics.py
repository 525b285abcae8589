"""A run's measurements: one JSON object per line, in `metrics.jsonl`.

Events: `evaluate`, `step`, `alarm`, `end`. On resume, events of steps that the checkpoint does not hold
are removed: those steps are done again. A step may raise alarms: each once in a run.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from agentlightning.trainer.alarms import new_alarms

__all__ = ["Metrics"]


class Metrics:
    """Appends events, and remembers them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events: list[dict[str, Any]] = list(_read(path))
        self._listeners: list[Callable[[dict[str, Any]], None]] = []

    def listen(self, listener: Callable[[dict[str, Any]], None]) -> None:
        """Call it with every event from now on."""
        self._listeners.append(listener)

    def rewind(self, step: int) -> None:
        """Forget what happened after `step` updates."""
        self.events = [
            event for event in self.events if event.get("step", 0) <= step and event["event"] != "end"
        ]
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(event) + "\n" for event in self.events))
        os.replace(temporary, self.path)

    def add(self, event: str, **values: Any) -> dict[str, Any]:
        record = {"event": event, **values}
        self.events.append(record)
        with open(self.path, "a") as file:
            file.write(json.dumps(record) + "\n")
        for listener in self._listeners:
            listener(record)
        if event == "step":
            for name, text in new_alarms(self.events).items():
                self.add("alarm", step=values["step"], alarm=name, text=text)
        return record

    def of(self, event: str) -> list[dict[str, Any]]:
        return [record for record in self.events if record["event"] == event]

    def evaluation(self, step: int) -> dict[str, Any] | None:
        """The evaluation after `step` updates, if it has been made."""
        return next((record for record in self.of("evaluate") if record["step"] == step), None)


def _read(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return  # a line that a crash cut short: nothing after it counts
