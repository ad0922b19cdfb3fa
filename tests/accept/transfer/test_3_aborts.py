"""Line 3, aborts: of two transfers on one lane one is aborted and the other untouched, and thousands of aborted
transfers leave nothing behind at either end."""

import gc
import os
import random
import threading

import psutil
import pytest

from kv_transfer.channel import Adopted, Arrived, Granted
from kv_transfer.layout import KVLayout
from kv_transfer.messages import TransferKey
from tests.support.kv_channel import KVChannel, open_channel

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]
LAYOUT = KVLayout(num_layers=4, num_kv_heads=2, head_dim=32, block_tokens=16, dtype="fp32")
TOKENS, NUM_BLOCKS = 150, 64
NUM_PAGES = LAYOUT.num_blocks(TOKENS)
PARTS = [(first, 50, layer, 1) for first in (0, 50, 100) for layer in range(LAYOUT.num_layers)]


class Course:
    """One transfer, step by step: begin, its units, finish."""

    def __init__(self, channel: KVChannel, number: int, dice: random.Random) -> None:
        self.channel, self.key = channel, TransferKey(number.to_bytes(16, "little"), 1)
        self.blocks = channel.books.take(NUM_PAGES)
        self.source_blocks = dice.sample(range(NUM_BLOCKS), NUM_PAGES)
        channel.receiver.expect(self.key, 1, [self.blocks], TOKENS, 0)
        channel.sender.begin(self.key, 2, TOKENS, 0)
        self.parts = iter(PARTS)

    def push(self) -> None:
        self.channel.sender.push(self.key, [self.source_blocks], *next(self.parts))

    def finish(self) -> None:
        self.channel.sender.finish(self.key, b"m")

    def revoke(self) -> None:
        """Decode's engine lets go: what is not in quarantine is free at once."""
        self.channel.books.give(self.blocks, self.channel.receiver.revoke(self.key, "test"))

    def check_arrived(self) -> None:
        self.channel.get(Adopted, self.key, self.channel.sent)
        self.channel.get(Arrived, self.key, self.channel.received)
        assert self.channel.is_equal(self.source_blocks, self.blocks, TOKENS)
        self.channel.books.give(self.blocks)


@pytest.mark.parametrize("name", ["gloo", "shm"])
def test_of_two_transfers_on_one_lane_one_is_aborted(name: str, is_full: bool):
    dice = random.Random(5)
    with open_channel(name, LAYOUT, NUM_BLOCKS) as channel:
        links = list(channel.sender._links.values())
        for round_number in range(1000 if is_full else 100):
            ended, kept = (Course(channel, 2 * round_number + n, dice) for n in (0, 1))
            by, ends_at = dice.choice(["sender", "receiver"]), dice.randrange(len(PARTS) + 1)
            if dice.random() < 0.5:
                channel.get(Granted, ended.key, channel.sent)
            for step in range(len(PARTS)):
                if step < ends_at:
                    ended.push()
                elif step == ends_at and by == "sender":
                    channel.sender.abort(ended.key, "test")
                elif step == ends_at:
                    ended.revoke()
                    ended.push()
                kept.push()
            kept.finish()
            kept.check_arrived()
            if by == "sender" or ends_at == len(PARTS):
                channel.sender.abort(ended.key, "test")
                ended.revoke()
            channel.wait_idle()
        assert list(channel.sender._links.values()) == links, "an abort closes no lane"


@pytest.mark.parametrize("name", ["gloo", "shm"])
def test_aborted_transfers_leave_nothing_behind(name: str, is_full: bool):
    dice, process = random.Random(6), psutil.Process()
    num_transfers = 10_000 if is_full else 600
    with open_channel(name, LAYOUT, NUM_BLOCKS) as channel:
        before, facts = 0, (0, 0)
        for number in range(num_transfers):
            if number == num_transfers // 4:
                gc.collect()
                before = process.memory_info().rss
                facts = (threading.active_count(), len(os.listdir("/proc/self/fd")))
            course = Course(channel, number, dice)
            if dice.random() < 0.7:
                channel.get(Granted, course.key, channel.sent)
            for _ in range(dice.randrange(len(PARTS) + 1)):
                course.push()
            if dice.random() < 0.5:
                channel.sender.abort(course.key, "test")
                course.revoke()
            else:
                course.revoke()
                channel.sender.abort(course.key, "test")
            channel.wait_idle()
            while not channel.sent.empty():
                channel.sent.get()
        gc.collect()
        grown = process.memory_info().rss - before
        assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == facts
        print(f"{name}: {num_transfers} aborted transfers, memory grew by {grown / 2**20:.2f} MiB")
        assert grown < 0.05 * before, f"memory grew by {grown} of {before} bytes"
