"""What runs inside the deployments: the real leader and router, or the fakes of a test. Imports no Ray and no torch."""

from dataclasses import dataclass

from cluster.deployments.ingress import MakeRouter, load_router
from cluster.deployments.pool import MakeLeader, load_leader


@dataclass(frozen=True, slots=True)
class Parts:
    """Importable functions: Serve ships them to the replicas by name."""

    make_leader: MakeLeader = load_leader
    make_router: MakeRouter = load_router
