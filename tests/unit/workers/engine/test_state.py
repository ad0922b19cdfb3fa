"""What layers keep, how they form groups, and what is refused at start-up."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.engine.state import MAX_PADDING, StateGroup, StateSpec, plan_groups
from workers.errors import ModelRefused


def spec(window: int | None = None, **fields) -> StateSpec:
    given = {"stream": "kv", "kind": "window" if window else "append", "entry_bytes": 512, "tp_shards": 4}
    return StateSpec(**(given | {"window": window} | fields))


def specs(windows: Sequence[int | None]) -> list[StateSpec]:
    return [spec(window) for window in windows]


def sizes(groups: Sequence[StateGroup]) -> list[tuple[int | None, int]]:
    return [(group.spec.window, len(group.layers)) for group in groups]


def test_equal_layers_are_one_group() -> None:
    assert plan_groups(specs([None] * 30)) == (StateGroup(spec(), tuple(range(30))),)
    assert sizes(plan_groups(specs([4096] * 32))) == [(4096, 32)]


def test_groups_have_equally_many_layers() -> None:
    gemma = ([512] * 5 + [None]) * 3
    assert sizes(plan_groups(specs(gemma))) == [(512, 3), (512, 3), (None, 3), (512, 3), (512, 3), (512, 3)]
    assert plan_groups(specs(gemma))[2].layers == (5, 11, 17)
    assert sizes(plan_groups(specs([128, None] * 12))) == [(128, 12), (None, 12)]


def test_a_little_padding_saves_many_groups() -> None:
    """34 layers of Gemma 3 4B: 29 with a window and 5 without have no common divisor."""
    types = [1024 if (layer + 1) % 6 else None for layer in range(34)]
    assert sizes(plan_groups(specs(types))) == [(1024, 5)] * 1 + [(None, 5)] + [(1024, 5)] * 4 + [(1024, 4)]


@given(st.lists(st.sampled_from([None, 16, 128]), min_size=1, max_size=70))
def test_every_layer_is_in_one_group_and_little_is_wasted(windows: list[int | None]) -> None:
    groups = plan_groups(specs(windows))
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(windows)))
    assert [group.layers[0] for group in groups] == sorted(group.layers[0] for group in groups)
    assert all(windows[layer] == group.spec.window for group in groups for layer in group.layers)
    size = max(len(group.layers) for group in groups)
    for window in set(windows):
        places = size * sum(group.spec.window == window for group in groups)
        assert 0 <= places - windows.count(window) <= MAX_PADDING * windows.count(window)


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (spec(kind="fixed", stream="ssm"), r"layer 1 keeps a fixed state \(ssm\), which Baton does not serve yet"),
        (spec(tokens_per_entry=4), r"layer 1 keeps one entry \(kv\) per 4 tokens"),
        (spec(entry_bytes=576, stream="latent"), r"layer 1 keeps 576 bytes a token \(latent\), layer 0 512 \(kv\)"),
    ],
)
def test_state_that_is_not_served_is_refused(odd: StateSpec, message: str) -> None:
    with pytest.raises(ModelRefused, match=message):
        plan_groups([spec(), odd])
