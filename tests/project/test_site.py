"""The built site loads nothing from elsewhere: no script, style, font or picture, and diagrams are drawn in it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_LOADED = re.compile(
    r'<(?:script|img|iframe|source)\b[^>]*\bsrc="([^"]+)"|<link\b(?![^>]*rel="canonical")[^>]*\bhref="([^"]+)"'
)


@pytest.mark.slow
def test_a_page_of_the_site_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    for tool in ("material", "mkdocstrings", "mermaidx"):
        pytest.importorskip(tool)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    pages = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.html")}
    assert len(pages) > 20
    for page, text in pages.items():
        urls = [url for pair in _LOADED.findall(text) for url in pair if url]
        assert [url for url in urls if re.match(r"(https?:)?//", url)] == [], page
        assert 'class="mermaid"' not in text, f"{page}: the theme loads Mermaid's script from a CDN for it"
    assert "<svg" in pages[Path("view/index.html")]
    for style in tmp_path.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//|@import", style.read_text()), style
