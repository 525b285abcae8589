"""What is put into a model, and taken out of it, before it learns."""

from dataclasses import dataclass
from typing import Any

import torch

from agentlightning.proto.errors import ConfigError

__all__ = ["LoraSettings", "remove_dropout", "with_lora"]


@dataclass(frozen=True, slots=True)
class LoraSettings:
    rank: int = 16
    alpha: float = 32.0
    target_modules: str | tuple[str, ...] = "all-linear"


def with_lora(model: Any, settings: LoraSettings) -> Any:
    """The peft model around `model`, which gets the adapters."""
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


def remove_dropout(model: Any) -> None:
    """Log-probabilities must be those that the engine samples from."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
