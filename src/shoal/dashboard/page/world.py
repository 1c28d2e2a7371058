"""The page's map of the world: where a place lies on it. assets/land.svg is the land in the same projection (tools/land.py).

Equal Earth (Savric, Patterson, Jenny 2018, "The Equal Earth map projection"): areas are true, so that no region looks larger than it is.
"""

from __future__ import annotations

from math import asin, cos, radians, sin, sqrt

from shoal.config.regions import Place

WIDTH = 1000.0  # of the map, in its own units
NORTH, SOUTH = 84.0, -57.0  # degrees that it shows: nobody trains on Antarctica

_A = (1.340264, -0.081106, 0.000893, 0.003796)
_HALF = sqrt(3) / 2


def _plane(north: float, east: float) -> tuple[float, float]:
    """The projection of the unit sphere: x to the east, y to the north."""
    a1, a2, a3, a4 = _A
    angle = asin(_HALF * sin(radians(north)))
    square = angle * angle
    high = square**3
    slope = a1 + 3 * a2 * square + high * (7 * a3 + 9 * a4 * square)
    return radians(east) * cos(angle) / (_HALF * slope), angle * (a1 + a2 * square + high * (a3 + a4 * square))


_RIGHT = _plane(0.0, 180.0)[0]
_TOP, _BOTTOM = _plane(NORTH, 0.0)[1], _plane(SOUTH, 0.0)[1]
_SCALE = WIDTH / (2 * _RIGHT)
HEIGHT = round(_SCALE * (_TOP - _BOTTOM), 1)


def projected(place: Place) -> tuple[float, float]:
    """The place on the map, in its units from the upper left."""
    x, y = _plane(*place)
    return round(_SCALE * (x + _RIGHT), 1), round(_SCALE * (_TOP - y), 1)
