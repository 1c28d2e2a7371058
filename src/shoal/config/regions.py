"""Where the machines of a region are, for `network.region` and the page's map: regions of clouds by their names, any other place by
its latitude and longitude.

A cloud names the city or the state that a region is in; the point is that city's, or the middle of that state. Sources: the lists of
regions that AWS, Google Cloud and Azure publish.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import NamedTuple

# Degrees north and east of the places that clouds name.
_PLACES = {
    "Amsterdam": (52.4, 4.9), "Bahrain": (26.1, 50.6), "Belgium": (50.5, 3.8), "Berlin": (52.5, 13.4), "Calgary": (51.0, -114.1),
    "California": (37.4, -121.9), "Canberra": (-35.3, 149.1), "Cape Town": (-33.9, 18.4), "Cardiff": (51.5, -3.2),
    "Chennai": (13.1, 80.3), "Chicago": (41.9, -87.6), "Columbus": (40.0, -83.0), "Dallas": (32.8, -96.8), "Delhi": (28.6, 77.2),
    "Doha": (25.3, 51.5), "Dubai": (25.2, 55.3), "Dublin": (53.3, -6.3), "Finland": (60.6, 27.1), "Frankfurt": (50.1, 8.7),
    "Gavle": (60.7, 17.1), "Geneva": (46.2, 6.1), "Hong Kong": (22.3, 114.2), "Hyderabad": (17.4, 78.5), "Iowa": (41.6, -93.6),
    "Israel": (32.1, 34.8), "Jakarta": (-6.2, 106.8), "Johannesburg": (-26.2, 28.0), "Kuala Lumpur": (3.1, 101.7),
    "Las Vegas": (36.2, -115.1), "London": (51.5, -0.1), "Los Angeles": (34.1, -118.2), "Madrid": (40.4, -3.7),
    "Marseille": (43.3, 5.4), "Melbourne": (-37.8, 145.0), "Mexico": (20.6, -100.4), "Milan": (45.5, 9.2), "Montreal": (45.5, -73.6),
    "Mumbai": (19.1, 72.9), "New Zealand": (-36.8, 174.8), "Northern Virginia": (39.0, -77.5), "Norway": (59.9, 10.8),
    "Oregon": (45.6, -121.2), "Osaka": (34.7, 135.5), "Paris": (48.9, 2.4), "Phoenix": (33.4, -112.1), "Pune": (18.5, 73.9),
    "Quebec": (46.8, -71.2), "Richmond": (36.7, -78.4), "Salt Lake City": (40.8, -111.9), "San Antonio": (29.4, -98.5),
    "Santiago": (-33.4, -70.7), "Sao Paulo": (-23.5, -46.6), "Seoul": (37.6, 127.0), "Singapore": (1.35, 103.8),
    "South Carolina": (33.2, -80.0), "Stavanger": (59.0, 5.7), "Stockholm": (59.3, 18.1), "Sydney": (-33.9, 151.2),
    "Taiwan": (24.1, 120.5), "Taipei": (25.0, 121.6), "Tokyo": (35.7, 139.7), "Toronto": (43.7, -79.4), "Turin": (45.1, 7.7),
    "Warsaw": (52.2, 21.0), "Washington": (47.2, -119.9), "Wyoming": (41.1, -104.8), "Zurich": (47.4, 8.5), "Zaragoza": (41.6, -0.9),
    "Bangkok": (13.8, 100.5), "Busan": (35.2, 129.1), "Dammam": (26.4, 50.1), "Saitama": (35.9, 139.6), "Rio de Janeiro": (-22.9, -43.2),
}  # fmt: skip
_REGIONS = {
    # AWS
    "us-east-1": "Northern Virginia", "us-east-2": "Columbus", "us-west-1": "California", "us-west-2": "Oregon",
    "af-south-1": "Cape Town", "ap-east-1": "Hong Kong", "ap-east-2": "Taipei", "ap-south-1": "Mumbai", "ap-south-2": "Hyderabad",
    "ap-northeast-1": "Tokyo", "ap-northeast-2": "Seoul", "ap-northeast-3": "Osaka", "ap-southeast-1": "Singapore",
    "ap-southeast-2": "Sydney", "ap-southeast-3": "Jakarta", "ap-southeast-4": "Melbourne", "ap-southeast-5": "Kuala Lumpur",
    "ap-southeast-6": "New Zealand", "ap-southeast-7": "Bangkok", "ca-central-1": "Montreal", "ca-west-1": "Calgary",
    "eu-central-1": "Frankfurt", "eu-central-2": "Zurich", "eu-west-1": "Dublin", "eu-west-2": "London", "eu-west-3": "Paris",
    "eu-north-1": "Stockholm", "eu-south-1": "Milan", "eu-south-2": "Zaragoza", "il-central-1": "Israel", "me-central-1": "Dubai",
    "me-south-1": "Bahrain", "mx-central-1": "Mexico", "sa-east-1": "Sao Paulo",
    # Google Cloud
    "us-central1": "Iowa", "us-east1": "South Carolina", "us-east4": "Northern Virginia", "us-east5": "Columbus",
    "us-south1": "Dallas", "us-west1": "Oregon", "us-west2": "Los Angeles", "us-west3": "Salt Lake City", "us-west4": "Las Vegas",
    "northamerica-northeast1": "Montreal", "northamerica-northeast2": "Toronto", "northamerica-south1": "Mexico",
    "southamerica-east1": "Sao Paulo", "southamerica-west1": "Santiago", "europe-central2": "Warsaw", "europe-north1": "Finland",
    "europe-north2": "Stockholm", "europe-southwest1": "Madrid", "europe-west1": "Belgium", "europe-west2": "London",
    "europe-west3": "Frankfurt", "europe-west4": "Amsterdam", "europe-west6": "Zurich", "europe-west8": "Milan",
    "europe-west9": "Paris", "europe-west10": "Berlin", "europe-west12": "Turin", "asia-east1": "Taiwan", "asia-east2": "Hong Kong",
    "asia-northeast1": "Tokyo", "asia-northeast2": "Osaka", "asia-northeast3": "Seoul", "asia-south1": "Mumbai",
    "asia-south2": "Delhi", "asia-southeast1": "Singapore", "asia-southeast2": "Jakarta", "australia-southeast1": "Sydney",
    "australia-southeast2": "Melbourne", "me-central1": "Doha", "me-central2": "Dammam", "me-west1": "Israel",
    "africa-south1": "Johannesburg",
    # Azure
    "eastus": "Northern Virginia", "eastus2": "Richmond", "centralus": "Iowa", "northcentralus": "Chicago",
    "southcentralus": "San Antonio", "westcentralus": "Wyoming", "westus": "California", "westus2": "Washington",
    "westus3": "Phoenix", "canadacentral": "Toronto", "canadaeast": "Quebec", "mexicocentral": "Mexico", "brazilsouth": "Sao Paulo",
    "brazilsoutheast": "Rio de Janeiro", "chilecentral": "Santiago", "northeurope": "Dublin", "westeurope": "Amsterdam",
    "uksouth": "London", "ukwest": "Cardiff", "francecentral": "Paris", "francesouth": "Marseille", "germanywestcentral": "Frankfurt",
    "germanynorth": "Berlin", "switzerlandnorth": "Zurich", "switzerlandwest": "Geneva", "norwayeast": "Norway",
    "norwaywest": "Stavanger", "swedencentral": "Gavle", "polandcentral": "Warsaw", "italynorth": "Milan", "spaincentral": "Madrid",
    "israelcentral": "Israel", "qatarcentral": "Doha", "uaenorth": "Dubai", "southafricanorth": "Johannesburg",
    "southafricawest": "Cape Town", "centralindia": "Pune", "southindia": "Chennai", "westindia": "Mumbai",
    "southeastasia": "Singapore", "eastasia": "Hong Kong", "japaneast": "Saitama", "japanwest": "Osaka", "koreacentral": "Seoul",
    "koreasouth": "Busan", "taiwannorth": "Taipei", "malaysiawest": "Kuala Lumpur", "indonesiacentral": "Jakarta",
    "australiaeast": "Sydney", "australiasoutheast": "Melbourne", "australiacentral": "Canberra", "newzealandnorth": "New Zealand",
}  # fmt: skip
_WRITTEN = re.compile(r"(?:(.+?)\s+)?([+-]?\d{1,3}(?:\.\d{1,9})?)\s*,\s*([+-]?\d{1,3}(?:\.\d{1,9})?)", re.ASCII)
MOST_CHARACTERS = 64


class Place(NamedTuple):
    """A point of the earth, in degrees."""

    north: float
    east: float


def place(region: str) -> Place | None:
    """Where a region is: 'eu-central-1', 'Frankfurt', '52.5,13.4' or 'the lab 52.5,13.4'; None if that is not known."""
    if (named := _REGIONS.get(region, region)) in _PLACES:
        return Place(*_PLACES[named])
    if len(region) <= MOST_CHARACTERS and (written := _WRITTEN.fullmatch(region)):
        north, east = float(written[2]), float(written[3])
        return Place(north, east) if abs(north) <= 90 and abs(east) <= 180 else None
    return None


def title(region: str) -> str:
    """A region as people read it: 'eu-central-1, Frankfurt', 'the lab'."""
    if region in _REGIONS:
        return f"{region}, {_REGIONS[region]}"
    written = _WRITTEN.fullmatch(region) if len(region) <= MOST_CHARACTERS else None
    return (written[1] if written else None) or region


def problem(region: str) -> str:
    """Why this is no region; '' if it is one, or none is given."""
    if not region or place(region):
        return ""
    near = get_close_matches(region.title(), _PLACES, 1) or get_close_matches(region.lower(), _REGIONS, 1)
    like = (
        f"did you mean {near[0]!r}? Any"
        if near
        else "a region of AWS, Google Cloud or Azure, such as 'eu-central-1'; any"
    )
    return f"{region!r} is no known region: {like} other place is 'NAME LATITUDE,LONGITUDE' in degrees, such as 'the lab 52.5,13.4'"
