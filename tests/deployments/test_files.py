"""What operators deploy, as far as it can be judged without a container engine or a cluster."""

import importlib
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from prefect import Flow
from prefect.cli.deploy._models import PrefectYamlModel
from prefect.events.schemas.automations import AutomationCore
from prefect.utilities.templating import apply_values

from flows.deploying.automations import read_automations
from flows.deploying.project import local_pools, pool_template, project_file
from flows.settings import load_settings
from tasks.alert import TITLES
from tests.support.guide import GUIDE, parts, table

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "deployments"
SETTINGS = """
interval = "7s"
[[runs]]
name = "demo"
source = "train"
publish = "published"
[[deploy.pools]]
name = "huge"
memory = "64GiB"
"""


def _yaml(name: str) -> Any:
    return yaml.safe_load((PLACE / name).read_text())


def _template(name: str) -> Any:
    return json.loads((PLACE / "pools" / name).read_text())


# --- prefect.yaml


def test_every_deployment_leads_to_a_flow_whose_parameters_are_described() -> None:
    project = PrefectYamlModel.model_validate(_yaml("prefect.yaml"))
    assert project.pull == []
    for deployment in project.deployments:
        assert deployment.entrypoint is not None
        assert isinstance(deployment.tags, list)
        module, _, name = deployment.entrypoint.rpartition(".")
        flow = getattr(importlib.import_module(module), name)
        assert isinstance(flow, Flow)
        assert flow.name == deployment.tags[0]
        schema = flow.parameters.model_dump()
        assert set(deployment.parameters) <= set(schema["properties"])
        for parameter in schema["properties"].values():
            assert parameter.get("description"), f"{flow.name}: {parameter['title']}"


def test_one_watcher_at_a_time_and_exports_on_both_pools() -> None:
    deployments = {(one["tags"][0], one["name"]): one for one in _yaml("prefect.yaml")["deployments"]}
    watch = deployments["watch", "watch"]
    assert watch["concurrency_limit"] == {"limit": 1, "collision_strategy": "CANCEL_NEW"}
    assert watch["schedules"] == [{"interval": 60, "slug": "interval"}]
    for flow in ("export-step", "export-checkpoint"):
        for pool in ("default", "large-memory"):
            assert deployments[flow, pool]["work_pool"]["name"] == pool


def test_the_settings_decide_interval_and_pools_of_a_local_deployment(tmp_path: Path) -> None:
    (tmp_path / "lifecycle.toml").write_text(SETTINGS)
    settings = load_settings(tmp_path / "lifecycle.toml")
    pools = local_pools(settings)
    assert [pool.name for pool in pools] == ["default", "large-memory", "huge"]
    document = yaml.safe_load(project_file(PLACE / "prefect.yaml", settings, pools))
    PrefectYamlModel.model_validate(document)
    places = {(one["tags"][0], one["name"], one["work_pool"]["name"]) for one in document["deployments"]}
    assert {("export-step", "huge", "huge"), ("export-checkpoint", "huge", "huge")} <= places
    [watch] = [one for one in document["deployments"] if one["name"] == "watch"]
    assert watch["schedules"][0]["interval"] == 7.0
    assert pool_template(PLACE / "pools/process.json", pools[2])["variables"]["properties"]["memory"][
        "default"
    ] == (64 << 30)


# --- pools


@pytest.mark.parametrize("name", ["process.json", "kubernetes.json"])
def test_templates_describe_every_variable_they_use(name: str) -> None:
    template = _template(name)
    schema = template["variables"]
    jsonschema.Draft202012Validator.check_schema(schema)
    used = set(re.findall(r"{{ (\w+) }}", json.dumps(template["job_configuration"])))
    # A disk that nothing limits is there for people to see.
    assert used | {"disk"} == set(schema["properties"])
    for variable, described in schema["properties"].items():
        assert described["description"], variable
        if "default" in described:
            jsonschema.validate(described["default"], described)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"image": "x", "memory": "plenty"}, schema)


def test_a_kubernetes_job_asks_for_what_the_plan_says_and_may_do_little() -> None:
    template = _template("kubernetes.json")
    values = {name: each.get("default") for name, each in template["variables"]["properties"].items()}
    planned = values | {"image": "registry/ckpt@sha256:0", "memory": 570_430_344, "disk": 12_345}
    spec = apply_values(template["job_configuration"]["job_manifest"], planned)["spec"]
    pod = spec["template"]["spec"]
    [container] = pod["containers"]
    assert container["resources"]["requests"] == {
        "memory": 570_430_344,
        "cpu": "2",
        "ephemeral-storage": 12_345,
    }
    assert container["resources"]["limits"] == {"memory": 570_430_344}
    assert spec["backoffLimit"] == 0
    assert pod["restartPolicy"] == "Never"
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}


def test_a_local_run_is_started_by_the_guard_with_its_limit() -> None:
    configuration = _template("process.json")["job_configuration"]
    command = apply_values(configuration, {"memory": 1234})["command"]
    assert command == "python -m flows.deploying.guard 1234"
    importlib.import_module("flows.deploying.guard")


# --- containers


def test_the_image_runs_as_nobody_special_and_copies_what_there_is() -> None:
    lines = (PLACE / "Containerfile").read_text().splitlines()
    last = lines[max(n for n, line in enumerate(lines) if line.startswith("FROM ")) :]
    assert "USER 10001" in last
    assert not any(line.startswith(("RUN", "COPY", "ADD")) for line in last[last.index("USER 10001") :])
    for line in lines:
        assert not re.search(r"(?i)(secret|token|password|_key)\s*=", line), line
        if line.startswith("COPY ") and "--from" not in line:
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists(), line
    ignored = (PLACE / "Containerfile.dockerignore").read_text().splitlines()
    assert ignored[0] == "*"


def test_compose_opens_nothing_beyond_loopback_and_holds_no_secret() -> None:
    compose = _yaml("compose.yaml")
    services = compose["services"]
    workers = [name for name in services if name.startswith("worker-")]
    assert sorted(workers) == ["worker-default", "worker-large-memory"]
    for name, service in services.items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name
        for variable, value in service.get("environment", {}).items():
            secret = re.search("(?i)secret|token|password", variable)
            assert not secret or str(value).startswith("/run/secrets/"), name
        for needed in service.get("depends_on", {}):
            assert needed in services
        if name != "postgres":
            assert service["read_only"] is True
            assert service["cap_drop"] == ["ALL"]
    for name in workers:
        assert "secrets" not in services[name]
        pool = services[name]["command"][services[name]["command"].index("--pool") + 1]
        assert f"for pool in {'default large-memory'}" in services["deploy"]["command"][2]
        assert pool in ("default", "large-memory")


# --- automations


def test_every_alert_has_one_automation_that_prefect_takes() -> None:
    block = "00000000-0000-0000-0000-000000000001"
    automations = [
        AutomationCore.model_validate(one) for one in read_automations(PLACE / "automations", block)
    ]
    names = [automation.name for automation in automations]
    assert len(names) == len(set(names))
    expected = {name: next(iter(a.trigger.expect)) for name, a in zip(names, automations, strict=True)}
    for problem in TITLES:
        assert expected[f"ckpt-{problem}"] == f"checkpoint.{problem}"
    assert all(str(action.block_document_id) == block for a in automations for action in a.actions)


# --- the guide


def test_the_guide_has_the_advice_for_every_code() -> None:
    _, inside, _ = parts(GUIDE.read_text(encoding="utf-8"))
    assert inside == table(), "write it anew: python -m tests.support.guide"


def test_the_guide_explains_every_alert() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    for problem in TITLES:
        assert f"| `checkpoint.{problem}` |" in text
