"""What a person sees while a run goes on: a progress bar, and one line per step.

On a terminal the bars move; in a log file only the lines appear.
"""

from typing import Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

__all__ = ["Console"]

BAR = 20
"""Characters that stand for a reward of 1."""

SHOWN_PHASES = {"rollouts": "sample", "read": "read", "update": "update", "publish": "publish"}
"""Of a step's seconds, and how they are called."""


class Console:
    """Prints progress. Use as a context manager, so that the bars are cleared at the end."""

    def __init__(self) -> None:
        self._out = RichConsole(highlight=False, soft_wrap=True)
        self._progress = Progress(
            TextColumn("{task.description:<16}"),
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._out,
            transient=True,
            disable=not self._out.is_terminal,
        )
        self._steps: TaskID | None = None
        self._rollouts: TaskID | None = None
        self._total = 0

    def __enter__(self) -> "Console":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        self._out.print(text, markup=False)

    def begin(self, total: int, *, done: int) -> None:
        """Training begins, or goes on after `done` steps."""
        self._total = total
        if done:
            self.say(f"Going on after step {done} of {total}.")
        self._steps = self._progress.add_task("training", total=total, completed=done)

    def rollouts(self, what: str, total: int) -> None:
        """`total` rollouts have been asked for."""
        if self._rollouts is not None:
            self._progress.remove_task(self._rollouts)
        self._rollouts = self._progress.add_task(what, total=total)

    def rollout(self, row: dict[str, Any]) -> None:
        """One of them has ended."""
        if self._rollouts is not None:
            self._progress.advance(self._rollouts)

    def event(self, event: dict[str, Any]) -> None:
        """Listens to a run's metrics: steps and alarms are printed as they come."""
        if event["event"] == "step":
            self.step(event)
        elif event["event"] == "alarm":
            self.say(f"ALARM  {event['text']}")

    def step(self, record: dict[str, Any]) -> None:
        if self._steps is not None:
            self._progress.update(self._steps, completed=record["step"])
        groups, update, reward = record["groups"], record["update"], record["reward"]
        lost = sum(record["counters"].values())
        parts = [
            f"step {record['step']:>3}/{self._total}",
            f"reward {_number(reward)} {_bar(reward)}",
            f"{record['rollouts']} rollouts, {groups['informative']}/{groups['sampled']} groups with signal",
            f"loss {update['loss']:.3f}, entropy {update['entropy']:.2f}",
            ", ".join(
                f"{word} {record['seconds'][name]:.1f} s"
                for name, word in SHOWN_PHASES.items()
                if name in record["seconds"]
            ),
        ]
        self.say("  ".join(parts) + (f"  ({lost} counted, see the report)" if lost else ""))

    def evaluation(self, record: dict[str, Any]) -> None:
        when = "before training" if record["step"] == 0 else f"after step {record['step']}"
        self.say(
            f"held-out tasks {when}: reward {record['mean']:.3f}, 95 % interval "
            f"[{record['low']:.3f}, {record['high']:.3f}] over {record['n']} rollouts ({record['seconds']:.1f} s)"
        )


def _number(value: float | None) -> str:
    return "  –  " if value is None else f"{value:.3f}"


def _bar(value: float | None) -> str:
    filled = round(BAR * min(max(value or 0.0, 0.0), 1.0))
    return "█" * filled + "·" * (BAR - filled)
