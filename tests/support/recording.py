"""Recording a step without a GPU: by tracing it to torch operators, which then run again by themselves.

As in a CUDA graph, whatever the host decided while the step was recorded stays as it was.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx


class TraceCapture:
    """A `Capture`; counts what it records and replays."""

    def __init__(self) -> None:
        self.num_recorded = self.num_replayed = 0

    def __call__(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.num_recorded += 1
        with torch.no_grad():
            compute()  # as a warm-up: libraries and batches are made outside of a recording
            traced: Any = make_fx(compute)()

        def replay() -> Tensor:
            self.num_replayed += 1
            with torch.no_grad():
                result: Tensor = traced()
            return result

        return replay
