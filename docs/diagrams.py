"""A hook of mkdocs: Mermaid diagrams are drawn as SVG when the site is built, so that its pages load nothing from elsewhere.

The theme would load Mermaid's script from a CDN for every fence of class `mermaid`; mermaidx carries that script and runs it here.
"""

from __future__ import annotations

from typing import Any

import mermaidx


def on_config(config: Any) -> None:
    fences = config.mdx_configs.setdefault("pymdownx.superfences", {})
    fences["custom_fences"] = [{"name": "mermaid", "class": "diagram", "format": drawn}]


def drawn(source: str, language: str, css_class: str, options: Any, md: Any, **_: Any) -> str:
    """On white, since its colours are those of a light page."""
    return f'<div class="{css_class}" style="background: white; overflow-x: auto">{mermaidx.render(source).svg()}</div>'
