"""State groups with a window: what they hold, what they are promised, what comes back, and what is refused."""

import pytest

from kv_transfer.layout import NULL_BLOCK
from tests.support.fake_model import FakeRunner, continue_text
from workers.engine.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.request import Request
from workers.protocol import SamplingParams, StreamKey


def make_engine(windows: tuple[int | None, ...], num_blocks: int, context: int = 64, **settings) -> Engine:
    given = {"block_tokens": 4, "chunk_tokens": 8, "max_running": 8, "prefix_cache": False} | settings
    config = EngineConfig(num_blocks=num_blocks, max_context_tokens=context, windows=windows, **given)
    return Engine(config, FakeRunner(4, windows=windows))


def make_request(name: int, length: int, max_tokens: int = 8, **fields) -> Request:
    known = [(name * 10 + i) % 97 for i in range(length)]
    key = StreamKey(bytes([name]) * 16, 1)
    return Request(key=key, known=known, num_prompt=length, sampling=SamplingParams(max_tokens=max_tokens), **fields)


def begin(engine: Engine, request: Request, spare: int = 0) -> Request:
    assert engine.reserve(request, engine.config.pages_for(len(request.known)) + spare)
    if not request.adopts:
        engine.start(request.key)
    return request


def run(engine: Engine, request: Request) -> tuple[list[int], int]:
    """(its tokens, the most blocks that were used)."""
    tokens, most = [], 0
    while engine.get(request.key) is not None:
        tokens += [output.token for output in engine.step().outputs if output.key == request.key]
        engine.check_integrity()
        most = max(most, engine.pool.num_used)
    return tokens, most


def held(request: Request, group: int) -> list[int]:
    """Pages of the group that have a block."""
    return [page for page, block in enumerate(request.tables[group]) if block != NULL_BLOCK]


def test_a_context_of_forty_pools_is_served_where_every_layer_has_a_window() -> None:
    engine = make_engine((10,), num_blocks=6, context=1000)
    request = begin(engine, make_request(1, 900, max_tokens=90))
    known = list(request.known)
    tokens, most = run(engine, request)
    assert tokens == continue_text(known, 90, window=10)
    assert most <= 4, "after a step: what 10 positions touch"
    tables = [chunk.tables[0] for plan in engine._runner.plans for chunk in plan.chunks]  # type: ignore[attr-defined]
    assert max(len(table) - table.count(NULL_BLOCK) for table in tables) == 5, "in a step of 8: 17 positions"
    assert engine.pool.num_free == 6


def test_layers_that_keep_all_bound_the_context_and_windows_add_little() -> None:
    engine = make_engine((6, None, 6), num_blocks=33, context=100)
    with pytest.raises(ValueError, match="does not fit the pool of 32 blocks of 4 tokens: it needs 33"):
        make_engine((6, None, 6), num_blocks=32, context=100)
    with pytest.raises(ValueError, match="26 pages of 34 blocks do not fit 80 tokens and a pool of 33"):
        engine.reserve(make_request(1, 80), 26)
    request = begin(engine, make_request(1, 80, max_tokens=20))
    known = list(request.known)
    tokens, most = run(engine, request)
    assert tokens == continue_text(known, 20)
    assert most <= 25 + 2 * 3


def test_what_slid_out_of_a_window_comes_back_page_by_page() -> None:
    engine = make_engine((None, 6), num_blocks=40)
    request = begin(engine, make_request(1, 20))
    seen = []
    for _ in range(3):
        engine.step()
        seen.append((request.computed, held(request, 0), held(request, 1)))
    assert seen == [(8, [0, 1, 2, 3, 4], [0, 1]), (16, [0, 1, 2, 3, 4], [2, 3]), (20, [0, 1, 2, 3, 4], [3, 4])]
    assert request.num_slid == [0, 3]


def test_a_promise_is_kept_against_streams_that_grow() -> None:
    """The pool has blocks, but a prompt in computation may need them for its window: the stream gives way."""
    engine = make_engine((None, 12), num_blocks=19, chunk_tokens=4, context=28)
    stream = begin(engine, make_request(1, 8, max_tokens=20))
    for _ in range(2):
        engine.step()
    assert (stream.computed, stream.num_pages) == (8, 2)
    prompt = begin(engine, make_request(2, 24, max_tokens=4, arrival=1.0), spare=3)
    assert engine.pool.num_available == 19 - 2 - 2 - 9, "its window has no page yet"
    assert engine.num_available_blocks == 1, "five of them are promised to it"
    assert engine.step().preempted == [prompt.key], "the stream needs two, and the youngest gives way"
    engine.check_integrity()
    while stream.status == "running":
        engine.step()
        engine.check_integrity()
    run(engine, prompt)
    assert engine.pool.num_free == 19


def test_a_computed_prompt_is_promised_less() -> None:
    engine = make_engine((5,), num_blocks=20)
    request = begin(engine, make_request(1, 40, max_tokens=9), spare=2)
    assert request.num_promised == 4, "12 positions of a step of 8 tokens"
    for _ in range(5):
        engine.step()
    assert request.computed == 40
    assert request.num_promised == 2, "5 positions"


def test_adopting_takes_what_the_first_decode_step_sees() -> None:
    engine = make_engine((6, None), num_blocks=40)
    request = begin(engine, make_request(1, 30, adopts=True), spare=1)
    assert held(request, 0) == [6, 7], "token 30 sees 25 to 30"
    assert (len(request.tables[0]), held(request, 1)) == (8, list(range(9)))
    engine._runner.fill(request.tables, request.known)  # type: ignore[attr-defined]
    known = list(request.known)
    engine.adopt(request.key, continue_text(known, 1)[0])
    assert run(engine, request)[0] == continue_text(known, 8)
    assert engine.pool.num_free == 40


def test_what_adopts_cannot_compute() -> None:
    engine = make_engine((6,), num_blocks=20)
    request = make_request(1, 30, adopts=True)
    assert engine.reserve(request, 8)
    with pytest.raises(AssertionError, match="what the first decode step sees only"):
        engine.start(request.key)


def test_a_window_page_that_two_requests_share_is_promised_to_both() -> None:
    engine = make_engine((8,), num_blocks=12, prefix_cache=True, context=40)
    first = begin(engine, make_request(1, 24, max_tokens=16))
    for _ in range(3):
        engine.step()
    second = make_request(1, 24, max_tokens=16)
    second.key = StreamKey(b"z" * 16, 1)
    begin(engine, second)
    assert second.computed == 20
    shared = set(first.tables[0]) & set(second.tables[0]) - {NULL_BLOCK}
    assert shared
    assert engine.num_available_blocks == 12 - first.num_promised - second.num_promised
    known = list(first.known[:24])
    outputs = {first.key: [continue_text(known, 1, 8)[0]], second.key: []}
    while engine.has_work:
        for output in engine.step().outputs:
            outputs[output.key].append(output.token)
        engine.check_integrity()
    assert outputs[first.key] == outputs[second.key] == continue_text(known, 16, 8)
