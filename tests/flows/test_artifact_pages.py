"""Pages for Prefect's UI: whatever a bucket names things, they stay text; what is shown says what to do."""

import html
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from dcp.errors import UnreachableError
from dcp.findings import finding
from dcp.validation import Stats, ValidationReport
from flows.artifact_pages import (
    ROWS,
    browser_address,
    code,
    count,
    failure_page,
    finding_rows,
    plain_name,
    validation_page,
)
from flows.text import anchored, inert

HOSTILE = (
    "<script>alert(1)</script>",
    "a|b`c``d",
    "[x](javascript:alert(1))",
    "\u202egnirts",
    "`",
    " ",
    "w" * 9000,
)
MARKDOWN = MarkdownIt("gfm-like", {"linkify": False})


def rendered(text: str) -> str:
    """The HTML that a Markdown parser makes."""
    return str(MARKDOWN.render(text))


@given(st.text(max_size=8))
def test_a_code_span_is_one_whatever_it_holds(text: str) -> None:
    shown = re.fullmatch(r"<p>x <code>(.*)</code> y</p>\n", rendered(f"x {code(text)} y"))
    assert shown is not None
    if text.strip():
        assert html.unescape(shown[1]).strip() == anchored(inert(text)).strip()


def _report(keys: tuple[str, ...]) -> ValidationReport:
    found = [finding("keys.unexpected", f"{key} is present and not expected", key=key) for key in keys]
    return ValidationReport(
        checkpoint="gs://b/run/step_1",
        state="committed",
        ok=not keys,
        fingerprint="ab",
        findings=found,
        stats=Stats(),
    )


def test_hostile_names_make_neither_tags_nor_links_nor_cells() -> None:
    page = rendered(validation_page("validate", _report(HOSTILE)))
    assert set(re.findall(r"<(\w+)", page)) == {*("h1", "h2", "p", "strong", "code", "ul", "li"), *_TABLE}
    for row in finding_rows(_report(HOSTILE).findings):
        assert set(re.findall(r"<(\w+)", rendered(row["key"]))) == {"p", "code"}
        assert max(map(len, row["key"].split())) < 100
    assert plain_name("a[x](y)_b.c/d") == "a\ufffdx\ufffd\ufffdy\ufffd_b.c/d"


_TABLE = ("table", "thead", "tbody", "tr", "th", "td")


def test_a_verdict_comes_with_what_to_do() -> None:
    page = validation_page("validate", _report(("a", "b")))
    assert "**committed, not ok**" in page
    assert "## Findings: 2 errors" in page
    assert "## Next" in page
    failed = failure_page("export", UnreachableError("no answer from gs://b"), (), "gs://b/run/step_1")
    assert "no answer from gs://b" in failed
    assert "Check network and endpoint" in failed
    assert "## Next" not in validation_page("validate", _report(()))


def test_rows_are_bounded_and_errors_come_first() -> None:
    orphan = finding("files.orphan", "left over", file="x")
    rows = finding_rows([orphan, *_report(("k",) * (ROWS + 5)).findings])
    assert len(rows) == ROWS + 1
    assert {row["severity"] for row in rows[:-1]} == {"error"}
    assert rows[-1]["message"] == "and 6 more"
    assert (count([]), count([orphan, *_report(("k",)).findings])) == ("no findings", "1 error, 1 warning")


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("gs://b/run/step 1/report.html", "https://storage.cloud.google.com/b/run/step%201/report.html"),
        ("s3://b/a/r.html", "https://s3.console.aws.amazon.com/s3/object/b?prefix=a/r.html"),
        ("/a b/r.html", "file:///a%20b/r.html"),
        ("https://x/r.html", "https://x/r.html"),
        ("memory://b/r.html", None),
    ],
)
def test_where_a_browser_finds_a_page(url: str, address: str | None) -> None:
    assert browser_address(url) == address
