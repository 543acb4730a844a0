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
from retrain.report import build_page, collect
from retrain.squeeze.analyze import RankVariance
from tests.real.browser import Tab, open_tab
from tests.report.folders import write_run

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
    await asyncio.sleep(0.1)


async def count(tab: Tab, selector: str) -> int:
    return int(await tab.do(f"document.querySelectorAll({selector!r}).length"))


async def wait_for(tab: Tab, condition: str, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not await tab.do(condition):
        assert time.monotonic() < until, condition
        await asyncio.sleep(0.2)


async def drag(tab: Tab, selector: str, start: float, end: float) -> None:
    """Drag across an element, from one share of its width to another."""
    box = await tab.do(
        f"(() => {{ const node = document.querySelector({selector!r}); node.scrollIntoView({{block: 'center'}});"
        " const at = node.getBoundingClientRect(); return [at.left, at.top, at.width, at.height]; })()"
    )
    y = box[1] + box[3] / 2
    for kind, share in (("mousePressed", start), ("mouseMoved", (start + end) / 2), ("mouseReleased", end)):
        place = {"x": box[0] + share * box[2], "y": y, "button": "left", "clickCount": 1}
        await tab.call("Input.dispatchMouseEvent", type=kind, **place)


def test_the_verdict_comes_first_and_every_metric_has_a_chart(page: Path) -> None:
    async def read() -> None:
        async with open_tab() as tab:
            await tab.open(page.as_uri())
            titles = await tab.do("[...document.querySelectorAll('section:not([hidden]) h2')].map(n => n.textContent)")
            assert titles == ["Verdict", "Health", "Runs", "Metrics", "Completions", "Configuration"]
            assert "maxrl" in await tab.do("document.querySelector('.headline').textContent")
            assert await count(tab, "#verdict circle") >= 2
            assert not await tab.do("document.querySelector('#verdict details').open")
            # Eight checks for each of four runs, with words beside the color.
            assert await count(tab, "#health .strip") == 4 and await count(tab, "#health .chip") == 32
            keys = set(await tab.do("[...chartsByKey.keys()]"))
            logged = set(await tab.do("Object.keys(data.runs[0].series)"))
            flat = await tab.do("document.getElementById('constants').textContent")
            assert not [key for key in logged - keys if not key.startswith("eval_") and key not in flat]
            assert "Surprisal of execution tokens" in await tab.do(
                "document.getElementById('chart-exec_entropy_mean').textContent"
            )
            await wait_for(tab, "document.querySelector('.plot svg') !== null")
            labels = await tab.do(
                "[...document.querySelectorAll('.plot svg')].map(svg =>"
                " [...svg.querySelectorAll('text[text-anchor=end]')].map(n => n.textContent))"
            )
            assert labels and all(len(texts) == len(set(texts)) for texts in labels)
            # Also the longest label is within its chart.
            await tab.do(
                "data.runs.forEach(run => { run.series.ratio_max = run.steps.map((_, step) => 1 + 1e-5 * step); });"
                " render()"
            )
            chart = "document.getElementById('chart-ratio_max')"
            await tab.do(f"{chart}.scrollIntoView()")
            await wait_for(tab, f"{chart}.textContent.includes('1.00002')")
            left = f"Math.min(...[...{chart}.querySelectorAll('svg text')].map(n => n.getBoundingClientRect().left))"
            assert await tab.do(f"{left} >= {chart}.querySelector('svg').getBoundingClientRect().left")
            assert tab.complaints == []

    asyncio.run(read())


def test_charts_are_zoomed_together_and_keep_their_settings_in_the_address(page: Path) -> None:
    async def read() -> None:
        async with open_tab() as tab:
            await tab.open(page.as_uri())
            # A chart is drawn when it comes near the window.
            await tab.do("goTo('charts')")
            await wait_for(tab, "document.querySelectorAll('#chart-correct_rate .mean').length === 2")
            await wait_for(tab, "document.querySelector('#chart-mean_reward svg') !== null")
            await tab.do(
                "document.querySelector('#chart-mean_reward svg').dispatchEvent("
                "new PointerEvent('pointermove', {clientX: 200, clientY: 400}))"
            )
            assert "grpo+none" in await tab.do("document.getElementById('tip').textContent")
            await tab.do("document.querySelector('#legend button').click()")
            assert await count(tab, "#chart-correct_rate .mean") == 1
            await tab.do("document.querySelector('#legend button').click()")
            assert await count(tab, "#chart-correct_rate .mean") == 2
            await drag(tab, "#chart-mean_reward svg", 0.3, 0.7)
            zoom = await tab.do("view.zoom")
            assert zoom and await tab.do("chartsByKey.get('correct_rate').x0 === Number(view.zoom.split('~')[0])")
            for name, value in (("x", "hours"), ("x", "tokens"), ("x", "step")):
                await tab.do(
                    f"(() => {{ const field = document.getElementById('charts-{name}'); field.value = {value!r};"
                    " field.dispatchEvent(new Event('change')); })()"
                )
                assert await count(tab, "#chart-correct_rate .mean") == 2
            for name in ("log", "clip"):
                await tab.do(f"document.getElementById('charts-{name}').click()")
                assert await count(tab, "#chart-correct_rate .mean") == 2
            await tab.do(
                "(() => { const field = document.getElementById('charts-smooth'); field.value = 0.9;"
                " field.dispatchEvent(new Event('input')); })()"
            )
            assert await count(tab, "#chart-correct_rate .raw") == 4
            address = await tab.do("location.href")
            assert all(part in address for part in ("smooth=0.9", "log=1", "clip=1"))
            await tab.open("about:blank")
            await tab.open(address)
            assert await tab.do("document.getElementById('charts-log').checked")
            assert await tab.do("document.getElementById('charts-smooth').value") == "0.9"
            assert tab.complaints == []

    asyncio.run(read())


def test_a_reader_can_click_through_the_completions(page: Path) -> None:
    async def read() -> None:
        async with open_tab() as tab:
            await tab.open(page.as_uri())
            groups = await count(tab, "#groups button")
            assert groups == 4 * 3 * 2
            for index in range(groups):
                await tab.do(f"document.querySelectorAll('#groups button')[{index}].click()")
                assert await count(tab, ".member") == 4
            # The reference and what the reward extracted stand beside each completion.
            assert await count(tab, ".reference code") == 1 and await count(tab, ".extracted") == 4
            # A link leads to the same group.
            address, key = await tab.do("location.href"), await tab.do("view.group")
            await tab.open("about:blank")
            await tab.open(address)
            await wait_for(tab, "document.querySelectorAll('.member').length === 4")
            assert await tab.do("document.querySelector('#groups [aria-current=true]').dataset.key") == key
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
            # Sorted by length, the longest completion comes first.
            await choose(tab, "sort", "longest")
            lengths = await tab.do(
                "[...document.querySelectorAll('.member .facts')]"
                ".map(node => Number(node.textContent.match(/(\\d+) tok/)[1]))"
            )
            assert lengths == sorted(lengths, reverse=True)
            # The microscope colors tokens by each of its numbers, on one scale with a legend.
            for color in ("surprisal", "entropy", "planning", "advantage"):
                await choose(tab, "color", color)
                assert await count(tab, ".member .token") > 0 and await count(tab, ".scale") == 1
            await tab.do(
                "document.querySelector('.member .token').dispatchEvent("
                "new MouseEvent('mousemove', {clientX: 5, clientY: 5}))"
            )
            tooltip = await tab.do("document.getElementById('tip').textContent")
            assert all(word in tooltip for word in ("surprisal", "entropy", "advantage", "execution"))
            # A check leads to its completions; a prompt to all of its groups.
            await tab.do("document.querySelector('#health .chip').click()")
            await wait_for(tab, "view.run !== '' && document.querySelectorAll('#groups button').length > 0")
            await choose(tab, "color", "none")
            await tab.do("document.querySelector('#group .where button').click()")
            await wait_for(tab, "view.prompt !== '' && document.querySelector('#group .chart polyline') !== null")
            assert tab.complaints == []

    asyncio.run(read())


@pytest.mark.parametrize("width", [420, 1400])
def test_the_verdict_is_visible_without_scrolling(page: Path, width: int) -> None:
    async def read() -> None:
        async with open_tab() as tab:
            phone = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
            await tab.call("Emulation.setDeviceMetricsOverride", **phone)
            await tab.open(page.as_uri())
            assert await tab.do("document.documentElement.scrollWidth") <= width
            assert await tab.do("document.querySelector('.forest').getBoundingClientRect().bottom") < 800
            assert await tab.do("document.querySelector('.headline').getBoundingClientRect().right") <= width

    asyncio.run(read())


def test_the_squeeze_curve_has_a_band_from_the_worst_layer_to_the_best(page: Path) -> None:
    ranks = [asdict(RankVariance(rank, 0.9, 0.8, 0.95)) for rank in (2, 4, 8)]
    squeezed = json.dumps({"recommended_rank": 4, "ranks": ranks})

    async def read() -> None:
        async with open_tab() as tab:
            await tab.open(page.as_uri())
            await tab.do(f"data.squeeze = {squeezed}; render()")
            await tab.do("goTo('squeeze')")
            await wait_for(tab, "document.querySelectorAll('#squeeze polyline').length === 1")
            assert await count(tab, "#squeeze polygon") == 1
            assert tab.complaints == []

    asyncio.run(read())


def test_no_axis_of_a_rate_goes_beyond_100_percent(page: Path) -> None:
    lines = "() => [{ name: 'a', color: 'red', points: [{ x: 0, y: 1 }] }]"

    async def read() -> None:
        async with open_tab() as tab:
            await tab.open(page.as_uri())
            chart = f"new Chart({{ key: 'k', title: 't', unit: 'percent', lines: {lines} }})"
            labels = await tab.do(f"(() => {{ const one = {chart}; one.draw(); return one.labels; }})()")
            assert labels[-1] == "100%"

    asyncio.run(read())


def test_clipping_outliers_looks_at_raw_values_and_keeps_the_smoothed_line_on_the_chart(page: Path) -> None:
    async def read() -> None:
        async with open_tab() as tab:
            await tab.open(page.as_uri())
            await tab.do(
                "data.runs = [data.runs[0]];"
                " data.runs.forEach(run => { run.steps = Array.from({length: 400}, (_, step) => step);"
                " run.series.loss = run.steps.map(step => step === 200 ? 1e4 : Math.sin(step)); });"
                " remember({clip: '1', smooth: '0.6'})"
            )
            lowest, highest, smoothed, *places = await tab.do(
                "(() => { const chart = metricChart('loss'); chart.draw();"
                " const mean = chart.body.querySelector('.mean');"
                " const ys = mean.getAttribute('points').split(' ').map(pair => Number(pair.split(',')[1]));"
                " const top = Math.max(...chart.lines()[0].points.map(p => p.y));"
                " return [chart.y0, chart.y1, top, Math.min(...ys), Math.max(...ys)]; })()"
            )
            assert -2 < lowest < 0 < highest < 2 and smoothed > 1000
            assert 10 <= places[0] < places[1] <= 178
            assert tab.complaints == []

    asyncio.run(read())


def test_a_chart_of_pass_at_k_has_only_the_evaluations_with_that_k(page: Path) -> None:
    async def read() -> None:
        async with open_tab() as tab:
            await tab.open(page.as_uri())
            assert await tab.do("[...chartsByKey.keys()].filter(key => key.startsWith('eval_pass_at_k'))") == []
            await tab.do(
                "data.runs.forEach(run => { const k = run.condition === 'grpo+none' ? 1 : 4 * run.seed;"
                " run.evals.forEach(e => { e.k = k; e.more.eval_pass_at_k = k / 100; }); }); render()"
            )
            drawn = await tab.do(
                "[...chartsByKey.values()].filter(chart => chart.key.startsWith('eval_pass_at_k')).map(chart =>"
                " [chart.title, ...chart.lines().flatMap(line => [line.name, ...line.points.map(p => p.high)])])"
            )
            assert [[title, name] for title, name, *_ in drawn] == [
                ["Held-out pass@4", "maxrl+gtpo_sepa"],
                ["Held-out pass@8", "maxrl+gtpo_sepa"],
            ]
            assert [set(values) for _, _, *values in drawn] == [{0.04}, {0.08}]
            assert tab.complaints == []

    asyncio.run(read())


def test_the_page_says_which_steps_have_tokens_to_color(page: Path) -> None:
    status = "document.getElementById('lab-status').textContent"

    async def read() -> None:
        async with open_tab() as tab:
            await tab.open(page.as_uri())
            await choose(tab, "color", "surprisal")
            # All steps of these runs have tokens.
            assert "24 groups. All" in await tab.do(status) and "to color" not in await tab.do(status)
            await tab.do(
                "data.groups.filter(group => group.step === 0)"
                ".forEach(group => group.members.forEach(member => { delete member.tokens; }))"
            )
            await choose(tab, "color", "entropy")
            text = await tab.do(status)
            assert text.startswith(
                "16 groups. Only the last recorded steps of each run have tokens to color in a file: 8 "
            )
            assert "8 of 12 steps. retrain ui colors" in text and "All" not in text
            await choose(tab, "color", "none")
            assert "24 groups. All" in await tab.do(status)
            assert tab.complaints == []

    asyncio.run(read())


def test_an_address_with_filters_leads_to_the_completions(page: Path) -> None:
    top = "document.getElementById('completions-section').getBoundingClientRect().top"

    async def read() -> None:
        async with open_tab() as tab:
            await tab.open(page.as_uri())
            await wait_for(tab, "view.group !== ''")
            plain = await tab.do("location.href")
            await tab.do("remember({at: 'verdict'})")
            await choose(tab, "sort", "longest")
            await choose(tab, "color", "surprisal")
            chosen = await tab.do("location.href")
            for address in (chosen, page.as_uri() + "#sort=longest&color=surprisal", page.as_uri() + "#step=1"):
                await tab.open("about:blank")
                await tab.open(address)
                await wait_for(tab, f"Math.abs({top}) < 100")
            # The address that a page gives itself, with its first group, does not.
            await tab.open("about:blank")
            await tab.open(plain)
            await wait_for(tab, "document.querySelectorAll('.member').length === 4")
            assert await tab.do("window.scrollY") == 0
            assert tab.complaints == []

    asyncio.run(read())


def test_a_logarithmic_axis_has_at_least_two_labels(page: Path) -> None:
    async def read() -> None:
        async with open_tab() as tab:
            await tab.open(page.as_uri())
            for low, high in ((0.3, 0.55), (0.6, 1), (0.9, 1), (1, 1), (0.51, 0.52), (0.011, 0.039), (1e-6, 1)):
                points = f"[{{ x: 0, y: {low} }}, {{ x: 1, y: {high} }}]"
                spec = f"{{ key: 'k', title: 't', unit: 'percent', lines: () => [{{ name: 'a', points: {points} }}] }}"
                labels = await tab.do(
                    f"(() => {{ view.log = '1'; const one = new Chart({spec}); one.draw(); return one.labels; }})()"
                )
                assert len(set(labels)) == len(labels) >= 2, (low, high, labels)
                assert float(labels[-1].rstrip("%")) <= 100

    asyncio.run(read())


def test_the_label_of_a_check_has_one_period_between_its_sentences(page: Path) -> None:
    check = {"name": "kl", "level": "warning", "value": "0.5", "rule": "less than 0.1", "step": 3, "topic": "kl"}

    async def read() -> None:
        async with open_tab() as tab:
            await tab.open(page.as_uri())
            labels = await tab.do("[...document.querySelectorAll('.chip')].map(n => n.ariaLabel || '')")
            assert len(labels) == 32 and not [label for label in labels if ".." in label]
            label = await tab.do(f"chip(data.runs[0], {json.dumps(check)}).ariaLabel")
            assert "0.1. Since step 3. Causes and fixes are below. Click" in label

    asyncio.run(read())


def test_the_live_page_follows_a_run_and_leaves_a_reader_alone(page: Path) -> None:
    async def watch(address: str) -> None:
        async with open_tab() as tab:
            await tab.open(address)
            # What the page shows before the first answer, and after it.
            assert await tab.do(
                "(() => { const [runs, known] = [data.runs, data.head_version];"
                " Object.assign(data, {runs: [], head_version: ''}); badge(); hideAbsent();"
                " const shown = [...document.querySelectorAll('nav a:not([hidden])')].map(n => n.textContent);"
                " const text = document.getElementById('badge').textContent;"
                " Object.assign(data, {runs, head_version: known}); return [text, ...shown]; })()"
            ) == ["Loading …", "Verdict"]
            await wait_for(tab, "data.runs.length === 4 && document.querySelectorAll('.member').length === 4")
            assert await tab.do("data.runs[0].steps.length") == 3
            await tab.do("badge()")
            assert (await tab.do("document.getElementById('badge').textContent")).startswith("Finished · last step")
            # A reader in the middle of a filter, looking at one group.
            await tab.do("document.querySelectorAll('#groups button')[3].click()")
            key = await tab.do("view.group")
            await tab.do("document.getElementById('filter-search').focus()")
            where = "Math.round(document.getElementById('filter-search').getBoundingClientRect().top)"
            place = await tab.do(where)
            log = page.parent / "grpo_s1" / "metrics.jsonl"
            last = log.read_text().splitlines()[-1]
            with log.open("a") as file:
                file.write(last.replace('"step": 2', '"step": 3') + "\n")
            texts = page.parent / "grpo_s1" / "emergence" / "generations.jsonl"
            rows = texts.read_text().splitlines()[-4:]
            with texts.open("a") as file:
                file.writelines(row.replace('"step": 2', '"step": 3') + "\n" for row in rows)
            await wait_for(tab, "data.runs[0].steps.length === 4")
            assert await tab.do("data.runs[0].series.correct_rate.length") == 4
            await wait_for(tab, "document.getElementById('lab-fresh') !== null")
            assert await tab.do("document.activeElement.id") == "filter-search"
            assert await tab.do("view.group") == key and abs(await tab.do(where) - place) <= 2
            await tab.do("document.getElementById('lab-fresh').click()")
            await wait_for(tab, "lab.groups[0].step === 3")
            # Token values are read when they are asked for.
            await tab.do("document.querySelector('#groups [data-key*=\":2:\"]').click()")
            await choose(tab, "color", "surprisal")
            await wait_for(tab, "document.querySelectorAll('.member .token').length > 0")
            assert tab.complaints == []

    command = [sys.executable, "-u", "-m", "retrain", "ui", str(page.parent), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            asyncio.run(watch(server.stdout.readline().split()[2]))
        finally:
            server.kill()


def test_a_check_that_is_not_ok_is_explained_below_the_strip(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 1, steps=12)
    metrics = folder / "metrics.jsonl"
    rows = [json.loads(line) | {"max_token_hit_rate": 0.5} for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "report.html"
    path.write_text(build_page(collect([folder])))

    async def read() -> None:
        async with open_tab() as tab:
            await tab.open(path.as_uri())
            assert await tab.do("document.querySelector('#health details[data-topic=truncation]').open") is False
            text = await tab.do(
                "(() => { const one = document.querySelector('#health details[data-topic=truncation]');"
                " one.querySelector('summary').click(); renderHealth();"
                " return document.querySelector('#health details[data-topic=truncation][open]').innerText; })()"
            )
            assert text.startswith("Causes and fixes: truncation") and "Symptom" in text and "max_tokens" in text
            assert "`" not in text and "*" not in text
            assert not tab.complaints

    asyncio.run(read())
