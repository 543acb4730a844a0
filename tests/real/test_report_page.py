"""The report in a real browser: all sections are there, all that can be clicked is clicked, nothing complains."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from retrain.cli import run
from retrain.squeeze.analyze import RankVariance
from tests.real.browser import Tab, open_tab

pytestmark = pytest.mark.real

CONFIG = """
[model]
model = "builtin:tiny"
lora_rank = 8
[backend]
devices = "cpu"
[data]
source = "arithmetic"
[training]
max_steps = 3
batch_size = 2
group_size = 4
max_tokens = 16
record = true
[eval]
every = 2
max_examples = 8
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page over four short real runs: two conditions, two seeds."""
    home = tmp_path_factory.mktemp("report")
    (home / "run.toml").write_text(CONFIG)
    for mode, transform in (("grpo", "none"), ("maxrl", "gtpo_sepa")):
        for seed in (1, 2):
            flags = ["--advantage-mode", mode, "--transform-mode", transform, "--seed", str(seed)]
            places = ["--log-dir", str(home / "runs" / f"{mode}_s{seed}"), "--adapter-path", str(home / "adapter")]
            assert run([str(home / "run.toml"), *flags, *places]) == 0
    assert run(["report", str(home / "runs")]) == 0
    return home / "runs" / "report.html"


async def choose(tab: Tab, name: str, value: str) -> None:
    event = "input" if name in ("search", "least", "most") else "change"
    await tab.do(
        f"(() => {{ const field = document.getElementById('filter-{name}'); field.value = {value!r};"
        f" field.dispatchEvent(new Event('{event}')); }})()"
    )


async def count(tab: Tab, selector: str) -> int:
    return int(await tab.do(f"document.querySelectorAll({selector!r}).length"))


def test_a_reader_can_click_through_the_page_without_a_complaint(page: Path) -> None:
    async def read() -> None:
        async with open_tab() as tab:
            await tab.open(page.as_uri())
            titles = await tab.do("[...document.querySelectorAll('h2')].map(node => node.textContent)")
            assert titles == ["Comparison", "Runs", "Held out", "Learning", "Entropy and λ", "Time", "Dead groups",
                              "Configuration", "Completions"]  # fmt: skip
            assert await count(tab, "#nav a") == len(titles)
            # Curves are drawn, and tell their numbers.
            lines = await count(tab, "#learning polyline")
            assert lines >= 2 * 6
            await tab.do(
                "(() => { const svg = document.querySelector('#learning svg'), at = svg.getBoundingClientRect();"
                " const place = {clientX: at.left + at.width / 2, clientY: at.top + 20};"
                " svg.dispatchEvent(new MouseEvent('mousemove', place)); })()"
            )
            assert "grpo+none" in await tab.do("document.getElementById('tip').textContent")
            # A condition can be switched off and on.
            await tab.do("document.querySelector('#learning .legend button').click()")
            assert await count(tab, "#learning polyline") < lines
            await tab.do("document.querySelector('#learning .legend button').click()")
            assert await count(tab, "#learning polyline") == lines
            # Every group opens, and shows its members side by side.
            groups = await count(tab, "#groups button")
            assert groups == 4 * 3 * 2
            for index in range(groups):
                await tab.do(f"document.querySelectorAll('#groups button')[{index}].click()")
                assert await count(tab, ".member") == 4
            # Filters narrow, and say when nothing is left.
            await choose(tab, "condition", "grpo+none")
            assert await count(tab, "#groups button") == groups // 2
            await choose(tab, "step", "1")
            assert await count(tab, "#groups button") == groups // 6
            await choose(tab, "search", "no completion says this")
            assert await count(tab, "#groups button") == 0
            await choose(tab, "search", "")
            await choose(tab, "least", "2")
            assert await count(tab, "#groups button") == 0
            await choose(tab, "least", "")
            # The microscope colours tokens by each of its numbers, and tells them.
            for colour in ("surprisal", "entropy", "planning", "advantage"):
                await choose(tab, "colour", colour)
                assert await count(tab, ".token") > 0
            await tab.do(
                "document.querySelector('.token').dispatchEvent(new MouseEvent('mousemove', {clientX: 5, clientY: 5}))"
            )
            tooltip = await tab.do("document.getElementById('tip').textContent")
            assert all(word in tooltip for word in ("surprisal", "entropy", "advantage", "execution"))
            assert tab.complaints == []

    asyncio.run(read())


def test_the_squeeze_curve_has_a_band_from_the_worst_layer_to_the_best(page: Path) -> None:
    ranks = [asdict(RankVariance(rank, 0.9, 0.8, 0.95)) for rank in (2, 4, 8)]
    squeezed = json.dumps({"recommended_rank": 4, "ranks": ranks})

    async def read() -> None:
        async with open_tab() as tab:
            await tab.open(page.as_uri())
            await tab.do(f"data.squeeze = {squeezed}; render()")
            assert await count(tab, "#squeeze polyline") == 1
            assert await count(tab, "#squeeze polygon") == 1
            assert tab.complaints == []

    asyncio.run(read())


def test_the_live_page_follows_a_run(page: Path) -> None:
    async def watch(address: str) -> None:
        async with open_tab() as tab:
            await tab.open(address)
            assert await tab.do("data.runs[0].steps.length") == 3
            log = page.parent / "grpo_s1" / "metrics.jsonl"
            last = log.read_text().splitlines()[-1]
            with log.open("a") as file:
                file.write(last.replace('"step": 2', '"step": 3') + "\n")
            until = time.monotonic() + 60
            while await tab.do("data.runs[0].steps.length") == 3 and time.monotonic() < until:
                await asyncio.sleep(0.5)
            assert await tab.do("data.runs[0].steps.length") == 4
            assert tab.complaints == []

    command = [sys.executable, "-u", "-m", "retrain", "ui", str(page.parent), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            asyncio.run(watch(server.stdout.readline().split()[2]))
        finally:
            server.kill()
