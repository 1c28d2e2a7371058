"""`make papers`: the three papers' tables and the internet tax, recorded in recorded.json and written into docs/.

python benchmarks/papers [swarm] [dtfm] [atom] [tax-1.3B] [remains-1.3B] ...     some parts only; the others stay as recorded
python benchmarks/papers --pages                                                 the pages from what is recorded
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]  # report.py and scenarios.py; tests/atom.py

import pages  # noqa: E402

PARTS = (*pages.PAPERS, *(f"{kind}-{shape}" for kind in ("tax", "remains") for shape in pages.SHAPES))


def computed(part: str) -> object:
    if part.startswith("tax-"):
        import tax

        return tax.outcome(part.removeprefix("tax-"))
    if part.startswith("remains-"):
        import remains

        return remains.outcome(part.removeprefix("remains-"))
    return list(pages.module(part).rows())


def main() -> None:
    words = sys.argv[1:]
    wrong = [word for word in words if word not in (*PARTS, "--pages")]
    if wrong:
        raise SystemExit(f"{wrong[0]!r} is no part; {', '.join(PARTS)}, or --pages")
    for number, part in enumerate([] if "--pages" in words else words or PARTS, start=1):
        began = time.monotonic()
        print(f"{number} of {len(words or PARTS)}: {part}", flush=True)
        outcome = msgspec.to_builtins(computed(part))
        recorded = pages.recorded() | {part: outcome}
        pages.RECORDED.write_bytes(msgspec.json.format(msgspec.json.encode(recorded, order="sorted"), indent=1) + b"\n")
        print(f"{part}: {time.monotonic() - began:.0f} s", flush=True)
    pages.write(pages.recorded())


if __name__ == "__main__":
    main()
