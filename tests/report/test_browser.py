"""The report in a real browser: nothing overflows on a phone, charts have their size, and the pointer reads values."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from maxtext.report.run_files import read_run
from maxtext.report.write import write_report
from tests.materials import program
from tests.report.full_run import write_full_run

# Appended to the page; the browser prints the page when it has run.
MEASURE = """
<script>
const wide = [...document.querySelectorAll("body *")].filter((e) => !e.closest(".scroll, pre, svg") &&
  e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.tagName + "." + e.className);
const plots = [...document.querySelectorAll(".plot")].map((e) => e.getBoundingClientRect());
const figure = document.querySelector(".charts figure"), value = () => figure.querySelector(".legend b").textContent;
const box = figure.querySelector(".plot").getBoundingClientRect(), atRest = value();
figure.querySelector(".plot").dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + 1, clientY: box.top}));
const shown = document.createElement("pre");
shown.id = "measured";
shown.textContent = JSON.stringify({width: innerWidth, page: document.documentElement.scrollWidth, wide,
  charts: plots.length, smallest: Math.min(...plots.map((b) => Math.min(b.width, b.height))), faults: window.faults,
  atRest, moved: value(), ink: getComputedStyle(document.body).color,
  paper: getComputedStyle(document.body).backgroundColor});
document.body.append(shown);
</script></body></html>
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    runs = [write_full_run(folder / name, name, shift) for name, shift in (("a", 0.0), ("b", 0.1))]
    text = Path(write_report(runs[0], others=[read_run(runs[1])])[0]).read_text()
    listening = "<script>window.faults = []; onerror = (what) => { faults.push(String(what)); };</script></head>"
    found = folder / "page.html"
    found.write_text(text.replace("</head>", listening, 1).replace("</body></html>", MEASURE))
    return found


def browse(page: Path, *options: str) -> str:
    return subprocess.run(
        [program("chromium"), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
         f"--user-data-dir={page.parent / 'profile'}", *options, page.as_uri()],
        check=True, capture_output=True, text=True, timeout=120).stdout


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1280, "dark")])
def test_on_a_phone_and_on_a_desk(page: Path, width: int, scheme: str):
    # A window of the old headless kind is no narrower than 500, so the phone's page stands in a frame of its width.
    framed = page.with_name(f"framed_{width}.html")
    framed.write_text(f'<iframe id=frame src="{page.name}" style="width:{width}px;height:4000px;border:0"></iframe>'
                      '<script>frame.onload = () => document.body.append(frame.contentDocument.getElementById('
                      '"measured").cloneNode(true))</script>')
    dom = browse(framed, f"--blink-settings=preferredColorScheme={int(scheme == 'light')}", "--dump-dom",
                 "--allow-file-access-from-files", f"--window-size={width + 40},4100", "--virtual-time-budget=2000")
    match = re.search(r'<pre id="measured">(.*?)</pre>', dom, re.S)
    assert match, dom[-2000:]
    found: dict[str, Any] = json.loads(match[1])
    assert (found["width"], found["faults"], found["wide"]) == (width, [], [])
    assert found["page"] == width, "nothing makes the page wider than the screen"
    assert found["charts"] > 15
    assert found["smallest"] > 150
    assert found["moved"] != found["atRest"]
    dark = found["paper"] == "rgb(15, 20, 27)"
    assert dark == (scheme == "dark"), found["paper"]
    assert found["ink"] == ("rgb(230, 234, 240)" if dark else "rgb(27, 35, 48)")


def test_in_print(page: Path):
    out = page.with_name("page.pdf")
    browse(page, "--blink-settings=preferredColorScheme=0", "--no-pdf-header-footer", f"--print-to-pdf={out}")
    data = out.read_bytes()
    assert data.startswith(b"%PDF")
    assert 3 <= data.count(b"/Type /Page\n") <= 15, "the whole page, which a dark scheme does not colour"
