"""Peak memory by phase: what decides whether a batch fits.

On a GPU the bytes that torch had allocated on it; on a CPU the resident set of this process, of which Linux keeps the
peak and lets it be reset. Where it does not let us, the peak is that of the process so far.
"""

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

import torch

__all__ = ["PeakMemory"]

MIB = 1 << 20
CLEAR, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
RESET_PEAK = "5"  # man 5 proc: resets the peak resident set size


class PeakMemory:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._peaks: dict[str, int] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure what is done within; of phases that repeat, the highest counts."""
        self._reset()
        try:
            yield
        finally:
            self._peaks[name] = max(self._peaks.get(name, 0), self._read())

    def take(self) -> dict[str, float]:
        """MiB by phase since the last call."""
        peaks, self._peaks = self._peaks, {}
        return {name: peak / MIB for name, peak in peaks.items()}

    def _reset(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            with contextlib.suppress(OSError):
                CLEAR.write_text(RESET_PEAK)

    def _read(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        with contextlib.suppress(OSError):
            for line in STATUS.read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
