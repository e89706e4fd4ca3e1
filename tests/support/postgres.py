"""A real PostgreSQL server on loopback, in a temporary directory, for as long as a block lasts."""

import os
import pwd
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.tools import postgres_programs, required
from tests.support.web import free_port

_USER = "postgres"


@contextmanager
def postgres() -> Iterator[str]:
    """Yield the URL of an empty database as Prefect takes it; skips the test where there is no PostgreSQL.

    Raises:
        RuntimeError: the server did not start; with its log.
    """
    where = required(postgres_programs())
    port = free_port()
    # pytest's own directories are closed to others, and the server refuses to run as root.
    with tempfile.TemporaryDirectory(prefix="ckpt-postgres-") as name:
        directory = Path(name)
        user = None
        if os.geteuid() == 0:
            user = _USER
            entry = pwd.getpwnam(user)
            os.chown(directory, entry.pw_uid, entry.pw_gid)
        data = directory / "data"
        initdb = [str(where / "initdb"), "-D", str(data), "-U", "prefect", "--auth=trust", "-E", "UTF8", "-N"]
        subprocess.run(initdb, check=True, user=user, cwd="/", capture_output=True)
        log = directory / "postgres.log"
        options = ["-c", f"port={port}", "-c", "listen_addresses=127.0.0.1", "-c", "max_connections=200"]
        options += ["-c", f"unix_socket_directories={directory}", "-c", "fsync=off"]
        with log.open("wb") as output:
            server = subprocess.Popen(
                [str(where / "postgres"), "-D", str(data), *options],
                user=user,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            ready = [str(where / "pg_isready"), "-h", "127.0.0.1", "-p", str(port), "-q"]
            deadline = time.monotonic() + 60
            while subprocess.run(ready).returncode != 0:
                if server.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(
                        f"PostgreSQL did not start:\n{log.read_text(errors='replace')[-2000:]}"
                    )
                time.sleep(0.1)
            yield f"postgresql+asyncpg://prefect@127.0.0.1:{port}/postgres"
        finally:
            # Asked with SIGTERM it would wait for clients that are still connected.
            server.send_signal(signal.SIGINT)
            try:
                server.wait(timeout=20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
