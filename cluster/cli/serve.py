"""`baton serve`: the whole cluster on this machine, from nothing to a URL, and back to nothing.

Each phase may be interrupted. `_Start.end` removes whatever exists at that point; a watchdog cuts it short after a few
seconds.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil

from cluster import env, runtime
from cluster.cli.progress import Steps, Terminal
from cluster.config import ClusterConfig, ModelConfig, load_cluster
from cluster.ending import Ending, EndRequested
from cluster.local_ray import DeploymentFailed
from cluster.logs import clear_logs
from cluster.model_store import ensure_model
from cluster.parts import Parts
from cluster.plan import ClusterPlan, make_plan, this_machine
from cluster.ports import PortClaim, claim_port
from cluster.resolve import pool_sizes

READY_TIMEOUT_S = 60.0
POLL_S = 0.2
WATCH_S = 1.0

GREETING = """
Baton is ready after {took:.0f} s at {url}

  curl -N localhost:{port}/v1/chat/completions -d \\
    '{{"model":"{model}","stream":true,"messages":[{{"role":"user","content":"Why is the sky blue?"}}]}}'

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="none")
  messages = [{{"role": "user", "content": "Why is the sky blue?"}}]
  for chunk in client.chat.completions.create(model="{model}", messages=messages, stream=True):
      print(chunk.choices[0].delta.content or "", end="", flush=True)

In another terminal: .venv/bin/baton chat, .venv/bin/baton explain "Why is the sky blue?", .venv/bin/baton status
Logs, a line per request: {logs}
Ctrl-C ends it.
"""

EXAMPLES = """examples:
  baton serve                              the cluster of configs/clusters/laptop.yaml on port 8000
  baton serve --port 8123                  another port
  baton serve --config laptop-colocated    one worker for prompts and tokens
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "serve",
        help="start the cluster on this machine",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config", default="laptop", metavar="NAME", help="a file of configs/clusters, or a path (default: laptop)"
    )
    parser.add_argument(
        "--port", type=_port, default=None, help="HTTP port on 127.0.0.1 (default: the configuration's)"
    )
    parser.set_defaults(run=lambda options: serve(options.config, options.port))


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; give a number from 1 to 65535")
    return int(text)


def serve(config_name: str, port: int | None, parts: Parts | None = None) -> int:
    """Runs until it is told to end; returns the exit status. Main thread of a process of its own."""
    config, model = load_cluster(config_name)
    if port is not None:
        config = config.model_copy(update={"port": port})
    start = _Start(config, model, Terminal(), parts)
    try:
        start.ending.watch()
        start.bring_up(config_name)
        start.wait()
    except EndRequested:
        pass
    except SystemExit:
        start.ending.begin("SIGTERM")
    finally:
        start.ending.begin("a step failed")
        start.end()
    return 0


def _say_what_computes(plan: ClusterPlan) -> str:
    """One line that tells, above all, why it is not the fastest there is."""
    (backend,) = [setting for setting in plan.settings if setting.key == "worker.backend"]
    return f"  . {backend.value} in {plan.worker.dtype}: {backend.reason.removeprefix('auto: ')}"


class _Start:
    """One run of the cluster and everything it has on the machine so far."""

    def __init__(self, config: ClusterConfig, model: ModelConfig, terminal: Terminal, parts: Parts | None) -> None:
        self._config, self._model, self._terminal, self._parts = config, model, terminal, parts
        self._claim: PortClaim | None = None
        self._run: runtime.RunFolder | None = None
        self._logs = Path()
        self._is_deployed = False
        self._started = time.monotonic()
        self._steps = Steps(terminal)
        self.ending = Ending(self._end_hard)

    @property
    def _url(self) -> str:
        return f"http://{self._config.host}:{self._config.port}"

    def bring_up(self, config_name: str) -> None:
        """The cluster answers. Raises `PortTaken`, `ModelUnavailable`, `ConfigError`, or `DeploymentFailed`."""
        config = self._config
        cache = env.cache_dir()
        self._sweep()  # first: what a killed run left may hold the port
        self._claim = claim_port(config.host, config.port, cache / "locks")
        self._terminal.line(f"baton: {config_name}, model {self._model.id}, port {config.port}")
        with self._steps.step("model") as step:
            path = ensure_model(self._model, cache, step.progress)
            step.note(str(path))
        plan = make_plan(config, self._model, path, this_machine())
        self._terminal.line(_say_what_computes(plan))
        self._run = runtime.name_run()
        self._run.create(config.port, config_name)
        env.prepare_ray(self._run.path, plan.worker.threads)
        self._logs = clear_logs(cache, config.port)
        self._start_ray(self._run)
        self._deploy(plan, self._run)
        self._greet()

    def _sweep(self) -> None:
        swept = runtime.sweep()
        if swept.num_folders:
            self._terminal.line(
                f"  . removed what a killed run left: {swept.num_processes} processes, {swept.num_folders} folders"
            )

    def _start_ray(self, run: runtime.RunFolder) -> None:
        with self._steps.step("Ray") as step:
            step.note("importing")
            from cluster import local_ray

            step.note("starting, on loopback only")
            self.ending.shield_children()
            local_ray.start_ray(run)
            self.ending.watch()
            self.ending.check_terminal()
            step.note("starting Serve")
            local_ray.start_serve(self._config.host, self._config.port)
            step.note("on loopback only")

    def _deploy(self, plan: ClusterPlan, run: runtime.RunFolder) -> None:
        from cluster import local_ray
        from cluster.app import APP_NAME, build_app

        with self._steps.step("workers") as step:
            step.note("loading the model in each")
            app = build_app(plan, run.secret_path, self._parts, str(self._logs))
            local_ray.deploy(app, APP_NAME)
            self._is_deployed = True
            step.note("waiting until a token can be produced")
            self._await_ready()
            step.note(", ".join(f"{pool.replicas} {name}" for name, pool in pool_sizes(self._config)))

    def _await_ready(self) -> None:
        """The router reaches its workers: Serve's word that replicas are healthy is not enough."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not _answers(f"{self._url}/health"):
            if time.monotonic() > deadline:
                raise DeploymentFailed(
                    f"the workers are up but {self._url}/health gave no 200 within {READY_TIMEOUT_S:.0f} s"
                )
            time.sleep(POLL_S)

    def _greet(self) -> None:
        took = time.monotonic() - self._started
        self._terminal.line(
            GREETING.format(took=took, url=self._url, port=self._config.port, model=self._model.id, logs=self._logs)
        )

    def wait(self) -> None:
        """Until a signal comes. Raises `DeploymentFailed` when Ray itself has died: without it nothing is restarted."""
        from cluster import local_ray

        assert self._run is not None
        pillars = local_ray.find_pillars(runtime.processes_of(self._run))
        while all(pillar.is_running() and pillar.status() != psutil.STATUS_ZOMBIE for pillar in pillars):
            self.ending.check()
            time.sleep(WATCH_S)
        raise DeploymentFailed("a process of Ray has died and the cluster with it; start again")

    def end(self) -> None:
        """Nothing of this start is left. Safe in every phase."""
        if self._run is not None:
            with self._steps.step(f"ending ({self.ending.reason})") as step:
                self._stop_ray(step.note)
                runtime.end_processes(self._run, timeout_s=1.5)
                self._run.remove()
                step.note("no process, port or folder is left")
        if self._claim is not None:
            self._claim.release()

    def _stop_ray(self, report: Callable[[str], None]) -> None:
        if "ray" in sys.modules:
            from cluster import local_ray
            from cluster.app import APP_NAME

            local_ray.stop(APP_NAME if self._is_deployed else None, report)

    def _end_hard(self) -> None:
        """From the watchdog's thread, when `end` hangs."""
        if self._run is not None:
            runtime.end_processes(self._run, timeout_s=0.5)
            self._run.remove()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2.0, trust_env=False).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False
