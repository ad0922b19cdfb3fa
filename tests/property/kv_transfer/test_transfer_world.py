"""Two transfers on one lane between the real KVSender and KVReceiver, with every delivery in the hands of hypothesis.

Connections and lanes are queues here; engine calls, deliveries, completions, revokes in the middle of a write,
duplicated frames, corrupted bytes and the loss of the link happen in any order. Whatever the order: nothing is written
into a block that its owner has taken back, each block is freed exactly once, each end reports one verdict and forgets
the transfer, and what arrives is equal to what was sent.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kv_transfer import receiver as receiver_module
from kv_transfer.channel import (
    Adopted,
    Arrived,
    BlocksProven,
    KVReceiver,
    KVSender,
    TransferFailed,
)
from kv_transfer.choice import Choice
from kv_transfer.errors import TransferError
from kv_transfer.lane import WINDOW
from kv_transfer.layout import KVLayout
from kv_transfer.messages import SESSION_CODEC, KVIdentity, TransferKey, Unit
from kv_transfer.staging import CacheView, Tables, gather_unit, scatter_unit, view_cache
from kv_transfer.wire import KeyRing

LAYERS, HEADS, DIM, TOKENS = 2, 1, 2, 7
SOURCE, TARGET = 11, 22
SOURCE_LAYOUT, TARGET_LAYOUT = KVLayout(LAYERS, HEADS, DIM, 3, "fp32"), KVLayout(LAYERS, HEADS, DIM, 2, "fp32")
PARTS = [(first, count, layer, 1) for first, count in ((0, 3), (3, 2), (5, 2)) for layer in range(LAYERS)]


class FakeLane:
    def __init__(self) -> None:
        self.waiting: deque[Any] = deque()
        self.posted: deque[Any] = deque()

    num_waiting = 0

    def offer(self, item: object) -> None:
        self.waiting.append(item)

    def drop(self, is_unwanted: Callable[[Any], bool]) -> int:
        before = len(self.waiting)
        self.waiting = deque(item for item in self.waiting if not is_unwanted(item))
        return before - len(self.waiting)


class FakeLink:
    def __init__(self, peer: KVIdentity) -> None:
        self.peer, self.lane, self.is_open = peer, FakeLane(), True
        self.sent: deque[bytes] = deque()
        self.choice = Choice("gloo", "test")
        self.lane_id, self.session, self.lane_connection, self.has_lane_ended = b"", b"", None, True

    def send(self, message: Any) -> None:
        self.sent.append(SESSION_CODEC.encode(message))


class DoneTicket:
    def wait(self) -> None:
        return


@dataclass
class Course:
    """One transfer: what its two engines have done and hold."""

    key: TransferKey
    source_blocks: list[int]
    target_blocks: list[int]
    skip_tokens: int
    parts: deque[tuple[int, int, int, int]] = field(default_factory=deque)
    has_begun: bool = False
    has_finished: bool = False
    is_aborted: bool = False
    is_revoked: bool = False
    sender_verdicts: list[object] = field(default_factory=list)
    receiver_verdicts: list[object] = field(default_factory=list)


class World:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        ring = KeyRing((("k", b"k" * 16),))
        self.source = torch.randn(LAYERS, 8, 2, HEADS, 3, DIM, generator=torch.Generator().manual_seed(seed))
        self.target = torch.zeros(LAYERS, 12, 2, HEADS, 2, DIM)
        sender_identity = KVIdentity(SOURCE, "d", SOURCE_LAYOUT)
        receiver_identity = KVIdentity(TARGET, "d", TARGET_LAYOUT)
        self.events: deque[object] = deque()
        self.sender = KVSender(
            identity=sender_identity, ring=ring, data=self.source, host="", emit=self.from_sender, transports={}
        )
        self.receiver = KVReceiver(
            identity=receiver_identity, ring=ring, data=self.target, emit=self.from_receiver, transports={}
        )
        self.down, self.up = FakeLink(receiver_identity), FakeLink(sender_identity)
        self.sender._links[TARGET] = self.down  # type: ignore[assignment]
        self.receiver._links[SOURCE] = self.up  # type: ignore[assignment]
        self.is_lost = False
        self.free: list[int] = []
        self.in_write: tuple[int, ...] = ()
        self.during_write: Callable[[], None] | None = None
        self.unrevoked: deque[Course] = deque()
        self.notices: deque[tuple[Unit, torch.Tensor]] = deque()
        self.corrupt_next = False
        self.courses = [
            Course(TransferKey(b"a" * 16, 1), [0, 1, 2], [0, 1, 2, 3], 0, deque(PARTS)),
            Course(TransferKey(b"b" * 16, 4), [5, 3, 4], [9, 5, 7, 11], 3, deque(PARTS[LAYERS:])),
        ]
        for course in self.courses:
            self.receiver.expect(course.key, SOURCE, [course.target_blocks], TOKENS, course.skip_tokens)

    def course_of(self, key: TransferKey) -> Course:
        return next(course for course in self.courses if course.key == key)

    def from_sender(self, event: object) -> None:
        if isinstance(event, Adopted | TransferFailed):
            self.course_of(event.key).sender_verdicts.append(event)

    def from_receiver(self, event: object) -> None:
        if isinstance(event, BlocksProven):
            self.release(event.blocks)
        elif isinstance(event, Arrived | TransferFailed):
            course = self.course_of(event.key)
            course.receiver_verdicts.append(event)
            if isinstance(event, TransferFailed):
                self.unrevoked.append(course)
            else:
                self.check_content(course)

    def check_content(self, course: Course) -> None:
        count = TOKENS - course.skip_tokens
        wanted = gather_unit(view_cache(self.source), [course.source_blocks], course.skip_tokens, count, 0, LAYERS)
        assert torch.equal(
            gather_unit(view_cache(self.target), [course.target_blocks], course.skip_tokens, count, 0, LAYERS), wanted
        )

    def release(self, blocks: tuple[int, ...]) -> None:
        for block in blocks:
            assert block not in self.free, f"block {block} is freed twice"
            assert block not in self.in_write, f"block {block} is freed while it is written"
            self.free.append(block)

    def revoke(self, course: Course) -> None:
        if course.is_revoked or any(isinstance(v, Arrived) for v in course.receiver_verdicts):
            return
        course.is_revoked = True
        quarantined = self.receiver.revoke(course.key, "test")
        assert set(quarantined) <= set(course.target_blocks)
        self.release(tuple(block for block in course.target_blocks if block not in quarantined))

    # --- steps: each returns False when it is not possible now ------------------------------------------------------

    def begin(self, course: Course) -> bool:
        if course.has_begun or course.is_aborted:
            return False
        course.has_begun = True
        self.sender.begin(course.key, TARGET, TOKENS, course.skip_tokens)
        return True

    def push(self, course: Course) -> bool:
        if not course.has_begun or course.is_aborted or not course.parts:
            return False
        self.sender.push(course.key, [course.source_blocks], *course.parts.popleft())
        return True

    def finish(self, course: Course) -> bool:
        if not course.has_begun or course.is_aborted or course.parts or course.has_finished:
            return False
        course.has_finished = True
        self.sender.finish(course.key, b"meta")
        return True

    def abort(self, course: Course) -> bool:
        course.is_aborted = True
        self.sender.abort(course.key, "test")
        return True

    def deliver(self, queue: deque[bytes], owner: Any, link: FakeLink, times: int = 1) -> bool:
        if self.is_lost or not queue:
            return False
        payload = queue.popleft()
        try:
            for _ in range(times):
                owner.on_message(link, SESSION_CODEC.decode(payload))
        except TransferError:
            self.lose()
        return True

    def announce(self) -> bool:
        lane = self.down.lane
        if self.is_lost or not lane.waiting or len(lane.posted) >= WINDOW:
            return False
        item = lane.waiting.popleft()
        lane.posted.append(item)
        notice = item.sending.transfer.notice(item.index, item.part, item.buffer.numel())
        self.notices.append((notice, item.buffer.clone()))
        return True

    def sent(self) -> bool:
        if self.is_lost or not self.down.lane.posted:
            return False
        self.sender._complete(self.down.lane.posted.popleft(), DoneTicket())  # type: ignore[arg-type]
        return True

    def write(self, middle: Callable[[], None] | None) -> bool:
        if self.is_lost or not self.notices:
            return False
        notice, buffer = self.notices.popleft()
        if self.corrupt_next:
            buffer[self.random.randrange(buffer.numel())] ^= 1
            self.corrupt_next = False
        self.receiver.on_unit(self.up, notice)  # type: ignore[arg-type]
        self.up.lane.waiting.popleft()
        self.during_write = middle
        self.receiver._write(self.up, notice, buffer)  # type: ignore[arg-type]
        self.during_write = None
        return True

    def lose(self) -> bool:
        if self.is_lost:
            return False
        self.is_lost = True
        self.sender.forget_link(self.down)  # type: ignore[arg-type]
        self.receiver.forget_link(self.up)  # type: ignore[arg-type]
        return True

    def advance(self) -> None:
        """One harmless step that is possible now, by the world's own dice; nothing when none is."""
        steps: list[Callable[[], bool]] = [
            lambda: self.deliver(self.down.sent, self.receiver, self.up),
            lambda: self.deliver(self.up.sent, self.sender, self.down),
            self.announce,
            self.sent,
            lambda: self.write(None),
        ]
        for course in self.courses:
            engine = (self.begin, self.push, self.push, self.finish)
            steps += [lambda s=step, c=course: not c.is_revoked and s(c) for step in engine]
        self.random.shuffle(steps)
        any(step() for step in steps)

    def harm(self, name: str, course: Course) -> None:
        """One harmful step; those that need something in flight advance until there is."""
        steps: dict[str, Callable[[], bool]] = {
            "abort": lambda: self.abort(course),
            "revoke": lambda: self.revoke(course) or True,
            "twice_to_decode": lambda: self.deliver(self.down.sent, self.receiver, self.up, times=2),
            "twice_to_prefill": lambda: self.deliver(self.up.sent, self.sender, self.down, times=2),
            "revoke_in_write": lambda: self.write(lambda: self.revoke(course)),
            "lose_in_write": lambda: self.write(lambda: self.lose() and None),
            "corrupt_write": lambda: self.corrupt() and self.write(None),
            "lose": self.lose,
        }
        for _ in range(80):
            if steps[name]():
                return
            self.advance()

    def corrupt(self) -> bool:
        self.corrupt_next = bool(self.notices)
        return self.corrupt_next

    def drain(self) -> None:
        """Lets both engines do what they owe and everything in flight arrive, until nothing moves."""
        for _ in range(300):
            self.advance()
        moved = True
        while moved:
            moved = False
            while self.unrevoked:
                self.revoke(self.unrevoked.popleft())
                moved = True
            for course in self.courses:
                for step in (self.begin, self.push, self.finish):
                    moved |= not course.is_revoked and step(course)
            moved |= self.deliver(self.down.sent, self.receiver, self.up)
            moved |= self.deliver(self.up.sent, self.sender, self.down)
            moved |= self.announce() | self.sent() | self.write(None)

    def check_ended(self) -> None:
        for course in self.courses:
            assert len(course.sender_verdicts) <= 1
            assert len(course.receiver_verdicts) <= 1
            has_arrived = any(isinstance(v, Arrived) for v in course.receiver_verdicts)
            if any(isinstance(v, Adopted) for v in course.sender_verdicts):
                assert has_arrived, "prefill hears ADOPTED of nothing that decode does not hold"
            if course.has_begun and not course.is_aborted:
                assert len(course.sender_verdicts) == 1, "prefill hears one verdict"
            if not has_arrived:
                self.revoke(course)
                assert set(course.target_blocks) <= set(self.free), "decode has its blocks back"
            else:
                self.release(tuple(course.target_blocks))
        assert sorted(self.free) == sorted(b for course in self.courses for b in course.target_blocks)
        assert not self.sender._sendings
        assert not self.receiver._receivings


SCRIPT = tuple[tuple[int, str, int], ...]
"""(harmless steps before it, harmful step, which transfer)"""
HARMFUL = (
    "abort", "revoke", "revoke_in_write", "lose_in_write", "corrupt_write", "lose",
    "twice_to_decode", "twice_to_prefill",
)  # fmt: skip


def run_world(seed: int, script: SCRIPT) -> World:
    world = World(seed)

    def scatter(cache: CacheView, tables: Tables, unit: Tensor, first_token: int, first_layer: int) -> None:
        size = cache.block_tokens
        world.in_write = tuple(tables[0][first_token // size : -(-(first_token + unit.shape[3]) // size)])
        for half in (0, 1):
            assert not set(world.in_write) & set(world.free), "a unit is written into a block that was taken back"
            if half == 0 and world.during_write is not None:
                world.during_write()
        scatter_unit(cache, tables, unit, first_token, first_layer)
        world.in_write = ()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(receiver_module, "scatter_unit", scatter)
        for gap, harm, which in script:
            for _ in range(gap):
                world.advance()
            world.harm(harm, world.courses[which])
        world.drain()
        world.check_ended()
    return world


def scripts(harms: tuple[str, ...], which: st.SearchStrategy[int]) -> st.SearchStrategy[list[tuple[int, str, int]]]:
    return st.lists(st.tuples(st.integers(0, 60), st.sampled_from(harms), which), min_size=1, max_size=4)


def check_arrived(course: Course) -> None:
    assert [type(v) for v in course.sender_verdicts] == [Adopted]
    assert [type(v) for v in course.receiver_verdicts] == [Arrived]


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 9999), scripts(HARMFUL, st.integers(0, 1)))
def test_every_order_of_events_ends_both_ends_and_frees_each_block_once(seed, script):
    run_world(seed, script)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 9999))
def test_without_harm_both_transfers_arrive_whatever_the_order(seed):
    world = run_world(seed, ())
    for course in world.courses:
        check_arrived(course)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 9999), scripts(("abort", "revoke", "revoke_in_write", "revoke_in_write"), st.just(0)))
def test_harm_to_one_transfer_leaves_the_other_untouched(seed, script):
    check_arrived(run_world(seed, script).courses[1])


@pytest.mark.parametrize("seed", range(20))
def test_a_corrupted_unit_is_refused_by_its_digest(seed):
    world = run_world(seed, ((0, "corrupt_write", 0),))
    failed = [v for course in world.courses for v in course.receiver_verdicts if isinstance(v, TransferFailed)]
    assert [v.reason for v in failed] == ["digest"]
