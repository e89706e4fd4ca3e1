"""Has every parameter the optimizer state that its fellows have?

Optimizer state is recognised by its spelling: ``<optimizer>.state.<parameter>.<quantity>`` as torch's
`get_state_dict` and torchtitan write it, and ``<optimizer>.state.<quantity>.<parameter>`` as Megatron
does. A parameter that lacks a quantity that its peers have, or has one of another shape than its own, would
be resumed with moments started from nothing.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dcp.checkpoint import Checkpoint
from dcp.errors import CheckpointError
from dcp.findings import Finding, finding
from dcp.index import CheckpointIndex, TensorEntry
from dcp.records import Records

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


_MEMBERS = re.compile(r"(?P<optimizer>.*?)\.?param_groups\.(?P<group>\d+)\.params")
_MOST_GROUPS = 64

Members = Mapping[str, Sequence[str]]
"""Names of the parameters in each group, by the key that lists them (``optim.param_groups.0.params``)."""


_Kind = tuple[str | None, bool | None]
"""Parameters that are treated alike: their group, and whether they are matrices, where these are known."""


@dataclass
class _State:
    """One optimizer: its quantities by parameter, and the groups that list its parameters."""

    quantities: dict[str, dict[str, TensorEntry | None]] = field(default_factory=lambda: defaultdict(dict))
    listed: set[str] = field(default_factory=set)
    """Parameters that its groups name."""
    group: dict[str, str] = field(default_factory=dict)
    """The group of a parameter, where it is known."""


def read_members(checkpoint: Checkpoint) -> tuple[Members, list[Finding]]:
    """The lists of parameters that an optimizer's groups keep as objects, and what kept any from being read.

    Raises:
        StorageError: the store failed.
    """
    records = Records(checkpoint.store, checkpoint.objects)
    members: dict[str, Sequence[str]] = {}
    faults: list[Finding] = []
    lists = [entry for entry in checkpoint.index.objects if _MEMBERS.fullmatch(entry.key)]
    for entry in lists[:_MOST_GROUPS]:
        try:
            value = records.read_object(entry).value
        except CheckpointError as error:
            error.key = error.key or entry.key
            faults.append(error.as_finding())
            continue
        if isinstance(value, list):
            members[entry.key] = [name for name in value if isinstance(name, str)]
    if len(lists) > _MOST_GROUPS:
        faults.append(
            finding(
                "records.unchecked",
                f"only {_MOST_GROUPS} of {len(lists)} optimizer groups were held against their state",
                key=lists[_MOST_GROUPS].key,
                count=len(lists) - _MOST_GROUPS,
            )
        )
    return members, faults


def is_optimizer_state(key: str) -> bool:
    """Whether a key is spelled as optimizer state is."""
    return bool(_BY_PARAMETER.fullmatch(key) or _BY_QUANTITY.fullmatch(key))


def check_optimizers(index: CheckpointIndex, members: Members) -> Iterator[Finding]:
    """Findings about optimizer state that is not whole.

    Args:
        index: what there is.
        members: from `read_members`.
    """
    for name, state in _states(index, members).items():
        prefix = _model_prefix(name, state, index)
        yield from _quantities(name, state, prefix, index)
        if prefix is not None:
            yield from _shapes(state, prefix, index)


def _states(index: CheckpointIndex, members: Members) -> Mapping[str, _State]:
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
        name = f"{match['optimizer']}.state".strip(".") if match else ""
        if match and name in states and not match["parameter"].isdigit():
            states[name].listed.add(match["parameter"])
    for key, names in members.items():
        match = _MEMBERS.fullmatch(key)
        name = f"{match['optimizer']}.state".strip(".") if match else ""
        if name in states:
            states[name].listed.update(names)
            states[name].group.update(dict.fromkeys(names, key))
    return states


def _quantities(name: str, state: _State, prefix: str | None, index: CheckpointIndex) -> Iterator[Finding]:
    """Parameters that lack what their peers have: those of their group, matrices apart from vectors.

    Some optimizers keep other quantities for vectors than for matrices. In a group that is known, whatever
    one peer has is due to all; otherwise what half of them have. Of a parameter without any state the shape
    may be unknown: then only what both kinds have is due.
    """
    parameters = state.quantities.keys() | state.listed
    peers = {p: (state.group.get(p), _is_matrix(p, state, prefix, index)) for p in parameters}
    kept: dict[_Kind, set[str]] = defaultdict(set)
    for parameter, held in state.quantities.items():
        kept[peers[parameter]] |= held.keys()
    # Vectors and matrices are of one kind where they share moments of their own shape, as in Adam.
    alike = {group for group, _ in peers.values() if kept[group, True] & kept[group, False] & _MOMENTS}
    peers = {p: (group, None if group in alike else matrix) for p, (group, matrix) in peers.items()}
    counts: dict[_Kind, Counter[str]] = defaultdict(Counter)
    for parameter, held in state.quantities.items():
        counts[peers[parameter]].update(held.keys())
    sizes = Counter(peers.values())
    for parameter in sorted(parameters):
        held = state.quantities.get(parameter, {})
        group, matrix = peers[parameter]
        kinds = [(group, kind) for kind in ((True, False, None) if matrix is None else (matrix,))]
        due = [
            {q for q, count in counts[kind].items() if group is not None or 2 * count >= sizes[kind]}
            for kind in kinds
            if counts[kind]
        ]
        lacking = sorted(set.intersection(*due) - held.keys()) if due else []
        if not lacking:
            continue
        example = next(p for p, has in state.quantities.items() if peers[p] in kinds and lacking[0] in has)
        only = f"only {', '.join(sorted(held))}, " if held else ""
        yield finding(
            "optim.incomplete",
            f"{name}: {parameter} has no {', '.join(lacking)}, {only}which others of its kind have, "
            f"e.g. {example}",
            key=f"{name}.{parameter}",
            parameter=parameter,
            present=sorted(held),
            missing=lacking,
            example=example,
        )


def _is_matrix(parameter: str, state: _State, prefix: str | None, index: CheckpointIndex) -> bool | None:
    """Whether a parameter has two dimensions or more, as far as it or its moments tell."""
    entry = None if prefix is None else index.entries.get(prefix + parameter)
    if isinstance(entry, TensorEntry):
        return len(entry.shape) > 1
    for quantity, moment in state.quantities.get(parameter, {}).items():
        if quantity in _MOMENTS and moment is not None:
            return len(moment.shape) > 1
    return None


def _shapes(state: _State, prefix: str, index: CheckpointIndex) -> Iterator[Finding]:
    """Moments of another shape than their parameter, which is found by its name."""
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
