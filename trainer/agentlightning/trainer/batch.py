"""A batch on its way through micro-batches: what goes to the packed tokens, and what is summed up over them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentlightning.trainer.loss import TokenLoss
from agentlightning.trainer.pack import Packed
from agentlightning.trainer.samples import Sample

__all__ = ["Batch", "TokenFloats", "Totals", "known", "scatter"]

TokenFloats = npt.NDArray[np.float32]


@dataclass(slots=True, eq=False)
class Batch:
    samples: Sequence[Sample]
    advantages: Sequence[TokenFloats]
    old: list[TokenFloats | None]
    reference: Sequence[TokenFloats] | None
    values_old: Sequence[TokenFloats] | None
    """V of the state in which each token was sampled, at the start of the update."""
    returns: Sequence[TokenFloats] | None
    """What those values should have been."""
    fixed_old: bool
    """True: log π_old was computed beforehand. False: it is the policy of the one step that there is."""

    def gather(self, arrays: Sequence[TokenFloats], packed: Packed, device: torch.device) -> Tensor:
        """The values of the packed tokens, (T,)."""
        numbers = np.asarray(packed.samples)[packed.sample]
        values = np.empty(len(numbers), np.float32)
        for i in packed.samples:
            rows = numbers == i
            values[rows] = arrays[i][packed.position[rows]]
        return torch.from_numpy(values).to(device)


class Totals:
    """Sums over the tokens of an update."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.gap_max = 0.0
        self.grad_norms: list[float] = []
        self.steps_not_finite = 0
        self.tokens_without_signal = 0
        self.exact_entropy = False

    @torch.no_grad()
    def add(
        self,
        batch: Batch,
        packed: Packed,
        losses: TokenLoss,
        loss: Tensor,
        logp: Tensor,
        logp_old: Tensor,
        logp_sampler: Tensor,
        entropy: Tensor | None,
    ) -> None:
        x = (logp_old - logp_sampler).clamp(-20, 20)
        w = x.exp()
        self.exact_entropy = entropy is not None
        correction = losses.correction
        values: dict[str, Tensor | float] = {
            "loss": loss,
            "tokens": float(len(logp)),
            "clipped": losses.clipped.sum(),
            "truncated": correction.truncated.sum(),
            "kl_sampler": (w - 1 - x).sum(),
            "kl_old": (logp_old - logp).sum(),
            "gap": x.abs().sum(),
            "w": w.double().sum(),
            "w_squared": w.double().square().sum(),
            "entropy": -logp.sum() if entropy is None else entropy.sum(),
            "calls_vetoed": float(len(np.unique(packed.call[correction.vetoed.cpu().numpy()]))),
            "tokens_vetoed": correction.vetoed.sum(),
            "tokens_masked": correction.masked.sum(),
            "tokens_computed": float(len(packed.input_ids)),
            "tokens_unpacked": float(sum(len(batch.samples[i].token_ids) for i in packed.samples)),
            "micro_batches": 1.0,
        }
        self._sum(values)
        self.gap_max = max(self.gap_max, float(x.abs().max()) if x.numel() else 0.0)

    @torch.no_grad()
    def add_divergence(self, divergence: Tensor) -> None:
        """From the reference, (T,)."""
        self._sum({"kl_reference": divergence.sum()})

    @torch.no_grad()
    def add_values(self, losses: Tensor, values_old: Tensor, returns: Tensor) -> None:
        """(T,) each."""
        r, error = returns.double(), (returns - values_old).double()
        self._sum(
            {
                "value_loss": losses.sum(),
                "returns": r.sum(),
                "returns_squared": r.square().sum(),
                "errors": error.sum(),
                "errors_squared": error.square().sum(),
            }
        )

    def _sum(self, values: Mapping[str, Tensor | float]) -> None:
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)

    def metrics(self) -> dict[str, float]:
        """Means over trained tokens, and counts."""
        sums = self.sums
        tokens = max(1.0, sums.get("tokens", 0.0))
        steps = max(1, len(self.grad_norms))
        metrics = {
            "loss": sums.get("loss", 0.0) / steps,
            "grad_norm": sum(self.grad_norms) / steps,
            "optimizer_steps": float(len(self.grad_norms) - self.steps_not_finite),
            "steps_not_finite": float(self.steps_not_finite),
            "clip_fraction": sums.get("clipped", 0.0) / tokens,
            "kl_sampler": sums.get("kl_sampler", 0.0) / tokens,
            "kl_old": sums.get("kl_old", 0.0) / tokens,
            "sampler_gap_mean": sums.get("gap", 0.0) / tokens,
            "sampler_gap_max": self.gap_max,
            "tis_truncated_fraction": sums.get("truncated", 0.0) / tokens,
            # Of tokens that all weigh the same, the share that would say as much as these with their w (Kong 1992).
            "sampler_ess": sums.get("w", 0.0) ** 2 / (tokens * sums["w_squared"])
            if sums.get("w_squared")
            else 1.0,
            "calls_vetoed": sums.get("calls_vetoed", 0.0),
            "tokens_vetoed": sums.get("tokens_vetoed", 0.0),
            "tokens_masked": sums.get("tokens_masked", 0.0),
            "entropy": sums.get("entropy", 0.0) / tokens,
            "entropy_is_exact": float(self.exact_entropy),
            "tokens_trained": sums.get("tokens", 0.0),
            "tokens_without_signal": float(self.tokens_without_signal),
            "tokens_computed": sums.get("tokens_computed", 0.0),
            "tokens_unpacked": sums.get("tokens_unpacked", 0.0),
            "micro_batches": sums.get("micro_batches", 0.0),
        }
        if "kl_reference" in sums:
            metrics["kl_reference"] = sums["kl_reference"] / tokens
        if "value_loss" in sums:
            metrics["value_loss"] = sums["value_loss"] / tokens
            metrics["value_explained_variance"] = self._explained(tokens)
        return metrics

    def _explained(self, tokens: float) -> float:
        """1 − Var(R − V)/Var(R); 0 where all returns are equal."""
        sums = self.sums
        variance = sums["returns_squared"] / tokens - (sums["returns"] / tokens) ** 2
        unexplained = sums["errors_squared"] / tokens - (sums["errors"] / tokens) ** 2
        return 1 - unexplained / variance if variance > 1e-12 else 0.0


def scatter(arrays: Sequence[TokenFloats | None], packed: Packed, values: Tensor) -> None:
    flat = values.detach().float().cpu().numpy()
    for k, i in enumerate(packed.samples):
        rows = packed.sample == k
        known(arrays[i])[packed.position[rows]] = flat[rows]


def known(array: TokenFloats | None) -> TokenFloats:
    assert array is not None, "log-probabilities are computed before they are used"
    return array
