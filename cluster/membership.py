"""The one adapter between Serve's replica updates and our board of workers.

A process that must know a pool holds a Serve handle to its deployment and sends no request through it: `watch` creates
the handle's router, whose replica updates are all that is used. A replica says where it can be dialled in
`replica_metadata`.

Serve ships the router class by value, with copies of this module's globals: the board lives in a module of its own and
is imported where it is used.
"""

from collections.abc import Sequence

from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

from cluster.board import Subscriber


class MembershipRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]  # Ray is untyped here
    """Serve's router of a pool's handle: reports the replicas it hears of, and routes in order where Serve itself
    asks.
    """

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        from cluster.board import BOARD, read_worker

        super().update_replicas(replicas)
        workers = [read_worker(replica.replica_metadata) for replica in replicas]
        BOARD.publish(self._deployment_id.name, [worker for worker in workers if worker is not None])

    async def choose_replicas(
        self, candidate_replicas: Sequence[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        return [list(candidate_replicas)]


def membership_config() -> RequestRouterConfig:
    """The router setting of a pool's deployment."""
    return RequestRouterConfig(request_router_class=f"{__name__}:{MembershipRouter.__name__}")


def watch(handle: DeploymentHandle, subscriber: Subscriber) -> None:
    """From now on `subscriber` hears of the pool's workers, on Serve's router thread. Call once per pool and process.

    A Serve handle creates its router on first use; setting an option is a use that sends nothing.
    """
    from cluster.board import BOARD

    BOARD.subscribe(handle.deployment_name, subscriber)
    handle.options(method_name="check_health")
