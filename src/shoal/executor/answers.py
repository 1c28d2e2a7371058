"""The known-answer test: what this machine computes from fixed inputs, for its request to join (core/leader/requests.py compares).

On the devices that the run uses: the optimizer's, which is the host's with swapping, and the one that stages compute on. 0.7 s of a CPU,
all but 3 ms to load numba and the compiled loop, which the first step would need.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.config import Config
from shoal.core.messages import KnownAnswers
from shoal.executor.base import DTYPES, device_of, digest_of
from shoal.executor.master import Master
from shoal.numerics import compress
from shoal.numerics.optimizer import nesterov_, norm_sq

ROWS, COLUMNS = 48, 256  # enough for 8-bit moments
STEPS = 3


def known_answers(config: Config) -> KnownAnswers:
    if config.device.executor == "emulated":
        return KnownAnswers()
    network = config.network
    return KnownAnswers(
        dtype=config.train.dtype,
        update=digest_of(_updated(config)),
        codes=digest_of(_decoded(how) for how in (network.activations, network.gradients, network.averaging)),
        forward=_forward(config),
    )


def _drawn(seed: int, *shape: int) -> Tensor:
    """Multiples of 2^-24 between -1 and 1: whole numbers are drawn alike everywhere."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 24), 1 << 24, shape, generator=generator).float() * 2.0**-24


def _updated(config: Config) -> list[Tensor]:
    """Parameters and moments after some steps, the norm, and an outer step of local steps."""
    device = torch.device("cpu") if config.device.executor == "swapping" else device_of(config)
    parameters = [_drawn(1, ROWS, COLUMNS).to(device), _drawn(2, COLUMNS).to(device)]
    master = Master(("block.0.matrix", "vector"), parameters, config)
    norms = []
    for step in range(STEPS):
        gradient = _drawn(3 + step, master.length)
        norms.append(norm_sq(gradient))
        master.apply(gradient, norms[-1] ** 0.5, step)
    outer, momentum = _drawn(8, COLUMNS), _drawn(9, COLUMNS)
    nesterov_(outer, momentum, _drawn(10, COLUMNS), 0.7, 0.9)
    return [*master.state().values(), torch.tensor(norms, dtype=torch.float64), outer, momentum]


def _decoded(how: str) -> Tensor:
    """Of bytes that are no machine's own: encoding may differ, what is decoded must not."""
    code = compress.encode(torch.zeros(ROWS * COLUMNS), how)
    drawn = torch.randint(1, 100, code.data.shape, generator=torch.Generator().manual_seed(11), dtype=torch.uint8)
    # 1 to 99 in every byte is a finite positive fp32 or bf16 number, and a code of int8 and int4
    return compress.decode(compress.Code(code.dtype, code.shape, code.codec, drawn))


def _forward(config: Config) -> tuple[float, ...]:
    """Eight values of a network with the operations of a layer."""
    device, dtype = device_of(config), DTYPES[config.train.dtype]
    x = _drawn(12, 8, 64).to(device, dtype)
    for seed in (13, 14):
        weight = (_drawn(seed, 64, 64) * 0.25).to(device, dtype)
        attended = torch.softmax(x @ x.T * 0.125, -1) @ x
        x = torch.nn.functional.layer_norm(x + torch.nn.functional.silu(attended @ weight), (64,))
    return tuple(float(value) for value in x[:, 0].float().cpu())
