"""The page's server: what it sends, to whom, and what it never does. tests/e2e/test_page.py looks at it in a browser."""

from __future__ import annotations

import contextlib
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.recorded_run import RecordedRun

from shoal.cli import watch
from shoal.launcher.watching import page
from shoal.launcher.watching.reader import RunReader
from shoal.planner.strategy import plan as plans
from shoal.planner.strategy.plan import Prediction, StagePlan

WHY = "the extra `page` is not installed"
uvicorn = pytest.importorskip("uvicorn", reason=WHY)
parser = pytest.importorskip("prometheus_client.parser", reason=WHY)
app = pytest.importorskip("shoal.dashboard.page.app", reason=WHY, exc_type=ImportError)

TOKEN = "a-token-of-the-test"


@contextlib.contextmanager
def served(server: Any, sockets: list[Any]) -> Iterator[None]:
    thread = threading.Thread(target=server.run, kwargs={"sockets": sockets}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


@contextlib.contextmanager
def page_of(directory: Path) -> Iterator[str]:
    (server, bound), address = watch.server_of(directory, "127.0.0.1", 0)
    with served(server, [bound]):
        yield address


@contextlib.contextmanager
def guarded(directory: Path) -> Iterator[str]:
    """As beyond loopback: with a token."""
    reader = RunReader(directory)
    guarded_app = app.application(reader.read, lambda: reader.series, token=TOKEN, hosts=["*"])
    bound = watch._listen("127.0.0.1", 0)
    with served(
        uvicorn.Server(uvicorn.Config(guarded_app, log_level="critical", timeout_graceful_shutdown=1)), [bound]
    ):
        yield f"http://127.0.0.1:{bound.getsockname()[1]}/"


def get(address: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
    request = urllib.request.Request(address, method=method, headers=headers)
    opener = urllib.request.build_opener(NotFollowed)
    try:
        with opener.open(request, timeout=30) as answer:
            return (
                answer.status,
                {name.lower(): value for name, value in answer.headers.items()},
                answer.read().decode(),
            )
    except urllib.error.HTTPError as error:
        return error.code, {name.lower(): value for name, value in error.headers.items()}, error.read().decode()


class NotFollowed(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any) -> None:
        return None


def updates(address: str, count: int, between: Any = lambda: None) -> list[dict[str, Any]]:
    """The first events; `between` runs after each."""
    events = []
    with urllib.request.urlopen(f"{address}events", timeout=30) as answer:
        for line in answer:
            if line.startswith(b"data:"):
                events.append(msgspec.json.decode(line[5:]))
                if len(events) == count:
                    return events
                between()
    raise AssertionError("the stream has ended")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RecordedRun]:
    with RecordedRun(tmp_path / "six") as run:
        for _ in range(20):
            run.tick()
        yield run


def state_of(directory: Path) -> dict[str, Any]:
    with page_of(directory) as address:
        update = updates(address, 1)[0]
    state: dict[str, Any] = update["state"]
    state["peers"] = [dict(zip(update["peer_fields"], row, strict=True)) for row in state["peers"]]
    return state


def test_it_shows_a_run_from_its_first_step_and_then_only_what_is_new(run: RecordedRun) -> None:
    with page_of(run.output.path) as address:
        first, second = updates(address, 2, between=lambda: run.tick(2.0))
    assert first["whole"] and first["steps"]["step"] == list(range(1, 11))
    assert first["steps"]["tokens"][-1] == 10 * first["state"]["tokens_per_step"]
    assert first["steps"]["time_s"] == [2.0 * step for step in range(10)]
    assert first["steps"]["tokens_per_s"][-1] == pytest.approx(first["state"]["tokens_per_step"] / 2.0)
    assert not second["whole"] and second["steps"]["step"] == [11]
    assert second["state"]["step"] == 11 and second["state"]["phase"] == "running"


def test_peers_stages_and_the_bottleneck_are_those_of_the_launcher(run: RecordedRun) -> None:
    state = state_of(run.output.path)
    assert [peer["label"] for peer in state["peers"]] == [f"p{number}" for number in range(1, 7)]
    assert [peer["stage"] for peer in state["peers"]] == [0, 1, 2, 0, 1, 2]
    assert [peer["label"] for peer in state["peers"] if peer["leading"]] == ["p1"]
    rates = [stage["rate"] for stage in state["stages"]]
    assert rates == [
        pytest.approx(sum(p["rate"] for p in state["peers"] if p["stage"] == n), abs=0.01) for n in range(3)
    ]
    assert state["bottleneck"] == rates.index(min(rates))
    assert state["account"]["issued"] == state["account"]["committed"] > 0


def test_who_contributed_most_is_shown(run: RecordedRun) -> None:
    state = state_of(run.output.path)
    assert (state["contributor_count"], state["credited"]) == (1, 10)
    (one,) = state["contributors"]
    assert (one["rank"], one["keys"], one["share"], one["microbatches"]) == (1, 6, 1.0, 10 * 3 * 128)


def test_peers_are_on_the_map_where_their_machines_say_they_are(tmp_path: Path) -> None:
    with RecordedRun(tmp_path / "spread", settings=["network.region=eu-central-1"]) as run:
        run.join("q1", 0, remote=True, region="the lab -33.9,151.2")
        run.join("q2", 1, remote=True, region="Atlantis")  # another build's, or a liar's
        run.join("q3", 2, remote=True)
        run.tick(4.0)
        state = state_of(run.output.path)
    regions = {peer["label"][:2]: peer["region"] for peer in state["peers"]}
    assert all(regions[f"p{number}"] == "eu-central-1" for number in range(1, 7))
    assert sorted(regions.values()) == ["", "Atlantis", *["eu-central-1"] * 6, "the lab -33.9,151.2"]
    spots = state["spots"]
    assert set(spots) == {"eu-central-1", "the lab -33.9,151.2"}, "nobody is put where nobody knows"
    assert (
        spots["eu-central-1"]["title"] == "eu-central-1, Frankfurt"
        and spots["the lab -33.9,151.2"]["title"] == "the lab"
    )
    frankfurt, sydney = spots["eu-central-1"], spots["the lab -33.9,151.2"]
    assert frankfurt["x"] < sydney["x"] and frankfurt["y"] < sydney["y"]


def test_bytes_a_second_come_from_two_readings(run: RecordedRun) -> None:
    with page_of(run.output.path) as address:
        first, second = updates(address, 2, between=lambda: run.tick(4.0))
    fields = first["peer_fields"]
    assert all(row[fields.index("send_Bps")] == 0 for row in first["state"]["peers"])
    one = dict(zip(fields, second["state"]["peers"][0], strict=True))
    before = dict(zip(fields, first["state"]["peers"][0], strict=True))
    assert one["send_Bps"] == pytest.approx((one["sent"] - before["sent"]) / 4.0, rel=1e-3) and one["send_Bps"] > 0
    assert second["state"]["stages"][0]["activations_Bps"] > 0


def test_a_peer_that_dies_is_shown_as_gone_with_the_reason(run: RecordedRun) -> None:
    run.kill("p4")
    run.tick(5.0)
    state = state_of(run.output.path)
    assert {peer["label"]: peer["state"] for peer in state["peers"]}["p4"] == "gone"
    assert any(event["kind"] == "removed" and "p4 silent" in event["text"] for event in state["events"])


def test_a_finished_run_and_a_dead_one_are_shown(run: RecordedRun, tmp_path: Path) -> None:
    with RecordedRun(tmp_path / "killed") as killed:
        killed.tick(30.0)
    dead = state_of(tmp_path / "killed")
    assert dead["phase"] == "dead" and dead["words"].startswith("DEAD since")
    assert {peer["state"] for peer in dead["peers"]} == {"gone"}
    run.end()
    over = state_of(run.output.path)
    assert over["phase"] == "finished" and "Every sample counted once." in over["summary"]
    assert {peer["state"] for peer in over["peers"]} == {"left"}


def with_plan(run: RecordedRun) -> None:
    """The run follows a plan that predicts 1.6 s a step; it takes 2 s."""
    stages = tuple(StagePlan(stage, stage + 1, (f"a{stage}", f"b{stage}")) for stage in range(3))
    predicted = Prediction(1.6, 40_000.0, 1.2, 0.3, 0.1, 1e6, "stage 1: compute of a1")
    plans.save(plans.Plan(3, stages, predicted=predicted), run.output.path / "plan.json")


def test_the_prediction_of_a_plan_stands_beside_what_is_measured(run: RecordedRun) -> None:
    assert state_of(run.output.path)["forecast"] is None
    with_plan(run)
    forecast = state_of(run.output.path)["forecast"]
    assert (forecast["step_s"], forecast["tokens_per_s"]) == (1.6, 40_000.0) and "a1" in forecast["bottleneck"]
    assert forecast["text"].startswith("the plan predicted 1.60 s a step; measured 2.00 s (+25%)")


def test_a_machine_alone_has_no_peers(run: RecordedRun) -> None:
    path = run.output.path / "status.json"
    status = msgspec.json.decode(path.read_bytes())
    path.write_bytes(
        msgspec.json.encode(status | {"stages": 0, "peers": [], "state": "step 11: 3 of 128 microbatches"})
    )
    state = state_of(run.output.path)
    assert (state["phase"], state["stages"], state["bottleneck"]) == ("running", [], None)


def test_every_answer_forbids_what_is_elsewhere_and_nothing_asks_for_it(run: RecordedRun) -> None:
    with page_of(run.output.path) as address:
        status, headers, markup = get(address)
        assert status == 200 and "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        files = re.findall(r'(?:src|href)="(/assets/[^"]+)"', markup)
        assert len(set(files)) >= 5
        for name in [*files, "/assets/charts.js", "/nothing"]:
            status, headers, _ = get(address + name.lstrip("/"))
            assert status == (404 if name == "/nothing" else 200), name
            assert headers["x-content-type-options"] == "nosniff" and "content-security-policy" in headers
    for path in app.ASSETS.rglob("*.*"):
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/", "")
        assert not re.search(r"https?://(?!github\.com/leeoniya)", text), path
        assert "innerHTML" not in text or path.parent.name == "uplot"


def test_it_is_read_only_and_serves_no_other_file(run: RecordedRun) -> None:
    (run.output.path / "authority.key").write_text("a secret")
    with page_of(run.output.path) as address:
        assert (
            get(address, "POST")[0] == get(f"{address}events", "POST")[0] == get(f"{address}metrics", "PUT")[0] == 405
        )
        for path in (
            "assets/../app.py",
            "assets/%2e%2e/app.py",
            "authority.key",
            "assets/../../../../six/authority.key",
        ):
            assert get(address + path)[0] == 404


def test_another_site_cannot_reach_it_by_a_name_of_its_own(run: RecordedRun) -> None:
    with page_of(run.output.path) as address:
        assert get(f"{address}metrics", Host="evil.example")[0] == 400
        assert get(f"{address}metrics", Host="localhost:7425")[0] == 200


def test_beyond_loopback_nobody_sees_it_without_the_token(run: RecordedRun) -> None:
    with guarded(run.output.path) as address:
        for path in ("", "events", "metrics", "assets/page.js", "?token=", "?token=a-token", f"metrics?token={TOKEN}"):
            status, headers, text = get(address + path)
            assert status == 401 and "token" in text and "content-security-policy" in headers, path
        assert get(f"{address}metrics", Authorization="Bearer wrong")[0] == 401
        assert get(f"{address}metrics", Authorization=f"Bearer {TOKEN}")[0] == 200
        status, headers, _ = get(f"{address}?token={TOKEN}")
        assert status == 303 and headers["location"] == "/"
        assert "httponly" in headers["set-cookie"].lower() and "samesite=strict" in headers["set-cookie"].lower()
        assert get(address, Cookie=headers["set-cookie"].partition(";")[0])[0] == 200


def test_only_addresses_of_this_machine_are_loopback() -> None:
    assert all(map(watch.is_loopback, ("127.0.0.1", "127.0.0.2", "::1", "localhost")))
    assert not any(map(watch.is_loopback, ("0.0.0.0", "::", "192.0.2.1", "example.org", "")))


def test_the_token_stays_and_is_only_ours(tmp_path: Path) -> None:
    token = watch.token_of(tmp_path)
    assert len(token) >= 32 and watch.token_of(tmp_path) == token
    assert (tmp_path / watch.TOKEN).stat().st_mode & 0o777 == 0o600
    (tmp_path / watch.TOKEN).write_text("")
    with pytest.raises(ValueError, match="is empty"):
        watch.token_of(tmp_path)


def test_metrics_are_what_prometheus_reads(run: RecordedRun) -> None:
    run.kill("p4")
    run.tick(5.0)
    with page_of(run.output.path) as address:
        text = get(f"{address}metrics")[2]
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    assert all(re.fullmatch(r"shoal_[a-z0-9_]+", name) for name in families)
    assert all(family.documentation for family in families.values())

    def value(name: str, **labels: str) -> float:
        samples = [s for family in families.values() for s in family.samples if s.name == name and s.labels == labels]
        return float(samples[0].value)

    step = run.view.step
    assert value("shoal_steps_total") == step and value("shoal_up") == 1
    assert value("shoal_microbatches_committed_total") == run.view.account.committed
    assert value("shoal_loss") == pytest.approx(run.view.last.loss if run.view.last else 0)
    assert value("shoal_learning_rate") > 0 and value("shoal_gradient_norm") > 0
    assert value("shoal_peers", stage="0", state="gone") == 1
    assert value("shoal_sent_bytes_total", kind="gradients") > 0
    assert value("shoal_peer_memory_bytes", peer="p1") > 0
    assert {family.type for family in families.values()} == {"counter", "gauge"}


def test_what_reads_nothing_is_said_and_the_page_waits(run: RecordedRun) -> None:
    with page_of(run.output.path) as address:
        run.output.path.rename(run.output.path.with_name("moved"))
        assert get(f"{address}metrics")[0] == 503
        with urllib.request.urlopen(f"{address}events", timeout=30) as answer:
            assert next(iter(answer)).startswith(b"event: trouble")
        run.output.path.with_name("moved").rename(run.output.path)
        assert updates(address, 1)[0]["whole"]


def test_a_package_that_is_missing_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "NEEDS", ("starlette", "no_such_package"))
    with pytest.raises(ValueError, match=r"needs no_such_package, .*pip install 'shoal\[page\]'"):
        page.require()
