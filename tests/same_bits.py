"""Computes what replicas of a stage must agree on and prints a hash of each, in a process of its own.

    ATEN_CPU_CAPABILITY=default python tests/same_bits.py THREADS

For tests/numerics/test_same_bits.py.
"""

from __future__ import annotations

import hashlib
import sys

import torch
from torch import Tensor, nn

from shoal import config as configuration
from shoal.config import Config, Train
from shoal.executor.master import Master
from shoal.model import stages
from shoal.model.cut import seeded
from shoal.numerics import blend, compress, optimizer
from shoal.numerics.schedule import learning_rate
from shoal.runtime.tasks import sums

VALUES = 300_007  # more than a piece of each codec and a thread's share, and no multiple of a vector
SMALL = """model.hidden_size=64 model.layers=1 model.heads=4 model.kv_heads=2 model.intermediate_size=96
data.sequence=16 run.stages=1 train.batch=8 train.microbatch=2 run.steps=50""".split()


def show(name: str, *tensors: Tensor) -> None:
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    print(name, sha.hexdigest())


def drawn(seed: int, *shape: int) -> Tensor:
    """Integers times powers of two: inputs that no machine rounds otherwise."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-20, 8, shape, generator=generator).float()
    return torch.ldexp(torch.randint(-(1 << 23), 1 << 23, shape, generator=generator).float(), exponents - 20)


def a_config(*words: str) -> Config:
    return configuration.load(None, [*SMALL, *words])


def first_weights() -> None:
    for family in ("llama", "gemma"):
        stage = stages.build(a_config(f"model.family={family}"), 0)
        show(f"weights/{family}", *(value for _, value in stage.named_parameters()))
    with seeded(5, "x"):
        truncated = nn.init.trunc_normal_(torch.empty(50, 301), std=0.02)
        show("draws", truncated, torch.randn(1000), torch.rand(1000), *nn.Linear(33, 65).parameters())


def steps() -> None:
    for moments in ("float32", "8bit"):
        parameters = [drawn(1, 2400, 256), drawn(2, 77)]
        length = sum(value.numel() for value in parameters)
        master = Master(("a", "b"), parameters, a_config(f"train.moments={moments}"))
        for step in range(12):
            gradient = drawn(10 + step, length)
            master.apply(gradient, optimizer.norm_sq(gradient) ** 0.5, step)
        show(f"adamw/{moments}", *master.state().values())
    parameters = [drawn(1, 300, 1100), drawn(2, 90, 40), drawn(3, 77)]
    length = sum(value.numel() for value in parameters)
    master = Master(("block.0.wide", "block.0.tall", "norm"), parameters, a_config("train.optimizer=muon"))
    for step in range(3):
        gradient = drawn(30 + step, length)
        master.apply(gradient, optimizer.norm_sq(gradient) ** 0.5, step)
    show("muon", *master.state().values())
    for schedule in ("cosine", "linear", "constant"):
        rates = [learning_rate(Train(schedule=schedule), 997, step) for step in range(997)]
        show(schedule, torch.tensor(rates, dtype=torch.float64))


def sums_and_codes() -> None:
    values, outer, momentum = (drawn(seed, VALUES) for seed in (3, 4, 5))
    print("norm", optimizer.norm_sq(values).hex())
    optimizer.nesterov_(outer, momentum, values, 0.7, 0.9)
    show("outer_step", outer, momentum)
    show("blend", *blend.blend(["model/a"], {"model/a": values}, {"model/a": outer}, 1 / 3).values())
    show("sums", sums.add_up([drawn(seed, VALUES) for seed in range(6, 11)]))
    for how in ("none", "bf16", "int8", "int4"):
        code = compress.encode(values, how)
        show(how, code.data, compress.decode(code))


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    first_weights()
    steps()
    sums_and_codes()
