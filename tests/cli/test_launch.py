"""What `shoal launch` decides, and what clouds say: when a peer is started again, which hosts there are, whether a notice was given."""

from __future__ import annotations

import itertools
import json
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.launcher.pools import notice
from shoal.launcher.pools.local import remove_old
from shoal.launcher.pools.pool import Pauses
from shoal.launcher.pools.ssh import read_hosts


def test_a_peer_that_keeps_ending_is_started_with_longer_and_longer_pauses() -> None:
    pauses, starts = Pauses(), []
    for second in range(200):
        starts += [second for _ in pauses.due([0], {0: 1} if starts else {}, float(second))]
    intervals = [after - before for before, after in itertools.pairwise(starts)]
    assert intervals == [2, 3, 5, 9, 17, 33, 61, 61]  # it is seen to have ended after a second


def test_a_peer_that_ran_for_a_while_is_started_again_after_a_second() -> None:
    pauses = Pauses()
    assert pauses.due([0, 1], {}, 0.0) == [0, 1]
    for now in (1.0, 2.0, 4.0):  # the first ends at once, twice
        pauses.due([0], {0: 1}, now)
    assert pauses.due([0, 1], {0: None, 1: None}, 100.0) == []
    assert pauses.due([0, 1], {0: 137, 1: None}, 101.0) == []
    assert pauses.due([0, 1], {0: 137, 1: None}, 105.0) == [0]
    assert pauses.due([0, 1], {0: 1, 1: None}, 106.0) == []
    assert pauses.due([0, 1], {0: 1, 1: None}, 107.0) == [0]  # the pause began anew


def test_hosts_come_from_a_file_or_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# ours\nanna@box1\nbox2 # the slow one\n\nbox2\n")
    assert read_hosts(str(tmp_path / "hosts")) == ["anna@box1", "box2", "box2"]
    assert read_hosts("a,b") == ["a", "b"]
    for wrong in ("-oProxyCommand=x", ",", "a b"):  # an option of ssh is no host
        with pytest.raises(ValueError, match="--hosts"):
            read_hosts(wrong)


def test_of_a_peers_earlier_attempts_the_newest_are_kept(tmp_path: Path) -> None:
    for name in ("tiny", "tiny.1", "tiny.2", "tiny.3", "tiny.4", "notes.txt"):
        (tmp_path / name).mkdir()
    remove_old(tmp_path)
    assert len(list(tmp_path.iterdir())) == 4 and (tmp_path / "tiny").exists() and (tmp_path / "notes.txt").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["ssh", "@invite"], "--hosts FILE"),
        (["local"], "no invite"),
        (["local", "@none"], "none"),
        (["local", "shoal1abc", "--peers", "0"], "--peers 0"),
        (["slurm", "nonsense"], "invite"),
        (["ray", "@none", "--cpus", "0"], "--cpus 0 --gpus 0"),
        (["ray", "@none"], "pip install 'shoal[ray]'"),
    ],
)
def test_what_cannot_be_launched_is_said(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # not installed
    monkeypatch.delitem(sys.modules, "shoal.launcher.pools.ray_actors", raising=False)
    assert main(["launch", *words]) == 2
    assert says in capsys.readouterr().err


Answer = Callable[[str, dict[str, str]], str | None]  # what a metadata service says to a path with headers; None: 404


@pytest.fixture
def service() -> Iterator[tuple[str, dict[str, str]]]:
    """A metadata service of all clouds, and what it answers: AWS only with the token that it gave."""
    answers: dict[str, str] = {}
    wanted = {
        "/latest/meta-data": ("X-aws-ec2-metadata-token", "t0"),
        "/computeMetadata": ("Metadata-Flavor", "Google"),
    }
    wanted |= {"/metadata/": ("Metadata", "true"), "/latest/api": ("X-aws-ec2-metadata-token-ttl-seconds", "60")}

    class Service(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name, value = next(header for path, header in wanted.items() if self.path.startswith(path))
            text = answers.get(self.path)
            code = 401 if self.headers[name] != value else 404 if text is None else 200
            self.send_response(code)
            self.end_headers()
            self.wfile.write((text or "").encode())

        do_PUT = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Service)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", answers
    server.shutdown()
    server.server_close()
    thread.join()


AZURE = "/metadata/scheduledevents?api-version=2020-07-01"
QUIET = {
    "aws": {"/latest/api/token": "t0"},
    "gcp": {"/computeMetadata/v1/instance/preempted": "FALSE\n"},
    "azure": {AZURE: json.dumps({"Events": [{"EventType": "Reboot"}]})},
}
GIVEN = {
    "aws": {"/latest/meta-data/spot/instance-action": '{"action": "terminate"}'},
    "gcp": {"/computeMetadata/v1/instance/preempted": "TRUE\n"},
    "azure": {AZURE: json.dumps({"Events": [{"EventType": "Preempt"}]})},
}


@pytest.mark.parametrize("cloud", notice.CLOUDS)
def test_each_clouds_notice_is_understood(
    cloud: str, service: tuple[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notice, "PAUSE_S", 0.0)
    address, answers = service
    answers |= QUIET[cloud]
    read = notice.reader(cloud, address)
    assert not read()
    answers |= GIVEN[cloud]
    assert read()
    answers.clear()
    assert read()  # it is not taken back


def test_a_machine_of_no_cloud_is_refused(service: tuple[str, dict[str, str]]) -> None:
    with pytest.raises(ValueError, match="--notice gcp"):
        notice.reader("gcp", service[0])
    assert not notice.reader("")()
