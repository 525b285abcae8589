"""What `--agent` says: a Python function, or a command line with `{field}` for fields of the task's input."""

import json
import os
import re
import shlex
import shutil
import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentlightning.proto.errors import ConfigError, DataError, nearest

__all__ = ["CommandAgent", "FunctionAgent", "check_target", "parse_agent"]

TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True)
class FunctionAgent:
    """A function, sync or async, called with the fields of the task's input as keyword arguments."""

    target: str


@dataclass(frozen=True)
class CommandAgent:
    """A program; what it prints is its output."""

    words: tuple[str, ...]

    def argv(self, fields: Mapping[str, Any]) -> list[str]:
        """The command line for one task. Raises DataError if it names a field that the task has not."""
        return [_fill(word, fields) for word in self.words]

    def check(self, path: str | None, directory: Path) -> None:
        """Raise ConfigError if the program cannot be found."""
        program = self.words[0]
        if _names(program):
            return  # known only with a task
        if "/" in program:
            found = os.access(directory / program, os.X_OK)
        else:
            found = shutil.which(program, path=path) is not None
        if not found:
            raise ConfigError(
                f"--agent: the program {program!r} was not found, or may not be executed: give its path, or add its "
                "folder to PATH. (A Python function is written module:function.)"
            )


def parse_agent(text: str) -> FunctionAgent | CommandAgent:
    """Read `--agent`. Raises ConfigError with a sentence."""
    if TARGET.fullmatch(text.strip()):
        return FunctionAgent(text.strip())
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--agent {text!r} is not a command line: {error}.") from None
    if not words:
        raise ConfigError(
            "--agent is empty: give a command line such as 'python agent.py {question}', or module:function."
        )
    for word in words:
        _names(word)
    return CommandAgent(tuple(words))


def check_target(text: str, option: str) -> str:
    """Return `text` if it reads `module:function`, else raise ConfigError."""
    if not TARGET.fullmatch(text):
        raise ConfigError(f"{option} {text!r} is not a Python function: write it module:function.")
    return text


def _names(word: str) -> list[str]:
    """The fields that a word of the command line names."""
    try:
        parts = list(string.Formatter().parse(word))
    except ValueError as error:
        raise ConfigError(_bad_braces(word, str(error))) from None
    names = []
    for _, name, form, conversion in parts:
        if name is not None:
            if form or conversion or not name.isidentifier():
                raise ConfigError(_bad_braces(word, f"{{{name}}} is not the name of a field"))
            names.append(name)
    return names


def _bad_braces(word: str, problem: str) -> str:
    return (
        f"--agent: in {word!r}, {problem}: write {{field}} for a field of the task, and {{{{ }}}} for braces."
    )


def _fill(word: str, fields: Mapping[str, Any]) -> str:
    filled = ""
    for text, name, _, _ in string.Formatter().parse(word):
        filled += text
        if name is None:
            continue
        if name not in fields:
            raise DataError(
                f"The command line names {{{name}}}, which the task's input has not.{nearest(name, fields)}"
            )
        value = fields[name]
        filled += value if isinstance(value, str) else json.dumps(value)
    if "\0" in filled:
        raise DataError(f"The task's input has a zero byte in {word!r}, which no command line can hold.")
    return filled
