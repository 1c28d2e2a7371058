"""Codecs: GB/s of fp32 input per core and bytes per value, beside hivemind's and bitsandbytes' 8 bits in the same run.

    python benchmarks/codecs.py [--values 4194304] [--seconds 1.0]

One thread, CPU seconds (so that a busy machine does not count), best of many repetitions; the relative error is against the
input in fp64, of normal values with one of 64 features 20 times the others, as in trained models. A codec is compared as its
own users call it: hivemind's `compress` and `extract` with its message, bitsandbytes' functional blockwise quantisation in
blocks of 4,096. What is not installed is left out, and said. With CUDA the same on the GPU, and its share of the memory bandwidth
(a device-to-device copy) for reading the input and writing the code. The last line's value is the slower of int8 encode
and decode, its target 1 GB/s.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from report import at_least, parse, report
from shoal import codec
from shoal.numerics import compress


class Rival(NamedTuple):
    encode: Callable[[torch.Tensor], Any]
    decode: Callable[[Any], torch.Tensor]
    nbytes: Callable[[Any], int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--values", type=int, default=1 << 22)
    parser.add_argument("--seconds", type=float, default=1.0, help="at least so long for each figure")
    asked = parse(parser)
    torch.set_num_threads(1)
    values = torch.randn(asked.values, generator=torch.Generator().manual_seed(0))
    values[::64] *= 20.0
    rivals = {how: ours(how) for how in ("bf16", "int8", "int4")}
    rivals |= hivemind() | bitsandbytes()
    found: dict[str, Any] = {}
    for name, rival in rivals.items():
        found[name] = measured(rival, values, asked.seconds)
        tell(name, found[name])
    for name in ("hivemind blockwise", "hivemind uniform", "bitsandbytes blockwise"):
        if name not in found:
            found[name] = "not installed"
            print(f"{name:24} not installed", flush=True)
    found["cuda"] = on_gpu(values) if torch.cuda.is_available() else "no GPU here"
    int8 = found["int8"]
    report(
        "codecs",
        min(int8["encode_GBps"], int8["decode_GBps"]),
        "GB/s of fp32 per core, int8",
        at_least(1.0),
        found,
        asked.record,
    )


def ours(how: str) -> Rival:
    return Rival(
        lambda values: compress.encode(values, how),
        compress.decode,
        lambda code: codec.nbytes(code.codec, code.shape, code.dtype),
    )


def hivemind() -> dict[str, Rival]:
    try:
        from hivemind.compression import BlockwiseQuantization, Uniform8BitQuantization, quantization
        from hivemind.compression.base import CompressionInfo
    except ImportError:
        return {}
    # It reads a count with int() of an array of one, which numpy 2.4 refuses; nothing else is changed.
    quantization.int = lambda array: array.item() if hasattr(array, "item") else array

    def rival(kind: Any) -> Rival:
        return Rival(
            lambda values: kind.compress(values, CompressionInfo.from_tensor(values)),
            kind.extract,
            lambda message: len(message.buffer),
        )

    found = {"hivemind uniform": rival(Uniform8BitQuantization())}
    try:  # needs bitsandbytes for its kernel
        BlockwiseQuantization().compress(torch.ones(8192), CompressionInfo.from_tensor(torch.ones(8192)))
        found["hivemind blockwise"] = rival(BlockwiseQuantization())
    except ImportError:
        pass
    return found


def bitsandbytes() -> dict[str, Rival]:
    try:
        from bitsandbytes import functional
    except ImportError:
        return {}
    return {
        "bitsandbytes blockwise": Rival(
            lambda values: functional.quantize_blockwise(values, blocksize=4096, nested=False),
            lambda code: functional.dequantize_blockwise(*code),
            lambda code: code[0].numel() + 4 * code[1].absmax.numel(),
        )
    }


def measured(rival: Rival, values: torch.Tensor, seconds: float) -> dict[str, float]:
    code = rival.encode(values)
    wanted, got = values.double(), rival.decode(code).reshape(-1).double()
    nbytes = 4 * len(values)
    return {
        "encode_GBps": round(nbytes / best(lambda: rival.encode(values), seconds) / 1e9, 2),
        "decode_GBps": round(nbytes / best(lambda: rival.decode(code), seconds) / 1e9, 2),
        "bytes_per_value": round(rival.nbytes(code) / len(values), 4),
        "relative_rms_error": float(f"{float((got - wanted).norm() / wanted.norm()):.3g}"),
        "largest_error_over_largest_value": float(f"{float((got - wanted).abs().max() / wanted.abs().max()):.3g}"),
        "bias_over_rms": float(f"{float((got - wanted).mean() / wanted.square().mean().sqrt()):.2g}"),
    }


def best(work: Callable[[], object], seconds: float) -> float:
    """CPU seconds of the fastest of at least three repetitions."""
    work()
    found, until = [], time.perf_counter() + seconds
    while len(found) < 3 or time.perf_counter() < until:
        begin = time.process_time()
        work()
        found.append(time.process_time() - begin)
    return min(found)


def on_gpu(values: torch.Tensor) -> dict[str, dict[str, float]]:
    there = values.cuda()
    copy_s = elapsed(lambda: there.clone())
    bandwidth_Bps = 2 * there.nbytes / copy_s
    found = {}
    for how in ("bf16", "int8", "int4"):
        code = compress.encode(there, how)
        moved = there.nbytes + code.data.nbytes
        encode_s, decode_s = (
            elapsed(lambda how=how: compress.encode(there, how)),
            elapsed(lambda c=code: compress.decode(c)),
        )
        found[how] = {
            "encode_GBps": round(there.nbytes / encode_s / 1e9, 1),
            "decode_GBps": round(there.nbytes / decode_s / 1e9, 1),
            "encode_share_of_bandwidth": round(moved / encode_s / bandwidth_Bps, 3),
            "decode_share_of_bandwidth": round(moved / decode_s / bandwidth_Bps, 3),
        }
    return found


def elapsed(work: Callable[[], object]) -> float:
    found = []
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / 1000)
    return min(found)


def tell(name: str, figures: dict[str, float]) -> None:
    print(f"{name:24}", "  ".join(f"{key} {value:g}" for key, value in figures.items()), flush=True)


if __name__ == "__main__":
    main()
