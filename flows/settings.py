"""`lifecycle.toml`: which runs are watched, what is expected of their steps, and what becomes of them.

`load_settings` reads the file into `LifecycleSettings`, which holds one `RunSettings` a run, each with its
`ExportSettings`. Top-level settings can be overridden by environment variables (``CKPT_INTERVAL=30s``,
``CKPT_ALERTS='["json://host/hook"]'``), so that secrets need not stand in the file. Whatever is wrong ends
as one line that names the file and the field.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ByteSize,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from dcp.checks.keys import IGNORED
from dcp.errors import SettingsError, UsageError
from dcp.exporting.renaming import parse_rename
from dcp.exporting.report import CastDtype, require_fitting
from dcp.layout import Layout
from dcp.pickles.scan import Allowance
from dcp.storage import home_expanded, is_safe_name, normalise_url
from dcp.tp_rules import TpRules
from flows.deploy_settings import DeploySettings
from flows.operation_settings import OperationSettings
from flows.run_places import absolute, overlap, same_place
from flows.sections import Seconds, Section, listed
from flows.settings_errors import unreadable_toml, wrong_setting
from tasks.discover import DEFAULT_PATTERNS, compile_pattern
from tasks.leases import EXPIRY

ENV_PREFIX = "CKPT_"
DEFAULT_FILE = "lifecycle.toml"

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)


def _pattern(value: str) -> str:
    compile_pattern(value)
    return value


def _layout(value: str) -> str:
    return str(Layout.parse(value))


def _rename(value: str) -> str:
    parse_rename(value)
    return value


def _classes(value: tuple[str, ...]) -> tuple[str, ...]:
    Allowance(value)
    return value


def _safe_name(value: str) -> str:
    if not is_safe_name(value) or value.startswith("."):
        raise ValueError("should be a plain name or a relative path, without '..' and not hidden")
    return value


def _alert_url(value: str) -> str:
    import apprise

    if apprise.Apprise.instantiate(value, suppress_exceptions=True) is None:
        scheme = value.partition("://")[0][:20]
        raise ValueError(f"is no alert URL that apprise understands (it begins with {scheme!r})")
    return value


SafeName = Annotated[str, AfterValidator(_safe_name)]
Alerts = Annotated[tuple[Annotated[str, AfterValidator(_alert_url)], ...], BeforeValidator(listed)]


class ExportSettings(Section):
    """One artifact of every published step."""

    format: Literal["torch", "safetensors"] = "torch"
    name: SafeName = "checkpoint.pt"
    """File below the published step; for safetensors also a directory, and ``safetensors`` by default."""
    part: SafeName | None = None
    """Which part of a step of several parts; all of them by default, each in a directory of its own."""
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    rename: tuple[Annotated[str, AfterValidator(_rename)], ...] = ()
    strip_prefix: str | None = None
    dtype: CastDtype | None = None
    """What floating tensors are cast to."""
    tie: bool = False
    """Let equal tensors share one storage; of safetensors keep only the first of them."""
    max_shard_size: ByteSize = ByteSize(5_000_000_000)
    """Bytes of tensors in one safetensors file."""
    memory_budget: ByteSize = ByteSize(512 << 20)
    allow_pickle: bool = False

    @model_validator(mode="before")
    @classmethod
    def _named(cls, values: object) -> object:
        if isinstance(values, dict) and values.get("format") == "safetensors":
            return {"name": "safetensors", **values}
        return values

    @model_validator(mode="after")
    def _fitting(self) -> ExportSettings:
        try:
            require_fitting(self.name, self.format)
        except UsageError as error:
            raise ValueError(str(error)) from None
        return self


class RunSettings(OperationSettings):
    """One training run: where its steps appear, what is expected of them, where they are published."""

    name: str
    source: str
    """Prefix whose direct sub-prefixes are steps. Only ever read."""
    publish: str = ""
    """Publish root; the run's own directory below it holds ledger, aliases and artifacts."""
    step_pattern: Annotated[tuple[Annotated[str, AfterValidator(_pattern)], ...], BeforeValidator(listed)] = (
        DEFAULT_PATTERNS
    )
    """Expressions for step directories, matched in full; the group `step` (or the only one) is a number."""
    parts: tuple[SafeName, ...] = ()
    """Checkpoints that make one step together, e.g. ``["model", "optim"]``."""
    grace_period: Seconds = 1800.0
    """Seconds without any change after which a step without `.metadata` counts as incomplete."""
    newer_tolerance: Seconds = 300.0
    """Seconds by which data may be newer than `.metadata`."""
    copied: bool = False
    """The source is a copy, so times of objects mean nothing."""
    scrub: bool = False
    """Read every byte while validating, and hold it against every checksum there is."""
    ignore_keys: tuple[str, ...] = IGNORED
    """Globs on keys whose departure from the expectation does not count."""
    allow_classes: Annotated[tuple[str, ...], AfterValidator(_classes)] = ()
    """Classes that saved objects may ask for, as ``pkg.mod.Class`` or ``pkg.*``; others are warned of."""
    expectation: str = "previous"
    """``"previous"`` (the newest good earlier step), ``"none"``, or a contract file."""
    layouts: Annotated[tuple[Annotated[str, AfterValidator(_layout)], ...], BeforeValidator(listed)] = (
        "fsdp=2",
        "fsdp=3",
    )
    """Layouts to test-load on; an empty list leaves the test-load out."""
    tp_rules: str | None = None
    """File that says what the tp axis of layouts shards, see `dcp.tp_rules`; dimension 1 without it."""
    memory_budget: ByteSize = ByteSize(1 << 30)
    """Bytes the test-load may hold."""
    exports: tuple[ExportSettings, ...] = (ExportSettings(),)
    order: Literal["oldest-first", "newest-first"] = "oldest-first"
    max_attempts: Annotated[int, Field(ge=1, le=1000)] = 3
    """How often a stage that the environment fails is tried, one try a pass, before the alert."""
    alerts: Alerts = ()
    """apprise URLs; those of the top level are used as well."""
    options: dict[str, Any] = Field(default_factory=dict, repr=False)
    """fsspec options for the source."""
    publish_options: dict[str, Any] = Field(default_factory=dict, repr=False)
    """fsspec options for the publish root."""

    @field_validator("name")
    @classmethod
    def _plain(cls, value: str) -> str:
        if not _RUN_NAME.fullmatch(value):
            raise ValueError("should be letters, digits, '.', '_' and '-' (it becomes a directory name)")
        return value

    @field_validator("source", "publish", "expectation")
    @classmethod
    def _not_empty(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("should not be empty")
        return value

    @field_validator("parts")
    @classmethod
    def _flat(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if any("/" in part for part in value) or len(set(value)) != len(value):
            raise ValueError("should be different names of direct sub-directories")
        return value

    @field_validator("exports")
    @classmethod
    def _apart(cls, value: tuple[ExportSettings, ...]) -> tuple[ExportSettings, ...]:
        names = [export.name for export in value]
        for name in names:
            if names.count(name) > 1 and len({e.part for e in value if e.name == name}) < names.count(name):
                raise ValueError(f"two exports are called {name!r}; give each a name of its own")
            if name == "manifest.json":
                raise ValueError("manifest.json is the name of the manifest; choose another")
        return value


class LifecycleSettings(BaseSettings):
    """All of `lifecycle.toml`."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, env_prefix=ENV_PREFIX)

    publish: str | None = None
    """Publish root of every run that names none."""
    interval: Annotated[Seconds, Field(ge=1)] = 60.0
    """Seconds between two passes of `ckpt watch`."""
    alerts: Alerts = ()
    """apprise URLs that get the alerts of every run."""
    resend_after: Seconds = 120.0
    """Seconds after which an alert whose sender vanished, or that a sink did not take, is sent again; to a
    sink that goes on taking none after ever longer pauses."""
    unreachable_after: Seconds = 300.0
    """Seconds for which a run's storage must have failed before people are told."""
    lease_expiry: Seconds = EXPIRY
    """Seconds without a sign of life after which another worker takes a step over."""
    runs: tuple[RunSettings, ...]
    deploy: DeploySettings = DeploySettings()

    _file: Path = PrivateAttr(default=Path(DEFAULT_FILE))

    @property
    def file(self) -> Path:
        """The settings file, absolute."""
        return self._file

    def run(self, name: str) -> RunSettings:
        """The run called ``name``. Raises `UsageError` naming those there are."""
        for run in self.runs:
            if run.name == name:
                return run
        known = ", ".join(run.name for run in self.runs)
        raise UsageError(f"no run called {name!r} in {self.file.name}; there are: {known}")

    def run_of(self, url: str) -> tuple[RunSettings, str]:
        """The run whose source holds the step at ``url``, and the step's name.

        Raises:
            UsageError: no run's source is the parent of ``url``.
        """
        parent, _, step = normalise_url(url).rpartition("/")
        for run in self.runs:
            if parent and same_place(run.source, parent):
                return run, step
        sources = ", ".join(run.source for run in self.runs)
        raise UsageError(f"{url} is not a step of any run in {self.file.name} (sources: {sources})")

    def run_at(self, url: str) -> RunSettings | None:
        """The run whose source holds ``url``, if there is one."""
        try:
            return self.run_of(url)[0]
        except UsageError:
            return None

    def field(self, run: RunSettings, name: str) -> str:
        """How a message names a field of ``run``: file and place in it."""
        number = [each.name for each in self.runs].index(run.name)
        return f"{self.file.name}: runs[{number}].{name}"

    def alert_urls(self, run: RunSettings) -> tuple[str, ...]:
        """Where alerts of ``run`` go, each URL once."""
        return tuple(dict.fromkeys((*self.alerts, *run.alerts)))


def load_settings(path: str | Path = DEFAULT_FILE) -> LifecycleSettings:
    """Read a settings file. Relative local places in it are taken from the file's directory.

    Raises:
        SettingsError: it is absent or wrong; one line that names file and field.
    """
    file = home_expanded(path).absolute()

    class Loaded(LifecycleSettings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,  # noqa: ARG003
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
            file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return env_settings, TomlConfigSettingsSource(settings_cls, file)

    _require_readable(file)
    try:
        settings = Loaded()
    except ValidationError as error:
        raise wrong_setting(file.name, error, LifecycleSettings, env_prefix=ENV_PREFIX) from None
    except (ValueError, OSError) as error:
        raise unreadable_toml(file.name, error) from None
    if not settings.runs:
        raise SettingsError(f"{file.name}: runs: missing; name at least one run in a table [[runs]]")
    settings = settings.model_copy(update={"runs": tuple(_runs(settings, file))})
    settings._file = file
    _check_places(settings)
    return settings


def _require_readable(file: Path) -> None:
    if not file.is_file():
        raise SettingsError(
            f"{file.name}: no such settings file in {file.parent}; write one with four lines: "
            '[[runs]], name = "my-run", source = "gs://bucket/run", publish = "gs://bucket/published"'
            if not file.exists()
            else f"{file.name}: is not a file; name the settings file in it: {file.name}/{DEFAULT_FILE}"
            if (file / DEFAULT_FILE).is_file()
            else f"{file.name}: is not a file"
        )
    if not os.access(file, os.R_OK):
        raise SettingsError(f"{file.name}: no permission to read it")


def _runs(settings: LifecycleSettings, file: Path) -> Iterable[RunSettings]:
    """The runs with every place made absolute and the top level's publish root filled in."""
    for number, run in enumerate(settings.runs):
        at = f"{file.name}: runs[{number}]"
        publish = run.publish or settings.publish
        if not publish:
            raise SettingsError(f"{at}.publish: missing; say where to publish, here or at the top level")
        places = {"source": run.source, "publish": publish}
        if run.expectation not in ("previous", "none"):
            places["expectation"] = run.expectation
        if run.tp_rules is not None:
            places["tp_rules"] = run.tp_rules
        resolved = {}
        for field, place in places.items():
            try:
                resolved[field] = absolute(place, file.parent)
            except UsageError as error:
                raise SettingsError(f"{at}.{field}: {error}") from None
        contract = resolved.get("expectation", "")
        if contract and "://" not in contract and not Path(contract).is_file():
            raise SettingsError(
                f"{at}.expectation: no contract file at {contract}; "
                f"write one with: ckpt contract URL > {shlex.quote(contract)}"
            )
        _check_tp_rules(run, resolved.get("tp_rules"), f"{at}.tp_rules")
        if run.retire and run.retire.delete and run.retire.options is None and "://" in resolved["source"]:
            raise SettingsError(
                f"{at}.retire.options: missing; the run's own options are for reading, so say which "
                "credentials may delete (an empty table takes those of the environment)"
            )
        yield run.model_copy(update=resolved)


def _check_tp_rules(run: RunSettings, place: str | None, at: str) -> None:
    """Refuse rules that no layout uses, and those in a local file that are wrong."""
    if place is None:
        return
    if all(Layout.parse(layout).tp is None for layout in run.layouts):
        raise SettingsError(f"{at}: no layout of this run has a tp axis; add one such as tp=2 to layouts")
    if "://" in place:
        return
    if not Path(place).is_file():
        raise SettingsError(f'{at}: no file of tp rules at {place}; its lines are as "*.w1.*" = "column"')
    try:
        TpRules.read(place)
    except UsageError as error:
        raise SettingsError(f"{at}: {error}") from None


def _check_places(settings: LifecycleSettings) -> None:
    """Refuse what would write into a training bucket or mix two runs."""
    at = settings.file.name
    names = [run.name for run in settings.runs]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise SettingsError(f"{at}: runs[{number}].name: {name!r} is the name of two runs")
    for number, publishing in enumerate(settings.runs):
        for run in settings.runs:
            if overlap(publishing.publish, run.source):
                raise SettingsError(
                    f"{at}: runs[{number}].publish: {publishing.publish} and the source {run.source} of run "
                    f"{run.name!r} lie one inside the other; sources are only read, so publish elsewhere"
                )
