"""Pictures of a report page for the README and docs/images: python -m tests.real.screenshots REPORT.html FOLDER.

The report should have two conditions, several seeds, evaluations, and recorded rollouts.
"""

from __future__ import annotations

import asyncio
import io
import sys
from base64 import b64decode
from pathlib import Path
from typing import Any

from PIL import Image

from tests.real.browser import Tab, open_tab

# The pictures are colored text and lines: a palette loses nothing one could see, and two thirds of the bytes.
COLORS = 256

# Verdict and learning curve in the left column, the token microscope in the right one.
HERO = """
const main = document.getElementById("main");
main.style.width = "610px";
renderVerdict();
const style = document.createElement("style");
style.textContent = `
  header, nav, #filters, #groups, #lab-status, .where, .save, .hint, #verdict details, #verdict > p.soft, #flips,
  #flips-title, #charts > *:not(#hero), #health-section, #runs-section, #squeeze-section, #configuration-section {
    display: none !important; }
  main { display: grid; grid-template: auto 1fr / 610px 1fr; gap: 0 2.2rem; padding: .2rem 1.6rem 1.4rem;
    width: auto !important; }
  #completions-section { grid-area: 1 / 2 / 3; } #lab { display: block; } h2 { margin: 1.1rem 0 .6rem; }
  #group .members { display: block; } .headline { font-size: 1.3rem; } .member { margin-bottom: .6rem; }
  .member:not(:nth-of-type(n+5)), .member:nth-of-type(n+8) { display: none; }`;
document.head.append(style);
const hero = document.createElement("div");
hero.id = "hero";
hero.append(document.querySelector('.chart[data-key="%s"]'), document.getElementById("legend"));
document.getElementById("charts").append(hero);
document.getElementById("at-charts").textContent = "Learning curves";
document.getElementById("at-completions").textContent = "Token microscope";
window.dispatchEvent(new Event("resize"));
"""


async def prepare(tab: Tab, page: Path, width: int, scale: float = 1.5, dark: bool = False) -> None:
    """Open the page at a width, in light or dark mode."""
    size = {"width": width, "height": 900, "deviceScaleFactor": scale, "mobile": width < 600}
    await tab.call("Emulation.setDeviceMetricsOverride", **size)
    feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    await tab.call("Emulation.setEmulatedMedia", features=[feature])
    # The page is laid out anew for the picture, without a scroll bar.
    await tab.call("Emulation.setScrollbarsHidden", hidden=True)
    await tab.open("about:blank")
    await tab.open(page.as_uri())
    await asyncio.sleep(1.5)


async def shoot(tab: Tab, path: Path, selector: str = "body", most: int = 2000) -> None:
    """Save what an element covers, at most `most` pixels of it in height, as a small PNG."""
    box: dict[str, Any] = await tab.do(
        f"(() => {{ const box = document.querySelector({selector!r}).getBoundingClientRect(); "
        "return { x: box.x + scrollX, y: box.y + scrollY, width: box.width, height: box.height }; })()"
    )
    clip = box | {"height": min(box["height"], most), "scale": 1}
    shot = await tab.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
    picture = Image.open(io.BytesIO(b64decode(shot["data"]))).convert("RGB")
    picture.quantize(COLORS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path}: {picture.size[0]} x {picture.size[1]}, {path.stat().st_size / 1000:.0f} kB")


async def show_microscope(tab: Tab) -> None:
    """Open a group with mixed results, colored by surprisal."""
    await tab.do("openCompletions({ sort: 'newest' })")
    await tab.do("choose('color', 'surprisal')")
    await asyncio.sleep(1)
    await tab.do("""(() => {
      const mixed = lab.groups.find((group) => {
        const right = group.members.filter((member) => member.outcome === "right").length;
        return right > 1 && right < group.members.length - 1; });
      if (mixed) document.querySelector(`#groups [data-key="${keyOf(mixed)}"]`).click(); })()""")
    await tab.do("choose('sort', 'worst')")
    await tab.do("fillFilters()")
    await asyncio.sleep(1)


async def main(page: Path, folder: Path) -> None:
    """Take all pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    async with open_tab() as tab:
        await prepare(tab, page, 1240)
        await show_microscope(tab)
        await tab.do(HERO % "eval_pass_at_1 by condition")
        await asyncio.sleep(1)
        await shoot(tab, folder / "retrain.png", most=1100)
        await prepare(tab, page, 1400)
        await shoot(tab, folder / "verdict.png", "#verdict-section")
        await tab.do("goTo('charts')")
        await asyncio.sleep(1)
        await shoot(tab, folder / "charts.png", "#charts-section", 900)
        await show_microscope(tab)
        await shoot(tab, folder / "microscope.png", "#completions-section", 900)
        await prepare(tab, page, 1400, dark=True)
        await shoot(tab, folder / "dark.png", "body", 900)
        assert tab.complaints == [], tab.complaints


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]).resolve(), Path(sys.argv[2])))
