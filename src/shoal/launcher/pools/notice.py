"""A cloud's notice that it takes this machine away, two minutes before (AWS) or half a minute (Google, Azure).

Each cloud's metadata service answers at one address that only its machines reach.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable

METADATA = "http://169.254.169.254"  # of all three; Google calls it metadata.google.internal, too
ANSWER_S = 2.0
PAUSE_S = 5.0  # as AWS recommends
CLOUDS = ("aws", "gcp", "azure")

Reader = Callable[[], bool]
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


def reader(cloud: str, address: str = METADATA) -> Reader:
    """Says whether a notice was given, and asks at most every 5 s. '': no cloud. ValueError: this is no machine of that cloud."""
    if not cloud:
        return lambda: False
    ask = {"aws": _aws, "gcp": _gcp, "azure": _azure}[cloud]
    try:
        last_s, given = time.monotonic(), ask(address)
    except OSError as error:
        raise ValueError(f"--notice {cloud}: no metadata service answers at {address} ({error})") from None

    def read() -> bool:
        nonlocal last_s, given
        if not given and time.monotonic() - last_s >= PAUSE_S:
            last_s = time.monotonic()
            try:
                given = ask(address)
            except OSError:  # it answered before: busy for now
                return False
        return given

    return read


def _aws(address: str) -> bool:
    """Spot instances: 404 until there is a notice. IMDSv2 wants a token."""
    token = _read(f"{address}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT")
    try:
        _read(f"{address}/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token})
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return False
        raise
    return True


def _gcp(address: str) -> bool:
    return _read(f"{address}/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"}).strip() == "TRUE"


def _azure(address: str) -> bool:
    events = json.loads(_read(f"{address}/metadata/scheduledevents?api-version=2020-07-01", {"Metadata": "true"}))
    return any(event.get("EventType") == "Preempt" for event in events.get("Events", ()))


def _read(url: str, headers: dict[str, str], method: str = "GET") -> str:
    with _open(urllib.request.Request(url, headers=headers, method=method), timeout=ANSWER_S) as answer:
        text: str = answer.read(1 << 16).decode(errors="replace")
        return text
