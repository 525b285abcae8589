"""One attempt at a rollout, from its claim to its report: run the agent, judge its output, say how it ended."""

import json
import logging
import math
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from agentlightning.controller.environment import check_program_environment, rollout_environment
from agentlightning.controller.evaluator import EvaluatorFailed, evaluate
from agentlightning.controller.gateway import Gateway, patiently
from agentlightning.controller.processes import Ended, Processes
from agentlightning.controller.rollout import Rollout, Verdict
from agentlightning.controller.spec import CommandAgent, FunctionAgent
from agentlightning.proto.errors import Conflict, DataError, ServiceError

__all__ = ["Attempt", "Workshop"]

log = logging.getLogger(__name__)

PRINTED_LIMIT = 1 << 20
"""Bytes of a program's output that are its output; of more, the last."""
ERROR_LIMIT = 4000
"""Characters of an error as reported."""


@dataclass(frozen=True)
class Workshop:
    """What all attempts share."""

    gateway: Gateway
    agent: FunctionAgent | CommandAgent
    agents: Processes
    evaluator: str | None
    evaluators: Processes | None
    environ: dict[str, str]
    collector: str | None
    directory: Path
    timeout: float
    grace: float
    lease_s: float
    counters: Counter[str] = field(default_factory=Counter)


class Attempt:
    """Runs once; `stop` ends it early."""

    def __init__(self, workshop: Workshop, rollout: Rollout) -> None:
        self.rollout = rollout
        self._shop = workshop
        self._directory = workshop.directory / rollout.rollout_id / str(rollout.attempt)
        self._stopped: Literal["", "cancelled", "lost", "stopping"] = ""
        self._rewards: dict[str, float] = {}

    def stop(self, why: Literal["cancelled", "lost", "stopping"]) -> None:
        """End the agent, because the rollout was cancelled, given to another, or this controller is stopping."""
        if not self._stopped:
            self._stopped = why
            self._shop.agents.stop(self.rollout.key)

    async def run(self) -> None:
        """From start to report; whatever happens is reported, never raised, but for a gateway that refuses us."""
        began = time.time()
        ended: Ended | None = None
        try:
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            job = self._job()
        except DataError as error:
            verdict = Verdict("failed", "agent_error", str(error))
        except OSError as error:
            verdict = Verdict(
                "failed", "infra_error", f"The folder {self._directory} cannot be made: {error.strerror}."
            )
        else:
            if self._stopped:  # before it began
                ended = Ended("stopped")
            else:
                self._shop.counters["started"] += 1
                ended = await self._shop.agents.run(job)
            verdict = await self._judge(ended)
        self._keep(verdict, ended, began)
        await self._report(verdict)

    def _job(self) -> dict[str, Any]:
        """What the launcher is asked to run. Raises DataError if the task does not fit the agent."""
        shop, rollout = self._shop, self.rollout
        environ = rollout_environment(shop.environ, rollout, shop.gateway.url, shop.collector)
        job = {
            "id": rollout.key,
            "environ": environ,
            "seed": rollout.seed,
            "stdout": str(self._directory / "stdout.log"),
            "stderr": str(self._directory / "stderr.log"),
            "timeout": shop.timeout,
            "grace": shop.grace,
        }
        if isinstance(shop.agent, FunctionAgent):
            return {**job, "kind": "function", "arguments": rollout.input}
        check_program_environment(environ)
        return {**job, "kind": "command", "argv": shop.agent.argv(rollout.input)}

    async def _judge(self, ended: Ended) -> Verdict:
        """What became of the attempt."""
        if ended.dropped:
            self._shop.counters["output_bytes_dropped"] += ended.dropped
        if self._stopped == "stopping" and ended.ending == "stopped":
            return Verdict("failed", "infra_error", "The controller was stopped while the agent ran.")
        if self._stopped == "cancelled":
            return Verdict("cancelled", "cancelled", "The rollout was cancelled.")
        if ended.ending in ("lost", "not_started"):
            return Verdict("failed", "infra_error", f"The agent could not be run to its end: {ended.error}.")
        if ended.ending == "timeout":
            limit = f"The agent was stopped: it ran longer than its time limit of {self._shop.timeout:g} s."
            return await self._failed("timeout", limit, ended)
        if ended.code < 0:
            return await self._failed("agent_error", f"The agent was killed by signal {-ended.code}.", ended)
        if ended.code > 0:
            sentence = f"The agent exited with code {ended.code}: {ended.last_line()}"
            return await self._failed("agent_error", sentence, ended)
        if ended.result_dropped:
            return Verdict("failed", "agent_error", "The agent's output is larger than 4 MiB as JSON.")
        if isinstance(self._shop.agent, CommandAgent):
            return await self._evaluated(self._printed())
        try:
            output = json.loads(ended.result or "null")
        except ValueError:  # the pipe is the agent's too, if it looks for it
            return Verdict(
                "failed", "agent_error", "The agent wrote into the pipe of its own result, and spoilt it."
            )
        return await self._evaluated(output)

    async def _failed(self, cause: Literal["agent_error", "timeout"], sentence: str, ended: Ended) -> Verdict:
        """A failure that may be the gateway's doing: if it was restarted meanwhile, the agent is not to blame."""
        error = (
            sentence if ended.last_line() == ended.stderr.strip() else f"{sentence}\n{ended.stderr.strip()}"
        )
        error = error.replace(self.rollout.token, "[rollout token]")[:ERROR_LIMIT]
        if self._stopped != "lost":
            boot_id, _, _ = await patiently(self._shop.gateway.heartbeat, [self.rollout], self._shop.lease_s)
            if boot_id != self.rollout.boot_id:
                return Verdict(
                    "failed", "infra_error", f"The gateway was restarted while the agent ran. {error}"
                )
        return Verdict("failed", cause, error)

    async def _evaluated(self, output: Any) -> Verdict:
        """An attempt that succeeded, once its rewards are on record."""
        shop = self._shop
        if shop.evaluator is None or shop.evaluators is None or self._stopped == "lost":
            return Verdict("succeeded", output=output)
        try:
            self._rewards = await evaluate(
                shop.evaluators, shop.evaluator, self.rollout, output, self._directory, shop.counters
            )
        except EvaluatorFailed as error:
            log.error("%s: %s", self.rollout.key, error)
            return Verdict("failed", "infra_error", str(error), output)
        for name, value in self._rewards.items():
            try:
                await patiently(shop.gateway.reward, self.rollout, name, value)
            except (
                Conflict
            ) as error:  # ended meanwhile, as the report will find out, or judged otherwise by another
                return Verdict("failed", "infra_error", str(error), output)
            except ServiceError as error:
                shop.counters["reward_refused" if math.isfinite(value) else "reward_not_finite"] += 1
                log.error("%s: reward %s = %r: %s", self.rollout.key, name, value, error)
                return Verdict(
                    "failed", "infra_error", f"The reward {name!r} = {value!r} was refused: {error}", output
                )
        return Verdict("succeeded", output=output)

    def _printed(self) -> str:
        """A program's output: what it printed."""
        try:
            with open(self._directory / "stdout.log", "rb") as file:
                size = file.seek(0, 2)
                if size > PRINTED_LIMIT:
                    self._shop.counters["output_truncated"] += 1
                file.seek(max(0, size - PRINTED_LIMIT))
                return file.read().decode(errors="replace").strip()
        except FileNotFoundError:
            return ""

    def _keep(self, verdict: Verdict, ended: Ended | None, began: float) -> None:
        """Leave the outcome beside the logs, for people to read."""
        outcome = {
            "state": verdict.state,
            "cause": verdict.cause,
            "error": verdict.error,
            "output": verdict.output,
            "rewards": self._rewards,
            "started": began,
            "seconds": ended.seconds if ended else 0.0,
            "cpu_s": ended.cpu_s if ended else 0.0,
            "exit_code": ended.code if ended else None,
            "bytes_not_kept": ended.dropped if ended else 0,
        }
        try:
            (self._directory / "result.json").write_text(json.dumps(outcome, ensure_ascii=False) + "\n")
        except OSError as error:
            self._shop.counters["result_not_kept"] += 1
            log.warning("%s: result.json cannot be written: %s", self.rollout.key, error)

    async def _report(self, verdict: Verdict) -> None:
        """Tell the gateway, until it has heard."""
        counters, key = self._shop.counters, self.rollout.key
        if self._stopped == "lost":
            counters["lost"] += 1
            log.warning("%s was given to another attempt, and is dropped here.", key)
            return
        counters[verdict.state if verdict.cause in (None, "cancelled") else f"failed_{verdict.cause}"] += 1
        if verdict.cause is not None:
            log.info(
                "%s %s (%s): %s", key, verdict.state, verdict.cause, (verdict.error or "").partition("\n")[0]
            )
        try:
            await patiently(self._shop.gateway.finish, self.rollout.rollout_id, self.rollout.attempt, verdict)
        except Conflict as error:
            counters["finish_conflict"] += 1
            if verdict.state != "cancelled":
                log.warning("%s: %s", key, error)
        except ServiceError as error:
            counters["finish_refused"] += 1
            log.error("%s: its outcome was refused, and its lease will run out: %s", key, error)
