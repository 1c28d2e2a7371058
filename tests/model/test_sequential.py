"""A plain nn.Sequential cut into stages is the whole one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shoal.model import sequential
from shoal.model.cut import inputs, next_token_loss, targets


def a_model() -> nn.Sequential:
    return nn.Sequential(
        nn.Embedding(16, 8),
        nn.Linear(8, 8),
        nn.Sequential(nn.GELU(), nn.Linear(8, 8)),
        nn.LayerNorm(8),
        nn.Linear(8, 16),
    )


TOKENS = torch.arange(14).view(2, 7)


@pytest.mark.parametrize("stages", [2, 3, 4, 5])
def test_a_cut_sequential_has_the_weights_outputs_and_gradients_of_the_whole(stages: int) -> None:
    one = sequential.build(a_model, (0, 1), seed=5)
    one.loss(inputs(TOKENS), TOKENS).backward()
    parts = [sequential.build(a_model, (stage, stages), seed=5) for stage in range(stages)]
    x, xs, ys = inputs(TOKENS), [], []
    for part in parts[:-1]:
        xs.append(x)
        ys.append(part.forward(x))
        x = ys[-1].detach().requires_grad_()
    xs.append(x)
    parts[-1].loss(x, TOKENS).backward()
    for y, x in zip(reversed(ys), reversed(xs[1:]), strict=True):
        y.backward(x.grad)
    parameters = {name: value for part in parts for name, value in part.named_parameters()}
    assert list(parameters) == [name for name, _ in one.named_parameters()]
    for name, value in one.named_parameters():
        assert torch.equal(value, parameters[name]) and torch.equal(value.grad, parameters[name].grad), name


def test_modules_of_the_same_shape_start_with_different_weights_and_seeds_differ() -> None:
    def make() -> nn.Sequential:
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    one, other = (list(sequential.build(make, (0, 1), seed=seed).named_parameters()) for seed in (1, 2))
    assert not torch.equal(one[0][1], one[2][1]) and not torch.equal(one[0][1], other[0][1])


def test_the_loss_is_the_users() -> None:
    def worst(logits: Tensor, wanted: Tensor) -> Tensor:
        return 3 * next_token_loss(logits, wanted)

    plain, tripled = (sequential.build(a_model, (0, 1), seed=5, loss=loss) for loss in (next_token_loss, worst))
    assert torch.equal(3 * plain.loss(inputs(TOKENS), TOKENS), tripled.loss(inputs(TOKENS), TOKENS))
    assert torch.equal(
        next_token_loss(plain.forward(inputs(TOKENS)), targets(TOKENS)), plain.loss(inputs(TOKENS), TOKENS)
    )


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


def shares() -> nn.Sequential:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.ReLU(), nn.Sequential(layer))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Linear(2, 2), "Linear cannot be cut"),
        (lambda: nn.Sequential(Bare(), Bare()), "Bare has parameters or buffers but no reset_parameters"),
        (shares, "children 0 and 2 share a parameter"),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)), "1: stages are recomputed and cannot drop out"),
        (lambda: nn.Sequential(nn.Linear(2, 2)), r"run\.stages = 2.*1 blocks"),
    ],
)
def test_a_module_that_cannot_be_cut_is_refused(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sequential.build(make, (0, 2), seed=0)  # type: ignore[arg-type]
