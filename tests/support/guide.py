"""The table of finding codes in the operator's guide, made from `dcp.advice`.

`python -m tests.support.guide` writes it anew after a code or an advice has changed.
"""

from pathlib import Path

from dcp.advice import advice_for
from dcp.findings import CODES, SEVERITY

GUIDE = Path(__file__).parents[2] / "deployments" / "README.md"
BEGIN = "<!-- codes: written by python -m tests.support.guide -->\n"
END = "<!-- end of codes -->\n"


def table() -> str:
    """A row for every code: how severe it is by itself, and what to do."""
    rows = ["| code | severity | what to do |", "| --- | --- | --- |"]
    rows += [f"| `{code}` | {SEVERITY[code]} | {_cell(advice_for(code, 'STEP_URL'))} |" for code in CODES]
    return "\n".join(rows) + "\n"


def parts(text: str) -> tuple[str, str, str]:
    """What stands before the table, the table, and what stands after it."""
    before, begin, rest = text.partition(BEGIN)
    inside, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{GUIDE} has lost the marks around its table of codes")
    return before, inside, after


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    before, _, after = parts(GUIDE.read_text(encoding="utf-8"))
    GUIDE.write_text(f"{before}{BEGIN}{table()}{END}{after}", encoding="utf-8")
