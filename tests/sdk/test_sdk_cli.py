"""`agl` finds commands, imports none that was not asked for, and answers mistakes with one sentence."""

import json
import socket

import pytest

from agentlightning import cli
from agentlightning.sdk import doctor


def test_help_names_every_command_in_a_line_each(capsys):
    for arguments in ([], ["--help"], ["-h"]):
        assert cli.main(arguments) == 0
        lines = capsys.readouterr().out.splitlines()
        for name in (
            "quickstart",
            "train",
            "engine",
            "collector",
            "convert",
            "inspect",
            "gateway",
            "controller",
            "doctor",
        ):
            assert sum(line.strip().startswith(name + " ") for line in lines) == 1


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("agl 2.")


def test_a_misspelt_command_names_the_nearest(capsys):
    assert cli.main(["colector", "--port", "1"]) == 2
    assert "Did you mean 'collector'?" in capsys.readouterr().err
    assert cli.main(["--colour"]) == 2
    assert "no option '--colour'" in capsys.readouterr().err


@pytest.mark.parametrize("when", ["import", "call"])
def test_a_missing_extra_is_named(script, when):
    needs = "import pyarrow.parquet" if when == "import" else "pass"
    done = script(
        f"""
import sys, types
sys.modules["pyarrow"] = None   # as if it were not installed
from agentlightning import cli
source = {needs!r} + "\\ndef main(argv):\\n    import pyarrow\\n"
open(sys.path[0] + "/component.py", "w").write(source)
cli._COMMANDS["convert"] = cli._Command("component:main", "collector", "")
sys.exit(cli.main(["convert", "x"]))
""",
        code=2,
    )
    assert done.stderr == (
        "agl: error: `agl convert` needs the package 'pyarrow'. Run: pip install 'agentlightning[collector]'\n"
    )


def test_a_component_that_is_not_there_is_no_traceback(monkeypatch, capsys):
    monkeypatch.setitem(
        cli._COMMANDS, "convert", cli._Command("agentlightning.nothing.cli:main", "collector", "")
    )
    assert cli.main(["convert"]) == 2
    assert "`agl convert` is not part of this installation" in capsys.readouterr().err


def test_a_fault_of_the_users_own_module_is_not_called_a_missing_extra(monkeypatch):
    def fake(arguments: list[str]) -> int:
        import a_module_of_the_user  # noqa: F401

        return 0

    monkeypatch.setattr(doctor, "main", fake)
    with pytest.raises(ModuleNotFoundError, match="a_module_of_the_user"):
        cli.main(["doctor"])


def test_commands_run_and_their_exit_code_is_passed_on(monkeypatch, capsys):
    seen: list[list[str]] = []

    def fake(arguments: list[str]) -> int:
        seen.append(arguments)
        return 7

    monkeypatch.setattr(doctor, "main", fake)
    assert cli.main(["doctor", "--json"]) == 7
    assert seen == [["--json"]]


def test_the_doctor_examines_and_changes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = doctor.main(["--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == (0 if report["ok"] else 1)
    found = {finding["what"]: finding for finding in report["findings"]}
    for what in ("Python", "machine", "memory", "agentlightning", "extra [trainer]", "torch", "loopback", "processes", "disk latency", "disk room", "clock"):  # fmt: skip
        assert found[what]["status"] in ("ok", "warn", "fail")
    assert all(finding["remedy"] for finding in report["findings"] if finding["status"] != "ok")
    assert list(tmp_path.iterdir()) == []


def test_the_doctor_sees_a_taken_port_and_an_untested_version(monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(doctor, "PORTS", {"gateway": port})
        monkeypatch.setattr(doctor, "TESTED", {"openai": ((99,), (100,))})
        assert doctor.main([]) == 0
        out = capsys.readouterr().out
    assert f"in use: {port} (gateway)" in out
    assert "pip install 'openai>=99,<100'" in out


def test_a_failing_check_makes_exit_code_one(monkeypatch, capsys):
    monkeypatch.setattr(
        doctor, "_clock", lambda: doctor.Finding("clock", "fail", "says it is 1970", "Set the clock.")
    )

    def _memory() -> doctor.Finding:
        raise OSError("odd machine")

    monkeypatch.setattr(doctor, "_memory", _memory)
    assert doctor.main([]) == 1
    out = capsys.readouterr().out
    assert "FAIL  clock: says it is 1970\n      → Set the clock." in out
    assert "warn  memory: could not be examined: OSError('odd machine')" in out


def test_the_installed_command_runs(script):
    done = script(
        "import subprocess, sys, pathlib\n"
        "agl = pathlib.Path(sys.executable).with_name('agl')\n"
        "sys.exit(subprocess.run([agl, 'nothing']).returncode)\n",
        code=2,
    )
    assert "Traceback" not in done.stderr
