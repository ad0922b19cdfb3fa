"""`baton explain` shows all nine stages, says what is off and why, and ends with the figures and the diagnosis."""

import copy

import pytest

from cluster.cli.explain_text import render_explain, show_bytes, show_piece
from cluster.diagnosis import Targets

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
}
ROWS = [{"token": 504, "probability": 0.75, "piece": "The"}, {"token": 30, "probability": 0.1, "piece": "ĠA"}]
DOCUMENT = {
    "request": {"id": "r1", "stream": "00", "retries": 0, "local": "none"},
    "prompt": {
        "rendered": "<|im_start|>user\nWhy?<|im_end|>\n",
        "tokens": [{"id": 1, "piece": "<|im_start|>"}, {"id": 4093, "piece": "user"}, {"id": 198, "piece": "Ċ"}],
        "cached_tokens": 0,
    },
    "model": {"config": CONFIG, "vocab_size": 49152, "eos_ids": [2]},
    "sampling": {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 7, "max_tokens": 3},
    "first_token": {
        "token": 504, "position": 0, "vocab": 49152, "before": ROWS, "after": ROWS[:1], "temperature": 0.0,
        "removed": {"greedy": 49151}, "kept": 1, "uniform": None,
    },
    "output": [
        {"id": 504, "piece": "The", "text": "The", "at_ms": 300.0},
        {"id": 9, "piece": "ĠðŁ", "text": "", "at_ms": 350.0},
        {"id": 8, "piece": "ĺĬ", "text": " 😊", "at_ms": 420.0},
    ],
    "timings": {
        "tokenize_ms": 1.0, "queue_ms": 0.1, "ttft_ms": 300.0, "itl_ms": [50.0, 70.0],
        "decode_ms": 120.0, "total_ms": 421.0,
        "prefill": {
            "queued_us": 10, "compute_us": 250_000, "num_chunks": 2, "num_units": 4, "sent_bytes": 138_240,
            "hidden_bytes": 103_680, "exposed_us": 900, "prompt_tokens": 3,
        },
        "decode": {
            "adopt_us": 251_000, "decode_us": 120_000, "num_steps": 3, "received_bytes": 138_240, "num_units": 4,
            "prompt_tokens": 0,
        },
    },
    "facts": {},
    "workers": {
        "prefill": {"pid": 11, "kv_bytes_per_token": 46080},
        "decode": {"pid": 12, "kv_bytes_per_token": 46080},
    },
    "text": "The 😊",
    "finish_reason": "length",
}  # fmt: skip
TARGETS = Targets(ttft_ms=2000, itl_ms=150)
STAGES = [
    "1  Input", "2  Tokenizer", "3  Embedding and position", "4  Transformer blocks", "5  LM head and softmax",
    "6  Sampling",
    "7  Speculative decoding", "8  Detokenizer", "9  Streaming",
]  # fmt: skip


def test_nine_stages_in_order_then_the_figures():
    lines = render_explain(DOCUMENT, TARGETS).splitlines()
    assert [line for line in lines if line[:1].isdigit()] == STAGES
    ends = [line.split("  ")[0] for line in lines[-5:]]
    assert ends == ["TTFT", "ITL", "KV shipped", "hidden transfer", "diagnosis"]


@pytest.mark.parametrize(
    "told",
    [
        "| <|im_start|>user",
        "user(4093) ⏎(198)",
        "[3 tokens, 576 wide]",
        "base 100,000",
        "30 layers of attention (9 heads share 3 KV heads, 64 wide)",
        "46,080 bytes per token, 1,536 per token and layer",
        "prefill (pid 11): 3 prompt tokens in 2 chunk(s), 250.0 ms",
        "prompt tokens computed here: 0",
        "75.00%  The",
        "greedy: no draw",
        "Speculative decoding\n   off (not built yet)",
        "guardrails: off (not built yet)",
        "The|␣😊",
        "1 held back",
        "TTFT             300.0 ms",
        "ITL              60.0 ms median of 2",
        "KV shipped       138,240 bytes (135.00 KiB)",
        "hidden transfer  75% of the bytes",
        "diagnosis        neither target is missed",
    ],
)
def test_it_tells(told):
    assert told in render_explain(DOCUMENT, TARGETS)


def test_each_token_stands_over_its_time():
    lines = render_explain(DOCUMENT, TARGETS).splitlines()
    row = next(index for index, line in enumerate(lines) if line.strip().startswith("The ") and "·" in line)
    assert lines[row + 1].split() == ["300", "50", "70"]


def test_a_colocated_request_ships_nothing():
    document = copy.deepcopy(DOCUMENT)
    document["timings"]["prefill"], document["workers"]["prefill"], document["first_token"] = None, None, None
    document["timings"]["itl_ms"], document["output"] = [], document["output"][:1]
    shown = render_explain(document, TARGETS)
    assert "KV shipped       0 bytes" in shown
    assert "off (the worker sent no facts of the first token)" in shown
    assert "ITL              none: a single token" in shown


def test_a_sampled_token_shows_its_draw():
    document = copy.deepcopy(DOCUMENT)
    document["first_token"] |= {"removed": {"top_k": 49000, "top_p": 100, "min_p": 0}, "kept": 52, "uniform": 0.25}
    shown = render_explain(document, TARGETS)
    assert "removed: top_k 49,000, top_p 100, min_p 0; left: 52" in shown
    assert "drawn with 0.250000" in shown


def test_a_long_prompt_is_shown_in_part():
    document = copy.deepcopy(DOCUMENT)
    document["prompt"]["tokens"] = [{"id": 1, "piece": "x"}] * 1500
    shown = render_explain(document, TARGETS)
    assert "... 1380 more ..." in shown
    assert shown.count("x(1)") == 120


def test_units_and_pieces():
    assert [show_bytes(n) for n in (12, 2048, 3 << 20, 5 << 30)] == ["12 bytes", "2.00 KiB", "3.00 MiB", "5.00 GiB"]
    assert show_piece("Ġa\tb\n") == "␣a⇥b⏎"
