"""Has every parameter the optimizer state that its fellows have?

Optimizer state is recognised by its spelling: ``<optimizer>.state.<parameter>.<quantity>`` as torch's
`get_state_dict` and torchtitan write it, and ``<optimizer>.state.<quantity>.<parameter>`` as Megatron
does. A parameter that lacks a quantity most others have, or one of another shape than the parameter,
would be resumed with moments started from nothing.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from dcp.findings import Finding, finding
from dcp.index import CheckpointIndex, TensorEntry

_QUANTITIES = tuple(
    """step exp_avg exp_avg_sq max_exp_avg_sq exp_inf momentum_buffer square_avg acc_delta grad_avg sum prev
    step_size ax mu_product mu exp_avg_diff fp32_param param row_var col_var variance""".split()  # noqa: SIM905
)
_NAMES = "|".join(sorted(_QUANTITIES, key=len, reverse=True))
_BY_PARAMETER = re.compile(rf"(?P<optimizer>.*\bstate)\.(?P<parameter>.+)\.(?P<quantity>{_NAMES})")
_BY_QUANTITY = re.compile(rf"(?P<optimizer>.*\bstate)\.(?P<quantity>{_NAMES})\.(?P<parameter>.+)")
_GROUPED = re.compile(r"(?P<optimizer>.*?)\.?param_groups\.(?P<parameter>.+)\.lr")
_MOMENTS = frozenset(_QUANTITIES) - {"step", "sum", "step_size", "mu_product", "row_var", "col_var"}
"""Quantities that have the parameter's own shape."""


@dataclass
class _State:
    """One optimizer: its quantities by parameter."""

    quantities: dict[str, dict[str, TensorEntry | None]] = field(default_factory=lambda: defaultdict(dict))
    grouped: set[str] = field(default_factory=set)
    """Parameters that its groups list by name, where they are recorded so."""


def is_optimizer_state(key: str) -> bool:
    """Whether a key is spelled as optimizer state is."""
    return bool(_BY_PARAMETER.fullmatch(key) or _BY_QUANTITY.fullmatch(key))


def check_optimizers(index: CheckpointIndex) -> Iterator[Finding]:
    """Findings about optimizer state that is not whole."""
    for name, state in _states(index).items():
        yield from _quantities(name, state)
        yield from _shapes(name, state, index)


def _states(index: CheckpointIndex) -> Mapping[str, _State]:
    states: dict[str, _State] = defaultdict(_State)
    for key, entry in index.entries.items():
        if ".state." not in key and not key.startswith("state."):
            continue
        match = _BY_PARAMETER.fullmatch(key) or _BY_QUANTITY.fullmatch(key)
        if match:
            tensor = entry if isinstance(entry, TensorEntry) else None
            states[match["optimizer"]].quantities[match["parameter"]][match["quantity"]] = tensor
    for key in index.entries:
        match = _GROUPED.fullmatch(key)
        if match and f"{match['optimizer']}.state".strip(".") in states and not match["parameter"].isdigit():
            states[f"{match['optimizer']}.state".strip(".")].grouped.add(match["parameter"])
    return states


def _quantities(name: str, state: _State) -> Iterator[Finding]:
    parameters = state.quantities.keys() | state.grouped
    counts = Counter(quantity for held in state.quantities.values() for quantity in held)
    usual = {quantity for quantity, count in counts.items() if 2 * count > len(parameters)}
    complete = next((p for p, held in state.quantities.items() if usual <= held.keys()), None)
    for parameter in sorted(parameters):
        held = state.quantities.get(parameter, {})
        lacking = sorted(usual - held.keys())
        if not lacking:
            continue
        with_all = sum(usual <= other.keys() for other in state.quantities.values())
        yield finding(
            "optim.incomplete",
            f"{name}: {parameter} has {_listed(held)} but no {_listed(lacking)}, which {with_all} of "
            f"{len(parameters)} parameters have, e.g. {complete}",
            key=f"{name}.{parameter}",
            parameter=parameter,
            present=sorted(held),
            missing=lacking,
            example=complete,
        )


def _shapes(name: str, state: _State, index: CheckpointIndex) -> Iterator[Finding]:
    """Moments of another shape than their parameter, where the parameter can be found by its name."""
    prefix = _model_prefix(name, state, index)
    if prefix is None:
        return
    for parameter, held in state.quantities.items():
        entry = index.entries.get(prefix + parameter)
        if not isinstance(entry, TensorEntry):
            continue
        for quantity, moment in held.items():
            if quantity in _MOMENTS and moment is not None and moment.shape not in (entry.shape, ()):
                yield finding(
                    "optim.incomplete",
                    f"{moment.key} has shape {list(moment.shape)}, its parameter {list(entry.shape)}",
                    key=moment.key,
                    parameter=entry.key,
                    expected=list(entry.shape),
                    actual=list(moment.shape),
                )


def _model_prefix(name: str, state: _State, index: CheckpointIndex) -> str | None:
    """What stands before a parameter's name in the model's own keys, ``""`` or e.g. ``"model."``."""
    sample = next(iter(state.quantities), None)
    if sample is None:
        return None
    candidates = [key.removesuffix(sample) for key in index.entries if key.endswith(sample)]
    votes = Counter(
        {
            prefix: sum(prefix + parameter in index.entries for parameter in state.quantities)
            for prefix in candidates
            if not prefix or (prefix.endswith((".", "/")) and not prefix.startswith(f"{name}."))
        }
    )
    best = votes.most_common(1)
    return best[0][0] if best and 2 * best[0][1] > len(state.quantities) else None


def _listed(names: object) -> str:
    found = sorted(names) if isinstance(names, dict | list) else []
    return ", ".join(found) or "nothing"
