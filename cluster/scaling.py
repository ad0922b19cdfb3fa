"""Sets how many replicas Serve keeps of a pool. Serve starts, picks and drains them; the count alone is ours.

The one file that asks Serve's controller for it: the call is Serve's own, behind its external scaler API, and has no
public Python name in the pinned version (tests/ray holds it to it).
"""

import asyncio
from collections.abc import Sequence

from router.errors import ApiError

RESIZE_S = 10.0


class PoolScaler:
    """For the pools of the application that this replica belongs to. One event loop."""

    def __init__(self, pools: Sequence[str]) -> None:
        self._pools = tuple(pools)

    async def resize(self, pool: str, replicas: int) -> None:
        """Serve's target for `pool` is `replicas`. Raises `ApiError` for an unknown pool, or when Serve refuses."""
        if pool not in self._pools:
            message = f"There is no pool {pool[:64]!r}; the pools are {', '.join(self._pools)}."
            raise ApiError("invalid_request", message, param="pool")
        from ray.exceptions import RayError

        try:
            await asyncio.to_thread(_set_target, pool, replicas)
        except RayError as error:
            reason = str(error).strip().splitlines()[-1][:200]
            raise ApiError("no_capacity", f"Serve did not take the number of replicas: {reason}.") from None


def _set_target(pool: str, replicas: int) -> None:
    import ray
    from ray import serve
    from ray.serve._private.common import DeploymentID
    from ray.serve.context import _get_global_client

    app_name = serve.get_replica_context().app_name
    controller = _get_global_client()._controller  # see the file's docstring
    ray.get(controller.update_deployment_replicas.remote(DeploymentID(pool, app_name), replicas), timeout=RESIZE_S)
