"""The stage *validate*: is the step whole, and does it have the keys that loading code expects?

`validate_step` is `dcp.validation.validate` plus what only a run knows: the parts every step must have.
`step_contract` is what the next step's keys will be held against.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dcp.checkpoint import survey
from dcp.checks.keys import IGNORED
from dcp.contract import Contract, contract_at, read_contract
from dcp.errors import NotFoundError
from dcp.findings import finding
from dcp.index import METADATA
from dcp.validation import ValidationReport, validate
from tasks.discover import compile_pattern, step_number
from tasks.ledger import CONTRACT, RECORD_LIMIT, Ledger, StepKey, create_once
from tasks.outcomes import boundary


@boundary
def validate_step(
    url: str,
    *,
    parts: Sequence[str] = (),
    contract: Contract | None = None,
    scrub: bool = False,
    copied: bool = False,
    ignore: Sequence[str] = IGNORED,
    allow: Sequence[str] = (),
    grace_seconds: float,
    newer_seconds: float,
    now: float,
    options: Mapping[str, Any],
    progress: Callable[[int, int], None] | None = None,
) -> ValidationReport:
    """Judge a step as a whole.

    Args:
        url: the step's directory.
        parts: checkpoints it must consist of; whatever it is found to consist of if empty.
        contract: expected keys.
        scrub, copied, ignore, allow, grace_seconds, newer_seconds, now: as `dcp.validation.validate` takes
            them.
        options: fsspec options of the source.
        progress: told about bytes of a scrub.

    Raises:
        StorageError: storage failed, which says nothing of the step.
    """
    report = validate(
        url,
        contract=contract,
        scrub=scrub,
        copied=copied,
        ignore=ignore,
        allow=allow,
        grace_seconds=grace_seconds,
        newer_seconds=newer_seconds,
        now=now,
        progress=progress,
        **options,
    )
    if not parts or report.state in ("writing", "incomplete"):
        return report
    present = survey(url, **options).parts
    missing = [
        finding("incomplete.no-metadata", f"the part {part} has no {METADATA}", file=f"{part}/{METADATA}")
        for part in parts
        if part not in present
    ]
    if not missing:
        return report
    return report.model_copy(
        update={"ok": False, "state": "incomplete", "findings": [*missing, *report.findings]}
    )


def step_contract(url: str, options: Mapping[str, Any]) -> Contract:
    """The keys of a step; those of a step of several parts begin with the part's name.

    Raises:
        CheckpointError, StorageError: its index cannot be read.
    """
    return contract_at(survey(url, **options))


def expected_contract(
    expectation: str, ledger: Ledger, number: int, *, patterns: Sequence[str]
) -> Contract | None:
    """What a step's keys are held against.

    Args:
        expectation: ``"none"``, a contract file, or ``"previous"``: the newest earlier step that was found
            good, whose keys the ledger keeps.
        number: the step's number.
        patterns: of step names, to order the ledger's steps.

    Raises:
        UsageError: the file is no contract.
        StorageError: it, or the ledger, cannot be read.
    """
    if expectation == "none":
        return None
    if expectation != "previous":
        return read_contract(expectation)
    compiled = [compile_pattern(pattern) for pattern in patterns]
    try:
        names = ledger.store.directories()
    except NotFoundError:
        return None
    numbered = ((step_number(name, compiled), name) for name in names)
    earlier = sorted((n, name) for n, name in numbered if n is not None and n < number)
    for _, name in reversed(earlier):
        contract = _kept_contract(ledger, name)
        if contract is not None:
            return contract
    return None


def keep_contract(ledger: Ledger, key: StepKey, contract: Contract) -> None:
    """Keep a good step's keys beside its records."""
    name = f"{key.step}/{key.fingerprint}/{CONTRACT}"
    create_once(ledger.store, name, contract.model_dump_json().encode())


def _kept_contract(ledger: Ledger, step: str) -> Contract | None:
    """The contract of the newest good bytes of ``step``."""
    newest: tuple[float, bytes] | None = None
    for key, stages in ledger.keys(step).items():
        if "validated" not in stages:
            continue
        try:
            data = ledger.store.read(f"{key.step}/{key.fingerprint}/{CONTRACT}", RECORD_LIMIT)
        except NotFoundError:
            continue
        at = ledger.read(key, "validated").at
        if newest is None or at > newest[0]:
            newest = (at, data)
    return Contract.model_validate_json(newest[1]) if newest else None
