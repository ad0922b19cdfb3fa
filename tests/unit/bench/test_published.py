"""The figures that docs/models.md publishes keep the bounds that stand above them."""

import re

from tests.bench.docs import BEGIN, END, MODELS

BOUND = re.compile(r"^\| `(\w+)` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) % \|", re.M)
FIGURE = re.compile(r"^\| (\w+), KV (\w+) \| ([\d.]+) \| ([\d.]+) \| [\d.]+ \| ([+-][\d.]+)% \|", re.M)


def test_published_figures_keep_the_bounds() -> None:
    page = MODELS.read_text()
    bounds = {mode: tuple(map(float, rest)) for mode, *rest in BOUND.findall(page)}
    figures = FIGURE.findall(page.partition(BEGIN)[2].partition(END)[0])
    assert {mode for mode, *_ in figures} == {"q4", "int8", "bf16", "fp32"}
    for mode, _, kl, top1, change in figures:
        most_kl, least_top1, within = bounds.get(mode, (0.001, 0.99, 0.1))
        assert float(kl) <= most_kl
        assert float(top1) >= least_top1
        assert abs(float(change)) <= within
