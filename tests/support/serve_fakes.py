"""`baton serve` with fakes in place of leader and router: python -m tests.support.serve_fakes CONFIG PORT."""

import sys

from cluster.cli.serve import serve
from cluster.parts import Parts
from tests.support.fake_parts import make_fake_leader, make_fake_router

if __name__ == "__main__":
    sys.exit(serve(sys.argv[1], int(sys.argv[2]), Parts(make_fake_leader, make_fake_router)))
