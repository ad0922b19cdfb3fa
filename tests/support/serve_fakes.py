"""`baton serve` with fakes in place of leader and router: python -m tests.support.serve_fakes CONFIG PORT [broken]."""

import sys

from cluster.cli.serve import serve
from cluster.local_ray import DeploymentFailed
from cluster.parts import Parts
from tests.support.fake_parts import make_broken_leader, make_fake_leader, make_fake_router

if __name__ == "__main__":
    leader = make_broken_leader if "broken" in sys.argv else make_fake_leader
    try:
        sys.exit(serve(sys.argv[1], int(sys.argv[2]), Parts(leader, make_fake_router)))
    except DeploymentFailed as error:
        sys.exit(f"baton: error: {error}")
