"""Both roles over the real engine with a fake model, a recording KV channel and a fake clock: what is answered, and
when blocks come back.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import pytest

from kv_transfer.channel import Adopted, Arrived, BlocksProven, ReceiveTrace, SendTrace, SentUnit, TransferFailed
from kv_transfer.layout import KVLayout
from kv_transfer.messages import TransferKey
from tests.support.fake_model import FakeRunner
from tests.support.fixed_costs import FixedCosts
from workers.engine.config import EngineConfig
from workers.engine.engine import Engine
from workers.protocol import (
    Abort,
    Accept,
    Busy,
    End,
    Failed,
    Generate,
    Prefill,
    PrefillEnd,
    SamplingParams,
    StreamKey,
    Tokens,
    UpMessage,
    pack_tokens,
)
from workers.replica.config import ReplicaConfig
from workers.replica.decode import QUARANTINE_LIMIT_S, DecodeRole
from workers.replica.desk import Desk
from workers.replica.handoff import HANDOFF_CODEC, HandOff
from workers.replica.lifecycle import Lifecycle
from workers.replica.prefill import PrefillRole

S, T = b"s" * 16, b"t" * 16
INGRESS, PEER = 7, 99
LAYOUT = KVLayout(num_layers=4, num_kv_heads=1, head_dim=8, block_tokens=4, dtype="fp32")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class FakeChannel:
    """Both ends of the KV channel as the roles see them; writes down what it is told."""

    peers: frozenset[int] = frozenset((PEER,))
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    window: tuple[int, ...] = ()

    def open_peers(self) -> tuple[int, ...]:
        return tuple(self.peers)

    def open_sources(self) -> frozenset[int]:
        return self.peers

    def begin(self, key: TransferKey, peer: int, num_tokens: int, skip_tokens: int) -> None:
        self.calls.append(("begin", peer, num_tokens))

    def push(self, key: TransferKey, tables: list[list[int]], *part: int) -> None:
        self.calls.append(("push", *part))

    def finish(self, key: TransferKey, meta: bytes) -> None:
        self.calls.append(("finish", HANDOFF_CODEC.decode(meta)))

    def abort(self, key: TransferKey, reason: str) -> None:
        self.calls.append(("abort", key.attempt))

    def expect(self, key: TransferKey, source: int, tables: list[list[int]], num_tokens: int, skip_tokens: int) -> None:
        self.calls.append(("expect", source, num_tokens))
        self.tables, self.skip_tokens = [list(table) for table in tables], skip_tokens

    def revoke(self, key: TransferKey, reason: str) -> tuple[int, ...]:
        self.calls.append(("revoke", reason))
        return self.window

    def pushed(self) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == "push"]


@dataclass
class Bench:
    role: Any
    engine: Engine
    channel: FakeChannel
    clock: Clock
    runner: FakeRunner

    def say(self, message: Any) -> list[UpMessage]:
        match message:
            case Generate():
                self.role.generate(INGRESS, message)
            case Prefill():
                self.role.prefill(INGRESS, message)
            case Abort():
                self.role.abort(message)
            case _:
                self.role.transfer(message)
        return self.answers()

    def step(self) -> list[UpMessage]:
        if self.engine.has_work:
            self.role.stepped(self.engine.step())
        return self.answers()

    def run(self, limit: int = 50) -> list[UpMessage]:
        found: list[UpMessage] = []
        for _ in range(limit):
            if not self.engine.has_work:
                break
            found += self.step()
        return found

    def answers(self) -> list[UpMessage]:
        return self.role.desk.take_outbox().get(INGRESS, [])

    @property
    def num_free(self) -> int:
        self.engine.check_integrity()
        return self.engine.pool.num_available


def make_bench(
    role: str,
    *,
    num_blocks: int = 20,
    chunk_tokens: int = 8,
    min_unit_bytes: int = 1,
    ms_per_token: float = 0.01,
    **config: Any,
) -> Bench:
    clock, channel, lifecycle = Clock(), FakeChannel(), Lifecycle()
    lifecycle.become("ready")
    settings = ReplicaConfig(
        role=role, model_path="", model_id="m", secret_path="", block_tokens=4, num_blocks=num_blocks,  # type: ignore[arg-type]
        chunk_tokens=chunk_tokens, max_context_tokens=64, min_unit_bytes=min_unit_bytes, **config,
    )  # fmt: skip
    engine_config = EngineConfig(
        block_tokens=4, num_blocks=num_blocks, chunk_tokens=chunk_tokens, max_running=settings.max_running,
        max_context_tokens=64, prefix_cache=settings.prefix_cache,
    )  # fmt: skip
    runner = FakeRunner(block_tokens=4, num_layers=4)
    engine = Engine(engine_config, runner, costs=FixedCosts(ms_per_token))
    desk = Desk(settings.role, "decode", lifecycle, clock)
    if role == "prefill":
        made: Any = PrefillRole(settings, engine, channel, LAYOUT, desk)  # type: ignore[arg-type]
        engine.observer = made
    else:
        made = DecodeRole(settings, engine, None if role == "colocated" else channel, desk)  # type: ignore[arg-type]
    return Bench(made, engine, channel, clock, runner)


def prompt(num_tokens: int) -> bytes:
    return pack_tokens(list(range(1, num_tokens + 1)))


def prefill(stream: bytes = S, num_tokens: int = 10, attempt: int = 0, **fields: Any) -> Prefill:
    return Prefill(stream, attempt, 1, 0, PEER, 0, prompt(num_tokens), b"", SamplingParams(), 5000, **fields)


def generate(
    stream: bytes = S, num_tokens: int = 10, attempt: int = 0, local: Any = "none", max_tokens: int = 3
) -> Generate:
    source = PEER if local == "none" else 0
    return Generate(
        stream, attempt, 1, 0, source, local, prompt(num_tokens), b"", SamplingParams(max_tokens=max_tokens), 5000, 5000
    )


# --- prefill --------------------------------------------------------------------------------------------------------


def test_prefill_ships_each_layer_group_of_each_chunk_then_hands_over() -> None:
    bench = make_bench("prefill", min_unit_bytes=LAYOUT.unit_bytes(8, 2))
    assert bench.say(prefill()) == [Accept(S, 0, 0, 0)]
    assert bench.channel.calls == [("begin", PEER, 10)]
    bench.step()
    assert bench.channel.pushed() == [(0, 8, 0, 2), (0, 8, 2, 2)]
    bench.step()
    assert bench.channel.pushed()[2:] == [(8, 2, 0, 4)], "the last chunk is small: one unit"
    (finish,) = [call for call in bench.channel.calls if call[0] == "finish"]
    assert isinstance(finish[1], HandOff)
    assert (finish[1].position, finish[1].num_tokens) == (0, 10)
    assert bench.num_free == 20 - 3, "blocks are held until ADOPTED"
    trace = SendTrace((SentUnit(0, 10, 0, 4, 2560, 1, 2),))
    (end,) = bench.say(Adopted(TransferKey(S, 0), trace))
    assert isinstance(end, PrefillEnd)
    assert (end.timings.prompt_tokens, end.timings.num_chunks, end.timings.sent_bytes) == (10, 2, 2560)
    assert bench.num_free == 20


def test_small_chunks_join_until_a_unit_is_large_enough() -> None:
    bench = make_bench("prefill", chunk_tokens=2, min_unit_bytes=LAYOUT.unit_bytes(6, 4))
    bench.say(prefill())
    bench.run()
    assert bench.channel.pushed() == [(0, 6, 0, 4), (6, 4, 0, 4)]


@pytest.mark.parametrize("event", ["transfer_failed", "abort", "deadline"])
def test_prefill_gives_everything_back_however_it_ends(event: str) -> None:
    bench = make_bench("prefill")
    bench.say(prefill())
    bench.step()
    if event == "transfer_failed":
        assert bench.say(TransferFailed(TransferKey(S, 0), "peer_lost")) == [Failed(S, 0, "transfer", "peer_lost")]
    elif event == "abort":
        assert bench.say(Abort(S, 0, "disconnect")) == []
    else:
        bench.clock.now += 6
        (late,) = bench.role.desk.streams.overdue(bench.clock.now)
        bench.role.expire(late)
        assert bench.answers() == [Failed(S, 0, "decode", "deadline")]
    assert bench.num_free == 20
    assert not bench.engine.has_work
    assert bench.say(Adopted(TransferKey(S, 0), SendTrace(()))) == [], "what comes late changes nothing"


def test_prefill_refuses_without_a_lane_and_without_room() -> None:
    bench = make_bench("prefill", num_blocks=16)
    bench.channel.peers = frozenset()
    assert bench.say(prefill()) == [Busy(S, 0, "no_lane")]
    bench.channel.peers = frozenset((PEER,))
    assert bench.say(prefill(num_tokens=40)) == [Accept(S, 0, 0, 0)]
    assert bench.say(prefill(T, num_tokens=40)) == [Busy(T, 0, "blocks")]


def test_prefill_accepts_a_share_of_its_ttft_target_and_at_least_one_prompt() -> None:
    bench = make_bench("prefill", ttft_target_ms=1000, ms_per_token=25.0)
    assert bench.say(prefill(S, num_tokens=30)) == [Accept(S, 0, 0, 0)]
    assert bench.say(prefill(T, num_tokens=30)) == [Busy(T, 0, "prefill_time")]
    assert bench.say(prefill(T, num_tokens=2, attempt=1)) == [Accept(T, 1, 0, 0)], "it goes before the long one"


def test_a_higher_attempt_takes_the_place_of_the_lower() -> None:
    bench = make_bench("prefill")
    bench.say(prefill())
    assert bench.say(prefill(attempt=1)) == [Accept(S, 1, 0, 0)]
    assert ("abort", 0) in bench.channel.calls
    assert bench.say(prefill(attempt=0)) == []
    assert bench.num_free == 20 - 3


def test_what_can_never_be_served_is_invalid_not_busy() -> None:
    bench = make_bench("prefill")
    assert bench.say(prefill(num_tokens=64)) == [Accept(S, 0, 0, 0), Failed(S, 0, "decode", "invalid")]
    assert bench.say(generate(T)) == [Accept(T, 0, 0, 0), Failed(T, 0, "decode", "invalid")]


# --- decode ---------------------------------------------------------------------------------------------------------


def arrived(position: int = 0, num_tokens: int = 10, token: int = 42) -> Arrived:
    meta = HANDOFF_CODEC.encode(HandOff(token, position, num_tokens))
    return Arrived(TransferKey(S, 0), meta, ReceiveTrace(()))


def test_decode_reserves_expects_adopts_and_speaks() -> None:
    bench = make_bench("decode")
    assert bench.say(generate(max_tokens=12)) == [Accept(S, 0, 0, 0)]
    assert bench.channel.calls == [("expect", PEER, 10)]
    assert bench.num_free == 20 - 6, "3 blocks of prompt, 3 that twelve more tokens may need"
    assert not bench.engine.has_work
    bench.runner.fill(bench.channel.tables, range(1, 11))
    bench.say(arrived())
    answers = bench.run()
    tokens = [t for a in answers if isinstance(a, Tokens) for d in a.deltas for t in d.tokens]
    assert tokens[0] == 42
    (end,) = [a for a in answers if isinstance(a, End)]
    assert (end.count, end.reason, len(tokens)) == (12, "length", 12)
    assert end.timings.prompt_tokens == 0
    assert bench.engine.computed_prompt.routine == 0
    assert bench.num_free == 20


def test_the_first_token_may_be_the_last() -> None:
    bench = make_bench("decode")
    bench.say(generate(max_tokens=1))
    bench.say(arrived())
    answers = bench.step()
    assert [a.deltas[0].tokens for a in answers if isinstance(a, Tokens)] == [(42,)]
    assert [a.count for a in answers if isinstance(a, End)] == [1]
    assert not bench.engine.has_work


@pytest.mark.parametrize("meta", [arrived(position=1), arrived(num_tokens=9)])
def test_a_hand_off_that_contradicts_the_reservation_is_a_failed_transfer(meta: Arrived) -> None:
    bench = make_bench("decode")
    bench.say(generate())
    assert bench.say(meta) == [Failed(S, 0, "transfer", "transfer")]
    assert bench.num_free == 20


def test_blocks_of_an_open_write_window_wait_for_their_proof() -> None:
    bench = make_bench("decode")
    bench.say(generate())
    bench.channel.window = tuple(bench.channel.tables[0][:2])
    bench.say(TransferFailed(TransferKey(S, 0), "transfer"))
    assert (bench.num_free, bench.engine.pool.num_quarantined) == (18, 2)
    bench.clock.now += QUARANTINE_LIMIT_S + 1
    assert "2 blocks in quarantine" in (bench.role.quarantine_fault() or "")
    bench.say(BlocksProven(bench.channel.window))
    assert (bench.num_free, bench.engine.pool.num_quarantined) == (20, 0)
    assert bench.role.quarantine_fault() is None


def test_an_abort_while_the_transfer_runs_revokes_and_says_nothing() -> None:
    bench = make_bench("decode")
    bench.say(generate())
    assert bench.say(Abort(S, 0, "disconnect")) == []
    assert ("revoke", "aborted") in bench.channel.calls
    assert bench.num_free == 20
    assert bench.say(arrived()) == []


def test_decode_refuses_a_source_without_a_lane() -> None:
    bench = make_bench("decode")
    bench.channel.peers = frozenset()
    assert bench.say(generate()) == [Busy(S, 0, "no_lane")]
    assert bench.num_free == 20


@pytest.mark.parametrize(
    ("role", "local", "reason"), [("decode", "fallback", "fallback"), ("colocated", "local", "routine")]
)
def test_a_local_prompt_is_computed_here_and_counted_by_its_reason(role: str, local: str, reason: str) -> None:
    bench = make_bench(role)
    assert bench.say(generate(local=local)) == [Accept(S, 0, 0, 0)]
    answers = bench.run()
    (end,) = [a for a in answers if isinstance(a, End)]
    assert (end.count, end.timings.prompt_tokens) == (3, 10)
    assert getattr(bench.engine.computed_prompt, reason) == 10
    assert bench.num_free == 20


def test_a_drain_fails_what_is_left_and_frees_it() -> None:
    bench = make_bench("decode")
    bench.say(generate())
    bench.say(generate(T, local="local", max_tokens=40))
    bench.step()
    bench.role.fail_rest()
    assert {(a.stream, a.reason) for a in bench.answers() if isinstance(a, Failed)} == {
        (S, "draining"),
        (T, "draining"),
    }
    assert bench.num_free == 20


def test_streams_keep_their_keys() -> None:
    assert StreamKey(S, 0) == TransferKey(S, 0)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_misdirected_message_of_a_higher_attempt_ends_the_lower_and_is_refused(role: str) -> None:
    bench = make_bench(role)
    bench.say(prefill() if role == "prefill" else generate())
    wrong = generate(attempt=1) if role == "prefill" else prefill(attempt=1)
    assert bench.say(wrong) == [Accept(S, 1, 0, 0), Failed(S, 1, "decode", "invalid")]
    assert bench.num_free == 20


# --- cached prefixes --------------------------------------------------------------------------------------------------


def test_prefill_ships_what_it_has_cached_and_computes_the_rest() -> None:
    bench = make_bench("prefill", chunk_tokens=8, min_unit_bytes=LAYOUT.unit_bytes(8, 4))
    bench.say(prefill(S, num_tokens=26))
    bench.run()
    bench.say(Adopted(TransferKey(S, 0), SendTrace(())))
    bench.channel.calls.clear()
    assert bench.say(prefill(T, num_tokens=26)) == [Accept(T, 0, 0, 24)]
    assert bench.channel.pushed() == [(0, 8, 0, 4), (8, 8, 0, 4), (16, 8, 0, 4)], "before anything is computed"
    bench.run()
    assert bench.channel.pushed()[3:] == [(24, 2, 0, 4)]
    (end,) = bench.say(Adopted(TransferKey(T, 0), SendTrace(())))
    assert isinstance(end, PrefillEnd)
    assert end.timings.prompt_tokens == 2
    assert bench.engine.computed_prompt.routine == 28
    assert bench.num_free == 20


def test_cached_tokens_too_few_for_a_unit_join_the_first_chunk() -> None:
    bench = make_bench("prefill", chunk_tokens=8, min_unit_bytes=LAYOUT.unit_bytes(12, 4))
    bench.say(prefill(S, num_tokens=10))
    bench.run()
    bench.say(Adopted(TransferKey(S, 0), SendTrace(())))
    bench.channel.calls.clear()
    assert bench.say(prefill(T, num_tokens=26)) == [Accept(T, 0, 0, 8)]
    assert bench.channel.pushed() == []
    bench.run()
    assert bench.channel.pushed() == [(0, 16, 0, 4), (16, 10, 0, 4)]


@pytest.mark.parametrize("skip", [4, 12, 24])
def test_prefill_ships_from_skip_tokens_on_whatever_it_computes(skip: int) -> None:
    bench = make_bench("prefill", chunk_tokens=8)
    bench.say(prefill(S, num_tokens=14))
    bench.run()
    bench.say(Adopted(TransferKey(S, 0), SendTrace(())))
    bench.channel.calls.clear()
    message = dataclasses.replace(prefill(T, num_tokens=26), skip_tokens=skip)
    assert bench.say(message) == [Accept(T, 0, 0, 12)], "prefill needs its own KV of what decode has"
    bench.run()
    for layer in range(4):
        parts = [(first, num) for first, num, low, count in bench.channel.pushed() if low <= layer < low + count]
        ends = [first + num for first, num in parts]
        assert [first for first, _ in parts] == [skip, *ends[:-1]], "no gap"
        assert ends[-1] == 26
    assert bench.engine.computed_prompt.routine == 14 + 14


def test_a_skip_of_everything_is_invalid() -> None:
    bench = make_bench("prefill")
    message = dataclasses.replace(prefill(), skip_tokens=10)
    assert bench.say(message) == [Accept(S, 0, 0, 0), Failed(S, 0, "decode", "invalid")]
    assert bench.num_free == 20


def test_prefill_s_estimate_counts_uncached_tokens() -> None:
    bench = make_bench("prefill", ttft_target_ms=1000, ms_per_token=25.0)
    bench.say(prefill(S, num_tokens=30))
    bench.run()
    bench.say(Adopted(TransferKey(S, 0), SendTrace(())))
    assert bench.say(prefill(T, num_tokens=20, attempt=5)) == [Accept(T, 5, 0, 16)]
    other = dataclasses.replace(prefill(b"u" * 16), prompt=pack_tokens(list(range(60, 80))))
    assert bench.say(other) == [Busy(b"u" * 16, 0, "prefill_time")]
    assert bench.say(prefill(b"v" * 16, num_tokens=30)) == [Accept(b"v" * 16, 0, 0, 28)], "2 tokens to compute"


def test_decode_pins_what_it_has_and_grants_the_rest() -> None:
    bench = make_bench("decode")
    bench.say(generate(S, max_tokens=1))
    bench.runner.fill(bench.channel.tables, range(1, 11))
    bench.say(arrived())
    bench.run()
    bench.channel.calls.clear()
    assert bench.say(generate(T, num_tokens=14, max_tokens=4)) == [Accept(T, 0, 8, 8)]
    assert bench.channel.calls == [("expect", PEER, 14)]
    assert bench.channel.skip_tokens == 8
    bench.channel.window = tuple(bench.channel.tables[0][2:3])
    bench.say(TransferFailed(TransferKey(T, 0), "transfer"))
    assert (bench.num_free, bench.engine.pool.num_quarantined) == (19, 1)
    assert bench.say(generate(T, num_tokens=14, max_tokens=4, attempt=1, local="fallback")) == [Accept(T, 1, 0, 8)]
    (end,) = [a for a in bench.run() if isinstance(a, End)]
    assert end.timings.prompt_tokens == 6
    assert bench.engine.computed_prompt.fallback == 6


def test_revoked_kv_is_never_found() -> None:
    bench = make_bench("decode")
    bench.say(generate(S))
    bench.say(TransferFailed(TransferKey(S, 0), "transfer"))
    assert bench.say(generate(S, attempt=1)) == [Failed(S, 0, "transfer", "transfer"), Accept(S, 1, 0, 0)][1:]


def test_tenants_and_the_switch() -> None:
    for config, tenant in (({}, b"other"), ({"prefix_cache": False}, b"")):
        bench = make_bench("colocated", **config)
        bench.say(generate(S, local="local"))
        bench.run()
        again = dataclasses.replace(generate(T, local="local"), tenant=tenant)
        assert bench.say(again) == [Accept(T, 0, 0, 0)]
