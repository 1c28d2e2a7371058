"""Writes docs/page.png, a picture of the page, from a run's directory: `python docs/page.py runs/NAME`. Needs tools/browser.sh."""

from __future__ import annotations

import argparse
import shutil
import threading
from pathlib import Path

from playwright.sync_api import sync_playwright

from shoal.cli import watch

PICTURE = Path(__file__).with_name("page.png")
SIZES = {"phone": (390, 844), "laptop": (1366, 1040), "wall": (1920, 1080)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, default=PICTURE)
    parser.add_argument("--size", choices=SIZES, default="laptop")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument(
        "--seconds", type=float, default=12.0, help="until the picture: bytes a second are measured over 10 s"
    )
    args = parser.parse_args()
    (server, bound), address = watch.server_of(args.run, "127.0.0.1", 0)
    threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True).start()
    width, height = SIZES[args.size]
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        scheme = "dark" if args.dark else "light"
        page = chromium.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        page.goto(address)
        page.wait_for_selector("#rate canvas")
        page.wait_for_timeout(args.seconds * 1000)
        page.screenshot(path=args.out)
        chromium.close()
    server.should_exit = True


if __name__ == "__main__":
    main()
