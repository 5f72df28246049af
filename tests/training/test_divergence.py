"""A value that is not finite is found where it began, in every design, and before the optimizer step."""

import pytest
import torch

from depthbench import residuals
from depthbench.nn.model import build_model
from depthbench.residuals.base import map_tensors
from depthbench.training.divergence import NOT_AGAIN, first_place
from depthbench.training.module import cross_entropy

LAYERS = 3


def model_of(arch="pre_ln"):
    torch.manual_seed(0)
    return build_model(arch, n_layer=LAYERS, d_model=32, n_head=2, vocab_size=64)


def batches(count=1):
    return [torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(number)) for number in range(count)]


def output_weight(model, block, sublayer):
    """The last matrix of a sublayer's branch: what it holds first shows in branch_out."""
    core = getattr(model.blocks[block], sublayer).core
    return [parameter for parameter in core.parameters() if parameter.ndim == 2][-1]


def with_gradients(model, batch):
    cross_entropy(model(batch[:, :-1]), batch).backward()
    return model


@pytest.mark.parametrize("arch", residuals.names())
@pytest.mark.parametrize(("block", "sublayer", "called"), [(1, "attention", "attention"), (2, "feed_forward", "feed-forward")])
def test_the_first_block_and_tap_in_every_design(arch, block, sublayer, called):
    model, (batch,) = model_of(arch), batches()
    with torch.no_grad():
        output_weight(model, block, sublayer)[0, 0] = float("inf")
    assert first_place(model, [batch], cross_entropy) == f"first at branch_out of block {block} ({called})"


class NanGradient(torch.autograd.Function):
    """The identity, whose gradient is NaN."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch.full_like(gradient, float("nan"))


@pytest.mark.parametrize("arch", residuals.names())
def test_a_gradient_that_begins_inside_a_block(arch):
    model, (batch,) = model_of(arch), batches()
    model.blocks[1].feed_forward.register_forward_pre_hook(lambda module, args: (NanGradient.apply(args[0]), *args[1:]))
    with_gradients(model, batch)
    assert first_place(model, [batch], cross_entropy) == NOT_AGAIN  # all values are finite
    place = first_place(model, [batch], cross_entropy, backward=True)
    assert place == "first at the gradient of branch_in of block 1 (feed-forward)"


@pytest.mark.parametrize("arch", residuals.names())
@pytest.mark.parametrize(("sublayer", "place"), [(0, "state_in of block 0 (attention)"), (4, "state_in of block 2 (attention)")])
def test_a_gradient_that_begins_where_the_depth_state_is_read(arch, sublayer, place, monkeypatch):
    model, (batch,) = model_of(arch), batches()
    read = model.residual.read

    def spoilt(state, *, sublayer: int, at=sublayer):
        if sublayer == at:
            state = map_tensors(lambda tensor: NanGradient.apply(tensor) if tensor.numel() else tensor, state)
        return read(state, sublayer=sublayer)

    monkeypatch.setattr(model.residual, "read", spoilt)
    with_gradients(model, batch)
    assert first_place(model, [batch], cross_entropy, backward=True) == f"first at the gradient of {place}"


def test_a_gradient_of_a_parameter_only():
    model, (batch,) = model_of(), batches()
    weight = output_weight(model, 1, "attention")
    weight.register_hook(lambda gradient: gradient * float("inf"))
    with_gradients(model, batch)
    (name,) = [name for name, parameter in model.named_parameters() if parameter is weight]
    assert first_place(model, [batch], cross_entropy, backward=True) == f"first at the gradient of parameter {name}"


def test_the_embedding_the_logits_and_the_loss():
    (batch,) = batches()
    model = model_of()
    with torch.no_grad():
        model.embedding.weight[batch[0, 0]] = float("nan")
    assert first_place(model, [batch], cross_entropy) == "first at the embedding"
    model = model_of()
    with torch.no_grad():
        model.head.weight[3, 3] = float("nan")
    assert first_place(model, [batch], cross_entropy) == "first at the logits"
    model = with_gradients(model_of(), batch)  # all of them finite
    assert first_place(model, [batch], lambda *_: torch.tensor(float("inf")), backward=True) == "first at the loss of finite logits"


def test_the_micro_batch_is_named():
    model, several = model_of(), batches(4)
    inputs = [set(batch[:, :-1].flatten().tolist()) for batch in several]
    only_in_third = (inputs[2] - inputs[0] - inputs[1]).pop()
    with torch.no_grad():
        model.embedding.weight[only_in_third] = float("nan")
    assert first_place(model, several, cross_entropy) == "first at the embedding, in micro-batch 3"


def test_a_sum_of_gradients_that_overflows_over_micro_batches():
    model, several = model_of(), batches(2)
    weight = model.blocks[1].attention.core.o_proj.weight
    weight.register_hook(lambda gradient: torch.full_like(gradient, 3e38))
    for batch in several:
        with_gradients(model, batch)
    place = first_place(model, several, cross_entropy, backward=True)
    assert place == f"{NOT_AGAIN}; it was in the gradient of parameter blocks.1.attention.core.o_proj.weight"


def test_a_norm_that_overflows_with_finite_gradients():
    model, (batch,) = model_of(), batches()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e30)
    place = first_place(model, [batch], cross_entropy, backward=True)
    assert place == "every gradient is finite, and their norm is too large for a number"


def test_what_does_not_show_again_says_so_and_nothing_is_touched():
    model, (batch,) = model_of(), batches()
    with_gradients(model, batch)
    assert first_place(model, [batch], cross_entropy, backward=True) == NOT_AGAIN
    model.head.weight.grad[0, 0] = float("nan")
    before = [(parameter.clone(), parameter.grad.clone()) for parameter in model.parameters()]
    place = first_place(model, [batch], cross_entropy, backward=True)
    assert place == f"{NOT_AGAIN}; it was in the gradient of parameter head.weight"
    for parameter, (value, gradient) in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter, value, rtol=0, atol=0)
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0, equal_nan=True)


def test_a_compiled_model_is_looked_into_without_its_regions():
    model, (batch,) = model_of(), batches()
    model.compile_regions(backend="eager")
    with torch.no_grad():
        output_weight(model, 1, "attention")[0, 0] = float("nan")
    assert first_place(model.eager(), [batch], cross_entropy) == "first at branch_out of block 1 (attention)"


def test_a_step_that_cannot_be_run_again_has_diverged_all_the_same():
    model, (batch,) = model_of(), batches()

    def without_memory(module, args):
        raise torch.OutOfMemoryError("out of memory\nTried to allocate")

    model.head.register_forward_pre_hook(without_memory)
    place = first_place(model, [batch], cross_entropy)
    assert place == "where it began is not known, it could not be run again: out of memory"
