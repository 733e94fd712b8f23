"""Reports in a real browser, on a desktop and on a phone. Skipped where no Chromium is installed."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from medusa_train.pages.charts import Bar, Curve, bars, curves, tree_drawing
from medusa_train.pages.page import Figure, PageSection, Table, render_page

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
WIDTHS = (1280, 360)
#: Measures each page in its frame, and writes JSON into the wrapping page.
MEASURE = """
<script>setTimeout(() => {
  const rects = (d, name) => [...d.querySelectorAll(name)].map(e => e.getBoundingClientRect());
  out.textContent = JSON.stringify([...document.querySelectorAll('iframe')].map(frame => {
    const d = frame.contentDocument;
    return {
      wide: d.documentElement.scrollWidth,
      text: Math.min(...rects(d, 'svg text').map(r => r.height)),
      charts: rects(d, 'figure:not(.wide) svg').map(r => r.right),
      background: frame.contentWindow.getComputedStyle(d.body).backgroundColor,
      focusable: [...d.querySelectorAll('summary, .scroll')].every(e => e.tabIndex >= 0),
    };
  }));
}, 500)</script>
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get install chromium)"),
]


def report() -> str:
    """A page with everything that a report may have, and with long names."""
    name = "runs/" + "a_long_name_" * 6
    speeds = [(f"a_category_{number}", [Bar(1.5, (1.4, 1.6))]) for number in range(9)]
    paths = [(0,), (1,), (2,), *[(0, n) for n in range(10)], *[(1, n) for n in range(10)]]
    figures = [
        Figure("Speedup per category", bars(speeds, "speed", unit="x", reference=1), "A caption."),
        Figure("Accuracy", curves([Curve("head 1", [(1, 0.5), (10, 0.9)])], "top-k", "k"), ""),
        Figure("The tree", tree_drawing(paths, [0.5] * len(paths)), "", wide=True),
    ]
    titles = ["run", *[f"number {number}" for number in range(9)]]
    tables = [Table(titles, [[name, *["1.54x (1.46-1.68)"] * 9]])]
    answer = {"summary": name, "details": "64 tokens", "asked": name, "runs": [(1, name), (0, "b")]}
    section = PageSection("Speed", legend=[name], figures=figures, tables=tables)
    answers = PageSection("Answers", answers={"math": [answer]})
    tiles = [("1.45x (1.36-1.56)", "speedup over plain decoding, the faster baseline")] * 5
    return render_page(name, "greedy decoding", [section, answers], tiles)


def measured(directory: Path, *options: str) -> dict[int, dict[str, Any]]:
    """Return what the browser says of the report, by width of its frame."""
    (directory / "report.html").write_text(report(), encoding="utf-8")
    frames = "".join(f'<iframe src="report.html" width={w} height=900></iframe>' for w in WIDTHS)
    page = directory / "page.html"
    page.write_text(f"<!doctype html>{frames}<pre id=out></pre>{MEASURE}", encoding="utf-8")
    shown = subprocess.run(
        [
            str(CHROMIUM),
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--allow-file-access-from-files",
            "--disable-web-security",
            f"--user-data-dir={directory / 'profile'}",
            "--virtual-time-budget=5000",
            *options,
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
    found = re.search(r'<pre id="out">(\[.*?\])</pre>', shown)
    assert found is not None, shown
    return dict(zip(WIDTHS, json.loads(found[1]), strict=True))


def test_a_report_fits_a_desktop_and_a_phone(tmp_path: Path) -> None:
    for width, page in measured(tmp_path).items():
        assert page["wide"] == width, "it scrolls sideways"
        assert page["text"] >= 9, "texts of charts are too small"
        assert max(page["charts"]) <= width, "a chart is cut off"
        assert page["focusable"], "the keyboard does not reach answers or tables"


def test_a_report_follows_the_dark_mode_of_the_browser(tmp_path: Path) -> None:
    dark = measured(tmp_path, "--blink-settings=preferredColorScheme=0")
    assert {page["background"] for page in dark.values()} == {"rgb(20, 22, 26)"}
