"""From a plan to the Serve application: one pure function. The file to read first in `cluster`.

    ingress --- handle, membership only ---> prefill <--- handle, membership only --- decode
       `------- handle, membership only ---> decode

Serve places, starts, checks, replaces and drains these replicas. Requests and tokens travel on the front links that the
ingress dials, KV caches on the sessions and lanes that decode dials.
"""

from pathlib import Path
from typing import Any

from ray import serve

from cluster.deployments.ingress import Ingress
from cluster.deployments.pool import PoolReplica
from cluster.membership import membership_config
from cluster.parts import Parts
from cluster.plan import ClusterPlan, replica_config, router_config
from cluster.resolve import pool_sizes
from workers.protocol import Role

APP_NAME = "baton"
INGRESS_NAME = "ingress"
MAX_ONGOING_REQUESTS = 10_000
"""Serve's own bound of requests in an ingress; the router's queue bound is far below."""
MAX_START_ATTEMPTS = 3

DRAIN_SLACK_S = 30.0
LIFETIME: dict[str, Any] = {
    "graceful_shutdown_wait_loop_s": 0.1,
    "health_check_period_s": 1.0,
    "health_check_timeout_s": 3.0,
    "max_constructor_retry_count": MAX_START_ATTEMPTS,
}
"""A worker that dies is replaced within about a second of detection, one that hangs after three missed checks (10
s).
"""


def build_app(
    plan: ClusterPlan, secret_path: Path, parts: Parts | None = None, log_folder: str = ""
) -> serve.Application:
    """The application of a cluster; deploys nothing. `log_folder`: where its processes log to, if anywhere."""
    parts = parts or Parts()
    pools: dict[str, serve.Application] = {}
    for role, pool in pool_sizes(plan.config):
        deployment = _pool_deployment(role, pool.replicas, plan.config.drain_timeout_s, plan.gpus_per_worker)
        config = replica_config(plan, role, secret_path)
        pools[role] = deployment.bind(config, parts.make_leader, pools.get("prefill"), log_folder)
    ingress = serve.deployment(serve.ingress()(Ingress)).options(
        name=INGRESS_NAME,
        num_replicas=1,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=DRAIN_SLACK_S,
        **LIFETIME,
    )
    return ingress.bind(router_config(plan), str(secret_path), parts.make_router, list(pools.values()), log_folder)


def _pool_deployment(role: Role, replicas: int, drain_timeout_s: float, num_gpus: float) -> serve.Deployment:
    return serve.deployment(PoolReplica).options(
        name=role,
        num_replicas=replicas,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        ray_actor_options={"num_cpus": 0, "num_gpus": num_gpus},
        request_router_config=membership_config(),
        graceful_shutdown_timeout_s=drain_timeout_s + DRAIN_SLACK_S,
        **LIFETIME,
    )
