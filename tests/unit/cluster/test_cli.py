"""The command line: frozen help, plain errors, the texts that commands print from what a server answers."""

import io
import re

import httpx
import pytest

from cluster.cli import chat
from cluster.cli.chat import make_prompt
from cluster.cli.client import ServerUnreachable, ask, find_url, read_url
from cluster.cli.main import main
from cluster.cli.progress import Terminal
from cluster.cli.status import render_status

COMMANDS = ["serve", "chat", "explain", "config", "validate", "status", "scale", "fetch"]


def test_the_commands_are_frozen(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    shown = capsys.readouterr().out
    assert left.value.code == 0
    listed = [
        line.split()[0] for line in shown.splitlines() if line.startswith("    ") and not line.startswith("     ")
    ]
    assert listed == COMMANDS
    assert "baton explain" in shown


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help_with_examples(command, capsys):
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    shown = capsys.readouterr().out
    assert left.value.code == 0
    assert f"examples:\n  baton {command}" in shown


@pytest.mark.parametrize(
    "arguments", [[], ["dance"], ["serve", "--port", "0"], ["serve", "--port", "http"], ["explain"]]
)
def test_wrong_usage_is_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert "usage: baton" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["status"], ["status", "--json"], ["explain", "hi"], ["chat"]])
def test_without_a_server_the_error_is_plain(command, capsys, monkeypatch):
    monkeypatch.setattr("cluster.runtime.find_runs", lambda: iter(()))
    assert main(command) == 1
    shown = capsys.readouterr()
    assert shown.err == (
        "baton: error: no server runs on this machine; start one with `make serve` (or `baton serve`), or give --url\n"
    )
    assert shown.out == ""


def test_a_given_url_is_taken_with_or_without_the_version_path():
    assert find_url("http://127.0.0.1:9000/v1/") == "http://127.0.0.1:9000"
    assert find_url("http://127.0.0.1:9000") == "http://127.0.0.1:9000"


def client_of(handler) -> httpx.Client:
    return httpx.Client(base_url="http://server", transport=httpx.MockTransport(handler))


def test_the_servers_own_words_are_told():
    refused = {"error": {"message": "no such model", "type": "invalid_request_error", "param": "model", "code": "x"}}
    client = client_of(lambda request: httpx.Response(404, json=refused))
    with client, pytest.raises(ServerUnreachable, match="404 no such model"):
        ask(client, "GET", "/v1/models")


def test_a_server_that_is_gone_is_told():
    def refuse(request):
        raise httpx.ConnectError("refused")

    with client_of(refuse) as client, pytest.raises(ServerUnreachable, match="does not answer"):
        ask(client, "GET", "/v1/models")


WORKER = {
    "pool": "prefill",
    "role": "prefill",
    "pid": 42,
    "ranks": 1,
    "state": "ready",
    "blocks_in_use": 3,
    "blocks_total": 2048,
    "blocks_quarantined": 0,
    "running": 1,
    "waiting": 0,
    "kv_over": ["shm: both on one host"],
}


def test_status_is_a_table():
    unknown = {**WORKER, "pool": "decode", "role": "decode", "state": "unreachable", "pid": None, "blocks_in_use": None}
    lines = render_status({"workers": [WORKER, unknown], "queue": {"prefill_time": 2}, "open_streams": 5}).splitlines()
    assert lines[0].split()[:3] == ["pool", "role", "pid"]
    assert lines[1].split() == [
        "prefill",
        "prefill",
        "42",
        "1",
        "ready",
        "3",
        "of",
        "2048",
        "0",
        "1",
        "0",
        "shm:",
        "both",
        "on",
        "one",
        "host",
    ]
    assert lines[2].split()[2] == "-"
    assert lines[-1] == "queue: 2 for prefill_time; open streams: 5"


def test_status_names_a_pool_without_a_worker():
    for disaggregation, pools in (("always", ["prefill", "decode"]), ("never", ["colocated"])):
        lines = render_status({"workers": [], "disaggregation": disaggregation}).splitlines()
        assert [line.split()[0] for line in lines[1 : 1 + len(pools)]] == pools
        assert all("no worker" in line for line in lines[1 : 1 + len(pools)])


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000"),
    ],
)
def test_addresses_are_read_as_people_write_them(given, url):
    assert read_url(given) == url


@pytest.mark.parametrize("given", ["ftp://x", "http://", "://x"])
def test_what_is_no_address_is_named(given):
    with pytest.raises(ServerUnreachable, match="is no address"):
        read_url(given)


def test_the_prompt_of_the_chat_hides_its_escapes_from_line_editing():
    assert make_prompt(False) == "you> "
    visible = re.sub("\x01[^\x02]*\x02", "", make_prompt(True))
    assert visible == "you> "


def stream_of(*events: str) -> httpx.Client:
    body = "".join(f"data: {event}\n\n" for event in events)
    return client_of(lambda request: httpx.Response(200, text=body))


def test_chat_reads_the_pieces_of_a_stream():
    said = '{"choices":[{"delta":{"role":"assistant","content":"Hel"}}]}'
    more = '{"choices":[{"delta":{"content":"lo"},"finish_reason":null}]}'
    with stream_of(said, more, '{"choices":[{"delta":{},"finish_reason":"stop"}]}', "[DONE]") as client:
        assert list(chat.stream_chat(client, {})) == ["Hel", "lo"]


def test_chat_tells_an_error_event():
    said = '{"choices":[{"delta":{"content":"Hel"}}]}'
    with stream_of(said, '{"error":{"message":"worker lost","code":"worker_lost"}}') as client:
        pieces = chat.stream_chat(client, {})
        assert next(pieces) == "Hel"
        with pytest.raises(ServerUnreachable, match="worker lost"):
            next(pieces)


def test_a_conversation_remembers_forgets_and_leaves(monkeypatch):
    asked, typed = [], iter(["hello", "again", "/new", "third", "/help", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    monkeypatch.setattr(chat, "stream_chat", lambda client, body: asked.append(body["messages"]) or iter(["fine"]))
    options = type("Options", (), {"system": "be kind", "temperature": 0.0, "max_tokens": 9})
    screen = io.StringIO()
    with client_of(lambda request: httpx.Response(200)) as client:
        chat._Conversation(client, "smollm2-135m", options, Terminal(screen)).run()
    assert [[message["content"] for message in messages] for messages in asked] == [
        ["be kind", "hello"],
        ["be kind", "hello", "fine", "again"],
        ["be kind", "third"],
    ]
    assert "(forgotten)" in screen.getvalue()


def test_ctrl_c_stops_an_answer_and_keeps_what_was_said(monkeypatch):
    def interrupted(client, body):
        yield "half"
        raise KeyboardInterrupt

    asked, typed = [], iter(["hello", "go on", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    monkeypatch.setattr(
        chat, "stream_chat", lambda client, body: asked.append(body["messages"]) or interrupted(client, body)
    )
    options = type("Options", (), {"system": None, "temperature": 0.0, "max_tokens": 9})
    screen = io.StringIO()
    with client_of(lambda request: httpx.Response(200)) as client:
        chat._Conversation(client, "smollm2-135m", options, Terminal(screen)).run()
    assert [message["content"] for message in asked[1]] == ["hello", "half", "go on"]
    assert "half (stopped)" in screen.getvalue()
