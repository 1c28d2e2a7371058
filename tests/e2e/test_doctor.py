"""`shoal doctor INVITE` on a second machine: with a clear way, behind what lets no call through, and what libp2p makes of that."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.e2e.machines import HOSTS, Machine, ip, machines
from tests.e2e.test_run import NO_MODEL
from tests.e2e.test_two_machines import invited

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
__all__ = ["machines"]  # a fixture


def doctor(machine: Machine, *words: str) -> dict[str, dict[str, Any]]:
    program = machine.shoal("doctor", "--json", *words, *NO_MODEL)
    code = program.end(300)
    rows = {row["name"]: row for row in json.loads(program.output.splitlines()[-1])}
    assert code == any(row["verdict"] == "bad" for row in rows.values()), program.output
    print("\n".join(f"{row['verdict']:<8} {row['name']:<22} {row['detail']}; {row['advice']}" for row in rows.values()))
    return rows


def test_a_machine_that_is_reached_is_good(machines: tuple[Machine, Machine]) -> None:
    host, guest = machines
    rows = doctor(guest, invited(host))
    for name in ("invite", "version and files", "peers", "clock and peers", "reached from outside", "router (NAT)"):
        assert rows[name]["verdict"] == "good", rows[name]
    assert HOSTS[1] in rows["router (NAT)"]["detail"]
    (speed,) = [row for name, row in rows.items() if name.startswith("speed to ")]
    assert speed["verdict"] == "good" and "Mbit/s up" in speed["detail"]


def test_a_machine_whose_answers_do_not_arrive_is_bad_unless_libp2p_carries_them(
    machines: tuple[Machine, Machine],
) -> None:
    """It listens where the host has no way to; its calls arrive from another address, as behind a router."""
    host, guest = machines
    ip("-n", guest.name, "addr", "add", "10.88.0.2/32", "dev", "lo")
    rows = doctor(guest, invited(host), "network.host=10.88.0.2")
    assert rows["reached from outside"]["verdict"] == "bad"
    assert f"see this machine as {HOSTS[1]}, a router's address" in rows["reached from outside"]["detail"]
    assert rows["router (NAT)"]["verdict"] == "warning" and rows["relay"]["verdict"] == "skipped"
    host.programs[0].process.kill()
    host.programs[0].process.wait()

    rows = doctor(guest, invited(host, "network.transport=auto", "run.name=second"), "network.host=10.88.0.2")
    assert rows["reached from outside"]["verdict"] == "warning"
    assert rows["peers"]["detail"] == "1 peer of second found", "not this machine's own earlier visit"
    assert "over libp2p alone" in rows["reached from outside"]["detail"]
    assert rows["router (NAT)"]["verdict"] == "warning" and rows["relay"]["verdict"] == "warning"
