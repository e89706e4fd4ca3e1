"""Loads `deployments/automations` into a server: one webhook block, and each automation once by its name.

`prefect automation create` makes another automation of the same name at every call, and each would tell
people again; here one that stands is given the new content.
"""

from __future__ import annotations

from pathlib import Path
from string import Template
from typing import Any

import yaml

from dcp.errors import EnvironmentFault, UsageError
from flows.deploying.server import Server

BLOCK = "ckpt-alerts"
PLACEHOLDER = "CKPT_WEBHOOK_BLOCK"


def read_automations(directory: Path, block: str) -> list[dict[str, Any]]:
    """Every automation in the files of ``directory``, for the webhook block of this id.

    Raises:
        UsageError: there are none.
        EnvironmentFault: a file cannot be read.
    """
    found: list[dict[str, Any]] = []
    for file in sorted(directory.glob("*.yaml")):
        try:
            text = Template(file.read_text(encoding="utf-8")).safe_substitute({PLACEHOLDER: block})
            found += yaml.safe_load(text)["automations"]
        except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
            raise EnvironmentFault(f"{file} holds no automations ({error})") from None
    if not found:
        raise UsageError(f"there are no automations in {directory}")
    return found


def load_automations(server: Server, directory: Path, webhook: str) -> list[str]:
    """Have every event call ``webhook``; names of the automations.

    Raises:
        UsageError, EnvironmentFault: as `read_automations`; the server refused.
    """
    block = _webhook_block(server, webhook)
    automations = read_automations(directory, block)
    standing = {one["name"]: one["id"] for one in server.ask("POST", "automations/filter", {"limit": 200})}
    for automation in automations:
        known = standing.get(automation["name"])
        if known is None:
            server.ask("POST", "automations/", automation)
        else:
            server.ask("PUT", f"automations/{known}", {"enabled": True, **automation})
    return [automation["name"] for automation in automations]


def _webhook_block(server: Server, webhook: str) -> str:
    kind = server.ask("GET", "block_types/slug/webhook")["id"]
    data = {"method": "POST", "url": webhook, "headers": {"content-type": "application/json"}}
    standing = server.ask("GET", f"block_types/slug/webhook/block_documents/name/{BLOCK}", missing=True)
    if standing is not None:
        server.ask("PATCH", f"block_documents/{standing['id']}", {"data": data})
        return str(standing["id"])
    schemas = server.ask(
        "POST", "block_schemas/filter", {"block_schemas": {"block_type_id": {"any_": [kind]}}, "limit": 1}
    )
    made = server.ask(
        "POST",
        "block_documents/",
        {"name": BLOCK, "data": data, "block_type_id": kind, "block_schema_id": schemas[0]["id"]},
    )
    return str(made["id"])
