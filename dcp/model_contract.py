"""A contract from the model itself: what `get_state_dict` of a freshly built model and optimizer would hold.

The model is built on the meta device, so no memory is taken for it, and one optimizer step is taken there
so that optimizer state exists. This imports torch and runs the caller's own code, nothing from a checkpoint.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from dcp.contract import Contract, Expected
from dcp.errors import UsageError


def contract_from_model(location: str) -> Contract:
    """Build the model that ``module:factory`` names and describe its state dict.

    The factory takes no arguments and returns a ``torch.nn.Module``, or ``(model, optimizer)``, or a dict as
    one would pass to ``torch.distributed.checkpoint.save``, in which models and optimizers may stand.

    Args:
        location: ``package.module:factory``; the working directory is searched too.

    Raises:
        UsageError: it cannot be imported, called, or gives something else.
    """
    import torch

    factory = _find(location)
    try:
        with torch.device("meta"):
            built = factory()
    # Whatever the caller's own code raises is for the caller to see.
    except Exception as error:
        raise UsageError(
            f"{location}() failed on the meta device: {type(error).__name__}: {error}"
        ) from error
    return Contract(source=location, keys=_describe(_state(location, built)))


def _find(location: str) -> Any:
    module_name, mark, name = location.partition(":")
    if not mark or not module_name or not name:
        raise UsageError(f"{location!r} is not module:factory, e.g. train.model:build")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UsageError(f"{location}: cannot import {module_name}: {error}") from error
    factory = getattr(module, name, None)
    if not callable(factory):
        raise UsageError(f"{location}: {module_name} has no callable {name}")
    return factory


def _state(location: str, built: Any) -> dict[str, Any]:
    import torch
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict

    match built:
        case torch.nn.Module():
            return {"model": get_model_state_dict(built)}
        case (torch.nn.Module() as model, torch.optim.Optimizer() as optimizer):
            _take_step(optimizer)
            model_state, optimizer_state = get_state_dict(model, optimizer)
            return {"model": model_state, "optim": optimizer_state}
        case dict():
            return _resolved(built)
    raise UsageError(
        f"{location}() gave {type(built).__name__}; it must give a model, (model, optimizer) or a dict"
    )


def _resolved(state: dict[str, Any]) -> dict[str, Any]:
    """A dict as one saves it, with models and optimizers replaced by their state."""
    import torch
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    models = [value for value in state.values() if isinstance(value, torch.nn.Module)]
    resolved: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, torch.nn.Module):
            resolved[name] = get_model_state_dict(value)
        elif isinstance(value, torch.optim.Optimizer):
            _take_step(value)
            if not models:
                raise UsageError(f"the optimizer {name!r} needs its model beside it in the dict")
            resolved[name] = get_optimizer_state_dict(models[0], value)
        else:
            resolved[name] = value
    return resolved


def _take_step(optimizer: Any) -> None:
    """Make optimizer state exist, as it does after the first step of training."""
    import torch

    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _describe(state: dict[str, Any]) -> dict[str, Expected]:
    import torch
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    flat, _ = flatten_state_dict(state)
    return {
        key: Expected(kind="tensor", shape=tuple(value.shape), dtype=str(value.dtype).removeprefix("torch."))
        if isinstance(value, torch.Tensor)
        else Expected(kind="bytes")
        for key, value in flat.items()
    }
