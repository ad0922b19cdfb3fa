import pytest
import torch

from tests.support.ops_cases import BACKENDS
from workers.errors import BackendUnavailable
from workers.ops.base import Ops
from workers.ops.reference import ReferenceOps


@pytest.fixture(scope="session", params=sorted(BACKENDS))
def ops(request: pytest.FixtureRequest) -> Ops:
    torch.set_num_threads(1)
    try:
        return BACKENDS[request.param]()
    except BackendUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def oracle() -> ReferenceOps:
    return ReferenceOps(torch.float64)
