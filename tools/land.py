"""Writes the land of the page's map: `python tools/land.py LAND.shp`, with Natural Earth's land or countries at 1:110 m (public domain,
naturalearthdata.com). Needs pyshp and shapely, which nothing else here does."""

from __future__ import annotations

import sys
from pathlib import Path

import shapefile
from shapely.geometry import box, shape
from shapely.ops import transform, unary_union

from shoal.config.regions import Place
from shoal.dashboard.page import world

ASSET = Path(world.__file__).parent / "assets" / "land.svg"
COARSE = 0.8  # units of the map that the coast may be off
LEAST = 4.0  # square units of an island


def main() -> None:
    countries = unary_union([shape(each).buffer(0) for each in shapefile.Reader(sys.argv[1]).shapes()])
    shown = countries.intersection(box(-180, world.SOUTH, 180, world.NORTH))
    land = transform(lambda east, north: world.projected(Place(north, east)), shown.segmentize(2.0))
    rings = []
    for part in sorted(land.simplify(COARSE).geoms, key=lambda each: -each.area):
        if part.area < LEAST:
            continue
        for ring in (part.exterior, *(hole for hole in part.interiors)):
            points = [f"{x:.0f} {y:.0f}" for x, y in ring.coords[:-1]]
            rings.append("M" + "L".join(dict.fromkeys(points)) + "Z")
    ASSET.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {world.WIDTH:.0f} {world.HEIGHT:.0f}">'
        f"<!-- Natural Earth, public domain; written by tools/land.py -->"
        f'<path id="land" d="{"".join(rings)}"/></svg>\n'
    )
    print(f"{ASSET}: {ASSET.stat().st_size} bytes, {len(rings)} rings")


if __name__ == "__main__":
    main()
