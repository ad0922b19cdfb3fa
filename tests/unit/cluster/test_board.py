"""The board tells each change once, in order, and the present state to whoever subscribes."""

from cluster.board import Board, describe_worker, read_worker
from workers.protocol import WorkerEndpoint


def worker(number: int) -> WorkerEndpoint:
    return WorkerEndpoint("prefill", number, "127.0.0.1", 4000 + number, 5000 + number)


def test_changes_reach_subscribers_and_repeats_do_not():
    board, heard = Board(), []
    board.subscribe("prefill", heard.append)
    board.publish("prefill", [worker(2), worker(1)])
    board.publish("prefill", [worker(1), worker(2)])
    board.publish("decode", [worker(3)])
    board.publish("prefill", [])
    assert heard == [(worker(1), worker(2)), ()]


def test_a_late_subscriber_hears_the_present_state():
    board, heard = Board(), []
    board.publish("prefill", [worker(1)])
    board.subscribe("prefill", heard.append)
    assert heard == [(worker(1),)]
    assert board.workers("prefill") == (worker(1),)
    assert board.workers("decode") == ()


def test_metadata_carries_a_worker_there_and_back():
    assert read_worker(describe_worker(worker(7))) == worker(7)
    assert read_worker({}) is None
    assert read_worker({"surprise": 1}) is None
