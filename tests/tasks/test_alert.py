"""Alerts: once for each problem of each step's bytes, sent again only where a sender failed or vanished."""

import logging
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread

import pytest

from dcp.errors import ChangedError
from dcp.findings import finding
from dcp.storage.local import LocalStore
from tasks.alert import (
    MAX_DELIVERIES,
    Alert,
    Pending,
    alert_for_failure,
    pending_deliveries,
    raise_alert,
    redeliver,
)
from tasks.ledger import Ledger, StepKey
from tasks.outcomes import failure_of_error, failure_of_report
from tasks.sinks import sink_name
from tasks.snapshot import take_snapshot
from tasks.text import plain
from tests.support.lifecycle import CrashError, anywhere
from tests.support.waiting import until
from tests.support.web import QuietHandler, Sink, free_port, served, webhook
from tests.tasks.test_ledger import race

KEY = StepKey("step_1", "ab" * 32)
URL = "gs://train/run/step_1"


def alert(problem: str = "torn", what: str = "data is missing") -> Alert:
    return Alert("run", KEY.step, KEY.fingerprint, problem, what, URL, "2026-01-01", f"ckpt validate {URL}")


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger.open(str(tmp_path), "run")


@pytest.fixture
def sink() -> Iterator[Sink]:
    with webhook() as made:
        yield made


def due(ledger: Ledger, *, later: float = 0.0, resend_after: float = 120.0) -> list[Pending]:
    snapshot = take_snapshot(ledger, remember=False)
    return pending_deliveries(
        snapshot.of(KEY), lambda record: snapshot.summary(KEY, record), ledger.clock() + later, resend_after
    )


def test_each_problem_is_told_once(ledger: Ledger, sink: Sink) -> None:
    for problem in ("torn", "torn", "export", "torn", "export"):
        raise_alert(ledger, KEY, alert(problem), sinks=[sink.url], emit=None)
    assert [body["title"] for body in sink.received] == [
        "[run] step_1 is torn",
        "[run] step_1 could not be exported",
    ]
    assert ledger.stages(KEY) == {
        "alerted",
        "alerted.outcome-1",
        "alerted-export",
        "alerted-export.outcome-1",
    }
    assert due(ledger, later=1e6) == []


@pytest.mark.parametrize("kind", ["local", "memory", "gs", "s3"])
def test_of_racing_watchers_one_tells(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    url = anywhere(kind, request, tmp_path)
    emitted: list[Alert] = []

    def tell(number: int) -> bool:
        ledger = Ledger.open(url, "run")
        problem = ("torn", "export")[number % 2]
        return raise_alert(ledger, KEY, alert(problem), sinks=[], emit=emitted.append).first

    assert race(6, tell).count(True) == 2
    assert sorted(one.problem for one in emitted) == ["export", "torn"]


def test_what_people_read_says_what_where_since_and_what_to_type(ledger: Ledger) -> None:
    missing = finding("files.missing", "__0_0.distcp is not there", file="__0_0.distcp")
    failure = failure_of_report("validate", "torn", [missing], "")
    again = f"ckpt validate --scrub {URL}"
    told = alert_for_failure(ledger, KEY, failure, url=URL, since=1_700_000_000.0, again=again)
    assert told.body.splitlines()[:4] == [
        "What: files.missing: __0_0.distcp is not there",
        f"Where: {URL}",
        "Since: 2023-11-14T22:13:20.000+00:00",
        f"Next: {again}",
    ]
    assert len(told.body.splitlines()) == 5
    assert (told.event, told.resource) == ("checkpoint.torn", "checkpoint.run.step_1")
    env = failure.model_copy(update={"final": False, "problem": "export", "codes": {}})
    assert alert_for_failure(ledger, KEY, env, url=URL, since=None).command == f"ckpt run {URL}"


def test_advice_names_the_step_that_the_keys_were_held_against(ledger: Ledger) -> None:
    missing = finding("keys.missing", "w is expected and absent", key="w")
    failure = failure_of_report("validate", "key-mismatch", [missing], "")
    failure = failure.model_copy(update={"expected": "gs://train/run/step_0"})
    told = alert_for_failure(ledger, KEY, failure, url=URL, since=None)
    assert told.advice.endswith(f"ckpt validate --against gs://train/run/step_0 {URL}")


def test_a_step_that_was_saved_over_is_told_to_be_processed_again_by_itself(ledger: Ledger) -> None:
    changed = ChangedError(f"{URL} was written to", code="files.newer-than-metadata")
    told = alert_for_failure(ledger, KEY, failure_of_error("export", changed), url=URL, since=None)
    assert told.problem == "torn"
    assert "processed again by itself" in told.advice
    assert "--copied" not in told.body


def test_text_from_a_bucket_is_harmless() -> None:
    assert plain("a\nb\t\x1b[31mc\u202e") == "a b \ufffd[31mc\ufffd"
    assert len(plain("x" * 10_000)) == 1000


def test_a_broken_sink_is_tried_again_on_later_passes_and_then_given_up(
    ledger: Ledger, sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.sinks._TRIES", 1)
    emitted: list[Alert] = []
    sink.broken = True
    report = raise_alert(ledger, KEY, alert(), sinks=[sink.url], emit=emitted.append)
    assert not report.ok
    assert [delivery.ok for delivery in report.deliveries] == [True, False]
    assert report.deliveries[1].error
    for number, pause in zip(range(2, MAX_DELIVERIES + 1), (120, 480, 1920, *[3600] * 5), strict=False):
        assert due(ledger, later=pause - 5) == []
        [pending] = due(ledger, later=pause + 1)
        assert pending == Pending("alerted", number)
        assert redeliver(ledger, KEY, pending, sinks=[sink.url], emit=emitted.append) is not None
    assert due(ledger, later=1e6) == []
    assert len(emitted) == 1
    assert sink.received == []


def test_only_the_sinks_that_failed_are_tried_again(ledger: Ledger, sink: Sink) -> None:
    with webhook() as other:
        other.broken = True
        sinks = [sink.url, other.url]
        raise_alert(ledger, KEY, alert(), sinks=sinks, emit=None)
        other.broken = False
        [pending] = due(ledger, later=121)
        report = redeliver(ledger, KEY, pending, sinks=sinks, emit=None)
        assert report is not None
        assert report.ok
        assert (len(sink.received), len(other.received)) == (1, 1)
    assert due(ledger, later=1e6) == []


def test_a_delivery_is_tried_within_one_pass_first(ledger: Ledger, sink: Sink) -> None:
    sink.broken = True
    report = raise_alert(ledger, KEY, alert(), sinks=[sink.url], emit=None)
    assert report.deliveries[0].attempts == 3


def test_a_sink_that_hangs_delays_no_other_and_is_left_alone_for_a_while(ledger: Ledger, sink: Sink) -> None:
    arrived, answered = Event(), Event()

    class Silent(QuietHandler):
        def do_POST(self) -> None:
            arrived.set()
            answered.wait(60)

    with served(Silent) as place:
        sinks = [f"json://{place}/", sink.url]
        told = Thread(target=lambda: raise_alert(ledger, KEY, alert(), sinks=sinks, emit=None))
        told.start()
        try:
            assert arrived.wait(60)
            until(lambda: len(sink.received) == 1)
            told.join(60)
            facts = ledger.read(KEY, "alerted.outcome-1").facts
            silent, healthy = facts["deliveries"]
            assert (silent["ok"], silent["attempts"], healthy["ok"]) == (False, 1, True)
            report = raise_alert(ledger, KEY, alert("export"), sinks=sinks, emit=None)
            assert [(one.ok, one.attempts) for one in report.deliveries] == [(False, 0), (True, 1)]
            assert "did not answer" in str(report.deliveries[0].error)
        finally:
            answered.set()
    assert len(sink.received) == 2
    # Both are tried again later, where they did not arrive.
    assert [pending.record for pending in due(ledger, later=121)] == ["alerted", "alerted-export"]


def test_what_one_sink_says_is_recorded_of_no_other(
    ledger: Ledger, sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As `ckpt` has it, where other packages may only have a last word.
    monkeypatch.setattr(logging.getLogger("apprise"), "level", logging.NOTSET)
    monkeypatch.setattr(logging.root, "level", logging.ERROR)
    sink.broken = True
    sinks = [sink.url, f"json://127.0.0.1:{free_port()}/"]
    report = raise_alert(ledger, KEY, alert(), sinks=sinks, emit=None)
    refused, absent = (str(delivery.error) for delivery in report.deliveries)
    assert "500" in refused
    assert "500" not in absent


def test_a_sender_that_vanished_is_replaced_once(ledger: Ledger, sink: Sink) -> None:
    def die(_: Alert) -> None:
        raise CrashError

    with pytest.raises(CrashError):
        raise_alert(ledger, KEY, alert(), sinks=[sink.url], emit=die)
    assert due(ledger, later=119) == []
    [pending] = due(ledger, later=121)
    with pytest.raises(CrashError):
        redeliver(ledger, KEY, pending, sinks=[sink.url], emit=die)
    # Two senders died. A third is not sent after them, but the gap stays visible.
    assert due(ledger, later=1e6) == []
    assert ledger.stages(KEY) == {"alerted", "alerted.try-2"}


def test_the_replacement_delivers(ledger: Ledger, sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    original = LocalStore.create

    def create(self: LocalStore, name: str, data: bytes) -> None:
        original(self, name, data)
        if name.endswith("/alerted.json"):
            raise CrashError

    monkeypatch.setattr(LocalStore, "create", create)
    with pytest.raises(CrashError):
        raise_alert(ledger, KEY, alert(what="everything is lost"), sinks=[sink.url], emit=None)
    assert sink.received == []
    [pending] = due(ledger, later=121)

    def again(_: int) -> bool:
        return redeliver(ledger, KEY, pending, sinks=[sink.url], emit=None) is not None

    assert race(4, again).count(True) == 1
    assert ["everything is lost" in body["message"] for body in sink.received] == [True]
    assert due(ledger, later=1e6) == []


def test_secrets_do_not_reach_the_ledger(ledger: Ledger) -> None:
    sinks = [
        "json://user:hunter2@127.0.0.1:9/s3cr3t",
        "slack://TAAAAAAAA/BBBBBBBBB/cccccccccccccccccccccccc/#x",
    ]
    monkey = raise_alert(ledger, KEY, alert(), sinks=sinks[:1], emit=None)
    content = ledger.store.read(f"step_1/{KEY.fingerprint}/alerted.outcome-1.json", 10_000).decode()
    for text in (content, monkey.model_dump_json()):
        assert "hunter2" not in text
        assert "s3cr3t" not in text
    assert "cccc" not in sink_name(sinks[1])
    assert sink_name(sinks[0]) != sink_name(sinks[0] + "2")
