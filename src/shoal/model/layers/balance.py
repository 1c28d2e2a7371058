"""The load-balancing loss of mixture-of-experts models, so that a router does not send all tokens to a few experts.

Paper: Switch Transformers (arXiv 2101.03961), equations 4 to 6: experts x sum over experts of the share f of the tokens that
choose it x the mean P of its probability. The model's loss has `router_aux_loss_coef` times the mean of that over its layers. So each
layer's term needs that layer alone, and a stage adds the gradients of its own: they enter at the routers in the backward pass,
with the weight that the microbatch's mean loss has in its step. transformers takes f and P over all layers before it multiplies
them, which no stage could do alone, and which lets one layer make up for another (docs/design/2026-11-22-load-balancing.md).
The losses that a run reports are the cross entropy alone, the same for every cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoal.config import Config, masked, microbatches, slices

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers.modeling_utils import PreTrainedModel


def attach(model: PreTrainedModel, blocks: list[nn.Module], config: Config) -> None:
    """Let every router among `blocks`, those of the whole model, add its gradient to that of each slice's mean loss.

    ValueError: the family has such a loss, and its routers are not known, or only some tokens' losses count."""
    coefficient = getattr(model.config, "router_aux_loss_coef", 0.0) or 0.0
    if coefficient <= 0:
        return
    if masked(config):
        raise ValueError(
            f"model.family = {model.config.model_type!r} balances its experts over all tokens (router_aux_loss_coef = {coefficient}),"
            f" and the mean over those that count in data.format = {config.data.format!r} would scale that loss too;"
            " set model.extra.router_aux_loss_coef=0.0 to train without it"
        )
    recorder = (getattr(model.base_model, "_can_record_outputs", None) or {}).get("router_logits")
    # Else no plain router
    kind = getattr(recorder, "target_class", ()) if getattr(recorder, "index", None) == 0 else ()
    routers = [module for block in blocks for module in block.modules() if isinstance(module, kind)]
    if not routers:
        raise ValueError(
            f"model.family = {model.config.model_type!r} balances its experts by a loss (router_aux_loss_coef = {coefficient}),"
            " but its routers are not known here; set model.extra.router_aux_loss_coef=0.0 to train without it"
        )
    top_k, weight = (
        model.config.num_experts_per_tok,
        coefficient / len(routers) / (microbatches(config.train) * slices(config)),
    )

    def hook(module: nn.Module, args: object, output: Any) -> Any:
        if not torch.is_grad_enabled():
            return output
        if isinstance(output, Tensor):
            return _Balanced.apply(output, output, top_k, weight)  # type: ignore[no-untyped-call]  # not annotated by torch
        carrier = max(place for place, value in enumerate(output) if isinstance(value, Tensor) and value.requires_grad)
        balanced = _Balanced.apply(output[carrier], output[0], top_k, weight)  # type: ignore[no-untyped-call]  # nor here
        return (*output[:carrier], balanced, *output[carrier + 1 :])

    for router in routers:
        router.register_forward_hook(hook)


def balance_loss(logits_NE: Tensor, top_k: int) -> Tensor:
    """Of one layer; 1 x `top_k` where all experts are chosen alike."""
    experts = logits_NE.shape[-1]
    probabilities = logits_NE.float().softmax(-1)
    chosen = torch.zeros_like(probabilities).scatter_(1, probabilities.topk(top_k, -1).indices, 1.0)
    return experts * (chosen.mean(0) * probabilities.mean(0)).sum()


class _Balanced(torch.autograd.Function):
    """Passes `carrier` on; its backward pass adds `weight` times the gradient of the balance to that of the logits."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, logits: Tensor, top_k: int, weight: float) -> Tensor:
        ctx.top_k, ctx.weight = top_k, weight
        ctx.save_for_backward(logits)
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (saved,) = ctx.saved_tensors
        logits = saved.detach().requires_grad_()
        with torch.enable_grad():
            (part,) = torch.autograd.grad(balance_loss(logits, ctx.top_k) * ctx.weight, logits)
        return grad, part, None, None
