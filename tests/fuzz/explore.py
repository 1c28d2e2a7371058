"""Looks for bytes that a decoder neither takes nor refuses, guided by coverage (atheris, libFuzzer).

    pip install atheris
    python -m tests.fuzz.explore [NAME...] [--seconds 600] [--kept DIRECTORY]

Each decoder in a process of its own, from its seeds and what `--kept` holds of earlier explorations. A mistake's bytes are written to
corpus/NAME/, where test_decoders.py tries them from then on. Exit code 1: there was one. At most 2 GiB of memory and 10 s an input.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"


def explore(name: str, folder: Path, seconds: int) -> None:
    """Does not return: libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=["shoal", "tomllib"]):
        from tests.fuzz import decoders

    target = next(one for one in decoders.TARGETS if one.name == name)
    for seed in decoders.corpus(target):
        (folder / hashlib.sha256(seed).hexdigest()[:16]).write_bytes(seed)

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        chance = random.Random(seed)
        if chance.random() < 0.4:
            return bytes(atheris.Mutate(data, most))
        return decoders.mutated(data, chance)[:most]

    limits = ["-rss_limit_mb=2048", "-timeout=10", f"-max_len={decoders.MOST_BYTES}", f"-max_total_time={seconds}"]
    words = [sys.argv[0], str(folder), f"-artifact_prefix={folder}.", "-print_final_stats=1", *limits]
    atheris.Setup(words, lambda data: decoders.attempt(target, data), custom_mutator=mutate)
    atheris.Fuzz()


def explored(name: str, folder: Path, seconds: int) -> bool:
    """One decoder in a process of its own; was there no mistake?"""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.fuzz.explore", name, "--inside", str(folder), "--seconds", str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    runs = re.findall(r"number_of_executed_units: (\d+)", done.stderr)
    places = re.findall(r"cov: (\d+)", done.stderr)
    print(f"{name}: {int(runs[-1]) if runs else 0:,} inputs, {places[-1] if places else '?'} places reached", end="")
    mistakes = sorted(folder.parent.glob(f"{folder.name}.*"))
    for file in mistakes:
        kept = CORPUS / name / hashlib.sha256(file.read_bytes()).hexdigest()[:16]
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(file.read_bytes())
        file.unlink()
        print(f", mistake in {kept.relative_to(CORPUS.parent)}", end="")
    print(flush=True)
    if done.returncode:
        words = [line for line in done.stderr.splitlines() if not line.startswith("#")]
        print("\n".join(words[-30:]), file=sys.stderr)
    return not mistakes and done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--kept", type=Path)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        explore(args.names[0], args.inside, args.seconds)
    from tests.fuzz.decoders import TARGETS

    known = [target.name for target in TARGETS]
    if unknown := [name for name in args.names if name not in known]:
        parser.error(f"no decoder {unknown[0]!r}; there are {', '.join(known)}")
    with tempfile.TemporaryDirectory() as folder:
        results = [explored(name, (args.kept or Path(folder)) / name, args.seconds) for name in args.names or known]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
