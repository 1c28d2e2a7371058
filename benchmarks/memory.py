"""The memory that stages were planned to take over what they take, in shapes drawn from a seed.

    python benchmarks/memory.py [--seeds 100] [--adapters [nf4] [--swapping | --pairs]]

Of each shape (tests/memory_shapes.py) every stage is counted on the meta device and planned, then built on the CPU, where torch's profiler
sees each allocation: resident over two backward passes and an optimizer step, swapping with the least memory that the planner
gives it, with half of a resident stage's, and without a limit. The table has a row for each kind of shape. The value is the share of
figures from 1.00 to 1.05; the last line is one JSON object.
--adapters: each shape resident, or with --swapping swapping, with LoRA adapters (tune.method), beside weights in train.dtype or in 4 bits;
--pairs: with preference pairs as samples.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from report import at_least, parse, report

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tests.memory_shapes

from tests import memory_shapes
from tests.memory_shapes import Figure

from shoal.config import Config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=memory_shapes.SEEDS)
    parser.add_argument("--adapters", nargs="?", const="none", choices=["none", "nf4"], metavar="nf4")
    parser.add_argument("--swapping", action="store_true")
    parser.add_argument("--pairs", action="store_true", help="with --adapters: of preference pairs (DPO)")
    given = parse(parser)
    if (given.swapping or given.pairs) and not given.adapters:
        parser.error("--swapping says how adapters are held, --pairs what they are trained on; add --adapters")
    if given.swapping and given.pairs:
        parser.error("preference pairs are not computed by swapping stages; leave one of both out")
    with tempfile.TemporaryDirectory() as folder:
        executor = "swapping" if given.swapping else "resident"
        shapes = chosen(given.seeds, Path(folder), given.adapters, executor, given.pairs)
        ratios, outside = compared(shapes)
    print(f"{'planned / measured':28} {'figures':>8} {'least':>7} {'mean':>7} {'most':>7}")
    for kind, values in ratios.items():
        print(f"{kind:28} {len(values):8} {min(values):7.3f} {sum(values) / len(values):7.3f} {max(values):7.3f}")
    every = ratios["all"]
    setting = {"shapes": given.seeds, "figures": len(every), "outside": outside}
    setting |= {kind: [round(min(values), 3), round(max(values), 3)] for kind, values in ratios.items()}
    share = 1 - len(outside) / len(every)
    report(
        {None: "memory.planned", "none": "memory.adapters", "nf4": "memory.adapters_nf4"}[given.adapters]
        + ("_swapping" if given.swapping else "_pairs" if given.pairs else ""),
        share,
        "share of figures from 1.00 to 1.05 of measured",
        at_least(1.0),
        setting,
        given.record,
    )


def chosen(seeds: int, bases: Path, adapters: str | None, executor: str, pairs: bool) -> Iterator[Config]:
    """`bases`: where the models of adapters are written."""
    for seed in range(seeds):
        config = memory_shapes.drawn(seed)
        if adapters is not None:
            config = memory_shapes.adapted(config, seed, bases / str(seed), adapters, executor)
            config = memory_shapes.preferring(config) if pairs else config
        yield config


def compared(shapes: Iterable[Config]) -> tuple[dict[str, list[float]], list[str]]:
    """Planned over measured by kind of shape, and what lies outside of the bounds."""
    ratios: dict[str, list[float]] = defaultdict(list)
    outside = []
    for seed, config in enumerate(shapes):
        for figure in memory_shapes.figures(config):
            for kind in kinds(config, figure):
                ratios[kind].append(figure.ratio)
            if not 1 <= figure.ratio <= 1 + memory_shapes.ABOVE:
                outside.append(f"seed {seed}, {figure.what}: {figure.ratio:.3f}")
                print(outside[-1], flush=True)
    return ratios, outside


def kinds(config: Config, figure: Figure) -> Iterator[str]:
    device, train, model = config.device, config.train, config.model
    yield "all"
    executor = device.executor
    if executor == "swapping":
        executor += ", by the planner" if figure.what.endswith("planner") else ", by the executor"
    yield f"{executor}, {train.dtype}"
    names = {
        "slices": device.sequences,
        "activation checkpointing": device.checkpointing,
        "kept activations": device.kept_activations,
        "tied embeddings": model.tied_embeddings,
        "experts": model.family == "mixtral",
        "scores kept (gemma2)": model.family == "gemma2",
        "packed documents": config.data.document_end >= 0,
        "8-bit moments": train.moments == "8bit",
        "delayed updates": train.staleness,
        "local steps": train.local_steps > 1,
    }
    yield from (name for name, applies in names.items() if applies)


if __name__ == "__main__":
    main()
