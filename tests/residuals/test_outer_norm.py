"""The norm behind a sublayer: RMSNorm by another route."""

from __future__ import annotations

import pytest
import torch

from depthbench.nn.layers import RMSNorm
from depthbench.residuals._outer_norm import EagerRMSNorm, OuterNorm
from tests.oracles.compare import assert_near, randomise


def operands(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(size, generator=generator, dtype=torch.float64) for size in (shape, shape[-1:]))
    return x.requires_grad_(), weight.requires_grad_()


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_gradients_pass_gradcheck(eps):
    assert torch.autograd.gradcheck(lambda x, weight: EagerRMSNorm.apply(x, weight, eps), operands(2, 3, 5))


@pytest.mark.parametrize("shape", [(1, 1, 2), (2, 5, 7), (3, 16)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_equals_rms_norm_with_its_gradients(shape, dtype):
    plain = RMSNorm(shape[-1], 1e-3)
    outer = OuterNorm(shape[-1], 1e-3)
    for norm in (plain, outer):
        randomise(norm.double() if dtype == torch.float64 else norm)
    x = operands(*shape)[0].detach().to(dtype)
    results = []
    for norm in (plain, outer):
        given = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            y = norm(given)
            y.float().cos().sum().backward()
        assert y.dtype == given.grad.dtype == dtype
        results.append((y, given.grad, norm.weight.grad))
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    for mine, theirs in zip(*results, strict=True):
        assert_near(mine, theirs, tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_in_halves_norm_as_rms_norm_does(dtype):
    """A vector of a thousand numbers of size 40 is 1280 long, and the square of that is beyond fp16."""
    x = 40 * operands(3, 1024)[0].detach().to(dtype)
    assert torch.equal(OuterNorm(1024, 1e-6).to(dtype)(x), RMSNorm(1024, 1e-6).to(dtype)(x))


def test_second_derivatives_are_refused():
    x, weight = operands(2, 3, 4)
    (gradient,) = torch.autograd.grad(EagerRMSNorm.apply(x, weight, 1e-6).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.autograd.grad(gradient.sum(), x)


def test_many_gradients_at_once_equal_one_by_one():
    """As Jacobians are computed."""
    x, weight = operands(2, 3, 4)
    directions = torch.randn(5, 2, 3, 4, dtype=torch.float64)
    y = EagerRMSNorm.apply(x, weight, 1e-6)
    (batched,) = torch.autograd.grad(y, x, directions, retain_graph=True, is_grads_batched=True)
    for gradient, direction in zip(batched, directions, strict=True):
        assert_near(torch.autograd.grad(y, x, direction, retain_graph=True)[0], gradient, 1e-12)
