"""Shards of one safetensors export over one of Prefect's task runners: threads, or a Dask cluster."""

from __future__ import annotations

from typing import Any

from prefect import Task
from prefect.cache_policies import NO_CACHE
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from dcp.errors import SettingsError
from dcp.exporting.shards import WrittenShard
from flows.deploy_settings import LOCAL_DASK, DeploySettings
from tasks.export_shards import MapShards, ShardWriter
from tasks.prefect_tasks import RETRIES, RETRY_SECONDS, storage_may_answer


def _write(writer: ShardWriter, number: int) -> WrittenShard:
    return writer(number)


shard_task = Task(
    _write,
    name="export-shard",
    task_run_name="shard-{number}",
    retries=RETRIES,
    retry_delay_seconds=list(RETRY_SECONDS),
    retry_condition_fn=storage_may_answer,
    cache_policy=NO_CACHE,
    persist_result=False,
)


def shard_mapper(deploy: DeploySettings) -> MapShards | None:
    """How the settings want shards written; None for one after another in one process."""
    if not deploy.dask and deploy.shards_at_once == 1:
        return None

    def mapped(writer: ShardWriter, count: int) -> list[WrittenShard]:
        with _runner(deploy) as runner:
            futures = [
                runner.submit(shard_task, parameters={"writer": writer, "number": number})
                for number in range(count)
            ]
            return [future.result() for future in futures]

    return mapped


def _runner(deploy: DeploySettings) -> TaskRunner[Any]:
    if not deploy.dask:
        return ThreadPoolTaskRunner(max_workers=deploy.shards_at_once)
    try:
        from prefect_dask.task_runners import DaskTaskRunner
    except ModuleNotFoundError:
        raise SettingsError(
            "deploy.dask: prefect-dask is not installed; pip install 'ckpt-lifecycle[dask]'"
        ) from None
    if deploy.dask != LOCAL_DASK:
        return DaskTaskRunner(address=deploy.dask)
    return DaskTaskRunner(
        cluster_kwargs={
            "n_workers": deploy.shards_at_once,
            "threads_per_worker": 1,
            "processes": True,
            "host": "127.0.0.1",
            "dashboard_address": None,
        }
    )
