"""The two transition tables as data: every pair is either an entry or an error with the story, and every state can
end."""

import itertools

import pytest

from kv_transfer.errors import OutOfOrder
from kv_transfer.grants import TABLE as GRANT_TABLE
from kv_transfer.grants import GrantedTransfer, GrantEvent, GrantState
from kv_transfer.messages import Fin, TransferKey, Unit
from kv_transfer.session import TABLE as SEND_TABLE
from kv_transfer.session import SendAction, SendEvent, SendState, SendTransfer

KEY = TransferKey(b"k" * 16, 2)


def make_sending(state: SendState = SendState.BEGUN) -> SendTransfer:
    return SendTransfer(KEY, skip_tokens=0, num_tokens=8, num_layers=2, state=state)


def make_granted(state: GrantState = GrantState.EXPECTED) -> GrantedTransfer:
    return GrantedTransfer(KEY, 1, ((4, 5),), num_tokens=8, skip_tokens=0, num_layers=2, state=state, generation=3)


@pytest.mark.parametrize(("state", "event"), list(itertools.product(SendState, SendEvent)))
def test_sender_pairs_are_entries_or_errors(state: SendState, event: SendEvent):
    transfer = make_sending(state)
    if (state, event) in SEND_TABLE:
        assert (transfer.on(event), transfer.state) == (SEND_TABLE[state, event][1], SEND_TABLE[state, event][0])
        assert transfer.story == [event.name]
    else:
        with pytest.raises(OutOfOrder, match=f"{event.name} in {state.name}"):
            transfer.on(event)
        assert transfer.state is state


@pytest.mark.parametrize(("state", "event"), list(itertools.product(GrantState, GrantEvent)))
def test_receiver_pairs_are_entries_or_errors(state: GrantState, event: GrantEvent):
    transfer = make_granted(state)
    if (state, event) in GRANT_TABLE:
        assert (transfer.on(event), transfer.state) == (GRANT_TABLE[state, event][1], GRANT_TABLE[state, event][0])
    else:
        with pytest.raises(OutOfOrder, match=f"{event.name} in {state.name}"):
            transfer.on(event)
        assert transfer.state is state


def test_whatever_the_peer_does_the_loss_of_the_link_ends_each_end():
    for state in SendState:
        if state is not SendState.ENDED:
            assert SEND_TABLE[state, SendEvent.LOST][0] is SendState.ENDED
    for grant_state in GrantState:
        if grant_state not in (GrantState.ADOPTED, GrantState.FORGOTTEN):
            after_loss = GRANT_TABLE[grant_state, GrantEvent.LOST][0]
            assert (
                after_loss is GrantState.FORGOTTEN
                or GRANT_TABLE[after_loss, GrantEvent.REVOKE][0] is GrantState.FORGOTTEN
            )


def test_a_verdict_is_reported_on_the_way_out_of_the_living_states_only():
    verdicts = {SendAction.EMIT_ADOPTED, SendAction.EMIT_FAILED}
    told = (SendState.WITHDRAWN, SendState.DRAINING, SendState.ENDED)
    for (state, _), (_, actions) in SEND_TABLE.items():
        assert not (verdicts & set(actions) and state in told)
        assert len(verdicts & set(actions)) <= 1


def test_the_story_is_told_and_bounded():
    transfer = make_sending()
    transfer.on(SendEvent.GRANT)
    transfer.on(SendEvent.FINISH)
    with pytest.raises(OutOfOrder, match="GRANT in FINISHING after GRANT FINISH"):
        transfer.on(SendEvent.GRANT)
    draining = make_sending(SendState.DRAINING)
    for _ in range(1000):
        draining.on(SendEvent.ABORT)
    assert len(draining.story) < 100


def unit(index: int, first_token: int, num_tokens: int, first_layer: int = 0, num_layers: int = 2) -> Unit:
    return Unit(*KEY, 3, index, first_token, num_tokens, first_layer, num_layers, num_bytes=1)


@pytest.mark.parametrize(
    ("bad", "misfit"),
    [
        (unit(0, 4, 4), "unit_order"),
        (unit(2, 4, 4), "unit_order"),
        (unit(1, 3, 4), "unit_coverage"),
        (unit(1, 5, 3), "unit_coverage"),
        (unit(1, 0, 4), "unit_coverage"),
        (unit(1, 4, 5), "unit_range"),
        (unit(1, 4, 4, 1, 2), "unit_range"),
    ],
)
def test_a_unit_must_continue_each_of_its_layers(bad: Unit, misfit: str):
    grant = make_granted(GrantState.GRANTED)
    first = unit(0, 0, 4)
    assert grant.misfit_of(first) is None
    assert grant.open_window(first, (4,))
    assert grant.open_blocks == (4,)
    assert grant.close_window(first, (4,), 9) == ((), ())
    assert grant.misfit_of(bad) == misfit
    assert grant.misfit_of(unit(1, 4, 4)) is None


@pytest.mark.parametrize(
    ("fin", "failure"),
    [
        (Fin(*KEY, 2, (0,), b"", b""), "fin_mismatch"),
        (Fin(*KEY, 3, (0, 0), b"", b""), "fin_mismatch"),
        (Fin(*KEY, 3, (0,), b"", b""), "incomplete"),
    ],
)
def test_a_fin_that_does_not_fit_fails_the_transfer(fin: Fin, failure: str):
    grant = make_granted(GrantState.GRANTED)
    grant.on_fin(fin)
    assert (grant.state, grant.failure) == (GrantState.FAILED, failure)


def test_a_window_opens_for_the_current_generation_of_a_living_grant_only():
    for state in GrantState:
        grant = make_granted(state)
        assert grant.open_window(unit(0, 0, 4), (4,)) == (state in (GrantState.GRANTED, GrantState.CLAIMED))
    stale = Unit(*KEY, 2, 0, 0, 4, 0, 2, num_bytes=1)
    assert not make_granted(GrantState.GRANTED).open_window(stale, (4,))
