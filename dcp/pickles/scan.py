"""Which globals a pickle asks for, and whether they are harmless.

`scan` runs the inert reader over a pickle and lists every global it names, used or not, also those before
a point at which it cannot be read further, because an unpickler would have run them. `judge` holds them
against `dcp.pickles.tables` and the user's own list. Nothing is imported to find out. Bytes within a
pickle that are pickles again are not followed: whatever would load them is itself a global that reaches
code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from dcp.collector import gc_paused
from dcp.errors import PickleError, UsageError
from dcp.pickles.machine import Machine
from dcp.pickles.nodes import Global
from dcp.pickles.reader import run
from dcp.pickles.tables import NEVER, PERMITTED, PERMITTED_MODULES, REACHING, REACHING_MODULES, WEIGHTS_ONLY

_WALKED_ROOTS = sys.stdlib_module_names | {"torch", "numpy"}


class Verdict(StrEnum):
    """What a global, or a whole pickle, comes to."""

    ALLOWED = "allowed"
    UNKNOWN = "unknown"
    REACHES_CODE = "reaches-code"


@dataclass(frozen=True, slots=True)
class Scan:
    """What a pickle asks for.

    Attributes:
        globals: each once, in the order in which they are first named.
        end: bytes up to the end of the pickle, or of the opcode that could not be read.
        error: why it could not be read to its end, if it could not.
        strange: names of opcodes that ``torch.load(weights_only=True)`` does not know.
    """

    globals: tuple[Global, ...]
    end: int
    error: PickleError | None = None
    strange: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict on a pickle, with the names that led to it.

    Attributes:
        unknown: full names that no list holds.
        reaching: full names that reach code.
        error: why the pickle could not be read to its end; one with an error is never allowed.
    """

    verdict: Verdict
    unknown: tuple[str, ...] = ()
    reaching: tuple[str, ...] = ()
    error: PickleError | None = None


class Allowance:
    """A user's own list of globals to be taken.

    An entry is a full name (``mypackage.config.Train``), or ``package.*`` for every top-level name of a
    module and of the modules inside it. A full name wins over `REACHING`, though not over `NEVER`; a
    pattern never does. Names imported into a module count as its own, so a pattern trusts the whole module.

    Raises:
        UsageError: an entry is neither.
    """

    __slots__ = ("modules", "names")

    def __init__(self, entries: Iterable[str] = ()) -> None:
        if isinstance(entries, str):
            raise UsageError(f"what is allowed is a list of globals, e.g. [{entries!r}]")
        self.names: set[str] = set()
        self.modules: set[str] = set()
        for entry in entries:
            plain = entry.removesuffix(".*")
            if "." not in entry or not all(part.isidentifier() for part in plain.split(".")):
                raise UsageError(
                    f"{entry!r} is not a global's full name (pkg.mod.Class) nor a pattern (pkg.*)"
                )
            (self.names if plain == entry else self.modules).add(plain)

    def covers(self, found: Global) -> bool:
        """Whether a pattern covers it."""
        return "." not in found.name and any(outer in self.modules for outer in _outwards(found.module))


def scan(data: bytes) -> Scan:
    """List the globals that a pickle asks for. Never raises: what is wrong is in ``error``."""
    machine = Machine(data)
    error = None
    try:
        with gc_paused():
            run(machine)
    except PickleError as met:
        error = met
    return Scan(tuple(machine.globals), machine.position, error, tuple(machine.strange))


def globals_of(data: bytes) -> list[str]:
    """Full names of the globals that a pickle asks for, as far as it can be read."""
    return [str(found) for found in scan(data).globals]


def beyond_weights_only(found: Scan) -> list[str]:
    """What ``torch.load(weights_only=True)`` refuses in a pickle, harmless or not: globals, then opcodes."""
    names = [name for each in found.globals if (name := str(each)) not in WEIGHTS_ONLY]
    return [*names, *(f"opcode {name}" for name in found.strange)]


def judge(found: Scan, allow: Allowance | None = None) -> Judgement:
    """Classify a scanned pickle by the worst of its globals.

    Args:
        found: from `scan`.
        allow: what the user takes beyond the built-in lists.
    """
    allow = allow or Allowance()
    verdicts = {each: verdict_on(each, allow) for each in found.globals}
    unknown = tuple(str(each) for each, verdict in verdicts.items() if verdict is Verdict.UNKNOWN)
    reaching = tuple(str(each) for each, verdict in verdicts.items() if verdict is Verdict.REACHES_CODE)
    if reaching or (found.error is not None and found.error.code == "records.unsafe"):
        verdict = Verdict.REACHES_CODE
    elif unknown or found.error is not None:
        verdict = Verdict.UNKNOWN
    else:
        verdict = Verdict.ALLOWED
    return Judgement(verdict, unknown, reaching, found.error)


def verdict_on(found: Global, allow: Allowance) -> Verdict:
    """Classify one global.

    A name with dots is a walk over attributes. None is ever permitted by a list or a pattern, since such a
    walk leads from any module to any other; from the standard library, torch or numpy, or over a special
    attribute or a module's name, it counts as reaching code.
    """
    full = str(found)
    if full in allow.names and found.module.partition(".")[0] not in NEVER:
        return Verdict.ALLOWED
    if full in REACHING or any(outer in REACHING_MODULES for outer in _outwards(found.module)):
        return Verdict.REACHES_CODE
    if "." in found.name:
        return Verdict.REACHES_CODE if _walks_far(found) else Verdict.UNKNOWN
    if full in PERMITTED or found.module in PERMITTED_MODULES or allow.covers(found):
        return Verdict.ALLOWED
    return Verdict.UNKNOWN


def _walks_far(found: Global) -> bool:
    if found.module.partition(".")[0] in _WALKED_ROOTS:
        return True
    return any(part.startswith("__") or part in REACHING_MODULES for part in found.name.split("."))


def _outwards(module: str) -> Iterator[str]:
    """The module and the packages around it: ``a.b.c``, ``a.b``, ``a``."""
    while module:
        yield module
        module = module.rpartition(".")[0]
