"""`shoal doctor`: what each line says, its verdict and advice; that texts of others are fit to be shown; exit codes."""

from __future__ import annotations

import json
import socket
import sys
import time
from pathlib import Path

import msgspec
import pytest

from shoal import guest
from shoal.cli import main as program
from shoal.config import Config, from_tree
from shoal.core.messages import Measured
from shoal.exit_codes import ExitCode
from shoal.launcher.doctor import machine, run
from shoal.launcher.doctor.finding import Finding, Verdict, bad, graded
from shoal.launcher.doctor.run import Visit
from shoal.transport.directory.records import TTL_S, PeerRecord
from shoal.transport.identity.invite import Authority, read_invite

GOOD, WARNING, BAD, SKIPPED = Verdict.GOOD, Verdict.WARNING, Verdict.BAD, Verdict.SKIPPED
NOW = 1_800_000_000.0
DAY_S = 86400.0
EMULATED = "device.executor=emulated"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def verdicts(*findings: Finding) -> list[Verdict]:
    return [finding.verdict for finding in findings]


def test_texts_of_others_are_escaped_and_bounded() -> None:
    finding = bad("a\x1b[2Jname", "title\x1b]0;x\x07 \u202e and\nmore " + "x" * 10_000, "do\x9bthis")
    text = finding.text() + msgspec.json.encode(finding).decode()
    assert text.isprintable() and len(text) < 3000
    assert "a\\x1b[2Jname" in finding.name and "\\u202e and more" in finding.detail


def test_an_amount_is_bad_below_the_first_limit_and_doubtful_below_the_second() -> None:
    findings = [graded("x", amount, (1.0, 4.0), "d", "a") for amount in (0.5, 1.0, 3.9, 4.0)]
    assert verdicts(*findings) == [BAD, WARNING, WARNING, GOOD]
    assert [finding.advice for finding in findings] == ["a", "a", "a", ""]


# ----------------------------------------------------------------------------------------------------- this machine


def test_packages_that_are_missing_or_too_old_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "shoaltest-1.0.dist-info"
    info.mkdir()
    lines = ["msgspec>=99", "no-such-package", 'absent; extra == "data"', "pytest"]
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: shoaltest\nVersion: 1.0\n" + "".join(f"Requires-Dist: {line}\n" for line in lines)
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    finding = machine.packages("shoaltest")
    assert finding.verdict is BAD and finding.advice == "pip install --upgrade shoaltest"
    assert finding.detail == f"msgspec is {msgspec.__version__}, wanted >=99, no-such-package is missing"
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shoaltest\nVersion: 1.0\nRequires-Dist: pytest\n")
    assert machine.packages("shoaltest").verdict is GOOD
    assert machine.packages("no-such-package").verdict is SKIPPED


def test_amounts_of_this_machine_are_judged() -> None:
    gib = 1 << 30
    assert verdicts(*map(machine.memory, (None, gib // 2, 2 * gib, 8 * gib))) == [SKIPPED, BAD, WARNING, GOOD]
    limits = [(64, 64), (512, 4096), (20_000, 20_000), (-1, -1)]
    assert verdicts(*map(machine.descriptors, limits)) == [BAD, WARNING, GOOD, GOOD]
    assert "ulimit -n 4096" in machine.descriptors((512, 1 << 20)).advice
    assert "ulimit -n 700" in machine.descriptors((512, 700)).advice
    assert verdicts(*map(machine.congestion, (False, True))) == [WARNING, GOOD]
    assert "modprobe tcp_bbr" in machine.congestion(False).advice
    assert verdicts(machine.processor(2, 1.9), machine.processor(2, 2.1)) == [GOOD, WARNING]
    assert verdicts(*map(machine.clock, (None, 0, 5))) == [SKIPPED, GOOD, WARNING]
    assert verdicts(machine.own_addresses(()), machine.own_addresses(("10.0.0.1",))) == [WARNING, GOOD]
    assert "private" in machine.own_addresses(("10.0.0.1",)).detail
    assert "public" in machine.own_addresses(("10.0.0.1", "2a00::1")).detail


def test_a_port_that_is_taken_and_a_host_that_is_another_machines_are_bad() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = {"host": "127.0.0.1", "port": taken.getsockname()[1], "discovery": "gossip"}
        (finding,) = machine.ports(from_tree({"network": settings}))
        assert finding.verdict is BAD and "is taken on 127.0.0.1; name a free one" in finding.detail
    (finding,) = machine.ports(from_tree({"network": {"host": "192.0.2.200"}}))
    assert finding.verdict is BAD and "no address of this machine" in finding.detail
    assert verdicts(*machine.ports(Config())) == [GOOD]


def test_a_directory_that_cannot_be_written_is_bad() -> None:
    Path("file").write_text("")
    (finding,) = machine.disk(from_tree({"run": {"dir": "file"}}))
    assert finding.verdict is BAD and "file is a file; name a directory" in finding.detail
    (finding,) = machine.disk(Config())
    assert "free in" in finding.detail


def test_the_device_is_tried() -> None:
    (finding,) = machine.device(from_tree({"device": {"kind": "cpu"}}))
    assert finding.detail.startswith("PyTorch 2.") and finding.verdict in (GOOD, WARNING)
    (finding,) = machine.device(from_tree({"device": {"kind": "xpu"}}))
    assert finding.verdict is BAD and "try device.kind=auto" in finding.detail


# ---------------------------------------------------------------------------------------------------------- the run


def an_invite(days: float = 7, issued: float = NOW, title: str = "ours", config: bytes = b"", port: int = 9) -> str:
    return Authority.new().invite((f"127.0.0.1:{port}",), issued + days * DAY_S, title, config, issued=issued)


def a_record(peer: str = "p2", age_s: float = 5.0) -> PeerRecord:
    return PeerRecord("run", peer, "192.0.2.9", 1, expires_s=NOW - age_s + TTL_S)


def a_visit(transport: str = "tls", answers: int = 1, seen: str = "192.0.2.7", ways: tuple[str, ...] = ()) -> Visit:
    return Visit(
        transport=transport,
        records=[a_record(f"p{n}") for n in range(3)],
        asked=["p0", "p1", "p2"],
        answered=[f"p{n}" for n in range(answers)],
        words="their answers do not arrive",
        seen=seen,
        own=PeerRecord("run", "me", "192.0.2.7", 4711),
        multiaddrs=ways,
    )


def test_an_invite_that_is_over_is_doubtful_and_one_of_the_future_says_that_the_clock_is_wrong() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        invite = read_invite(an_invite(port=listener.getsockname()[1]), 0.0)
        assert verdicts(*run.checks_before(invite, NOW)) == [GOOD, GOOD]
        assert verdicts(*run.checks_before(invite, NOW + 8 * DAY_S)) == [WARNING, GOOD]
        _, clock, _ = run.checks_before(invite, NOW - DAY_S)
        assert clock.verdict is BAD and "made 24 h 00 min from now" in clock.detail
    *_, addresses = run.checks_before(invite, NOW)
    assert addresses.verdict is BAD and "refuses the connection" in addresses.detail


@pytest.mark.parametrize(
    ("age_s", "verdict", "says"),
    [
        (0, GOOD, "the same"),
        (20, GOOD, "the same"),
        (30, GOOD, "within 40 s"),
        (-30, WARNING, "at least 30.0 s behind theirs"),
        (50, WARNING, "up to 50.0 s ahead of theirs"),
        (-100, BAD, "behind theirs"),
        (80, BAD, "ahead of theirs"),
    ],
)
def test_the_clock_is_compared_with_the_newest_record(age_s: float, verdict: Verdict, says: str) -> None:
    finding = run.clock([a_record(age_s=age_s), a_record(age_s=age_s + 60)], NOW)
    assert finding.verdict is verdict and says in finding.detail
    assert run.clock([], NOW).verdict is SKIPPED


def test_who_calls_back_and_how_decides_about_reachability() -> None:
    def verdict(visit: Visit) -> Verdict:
        (finding,) = run.reachability(visit)
        return finding.verdict

    assert verdict(a_visit()) is GOOD
    assert verdict(a_visit("auto")) is WARNING and verdict(a_visit("libp2p")) is WARNING
    assert verdict(a_visit(answers=0)) is BAD
    assert verdict(Visit(transport="tls")) is SKIPPED


def test_what_a_router_lets_through_is_said() -> None:
    def judged(visit: Visit, transport: str, alone: bool = False) -> list[Verdict]:
        return verdicts(*run.ways(visit, transport, alone))

    circuit = ("/ip4/192.0.2.9/tcp/1/p2p/A/p2p-circuit/p2p/B",)
    router = "203.0.113.5"
    assert judged(a_visit(), "tls") == [GOOD, SKIPPED, SKIPPED]
    assert judged(a_visit(seen=router), "auto") == [GOOD, SKIPPED, SKIPPED], "a forwarded port"
    assert judged(a_visit(seen=router, answers=0), "tls") == [WARNING, SKIPPED, SKIPPED]
    assert judged(a_visit("auto", seen=router), "auto") == [WARNING, WARNING, WARNING]
    assert judged(a_visit("auto", seen=router, ways=circuit), "auto") == [WARNING, GOOD, GOOD]
    assert judged(a_visit(), "auto", alone=True) == [SKIPPED] * 3 == judged(a_visit(seen=""), "tls")
    assert judged(a_visit(seen="\x1b[2J"), "tls") == [SKIPPED] * 3


def test_a_slow_line_and_one_that_could_not_be_measured_are_doubtful() -> None:
    def link(rate_Bps: float, reason: str = "") -> Measured:
        return Measured(0, "p2", delay_s=0.02, bandwidth_Bps=rate_Bps, reason=reason)

    links = [("p2", link(1e6), link(2e6)), ("p3", link(1e6), link(1e4)), ("p4", link(1e6), link(0.0, "busy\x1b[2J"))]
    quick, slow, unknown = run.speeds(links)
    assert verdicts(quick, slow, unknown) == [GOOD, WARNING, WARNING]
    assert quick.detail == "8 Mbit/s up, 16 Mbit/s down, 20 ms one way" and "busy\\x1b[2J" in unknown.detail
    assert verdicts(*run.speeds([])) == [SKIPPED]


# ------------------------------------------------------------------------------------------------------ the command


def test_without_an_invite_this_machine_alone_is_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    code = program.main(["doctor", "--json", EMULATED])
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows][:3] == ["python", "packages", "device"]
    assert all(set(row) == {"name", "verdict", "detail", "advice"} and row["detail"] for row in rows)
    assert all(row["advice"] for row in rows if row["verdict"] == "warning")
    assert code == (ExitCode.FAILED if any(row["verdict"] == "bad" for row in rows) else ExitCode.OK)


def test_an_invite_that_is_none_or_leads_nowhere_is_bad(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["doctor", "shoal1abc"]) == ExitCode.FAILED
    output = capsys.readouterr().out
    assert "bad      invite " in output and "good     python " in output and "1 bad" in output.splitlines()[-1]
    title = "run\x1b[2J"
    text = an_invite(issued=time.time(), title=title, config=guest.pack({"data": {"digest": "0"}}))
    assert program.main(["doctor", text, EMULATED]) == ExitCode.FAILED
    output = capsys.readouterr().out
    assert "to run\\x1b[2J, for 16 peers" in output and "\x1b" not in output
    assert "127.0.0.1 refuses the connection" in output and "reached from outside" not in output


def test_another_version_and_files_that_are_not_here_are_bad(capsys: pytest.CaptureFixture[str]) -> None:
    invites = {
        b"1 x": "the run's peers speak protocol 1, and shoal here speaks",
        guest.pack({"data": {"source": "text", "path": "a.txt", "digest": "0"}}): "--files DIR",
    }
    for packed, says in invites.items():
        assert program.main(["doctor", an_invite(issued=time.time(), config=packed)]) == ExitCode.FAILED
        assert says in capsys.readouterr().out
