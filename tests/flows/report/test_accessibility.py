"""Can the page be read and used by everybody: contrast, names, structure, by a check of every element."""
# ruff: noqa: E501 - the checks are scripts.

from pathlib import Path

import pytest

from flows.report.run_page import render_runs
from flows.report.runs import gather_runs
from tests.flows.report.conftest import Open, grid, page_of
from tests.support.indices import write_index
from tests.support.lifecycle import Lifecycle

_CONTRAST = """() => {
  const parse = (text) => {
    const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number);
    return [r, g, b, a];
  };
  const luminance = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour[3] === 1) return colour;
    }
    return [255, 255, 255, 1];
  };
  const wrong = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !element.checkVisibility() || element.closest('script, style, .canvas, title')) continue;
    const style = getComputedStyle(element);
    const ink = parse(element instanceof SVGElement ? style.fill : style.color);
    const [a, b] = [luminance(ink), luminance(ground(element))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && style.fontWeight >= 700);
    if (ratio < (large ? 3 : 4.5)) wrong.push(`${ratio.toFixed(2)} ${element.tagName} ${element.textContent.slice(0, 40)}`);
  }
  return wrong;
}"""

_INK_ON_BOXES = """() => {
  const probe = document.querySelector('.canvas');
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  return ['r0', 'r1', 'r2', 'r3', 'r4', 'r5', 'r6', 'r7', 'mixed'].map((name) => {
    const box = document.createElementNS('http://www.w3.org/2000/svg', 'rect');
    const text = document.createElementNS('http://www.w3.org/2000/svg', 'text');
    box.setAttribute('class', name);
    probe.append(box, text);
    const [a, b] = [luminance(rgb(getComputedStyle(box).fill)), luminance(rgb(getComputedStyle(text).fill))];
    box.remove();
    text.remove();
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  });
}"""

_STRUCTURE = """() => {
  const wrong = [];
  const say = (what, element) => wrong.push(`${what}: ${element.outerHTML.slice(0, 120)}`);
  const all = (selector) => [...document.querySelectorAll(selector)];
  const name = (element) =>
    element.getAttribute('aria-label') || (element.getAttribute('aria-labelledby') ?? '').split(' ').map((id) => document.getElementById(id)?.textContent ?? '').join(' ').trim() ||
    [...(element.labels ?? [])].map((label) => label.textContent).join(' ').trim() || (['INPUT', 'SELECT'].includes(element.tagName) ? '' : element.textContent.trim());
  for (const element of all('a[href], button, input, select, summary, [tabindex="0"], [role=application]')) if (!name(element)) say('no name', element);
  for (const element of all('section, nav, form[role=search], [role=region]')) if (!name(element)) say('no name', element);
  for (const element of all('svg')) {
    const hidden = element.closest('[aria-hidden=true]');
    if (!hidden && !(element.getAttribute('role') && name(element))) say('neither hidden nor named', element);
  }
  const ids = all('[id]').map((element) => element.id);
  for (const id of new Set(ids)) if (ids.filter((each) => each === id).length > 1) wrong.push(`two elements are called ${id}`);
  for (const element of all('a[href^="#"]')) if (!document.getElementById(element.getAttribute('href').slice(1))) say('leads nowhere', element);
  for (const element of all('[aria-describedby]')) for (const id of element.getAttribute('aria-describedby').split(' ')) if (!document.getElementById(id)) say('described by nothing', element);
  for (const element of all('table')) if (!element.caption?.textContent.trim()) say('no caption', element);
  for (const element of all('table')) if (!element.querySelector('th[scope=col]') || [...element.querySelectorAll('th')].some((th) => !th.scope)) say('headers without scope', element);
  let level = 0;
  for (const element of all('h1, h2, h3, h4')) {
    const own = Number(element.tagName[1]);
    if (own > level + 1) say(`heading after level ${level}`, element);
    level = own;
  }
  if (all('h1').length !== 1) wrong.push('not one h1');
  if (all('main').length !== 1) wrong.push('not one main');
  if (!document.documentElement.lang || !document.title) wrong.push('no language or title');
  for (const element of all('li')) if (!['UL', 'OL'].includes(element.parentElement.tagName)) say('outside a list', element);
  return wrong;
}"""

_TARGETS = """() => [...document.querySelectorAll('button, nav a, summary, input[type=search]')]
  .filter((each) => each.checkVisibility())
  .map((each) => [each.getBoundingClientRect().height, each.textContent.slice(0, 30)])
  .filter(([height]) => height < 24)"""


_SMALL = """() => [...document.querySelectorAll('.chart text')]
  .filter((each) => each.checkVisibility())
  .map((each) => [parseFloat(getComputedStyle(each).fontSize) * each.getScreenCTM().a, each.textContent])
  .filter(([size]) => size < 11.5)"""

_CUT_OFF = """() => [...document.querySelectorAll('.chart text')]
  .filter((each) => each.checkVisibility())
  .map((each) => [each.getBoundingClientRect(), each.textContent])
  .filter(([box]) => box.left < 0 || box.right > innerWidth)
  .map(([box, text]) => `${text}: ${box.left} to ${box.right}`)"""

_TOUCHING = """() => [...document.querySelectorAll('.chart')].flatMap((chart) => {
  const boxes = [...chart.querySelectorAll('text')].filter((each) => each.checkVisibility())
    .map((each) => [each.getBoundingClientRect(), each.textContent]);
  const meet = (a, b) => a.left < b.right && b.left < a.right && a.top + 2 < b.bottom && b.top + 2 < a.bottom;
  return boxes.flatMap(([a, text], i) => boxes.slice(i + 1).filter(([b]) => meet(a, b)).map(([, b]) => `${text} on ${b}`));
})"""


@pytest.fixture(scope="session")
def whole_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a checkpoint that would load, with a forecast."""
    place = tmp_path_factory.mktemp("whole")
    tensors = {f"model.layers.{i}.weight": ((4096, 1024), grid((4096, 1024), 8, 2)) for i in range(4)}
    return page_of(write_index(place / "step_12", tensors), place / "whole.html")


@pytest.fixture(scope="session")
def runs_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run with good steps and bad ones."""
    place = tmp_path_factory.mktemp("runs")
    life = Lifecycle(str(place / "bucket"), place)
    life.save_good_and_bad()
    settings = life.settings()
    life.once(settings)
    target = place / "runs.html"
    target.write_text(render_runs(gather_runs(settings), lambda _: None), encoding="utf-8")
    return target


@pytest.fixture(params=["damaged_page", "runs_page"])
def page_file(request: pytest.FixtureRequest) -> Path:
    """One of the pages."""
    file: Path = request.getfixturevalue(request.param)
    return file


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_stands_out(opened: Open, page_file: Path, scheme: str) -> None:
    with opened(page_file, scheme=scheme) as it:
        assert it.page.evaluate(_CONTRAST) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_ranks_are_legible_on_their_colours(opened: Open, damaged_page: Path, scheme: str) -> None:
    with opened(damaged_page, scheme=scheme) as it:
        assert min(it.page.evaluate(_INK_ON_BOXES)) >= 4.5


@pytest.mark.parametrize("width", [320, 400, 560, 760, 1400])
@pytest.mark.parametrize("file", ["whole_page", "runs_page", "damaged_page"])
def test_letters_of_charts_are_legible_at_any_width(
    opened: Open, request: pytest.FixtureRequest, file: str, width: int
) -> None:
    with opened(request.getfixturevalue(file), width=width) as it:
        assert it.page.locator(".chart text").count() > 5
        assert it.page.evaluate(_SMALL) == []
        assert it.page.evaluate(_CUT_OFF) == []
        assert it.page.evaluate(_TOUCHING) == []


def test_everything_has_a_name_and_a_place(opened: Open, page_file: Path) -> None:
    with opened(page_file) as it:
        assert it.page.evaluate(_STRUCTURE) == []


def test_fingers_can_hit_what_they_aim_at(opened: Open, page_file: Path) -> None:
    with opened(page_file, width=400) as it:
        assert it.page.evaluate(_TARGETS) == []


@pytest.mark.parametrize("break_it", [_CONTRAST, _STRUCTURE])
def test_the_checks_can_fail(opened: Open, damaged_page: Path, break_it: str) -> None:
    with opened(damaged_page) as it:
        it.page.evaluate(
            "() => { const bad = document.createElement('a'); bad.href = '#nowhere'; "
            "const pale = document.createElement('p'); pale.textContent = 'pale'; pale.style.color = '#eee'; "
            "document.body.append(bad, pale); }"
        )
        assert it.page.evaluate(break_it) != []


def test_it_prints_black_on_white(opened: Open, damaged_page: Path) -> None:
    with opened(damaged_page, scheme="dark") as it:
        it.page.emulate_media(media="print")
        assert (
            it.page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
            == "rgb(255, 255, 255)"
        )
        assert not it.page.locator("nav").is_visible()
        assert not it.page.locator("#search").is_visible()
        assert it.page.locator(".canvas").is_visible()


def test_tables_fit_the_paper(opened: Open, page_file: Path) -> None:
    # A4 within Chromium's own margins, in CSS pixels.
    with opened(page_file, width=718) as it:
        it.page.emulate_media(media="print")
        assert it.page.evaluate("document.documentElement.scrollWidth") <= 718


def test_the_damage_can_be_told_without_colour(opened: Open, damaged_page: Path) -> None:
    with opened(damaged_page) as it:
        fills = it.page.evaluate(
            "[...document.querySelectorAll('.canvas .fault')].map((each) => each.getAttribute('fill'))"
        )
        assert sorted(fills) == ["url(#gap)", "url(#overlap)"]


_FOCUSED = """() => {
  const element = document.activeElement;
  if (element === document.body || element === document.documentElement) return null;
  const style = getComputedStyle(element);
  const box = element.getBoundingClientRect();
  return {
    what: `${element.tagName}.${element.className.baseVal ?? element.className}#${element.id}`,
    outlined: style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2,
    seen: box.bottom > 0 && box.top < innerHeight && box.right > 0 && box.left < innerWidth,
  };
}"""


@pytest.mark.parametrize("forced", ["none", "active"])
def test_the_keyboard_reaches_everything_and_shows_where_it_is(
    opened: Open, page_file: Path, forced: str
) -> None:
    with opened(page_file) as it:
        it.page.emulate_media(forced_colors=forced, reduced_motion="reduce")
        reached = []
        for _ in range(200):
            it.page.keyboard.press("Tab")
            focused = it.page.evaluate(_FOCUSED)
            if focused is None:
                break
            reached.append(focused)
        else:
            pytest.fail("Tab never comes to the end of the page")
        assert [each["what"] for each in reached if not (each["outlined"] and each["seen"])] == []
        visible = it.page.evaluate(
            "[...document.querySelectorAll('a[href], button:enabled, input, select, summary, [tabindex=\"0\"]')]"
            ".filter((each) => each.checkVisibility()).length"
        )
        assert len(reached) == visible


def test_nothing_moves_for_those_who_asked(opened: Open, damaged_page: Path) -> None:
    with opened(damaged_page) as it:
        behaviour = "getComputedStyle(document.documentElement).scrollBehavior"
        assert it.page.evaluate(behaviour) == "smooth"
        it.page.emulate_media(reduced_motion="reduce")
        assert it.page.evaluate(behaviour) == "auto"
        moving = "document.getAnimations().length"
        assert it.page.evaluate(moving) == 0


def test_the_map_is_told_apart_in_forced_colours(opened: Open, damaged_page: Path) -> None:
    with opened(damaged_page) as it:
        it.page.emulate_media(forced_colors="active")
        fills = it.page.evaluate(
            "[...new Set([...document.querySelectorAll('.canvas .box')].map((e) => getComputedStyle(e).fill))]"
        )
        assert len(fills) >= 8
