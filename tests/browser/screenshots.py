"""Make the README's screenshots from a folder of runs:

    python -m tests.browser.screenshots RUNS [FOLDER]        (FOLDER: docs/screenshots)

A view is a page and its query, so the link in the address bar of a dashboard can be pasted here.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.browser import harness

VIEWS = {
    "runs": "?smooth=0.9",
    "scaling": "scaling",
    "layers": "layers?log=1",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("folder", type=Path, nargs="?", default=harness.REPOSITORY / "docs" / "screenshots")
    for name, view in VIEWS.items():
        parser.add_argument(f"--{name}", dest=f"view_{name}", metavar="VIEW", default=view, help=f"path and query (default: {view})")
    args = parser.parse_args()
    if reason := harness.missing():
        parser.error(reason)
    args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as home, harness.serve(args.runs.absolute(), Path(home)) as address, harness.chromium() as browser:
        page = browser.new_page(viewport={"width": 1360, "height": 900}, device_scale_factor=1.5)
        for name in VIEWS:
            harness.look(page, address, getattr(args, f"view_{name}"))
            page.screenshot(path=args.folder / f"{name}.png")
            print(args.folder / f"{name}.png")


if __name__ == "__main__":
    main()
