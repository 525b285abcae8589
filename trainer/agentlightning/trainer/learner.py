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
from agentlightning.trainer.advantage import carry_back, whiten
from agentlightning.trainer.aggregate import Aggregate, check_aggregate, sample_weights
from agentlightning.trainer.batch import Batch, TokenFloats, Totals, known, scatter
from agentlightning.trainer.loss import LossSettings, divergence, token_loss
from agentlightning.trainer.model import choose_dtype, save_weights
from agentlightning.trainer.pack import Packed, check_depth, check_model, forward, pack, plan
from agentlightning.trainer.samples import Sample

__all__ = ["Learner", "LearnerSettings", "LoraSettings", "UpdateResult"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoraSettings:
    rank: int = 16
    alpha: float = 32.0
    target_modules: str | tuple[str, ...] = "all-linear"


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
    """Advantages to mean 0 and deviation 1 over all sampled tokens; the estimator `reinforce++` needs it."""
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
        wrong = sorted({str(p.dtype) for p in model.parameters() if p.dtype != torch.float32})
        if wrong:
            raise ConfigError(f"The learner keeps fp32 master weights, but the model has {', '.join(wrong)}.")
        check_model(model)
        torch.manual_seed(self.settings.seed)
        self.model = model
        """The causal language model; LoRA layers are put into it."""
        self._peft = _with_lora(model, self.settings.lora) if self.settings.lora else None
        _remove_dropout(model)
        model.eval()
        if self.settings.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.train()
        self.device = model.get_input_embeddings().weight.device
        self.dtype, self.dtype_reason = choose_dtype(self.settings.dtype, self.device)
        self.trainable: dict[str, torch.nn.Parameter] = {
            n: p for n, p in model.named_parameters() if p.requires_grad
        }
        self._reference: dict[str, Tensor] | None = None
        if self.settings.loss.kl_beta and self._peft is None:
            self._reference = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.optimizer = torch.optim.AdamW(
            self.trainable.values(),
            lr=self.settings.lr,
            betas=self.settings.betas,
            eps=self.settings.eps,
            weight_decay=self.settings.weight_decay,
            fused=True,
        )

    def update(self, samples: Sequence[Sample], advantages: Sequence[TokenFloats]) -> UpdateResult:
        """One batch: `epochs` × `minibatches` optimiser steps. Samples without any signal are not computed."""
        settings, began = self.settings, time.perf_counter()
        if len(samples) != len(advantages):
            raise ValueError(f"There are {len(samples)} samples, but {len(advantages)} arrays of advantages.")
        steps = settings.minibatches * settings.epochs
        penalised = bool(settings.loss.kl_beta)
        in_reward = penalised and settings.loss.kl_in == "reward"
        old: list[TokenFloats | None] = [None] * len(samples)
        if steps > 1 or in_reward:
            old = list(self.logprobs(samples))
        reference = self._reference_logprobs(samples) if penalised else None
        if in_reward:
            assert reference is not None
            advantages = self._penalise(samples, advantages, old, reference)
        if settings.whiten:
            advantages = whiten(samples, advantages)
        batch = Batch(samples, advantages, old, reference, fixed_old=steps > 1 or in_reward)
        totals = Totals()
        stepped = False
        for epoch in range(settings.epochs):
            for numbers in self._minibatches(samples, epoch):
                stepped |= self._optimise(batch, numbers, totals)
        self.version += stepped
        metrics = totals.metrics()
        metrics["seconds"] = time.perf_counter() - began
        metrics["lr"] = self.optimizer.param_groups[0]["lr"]
        return UpdateResult(metrics, batch.old, stepped)

    @torch.no_grad()
    def logprobs(self, samples: Sequence[Sample]) -> list[TokenFloats]:
        """log π of the trained tokens, parallel to each sample's tokens."""
        result = [np.zeros(len(sample.token_ids), np.float32) for sample in samples]
        for numbers in plan(samples, self.settings.max_tokens):
            packed = pack(samples, numbers)
            check_depth(self.model, packed)
            with self._computing():
                logp, _ = forward(self.model, packed)
            scatter(result, packed, logp)
        return result

    @torch.no_grad()
    def merged_state_dict(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """The weights as a plain model has them, LoRA merged in, on the CPU. The model itself is not changed."""
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
            settings.loss.entropy_bonus or (settings.loss.kl_beta and settings.loss.kl_in == "loss")
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
        for micro in plan([chosen[k] for k in active], settings.max_tokens):
            packed = pack(batch.samples, [numbers[active[m]] for m in micro])
            check_depth(self.model, packed)
            weight = torch.from_numpy(weights[[active[m] for m in micro]][packed.sample]).to(self.device)
            self._backward(batch, packed, weight, totals)
        norm = torch.nn.utils.clip_grad_norm_(self.trainable.values(), settings.max_grad_norm).item()
        totals.grad_norms.append(norm)
        if not np.isfinite(norm):
            log.warning("The gradient of step %d is not finite; the step is left out.", self.step)
            totals.steps_not_finite += 1
            self.optimizer.zero_grad(set_to_none=True)
            return False
        warm = min(1.0, (self.step + 1) / settings.warmup_steps) if settings.warmup_steps else 1.0
        for group in self.optimizer.param_groups:
            group["lr"] = settings.lr * warm
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return True

    def _backward(self, batch: "Batch", packed: Packed, weight: Tensor, totals: "Totals") -> None:
        bonus = bool(self.settings.loss.entropy_bonus)
        with self._computing():
            logp, entropy = forward(self.model, packed, entropy=bonus)
        if batch.fixed_old:
            logp_old = batch.gather([known(a) for a in batch.old], packed, self.device)
        else:
            logp_old = logp.detach()
            for i in packed.samples:
                batch.old[i] = np.zeros(len(batch.samples[i].token_ids), np.float32)
            scatter(batch.old, packed, logp_old)
        logp_sampler = batch.gather([s.logprobs for s in batch.samples], packed, self.device)
        losses = token_loss(
            self.settings.loss,
            logp=logp,
            logp_old=logp_old,
            logp_sampler=logp_sampler,
            advantages=batch.gather(batch.advantages, packed, self.device),
            sample=torch.from_numpy(packed.sample).to(self.device),
            logp_reference=None
            if batch.reference is None
            else batch.gather(batch.reference, packed, self.device),
            entropy=entropy,
        )
        loss = (losses.loss.double() * weight).sum()
        loss.backward()
        totals.add(batch, packed, losses, loss, logp.detach(), logp_old, logp_sampler, entropy)

    def _reference_logprobs(self, samples: Sequence[Sample]) -> list[TokenFloats]:
        with self.reference():
            return self.logprobs(samples)

    def _penalise(
        self,
        samples: Sequence[Sample],
        advantages: Sequence[TokenFloats],
        old: Sequence[TokenFloats | None],
        reference: Sequence[TokenFloats],
    ) -> list[TokenFloats]:
        """Add what the divergence from the reference costs from each token on."""
        loss = self.settings.loss
        costs = []
        for sample, before, ref in zip(samples, old, reference, strict=True):
            k = divergence(loss.kl_kind, torch.from_numpy(known(before)), torch.from_numpy(ref)).numpy()
            costs.append(np.where(sample.mask, -loss.kl_beta * k, np.float32(0)).astype(np.float32))
        return [a + c for a, c in zip(advantages, carry_back(samples, costs), strict=True)]

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


def _with_lora(model: Any, settings: LoraSettings) -> Any:
    from peft import LoraConfig, get_peft_model

    targets = (
        settings.target_modules if isinstance(settings.target_modules, str) else list(settings.target_modules)
    )
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=targets,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        raise ConfigError(f"LoRA cannot be put into {type(model).__name__}: {error}") from error


def _remove_dropout(model: Any) -> None:
    """Log-probabilities must be those that the engine samples from."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
