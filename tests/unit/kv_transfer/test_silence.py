"""When a peer counts as suspect or lost, on a clock of our own."""

from kv_transfer.link import LOST_S, SUSPECT_S, TICK_S, Silence


def listen(silence: Silence, start: float, duration_s: float) -> float:
    now = start
    while now < start + duration_s:
        now += TICK_S
        silence.tick(now)
    return now


def test_three_seconds_of_silence_are_suspect_and_with_bytes_in_flight_lost():
    silence = Silence(now=100.0)
    now = listen(silence, 100.0, SUSPECT_S - 2 * TICK_S)
    assert not silence.is_suspect
    listen(silence, now, 2 * TICK_S)
    assert silence.is_suspect
    assert silence.is_lost(has_bytes_in_flight=True)
    assert not silence.is_lost(has_bytes_in_flight=False)


def test_ten_seconds_of_silence_are_lost_whatever_is_in_flight():
    silence = Silence(now=0.0)
    listen(silence, 0.0, LOST_S)
    assert silence.is_lost(has_bytes_in_flight=False)


def test_a_heard_peer_starts_anew():
    silence = Silence(now=0.0)
    now = listen(silence, 0.0, 2.9)
    silence.heard()
    listen(silence, now, 2.5)
    assert not silence.is_suspect


def test_our_own_stall_is_no_silence_of_the_peer():
    silence = Silence(now=0.0)
    silence.tick(3600.0)
    assert silence.seconds <= 2 * TICK_S
