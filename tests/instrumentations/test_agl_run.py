"""`agl run`: the program's own life, traced."""

import os
import subprocess
import sys

from agentlightning.sdk.run import SITE, environment

RUN = [sys.executable, "-m", "agentlightning.cli", "run"]


def run(*arguments, code=0, **variables):
    done = subprocess.run(
        [*RUN, *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done


def test_the_program_keeps_its_arguments_its_exit_code_and_its_streams():
    program = "import sys; from agentlightning.sdk._instrument import is_instrumented as on; "
    program += "print(on(), sys.argv[1:]); print('e', file=sys.stderr); sys.exit(7)"
    done = run("--", sys.executable, "-c", program, "--frameworks", "-x", code=7)
    assert (done.stdout, done.stderr) == ("True ['--frameworks', '-x']\n", "e\n")


def test_options_become_variables_and_children_are_traced_too():
    program = "import os, subprocess, sys; print(os.environ['AGENTLIGHTNING_OPENAI'], flush=True); "
    program += "subprocess.run([sys.executable, '-c', 'from agentlightning.sdk._instrument import _state; "
    program += "print(_state.settings[0])'])"
    done = run("--endpoint", "http://10.0.0.9:4318", "--openai", "none", "--", sys.executable, "-c", program)
    assert done.stdout.splitlines() == ["none", "http://10.0.0.9:4318/v1/traces"]


def test_a_wrong_setting_is_said_and_the_program_runs_untraced():
    done = run("--openai", "openai", "--", sys.executable, "-c", "print('ran')")
    assert done.stdout == "ran\n"
    assert "untraced: There is no instrumentation 'openai' of openai." in done.stderr


def test_a_sitecustomize_of_the_users_still_runs(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.mine = 'seen'\n")
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = run("--", sys.executable, "-c", "print(mine)", PYTHONPATH=paths)
    assert done.stdout == "seen\n"


def test_the_folder_comes_first_and_once():
    once = environment({"PYTHONPATH": "a"})
    assert once["PYTHONPATH"] == f"{SITE}{os.pathsep}a"
    assert environment(once) == once


def test_mistakes_are_one_sentence():
    assert "There is no program to run" in run(code=2).stderr
    assert "There is no program 'no-such-thing'" in run("--", "no-such-thing", code=2).stderr
