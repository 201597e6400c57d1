from typing import Any

import pytest
import torch
from hypothesis import assume, given, strategies as st
from torch.nn import functional

from distbelief.graph.ops.windows import Window


windows = st.builds(
    Window,
    size=st.integers(1, 5),
    stride=st.integers(1, 4),
    dilation=st.integers(1, 3),
    padding=st.integers(0, 4),
    ceil=st.booleans(),
)


def traced(window: Window, output: int, extent: int) -> set[int]:
    first = output * window.stride - window.padding
    return {
        first + k * window.dilation
        for k in range(window.size)
        if 0 <= first + k * window.dilation < extent
    }


@given(windows, st.integers(1, 20), st.data())
def test_reads_is_the_hull_of_what_every_output_reads(
    window: Window, extent: int, data: st.DataObject
) -> None:
    n_outputs = window.n_outputs(extent)
    assume(n_outputs > 0)
    start = data.draw(st.integers(0, n_outputs - 1))
    stop = data.draw(st.integers(start + 1, n_outputs))
    inputs = set().union(*(traced(window, o, extent) for o in range(start, stop)))
    low, high = window.reads((start, stop), extent=extent)
    if inputs:
        assert low <= min(inputs)
        assert high >= max(inputs) + 1
        # Nothing beyond the first and last window is read.
        assert low == max(0, start * window.stride - window.padding)
    assert 0 <= low <= high <= extent


@given(windows, st.integers(1, 20), st.data())
def test_a_padded_tile_gives_exactly_these_outputs(
    window: Window, extent: int, data: st.DataObject
) -> None:
    window = Window(
        size=window.size, stride=window.stride, dilation=window.dilation, padding=window.padding
    )
    n_outputs = window.n_outputs(extent)
    assume(n_outputs > 0)
    start = data.draw(st.integers(0, n_outputs - 1))
    stop = data.draw(st.integers(start + 1, n_outputs))
    values = torch.arange(1.0, extent + 1).view(1, 1, -1)
    weight = torch.arange(1.0, window.size + 1).view(1, 1, -1) ** 2
    whole = functional.conv1d(
        values, weight, stride=window.stride, padding=window.padding, dilation=window.dilation
    )
    assert whole.shape[-1] == n_outputs
    low, high = window.reads((start, stop), extent=extent)
    tile = functional.pad(values[..., low:high], window.pads((start, stop), extent=extent))
    part = functional.conv1d(tile, weight, stride=window.stride, dilation=window.dilation)
    assert torch.equal(part, whole[..., start:stop])


@given(windows, st.integers(1, 20))
def test_outputs_are_counted_as_torch_counts_them(window: Window, extent: int) -> None:
    assume(window.padding <= window.size // 2)  # torch allows no more in pooling
    assume(extent + 2 * window.padding >= window.span)
    pooled = functional.max_pool1d(
        torch.zeros(1, 1, extent),
        window.size,
        stride=window.stride,
        padding=window.padding,
        dilation=window.dilation,
        ceil_mode=window.ceil,
    )
    assert pooled.shape[-1] == window.n_outputs(extent)


def test_nothing_is_read_for_no_output() -> None:
    assert Window(size=3).reads((2, 2), extent=9) == (0, 0)
    assert Window(size=3).pads((2, 2), extent=9) == (0, 0)
    assert Window(size=3).n_outputs(2) == 0


@pytest.mark.parametrize(
    ("word", "value"), [("size", 0), ("stride", 0), ("dilation", 0), ("padding", -1)]
)
def test_a_window_without_extent_is_refused(word: str, value: int) -> None:
    arguments: dict[str, Any] = {"size": 1, word: value}
    with pytest.raises(ValueError, match=rf"{word} must be .*got {value}"):
        Window(**arguments)
