"""Preference pairs: the loss of DPO (arXiv 2305.18290, equation 7), for the last stage, and how their rows lie in tensors.

A microbatch of P pairs has 2 P rows of tokens, chosen and rejected in turn. Each row passes the stages twice, in one tensor between them:
rows 0 to 2 P with the adapters, as they are trained, and behind them the same rows without, as the frozen base computes them, the
reference. Only the first 2 P have a gradient, and only theirs is sent back.

loss of a pair = -log sigmoid(chosen reward - rejected reward), where the reward of an answer = beta x (log p(answer) - log p_base(answer)),
as TRL's DPOTrainer has it with loss_type = "sigmoid".
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoal.core.messages import Rewards
from shoal.model.cut import counted_pairs


def parted(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that are trained, and the reference's, of what stages exchange."""
    trained, reference = x.chunk(2)
    return trained, reference


def loss(margins: Tensor, tokens: Tensor) -> Tensor:
    """Mean over pairs, 0 for one without a counted token. `margins`: (P,), `tokens`: (2 P, L+1)."""
    return torch.where(counted_pairs(tokens), -nn.functional.logsigmoid(margins), 0.0).mean()


def rewards(margins: Tensor) -> Rewards | None:
    """Of a microbatch's pairs; NaN: one that does not count. None: none counts."""
    counted = margins[~margins.isnan()].double()
    return Rewards(float((counted > 0).double().mean()), float(counted.mean())) if len(counted) else None


def margins(trained: Tensor, reference: Tensor, beta: float) -> Tensor:
    """(P,): by how much each chosen answer's reward is above the rejected one's. `trained`, `reference`: (2 P,), of each row the sum of its
    counted tokens' losses, with adapters and without."""
    chosen, rejected = (beta * (reference - trained)).view(-1, 2).unbind(1)
    return chosen - rejected
