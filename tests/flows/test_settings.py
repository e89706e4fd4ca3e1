"""`lifecycle.toml`: every mistake is one line that names file and field."""

import os
from pathlib import Path

import pytest

from dcp.errors import SettingsError, UsageError
from flows.sections import parse_duration
from flows.settings import load_settings

RUN = """
[[runs]]
name = "llama"
source = "gs://train/llama"
publish = "gs://published"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "lifecycle.toml"


def complaint(file: Path, text: str) -> str:
    file.write_text(text)
    with pytest.raises(SettingsError) as raised:
        load_settings(file)
    message = str(raised.value)
    assert "\n" not in message
    assert raised.value.exit_code == 2
    return message


def test_a_short_file_is_enough(file: Path) -> None:
    file.write_text(RUN)
    settings = load_settings(file)
    run = settings.run("llama")
    assert (run.source, run.publish) == ("gs://train/llama", "gs://published")
    assert (run.grace_period, run.newer_tolerance, run.layouts) == (1800, 300, ("fsdp=2", "fsdp=3"))
    assert (run.expectation, run.max_attempts, run.order) == ("previous", 3, "oldest-first")
    assert [(export.format, export.name) for export in run.exports] == [("torch", "checkpoint.pt")]
    assert settings.file == file


def test_everything_can_be_said(file: Path) -> None:
    (file.parent / "contract.json").touch()
    file.write_text("""
publish = "published"
interval = "5m"
alerts = ["json://localhost/all"]
resend_after = "10s"

[[runs]]
name = "a"
source = "train/a"
step_pattern = 'run-(\\d+)'
parts = ["model", "optim"]
grace_period = "1h"
newer_tolerance = 60
copied = true
expectation = "contract.json"
layouts = "tp=2, fsdp=2"
memory_budget = "256MiB"
order = "newest-first"
max_attempts = 7
alerts = "json://localhost/a"
options = { token = "anon" }
publish_options = { project = "x" }
[[runs.exports]]
name = "weights.pt"
part = "model"
include = ["model.*"]
exclude = ["*.bias"]
rename = ["^a=>b"]
strip_prefix = "model."
memory_budget = "1GiB"
allow_pickle = true

[[runs]]
name = "b"
source = "gcs://train/b"
publish = "s3://elsewhere/b"
layouts = []
exports = []
""")
    settings = load_settings(file)
    a, b = settings.runs
    place = file.parent
    assert (a.source, a.publish) == (f"{place}/train/a", f"{place}/published")
    assert a.expectation == f"{place}/contract.json"
    assert (a.grace_period, a.newer_tolerance, settings.interval) == (3600, 60, 300)
    assert (a.step_pattern, a.layouts, a.memory_budget) == ((r"run-(\d+)",), ("fsdp=2,tp=2",), 256 << 20)
    assert settings.alert_urls(a) == ("json://localhost/all", "json://localhost/a")
    assert settings.alert_urls(b) == ("json://localhost/all",)
    assert (b.layouts, b.exports, b.publish) == ((), (), "s3://elsewhere/b")
    assert settings.run_of(f"{place}/train/a/run-12/") == (a, "run-12")
    assert settings.run_of("gs://train/b/step_1") == (b, "step_1")
    (place / "train" / "a").mkdir(parents=True)
    (place / "train" / "a" / "run-13").symlink_to(place)
    (place / "link").symlink_to(place / "train")
    assert settings.run_of(f"{place}/link/a/run-13") == (a, "run-13")
    for url in ("gs://train/b", "gs://train/b/step_1/model", "gs://train/c/step_1"):
        with pytest.raises(UsageError, match="not a step of any run"):
            settings.run_of(url)
    with pytest.raises(UsageError, match="there are: a, b"):
        settings.run("c")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (RUN + "grce_period = 1", "runs[0].grce_period: unknown setting; did you mean grace_period?"),
        (RUN + "zzz = 1", "runs[0].zzz: unknown setting; there are: after_publish, alerts"),
        ("intervall = 3" + RUN, "intervall: unknown setting; did you mean interval?"),
        (
            RUN + "[[runs.exports]]\nformt = 1",
            "runs[0].exports[0].formt: unknown setting; did you mean form",
        ),
        (
            RUN + RUN.replace("llama", "b") + "copyed = 1",
            "runs[1].copyed: unknown setting; did you mean c",
        ),
        (RUN + 'grace_period = "soon"', 'runs[0].grace_period: should be a duration such as "90s"'),
        (RUN + "grace_period = -1", "runs[0].grace_period: should be a duration"),
        (RUN + "grace_period = true", "runs[0].grace_period: should be a duration"),
        (RUN + 'memory_budget = "lots"', 'runs[0].memory_budget: should be a size such as "512MiB"'),
        (RUN + "max_attempts = 0", "runs[0].max_attempts: should be greater than or equal to 1, not 0"),
        (RUN + 'layouts = ["fsdp=0"]', "runs[0].layouts[0]: layout fsdp=0 has 0 ranks"),
        (RUN + 'tp_rules = "nope.toml"', "runs[0].tp_rules: no layout of this run has a tp axis; add one"),
        (
            RUN + 'layouts = ["tp=2"]\ntp_rules = "/nope.toml"',
            "runs[0].tp_rules: no file of tp rules at /nope.toml",
        ),
        (
            RUN + 'layouts = ["tp=2"]\ntp_rules = "lifecycle.toml"',
            "runs[0].tp_rules: ",
        ),
        (RUN + 'step_pattern = "step"', "runs[0].step_pattern[0]: needs a group for the number"),
        (RUN + 'step_pattern = ["("]', "runs[0].step_pattern[0]: is no regular expression"),
        (RUN + 'order = "random"', "runs[0].order: should be 'oldest-first' or 'newest-first', not 'random'"),
        (RUN + 'parts = "model"', "runs[0].parts: should be a list"),
        (RUN + 'parts = ["a/b"]', "runs[0].parts: should be different names of direct sub-directories"),
        (RUN + 'parts = [".."]', "runs[0].parts[0]: should be a plain name"),
        (
            RUN + 'expectation = "/nope.json"',
            "runs[0].expectation: no contract file at /nope.json; ",
        ),
        (RUN + 'expectation = "gs://"', "runs[0].expectation: 'gs://' names no bucket"),
        (
            RUN.replace("gs://train", "nope://train"),
            "runs[0].source: unknown protocol 'nope' in nope://train",
        ),
        (RUN.replace("gs://pub", "nope://pub"), "runs[0].publish: unknown protocol 'nope' in nope://pub"),
        (RUN + 'expectation = "nope://x/c.json"', "runs[0].expectation: unknown protocol 'nope' in nope"),
        (
            RUN + '[[runs.exports]]\nrename = ["(=>x"]',
            "runs[0].exports[0].rename[0]: rename '(=>x': '(' is no",
        ),
        (RUN + '[[runs.exports]]\nrename = ["x"]', "runs[0].exports[0].rename[0]: rename 'x' has no '=>'"),
        (RUN + 'expectation = ""', "runs[0].expectation: should not be empty"),
        (RUN + '[[runs.exports]]\nname = "../x"', "runs[0].exports[0].name: should be a plain name"),
        (RUN + '[[runs.exports]]\nname = "manifest.json"', "runs[0].exports: manifest.json is the name"),
        (
            RUN + "[[runs.exports]]\n[[runs.exports]]",
            "runs[0].exports: two exports are called 'checkpoint",
        ),
        (RUN + '[[runs.exports]]\nformat = "onnx"', "runs[0].exports[0].format: should be"),
        (RUN.replace("llama", "a/b"), "runs[0].name: should be letters, digits"),
        (RUN.replace('name = "llama"', ""), "runs[0].name: missing"),
        (RUN + RUN, "runs[1].name: 'llama' is the name of two runs"),
        (RUN.replace('publish = "gs://published"', ""), "runs[0].publish: missing"),
        (RUN.replace("gs://train/llama", "gs://"), "runs[0].source: 'gs://' names no bucket"),
        ("", "runs: missing"),
        ("runs = []", "runs: missing"),
        ("runs = 1", "runs: should be a list"),
        ('[runs]\nname = "a"', "runs: should be a list"),
        ("interval = 0" + RUN, "interval: should be greater than or equal to 1, not 0"),
        ("not toml", "Expected '=' after a key"),
    ],
)
def test_a_mistake_is_one_line(file: Path, text: str, expected: str) -> None:
    assert complaint(file, text).startswith(f"lifecycle.toml: {expected}")


def test_several_mistakes_are_counted(file: Path) -> None:
    message = complaint(file, RUN + 'max_attempts = 0\ngrace_period = "x"\nsorce = 1')
    assert message == "lifecycle.toml: runs[0].sorce: unknown setting; did you mean source? (and 2 more)"


def test_secrets_are_not_repeated(file: Path) -> None:
    message = complaint(file, RUN + 'alerts = ["nope://token123/x"]')
    assert message.startswith("lifecycle.toml: runs[0].alerts[0]: is no alert URL that apprise understands")
    assert "token123" not in message
    file.write_text(RUN + 'options = { secret = "hunter2" }')
    assert "hunter2" not in repr(load_settings(file))


@pytest.mark.parametrize(
    ("source", "publish"),
    [
        ("gs://train/llama", "gs://train/llama"),
        ("gs://train/llama", "gs://train/llama/published"),
        ("gcs://train/llama", "gs://train/llama/published"),
        ("gs://train/llama/", "gs://train"),
        ("train", "train/published"),
        ("./a/../train", "train/published"),
        ("train", "link/published"),
    ],
)
def test_a_training_bucket_is_never_published_into(file: Path, source: str, publish: str) -> None:
    (file.parent / "train").mkdir()
    (file.parent / "link").symlink_to(file.parent / "train")
    text = f'[[runs]]\nname = "a"\nsource = "{source}"\npublish = "{publish}"\n'
    assert "lie one inside the other" in complaint(file, text)


def test_neither_is_that_of_another_run(file: Path) -> None:
    text = RUN + '[[runs]]\nname = "b"\nsource = "gs://published/b"\npublish = "gs://c"\n'
    assert complaint(file, text).startswith("lifecycle.toml: runs[0].publish: gs://published and the source")


def test_places_that_only_share_a_beginning_are_apart(file: Path) -> None:
    file.write_text(RUN.replace("gs://published", "gs://train/llama-published"))
    assert load_settings(file).runs[0].publish == "gs://train/llama-published"


def test_the_environment_overrides_the_top_level(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("interval = 60" + RUN)
    monkeypatch.setenv("CKPT_INTERVAL", "30s")
    monkeypatch.setenv("CKPT_ALERTS", '["json://localhost/hook"]')
    settings = load_settings(file)
    assert (settings.interval, settings.alerts) == (30, ("json://localhost/hook",))
    monkeypatch.setenv("CKPT_INTERVAL", "often")
    assert complaint(file, RUN).startswith("environment variable CKPT_INTERVAL: interval: should be a dura")


def test_a_file_that_cannot_be_read(file: Path, tmp_path: Path) -> None:
    with pytest.raises(
        SettingsError, match=r"nothing\.toml: no such settings file in .*; write one with four lines: "
    ):
        load_settings(tmp_path / "nothing.toml")
    with pytest.raises(SettingsError, match=r"is not a file$"):
        load_settings(tmp_path)
    file.touch()
    with pytest.raises(
        SettingsError, match=rf"name the settings file in it: {tmp_path.name}/lifecycle\.toml$"
    ):
        load_settings(tmp_path)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match=r"lifecycle\.toml: is not UTF-8 text"):
        load_settings(file)
    if os.geteuid():
        file.chmod(0)
        with pytest.raises(SettingsError, match="no permission"):
            load_settings(file)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("30m", 1800),
        ("1.5h", 5400),
        ("2d", 172800),
        ("7", 7),
        (0, 0),
        (2.5, 2.5),
        (" 3 m ", 180),
    ],
)
def test_durations(text: object, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "1w", "1m30s", None, True, float("inf"), float("nan"), "٣s"])
def test_no_durations(text: object) -> None:
    with pytest.raises(ValueError, match="should be a duration"):
        parse_duration(text)


def test_exports_as_safetensors(file: Path) -> None:
    export = '[[runs.exports]]\nformat = "safetensors"\n'
    file.write_text(RUN + export + 'max_shard_size = "2GB"\n')
    [settings] = load_settings(file).runs[0].exports
    assert (settings.name, settings.max_shard_size) == ("safetensors", 2_000_000_000)
    assert "would be safetensors; name a directory" in complaint(file, RUN + export + 'name = "model.pt"\n')


@pytest.mark.parametrize(
    ("deploy", "expected"),
    [
        ('steps = "there"', "deploy.steps: should be 'here' or 'runs', not 'there'"),
        ("[[deploy.pools]]\nname = 'a'", "deploy.pools[0].memory: missing"),
        ("[[deploy.pools]]\nname = 'A b'\nmemory = '1GB'", "deploy.pools[0].name: should be lower case"),
        (
            "[[deploy.pools]]\nname = 'a'\nmemory = '1GB'\n[[deploy.pools]]\nname = 'a'\nmemory = '2GB'",
            "deploy.pools: 'a' is the name of two pools",
        ),
        ("dask = 'somewhere'", "deploy.dask: should be an address such as tcp://scheduler:8786, or local"),
        ("port = 0", "deploy.port: should be greater than or equal to 1, not 0"),
    ],
)
def test_mistakes_in_the_deployment_are_named(tmp_path: Path, deploy: str, expected: str) -> None:
    file = tmp_path / "lifecycle.toml"
    file.write_text(
        f'[[runs]]\nname = "r"\nsource = "in"\npublish = "out"\n[deploy]\n{deploy}\n', encoding="utf-8"
    )
    with pytest.raises(SettingsError) as caught:
        load_settings(file)
    assert expected in str(caught.value)
