"""`agl inspect`: what is in a data set, and what was said in a rollout."""

import argparse
import json
import math
import shutil
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from agentlightning.collector import conversation
from agentlightning.collector.inspect_tokens import find_tokenizer, newest_attempt, token_document, token_text
from agentlightning.proto.dataset import Dataset, open_dataset
from agentlightning.proto.errors import ConfigError, DataError, nearest
from agentlightning.proto.process import run_main

__all__ = ["main", "rollout", "summary"]

DESCRIPTION = """\
Show a data set: rollouts by outcome, calls, tokens, rewards, weight versions, and every fidelity counter.
With --rollout, show one rollout call by call: who called, what the model saw, what it said, its tokens
and log-probabilities, and the rewards. With --tokens too, token by token, as the trainer used it: text,
what was trained, log-probabilities of sampler and trainer, advantage, weight version, and why each chain
of calls began.
"""
EXAMPLE = """\
example:
  agl inspect runs/demo/data
  agl inspect runs/demo --rollout ro-3f9c2a8e51d04b77
  agl inspect runs/demo --rollout ro-3f9c2a8e51d04b77 --tokens
  agl inspect runs/demo --json | jq .counters
"""
_QUANTILES: Final = (0.0, 0.25, 0.5, 0.75, 1.0)


def main(argv: list[str] | None = None) -> int:
    """The command. Returns its exit code."""
    return run_main(lambda: _main(argv))


def summary(dataset: Dataset, run_id: str | None = None) -> dict[str, Any]:
    """The data set in figures."""
    rollouts = dataset.table("rollouts", run_id=run_id)
    columns = [
        "rollout_id", "attempt", "policy", "model_version", "token_source", "error", "finish_reason",
        "agent", "source", "response_token_ids", "prompt_token_ids",
    ]  # fmt: skip
    calls = dataset.table("transitions", columns=columns)
    if run_id is not None:
        wanted = dataset.table("transitions", columns=["run_id"]).column("run_id")
        calls = calls.filter(pc.equal(wanted, run_id))
    outcomes = Counter(
        _outcome(state, cause)
        for state, cause in zip(
            rollouts.column("state").to_pylist(), rollouts.column("cause").to_pylist(), strict=True
        )
    )
    prompt, response = calls.column("prompt_token_ids"), calls.column("response_token_ids")
    document: dict[str, Any] = {
        "path": str(dataset.root),
        "commits": len(dataset.manifests),
        "attempts": len(rollouts),
        "rollouts": pc.count_distinct(rollouts.column("rollout_id")).as_py(),
        "outcomes": dict(sorted(outcomes.items())),
        "splits": _counts(rollouts, "split"),
        "rewards": _rewards(rollouts),
        "calls": {
            "all": len(calls),
            "failed": len(calls) - calls.column("error").null_count,
            "with_token_ids": len(calls) - response.null_count,
            "expected": pc.sum(rollouts.column("calls_expected")).as_py(),
            "stored": pc.sum(rollouts.column("calls_stored")).as_py() or 0,
            "by_policy": _counts(calls, "policy"),
            "by_agent": _counts(calls, "agent"),
            "by_finish_reason": _counts(calls, "finish_reason"),
            "by_source": _counts(calls, "source"),
        },
        "tokens": {
            "prompt": pc.sum(pc.list_value_length(prompt)).as_py() or 0,
            "response": pc.sum(pc.list_value_length(response)).as_py() or 0,
        },
        "versions": _counts(calls, "model_version"),
        "counters": dict(sorted(dataset.counters().items())),
    }
    samples = dataset.table(
        "samples",
        run_id=run_id,
        columns=["run_id", "reason", "mask", "step"] if run_id else ["reason", "mask", "step"],
    )
    if len(samples):
        trained = pc.sum(pc.cast(pc.list_flatten(samples.column("mask")), pa.int64())).as_py() or 0
        document["samples"] = {
            "all": len(samples),
            "steps": pc.count_distinct(samples.column("step")).as_py(),
            "by_reason": _counts(samples, "reason"),
            "tokens_trained": trained,
            "tokens_of_context": (pc.sum(pc.list_value_length(samples.column("mask"))).as_py() or 0)
            - trained,
        }
    return document


def rollout(dataset: Dataset, rollout_id: str, attempt: int | None = None) -> dict[str, Any]:
    """One attempt of a rollout, the newest if none is named, call by call. Raises DataError if it is not there."""
    attempts = sorted(number for name, number in dataset.attempts if name == rollout_id)
    if not attempts:
        known = {name for name, _ in dataset.attempts}
        hint = (
            nearest(rollout_id, known) if 0 < len(known) <= 20 else " Run `agl inspect DATA --list` for all."
        )
        raise DataError(f"{dataset.root} has no rollout {rollout_id!r}.{hint}")
    if attempt is None:
        attempt = attempts[-1]
    elif attempt not in attempts:
        raise DataError(
            f"Rollout {rollout_id} has no attempt {attempt}: it has {', '.join(map(str, attempts))}."
        )
    key = (rollout_id, attempt)
    row = _plain(dataset.table("rollouts", attempts=[key]).to_pylist()[-1])
    calls = [
        _call(call)
        for call in sorted(
            dataset.table("transitions", attempts=[key]).to_pylist(), key=lambda call: call["seq"]
        )
    ]
    samples = [
        {
            "step": sample["step"],
            "sample": sample["sample"],
            "reason": sample["reason"],
            "calls": sample["call_ids"],
            "tokens": len(sample["token_ids"]),
            "trained": sum(sample["mask"]),
        }
        for sample in dataset.table("samples", attempts=[key]).to_pylist()
    ]
    return {**row, "attempts": attempts, "calls": calls, "samples": samples}


def _main(argv: list[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="agl inspect",
        description=DESCRIPTION,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "data", metavar="DATA", help="a data set (a folder, or s3://…), or the directory of a run"
    )
    parser.add_argument("--rollout", metavar="ID", help="show this rollout, call by call")
    parser.add_argument(
        "--attempt", type=int, metavar="N", help="with --rollout: this attempt, not the newest"
    )
    parser.add_argument("--tokens", action="store_true", help="with --rollout: token by token")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="with --tokens: a tokenizer.json or its folder (default: the run's own, if it is there)",
    )
    parser.add_argument("--run", metavar="ID", help="only this run")
    parser.add_argument("--list", action="store_true", help="list the rollouts, one per line")
    parser.add_argument("--full", action="store_true", help="show whole messages, however long")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    dataset = open_dataset(arguments.data)
    if arguments.tokens or arguments.tokenizer:
        if arguments.rollout is None or not arguments.tokens:
            raise ConfigError("--tokens needs --rollout ID, and --tokenizer needs --tokens.")
        decode = find_tokenizer(dataset, arguments.tokenizer)
        attempt = arguments.attempt
        if attempt is None:
            attempt = newest_attempt(dataset, arguments.rollout)
        if attempt is None or (samples := token_document(dataset, arguments.rollout, attempt, decode)) == []:
            rollout(dataset, arguments.rollout, attempt)  # says what is not there
            samples = []
        print(_dump(samples) if arguments.json else token_text(samples, full=arguments.full))
    elif arguments.rollout is not None:
        shown = rollout(dataset, arguments.rollout, arguments.attempt)
        print(_dump(shown) if arguments.json else _rollout_text(shown, full=arguments.full))
    elif arguments.list:
        columns = ["rollout_id", "attempt", "task_id", "split", "state", "cause", "reward", "calls_stored"]
        table = dataset.table("rollouts", run_id=arguments.run)
        rows = table.select(columns).to_pylist()
        print(_dump(rows) if arguments.json else _list_text(rows))
    else:
        figures = summary(dataset, arguments.run)
        print(_dump(figures) if arguments.json else _summary_text(figures))
    return 0


def _outcome(state: str | None, cause: str | None) -> str:
    if state is None:
        return "unknown"
    return state if cause is None else f"{state}: {cause}"


def _counts(table: pa.Table, column: str) -> dict[str, int]:
    counted = Counter(table.column(column).to_pylist())
    return {
        "none" if value is None else str(value): count
        for value, count in sorted(counted.items(), key=lambda item: (item[0] is None, item[0]))
    }


def _rewards(rollouts: pa.Table) -> dict[str, dict[str, float]]:
    """Spread of every named reward of rollouts."""
    values: dict[str, list[float]] = {}
    for rewards in rollouts.column("rewards").to_pylist():
        for name, value in rewards or ():
            values.setdefault(name, []).append(value)
    spread = {}
    for name, numbers in sorted(values.items()):
        low, quarter, median, upper, high = pc.quantile(pa.array(numbers), q=list(_QUANTILES)).to_pylist()
        spread[name] = {
            "count": len(numbers),
            "mean": sum(numbers) / len(numbers),
            "min": low,
            "p25": quarter,
            "median": median,
            "p75": upper,
            "max": high,
        }
    return spread


def _call(row: dict[str, Any]) -> dict[str, Any]:
    """A transition for the eye: figures instead of ids."""
    call = _plain(row)
    prompt, response = call.pop("prompt_token_ids"), call.pop("response_token_ids")
    logprobs = call.pop("response_logprobs")
    call["prompt_tokens"] = None if prompt is None else len(prompt)
    call["response_tokens"] = None if response is None else len(response)
    call["logprob_mean"] = sum(logprobs) / len(logprobs) if logprobs else None
    for name in ("request", "response", "sampling"):
        call[name] = _parse(call[name])
    return call


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """A row as JSON can hold it."""
    plain = {name: value.isoformat() if hasattr(value, "isoformat") else value for name, value in row.items()}
    plain["rewards"] = dict(row["rewards"] or ())
    if "input" in plain:
        plain["input"] = _parse(plain["input"])
    return plain


def _parse(text: str | None) -> Any:
    try:
        return None if text is None else json.loads(text)
    except ValueError:
        return text


def _dump(document: Any) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False)


# --- for the terminal ---------------------------------------------------------------------------------


def _summary_text(figures: dict[str, Any]) -> str:
    calls, tokens = figures["calls"], figures["tokens"]
    lines = [
        f"{figures['path']}: {figures['rollouts']:,} rollouts, {figures['attempts']:,} attempts, "
        f"{calls['all']:,} calls in {figures['commits']:,} commits",
        "",
    ]
    lines += _section("attempts by outcome", figures["outcomes"])
    lines += _section("attempts by split", figures["splits"])
    if figures["rewards"]:
        lines.append(
            f"{'rewards':<30}{'count':>8}{'mean':>9}{'min':>9}{'p25':>9}{'median':>9}{'p75':>9}{'max':>9}"
        )
        for name, spread in figures["rewards"].items():
            numbers = "".join(
                f"{spread[part]:>9.4g}" for part in ("mean", "min", "p25", "median", "p75", "max")
            )
            lines.append(f"  {name:<28}{spread['count']:>8,}{numbers}")
        lines.append("")
    expected = "unknown (no gateway)" if calls["expected"] is None else f"{calls['expected']:,}"
    lines += [
        "calls",
        f"  {'stored, of expected':<28}{calls['stored']:>8,} of {expected}",
        f"  {'with token ids':<28}{calls['with_token_ids']:>8,}",
        f"  {'failed':<28}{calls['failed']:>8,}",
        f"  {'tokens: prompt, response':<28}{tokens['prompt']:>8,} {tokens['response']:,}",
        "",
    ]
    for title, name in (
        ("calls by policy", "by_policy"),
        ("calls by agent", "by_agent"),
        ("calls by finish reason", "by_finish_reason"),
        ("calls by source", "by_source"),
    ):
        lines += _section(title, calls[name])
    lines += _section("calls by weight version", figures["versions"])
    if "samples" in figures:
        samples = figures["samples"]
        lines += [
            f"samples: {samples['all']:,} in {samples['steps']:,} steps, "
            f"{samples['tokens_trained']:,} tokens trained, {samples['tokens_of_context']:,} context"
        ]
        lines += _section("why a sample began", samples["by_reason"])
    lines += _section("fidelity counters", figures["counters"])
    return "\n".join(lines).rstrip()


def _section(title: str, counts: dict[str, int]) -> list[str]:
    if not counts:
        return []
    rows = list(counts.items())
    shown = rows if len(rows) <= 24 else rows[:24]
    lines = [title, *(f"  {name:<28}{count:>8,}" for name, count in shown)]
    if len(rows) > len(shown):
        lines.append(f"  … and {len(rows) - len(shown)} more (--json shows all)")
    return [*lines, ""]


def _list_text(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'rollout':<28} {'att':>3} {'split':<6} {'outcome':<26} {'reward':>9} {'calls':>5}  task"]
    for row in rows:
        reward = "–" if row["reward"] is None else f"{row['reward']:.4g}"
        outcome = _outcome(row["state"], row["cause"])
        lines.append(
            f"{row['rollout_id']:<28} {row['attempt']:>3} {row['split'] or '–':<6} {outcome:<26} {reward:>9} "
            f"{row['calls_stored']:>5}  {row['task_id'] or '–'}"
        )
    return "\n".join(lines)


def _rollout_text(shown: dict[str, Any], *, full: bool) -> str:
    calls = shown["calls"]
    of = f" (of attempts {', '.join(map(str, shown['attempts']))})" if len(shown["attempts"]) > 1 else ""
    lines = [
        f"rollout {shown['rollout_id']}, attempt {shown['attempt']}{of}: {_outcome(shown['state'], shown['cause'])}",
        f"  run {shown['run_id'] or '–'}, group {shown['group_id'] or '–'}, task {shown['task_id'] or '–'}, "
        f"split {shown['split'] or '–'}",
    ]
    if shown["input"] is not None:
        lines += _block("input", shown["input"], full)
    if shown["error"]:
        lines += _block("error", shown["error"], full)
    lines.append(f"  rewards: {_named(shown['rewards'])}")
    expected = "unknown" if shown["calls_expected"] is None else str(shown["calls_expected"])
    fidelity = ", ".join(
        f"{name} {shown[name]}"
        for name in ("duplicate", "late", "orphan", "unparsed", "dropped_attributes")
        if shown[name]
    )
    lines.append(
        f"  calls: {shown['calls_stored']} stored of {expected} expected{'; ' + fidelity if fidelity else ''}"
    )
    seen = 0
    for call in calls:
        lines += ["", *_call_text(call, full, seen)]
        seen = _messages_count(call)
    for sample in shown["samples"]:
        lines.append(
            f"\nsample {sample['sample']} of step {sample['step']}: began because {sample['reason']}; "
            f"{len(sample['calls'])} calls, {sample['tokens']} tokens, {sample['trained']} trained"
        )
    return "\n".join(lines)


def _call_text(call: dict[str, Any], full: bool, seen: int) -> list[str]:
    who = " › ".join(call["agent_path"] or ()) or "(no agent named)"
    tokens = (
        "no token ids"
        if call["response_tokens"] is None
        else f"{call['prompt_tokens']} → {call['response_tokens']} tokens"
    )
    mean = call["logprob_mean"]
    logprob = "" if mean is None or not math.isfinite(mean) else f", log-prob mean {mean:.3f}"
    versions = call["model_versions"] or (
        [call["model_version"]] if call["model_version"] is not None else []
    )
    version = f", version {' '.join(map(str, versions))}" if versions else ""
    lines = [
        f"── call {call['seq']} · {who} · {call['policy'] or call['model'] or '–'} · {tokens}{logprob}{version}"
        f" · {call['finish_reason'] or '–'} · {call['duration_ms']:.0f} ms · {call['source']}"
    ]
    request, response = call["request"], call["response"]
    messages = conversation.messages(request)
    if messages is not None:
        # What the call before showed already is counted, not shown again.
        first = seen if not full and 0 < seen <= len(messages) else 0
        if first:
            lines.append(f"  [{first} messages as before]")
        for message in messages[first:]:
            lines += _message(message, full)
    elif request is not None:
        lines += _block("request", request, full)
    answers = conversation.answers(response)
    if answers is not None:
        for message in answers:
            lines += _message(message, full, arrow="⇒ ")
    elif response is not None:
        lines += _block("response", response, full)
    if call["error"]:
        lines += _block("error", call["error"], full)
    if call["rewards"]:
        lines.append(f"  rewards: {_named(call['rewards'])}")
    return lines


def _messages_count(call: dict[str, Any]) -> int:
    return len(conversation.messages(call["request"]) or ())


def _message(message: Any, full: bool, arrow: str = "") -> list[str]:
    if not isinstance(message, dict):
        return _block(f"{arrow}message", message, full)
    role = f"{arrow}{message.get('role', '?')}"
    lines: list[str] = []
    if message.get("reasoning_content"):
        lines += _block(f"{role} (reasoning)", message["reasoning_content"], full)
    if message.get("content") not in (None, "", []):
        lines += _block(role, message["content"], full)
    for tool_call in message.get("tool_calls") or ():
        function = tool_call.get("function") if isinstance(tool_call, dict) else None
        if isinstance(function, dict):
            lines += _block(f"{role} calls {function.get('name')}", function.get("arguments"), full)
    return lines or [f"  {role}: (empty)"]


def _block(title: str, content: Any, full: bool) -> list[str]:
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" for part in content
    ):
        content = "\n".join(str(part.get("text", "")) for part in content)
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    # A message may hold anything: no control character reaches the terminal.
    text = "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)
    if not full and len(text) > 1200:
        text = f"{text[:900]} … [{len(text) - 1200} characters; --full shows them] … {text[-300:]}"
    width = max(60, min(shutil.get_terminal_size((100, 24)).columns, 160))
    lines = []
    for index, line in enumerate(text.split("\n")):
        head = f"  {title}: " if index == 0 else "    "
        lines += textwrap.wrap(
            line,
            width,
            initial_indent=head,
            subsequent_indent="    ",
            replace_whitespace=False,
            drop_whitespace=False,
        ) or [head.rstrip()]
    return lines


def _named(rewards: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.6g}" for name, value in sorted(rewards.items())) or "none"
