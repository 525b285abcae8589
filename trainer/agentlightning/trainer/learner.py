"""The learner: samples and advantages in, changed weights out.

    samples ─▶ plan ─▶ pack ─▶ forward ─▶ token_loss · weights ─▶ backward      (per micro-batch, gradients add up)
                                                                    └─▶ clip ─▶ AdamW      (once per optimiser step)

Master weights are fp32; bf16 is only for computing (autocast), where the hardware has it. A batch is one optimiser step
by default: then π_old is π itself and needs no pass of its own. Everything is deterministic given the seed.
"""

import contextlib
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentlightning.proto.errors import ConfigError
from agentlightning.trainer.adapters import LoraSettings, remove_dropout, with_lora
from agentlightning.trainer.aggregate import Aggregate, check_aggregate, sample_weights
from agentlightning.trainer.batch import Batch, TokenFloats, Totals, known, scatter
from agentlightning.trainer.loss import divergence, token_loss
from agentlightning.trainer.memory import PeakMemory
from agentlightning.trainer.model import choose_dtype, save_weights
from agentlightning.trainer.objective import LossSettings
from agentlightning.trainer.pack import Packed, check_depth, check_model, forward, pack, plan
from agentlightning.trainer.returns import carry_back, gae, whiten
from agentlightning.trainer.samples import Sample
from agentlightning.trainer.value import ValueHead, ValueSettings, value_loss

__all__ = ["Learner", "LearnerSettings", "LoraSettings", "UpdateResult"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    warmup_steps: int = 0
    """Optimiser steps over which the learning rate rises to `lr`."""
    lora: LoraSettings | None = None
    """None trains all weights."""
    dtype: str = "auto"
    """Of computing: auto, float32, bfloat16. Weights and optimiser are fp32 always."""
    gradient_checkpointing: bool = False
    max_tokens: int = 2048
    """Nodes of one forward pass."""
    aggregate: Aggregate = "rollout-mean"
    constant_length: int | None = None
    minibatches: int = 1
    """Optimiser steps that a batch is split into, by rollout."""
    epochs: int = 1
    whiten: bool = False
    """Advantages to mean 0 and deviation 1 over all sampled tokens; the estimators `reinforce++` and `gae` need it."""
    value: ValueSettings | None = None
    """PPO's value head: `update` is then given token rewards, and makes the advantages itself (GAE)."""
    seed: int = 0
    loss: LossSettings = field(default_factory=LossSettings)

    def __post_init__(self) -> None:
        check_aggregate(self.aggregate, self.constant_length)
        for name in ("max_tokens", "minibatches", "epochs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}.")
        for name in ("lr", "max_grad_norm", "eps"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be greater than 0, not {getattr(self, name)}.")


@dataclass(frozen=True, slots=True, eq=False)
class UpdateResult:
    """What one update did."""

    metrics: dict[str, float]
    logprobs: list[TokenFloats | None]
    """log π_old of every sample, parallel to its tokens, 0 where the mask is false. None: not computed, because nothing
    of the sample could change the weights."""
    advantages: list[TokenFloats]
    """What the loss was given: with KL in the reward, whitened, or made from values, where the settings say so."""
    stepped: bool
    """False if the weights are what they were."""


class Learner:
    """Trains a causal language model of transformers, which must have fp32 weights and sdpa attention."""

    def __init__(self, model: Any, settings: LearnerSettings | None = None) -> None:
        self.settings = settings or LearnerSettings()
        self.step = 0
        """Optimiser steps taken."""
        self.version = 0
        """Version of the weights: counts the updates that changed them."""
        self.computed = 0
        """Passes through the model so far: grows while the learner works."""
        wrong = sorted({str(p.dtype) for p in model.parameters() if p.dtype != torch.float32})
        if wrong:
            raise ConfigError(f"The learner keeps fp32 master weights, but the model has {', '.join(wrong)}.")
        check_model(model)
        torch.manual_seed(self.settings.seed)
        self.model = model
        """The causal language model; LoRA layers are put into it."""
        self._peft = with_lora(model, self.settings.lora) if self.settings.lora else None
        remove_dropout(model)
        model.eval()
        if self.settings.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.train()
        self.device = model.get_input_embeddings().weight.device
        self.dtype, self.dtype_reason = choose_dtype(self.settings.dtype, self.device)
        self.trainable: dict[str, torch.nn.Parameter] = {
            n: p for n, p in model.named_parameters() if p.requires_grad
        }
        self.memory = PeakMemory(self.device)
        self.value_head: ValueHead | None = None
        self._policy = list(self.trainable.values())
        groups: list[dict[str, Any]] = [{"params": self._policy, "lr": self.settings.lr}]
        if self.settings.value is not None:
            self.value_head = ValueHead(model.get_input_embeddings().weight.shape[1], self.device)
            head = {f"value_head.{name}": p for name, p in self.value_head.named_parameters()}
            groups.append({"params": list(head.values()), "lr": self.settings.value.lr, "weight_decay": 0.0})
            self.trainable |= head  # last, as in the optimiser's groups
        self._rates = [group["lr"] for group in groups]
        self._reference: dict[str, Tensor] | None = None
        if self.settings.loss.kl_beta and self._peft is None:
            self._reference = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.optimizer = torch.optim.AdamW(
            groups,
            lr=self.settings.lr,
            betas=self.settings.betas,
            eps=self.settings.eps,
            weight_decay=self.settings.weight_decay,
            fused=True,
        )

    def update(self, samples: Sequence[Sample], advantages: Sequence[TokenFloats]) -> UpdateResult:
        """One batch: `epochs` × `minibatches` optimiser steps. Samples without any signal are not computed.

        `advantages` are parallel to the tokens of each sample; with a value head they are rewards.
        """
        settings, began = self.settings, time.perf_counter()
        if len(samples) != len(advantages):
            raise ValueError(f"There are {len(samples)} samples, but {len(advantages)} arrays of advantages.")
        batch = self._prepare(samples, advantages)
        totals = Totals()
        stepped = False
        for epoch in range(settings.epochs):
            for numbers in self._minibatches(samples, epoch):
                stepped |= self._optimise(batch, numbers, totals)
        self.version += stepped
        metrics = totals.metrics()
        metrics |= {f"peak_memory_{name}_mib": peak for name, peak in self.memory.take().items()}
        metrics["seconds"] = time.perf_counter() - began
        metrics["lr"] = self.optimizer.param_groups[0]["lr"]
        return UpdateResult(metrics, batch.old, list(batch.advantages), stepped)

    def logprobs(self, samples: Sequence[Sample]) -> list[TokenFloats]:
        """log π of the trained tokens, parallel to each sample's tokens."""
        return self._evaluate(samples)[0]

    @torch.no_grad()
    def _evaluate(self, samples: Sequence[Sample]) -> tuple[list[TokenFloats], list[TokenFloats]]:
        """log π, and V (0 without a value head)."""
        logps = [np.zeros(len(sample.token_ids), np.float32) for sample in samples]
        values = [np.zeros(len(sample.token_ids), np.float32) for sample in samples]
        for numbers in plan(samples, self.settings.max_tokens):
            packed = pack(samples, numbers)
            check_depth(self.model, packed)
            with self._computing():
                outputs = forward(self.model, packed)
            self.computed += 1
            scatter(logps, packed, outputs.logp)
            if self.value_head is not None:
                scatter(values, packed, self.value_head(outputs.hidden).cpu()[packed.row])
        return logps, values

    def _prepare(self, samples: Sequence[Sample], advantages: Sequence[TokenFloats]) -> Batch:
        """What the loss compares with, and the advantages as it needs them."""
        settings = self.settings
        loss, value = settings.loss, settings.value
        in_reward = bool(loss.kl_beta) and loss.kl_in == "reward"
        fixed_old = settings.minibatches * settings.epochs > 1 or in_reward or value is not None
        old: list[TokenFloats | None] = [None] * len(samples)
        values: list[TokenFloats] = []
        with self.memory.phase("logprobs"):
            if fixed_old:
                logps, values = self._evaluate(samples)
                old = list(logps)
            reference = self._reference_logprobs(samples) if loss.kl_beta else None
        returns = None
        costs = self._costs(samples, old, reference) if in_reward and reference is not None else None
        if value is not None:
            rewards = advantages if costs is None else [a + c for a, c in zip(advantages, costs, strict=True)]
            advantages, returns = gae(samples, rewards, values, gamma=value.gamma, lam=value.lam)
        elif costs is not None:
            advantages = [a + c for a, c in zip(advantages, carry_back(samples, costs), strict=True)]
        if settings.whiten:
            advantages = whiten(samples, advantages)
        return Batch(
            samples, advantages, old, reference, None if value is None else values, returns, fixed_old
        )

    def merged_state_dict(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """The weights as a plain model has them, LoRA merged in, on the CPU. The model itself is not changed."""
        with self.memory.phase("merge"), torch.no_grad():
            return self._merged(dtype)

    def _merged(self, dtype: torch.dtype) -> dict[str, Tensor]:
        deltas = {
            f"{name}.weight": module.get_delta_weight("default")
            for name, module in self.model.named_modules()
            if hasattr(module, "get_delta_weight")
        }
        state = {}
        for key, value in self.model.state_dict().items():
            if ".lora_" in key:
                continue
            name = key.replace(".base_layer.", ".")
            merged = value + deltas[name] if name in deltas else value
            state[name] = merged.detach().to("cpu", dtype, copy=True).contiguous()
        head = self.model.get_output_embeddings()
        if head.weight is self.model.get_input_embeddings().weight:  # tied: stored once
            name = next(name for name, module in self.model.named_modules() if module is head)
            del state[f"{name}.weight"]
        return state

    def save_pretrained(
        self, folder: Path, tokenizer: Any = None, *, dtype: torch.dtype = torch.float32
    ) -> None:
        """Write a folder that `AutoModelForCausalLM.from_pretrained` loads, with the tokenizer."""
        folder.mkdir(parents=True, exist_ok=True)
        save_weights(folder, self.merged_state_dict(dtype))
        config = self.model.config.to_dict()
        config["dtype"] = str(dtype).removeprefix("torch.")
        config["architectures"] = [type(self.model).__name__]
        config.pop("quantization_config", None)  # a GGUF's: the weights written here are plain
        (folder / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n")
        if getattr(self.model, "generation_config", None) is not None:
            self.model.generation_config.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)

    @contextlib.contextmanager
    def reference(self) -> Iterator[None]:
        """Within, the model has the weights that training began from."""
        if self._peft is not None:
            with self._peft.disable_adapter():
                yield
            return
        if self._reference is None:
            raise ConfigError("No reference weights are kept: set kl_beta above 0, or train with LoRA.")
        current = {name: p.data for name, p in self.model.named_parameters()}
        for name, p in self.model.named_parameters():
            p.data = self._reference[name]
        try:
            yield
        finally:
            for name, p in self.model.named_parameters():
                p.data = current[name]

    @contextlib.contextmanager
    def serving(self, state: Mapping[str, Tensor]) -> Iterator[Any]:
        """Within, the model with the weights of a `merged_state_dict`, as an engine has it; it computes in their dtype."""
        current = {name: p.data for name, p in self.model.named_parameters()}
        adapters_off = self._peft.disable_adapter() if self._peft is not None else contextlib.nullcontext()
        training = self.model.training
        self.model.eval()
        with adapters_off:
            for name, p in self.model.named_parameters():
                if ".lora_" not in name:
                    p.data = state[name.replace(".base_layer.", ".")].to(self.device)
            try:
                yield self.model
            finally:
                for name, p in self.model.named_parameters():
                    p.data = current[name]
                self.model.train(training)

    def _optimise(self, batch: "Batch", numbers: Sequence[int], totals: "Totals") -> bool:
        """One optimiser step over the samples `numbers`; False if there was nothing to learn from."""
        settings = self.settings
        chosen = [batch.samples[i] for i in numbers]
        weights = sample_weights(settings.aggregate, chosen, constant_length=settings.constant_length)
        regularised = bool(
            settings.loss.entropy_bonus
            or (settings.loss.kl_beta and settings.loss.kl_in == "loss")
            or settings.value is not None
        )
        active = [
            k
            for k, i in enumerate(numbers)
            if chosen[k].trained and (regularised or batch.advantages[i].any())
        ]
        totals.tokens_without_signal += sum(s.trained for s in chosen) - sum(
            chosen[k].trained for k in active
        )
        if not active:
            return False
        self.optimizer.zero_grad(set_to_none=True)
        with self.memory.phase("backward"):
            for micro in plan([chosen[k] for k in active], settings.max_tokens):
                packed = pack(batch.samples, [numbers[active[m]] for m in micro])
                check_depth(self.model, packed)
                weight = torch.from_numpy(weights[[active[m] for m in micro]][packed.sample]).to(self.device)
                self._backward(batch, packed, weight, totals)
        with self.memory.phase("optimizer"):
            return self._step(totals)

    def _step(self, totals: "Totals") -> bool:
        """Clip and apply the gradient that has added up; False if it is not finite."""
        settings = self.settings
        norm = torch.nn.utils.clip_grad_norm_(self._policy, settings.max_grad_norm).item()
        if self.value_head is not None:  # apart: values that are far off must not shrink the policy's step
            head = torch.nn.utils.clip_grad_norm_(self.value_head.parameters(), settings.max_grad_norm).item()
            norm = norm if np.isfinite(head) else head
        totals.grad_norms.append(norm)
        if not np.isfinite(norm):
            log.warning("The gradient of step %d is not finite; the step is left out.", self.step)
            totals.steps_not_finite += 1
            self.optimizer.zero_grad(set_to_none=True)
            return False
        warm = min(1.0, (self.step + 1) / settings.warmup_steps) if settings.warmup_steps else 1.0
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * warm
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return True

    def _backward(self, batch: "Batch", packed: Packed, weight: Tensor, totals: "Totals") -> None:
        settings = self.settings
        with self._computing():
            outputs = forward(self.model, packed, entropy=bool(settings.loss.entropy_bonus))
        self.computed += 1
        logp = outputs.logp
        if batch.fixed_old:
            logp_old = batch.gather([known(a) for a in batch.old], packed, self.device)
        else:
            logp_old = logp.detach()
            for i in packed.samples:
                batch.old[i] = np.zeros(len(batch.samples[i].token_ids), np.float32)
            scatter(batch.old, packed, logp_old)
        logp_sampler = batch.gather([s.logprobs for s in batch.samples], packed, self.device)
        reference = None if batch.reference is None else batch.gather(batch.reference, packed, self.device)
        losses = token_loss(
            settings.loss,
            logp=logp,
            logp_old=logp_old,
            logp_sampler=logp_sampler,
            advantages=batch.gather(batch.advantages, packed, self.device),
            call=torch.from_numpy(packed.call).to(self.device),
            logp_reference=reference,
            entropy=outputs.entropy,
        )
        loss = (losses.loss.double() * weight).sum()
        total = loss
        if self.value_head is not None:
            total = loss + (self._value_losses(batch, packed, outputs.hidden, totals).double() * weight).sum()
        total.backward()
        logp = logp.detach()
        totals.add(batch, packed, losses, loss, logp, logp_old, logp_sampler, outputs.entropy)
        if reference is not None:
            totals.add_divergence(divergence(settings.loss.kl_kind, logp, reference))

    def _value_losses(self, batch: "Batch", packed: Packed, hidden: Tensor, totals: "Totals") -> Tensor:
        """(T,)"""
        settings = self.settings.value
        assert settings is not None
        assert self.value_head is not None
        assert batch.values_old is not None
        assert batch.returns is not None
        if not settings.coefficient:
            hidden = hidden.detach()
        values = self.value_head(hidden)[torch.from_numpy(packed.row).to(self.device)]
        values_old = batch.gather(batch.values_old, packed, self.device)
        returns = batch.gather(batch.returns, packed, self.device)
        losses = value_loss(values, values_old, returns, settings.clip)
        totals.add_values(losses.detach(), values_old, returns)
        return losses * (settings.coefficient or 1.0)

    def _reference_logprobs(self, samples: Sequence[Sample]) -> list[TokenFloats]:
        with self.reference():
            return self.logprobs(samples)

    def _costs(
        self, samples: Sequence[Sample], old: Sequence[TokenFloats | None], reference: Sequence[TokenFloats]
    ) -> list[TokenFloats]:
        """What the divergence from the reference takes from the reward of each token."""
        loss = self.settings.loss
        costs = []
        for sample, before, ref in zip(samples, old, reference, strict=True):
            k = divergence(loss.kl_kind, torch.from_numpy(known(before)), torch.from_numpy(ref)).numpy()
            costs.append(np.where(sample.mask, -loss.kl_beta * k, np.float32(0)).astype(np.float32))
        return costs

    def _minibatches(self, samples: Sequence[Sample], epoch: int) -> list[list[int]]:
        """Numbers of the samples of each optimiser step; all samples of a rollout are in one."""
        if self.settings.minibatches == 1:
            return [list(range(len(samples)))]
        rollouts = sorted({sample.rollout_id for sample in samples})
        np.random.default_rng((self.settings.seed, self.step, epoch)).shuffle(rollouts)
        part = {r: k * self.settings.minibatches // len(rollouts) for k, r in enumerate(rollouts)}
        parts: list[list[int]] = [[] for _ in range(self.settings.minibatches)]
        for i, sample in enumerate(samples):
            parts[part[sample.rollout_id]].append(i)
        return [numbers for numbers in parts if numbers]

    def _computing(self) -> contextlib.AbstractContextManager[Any]:
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)
