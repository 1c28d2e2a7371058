"""The page in a real Chromium: live, at every size, in light and dark, by keyboard, and with peers that mean harm.

Skipped where no browser is: `tools/browser.sh` installs one.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.dashboard.test_page import with_plan
from tests.recorded_run import RecordedRun

from shoal.cli import watch

playwright = pytest.importorskip(
    "playwright.sync_api", reason="no browser: tools/browser.sh installs playwright and one"
)
pytest.importorskip("uvicorn", reason="the extra `page` is not installed")
expect = playwright.expect
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SIZES = {"phone": (390, 844), "laptop": (1366, 768), "wall": (1920, 1080)}
HARM = "<img src=x onerror=\"document.title='harmed'\"><script>document.title='harmed'</script>"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        try:
            chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"no browser: {error.message.splitlines()[0]}; tools/browser.sh installs one")
        yield chromium
        chromium.close()


@contextlib.contextmanager
def shown(browser: Any, directory: Path, complains: bool = False, **context: Any) -> Iterator[Any]:
    """The page of a run; what the browser complains of is an error unless it should."""
    (server, bound), address = watch.server_of(directory, "127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    tab, faults = browser.new_page(**context), []
    tab.on("console", lambda message: faults.append(message.text) if message.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: faults.append(str(error)))
    try:
        tab.goto(address)
        tab.wait_for_selector("#stages .stage")
        yield tab
        assert complains or not faults
    finally:
        tab.close()
        server.should_exit = True
        thread.join()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RecordedRun]:
    with RecordedRun(tmp_path / "six") as run:
        for _ in range(40):
            run.tick()
        yield run


def text(tab: Any, selector: str) -> str:
    return str(tab.locator(selector).inner_text())


REGIONS = (
    "us-east-1",
    "us-west-2",
    "eu-west-1",
    "europe-west4",
    "ap-northeast-1",
    "ap-southeast-2",
    "sa-east-1",
    "the lab 60.2,24.9",
)


@pytest.mark.parametrize("size", SIZES)
def test_regions_are_on_a_map_with_who_is_there(browser: Any, tmp_path: Path, size: str) -> None:
    width, height = SIZES[size]
    with RecordedRun(tmp_path / "spread", settings=["network.region=eu-central-1"]) as run:
        for number in range(16):
            run.join(f"q{number}", number % 3, remote=True, region=REGIONS[number % 8])
        for _ in range(10):
            run.tick()
        with shown(browser, run.output.path, viewport={"width": width, "height": height}) as tab:
            badges = tab.locator(".world li")
            expect(badges).to_have_count(9)
            assert text(tab, ".world li:has-text('Frankfurt') b") == "6"
            box = tab.locator(".world svg").bounding_box()
            for at in range(9):
                mark = badges.nth(at).locator("b").bounding_box()
                assert box["x"] <= mark["x"] + mark["width"] / 2 <= box["x"] + box["width"]
                assert box["y"] <= mark["y"] + mark["height"] / 2 <= box["y"] + box["height"]
            marks = [badges.nth(at).locator("b").bounding_box() for at in range(9)]
            for one, other in itertools.combinations(marks, 2):
                assert max(abs(one["x"] - other["x"]), abs(one["y"] - other["y"])) > 0.6 * one["height"], (
                    "each can be read"
                )
            assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
            drawn = tab.evaluate("getComputedStyle(document.querySelector('.world svg')).fill")
            assert drawn != "rgb(0, 0, 0)"
            tab.locator("#map").screenshot(path=tmp_path / f"map-{size}.png")
            run.kill("p3")
            run.tick(2.0)
            expect(tab.locator(".world li[data-state=gone] b")).to_have_text("5")


def test_a_run_without_regions_has_no_map(browser: Any, run: RecordedRun) -> None:
    with shown(browser, run.output.path) as tab:
        assert tab.locator("#map").is_hidden()


def test_it_is_live_and_shows_a_peer_that_dies(browser: Any, run: RecordedRun) -> None:
    with shown(browser, run.output.path) as tab:
        assert text(tab, "h1") == "six" and text(tab, "#phase") == "running"
        assert text(tab, "#figures div:first-child span") == "20"
        assert tab.locator(".peer[data-state=serving]").count() == 6
        assert tab.locator(".stage[data-bottleneck]").count() == 1
        run.tick(2.0)
        expect(tab.locator("#figures div:first-child span")).to_have_text("21")
        run.kill("p4")
        run.join("p7", 0)
        run.tick()
        tab.wait_for_selector(".stage:nth-child(1) .peer[data-state=gone] >> text=p4")
        tab.wait_for_selector(".stage:nth-child(1) .peer[data-state=loading] >> text=p7")
        assert "p4 silent for 4.2 s" in text(tab, "#events ol")
        expect(tab.locator("#announce")).to_contain_text("p4 silent")
        assert "gone" in tab.locator("#peers tr", has_text="p4").inner_text()


def test_it_says_that_the_run_is_over_and_that_its_server_is(browser: Any, run: RecordedRun) -> None:
    with shown(browser, run.output.path) as tab:
        run.end()
        tab.wait_for_selector("#phase[data-phase=finished]")
        assert "Every sample counted once." in text(tab, "#summary")
        assert tab.locator(".stage[data-empty]").count() == 0, "nobody is missed in a run that is over"


def test_a_run_that_was_killed_is_dead(browser: Any, tmp_path: Path) -> None:
    with RecordedRun(tmp_path / "killed") as killed:
        killed.tick(30.0)
    with shown(browser, tmp_path / "killed") as tab:
        assert text(tab, "#phase") == "dead" and "DEAD since" in text(tab, "#alert")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_it_fits_every_screen(browser: Any, run: RecordedRun, size: str, scheme: str) -> None:
    width, height = SIZES[size]
    with shown(browser, run.output.path, viewport={"width": width, "height": height}, color_scheme=scheme) as tab:
        tab.wait_for_selector("#rate .uplot canvas")
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, "nothing scrolls sideways but tables"
        ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, ground[4:-1].split(","))) > 380) == (scheme == "light")
        for selector in ("#loss .chart", "#rate .chart"):
            box = tab.locator(selector).bounding_box()
            plot = tab.locator(f"{selector} canvas").bounding_box()
            assert plot["width"] > 0.8 * box["width"] and plot["height"] > 100


def test_hundreds_of_peers_fit(browser: Any, tmp_path: Path) -> None:
    with RecordedRun(tmp_path / "many", 400, 20, remote=40) as run:
        run.tick(60.0)
        with shown(browser, run.output.path, viewport={"width": 390, "height": 844}) as tab:
            assert tab.locator("#peers tbody tr").count() == 400
            assert tab.locator(".stage").count() == 20 and tab.locator("#pipeline.dense").count() == 1
            assert tab.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_table_sorts_by_mouse_and_keyboard(browser: Any, run: RecordedRun) -> None:
    with shown(browser, run.output.path) as tab:

        def column(number: int) -> list[str]:
            return list(tab.locator(f"#peers tbody tr > :nth-child({number})").all_inner_texts())

        assert column(1) == ["p1", "p4", "p2", "p5", "p3", "p6"], "by stage at first"
        tab.get_by_role("button", name="peer", exact=True).click()
        assert column(1) == ["p1", "p2", "p3", "p4", "p5", "p6"]
        tab.get_by_role("button", name="mb/s").focus()
        tab.keyboard.press("Enter")
        rates = [float(rate) for rate in column(4)]
        assert rates == sorted(rates, reverse=True)
        assert tab.get_by_role("columnheader", name="mb/s").get_attribute("aria-sort") == "descending"
        run.tick()
        tab.wait_for_timeout(1500)  # an update arrives meanwhile, and keeps the order
        assert column(4) == sorted(column(4), key=float, reverse=True)


def test_a_screen_reader_finds_its_way(browser: Any, run: RecordedRun) -> None:
    with shown(browser, run.output.path) as tab:
        for role, name in (
            ("banner", None),
            ("main", None),
            ("contentinfo", None),
            ("table", None),
            ("progressbar", "Steps committed"),
        ):
            assert tab.get_by_role(role, name=name).count() == 1, role
        for name in ("Key figures", "Pipeline", "Events", "Account microbatches", "Loss nats per token"):
            assert tab.get_by_role("region", name=name).count() >= 1, name
        assert tab.get_by_role("columnheader").count() == 14 and tab.get_by_role("rowheader").count() == 6
        loss = tab.locator("#loss .chart").get_attribute("aria-label")
        assert loss.startswith("Loss: 5.") and "over 20 steps" in loss
        assert tab.locator("[aria-live=polite]").count() == 1
        assert tab.evaluate(
            "[...document.querySelectorAll('*')].every(e => !e.id || document.querySelectorAll('#' + e.id).length === 1)"
        )
        tab.keyboard.press("Tab")
        assert tab.evaluate("document.activeElement.textContent") == "Skip to the table of peers"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("peers", "stages"), [(6, 3), (80, 8)])
def test_axe_finds_no_barrier(browser: Any, tmp_path: Path, peers: int, stages: int, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="tools/browser.sh installs axe")
    with RecordedRun(tmp_path / "six", peers, stages) as run:
        run.tick(30.0)
        run.kill("p4")
        run.join("p99", 0)
        run.tick(10.0)
        with shown(browser, run.output.path, color_scheme=scheme, bypass_csp=True) as tab:
            tab.wait_for_selector("#rate canvas")
            violations = axe.Axe().run(tab).response["violations"]
    assert [(each["id"], each["nodes"][0]["html"]) for each in violations] == []


def test_the_prediction_is_a_line_and_a_table(browser: Any, run: RecordedRun) -> None:
    with shown(browser, run.output.path) as tab:
        assert not tab.locator("#forecast").is_visible()
        with_plan(run)
        tab.wait_for_selector("#forecast dl")
        assert "+25 %" in text(tab, "#forecast") and "stage 1: compute of a1" in text(tab, "#forecast")
        expect(tab.locator("#rate .u-legend")).to_contain_text("predicted")


def test_the_axis_of_the_charts_can_be_chosen(browser: Any, run: RecordedRun) -> None:
    with shown(browser, run.output.path) as tab:
        for name, label in (("tokens", "tokens"), ("steps", "step"), ("time", "time")):
            tab.locator(".axis").get_by_text(name, exact=True).click()
            expect(tab.locator("#loss .u-label").first).to_have_text(label)


def test_names_and_reasons_of_peers_are_only_text(browser: Any, run: RecordedRun) -> None:
    run.notice("trouble", HARM)
    run.join(HARM, 1)
    run.tick(10.0)
    with shown(browser, run.output.path) as tab:
        assert HARM in text(tab, "#events ol") and HARM in tab.locator("#peers tbody").text_content()
        assert tab.locator("main img, main script").count() == 0 and tab.title() != "harmed"


def test_nothing_is_loaded_from_elsewhere_even_if_the_page_were_tricked(browser: Any, run: RecordedRun) -> None:
    answers: list[str] = []
    with shown(browser, run.output.path, complains=True) as tab:
        tab.on("response", lambda answer: answers.append(answer.url))
        blocked = tab.evaluate("""() => new Promise(done => {
            document.addEventListener('securitypolicyviolation', event => done(event.violatedDirective));
            document.body.insertAdjacentHTML('beforeend', '<img src="http://192.0.2.1/x.png">');
        })""")
    assert blocked == "img-src" and not any("192.0.2.1" in url for url in answers)
