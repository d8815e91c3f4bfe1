"""The documentation as a site: ``python3 -m docs.build [--serve]``.

Needs the extra ``docs``. The site is written to ``build/site``; a link that leads
nowhere is an error. Tables and the API's page are filled by ``tests.bench.tables``.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent


def main() -> int:
    """Builds the site, or serves it while pages are edited."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", action="store_true", help="show it on this machine")
    command = ["serve"] if parser.parse_args().serve else ["build", "--strict"]
    mkdocs = [sys.executable, "-m", "mkdocs", *command]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # about another program
    return subprocess.run(mkdocs, cwd=ROOT, env=quiet, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
