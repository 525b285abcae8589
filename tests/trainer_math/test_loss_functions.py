from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from agentlightning.proto.errors import ConfigError
from agentlightning.trainer.loss import (
    cispo,
    divergence,
    gspo,
    ppo,
    reinforce,
    token_loss,
)
from agentlightning.trainer.mismatch import correct, log_ratio
from agentlightning.trainer.objective import LossKind, LossSettings

KINDS: list[LossKind] = ["ppo", "reinforce", "gspo", "cispo"]
CALL = torch.tensor([0, 0, 0, 1, 1, 2])


def gradient(settings: LossSettings, logp: Tensor, logp_old: Tensor, advantages: Tensor) -> Tensor:
    logp = logp.clone().requires_grad_()
    losses = token_loss(
        settings, logp=logp, logp_old=logp_old, logp_sampler=logp_old, advantages=advantages, call=CALL
    )
    (result,) = torch.autograd.grad(losses.loss.sum(), logp)
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_on_policy_all_gradients_are_those_of_reinforce(kind: LossKind) -> None:
    torch.manual_seed(0)
    logp = -torch.rand(6, dtype=torch.float64)
    advantages = torch.tensor([0.3, -2.0, 1.1], dtype=torch.float64)[CALL]
    result = gradient(LossSettings(kind), logp, logp.clone(), advantages)
    torch.testing.assert_close(result, -advantages)


FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "ppo": lambda logp, old, a: ppo(log_ratio(logp, old), a, 0.2, 0.28, 3.0)[0],
    "reinforce": lambda logp, old, a: reinforce(logp, a),
    "k1": lambda logp, old, a: divergence("k1", logp, old),
    "k2": lambda logp, old, a: divergence("k2", logp, old),
    "k3": lambda logp, old, a: divergence("k3", logp, old),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_agree_with_finite_differences(name: str) -> None:
    torch.manual_seed(1)
    for _ in range(20):
        old = -torch.rand(6, dtype=torch.float64)
        logp = (old + torch.randn(6, dtype=torch.float64)).requires_grad_()
        advantages = torch.randn(6, dtype=torch.float64)
        assert torch.autograd.gradcheck(lambda x, o=old, a=advantages: FUNCTIONS[name](x, o, a), (logp,))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_whole_losses_agree_with_differences_of_what_they_descend(kind: LossKind) -> None:
    """What each kind promises to descend, with its frozen parts frozen, by central differences."""
    torch.manual_seed(3)
    settings = LossSettings("gspo", clip_low=0.2, clip_high=0.28) if kind == "gspo" else LossSettings(kind)
    for _ in range(10):
        old = -torch.rand(6, dtype=torch.float64)
        logp = old + 0.5 * torch.randn(6, dtype=torch.float64)
        advantages = torch.randn(3, dtype=torch.float64)[CALL]
        frozen = (logp - old).exp().clamp(max=1.28)

        def descended(x: Tensor, old: Tensor = old, a: Tensor = advantages, f: Tensor = frozen) -> Tensor:
            rho = (x - old).exp()
            match kind:
                case "reinforce":
                    return -(a * x).sum()
                case "cispo":
                    return -(f * a * x).sum()
                case "gspo":
                    rho = torch.stack([(x - old)[k == CALL].mean() for k in range(3)]).exp()[CALL]
                    return -torch.minimum(rho * a, rho.clamp(0.8, 1.28) * a).sum()
                case "ppo":
                    inner = torch.minimum(rho * a, rho.clamp(0.8, 1.28) * a)
                    return -torch.where(a < 0, torch.maximum(inner, 3 * a), inner).sum()

        step = 1e-6 * torch.eye(6, dtype=torch.float64)
        differences = torch.stack([(descended(logp + d) - descended(logp - d)) / 2e-6 for d in step])
        torch.testing.assert_close(
            gradient(settings, logp, old, advantages), differences, rtol=1e-6, atol=1e-6
        )


def test_gspo_has_the_gradient_of_the_clipped_geometric_mean() -> None:
    torch.manual_seed(2)
    for _ in range(20):
        old = -torch.rand(6, dtype=torch.float64)
        logp = (old + 0.3 * torch.randn(6, dtype=torch.float64)).requires_grad_()
        advantages = torch.randn(3, dtype=torch.float64)
        means = torch.stack([(logp - old)[k == CALL].mean() for k in range(3)]).exp()
        value = -torch.minimum(means * advantages, means.clamp(0.8, 1.28) * advantages)[CALL]
        loss, _ = gspo(logp, log_ratio(logp, old), advantages[CALL], CALL, 0.2, 0.28)
        torch.testing.assert_close(loss, value)
        (exact,) = torch.autograd.grad(value.sum(), logp, retain_graph=True)
        (result,) = torch.autograd.grad(loss.sum(), logp)
        torch.testing.assert_close(result, exact)


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    old = torch.zeros(3, dtype=torch.float64)
    logp = torch.tensor([-1.0, 0.1, 2.0], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 2.0], dtype=torch.float64)
    loss, clipped = cispo(logp, log_ratio(logp, old), advantages, 0.28)
    (result,) = torch.autograd.grad(loss.sum(), logp)
    torch.testing.assert_close(result, -logp.detach().exp().clamp(max=1.28) * advantages)
    assert clipped.tolist() == [False, False, True]


def test_the_clip_stops_the_gradient_on_the_right_side_only() -> None:
    cases = [  # (ρ, A, does the gradient flow)
        (1.5, 1.0, False),
        (1.27, 1.0, True),
        (0.5, 1.0, True),
        (0.5, -1.0, False),
        (0.81, -1.0, True),
        (1.5, -1.0, True),
        (2.9, -1.0, True),
        (3.1, -1.0, False),  # dual clip
    ]
    rho, advantages, flows = (
        torch.tensor(column, dtype=torch.float64) for column in zip(*cases, strict=True)
    )
    log_rho = rho.log().requires_grad_()
    loss, stopped = ppo(log_rho, advantages, 0.2, 0.28, 3.0)
    (result,) = torch.autograd.grad(loss.sum(), log_rho)
    assert (result != 0).tolist() == flows.bool().tolist()
    assert stopped.tolist() == (flows == 0).tolist()
    assert loss[-1] == 3.0


def test_weights_are_truncated_and_a_call_with_a_vanishing_one_is_vetoed_whole() -> None:
    old = torch.tensor([-1.0, -1.0, -1.0, -15.0, -1.0, -1.0])
    sampler = torch.tensor([-1.0, -9.0, -2.0, -1.0, -1.0, -1.5])
    correction = correct(old, sampler, CALL, cap=2.0, veto=1e-4)
    assert correction.weight.max() <= 2
    assert correction.truncated.tolist() == [False, True, True, False, False, False]
    assert correction.vetoed.tolist() == [False, False, False, True, True, False]
    losses = token_loss(
        LossSettings(), logp=old, logp_old=old, logp_sampler=sampler, advantages=torch.ones(6), call=CALL
    )
    assert losses.loss[3:5].tolist() == [0, 0]
    assert correct(old, sampler, CALL, cap=None, veto=None).weight.tolist() == [1.0] * 6


def test_masks_leave_out_calls_by_the_product_and_by_the_geometric_mean() -> None:
    log_w = torch.tensor(
        [0.4, 0.4, 0.4, 0.9, -0.9, -2.0]
    )  # calls: product e^1.2, mean e^0.4; 1, 1; e^-2, e^-2
    none = torch.zeros(6)
    both = correct(log_w, none, CALL, sequence=(0.5, 2.0), veto=None)
    assert both.masked.tolist() == [True, True, True, False, False, True]
    mean = correct(log_w, none, CALL, geometric=(0.5, 2.0), veto=None)
    assert mean.masked.tolist() == [False, False, False, False, False, True]
    settings = LossSettings(sequence_mask=(0.5, 2.0), tis_cap=None, kl_beta=0.1, entropy_bonus=0.1)
    losses = token_loss(
        settings,
        logp=log_w,
        logp_old=log_w,
        logp_sampler=none,
        advantages=torch.ones(6),
        call=CALL,
        logp_reference=none,
        entropy=torch.ones(6),
    )
    assert (losses.loss != 0).tolist() == [False, False, False, True, True, False]
    # The product over a whole rollout would have left everything out: the unit is the call.
    assert correct(log_w, none, torch.zeros(6, dtype=torch.int64), sequence=(0.5, 2.0)).masked.all()


def test_extreme_ratios_stay_finite() -> None:
    logp = torch.tensor([-500.0, 0.0], requires_grad=True)
    old = torch.tensor([0.0, -500.0])
    for kind in KINDS:
        for sign in (1.0, -1.0):
            losses = token_loss(
                LossSettings(kind, veto=None),
                logp=logp,
                logp_old=old,
                logp_sampler=torch.zeros(2),
                advantages=torch.full((2,), sign),
                call=torch.tensor([0, 1]),
            )
            assert losses.loss.isfinite().all()


def test_k3_is_never_negative() -> None:
    torch.manual_seed(0)
    logp, reference = -10 * torch.rand(2000), -10 * torch.rand(2000)
    assert (divergence("k3", logp, reference) >= 0).all()


def test_the_mean_gradient_of_k2_is_that_of_the_reverse_kl() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(5, dtype=torch.float64).log_softmax(0)
    logp = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((logp.exp() * (logp - reference)).sum(), logits, retain_graph=True)
    mean = (logp.exp().detach() * divergence("k2", logp, reference)).sum()
    (estimated,) = torch.autograd.grad(mean, logits, retain_graph=True)
    torch.testing.assert_close(estimated, exact)
    k1 = (logp.exp().detach() * divergence("k1", logp, reference)).sum()
    (nothing,) = torch.autograd.grad(k1, logits)
    torch.testing.assert_close(nothing, torch.zeros(5, dtype=torch.float64))  # why k1 in the loss is refused


def test_no_tokens_give_a_finite_zero() -> None:
    nothing = torch.zeros(0, requires_grad=True)
    for kind in KINDS:
        losses = token_loss(
            LossSettings(kind),
            logp=nothing,
            logp_old=nothing,
            logp_sampler=nothing,
            advantages=nothing,
            call=torch.zeros(0, dtype=torch.int64),
        )
        assert losses.loss.sum() == 0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kind": "pppo"}, "Did you mean 'ppo'"),
        ({"kl_beta": 0.1, "kl_kind": "k1"}, "k2 or k3"),
        ({"tis_cap": 0.5}, "tis_cap"),
        ({"dual_clip": 1.1}, "dual_clip"),
        ({"veto": 2.0}, "veto"),
        ({"sequence_mask": (1.5, 2.0)}, "two bounds around 1"),
        ({"geometric_mask": (0.5, 0.9)}, "geometric_mask"),
        ({"kind": "reinforce", "clip_low": 0.2}, "no ratio to clip"),
        ({"kl_beta": -1.0}, "not be negative"),
        ({"kl_in": "reward"}, "as long as kl_beta is 0"),
        ({"kind": "cispo", "clip_low": 0.1}, "above only"),
        ({"kind": "gspo", "dual_clip": 5.0}, "belongs to the loss 'ppo'"),
        ({"kl_in": "nowhere"}, "kl_in"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LossSettings(**fields)  # type: ignore[arg-type]
