import pytest

from workers.replica.lifecycle import Lifecycle


def test_a_replica_goes_one_way() -> None:
    life = Lifecycle()
    assert not life.accepts_work
    life.become("ready")
    life.become("ready")
    assert life.accepts_work
    life.become("draining")
    assert not life.accepts_work
    life.become("stopped")


def test_there_is_no_way_back_and_the_error_tells_the_story() -> None:
    life = Lifecycle()
    life.become("ready")
    life.become("draining")
    with pytest.raises(AssertionError, match="starting -> ready -> draining cannot become ready"):
        life.become("ready")
