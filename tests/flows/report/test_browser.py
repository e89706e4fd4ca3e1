"""The page in a real browser: it works by mouse and keyboard, loads nothing, and hostile names stay text."""

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from dcp.checkpoint import read_index
from tests.flows.report.conftest import Open, page_of
from tests.support.indices import rows, write_index

_PAINTED = "performance.getEntriesByType('paint').find(e => e.name === 'first-contentful-paint').startTime"


def _said(page: Any) -> str:
    return page.inner_text("#map-said")


def _choose(page: Any, key: str) -> None:
    """Search for a key, click it, and wait until the map shows it."""
    page.fill("#search", key)
    expect(page.locator("#matches")).to_have_text("1 key found")
    page.locator("#tree .key").filter(has_text=key).click()
    expect(page.locator("#map h3")).to_have_text(key)


def test_search_finds_keys_by_words_and_patterns(opened: Open, damaged_page: Path) -> None:
    with opened(damaged_page) as it:
        page = it.page
        assert page.inner_text("#matches") == "16 keys"
        page.fill("#search", "layers.1")
        expect(page.locator("#matches")).to_have_text("3 keys found")
        page.fill("#search", "model.*.weight")
        expect(page.locator("#matches")).to_have_text("12 keys found")
        page.fill("#search", "no such key")
        expect(page.locator("#matches")).to_have_text("No key matches")
        page.fill("#search", "")
        page.check("#marked")
        expect(page.locator("#matches")).to_have_text("1 key found")
        assert "model.layers.7.weight" in page.inner_text("#tree")


def test_the_tree_opens_by_keyboard_and_shows_a_key(opened: Open, damaged_page: Path) -> None:
    with opened(damaged_page) as it:
        page = it.page
        page.focus("#search")
        page.keyboard.press("ArrowDown")
        for _ in range(40):
            if page.evaluate("document.activeElement.textContent").startswith("norm"):
                break
            page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        expect(page.locator("#map h3")).to_have_text("model.norm")
        assert page.get_attribute("#tree .key[aria-pressed=true]", "data-number") is not None
        page.keyboard.press("ArrowLeft")
        assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
        page.keyboard.press("ArrowLeft")
        assert not page.evaluate("document.activeElement.parentElement.open")


def test_the_map_begins_with_the_damage_and_draws_it(opened: Open, damaged_page: Path) -> None:
    with opened(damaged_page) as it:
        page = it.page
        assert page.inner_text("#map h3") == "model.layers.7.weight"
        assert "15 chunks. 1 gap, 1 overlap." in _said(page)
        assert (
            page.locator(".canvas .fault.gap").count() == page.locator(".canvas .fault.overlap").count() == 1
        )
        assert page.locator(".canvas .box").count() == 15
        looks = page.evaluate(
            "[...document.querySelectorAll('.canvas .box')].map(b => b.getAttribute('class') + "
            "(b.nextSibling?.getAttribute('fill') ?? ''))"
        )
        assert len(set(looks)) == 15, "each of 15 ranks can be told from the others by colour and texture"
        page.locator("#map li button", has_text="Show").first.click()
        assert _said(page) == "overlap [16:20, 0:16]: more than one chunk holds it"


def test_a_finding_leads_to_its_tensor(opened: Open, damaged_page: Path) -> None:
    with opened(damaged_page) as it:
        page = it.page
        _choose(page, "model.norm")
        page.locator(".shows button").first.click()
        expect(page.locator("#map h3")).to_have_text("model.layers.7.weight")
        expect(page.locator("#map h3")).to_be_focused()


def test_a_finding_leads_to_a_tensor_of_a_long_name(opened: Open, tmp_path: Path) -> None:
    shape, regions = rows(4, 8, 16, ranks=2)
    key = f"{'layer.' * 60}weight"
    step = write_index(tmp_path / "step_1", {key: (shape, regions[:3]), "b": rows(4, 8, 16, ranks=2)})
    with opened(page_of(step, tmp_path / "page.html")) as it:
        it.page.locator("#tree .key", has_text="b").last.click()
        it.page.locator("#findings button", has_text="Show on the map").click()
        expect(it.page.locator("#map h3")).to_have_text(key)


def test_the_map_is_walked_and_zoomed_by_keyboard(opened: Open, damaged_page: Path) -> None:
    with opened(damaged_page) as it:
        page = it.page
        _choose(page, "model.big")
        assert _said(page).startswith("Summary of 4,096 chunks")
        assert page.locator(".canvas .box").count() < 100
        page.focus(".canvas")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowDown")
        assert "chunks in dim 0" in _said(page)
        for _ in range(4):
            page.keyboard.press("Enter")
        assert _said(page).startswith("Chunk ")
        assert "written by rank" in _said(page)
        first = _said(page)
        page.keyboard.press("ArrowDown")
        assert _said(page) != first
        page.keyboard.press("Escape")
        assert page.locator("button", has_text="Whole").is_disabled()


def test_the_map_goes_in_by_mouse(opened: Open, damaged_page: Path) -> None:
    with opened(damaged_page) as it:
        page = it.page
        _choose(page, "model.big")
        page.hover(".canvas", position={"x": 60, "y": 60})
        assert "chunks in dim 0" in _said(page)
        page.click(".canvas", position={"x": 60, "y": 60})
        assert "Summary of" not in _said(page)
        assert not page.locator("button", has_text="Whole").is_disabled()
        page.click("button:has-text('Whole')")
        assert _said(page).startswith("Summary of 4,096 chunks")
        page.click("#map summary")
        page.wait_for_selector("#map tbody tr")
        assert page.locator("#map tbody tr").count() == 200


def test_three_dimensions_can_be_turned_and_sliced(opened: Open, damaged_page: Path) -> None:
    with opened(damaged_page) as it:
        page = it.page
        _choose(page, "model.experts")
        assert "24 chunks" in _said(page), "both dimensions along which it is cut are drawn"
        page.get_by_label("Down").select_option("1")
        assert "4 chunks. " in _said(page), "one slice of the dimension that is not drawn any more"
        page.get_by_label("dim 0 at index").fill("3")
        page.hover(".canvas", position={"x": 20, "y": 60})
        assert "[3:4, 0:16, 0:8]" in _said(page)


def test_scalars_and_vectors_are_drawn(opened: Open, damaged_page: Path) -> None:
    with opened(damaged_page) as it:
        page = it.page
        for key, chunks in (("scale", 1), ("model.norm", 8)):
            _choose(page, key)
            assert page.locator(".canvas .box").count() == chunks


_ATTACKS = (
    "<script>alert(1)</script>",
    "</script><script>alert(2)</script>",
    "<img src=x onerror=alert(3)>",
    "\"'><svg onload=alert(4)>",
    "{{ 7 * 7 }}{% raw %}",
    "\u202egnirts desrever",
    "שלום.12.עולם",
    "مرحبا",
    "line\u2028separator\u2029",
    "null\x00byte",
    "half \ud800 surrogate",
    "javascript:alert(5)",
    "__proto__",
    "constructor.prototype",
    "a" * 10_000,
    "." * 300,
    "",
)


@pytest.fixture(scope="session")
def hostile_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each tensor has a hole, so that its name is in a finding, too."""
    place = tmp_path_factory.mktemp("hostile")
    tensors = {attack: ((8, 4), [((0, 0), (4, 4), 0)]) for attack in _ATTACKS}
    directory = write_index(place / "step_1", tensors)
    assert set(read_index(str(directory)).entries) == set(_ATTACKS)
    return page_of(directory, place / "<b>hostile</b>.html".replace("/", "_"))


@pytest.mark.parametrize("width", [1400, 400])
def test_hostile_names_stay_text(opened: Open, hostile_page: Path, width: int) -> None:
    with opened(hostile_page, width=width) as it:
        page = it.page
        assert page.inner_text("#matches") == f"{len(_ATTACKS)} keys"
        assert page.evaluate("document.querySelectorAll('script').length") == 2
        assert page.evaluate("document.querySelectorAll('img, iframe, object, embed').length") == 0
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.check("#marked")
        expect(page.locator("#tree .key")).to_have_count(len(_ATTACKS))
        for number in range(len(_ATTACKS)):
            page.locator("#tree .key").nth(number).click()
            expect(page.locator(".canvas")).to_have_count(1)
        shown = page.inner_text("body")
        assert "<script>alert(1)</script>" in shown
        assert "{{ 7 * 7 }}{% raw %}" in shown
        assert "\\u202egnirts" in shown
        assert "\u202e" not in shown
        assert "\u2028" not in shown


def test_letters_from_right_to_left_reorder_nothing_around_them(opened: Open, tmp_path: Path) -> None:
    tensors = {key: ((8, 4), [((0, 0), (4, 4), 0)]) for key in ("שלום", "مرحبا")}
    target = page_of(write_index(tmp_path / "step_1", tensors), tmp_path / "page.html")
    with opened(target) as it:
        found = it.page.evaluate(_ORDER)
        assert len(found) == 2
        for name, after in found:
            assert name["right"] <= after["left"] + 1, "what follows a name is drawn behind it"


_ORDER = """[...document.querySelectorAll('.problem li')].map(li => {
    const text = document.createRange();
    const walker = document.createTreeWalker(li, NodeFilter.SHOW_TEXT);
    const nodes = [];
    while (walker.nextNode()) nodes.push(walker.currentNode);
    const at = nodes.findIndex(node => /[\\u0590-\\u08ff]/.test(node.data));
    const place = (node, from, to) => {
        text.setStart(node, from); text.setEnd(node, to);
        return { left: text.getBoundingClientRect().left, right: text.getBoundingClientRect().right };
    };
    return [place(nodes[at], 0, nodes[at].length), place(nodes[at + 1], 0, 4)];
})"""


def test_nothing_runs_that_is_not_the_pages_own(browser: Any, damaged_page: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    page = damaged_page.read_text(encoding="utf-8")
    broken.write_text(page.replace("</main>", "<script>window.ran = true</script></main>"), encoding="utf-8")
    context = browser.new_context()
    tab = context.new_page()
    told: list[str] = []
    tab.on("console", lambda message: told.append(message.text))
    tab.goto(broken.as_uri())
    assert tab.evaluate("window.ran") is None
    assert "Content Security Policy" in " ".join(told)
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 400])
def test_it_fits_every_window(opened: Open, damaged_page: Path, width: int, scheme: str) -> None:
    with opened(damaged_page, width=width, scheme=scheme) as it:
        assert it.page.evaluate("document.documentElement.scrollWidth") == width


def test_without_scripts_it_still_tells_everything_but_single_keys(browser: Any, damaged_page: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(damaged_page.as_uri())
    text = page.inner_text("body")
    assert "Do not resume" in text
    assert "no chunk holds [24:32, 16:32]" in text
    assert "ckpt inspect" in text
    assert not page.locator(".browser").is_visible()
    context.close()


def test_many_keys_and_chunks_stay_small_and_quick(opened: Open, tmp_path: Path) -> None:
    tensors = {
        f"model.layers.{i}.mlp.{part}.weight": rows(4, 8, 16, ranks=4) for i in range(700) for part in "abc"
    }
    tensors |= {f"huge.{i}": rows(20_000, 1, 4, ranks=64) for i in range(3)}
    target = page_of(write_index(tmp_path / "step_1", tensors), tmp_path / "many.html")
    assert target.stat().st_size < 400_000
    paints: list[float] = []
    # The bar is a second on a quiet machine; this one may be busy, and now and then very busy.
    while not paints or (paints[-1] >= 5_000 and len(paints) < 4):
        with opened(target) as it:
            paints.append(it.page.evaluate(_PAINTED))
    assert paints[-1] < 5_000, paints
    with opened(target) as it:
        page = it.page
        assert page.inner_text("#matches") == "2,103 keys"
        assert _said(page).startswith("Summary of 20,000 chunks")
        assert page.evaluate("document.querySelectorAll('*').length") < 3_000, "only what is open is drawn"
