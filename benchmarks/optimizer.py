"""How many parameters a second AdamW steps on the host, with fp32 moments and with 8-bit ones, on so many threads.

    python benchmarks/optimizer.py [--values 8388608] [--threads 1] [--repeats 5]

Beside them torch's fused AdamW, with the copy that clips its gradient, whose bits depend on the vector unit; ours as separate torch
operations, which is what a GPU runs; and torchao's own step with its 8-bit moments, as it is without a compiler. Rates are by CPU time of
the process, divided by its threads, so that other work on the machine counts little. The last line is one JSON object: value is the
rate with 8-bit moments; `fp32_moments` in `setting` is the rate with fp32 ones.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable

import torch
from torch import nn

from report import Target, parse, report
from shoal.config import Train
from shoal.numerics import eightbit
from shoal.numerics.eightbit import EightBit
from shoal.numerics.optimizer import AdamW, Factors, separate_

TORCHAO_VALUES = 1 << 20  # it makes 8-byte indices of all values at once
CACHED = 1 << 15  # values whose six tensors fit a core's cache


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--values", type=int, default=1 << 23)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    given = parse(parser)
    torch.set_num_threads(given.threads)
    rates = {}
    for name, kind in (("fp32", AdamW), ("8bit", EightBit)):
        parameter = nn.Parameter(torch.randn(given.values // 1024, 1024))
        gradients = {"a": torch.randn_like(parameter).detach()}
        adamw = kind({"a": parameter}, Train())
        step = functools.partial(adamw.step_, gradients, 0.5, 1e-3)
        rates[name] = parameter.numel() / seconds(step, given)
    rates["fp32, torch's fused"] = given.values / seconds(torchs(given.values), given)
    rates["fp32, separate operations"] = given.values / seconds(separate(given.values), given)
    rates["8bit, torchao's, not compiled"] = TORCHAO_VALUES / seconds(torchaos(), given)
    for name, rate in rates.items():
        print(f"{name:<32} {rate / 1e6:8.1f} million parameters a second")
    moment_bytes = eightbit.nbytes(given.values, "8bit") / given.values
    setting = {"values": given.values, "threads": given.threads, "moment_bytes": round(moment_bytes, 3)}
    setting["torchao_not_compiled"] = round(rates["8bit, torchao's, not compiled"] / 1e6, 1)
    setting["fp32_moments"] = round(rates["fp32"] / 1e6, 1)
    setting["torch_fused_fp32"] = round(rates["fp32, torch's fused"] / 1e6, 1)
    setting["separate_fp32"] = round(rates["fp32, separate operations"] / 1e6, 1)
    unit = "million parameters/s of a core, 8-bit moments"
    report("optimizer", rates["8bit"] / 1e6, unit, Target(None, "higher"), setting, given.record)


def seconds(step: Callable[[int], object], given: argparse.Namespace) -> float:
    """Of one step, by CPU time."""
    step(0)
    before = time.process_time()
    for number in range(given.repeats):
        step(number + 1)
    return (time.process_time() - before) / given.repeats / given.threads


def torchs(count: int) -> Callable[[int], object]:
    values, gradient = nn.Parameter(torch.randn(count)), torch.randn(count)
    adamw = torch.optim.AdamW([values], lr=1e-3, fused=True)

    def step(number: int) -> None:
        values.grad = gradient * 0.5
        adamw.step()

    return step


def separate(count: int) -> Callable[[int], object]:
    tensors = [torch.randn(count) for _ in range(3)] + [torch.rand(count)]

    def step(number: int) -> None:
        factors = Factors.of(Train(), 0.5, 1e-3, number, True)
        for pieces in zip(*(torch.split(tensor, CACHED) for tensor in tensors), strict=True):
            separate_(factors, *pieces)

    return step


def torchaos() -> Callable[[int], object]:
    from torchao.optim.adam import single_param_adam
    from torchao.optim.subclass_8bit import OptimState8bit

    values, gradient = torch.randn(TORCHAO_VALUES), torch.randn(TORCHAO_VALUES)
    moments = [OptimState8bit.zeros(values.shape, signed) for signed in (True, False)]
    rate, train = torch.tensor(1e-3), Train()

    def step(number: int) -> None:
        count = torch.tensor(number + 1.0)
        betas = train.betas
        single_param_adam(
            values, gradient, count, *moments, None, rate, *betas, train.weight_decay, train.epsilon, True, False
        )

    return step


if __name__ == "__main__":
    main()
