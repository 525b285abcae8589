"""From a configuration to what the mathematics needs, and from transitions to samples with advantages."""

from agentlightning.trainer.advantage import Scored, score
from agentlightning.trainer.algorithm import ValueConfig
from agentlightning.trainer.config import TrainConfig
from agentlightning.trainer.learner import LearnerSettings, LoraSettings
from agentlightning.trainer.rollouts import Collected
from agentlightning.trainer.samples import SampleSet, build_samples, read_calls
from agentlightning.trainer.shaping import shape
from agentlightning.trainer.value import ValueSettings

__all__ = ["learner_settings", "score_transitions"]


def learner_settings(config: TrainConfig) -> LearnerSettings:
    """The learner's settings that a configuration asks for."""
    train, algorithm = config.train, config.algorithm
    lora = config.policy.lora
    value = algorithm.value or ValueConfig()
    return LearnerSettings(
        lr=train.learning_rate,
        weight_decay=train.weight_decay,
        warmup_steps=train.warmup_steps,
        max_grad_norm=train.max_grad_norm,
        max_tokens=train.max_tokens,
        minibatches=train.minibatches,
        epochs=train.epochs,
        gradient_checkpointing=train.gradient_checkpointing,
        aggregate=algorithm.aggregation,
        constant_length=algorithm.constant_length,
        dtype=config.policy.dtype,
        seed=config.run.seed,
        whiten=algorithm.advantage in ("reinforce++", "gae"),
        value=ValueSettings(
            lr=value.learning_rate,
            coefficient=value.coefficient,
            clip=value.clip,
            gamma=value.gamma,
            lam=value.lam,
        )
        if algorithm.advantage == "gae"
        else None,
        lora=LoraSettings(rank=lora.rank, alpha=lora.alpha, target_modules=lora.target_modules)
        if lora
        else None,
        loss=algorithm.loss.settings,
    )


def score_transitions(config: TrainConfig, collected: Collected) -> tuple[SampleSet, Scored]:
    """Merge transitions into samples, and give each its advantage."""
    algorithm = config.algorithm
    samples = build_samples(
        read_calls(collected.transitions),
        agents=algorithm.agents,
        policy=config.policy.name,
        exclude=collected.excluded,
    )
    outcomes = collected.outcomes
    if algorithm.overlong is not None:
        outcomes = list(shape(algorithm.overlong.settings, samples, outcomes))
    scored = score(
        samples, outcomes, credit=algorithm.credit_settings, advantage=algorithm.advantage_settings
    )
    return samples, scored
