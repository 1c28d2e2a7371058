"""The loss of the last stage without its logits: the head and the cross entropy run over slices of the vocabulary.

All logits at once take 12 bytes per token and vocabulary entry (values, softmax, gradient): 12 GB for 8,192 tokens of 128k entries.
Here a slice of at most LOGITS logits exists at a time. The forward pass keeps each token's log-sum-exp; the backward
pass computes the slices again. The gradient of a slice of the head is final when it is computed, so nothing is added up and
no second copy of it exists; torch's linear_cross_entropy and Liger cut the tokens instead, and add up a gradient of the whole head,
in bf16 or in a further fp32 copy. The family's own code makes the logits, so that its scales and soft caps count.

Slices depend on the shape alone: every replica computes the same bits. Up to LOGITS logits, cut.next_token_loss runs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoal.planner.inputs.profile import LOGITS

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers.modeling_utils import PreTrainedModel

Logits = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # (hidden (N, D), rows (V', D), biases (V')) -> (N, V')


def sliced_head(model: PreTrainedModel, tokens: int) -> nn.Linear | None:
    """The model's head, where so many tokens have more than LOGITS logits. None also where the head is no plain matrix."""
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear) and tokens * head.out_features > LOGITS:
        return head
    return None


def loss(model: PreTrainedModel, head: nn.Linear, hidden_BLD: Tensor, targets_BL: Tensor) -> Tensor:
    """cut.next_token_loss from the output of the model's last norm."""
    return token_losses(model, head, hidden_BLD, targets_BL).mean()


def token_losses(model: PreTrainedModel, head: nn.Linear, hidden_BLD: Tensor, targets_BL: Tensor) -> Tensor:
    """(B, L): the cross entropy of each token, 0 for one that does not count."""
    name = next(name for name, child in model.named_children() if child is head)
    losses: Tensor = _SlicedLoss.apply(  # type: ignore[no-untyped-call]  # not annotated by torch
        _logits(model, name), hidden_BLD.flatten(0, 1), head.weight, head.bias, targets_BL.flatten()
    )
    return losses.view(targets_BL.shape)


class _Given(nn.Module):
    """Stands for the blocks: returns its input as their output."""

    def forward(self, *args: object, inputs_embeds: Tensor, **keywords: object) -> Any:
        from transformers.modeling_outputs import MoeModelOutputWithPast

        return MoeModelOutputWithPast(last_hidden_state=inputs_embeds)


class _Rows(nn.Module):
    """Stands for the head: some of its rows."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


def _logits(model: PreTrainedModel, name: str) -> Logits:
    """The family's own way from hidden states to logits, for some rows of its head."""
    alone, rows = copy.copy(model), _Rows()
    alone._modules = {**model._modules, model.base_model_prefix: _Given(), name: rows}

    def logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows.weight, rows.bias = weight, bias
        values: Tensor = alone(inputs_embeds=hidden[None], use_cache=False).logits
        return values[0].float()

    return logits


class _SlicedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_of: Logits, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
    ) -> Tensor:
        total = hidden.new_full(targets.shape, -torch.inf, dtype=torch.float32)  # log-sum-exp of the slices so far
        chosen = torch.zeros_like(total)
        hidden = hidden.detach()  # torch's FLOP counter follows what needs a gradient
        for rows in _slices(len(targets), len(weight)):
            logits = logits_of(hidden, weight[rows], None if bias is None else bias[rows])
            total = torch.logaddexp(total, logits.logsumexp(-1))
            column, inside = _columns(targets, rows)
            chosen += torch.where(inside, logits.gather(1, column), 0.0)[:, 0]
        ctx.logits_of = logits_of
        ctx.save_for_backward(hidden, weight, bias, targets, total)
        return torch.where(targets >= 0, total - chosen, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, total = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        grad_weight, grad_bias = torch.empty_like(weight), None if bias is None else torch.empty_like(bias)
        scale = torch.where(targets >= 0, grad, 0.0)[:, None]
        for rows in _slices(len(targets), len(weight)):
            leaves = [value.detach().requires_grad_() for value in (hidden, weight[rows], *_some(bias, rows))]
            with torch.enable_grad():
                logits = ctx.logits_of(leaves[0], leaves[1], leaves[2] if bias is not None else None)
            column, inside = _columns(targets, rows)
            grad_logits = (logits.detach() - total[:, None]).exp_()
            grad_logits.scatter_add_(1, column, -inside.float()).mul_(scale)
            hidden_part, grad_weight[rows], *bias_part = torch.autograd.grad(logits, leaves, grad_logits)
            grad_hidden += hidden_part
            if grad_bias is not None:
                (grad_bias[rows],) = bias_part
        return None, grad_hidden.to(hidden.dtype), grad_weight, grad_bias, None


def _some(bias: Tensor | None, rows: slice) -> tuple[Tensor, ...]:
    return () if bias is None else (bias[rows],)


def _slices(tokens: int, vocabulary: int) -> Iterator[slice]:
    size = max(1, LOGITS // tokens)
    for start in range(0, vocabulary, size):
        yield slice(start, min(start + size, vocabulary))


def _columns(targets: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
    """(N, 1) each: the column of every target in the slice, any other where it is not inside, and whether it is."""
    column = (targets - rows.start)[:, None]
    inside = (column >= 0) & (column < rows.stop - rows.start)
    return column.clamp(0, rows.stop - rows.start - 1), inside
