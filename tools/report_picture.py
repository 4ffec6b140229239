"""Takes the README's picture of a report: python tools/report_picture.py llama.json

The plan's report is opened in headless Chromium without what needs a reader's time (tables, notes),
so that one picture shows the decision, the figures, the cuts, the timeline and memory.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PICTURE = Path(__file__).parent.parent / "docs" / "report.png"
NAMES = ("chromium", "chromium-browser", "google-chrome")
WIDE, HIGH = 1300, 1300
LARGEST = 300_000
LEFT_OUT = """<style>
#notes, #summary .columns, #summary h3, #provenance, #alive, .memory-main h3:last-of-type,
.note, nav { display: none !important; }
#graph .scroll { max-height: 260px !important; overflow: hidden !important; }
section { margin-top: 10px !important; padding-bottom: 8px !important; }
#cards { grid-template-columns: repeat(7, 1fr) !important; }
</style>"""


def shoot(page: Path, picture: Path) -> None:
    """Writes what a browser shows of a page."""
    found = next((where for name in NAMES if (where := shutil.which(name))), None)
    if found is None:
        raise SystemExit(f"no browser to open the report with: none of {', '.join(NAMES)}")
    subprocess.run(
        [
            found, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
            "--hide-scrollbars", f"--screenshot={picture}", f"--window-size={WIDE},{HIGH}",
            page.as_uri(),
        ],
        check=True, capture_output=True, timeout=180,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plan", type=Path, help="a plan that was saved")
    parser.add_argument("--out", type=Path, default=PICTURE)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        report = ["report", str(given.plan), "-o", str(page)]
        call = "import sys; from apportion.cli.main import main; main()"
        subprocess.run([sys.executable, "-c", call, *report], check=True)
        page.write_text(page.read_text().replace("</head>", f"{LEFT_OUT}</head>", 1))
        shoot(page, given.out)
    size = given.out.stat().st_size
    if size > LARGEST:
        raise SystemExit(f"{given.out} has {size} bytes, more than the {LARGEST} that a README may")
    print(f"wrote {given.out}, {size} bytes")


if __name__ == "__main__":
    main()
