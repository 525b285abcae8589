from pathlib import Path

from agentlightning.trainer.metrics import Metrics


def test_events_are_read_back_and_a_line_cut_short_is_ignored(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.add("evaluate", step=0, mean=0.5)
    metrics.add("step", step=1)
    with open(metrics.path, "a") as file:
        file.write('{"event": "st')
    again = Metrics(metrics.path)
    assert again.events == metrics.events


def test_rewinding_forgets_later_steps_and_the_end_but_not_the_evaluation_of_that_step(
    tmp_path: Path,
) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    for event, step in [("evaluate", 0), ("step", 1), ("evaluate", 1), ("step", 2), ("end", 2)]:
        metrics.add(event, step=step)
    metrics.rewind(1)
    assert [(e["event"], e["step"]) for e in metrics.events] == [
        ("evaluate", 0),
        ("step", 1),
        ("evaluate", 1),
    ]
    assert Metrics(metrics.path).events == metrics.events
    assert metrics.evaluation(1) is not None
    assert metrics.evaluation(2) is None
