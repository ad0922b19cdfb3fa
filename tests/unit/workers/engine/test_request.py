"""The status table of a request."""

import itertools
from typing import get_args

import pytest

from workers.engine.request import TRANSITIONS, Event, Request, Status, UnexpectedEvent
from workers.protocol import SamplingParams, StreamKey


def make_request(**fields) -> Request:
    return Request(key=StreamKey(b"r" * 16, 2), known=[1, 2, 3], num_prompt=2, sampling=SamplingParams(), **fields)


def test_every_pair_moves_or_raises() -> None:
    for status, event in itertools.product(get_args(Status), get_args(Event)):
        request = make_request(status=status)
        if (status, event) in TRANSITIONS:
            request.apply(event)
            assert request.status == TRANSITIONS[status, event]
        else:
            with pytest.raises(UnexpectedEvent):
                request.apply(event)
            assert request.status == status


def test_the_error_tells_the_story() -> None:
    request = make_request()
    for event in ("reserve", "start", "preempt"):
        request.apply(event)
    with pytest.raises(
        UnexpectedEvent, match=r"72727272#2 is preempted and cannot adopt; so far: reserve start preempt"
    ):
        request.apply("adopt")


def test_counts() -> None:
    request = make_request(computed=1, catch_up_to=2)
    assert (request.num_outputs, request.num_uncomputed, request.is_prompt_left) == (1, 2, True)
    request.computed = 2
    assert (request.num_uncomputed, request.is_prompt_left) == (1, False)
