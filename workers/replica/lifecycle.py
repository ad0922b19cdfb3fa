"""The states of a replica and the transitions that are allowed. Pure."""

from workers.protocol import WorkerState

_ALLOWED: dict[WorkerState, tuple[WorkerState, ...]] = {
    "starting": ("ready", "stopped"),
    "ready": ("draining", "stopped"),
    "draining": ("stopped",),
    "stopped": (),
}


class Lifecycle:
    """STARTING -> READY -> DRAINING -> STOPPED; each step may also go straight to STOPPED. One writer: the engine
    thread.
    """

    def __init__(self) -> None:
        self.state: WorkerState = "starting"
        self._story: list[WorkerState] = ["starting"]

    def become(self, state: WorkerState) -> None:
        """Moves on, or stays when already there. Raises AssertionError with the story so far on a forbidden
        transition."""
        if state == self.state:
            return
        assert state in _ALLOWED[self.state], f"lifecycle {' -> '.join(self._story)} cannot become {state}"
        self.state = state
        self._story.append(state)

    @property
    def accepts_work(self) -> bool:
        return self.state == "ready"
