"""The page's map: places lie where Equal Earth puts them, and the drawn land agrees."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shoal.config import regions
from shoal.config.regions import Place
from shoal.dashboard.page import world

LAND = (Path(world.__file__).parent / "assets" / "land.svg").read_text()
MAP_JS = (Path(world.__file__).parent / "assets" / "map.js").read_text()


def rings() -> list[list[tuple[float, float]]]:
    drawn = re.search(r' d="(.*?)"', LAND)
    assert drawn
    return [
        [(float(x), float(y)) for x, y in (point.split() for point in ring.rstrip("Z").split("L"))]
        for ring in drawn[1].split("M")[1:]
    ]


def inside(x: float, y: float) -> bool:
    """By the number of edges to the right of the point (even-odd)."""
    crossed = 0
    for ring in rings():
        for (x0, y0), (x1, y1) in zip(ring, ring[1:] + ring[:1], strict=True):
            crossed += (y0 > y) != (y1 > y) and x < x0 + (y - y0) * (x1 - x0) / (y1 - y0)
    return crossed % 2 == 1


@pytest.mark.parametrize(
    "north, east, land",
    [
        (50.1, 8.7, True), (39.0, -100.0, True), (-25.0, 135.0, True), (0.0, 20.0, True), (-10.0, -55.0, True), (60.0, 100.0, True),
        (0.0, -30.0, False), (30.0, -150.0, False), (-30.0, 80.0, False), (35.0, 18.0, False), (-40.0, -20.0, False),
    ],
)  # fmt: skip
def test_land_is_land_and_sea_is_sea(north: float, east: float, land: bool) -> None:
    assert inside(*world.projected(Place(north, east))) == land


def test_the_edges_of_the_map_are_its_edges() -> None:
    assert world.projected(Place(0.0, -180.0))[0] == 0.0 and world.projected(Place(0.0, 180.0))[0] == world.WIDTH
    assert world.projected(Place(world.NORTH, 0.0))[1] == 0.0
    assert world.projected(Place(world.SOUTH, 0.0)) == (world.WIDTH / 2, world.HEIGHT)
    size = f"{world.WIDTH:.0f} {world.HEIGHT:.0f}"
    assert f'viewBox="0 0 {size}"' in LAND
    assert "WIDTH = {}, HEIGHT = {}".format(*size.split()) in MAP_JS


def test_every_region_of_a_cloud_has_a_place_on_the_map() -> None:
    assert len(regions._REGIONS) > 90
    for region in (*regions._REGIONS, *regions._PLACES):
        at = regions.place(region)
        assert at is not None and not regions.problem(region)
        x, y = world.projected(at)
        assert 0 < x < world.WIDTH and 0 < y < world.HEIGHT


@pytest.mark.parametrize(
    "written, place, shown",
    [
        ("Berlin", Place(52.5, 13.4), "Berlin"),
        ("52.5,13.4", Place(52.5, 13.4), "52.5,13.4"),
        ("the lab -33.9, 151.2", Place(-33.9, 151.2), "the lab"),
        ("eastus", Place(39.0, -77.5), "eastus, Northern Virginia"),
    ],
)
def test_a_place_is_a_region_of_a_cloud_or_a_point(written: str, place: Place, shown: str) -> None:
    assert regions.place(written) == place and regions.title(written) == shown and not regions.problem(written)


@pytest.mark.parametrize("written", ["nowhere", "91,0", "0,181", "nan,3", "1e9,0", "\u0663,3", "a" * 70 + " 1,2"])
def test_what_is_no_place_is_refused_with_what_would_be_one(written: str) -> None:
    assert regions.place(written) is None
    assert "LATITUDE,LONGITUDE" in regions.problem(written)


def test_a_near_miss_is_named() -> None:
    assert "did you mean 'eu-central-1'" in regions.problem("eu-centrall-1")
    assert "did you mean 'Frankfurt'" in regions.problem("frankfrt")
