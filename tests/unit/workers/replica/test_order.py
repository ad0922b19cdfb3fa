from workers.replica.order import PassingOrder

OLD, NEW, OTHER = b"o" * 16, b"n" * 16, b"x" * 16


def test_nobody_yields_when_nobody_was_refused() -> None:
    order = PassingOrder()
    assert not order.must_yield(NEW, 0, now=10.0)


def test_an_old_request_may_be_passed_for_one_second_only() -> None:
    order = PassingOrder()
    order.refused(OLD, waited_ms=500, now=10.0)
    assert not order.must_yield(NEW, 0, now=10.1)
    order.accepted(NEW, now=10.1)
    order.refused(OLD, waited_ms=1400, now=10.9)
    assert not order.must_yield(OTHER, 0, now=11.0)
    assert order.must_yield(OTHER, 0, now=11.2)


def test_who_has_waited_longer_never_yields() -> None:
    order = PassingOrder()
    order.refused(OLD, waited_ms=500, now=10.0)
    order.accepted(NEW, now=10.0)
    order.refused(OLD, waited_ms=1300, now=10.8)
    assert not order.must_yield(OTHER, 5000, now=11.5)
    assert not order.must_yield(OLD, 2000, now=11.5)


def test_a_request_that_stops_asking_is_forgotten_after_a_second() -> None:
    order = PassingOrder()
    order.refused(OLD, waited_ms=500, now=10.0)
    order.accepted(NEW, now=10.0)
    assert not order.must_yield(OTHER, 0, now=11.01)


def test_acceptance_ends_the_memory() -> None:
    order = PassingOrder()
    order.refused(OLD, waited_ms=500, now=10.0)
    order.accepted(NEW, now=10.0)
    order.accepted(OLD, now=10.5)
    order.refused(NEW, waited_ms=0, now=10.6)
    assert not order.must_yield(OTHER, 0, now=11.3)


def test_the_longest_waiting_is_remembered_not_the_latest() -> None:
    order = PassingOrder()
    order.refused(OLD, waited_ms=900, now=10.0)
    order.refused(OTHER, waited_ms=10, now=10.1)
    order.accepted(NEW, now=10.1)
    order.refused(OLD, waited_ms=1800, now=10.9)
    assert order.must_yield(OTHER, 1000, now=11.2)
