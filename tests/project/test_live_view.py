"""The picture of the live view is drawn from a run's status by the terminal's own function, and loads nothing from elsewhere."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from shoal.dashboard.terminal import Happening, PeerLine, Snapshot

DOCS = Path(__file__).parents[2] / "docs"


def test_the_picture_shows_the_status_and_needs_no_fonts_from_elsewhere() -> None:
    spec = importlib.util.spec_from_file_location("live_view", DOCS / "live_view.py")
    assert spec is not None and spec.loader is not None
    live_view = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(live_view)
    event = Happening(serial=1, elapsed_s=3.0, kind="removed", text="p1 silent for 4.2 s", label="p2")
    snapshot = Snapshot(
        name="a-run",
        elapsed_s=9.0,
        step=2,
        steps=8,
        stages=1,
        losses=(5.0, 4.0),
        peers=(PeerLine("p2", 0, True),),
        happenings=(event,),
    )
    for picture in (live_view.drawn(snapshot), (DOCS / "live-view.svg").read_text()):
        text = picture.replace("&#160;", " ")
        assert "stage" in text and "removed" in text
        assert not re.search(r"url\(.?http|<image|@font-face", picture)
    assert "p1 silent for 4.2 s" in live_view.drawn(snapshot).replace("&#160;", " ")
