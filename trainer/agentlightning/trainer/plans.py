"""Plans: which groups a step is made of, written down before it is trained.

After a crash the steps since the last checkpoint are repeated from the same groups, whatever has ended meanwhile, and
so come out the same.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

__all__ = ["Plans"]


class Plans:
    """One small file a step."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, step: int) -> list[int] | None:
        """Numbers of the step's groups, if it had been decided on."""
        try:
            return [int(number) for number in json.loads(self._path(step).read_text())["groups"]]
        except FileNotFoundError:
            return None

    def write(self, step: int, groups: Sequence[int]) -> None:
        """Whole or not at all, and on disk when this returns."""
        self._folder.mkdir(parents=True, exist_ok=True)
        temporary = self._path(step).with_suffix(".tmp")
        with open(temporary, "w") as file:
            json.dump({"groups": list(groups)}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._path(step))

    def forget(self, step: int) -> None:
        """Remove the plans of all steps up to this one: no checkpoint is left to repeat them from."""
        for path in self._folder.glob("step-*.json"):
            if int(path.stem.removeprefix("step-")) <= step:
                path.unlink()

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step}.json"
