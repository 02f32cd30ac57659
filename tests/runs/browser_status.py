"""The status page in headless Chromium, on a real worker and real Kafka: `make browser-test`.

Not part of `make test`, which needs nothing but Python packages. CHROME names the browser where it is not found.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
from playwright.async_api import Browser, Error, Page, Route, async_playwright, expect

from tests.support.builders import trace_bytes
from tests.support.kafka_fixtures import WorkerProcess, consume_all_async, produce_async, unique
from tests.support.stage import LINES, Stage
from worker.commands.shared.explanation import explain_trace
from worker.commands.shared.shown import shown_score
from worker.lab.broker.embedded_kafka import EmbeddedKafka
from worker.observe.status import KEPT_TRACES, explain_command

pytestmark = pytest.mark.kafka

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
BROKEN = trace_bytes().replace(b"federated", b"<img src=x onerror=alert(1)>")
TWO_OVERRIDES = ("error_recovery:a", "error_recovery", "error_recovery", "thought")
PHONE = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True}

CONTRASTS = """() => {
  const parse = (colour) => (colour.match(/[\\d.]+/g) || []).map(Number);
  const light = (rgb) => rgb.slice(0, 3).map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (element) => {
    for (; element; element = element.parentElement) {
      const colour = parse(getComputedStyle(element).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    throw new Error("nothing opaque behind");
  };
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || !element.getClientRects().length || ["SCRIPT", "NOSCRIPT", "title"].includes(element.tagName)) continue;
    const style = getComputedStyle(element), svg = element instanceof SVGElement;
    const pair = [light(parse(svg ? style.fill : style.color)), light(ground(element))].sort((a, b) => b - a);
    found.push([(pair[0] + 0.05) / (pair[1] + 0.05), element.tagName + "." + element.getAttribute("class"),
      element.textContent.slice(0, 40)]);
  }
  return found;
}"""


def chromium() -> str:
    """Return the browser's path. None is an error, never a skip."""
    path = os.environ.get("CHROME") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None or not os.access(path, os.X_OK):
        pytest.fail(
            f"no Chromium: {path or 'none of ' + ', '.join(NAMES)} cannot be run; install one (Debian: apt-get install "
            "chromium) or set CHROME=/path/to/chromium"
        )
    return path


@pytest.fixture(scope="module")
def stage(kafka: EmbeddedKafka) -> Stage:
    return Stage(kafka, KP_STATUS_PAGE="true", KP_STATUS_TEXTS="true", KP_HTTP_HOST="127.0.0.1")


@pytest.fixture(scope="module")
def worker(stage: Stage) -> Iterator[WorkerProcess]:
    with WorkerProcess(stage.env) as worker:
        worker.wait_ready()
        asyncio.run(send(stage, [*LINES[:200], BROKEN, trace_bytes(f"kp:trace:{HOSTILE}", objective=HOSTILE)]))
        stage.wait_committed(202)
        yield worker


async def send(stage: Stage, values: list[bytes]) -> None:
    await produce_async(stage.bootstrap, stage.name, [(None, value, (), i % 4) for i, value in enumerate(values)])


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    path = chromium()
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path)
        yield browser
        await browser.close()


Visit = Callable[..., AbstractAsyncContextManager[Page]]


@pytest.fixture
def visit(browser: Browser, worker: WorkerProcess) -> Visit:
    """Open the page with the numbers in it; afterwards nothing may be on the console, nothing asked of others."""
    home = f"http://127.0.0.1:{worker.http_port}/"

    @asynccontextmanager
    async def open_page(**options: Any) -> AsyncIterator[Page]:
        context = await browser.new_context(**options)
        page = await context.new_page()
        console: list[str] = []
        asked: list[str] = []
        page.on("console", lambda message: console.append(message.text))
        page.on("pageerror", lambda error: console.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        await page.goto(home)
        await expect(page.locator("#state")).to_have_text("✓ ready")
        yield page
        assert console == []
        mine = {url.partition("?domain=")[0] for url in asked if not url.startswith("data:")}
        assert mine == {home, f"{home}status.json"}
        await context.close()

    return open_page


async def number(page: Page, selector: str) -> float:
    return float((await page.inner_text(selector)).split()[0].replace(",", ""))


async def test_numbers_appear_and_move_under_load(visit: Visit, stage: Stage) -> None:
    async with visit() as page:
        before = {name: await number(page, f"#{name}") for name in ("accepted", "rejected", "dead")}
        newest = await page.inner_text("#trace-rows tr:first-child .code >> nth=0")
        assert before["dead"] >= 1
        assert sum(before.values()) >= 202
        await expect(page.locator("#p99")).not_to_have_text("\u2013")  # it is there with the next second's counters
        assert await number(page, "#p99") > 0
        assert await page.locator("#trace-rows tr").count() == 50
        assert await page.locator("#partitions tr").count() == 4
        await send(stage, LINES[200:500])
        await expect(page.locator("#trace-rows tr:first-child .code >> nth=0")).not_to_have_text(newest)
        await page.wait_for_function("rate => parseFloat(document.getElementById('rate').textContent) > rate", arg=10)
        for name in ("accepted", "rejected"):
            assert await number(page, f"#{name}") > before[name]
        assert await page.locator("#scores rect").count() > 5
        assert await page.locator("#rate-chart polyline").count() == 1


async def test_what_comes_from_the_topic_is_text(visit: Visit, stage: Stage) -> None:
    await send(stage, [trace_bytes(f"kp:trace:{HOSTILE}", objective=HOSTILE)] * 4)
    async with visit() as page:
        await expect(page.get_by_text(f"kp:trace:{HOSTILE}", exact=True).first).to_be_visible()
        await expect(page.get_by_text(HOSTILE, exact=True).first).to_be_visible()
        await expect(page.locator("#dead-rows")).to_contain_text('"<img src=x onerror=alert(1)>" is not allowed')
        assert await page.locator("img").count() == 0
        assert "owned" not in await page.title()


CUT_OFF = """() => [...document.querySelectorAll("[role=region]")].flatMap((box) => {
  const edge = box.getBoundingClientRect();
  return [...box.querySelectorAll("tbody td, tbody td *")].filter((e) => {
    const place = e.getBoundingClientRect();
    return place.width && (place.right > edge.right + 1 || place.left < edge.left - 1);
  }).map((e) => `${box.getAttribute("aria-labelledby")} ${e.className}: ${e.textContent.slice(0, 40)}`);
})"""


@pytest.mark.parametrize("width", [320, 360, 768, 1280])
async def test_no_column_is_out_of_sight(visit: Visit, stage: Stage, width: int) -> None:
    await send(stage, [trace_bytes(f"kp:trace:{'long' * 30}", steps=TWO_OVERRIDES, domain="d" * 40)] * 2)
    async with visit(**{**PHONE, "viewport": {"width": width, "height": 740}}) as page:
        await expect(page.locator("#trace-rows .row").first).to_contain_text("low_tool_diversity_penalty")
        for opened in (False, True):
            if opened:
                await page.locator("#trace-rows .row button").first.click()
                await expect(page.locator(".details")).to_be_visible()
            assert await page.evaluate("document.documentElement.scrollWidth") <= width
            assert await page.evaluate("innerWidth") == width
            assert await page.evaluate(CUT_OFF) == []
        button = await page.locator("#pause").bounding_box()
        assert button is not None
        assert min(button["width"], button["height"]) >= 24  # WCAG 2.2, target size


SECTIONS = "[...document.querySelectorAll('section, .fold')].map((e) => e.getBoundingClientRect().top + scrollY)"


async def test_a_phone_shows_a_few_screens_and_nothing_moves(visit: Visit, stage: Stage) -> None:
    await send(stage, [BROKEN] * 8 + [trace_bytes(domain="d" * 40)])  # a domain that is new adds to the note, once
    async with visit(**{**PHONE, "viewport": {"width": 400, "height": 800}}) as page:
        rows, letters = page.locator("#trace-rows > .row:visible"), page.locator("#dead-rows > tr:visible")
        await expect(rows).to_have_count(10)
        await expect(letters).to_have_count(5)
        await expect(page.locator("#domains-note")).to_contain_text("d" * 40)
        assert await page.evaluate("document.documentElement.scrollHeight") < 6 * 800
        places, newest = await page.evaluate(SECTIONS), await rows.first.inner_text()
        long = ("A long objective " * 12, TWO_OVERRIDES, "d" * 40)
        for objective, steps, domain in (("Short", ("thought",), "code"), long) * 3:
            await send(stage, [trace_bytes(objective=objective, steps=steps, domain=domain)])
            await expect(rows.first).not_to_have_text(newest, use_inner_text=True)
            newest = await rows.first.inner_text()
            assert await page.evaluate(SECTIONS) == pytest.approx(places, abs=0.5)
        await page.locator("#trace-rows-fold").click()
        await expect(rows).to_have_count(KEPT_TRACES)
        await expect(page.locator("#trace-rows-fold")).to_have_text("Show the newest 10")
        await rows.first.locator("button").click()
        for selector in (".near", ".place", ".domain > .second >> nth=-1"):  # as on a desktop
            await expect(rows.first.locator(selector)).to_be_visible()
        await page.set_viewport_size({"width": 1280, "height": 800})
        await expect(page.locator("#trace-rows-fold")).to_be_hidden()


async def test_a_score_is_shown_as_commands_show_it(visit: Visit, seed: int) -> None:
    rng = random.Random(seed)
    cases = [
        (min(1.0, max(0.0, threshold + rng.choice([-1, 1]) * 10 ** rng.uniform(-17, -1))), threshold, digits)
        for threshold in (0.75, 1, 0.1 + 0.2, rng.random())
        for digits in (3, 4)
        for _ in range(100)
    ]
    async with visit() as page:
        shown = await page.evaluate("cases => cases.map((it) => scoreText(...it))", [list(case) for case in cases])
    assert shown == [shown_score(*case) for case in cases]


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_texts_can_be_read_in_both_colour_schemes(visit: Visit, scheme: str) -> None:
    async with visit(color_scheme=scheme) as page:
        await page.locator("#trace-rows .row button").first.click()
        found = await page.evaluate(CONTRASTS)
        assert len(found) > 200
        assert [item for item in found if item[0] < 4.5] == []  # WCAG AA
        dark = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (dark == "rgb(14, 19, 25)") is (scheme == "dark")


async def test_everything_can_be_reached_and_used_by_keyboard(visit: Visit, stage: Stage) -> None:
    async with visit(viewport={"width": 800, "height": 700}) as page:  # narrower, the tables scroll with the page
        focused = "(e => e.id || e.getAttribute('aria-labelledby') || e.className)(document.activeElement)"
        order = []
        for _ in range(7):
            await page.keyboard.press("Tab")
            order.append(await page.evaluate(focused))
            assert await page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        assert order == ["skip", "pause", "strip", "h-partitions", "domain", "h-traces", "link"]

        table = page.locator("[aria-labelledby=h-traces][role=region]")
        await table.focus()
        await page.keyboard.press("ArrowDown")
        await page.wait_for_function("() => document.activeElement.scrollTop > 0")
        await page.wait_for_timeout(1500)  # a poll later focus and place are the reader's still
        assert await table.evaluate("e => document.activeElement === e && e.scrollTop > 0")

        await page.locator("#pause").focus()
        await page.keyboard.press("Space")
        await expect(page.locator("#state")).to_have_text("‖ paused")
        still = await page.inner_text("main")
        await send(stage, LINES[500:520])
        await page.wait_for_timeout(2500)
        assert await page.inner_text("main") == still
        await page.keyboard.press("Space")
        await expect(page.locator("#state")).to_have_text("✓ ready")
        assert await page.inner_text("main") != still


async def test_a_row_opens_its_explanation_by_keyboard_and_is_held_meanwhile(visit: Visit, stage: Stage) -> None:
    async with visit() as page:
        row, details = page.locator("#trace-rows .row").first, page.locator(".details")
        button = row.locator("button")
        name = await button.inner_text()
        for key in ("Enter", "Space"):
            await button.focus()
            await page.keyboard.press(key)
            await expect(button).to_have_attribute("aria-expanded", "true")
            assert await button.get_attribute("aria-controls") == await details.get_attribute("id")
            await page.keyboard.press("Escape")
            await expect(details).to_have_count(0)
            await expect(button).to_have_attribute("aria-expanded", "false")
            await expect(button).to_be_focused()
        await page.keyboard.press("Enter")
        await send(stage, [trace_bytes("kp:trace:newer")])
        before = await number(page, "#accepted") + await number(page, "#rejected")
        await page.wait_for_function(
            "before => ['accepted', 'rejected'].reduce("
            "(sum, id) => sum + Number(document.getElementById(id).textContent.replaceAll(',', '')), 0) > before",
            arg=before - 1,
        )
        await page.wait_for_timeout(1500)
        await expect(page.locator("#traces-note")).to_contain_text("held")
        assert await button.inner_text() == name
        await page.keyboard.press("Escape")
        await page.locator("#pause").focus()
        await expect(page.locator("#trace-rows .row .id").first).to_have_text("kp:trace:newer")


async def test_the_explanation_is_that_of_the_command(visit: Visit, stage: Stage) -> None:
    await send(stage, [trace_bytes("kp:trace:explained", steps=TWO_OVERRIDES, objective="Explain me")])
    async with visit() as page:
        row = page.locator("#trace-rows .row", has_text="kp:trace:explained").first
        await row.locator("b").click()  # anywhere in the row
        shown = await page.locator(".details").inner_text()
        rejected = await consume_all_async(stage.bootstrap, f"{stage.name}.rejected")
        (document,) = (record.value for record in rejected if b"kp:trace:explained" in record.value)
        explained = explain_trace(document, stage.settings())
        for name, formula in explained.components.items():
            figures = f"{formula.value:.4f}\t{formula.weight:.2f}\t{formula.weighted:.4f}"
            assert f"{name.replace('_', ' ')}\t{figures}" in shown
            assert formula.formula in shown
        for it in explained.overrides:
            assert f"{it.name}: {it.before:.4f} → {it.after:.4f}" in shown
        assert len(explained.overrides) == 2
        assert f"{explained.score:.4f} < 0.75: rejected" in shown
        assert "Explain me" in shown
        assert f"{explain_command(stage.settings())} kp:trace:explained" in shown
        await row.locator("b").click()
        await expect(page.locator(".details")).to_have_count(0)


async def test_the_nearest_trace_is_one_click_away_or_a_command(browser: Browser, kafka: EmbeddedKafka) -> None:
    stage = Stage(kafka, KP_STATUS_PAGE="true", KP_HTTP_HOST="127.0.0.1")
    with WorkerProcess(stage.env | {"KP_EMBEDDER": "auto"}) as worker:
        await asyncio.to_thread(worker.wait_ready)
        same = [trace_bytes(f"kp:trace:{name}", objective="SECRET") for name in ("first it's", "second")]
        for value in same:
            await produce_async(stage.bootstrap, stage.name, [(None, value, (), 0)])
        page = await browser.new_page()
        await page.goto(f"http://127.0.0.1:{worker.http_port}/")
        await page.locator("#trace-rows .row", has_text="kp:trace:second").locator("button").click()
        await page.locator(".details button").click()
        first = page.locator("#trace-rows .row", has_text="kp:trace:first it's").last
        await expect(first.locator("button")).to_have_attribute("aria-expanded", "true")
        await expect(first.locator("button")).to_be_focused()
        assert "novelty is 0.5" in await page.locator(".details").inner_text()
        assert "SECRET" not in await page.content()
        await page.keyboard.press("Escape")
        await produce_async(
            stage.bootstrap, stage.name, [(None, trace_bytes(f"kp:trace:x{i}"), (), 1) for i in range(KEPT_TRACES - 1)]
        )
        await page.locator("#pause").focus()
        await expect(page.locator("#trace-rows .row", has_text="kp:trace:x48")).to_have_count(1)
        await page.locator("#trace-rows .row", has_text="kp:trace:second").locator("button").click()
        await expect(page.locator(".details")).to_contain_text(
            f"{explain_command(stage.settings())} 'kp:trace:first it'\\''s'"
        )
        await page.close()


UUID = "kp:trace:0e9d0b5d-e3a1-5a9a-992f-4dfcfc619d74"


async def test_a_trace_is_named_by_its_objective_and_a_short_id_that_is_copied_whole(
    visit: Visit, stage: Stage
) -> None:
    await send(stage, [trace_bytes(UUID, objective="Find the harbour master")])
    async with visit() as page:
        row = page.locator(f"#trace-rows [data-id='{UUID}']").first
        await expect(row.locator("button")).to_have_text("Find the harbour master")
        place = row.locator(".id")
        await expect(place).to_have_attribute("title", UUID)
        short = await place.evaluate("e => e.getBoundingClientRect().width")
        assert 40 < short < 90  # eight characters
        copied = await place.evaluate("e => { getSelection().selectAllChildren(e); return getSelection().toString(); }")
        assert copied == UUID


def made_up(count: int, poll: int) -> list[dict[str, Any]]:
    """Return partitions of which some are late, others at different polls; one was never restored."""
    rows: list[dict[str, Any]] = [
        {
            "partition": 3 * number,
            "committed": 1000 * number + poll,
            "lag": 10 ** (number % 7) * ((number + poll) % 3),
            "lag_seconds": [0, 30, 200, 4000][(number + poll) % 4],
            "stream_time": 1.7e9 + number + poll,
            "cache": (37 * number + poll) % 1001,
        }
        for number in range(count)
    ]
    if count > 1:
        rows[-1] = {"partition": 3 * (count - 1)}
    return rows


@asynccontextmanager
async def strip_of(visit: Visit, count: int, **options: Any) -> AsyncIterator[Page]:
    """Open the page with made-up partitions, which change at each poll."""
    async with visit(**options) as page:
        polls = 0

        async def answer(route: Route) -> None:
            nonlocal polls
            polls += 1
            response = await route.fetch()
            await route.fulfill(json=await response.json() | {"partitions": made_up(count, polls), "cache_max": 1000})

        await page.route("**/status.json*", answer)
        await expect(page.locator("#strip .cell")).to_have_count(count)
        yield page
        await page.unroute_all(behavior="wait")


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("count", [1, 4, 64, 256])
async def test_the_strip_has_a_cell_for_each_partition_and_nothing_moves(visit: Visit, count: int, width: int) -> None:
    async with strip_of(visit, count, viewport={"width": width, "height": 900}) as page:
        await expect(page.locator("#partitions tr")).to_have_count(min(count, 10))
        section = page.locator("section.right")
        size = await section.bounding_box()
        assert size is not None
        assert size["height"] < (900 if count <= 64 or width > 1000 else 1200)
        assert await page.evaluate("document.documentElement.scrollWidth") <= width
        cells = page.locator("#strip .cell")
        assert await cells.evaluate_all("all => Math.min(...all.map(e => e.getBoundingClientRect().width))") > 6
        before = await page.inner_text("#partitions")
        await page.wait_for_function("old => document.getElementById('partitions').innerText !== old", arg=before)
        assert await section.bounding_box() == pytest.approx(size, abs=0.5)
        if count <= 10:
            await expect(page.locator("#all")).to_be_hidden()
            return
        await expect(cells.last.locator("> .unknown")).to_have_count(2)
        await page.locator("#pause").click()
        late = [float(text) for text in await page.locator("#partitions tr").evaluate_all(LATE)]
        assert late == sorted(late, reverse=True)
        await page.locator("#pause").click()
        await page.locator("#all summary").click()
        await expect(page.locator("#all-rows tr")).to_have_count(count)
        numbers = await page.locator("#all-rows tr td:first-child").all_inner_texts()
        assert [int(text) for text in numbers] == [3 * number for number in range(count)]


LATE = r"""rows => rows.map((row) => {
  const parts = row.children[2].textContent.match(/\d+ (s|min|h|d)/g);
  const units = { s: 1, min: 60, h: 3600, d: 86400 };
  return parts.reduce((sum, part) => sum + parseFloat(part) * units[part.split(" ")[1]], 0);
})"""


async def test_a_cell_is_read_by_pointer_keyboard_and_finger(visit: Visit) -> None:
    async with strip_of(visit, 64) as page:
        strip, numbers = page.locator("#strip"), page.locator("#numbers")
        await expect(numbers).to_contain_text("Point at a cell")
        await page.locator("#strip .cell").nth(17).hover()
        await expect(numbers).to_contain_text("Partition 51: lag ")
        await page.mouse.move(1, 1)
        await expect(numbers).to_contain_text("Point at a cell")
        await page.locator("#pause").focus()
        await page.keyboard.press("Tab")
        await expect(strip).to_be_focused()
        keys = ("", "ArrowRight", "ArrowRight", "ArrowLeft", "End", "ArrowRight", "Home")
        for key, partition in zip(keys, (0, 3, 6, 3, 189, 189, 0), strict=True):
            if key:
                await page.keyboard.press(key)
            await expect(numbers).to_contain_text(f"Partition {partition}: lag ")
            assert f"Partition {partition}: lag " in (await strip.get_attribute("aria-valuetext") or "")
            assert await strip.get_attribute("aria-valuenow") == str(partition // 3)
        await page.wait_for_timeout(1500)  # a poll later it is chosen still
        await expect(numbers).to_contain_text("Partition 0: lag ")
    async with strip_of(visit, 64, **PHONE) as page:
        await page.locator("#strip .cell").nth(40).tap()
        await expect(page.locator("#numbers")).to_contain_text("Partition 120: lag ")
        await page.locator("#strip").focus()
        await page.keyboard.press("ArrowUp")  # the cell above
        await expect(page.locator("#numbers")).to_contain_text("Partition 24: lag ")


async def test_how_late_a_partition_is_is_not_told_by_colour_alone(visit: Visit) -> None:
    async with strip_of(visit, 64) as page:
        await page.locator("#pause").click()
        pictures = {
            name: await page.locator(f"#strip .{name} > i").first.evaluate("e => getComputedStyle(e).backgroundImage")
            for name in ("lag", "late", "latest")
        }
        assert pictures["lag"] == "none"
        assert {"45deg", "0deg"} <= {part for text in pictures.values() for part in re.findall(r"\d+deg", text)}


async def test_the_filter_shows_one_domain_and_the_note_those_without_a_profile(visit: Visit, stage: Stage) -> None:
    await send(stage, [trace_bytes(f"kp:trace:rare-{i}", domain="Finance") for i in range(3)])
    async with visit() as page:
        await expect(page.locator("#trace-rows .row", has_text="kp:trace:rare")).to_have_count(3)
        await send(stage, [trace_bytes("kp:trace:common", domain="code")] * KEPT_TRACES)
        await expect(page.locator("#trace-rows")).not_to_contain_text("kp:trace:rare")
        await expect(page.locator("#domains-note")).to_contain_text("Finance 3 (did you mean finance?)")
        await page.locator("#domain").select_option("Finance")
        await expect(page.locator("#trace-rows .row")).to_have_count(3)
        await expect(page.locator("#trace-rows .row").first).to_contain_text("kp:trace:rare")
        await page.locator("#domain").select_option("")
        await expect(page.locator("#trace-rows .row")).to_have_count(KEPT_TRACES)


async def test_nothing_moves_for_whoever_asks_for_that(visit: Visit) -> None:
    for wish, seconds in (("no-preference", "0.3s"), ("reduce", "0s")):
        async with visit(reduced_motion=wish) as page:
            assert await page.locator("#p50-bar").evaluate("e => getComputedStyle(e).transitionDuration") == seconds


async def test_the_browser_refuses_html_and_code_that_the_page_does_not_hold(
    browser: Browser, worker: WorkerProcess
) -> None:
    page = await browser.new_page()
    await page.goto(f"http://127.0.0.1:{worker.http_port}/")
    with pytest.raises(Error, match="TrustedHTML"):
        await page.evaluate("document.body.innerHTML = '<b>hello</b>'")
    refused = await page.evaluate("""() => new Promise((done) => {
      addEventListener("securitypolicyviolation", (event) => done(event.effectiveDirective));
      fetch("http://localhost:9/").catch(() => setTimeout(() => done("nothing"), 1000));
    })""")
    assert refused == "connect-src"
    await page.close()


async def test_a_worker_that_is_gone_is_said_to_be_gone(browser: Browser, stage: Stage) -> None:
    with WorkerProcess({**stage.env, "KP_GROUP_ID": unique("group")}) as mortal:
        await asyncio.to_thread(mortal.wait_ready)
        page = await browser.new_page()
        await page.goto(f"http://127.0.0.1:{mortal.http_port}/")
        await expect(page.locator("#state")).to_have_text("✓ ready")
        mortal.kill()
        await expect(page.locator("#state")).to_have_text("! no answer, trying again")
        assert await page.locator("main").evaluate("e => getComputedStyle(e).opacity") < "1"
