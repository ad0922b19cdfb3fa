"""The nine stages of one request as text, from the document of `POST /baton/explain`. Pure.

A stage that this version does not have says `off` and why.
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from cluster.diagnosis import Measured, Targets, diagnose
from workers.model.arch import DecoderSpec, make_spec, rotation_angles

Document = Mapping[str, Any]
WIDTH = 100
MAX_PIECES = 120
"""A longer prompt or answer is shown with its middle left out."""
NUM_ANGLES = 4


def render_explain(document: Document, targets: Targets) -> str:
    """Every stage, then what it cost and the diagnosis."""
    spec = make_spec(document["model"]["config"])
    stages = (
        _input(document),
        _tokenizer(document),
        _embedding(document, spec),
        _blocks(document, spec),
        _softmax(document),
        _sampling(document),
        _speculative(),
        _detokenizer(document),
        _streaming(document),
    )
    names = ("Input", "Tokenizer", "Embedding and position", "Transformer blocks", "LM head and softmax", "Sampling",
             "Speculative decoding", "Detokenizer", "Streaming")  # fmt: skip
    lines: list[str] = []
    for number, (name, stage) in enumerate(zip(names, stages, strict=True), 1):
        lines += [f"{number}  {name}", *(f"   {line}" for line in stage), ""]
    return "\n".join([*lines, *_summary(document, targets)])


def _input(document: Document) -> Iterator[str]:
    rendered = document["prompt"]["rendered"]
    yield f"the chat template made {len(rendered):,} characters of the messages:"
    for line in rendered.splitlines():
        yield f"| {line}"
    yield "guardrails: off (not built yet)"


def _tokenizer(document: Document) -> Iterator[str]:
    tokens = document["prompt"]["tokens"]
    yield f"{len(tokens):,} tokens of a vocabulary of {document['model']['vocab_size']:,}; spaces shown as ␣"
    yield from _wrap(_elide([f"{show_piece(token['piece'])}({token['id']})" for token in tokens]))


def _embedding(document: Document, spec: DecoderSpec) -> Iterator[str]:
    num_tokens = len(document["prompt"]["tokens"])
    yield f"each id picks a row: [{num_tokens:,} tokens, {spec.hidden_size} wide]"
    if spec.rope is None:
        yield "no rotary positions in this architecture"
        return
    scaling = spec.rope.kind if spec.rope.kind != "default" else "no scaling"
    yield f"RoPE turns each query and key by its position: base {spec.rope.theta:,.0f}, {scaling}"
    if (angles := rotation_angles(spec.rope, num_tokens - 1)) is not None:
        shown = ", ".join(f"{angle:.4g}" for angle in angles[:NUM_ANGLES])
        turns = f"{shown}, ... {angles[-1]:.2g} radians"
        yield f"at position {num_tokens - 1} one head turns its {len(angles)} pairs by {turns}"


def _blocks(document: Document, spec: DecoderSpec) -> Iterator[str]:
    num_tokens, per_token = len(document["prompt"]["tokens"]), _kv_bytes_per_token(document, spec)
    yield (
        f"{spec.num_layers} layers of attention ({spec.num_heads} heads share {spec.num_kv_heads} KV heads,"
        f" {spec.head_dim} wide) and feed-forward ({spec.intermediate_size:,} wide)"
    )
    yield (
        f"KV cache: {per_token:,} bytes per token, {per_token // spec.num_layers:,} per token and layer;"
        f" {show_bytes(num_tokens * per_token)} for this prompt"
    )
    times = document["timings"]
    if prefill := times["prefill"]:
        yield (
            f"prefill (pid {_pid(document, 'prefill')}): {prefill['prompt_tokens']:,} prompt tokens in"
            f" {prefill['num_chunks']} chunk(s), {prefill['compute_us'] / 1000:,.1f} ms"
        )
        yield f"hand-off: {prefill['num_units']} unit(s), {show_bytes(prefill['sent_bytes'])} while and after computing"
    if decode := times["decode"]:
        computed = decode["prompt_tokens"]
        yield (
            f"decode (pid {_pid(document, 'decode')}): {decode['num_steps']} steps,"
            f" {decode['decode_us'] / 1000:,.1f} ms; prompt tokens computed here: {computed}"
        )
    yield "attention weights of a head: off (the workers do not send them yet)"


def _softmax(document: Document) -> Iterator[str]:
    first = document["first_token"]
    if first is None:
        yield "off (the worker sent no facts of the first token)"
        return
    yield f"the last hidden state scores all {first['vocab']:,} entries; the five likeliest first tokens:"
    yield from _candidates(first["before"])


def _sampling(document: Document) -> Iterator[str]:
    first, settings = document["first_token"], document["sampling"]
    names = ("temperature", "top_k", "top_p", "min_p", "seed")
    yield ", ".join(f"{name} {settings[name]}" for name in names)
    if first is None:
        return
    removed = ", ".join(f"{name} {count:,}" for name, count in first["removed"].items())
    yield f"removed: {removed}; left: {first['kept']:,}"
    yield from _candidates(first["after"])
    uniform = first["uniform"]
    yield (
        "greedy: no draw, the likeliest wins"
        if uniform is None
        else f"drawn with {uniform:.6f}: token {first['token']}"
    )


def _speculative() -> Iterator[str]:
    yield "off (not built yet): every token takes one pass of the model"


def _detokenizer(document: Document) -> Iterator[str]:
    output = document["output"]
    held = sum(1 for row in output if not row["text"])
    yield f"{len(output)} tokens to text, never half a character ({held} held back until the next); as they joined:"
    yield from _wrap(_elide([show_piece(row["text"]) for row in output if row["text"]], "|"), "|")


def _streaming(document: Document) -> Iterator[str]:
    output, gaps = document["output"], document["timings"]["itl_ms"]
    reason = document["finish_reason"]
    yield f"{len(output)} tokens, finish reason {reason}; below each its ITL in ms, below the first its TTFT"
    times = [document["timings"]["ttft_ms"], *gaps]
    cells = [(show_piece(row["text"]) or "·", f"{at:.0f}") for row, at in zip(output, times, strict=False)]
    yield from _two_rows(cells[:MAX_PIECES])
    yield "output guardrails: off (not built yet)"


def _summary(document: Document, targets: Targets) -> Iterator[str]:
    times = document["timings"]
    gaps, prefill = times["itl_ms"], times["prefill"]
    itl = median(gaps) if gaps else None
    yield f"TTFT             {times['ttft_ms']:,.1f} ms"
    yield (
        f"ITL              {itl:,.1f} ms median of {len(gaps)}"
        if itl is not None
        else "ITL              none: a single token"
    )
    if prefill and prefill["sent_bytes"]:
        share = prefill["hidden_bytes"] / prefill["sent_bytes"]
        yield f"KV shipped       {prefill['sent_bytes']:,} bytes ({show_bytes(prefill['sent_bytes'])})"
        yield f"hidden transfer  {share:.0%} of the bytes had left before the last layer's KV was computed"
    else:
        yield "KV shipped       0 bytes: the prompt was computed where the tokens were generated"
        yield "hidden transfer  off (nothing was shipped)"
    measured = Measured(times["ttft_ms"], itl, times["decode_ms"] or 0.0)
    yield f"diagnosis        {diagnose(measured, targets).line}"


def show_piece(piece: str) -> str:
    """A piece with its spaces and line ends visible."""
    return piece.replace("Ġ", "␣").replace("Ċ", "⏎").replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")


def show_bytes(count: int) -> str:
    """In the largest binary unit that leaves at least one."""
    value = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if value < 1024:
            return f"{value:,.0f} {unit}" if unit == "bytes" else f"{value:,.2f} {unit}"
        value /= 1024
    return f"{value:,.2f} GiB"


def _kv_bytes_per_token(document: Document, spec: DecoderSpec) -> int:
    """As the decode worker holds it; in fp32 where it has not said."""
    worker = document["workers"]["decode"] or {}
    return int(worker.get("kv_bytes_per_token") or spec.kv_bytes_per_token(4))


def _pid(document: Document, role: str) -> object:
    return (document["workers"][role] or {}).get("pid", "gone")


def _candidates(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for row in rows:
        bar = "#" * round(40 * row["probability"])
        yield f"  {row['probability']:7.2%}  {show_piece(row['piece']):<16} {row['token']:>6}  {bar}".rstrip()


def _elide(pieces: list[str], mark: str = " ") -> list[str]:
    if len(pieces) <= MAX_PIECES:
        return pieces
    half = MAX_PIECES // 2
    return [*pieces[:half], f"...{mark}{len(pieces) - MAX_PIECES} more{mark}...", *pieces[-half:]]


def _wrap(pieces: Sequence[str], separator: str = " ") -> Iterator[str]:
    line = ""
    for piece in pieces:
        if line and len(line) + len(separator) + len(piece) > WIDTH:
            yield line
            line = ""
        line = f"{line}{separator}{piece}" if line else piece
    if line:
        yield line


def _two_rows(cells: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Cells of two lines side by side, as many per row as fit."""
    above = below = ""
    for top, bottom in cells:
        width = max(len(top), len(bottom)) + 1
        if above and len(above) + width > WIDTH:
            yield above.rstrip()
            yield below.rstrip()
            above = below = ""
        above, below = above + top.ljust(width), below + bottom.ljust(width)
    if above:
        yield above.rstrip()
        yield below.rstrip()
