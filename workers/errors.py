"""What can go wrong inside a worker.

    WorkerError
    |-- ModelRefused        the model folder or GGUF file holds something that this worker cannot serve
    |-- ModelDamaged        a file of the model is missing, cut short or has unexpected shapes
    |-- BackendUnavailable  a backend of the op set cannot run here
    `-- StepFailed          a forward pass raised or produced numbers that are no numbers

Concurrency: exceptions carry text only and may cross threads and processes.
"""


class WorkerError(Exception):
    """Base of every error raised by `workers`."""


class ModelRefused(WorkerError):
    """The model is whole, and Baton cannot serve it; the message names what and why."""


class ModelDamaged(WorkerError):
    """The model's files are missing, cut short, or do not fit their own description."""


class StepFailed(WorkerError):
    """One engine step could not be computed; nothing of it may be emitted."""


class BackendUnavailable(WorkerError):
    """A backend of the op set cannot run in this process; the message says why."""
