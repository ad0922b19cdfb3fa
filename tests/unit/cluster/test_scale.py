"""How far a pool is on its way to the size that was asked for."""

import pytest

from cluster.cli.client import ServerUnreachable
from cluster.cli.scale import describe_missing, wait_for_size


def worker(pool: str, name: str, *, listed: bool = True, state: str = "ready", lanes: tuple[str, ...] = ()) -> dict:
    return {"pool": pool, "incarnation": name, "listed": listed, "state": state, "running": 2, "open_lanes": lanes}


def test_a_pool_of_the_asked_size_misses_nothing():
    workers = [worker("prefill", "p"), worker("decode", "d1", lanes=("p",)), worker("decode", "d2", lanes=("p",))]
    assert describe_missing(workers, "decode", 2) is None


@pytest.mark.parametrize(
    ("workers", "missing"),
    [
        ([], "0 of 2 ready"),
        ([worker("decode", "d1"), worker("decode", "d2", state="unreachable")], "1 of 2 ready"),
        ([worker("decode", "d1"), worker("decode", "d2"), worker("decode", "d3")], "3 of 2"),
        (
            [worker("decode", "d1"), worker("decode", "d2"), worker("decode", "d3", listed=False, state="draining")],
            "1 leaving, 2 streams to finish",
        ),
        ([worker("prefill", "p"), worker("decode", "d1", lanes=("p",)), worker("decode", "d2")], "warming lanes"),
    ],
)
def test_what_is_missing_is_said(workers, missing):
    assert describe_missing(workers, "decode", 2) == missing


def test_more_prefill_workers_than_a_decode_worker_pairs_with_are_no_reason_to_wait():
    prefill = [worker("prefill", f"p{index}") for index in range(20)]
    decode = worker("decode", "d", lanes=tuple(f"p{index}" for index in range(16)))
    assert describe_missing([*prefill, decode], "prefill", 20) is None


def test_the_wait_ends_with_what_is_missing():
    with pytest.raises(ServerUnreachable, match="decode after 0 s: 0 of 2 ready"):
        wait_for_size(lambda: (), "decode", 2, 0.0, lambda text: None)
