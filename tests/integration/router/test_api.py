"""The OpenAI API over real sockets: answers, streams, errors, the `openai` client. Workers are fakes on the real front
link.
"""

import asyncio
import json
from pathlib import Path

import openai
import pytest

from router.errors import ApiError
from tests.support.fake_worker import MODEL_ID, prompt_of
from tests.support.ingress import chat_body, parse_events, running_ingress
from workers.protocol import Generate

TEXT = "hello thé 🙂 end"


def test_whole_and_streamed_answers_are_the_same_text(tmp_path: Path) -> None:
    async def story() -> None:
        async with running_ingress(tmp_path) as ingress:
            ingress.say(TEXT)
            whole = (await ingress.chat()).json()
            choice = whole["choices"][0]
            assert (choice["message"]["content"], choice["finish_reason"]) == (TEXT, "stop")
            events = parse_events((await ingress.chat(stream=True, stream_options={"include_usage": True})).text)
            *chunks, usage, done = events
            assert done == "[DONE]"
            assert usage["choices"] == []
            assert usage["usage"] == whole["usage"]
            deltas = [c["choices"][0]["delta"] for c in chunks]
            assert deltas[0]["role"] == "assistant"
            assert deltas[0]["content"]
            assert all("role" not in d for d in deltas[1:])
            assert "".join(d.get("content", "") for d in deltas) == TEXT
            assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
            assert all(c["usage"] is None for c in chunks)
            await ingress.until_idle()

    asyncio.run(story())


def test_usage_counts_and_length(tmp_path: Path) -> None:
    async def story() -> None:
        async with running_ingress(tmp_path) as ingress:
            ingress.say("hello hello hello", eos=False)
            answer = (await ingress.chat(max_tokens=2)).json()
            assert answer["choices"][0]["finish_reason"] == "length"
            (generate,) = ingress.pair.decode.of(Generate)
            assert isinstance(generate, Generate)
            assert answer["usage"]["prompt_tokens"] == len(prompt_of(generate))
            assert answer["usage"]["completion_tokens"] == 2
            plain = (await ingress.client.post("/v1/completions", json={"model": MODEL_ID, "prompt": [5, 6, 7]})).json()
            assert plain["object"] == "text_completion"
            assert plain["usage"]["prompt_tokens"] == 3
            assert prompt_of(ingress.pair.decode.of(Generate)[-1]) == [5, 6, 7]  # type: ignore[arg-type]

    asyncio.run(story())


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_the_work_and_do_not_leak(tmp_path: Path, stream: bool) -> None:
    async def story() -> None:
        async with running_ingress(tmp_path) as ingress:
            ingress.say("hello the end of the story", eos=False)
            ingress.pair.decode.script.emits.clear()
            ingress.pair.decode.script.gate_after = 12  # after "hello the en" decode waits: only an ABORT can end it
            ingress.pair.prefill.script.emits.set()
            answer = await ingress.chat(stream=stream, stop=["xyz", " en"])
            if stream:
                *chunks, _ = parse_events(answer.text)
                text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
                reason = chunks[-1]["choices"][0]["finish_reason"]
            else:
                text, reason = (
                    answer.json()["choices"][0]["message"]["content"],
                    answer.json()["choices"][0]["finish_reason"],
                )
            assert (text, reason) == ("hello the", "stop")
            await ingress.until_idle()

    asyncio.run(story())


BAD = [
    (b"{", 400, None),
    (b"\xff\xfe\xff", 400, None),
    (b"[" * 50_000, 400, None),
    (b'{"model":' * 50_000, 400, None),
    (b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"temperature":NaN}', 400, None),
    (b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"temperature":1e999}', 400, "temperature"),
    (json.dumps(chat_body(model="gpt-9")).encode(), 404, "model"),
    (json.dumps(chat_body(max_tokens=0)).encode(), 400, "max_tokens"),
    (json.dumps(chat_body(max_tokens=10**12)).encode(), 400, "max_tokens"),
    (json.dumps(chat_body(max_tokens=8192)).encode(), 400, "max_tokens"),
    (json.dumps(chat_body(messages=[{"role": "user", "content": "x " * 5000}])).encode(), 400, "messages"),
    (json.dumps(chat_body(stop=["a"] * 300)).encode(), 400, "stop"),
    (b'{"model":"tiny","messages":[{"role":"user","content":"' + b"x" * (10 << 20) + b'"}]}', 413, None),
]


def test_bad_input_is_the_clients_error_and_kills_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        async with running_ingress(tmp_path) as ingress:
            for raw, status, param in BAD:
                answer = await ingress.client.post("/v1/chat/completions", content=raw)
                error = answer.json()["error"]
                assert (answer.status_code, error["param"]) == (status, param), (raw[:60], error)
                assert set(error) == {"message", "type", "param", "code"}
                assert error["code"]
                assert error["message"]
            over = await ingress.client.post("/v1/completions", json={"model": MODEL_ID, "prompt": [1 << 40]})
            assert (over.status_code, over.json()["error"]["param"]) == (400, "prompt[0]")
            too_long = await ingress.chat(messages=[{"role": "user", "content": "x " * 5000}])
            assert too_long.json()["error"]["code"] == "context_length_exceeded"
            for value in ("0", "-1", "nan", "inf", "soon", "1e9"):
                answer = await ingress.client.post(
                    "/v1/chat/completions", json=chat_body(), headers={"x-baton-timeout-s": value}
                )
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-baton-timeout-s")
            ingress.say("fine")
            assert (await ingress.chat()).status_code == 200

    asyncio.run(story())


def test_a_chunked_body_over_the_limit_is_refused_without_a_declared_length(tmp_path: Path) -> None:
    async def parts():
        for _ in range(40):
            yield b"x" * (1 << 16)

    async def story() -> None:
        async with running_ingress(tmp_path) as ingress:
            answer = await ingress.client.post("/v1/chat/completions", content=parts())
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")

    asyncio.run(story())


def test_any_content_type_is_json_and_foreign_origins_are_refused(tmp_path: Path) -> None:
    async def story() -> None:
        async with running_ingress(tmp_path) as ingress:
            ingress.say("fine")
            own = f"http://127.0.0.1:{ingress.port}"
            cases = [
                ({"content-type": "application/x-www-form-urlencoded"}, 200),
                ({"content-type": "nonsense"}, 200),
                ({"origin": own}, 200),
                ({"origin": "http://evil.example"}, 403),
                ({"origin": "null"}, 403),
                ({"origin": "http://127.0.0.1:1"}, 403),
                ({"origin": "http://127.0.0.1:x"}, 403),
            ]
            for headers, status in cases:
                answer = await ingress.client.post(
                    "/v1/chat/completions", content=json.dumps(chat_body()), headers=headers
                )
                assert answer.status_code == status, headers
            assert (
                await ingress.client.get("/baton/status", headers={"origin": "http://evil.example"})
            ).status_code == 403

    asyncio.run(story())


def test_a_rebound_host_name_is_refused_where_hosts_are_listed(tmp_path: Path) -> None:
    async def story() -> None:
        async with running_ingress(tmp_path, allowed_hosts=("localhost", "127.0.0.1", "::1")) as ingress:
            ingress.say("fine")
            for host, status in (
                (f"127.0.0.1:{ingress.port}", 200),
                (f"localhost:{ingress.port}", 200),
                ("[::1]", 200),
                (f"evil.example:{ingress.port}", 403),
                ("127.0.0.1.evil.example", 403),
                ("[", 403),
            ):
                for origin in ({}, {"origin": f"http://{host}"}):
                    answer = await ingress.client.get("/baton/status", headers={"host": host, **origin})
                    assert answer.status_code == status, (host, origin)

    asyncio.run(story())


def test_every_route_answers_json(tmp_path: Path) -> None:
    async def story() -> None:
        async with running_ingress(tmp_path) as ingress:
            get = ingress.client.get
            assert (await get("/live")).json() == {"status": "live"}
            assert (await get("/ready")).json()["status"] == "ready"
            assert (await get("/health")).json() == {"status": "healthy"}
            assert (await get("/version")).json()["version"]
            assert [m["id"] for m in (await get("/v1/models")).json()["data"]] == [MODEL_ID]
            assert (await get(f"/v1/models/{MODEL_ID}")).json()["id"] == MODEL_ID
            assert (await get("/v1/models/other")).json()["error"]["code"] == "model_not_found"
            assert (await get("/nope")).json()["error"]["code"] == "unknown_url"
            wrong = await get("/v1/chat/completions")
            assert (wrong.status_code, wrong.headers["allow"], wrong.json()["error"]["code"]) == (
                405,
                "POST",
                "method_not_allowed",
            )
            head = await ingress.client.head("/live")
            assert (head.status_code, head.content) == (200, b"")
            status = (await get("/baton/status")).json()
            assert [w["role"] for w in status["workers"]] == ["prefill", "decode"]
            assert all(w["blocks_in_use"] == 0 and w["blocks_total"] == 1024 for w in status["workers"])

    asyncio.run(story())


def test_the_openai_client_streams_and_meets_errors_of_its_own_kinds(tmp_path: Path) -> None:
    async def story() -> None:
        async with running_ingress(tmp_path) as ingress:
            ingress.say(TEXT)
            client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{ingress.port}/v1", api_key="none", max_retries=0)
            async with client:
                messages = [{"role": "user", "content": "hi"}]
                whole = await client.chat.completions.create(model=MODEL_ID, messages=messages)  # type: ignore[arg-type]
                assert whole.choices[0].message.content == TEXT
                again = [*messages, whole.choices[0].message.model_dump(), {"role": "user", "content": "more"}]
                text = ""
                async for chunk in await client.chat.completions.create(model=MODEL_ID, messages=again, stream=True):  # type: ignore[call-overload]
                    text += chunk.choices[0].delta.content or ""
                assert text == TEXT
                plain = await client.completions.create(model=MODEL_ID, prompt="hi", max_tokens=300)
                assert plain.choices[0].text == TEXT
                assert [m.id async for m in client.models.list()] == [MODEL_ID]
                with pytest.raises(openai.NotFoundError) as missing:
                    await client.chat.completions.create(model="other", messages=messages)  # type: ignore[arg-type]
                assert missing.value.code == "model_not_found"
                with pytest.raises(openai.BadRequestError) as bad:
                    await client.chat.completions.create(model=MODEL_ID, messages=messages, n=300)  # type: ignore[arg-type]
                assert bad.value.param == "n"

    asyncio.run(story())


def test_explain_tells_every_stage(tmp_path: Path) -> None:
    async def story() -> None:
        async with running_ingress(tmp_path) as ingress:
            ingress.say("hello é")
            document = (await ingress.client.post("/baton/explain", json=chat_body(max_tokens=20))).json()
            assert document["text"] == "hello é"
            assert document["prompt"]["rendered"].startswith("<|im_start|>user")
            assert document["prompt"]["tokens"][0] == {"id": 1, "piece": "<|im_start|>"}
            assert "".join(row["text"] for row in document["output"]) == "hello é"
            assert len(document["timings"]["itl_ms"]) == len(document["output"]) - 1
            assert document["timings"]["prefill"]["sent_bytes"] == 64
            assert document["timings"]["decode"]["num_steps"] == len(document["output"])
            assert document["model"]["config"]["num_hidden_layers"] == 2
            assert document["workers"]["prefill"]["role"] == "prefill"
            refused = await ingress.client.post(
                "/baton/explain", json=chat_body(), headers={"origin": "http://evil.example"}
            )
            assert refused.status_code == 403

    asyncio.run(story())


def test_a_pool_is_resized_by_whoever_was_given_for_it(tmp_path: Path) -> None:
    asked: list[tuple[str, int]] = []

    async def resize(pool: str, replicas: int) -> None:
        if pool == "nope":
            raise ApiError("invalid_request", "There is no pool 'nope'.", param="pool")
        asked.append((pool, replicas))

    async def story() -> None:
        async with running_ingress(tmp_path, resize=resize) as ingress:
            answer = await ingress.client.post("/baton/scale", json={"pool": "decode", "replicas": 3})
            assert (answer.status_code, answer.json()) == (200, {"pool": "decode", "replicas": 3})
            for body, param in (
                ({"pool": "nope", "replicas": 3}, "pool"),
                ({"pool": "decode", "replicas": 0}, "replicas"),
                ({"pool": "decode", "replicas": 65}, "replicas"),
                ({"pool": "decode", "replicas": "3"}, "replicas"),
                ({"pool": "decode"}, "replicas"),
                ({"pool": "decode", "replicas": 3, "now": True}, "now"),
            ):
                refused = await ingress.client.post("/baton/scale", json=body)
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), body
            foreign = {"origin": "http://evil.example"}
            refused = await ingress.client.post("/baton/scale", json={"pool": "decode", "replicas": 2}, headers=foreign)
            assert refused.status_code == 403
        assert asked == [("decode", 3)]

    asyncio.run(story())


def test_without_anybody_to_resize_pools_the_route_says_so(tmp_path: Path) -> None:
    async def story() -> None:
        async with running_ingress(tmp_path) as ingress:
            answer = await ingress.client.post("/baton/scale", json={"pool": "decode", "replicas": 3})
            assert answer.status_code == 404

    asyncio.run(story())
