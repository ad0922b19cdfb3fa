"""Losses, hang-ups, deadlines and endings over real sockets: every request ends once and leaves nothing behind."""

import asyncio
import json
import random
import socket
from pathlib import Path

import pytest

from kv_transfer.wire import KeyRing
from router.app import Router
from router.config import RouterConfig
from tests.support.fake_worker import MODEL_ID, FakeWorker
from tests.support.ingress import Ingress, chat_body, parse_events, running_ingress, until
from workers.protocol import Abort, Generate, Resume


async def read_events(ingress: Ingress, **fields: object) -> tuple[int, list[object]]:
    answer = await ingress.chat(**fields)
    return answer.status_code, parse_events(answer.text) if answer.status_code == 200 else [answer.json()]


def test_a_decode_worker_lost_in_the_stream_is_an_error_event_and_no_clean_end(tmp_path: Path) -> None:
    async def story() -> None:
        async with running_ingress(tmp_path, resume_grace_s=0.3) as ingress:
            ingress.say("hello world", eos=False)
            ingress.pair.decode.script.gate_after = 2
            ingress.pair.decode.script.emits.clear()
            answer = asyncio.create_task(read_events(ingress, stream=True))
            await until(lambda: any(len(s.sent) == 2 for s in ingress.pair.decode.streams.values()))
            await ingress.pair.decode.kill()
            status, events = await answer
            assert status == 200
            assert events[-1]["error"]["code"] == "worker_lost"  # type: ignore[index]
            assert "[DONE]" not in events
            assert all(e["choices"][0]["finish_reason"] is None for e in events[:-1])  # type: ignore[index]

    asyncio.run(story())


def test_a_cut_link_resumes_without_loss(tmp_path: Path) -> None:
    async def story() -> None:
        async with running_ingress(tmp_path) as ingress:
            ingress.say("hello the hello the hello", eos=True)
            script = ingress.pair.decode.script
            script.gate_after, script.drop_positions = 3, {1}
            script.emits.clear()
            answer = asyncio.create_task(ingress.chat())
            await until(lambda: any(len(s.sent) == 3 for s in ingress.pair.decode.streams.values()))
            ingress.pair.decode.cut()
            script.emits.set()
            document = (await answer).json()
            assert document["choices"][0]["message"]["content"] == "hello the hello the hello"
            resumes = [m for m in ingress.pair.decode.of(Resume) if m.complete and m.positions]  # type: ignore[attr-defined]
            assert len(resumes) == 1
            assert len(ingress.pair.decode.of(Generate)) == 1
            await ingress.until_idle()

    asyncio.run(story())


def test_a_lost_prefill_worker_is_replaced_before_the_first_token(tmp_path: Path) -> None:
    async def story() -> None:
        async with running_ingress(tmp_path, verdict_s=0.2, local_fallback=False) as ingress:
            ingress.say("fine")
            ingress.pair.prefill.script.emits.clear()
            answer = asyncio.create_task(ingress.chat())
            await until(
                lambda: ingress.router.status()["workers"][0]["pid"] is not None and bool(ingress.pair.decode.streams)
            )  # type: ignore[index]
            await ingress.pair.prefill.kill()
            fresh = FakeWorker("prefill")
            ingress.pair.prefill = fresh
            ingress.pair.join()
            await fresh.start()
            ingress.router.set_workers(ingress.pair.endpoints)
            document = (await answer).json()
            assert document["choices"][0]["message"]["content"] == "fine"
            assert ingress.pair.decode.computed["fallback"] == 0
            await ingress.until_idle()

    asyncio.run(story())


@pytest.mark.parametrize("stage", ["queued", "reserving", "offering", "computing", "decoding"])
def test_a_client_that_hangs_up_frees_the_work_at_every_stage(tmp_path: Path, stage: str) -> None:
    async def story() -> None:
        async with running_ingress(tmp_path) as ingress:
            pair = ingress.pair
            ingress.say("hello world", eos=False)
            pair.decode.script.gate_after = 2
            if stage == "queued":
                pair.decode.state = "draining"
                await until(lambda: ingress.router.status()["workers"][1]["state"] == "draining")  # type: ignore[index]
            held = {
                "reserving": pair.decode.script.accepts,
                "offering": pair.prefill.script.accepts,
                "computing": pair.prefill.script.emits,
                "decoding": pair.decode.script.emits,
            }.get(stage)
            if held is not None:
                held.clear()
            task = asyncio.create_task(ingress.chat(stream=True))
            await until(lambda: ingress.router.status()["open_streams"] == 1)
            if stage == "decoding":
                await until(lambda: any(len(s.sent) == 2 for s in pair.decode.streams.values()))
            elif stage != "queued":
                await until(lambda: bool(pair.decode.of(Generate)))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await until(lambda: ingress.router.status()["open_streams"] == 0, timeout_s=1)
            for gate in (pair.decode.script.accepts, pair.prefill.script.accepts):
                gate.set()
            await ingress.until_idle()
            assert ingress.router.status()["queued"] == 0

    asyncio.run(story())


def test_a_client_that_reads_nothing_is_cut_and_its_work_freed(tmp_path: Path) -> None:
    async def story() -> None:
        async with running_ingress(tmp_path, slow_client_s=0.3) as ingress:
            script = ingress.pair.decode.script
            script.tokens, script.gate_after = (
                [10] * 8000,
                7500,
            )  # more than the socket takes, then only an ABORT ends it
            script.emits.clear()
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.connect(("127.0.0.1", ingress.port))
                body = json.dumps(chat_body(stream=True, max_tokens=8000)).encode()
                client.sendall(
                    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
                )
                client.sendall(body)
                await until(lambda: bool(ingress.pair.decode.of(Abort)), timeout_s=20)
            assert [m.reason for m in ingress.pair.decode.of(Abort)] == ["slow_client"]  # type: ignore[attr-defined]
            await ingress.until_idle()

    asyncio.run(story())


def test_deadlines_end_a_waiting_request(tmp_path: Path) -> None:
    async def story() -> None:
        async with running_ingress(tmp_path, first_token_s=0.3, progress_s=0.3) as ingress:
            ingress.pair.prefill.script.emits.clear()
            late = await ingress.chat(stream=True)
            assert (late.status_code, late.json()["error"]["code"]) == (503, "first_token_deadline")
            await ingress.until_idle()
            ingress.pair.prefill.script.emits.set()
            ingress.pair.decode.script.gate_after = 1
            ingress.pair.decode.script.emits.clear()
            ingress.say("hello world")
            _, events = await read_events(ingress, stream=True)
            assert events[-1]["error"]["code"] == "progress_deadline"  # type: ignore[index]
            timed = await ingress.client.post(
                "/v1/chat/completions", json=chat_body(), headers={"x-baton-timeout-s": "0.2"}
            )
            assert (timed.status_code, timed.json()["error"]["code"]) == (504, "total_deadline")
            await ingress.until_idle()

    asyncio.run(story())


def test_a_request_waits_for_a_worker_that_is_still_to_come(tmp_path: Path) -> None:
    async def story() -> None:
        async with running_ingress(tmp_path, ready=False) as ingress:
            ingress.router.set_workers([])
            ingress.say("fine")
            task = asyncio.create_task(ingress.chat())
            ingress.router.set_workers(ingress.pair.endpoints)
            assert (await task).status_code == 200

    asyncio.run(story())


def test_without_workers_and_hope_a_request_is_refused_at_once(tmp_path: Path) -> None:
    async def story() -> None:
        async with running_ingress(tmp_path) as ingress:
            await ingress.pair.prefill.kill()
            await ingress.pair.decode.kill()
            ingress.router.set_workers([], may_come=False)
            await until(lambda: not ingress.router.status()["workers"])
            answer = await ingress.chat()
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_capacity")
            assert "retry-after" in answer.headers
            assert (await ingress.client.get("/live")).status_code == 200
            assert (await ingress.client.get("/ready")).status_code == 200
            assert (await ingress.client.get("/health")).json()["error"]["code"] == "no_decode_worker"

    asyncio.run(story())


def test_a_full_queue_answers_429(tmp_path: Path) -> None:
    async def story() -> None:
        async with running_ingress(tmp_path, max_queued=2) as ingress:
            ingress.pair.decode.state = "draining"
            await until(lambda: ingress.router.status()["workers"][1]["state"] == "draining")  # type: ignore[index]
            waiting = [asyncio.create_task(ingress.chat()) for _ in range(2)]
            await until(lambda: ingress.router.status()["queued"] == 2)
            assert ingress.router.status()["queue"] == {"no_decode_worker": 2}
            full = await ingress.chat()
            assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
            assert int(full.headers["retry-after"]) >= 1
            assert (await ingress.client.get("/ready")).status_code == 503
            ingress.pair.decode.state = "ready"
            assert [a.status_code for a in await asyncio.gather(*waiting)] == [200, 200]

    asyncio.run(story())


def test_ending_streams_sends_an_error_event_and_refuses_what_comes(tmp_path: Path) -> None:
    async def story() -> None:
        async with running_ingress(tmp_path) as ingress:
            ingress.say("hello world", eos=False)
            ingress.pair.decode.script.gate_after = 2
            ingress.pair.decode.script.emits.clear()
            streamed = asyncio.create_task(read_events(ingress, stream=True))
            whole = asyncio.create_task(ingress.chat())
            await until(lambda: sum(len(s.sent) == 2 for s in ingress.pair.decode.streams.values()) == 2)
            await ingress.router.end_streams("test")
            _, events = await streamed
            assert events[-1]["error"]["code"] == "shutting_down"  # type: ignore[index]
            assert (await whole).status_code == 503
            assert (await ingress.chat()).status_code == 503
            await ingress.until_idle()

    asyncio.run(story())


def test_two_hundred_random_disconnects_leave_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        draw = random.Random(7)
        async with running_ingress(tmp_path, max_queued=1000) as ingress:
            ingress.say("hello the world of the hello", eos=True)
            ingress.pair.decode.script.pause_s = 0.002

            async def visit() -> None:
                try:
                    async with asyncio.timeout(draw.random() * 0.25):
                        await ingress.chat(stream=bool(draw.getrandbits(1)))
                except TimeoutError:
                    pass

            for _ in range(10):
                await asyncio.gather(*(visit() for _ in range(20)))
            await until(lambda: ingress.router.status()["open_streams"] == 0)
            await ingress.until_idle()
            assert ingress.router.status()["queued"] == 0
            answer = await ingress.chat()
            assert answer.json()["choices"][0]["message"]["content"] == "hello the world of the hello"

    asyncio.run(story())


def test_an_ingress_with_another_secret_is_refused(tmp_path: Path) -> None:
    async def story() -> None:
        async with running_ingress(tmp_path) as ingress:
            config = RouterConfig(model_id=MODEL_ID, model_path=str(tmp_path))
            stranger = Router(config, KeyRing((("k1", b"x" * 32),)))
            await stranger.start()
            stranger.set_workers(ingress.pair.endpoints)
            await until(lambda: ingress.pair.decode.num_refused > 1)
            assert {w["state"] for w in stranger.status()["workers"]} == {"unreachable"}  # type: ignore[attr-defined,union-attr]
            await stranger.close()

    asyncio.run(story())


def test_a_silent_worker_gets_no_new_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.link.SUSPECT_S", 0.3)

    async def story() -> None:
        async with running_ingress(tmp_path) as ingress:
            ingress.say("fine")
            ingress.pair.decode.is_silent = True
            await until(lambda: ingress.router.status()["workers"][1]["state"] == "suspect")  # type: ignore[index]
            assert (await ingress.client.get("/health")).status_code == 503
            task = asyncio.create_task(ingress.chat())
            await until(lambda: ingress.router.status()["queued"] == 1)
            assert ingress.pair.decode.of(Generate) == []
            ingress.pair.decode.is_silent = False
            assert (await task).status_code == 200

    asyncio.run(story())
