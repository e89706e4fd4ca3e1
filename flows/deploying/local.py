"""Brings a local deployment up and takes it down again.

Everything stands in one directory, listens on loopback alone and belongs to whoever started it. Bringing up
what is up changes nothing but what the settings changed; a part that died is started again.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from dcp.errors import EnvironmentFault, UsageError
from flows.deploy_settings import PoolSettings
from flows.deploying.lost import end_lost_runs
from flows.deploying.processes import Daemons
from flows.deploying.project import local_pools, pool_template, project_file
from flows.deploying.server import Server
from flows.settings import load_settings

SERVER = "server"

_PATIENCE = 240.0
"""Seconds in which server, deploying and workers must each succeed; a busy machine takes a minute."""

_DEPLOY_ATTEMPTS = 3

Note = Callable[[str], None]
"""Told what is going on, a line at a time."""


@dataclass(frozen=True, slots=True)
class Up:
    """A local deployment that is healthy."""

    ui: str
    api: str
    workers: list[str]
    deployments: list[str]


@dataclass(frozen=True, slots=True)
class LocalDeployment:
    """One directory's deployment.

    Attributes:
        state: holds logs, pids and, unless another database is named, Prefect's own.
        project: the directory `deployments` of this project.
    """

    state: Path
    project: Path

    @property
    def daemons(self) -> Daemons:
        return Daemons(self.state / "processes")

    def up(self, config: Path, note: Note, database: str | None = None) -> Up:
        """Start what does not run yet, deploy, and wait until all is healthy.

        Args:
            config: the settings file.
            note: told what is going on.
            database: Prefect's database, e.g. ``postgresql+asyncpg://user:secret@host/name``; SQLite in the
                directory if absent.

        Raises:
            SettingsError: the settings are wrong.
            UsageError: another call is at work, or the port is taken.
            EnvironmentFault: something did not become healthy; names its log.
        """
        settings = load_settings(config)
        pools = local_pools(settings)
        self.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._alone():
            server = Server(f"http://127.0.0.1:{settings.deploy.port}/api")
            env = self._environment(server, settings.file)
            self._start_server(server, settings.deploy.port, database, env, note)
            template = self.project / "pools" / "process.json"
            for pool in pools:
                server.make_pool(pool.name, self._template(template, pool), f"{int(pool.memory)} bytes a run")
            note("Deploying the flows")
            self._deploy(project_file(self.project / "prefect.yaml", settings, pools), env)
            names = {pool.name: _workers(pool) for pool in pools}
            self._start_workers(pools, env, note)
            for name, workers in names.items():
                self._wait(
                    f"the workers of {name}",
                    partial(_online, server, name, workers),
                    workers,
                )
            for run in end_lost_runs(server, names):
                note(f"Ended the run {run}, whose worker had been killed")
            return Up(
                ui=f"http://127.0.0.1:{settings.deploy.port}",
                api=server.url,
                workers=[worker for workers in names.values() for worker in workers],
                deployments=server.deployments(),
            )

    def down(self) -> list[str]:
        """End everything, workers first; names of what ran. Nothing of it runs afterwards.

        Raises:
            UsageError: another call is at work.
        """
        if not self.state.is_dir():
            return []
        with self._alone():
            daemons = self.daemons
            names = daemons.names()
            ended = daemons.stop([name for name in names if name != SERVER])
            return ended + daemons.stop([name for name in names if name == SERVER])

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with (self.state / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"another deploy-local or deploy-down is at work in {self.state}") from None
            yield

    def _environment(self, server: Server, settings: Path) -> dict[str, str]:
        """None of the user's own Prefect, and what workers hand on to their runs."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        tools = str(Path(sys.executable).parent)
        return kept | {
            "PATH": os.pathsep.join([tools, kept.get("PATH", os.defpath)]),
            "PREFECT_HOME": str(self.state / "prefect"),
            "PREFECT_API_URL": server.url,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "1",
            # The server is next door: no need to let a run wait for the next look.
            "PREFECT_WORKER_QUERY_SECONDS": "3",
            # Where the whole machine is busy a query takes its time, and that is no failure.
            "PREFECT_SERVER_DATABASE_TIMEOUT": "60",
            "PREFECT_SERVER_DATABASE_CONNECTION_TIMEOUT": "60",
            "CKPT_SETTINGS": str(settings),
        }

    def _start_server(
        self, server: Server, port: int, database: str | None, env: dict[str, str], note: Note
    ) -> None:
        command = [sys.executable, "-m", "prefect", "server", "start"]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        url = database or f"sqlite+aiosqlite:///{self.state / 'prefect' / 'prefect.db'}"
        # The secret in it belongs into no command line, but another database needs another server.
        chosen = self.state / "database"
        same = chosen.exists() and chosen.read_text() == _shown(url)
        if not (same and self.daemons.alive(SERVER, command)):
            self.daemons.stop([SERVER])
            if _taken(port):
                raise UsageError(
                    f"port {port} on loopback is taken by another program; choose one: [deploy] port = 4201"
                )
            note(f"Starting Prefect's server with {_shown(url)}")
            chosen.write_text(_shown(url))
            (self.state / "prefect").mkdir(exist_ok=True)
            self.daemons.start(
                SERVER,
                command,
                env=env | {"PREFECT_SERVER_DATABASE_CONNECTION_URL": url},
                cwd=self.state,
            )
        self._wait("Prefect's server", server.healthy, [SERVER])

    def _template(self, source: Path, pool: PoolSettings) -> dict[str, object]:
        template = pool_template(source, pool)
        template["job_configuration"]["command"] = (
            f"{shlex.quote(sys.executable)} -m flows.deploying.guard {{{{ memory }}}}"
        )
        return template

    def _deploy(self, text: str, env: dict[str, str]) -> None:
        file = self.state / "prefect.yaml"
        file.write_text(text)
        log = self.state / "deploy.log"
        command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
        # A server with much to do may refuse; what was deployed already is only deployed again.
        for attempt in range(1, _DEPLOY_ATTEMPTS + 1):
            try:
                done = subprocess.run(
                    [*command, "--prefect-file", str(file)],
                    env=env,
                    cwd=self.state,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    timeout=_PATIENCE,
                )
            except subprocess.TimeoutExpired:
                raise EnvironmentFault(f"deploying did not end within {_PATIENCE:.0f} s") from None
            log.write_text(done.stdout + done.stderr)
            if done.returncode == 0:
                return
            time.sleep(attempt)
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise EnvironmentFault(f"deploying failed ({' '.join(last)}); see {log}")

    def _start_workers(self, pools: list[PoolSettings], env: dict[str, str], note: Note) -> None:
        wanted = {
            worker: [
                *(sys.executable, "-m", "prefect", "worker", "start", "--type", "process"),
                *("--pool", pool.name, "--name", worker, "--limit", str(pool.runs)),
            ]
            for pool in pools
            for worker in _workers(pool)
        }
        daemons = self.daemons
        daemons.stop([name for name in daemons.names() if name != SERVER and name not in wanted])
        for worker, command in wanted.items():
            if not daemons.alive(worker, command):
                note(f"Starting the worker {worker}")
                daemons.start(worker, command, env=env, cwd=self.state)

    def _wait(self, what: str, ready: Callable[[], bool], daemons: list[str]) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not ready():
            dead = [name for name in daemons if not self.daemons.alive(name)]
            if dead or time.monotonic() > deadline:
                why = "ended" if dead else f"did not become ready within {_PATIENCE:.0f} s"
                name = (dead or daemons)[0]
                raise EnvironmentFault(f"{what} {why}; see {self.daemons.log(name)}")
            time.sleep(0.3)


def _workers(pool: PoolSettings) -> list[str]:
    return [f"{pool.name}-{number}" for number in range(1, pool.workers + 1)]


def _online(server: Server, pool: str, workers: list[str]) -> bool:
    return set(workers) <= set(server.workers(pool))


def _taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def _shown(database: str) -> str:
    """A database without its user and password."""
    parts = urlsplit(database)
    # Put together again by hand: urllib leaves out the empty host of a file, which makes its path relative.
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
