"""Rows, tables and pages of the bench: ratios are of one round, what is missing is said, hand-written parts stay."""

import pytest

from tests.bench.compared import best_peer, compared_rows
from tests.bench.docs import BEGIN, END, performance_page, quality_section, replace_figures
from tests.bench.engines import DEFAULT, find_engines
from tests.bench.rounds import Loaded, Measured
from tests.bench.rows import Row, compare, print_rows, spread, to_json
from tests.bench.runners.lines import Watch


def make_measured() -> Measured:
    return Measured(
        threads=2,
        samples={
            DEFAULT: {"single": [300.0, 100.0, 300.0], "contexts1000": [40.0, 50.0, 60.0]},
            "slow": {"single": [100.0, 50.0, 100.0]},
            "fast": {"single": [150.0, None, 250.0]},
        },
        loaded={DEFAULT: Loaded(2.0, {}, 1 << 30)},
    )


def test_ratios_are_taken_within_rounds() -> None:
    row = compare("x", "tok/s", [300.0, 100.0, 300.0], [100.0, 50.0, 100.0], "slow", 2.5)
    assert row is not None
    assert (row.ratio, row.holds, row.value, row.min, row.max) == (3.0, True, 300.0, 100.0, 300.0)


def test_rounds_that_failed_are_left_out_of_both_sides() -> None:
    row = compare("x", "", [300.0, 100.0, 300.0], [150.0, None, 100.0], "fast", None)
    assert row is not None
    assert (row.ratio, row.min, row.holds) == (2.5, 300.0, None)
    assert compare("x", "", [1.0], [None], "fast", None) is None
    assert spread("x", "", [None]) is None


def test_the_target_is_held_against_the_best_peer_alone() -> None:
    measured = make_measured()
    assert best_peer(measured, "single") == "fast"
    judged = [row for row in compared_rows(measured) if row.holds is not None]
    assert [(row.against, row.holds) for row in judged] == [("fast", True), ("", True)]


def test_the_table_says_what_does_not_hold() -> None:
    row = Row(name="n", value=1234.5, unit="u", min=0.5, max=2000, against="a", ratio=0.5, target=">= 1x", holds=False)
    _head, line = print_rows([row]).splitlines()
    assert line.split() == ["n", "1,234", "0.5", "2,000", "u", "a", "0.50x", ">=", "1x", "NO"]
    assert to_json([row])[0]["holds"] is False


def test_tokens_before_every_stream_has_begun_do_not_count() -> None:
    watch = Watch(2)
    for stream, tokens in ((0, [7]), (0, [8]), (1, [9]), (0, [1]), (1, [2])):
        watch.saw(stream, tokens)
    timing = watch.done()
    assert (timing.decoded, timing.head) == (2, [7, 8, 1])


def test_hand_written_parts_of_a_page_stay() -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert replace_figures(page, "new") == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    with pytest.raises(ValueError, match="put them where"):
        replace_figures("no markers", "new")


def test_pages_name_what_was_not_measured() -> None:
    rows = [
        Row(name="KL to fp32, shipped texts: q4, KV bf16", value=0.004, unit="", min=0, max=0),
        Row(name="perplexity, shipped texts: q4, KV bf16", value=25.0, unit="", min=0, max=0, ratio=1.01),
        Row(name="top-1 agreement, shipped texts: q4, KV bf16", value=0.96, unit="", min=0, max=0),
    ]
    part = {"at": "now", "versions": {"baton": "abc"}, "rows": to_json(rows)}
    detail = {"shipped": {"texts": ["prose"], "missing": {"code": "not on this machine"}, "tokens": 768}}
    results = {"machine": {"cores": "2"}, "parts": {"quality": {**part, **detail}}}
    page = performance_page(results)
    assert "Not measured: peers." in page
    assert "cores: 2" in page
    figures = quality_section(results)
    assert "| q4, KV bf16 | 0.00400 | 0.9600 | 25.00 | +1.00% |" in figures
    assert "Left out: code: not on this machine." in figures


def test_engines_are_chosen_by_parts_of_their_names() -> None:
    assert [engine.name for engine in find_engines("llama")] == [DEFAULT, "llama.cpp q4_0"]
    with pytest.raises(ValueError, match="there are: baton q4"):
        find_engines("nobody")
