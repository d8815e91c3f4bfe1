"""The site as a browser shows it, on a desk and on a phone: ``python3 -m docs.look``.

Needs a built site and Chromium. Each page is opened at both widths; its picture goes to
``build/pictures``. The command fails if a page is wider than the screen: tables and
code scroll by themselves.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parent.parent
SITE = ROOT / "build" / "site"
PICTURES = ROOT / "build" / "pictures"
WIDTHS = (1280, 390)
"""Pixels of a desk's screen and of a phone's."""

HEIGHT = 1600
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
MEASURE = """<script>addEventListener("load", () => {
document.title = `${document.documentElement.scrollWidth} of ${innerWidth} pixels`})
</script>"""


def opened(browser: str, page: pathlib.Path, *how: str) -> str:
    """Returns what a browser prints of a page."""
    with tempfile.TemporaryDirectory() as own:
        command = (browser, *FLAGS, f"--user-data-dir={own}", *how, page.as_uri())
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return done.stdout


def look(browser: str, site: pathlib.Path, page: pathlib.Path, width: int) -> str:
    """Takes a picture of a page; returns what is wrong with it, or ""."""
    name = str(page.relative_to(site).with_suffix("")).replace("/", "_")
    size = f"--window-size={width},{HEIGHT}"
    picture = PICTURES / f"{name}_{width}.png"
    opened(browser, page, size, f"--screenshot={picture}")
    text = opened(browser, page, size, "--virtual-time-budget=5000", "--dump-dom")
    found = re.search(r"<title>(\d+) of (\d+) pixels</title>", text)
    if found is None:
        return f"{name}: not shown at {width} pixels"
    wide, screen = map(int, found.groups())
    return f"{name}: {wide} pixels wide on a screen of {screen}" * (wide > screen)


def main() -> int:
    """Opens the pages that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="*", help="such as docs/report.html")
    named = parser.parse_args().pages
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None or not SITE.is_dir():
        print("install Chromium, and run python3 -m docs.build")
        return 2
    missing = [name for name in named if not (SITE / name).is_file()]
    if missing:
        print(f"the site has no {', '.join(missing)}")
        return 2
    PICTURES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        site = pathlib.Path(folder) / "site"
        shutil.copytree(SITE, site)
        pages = [site / n for n in named] or sorted(site.rglob("*.html"))
        for page in pages:
            page.write_text(page.read_text() + MEASURE)
        jobs = [(browser, site, page, width) for page in pages for width in WIDTHS]
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            wrong = [text for text in pool.map(lambda job: look(*job), jobs) if text]
    print("\n".join(wrong) or f"{len(pages)} pages fit both screens: {PICTURES}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
