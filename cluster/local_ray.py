"""A Ray of our own on this machine, its Serve, and our application on it: started in the main thread, ended without a
trace.
"""

import logging
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

import psutil

from cluster.runtime import RunFolder

OBJECT_STORE_BYTES = 100 << 20
"""Nothing of ours goes through the object store."""
END_STREAMS_S = 1.5
PILLARS = ("gcs_server", "raylet")


def start_ray(run: RunFolder) -> None:
    """A Ray that listens on loopback only runs. `cluster.env.prepare_ray` came before. Main thread."""
    import ray

    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=OBJECT_STORE_BYTES,
        _temp_dir=str(run.ray_dir),
    )
    # What Ray pushes to its driver about a dead worker is prose about Ray; status and our logs tell it in our words.
    logging.getLogger("ray").setLevel(logging.CRITICAL)


def start_serve(host: str, port: int) -> None:
    """Serve's controller and its HTTP proxy run; the proxy answers 404 until the application is ready."""
    from ray import serve
    from ray.serve.config import HTTPOptions
    from ray.serve.schema import LoggingConfig

    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # importing ray.serve has set it to INFO
    serve.start(
        proxy_location="HeadOnly",
        http_options=HTTPOptions(host=host, port=port),
        logging_config=LoggingConfig(log_level="WARNING", enable_access_log=False),
    )


def find_pillars(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Of a run's processes, those without which no worker is restarted: the GCS and the raylet."""
    found = []
    for process in processes:
        try:
            if process.name() in PILLARS:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


class DeploymentFailed(Exception):
    """A replica could not be started; the text holds what each said last."""


def deploy(app: Any, name: str) -> None:
    """Returns when every replica of the application is healthy. Raises `DeploymentFailed` when one fails
    three times.
    """
    from ray import serve

    try:
        serve.run(app, name=name, route_prefix="/", external_scaler_enabled=True)
    except RuntimeError as error:
        raise DeploymentFailed(_collect_reasons(name) or str(error)) from None


def _collect_reasons(app_name: str) -> str:
    """The last line of what each failing deployment reports: the exception in its constructor."""
    from ray import serve

    status = serve.status().applications.get(app_name)
    deployments = status.deployments.items() if status else ()
    said = {name: [line for line in facts.message.splitlines() if line.strip()] for name, facts in deployments}
    return "\n".join(f"{name} did not start: {lines[-1].strip()}" for name, lines in said.items() if lines)


def stop(app_name: str | None, report: Callable[[str], None]) -> None:
    """Streams of the application have got an error event, Serve and Ray are down. Safe in every phase, also before Ray
    is up.

    `serve.shutdown` is left out: it waits for what `end_streams` has ended already, and where Ray is not up it starts a
    second.
    """
    import ray

    if not ray.is_initialized():
        return
    if app_name is not None:
        report("ending open streams")
        _end_streams(app_name)
    report("stopping workers")
    _silence_threads()
    ray.shutdown()


def _silence_threads() -> None:
    """Serve's background threads in this process fail one by one while Ray goes down; nobody needs to read how."""
    logging.disable(logging.CRITICAL)
    threading.excepthook = lambda failure: None
    sys.unraisablehook = lambda failure: None


def _end_streams(app_name: str) -> None:
    from ray import serve
    from ray.serve.exceptions import RayServeException

    try:
        serve.get_app_handle(app_name).end_streams.remote("shutdown").result(timeout_s=END_STREAMS_S)
    except (RayServeException, TimeoutError, RuntimeError):
        return
