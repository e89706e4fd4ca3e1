"""A real browser, and pages to open in it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from flows.report.checkpoint import gather_checkpoint
from flows.report.checkpoint_page import render_checkpoint
from tests.support.indices import Region, rows, write_index
from tests.support.tools import browser_program, required


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A headless chromium."""
    program = required(browser_program())
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Opened:
    """An open page, and everything that a page of ours must never do."""

    page: Any
    told: list[str] = field(default_factory=list)
    """Console messages, errors and requests."""


Open = Callable[..., Any]


@pytest.fixture
def opened(browser: Any) -> Open:
    """``with opened(file, width=400, scheme="dark") as it:`` opens a file; leaving checks `Opened.told`."""

    @contextmanager
    def open_page(file: Path, *, width: int = 1400, scheme: str = "light") -> Iterator[Opened]:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page = context.new_page()
        it = Opened(page)
        page.on("console", lambda message: it.told.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: it.told.append(f"error: {error}"))
        page.on("dialog", lambda dialog: it.told.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: it.told.append(f"request: {request.url}"))
        try:
            page.goto(file.as_uri())
            assert it.told == [f"request: {file.as_uri()}"]
            it.told.clear()
            if 'id="contents"' in page.content():
                page.wait_for_selector("html[data-ready]", timeout=20_000)
            yield it
            assert it.told == []
        finally:
            context.close()

    return open_page


def page_of(directory: Path, target: Path, **validation: Any) -> Path:
    """Write the page of a checkpoint."""
    target.write_text(render_checkpoint(gather_checkpoint(str(directory), **validation)), encoding="utf-8")
    return target


def grid(shape: tuple[int, int], down: int, across: int) -> list[Region]:
    """A matrix in ``down`` by ``across`` equal blocks, each written by a rank of its own."""
    height, width = shape[0] // down, shape[1] // across
    return [
        ([i * height, j * width], [height, width], i * across + j) for i in range(down) for j in range(across)
    ]


@pytest.fixture(scope="session")
def damaged_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a checkpoint with a gap, an overlap, thousands of chunks, and a tensor of 3 dimensions."""
    whole = grid((64, 32), 8, 2)
    torn = [region for i, region in enumerate(whole) if i != 7]
    torn[2] = (torn[2][0], [12, 16], torn[2][2])
    experts: list[Region] = [([i, 0, j * 8], [1, 16, 8], (i + j) % 12) for i in range(6) for j in range(4)]
    tensors = {
        **{f"model.layers.{i}.weight": ((64, 32), whole) for i in range(12)},
        "model.layers.7.weight": ((64, 32), torn),
        "model.experts": ((6, 16, 32), experts),
        "model.norm": ((64,), [([i * 8], [8], i) for i in range(8)]),
        "model.big": rows(4096, 8, 16, ranks=16),
        "scale": ((), [((), (), 0)]),
    }
    place = tmp_path_factory.mktemp("report")
    return page_of(write_index(place / "step_4000", tensors), place / "damaged.html")
