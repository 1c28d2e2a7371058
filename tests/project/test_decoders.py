"""What runs in several threads decodes with decoders that were made at import.

msgspec 0.22 prepares a struct type when it is decoded for the first time. Two threads that do so at once crash the process: a peer that
loaded a checkpoint while another of its threads read the marker ended with a segmentation fault.
"""

from __future__ import annotations

import re
from pathlib import Path

SRC = Path(__file__).parents[2] / "src" / "shoal"
PLAIN = re.compile(r"type=(dict|list|str|bytes|int|float)\b")


def test_threads_share_only_decoders_that_were_made_at_import() -> None:
    calls = [
        f"{path.relative_to(SRC)}: {line.strip()}"
        for folder in ("runtime", "transport", "executor", "core")
        for path in sorted((SRC / folder).rglob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if ".decode(" in line and "type=" in line and not PLAIN.search(line) and "type=Invite" not in line
    ]
    assert calls == [], "use a module's msgspec Decoder"
