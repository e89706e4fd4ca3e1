"""Notices from a training job and from Pub/Sub lead to exactly their step; everything else is turned away."""

import base64
import datetime
import http.client
import json
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefect.exceptions import TerminationSignal

import dcp
from dcp.errors import EnvironmentFault
from flows.cli.listen_command import process_taken
from flows.cli.output import Output
from flows.lifecycle import process_step
from flows.listener import Guard, Listener, google_tokens
from flows.notices import LIMIT, BadNoticeError, Step, step_of_notice
from flows.settings import LifecycleSettings, load_settings
from flows.workshop import Workshop
from tests.support.lifecycle import RUN, Lifecycle
from tests.support.waiting import until
from tests.support.web import QuietHandler, served

SETTINGS = """
[[runs]]
name = "a"
source = "gs://train/a"
publish = "gs://published"
[[runs]]
name = "b"
source = "gs://train/b"
publish = "gs://published"
"""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> LifecycleSettings:
    file = tmp_path_factory.mktemp("settings") / "lifecycle.toml"
    file.write_text(SETTINGS)
    return load_settings(file)


def committed(url: str) -> bytes:
    return json.dumps({"event": "committed", "url": url, "at": 1.0}).encode()


def pushed(name: str, event: str = "OBJECT_FINALIZE", bucket: str = "train") -> bytes:
    attributes = {
        "notificationConfig": "projects/_/buckets/train/notificationConfigs/1",
        "eventType": event,
        "payloadFormat": "JSON_API_V1",
        "bucketId": bucket,
        "objectId": name,
        "objectGeneration": "1556",
    }
    message = {
        "attributes": attributes,
        "data": base64.b64encode(b"{}").decode(),
        "messageId": "136969346945",
        "publishTime": "2026-01-01T00:00:00Z",
    }
    return json.dumps({"message": message, "subscription": "projects/p/subscriptions/s"}).encode()


@pytest.mark.parametrize(
    ("body", "step"),
    [
        (committed("gs://train/a/step_1"), Step("a", "step_1")),
        (committed("gcs://train/b/step_2/"), Step("b", "step_2")),
        (committed("gs://train/a/step_1/optim"), Step("a", "step_1")),
        (pushed("a/step_3/.metadata"), Step("a", "step_3")),
        (pushed("a/step_3/model/.metadata"), Step("a", "step_3")),
        (pushed("b/step_3/__0.metadata"), Step("b", "step_3")),
        (pushed("a/step_3/__0_0.distcp"), None),
        (pushed("a/step_3/.metadata", "OBJECT_DELETE"), None),
        (pushed("a/step_3/.metadata", bucket="other"), None),
        (pushed("a/logs/.metadata"), None),
        (pushed(".metadata"), None),
    ],
)
def test_a_notice_leads_to_its_step_or_to_nothing(
    settings: LifecycleSettings, body: bytes, step: Step | None
) -> None:
    assert step_of_notice(settings, body) == step


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"{}",
        b'{"event":"committed"}',
        b'{"event":"deleted","url":"gs://train/a/step_1"}',
        b'{"event":"committed","url":["gs://train/a/step_1"]}',
        b'{"message":{"attributes":{}},"subscription":"s"}',
        b'{"message":"x"}',
        b"[" * 50_000,
        b'{"event":"committed","url":"gs://train/a/' + b"x" * 3000 + b'"}',
        committed("gs://train/a"),
        committed("gs://train/a/.."),
        committed("gs://train/a/../b/step_1"),
        committed("gs://elsewhere/a/step_1"),
        committed("/etc/passwd"),
        committed("gs://train/a/logs"),
        committed("gs://"),
        committed(""),
        committed("gs://train/a/step_1\x00"),
        committed("gs://train/a/step_1/a/b/c"),
    ],
)
def test_what_is_no_notice_of_a_step_is_refused(settings: LifecycleSettings, body: bytes) -> None:
    with pytest.raises(BadNoticeError):
        step_of_notice(settings, body)


FIELDS = ["message", "attributes", "event", "url", "subscription", "eventType", "bucketId", "objectId"]
DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.just("committed") | st.just("OBJECT_FINALIZE"),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(FIELDS) | st.text(), inner),
)


@given(DOCUMENTS)
def test_no_document_does_any_harm(settings: LifecycleSettings, document: Any) -> None:
    with suppress(BadNoticeError):
        assert step_of_notice(settings, json.dumps(document).encode()) is None


def post(url: str, body: bytes, **headers: str) -> int:
    place = urlsplit(url)
    connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=60)
    try:
        connection.request("POST", "/", body, headers)
        return connection.getresponse().status
    finally:
        connection.close()


def test_the_answers(settings: LifecycleSettings) -> None:
    with Listener(settings, Guard(), port=0, waiting=2) as listener:
        good = committed("gs://train/a/step_1")
        assert post(listener.url, good) == 202
        assert post(listener.url, good) == 202
        assert post(listener.url, pushed("a/step_2/.metadata")) == 202
        assert post(listener.url, pushed("a/step_2/__0_0.distcp")) == 204
        # Steps that wait already are no more of them.
        assert post(listener.url, good) == 202
        assert post(listener.url, committed("gs://train/a/step_3")) == 429
        assert post(listener.url, b"{}") == 400
        assert post(listener.url, b"x" * (LIMIT + 1)) == 413
        assert post(listener.url, b"", **{"Content-Length": "-1"}) == 411
        assert post(listener.url, b"", **{"Content-Length": "9" * 5000}) in (411, 413)
        done: list[Step] = []

        def process(step: Step) -> None:
            done.append(step)
            if len(done) == 2:
                listener.end()

        listener.work(process)
        assert done == [Step("a", "step_1"), Step("a", "step_2")]


def test_other_methods_and_raw_bytes(settings: LifecycleSettings) -> None:
    with Listener(settings, Guard(), port=0) as listener:
        place = urlsplit(listener.url)
        for path, status in ((b"/", b"405"), (b"/healthz", b"204")):
            with socket.create_connection((str(place.hostname), place.port or 0), timeout=60) as connection:
                connection.sendall(b"GET " + path + b" HTTP/1.0\r\n\r\n")
                assert status in connection.recv(100)
        with socket.create_connection((str(place.hostname), place.port or 0), timeout=60) as connection:
            connection.sendall(b"\x16\x03\x01" * 100 + b"\r\n")
            connection.recv(100)
        assert post(listener.url, committed("gs://train/a/step_1")) == 202


def test_all_ranks_may_send_at_once(settings: LifecycleSettings) -> None:
    listener = Listener(settings, Guard(), port=0)
    place = urlsplit(listener.url)
    body = committed("gs://train/a/step_1")
    request = b"POST / HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    with ExitStack() as opened:
        # Nobody has accepted one by the time that the last one knocks.
        connections = [
            opened.enter_context(socket.create_connection((str(place.hostname), place.port or 0), timeout=60))
            for _ in range(100)
        ]
        for connection in connections:
            connection.sendall(request)
        with listener:
            answers = [connection.recv(100).split()[1] for connection in connections]
    assert answers == [b"202"] * 100


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("odd"), "a step_1: internal error: RuntimeError: odd"),
        (EnvironmentFault("no space"), "a step_1: no space"),
        (TerminationSignal(signal.SIGTERM), "a step_1: interrupted"),
    ],
)
def test_what_goes_wrong_with_one_step_is_told_and_others_are_seen_to(
    settings: LifecycleSettings,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    said: str,
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("flows.process.process_step_on_notice", fail)
    process_taken(Output(), settings, Step("a", "step_1"))
    assert f"warning: {said}" in capsys.readouterr().err


def test_a_client_that_sends_a_byte_now_and_then_is_cut_off(
    settings: LifecycleSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.listener._Server.patience", 0.3)
    with Listener(settings, Guard(), port=0) as listener:
        place = urlsplit(listener.url)
        with socket.create_connection((str(place.hostname), place.port or 0), timeout=60) as connection:
            connection.settimeout(0.05)

            def cut_off() -> bool:
                try:
                    connection.send(b"P")
                    return connection.recv(100) == b""
                except TimeoutError:
                    return False
                except OSError:
                    return True

            until(cut_off)
        assert post(listener.url, committed("gs://train/a/step_1")) == 202


def test_a_secret_is_asked_for(settings: LifecycleSettings) -> None:
    body = committed("gs://train/a/step_1")
    with Listener(settings, Guard("s3cret"), port=0) as listener:
        for header in ("", "Bearer", "Bearer wrong", "Basic s3cret", "Bearer s3cret\xe9"):
            assert post(listener.url, body, Authorization=header) == 401
        assert post(listener.url, body) == 401
        assert post(listener.url, body, Authorization="Bearer s3cret") == 202


@contextmanager
def certificates() -> Iterator[tuple[str, Any]]:
    """A server of certificates as Google's is, and what signs claims with the key of one of them."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import rsa
    from google.auth import crypt, jwt

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "signer")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    shown = json.dumps({"1": certificate.public_bytes(serialization.Encoding.PEM).decode()}).encode()
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )
    signer = crypt.RSASigner.from_string(private, "1")

    def signed(**claims: Any) -> str:
        known = {
            "iss": "https://accounts.google.com",
            "aud": "ckpt",
            "email": "push@project.iam.gserviceaccount.com",
            "email_verified": True,
            "iat": int(time.time()),
            "exp": int(time.time()) + 600,
        }
        return jwt.encode(signer, {**known, **claims}).decode()

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.answer(200, shown)

    with served(Handler) as endpoint:
        yield f"http://{endpoint}/certs", signed


def test_pushes_that_google_signed_are_taken_and_no_others(settings: LifecycleSettings) -> None:
    account = "push@project.iam.gserviceaccount.com"
    body = pushed("a/step_1/.metadata")
    with certificates() as (certs, signed), certificates() as (_, forged):
        guard = Guard(verify=google_tokens("ckpt", certs), sender=account)
        with Listener(settings, guard, port=0) as listener:

            def status(token: str) -> int:
                return post(listener.url, body, Authorization=f"Bearer {token}")

            assert status(signed()) == 202
            assert status(forged()) == 401
            assert status(signed(aud="another")) == 401
            assert status(signed(iss="https://evil")) == 401
            assert status(signed(email="other@evil")) == 401
            assert status(signed(email_verified=False)) == 401
            assert status(signed(exp=int(time.time()) - 600)) == 401
            assert status("no.token.here") == 401


def test_nothing_listens_where_another_does(settings: LifecycleSettings) -> None:
    with Listener(settings, Guard(), port=0) as listener:
        port = urlsplit(listener.url).port or 0
        with pytest.raises(EnvironmentFault, match=f"cannot listen at 127.0.0.1:{port}"):
            Listener(settings, Guard(), port=port)


def test_a_step_is_published_as_soon_as_its_job_says_so(tmp_path: Path) -> None:
    life = Lifecycle(str(tmp_path / "place"), tmp_path / "settings")
    settings = life.settings()
    life.save("step_1")
    life.save("step_2")
    with Listener(settings, Guard(), port=0) as listener:

        def process(step: Step) -> None:
            process_step(Workshop.of(settings, step.run), step.step)
            listener.end()

        assert dcp.notify_committed(f"{life.source.url}/step_2", listener.url)
        listener.work(process)
    # Exactly that one; the other is the watcher's.
    assert [name.partition("/")[0] for name in life.manifests()] == ["step_2"]
    assert life.ledger.run == RUN
