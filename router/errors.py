"""What can go wrong with a request, and the one table that turns it into an HTTP status and an OpenAI body.

    RouterError
    `-- ApiError      a request is refused or ended; `kind` is a row of FACES

Knows no socket. Messages name what, value and limit, and never carry prompt text.
"""

from dataclasses import dataclass
from typing import Literal

ErrorKind = Literal[
    "invalid_json",
    "invalid_request",
    "unsupported",
    "context_length",
    "foreign_origin",
    "not_found",
    "model_not_found",
    "method_not_allowed",
    "body_timeout",
    "body_too_large",
    "queue_full",
    "no_capacity",
    "first_token_deadline",
    "progress_deadline",
    "total_deadline",
    "worker_lost",
    "shutting_down",
    "internal",
]


@dataclass(frozen=True, slots=True)
class Face:
    """What a client sees of one kind of error."""

    status: int
    type: str
    code: str


FACES: dict[ErrorKind, Face] = {
    "invalid_json": Face(400, "invalid_request_error", "invalid_json"),
    "invalid_request": Face(400, "invalid_request_error", "invalid_value"),
    "unsupported": Face(400, "invalid_request_error", "unsupported_parameter"),
    "context_length": Face(400, "invalid_request_error", "context_length_exceeded"),
    "foreign_origin": Face(403, "invalid_request_error", "foreign_origin"),
    "not_found": Face(404, "invalid_request_error", "unknown_url"),
    "model_not_found": Face(404, "invalid_request_error", "model_not_found"),
    "method_not_allowed": Face(405, "invalid_request_error", "method_not_allowed"),
    "body_timeout": Face(408, "invalid_request_error", "body_timeout"),
    "body_too_large": Face(413, "invalid_request_error", "request_too_large"),
    "queue_full": Face(429, "rate_limit_error", "queue_full"),
    "no_capacity": Face(503, "server_error", "no_capacity"),
    "first_token_deadline": Face(503, "server_error", "first_token_deadline"),
    "progress_deadline": Face(503, "server_error", "progress_deadline"),
    "total_deadline": Face(504, "server_error", "total_deadline"),
    "worker_lost": Face(503, "server_error", "worker_lost"),
    "shutting_down": Face(503, "server_error", "shutting_down"),
    "internal": Face(500, "server_error", "internal_error"),
}


class RouterError(Exception):
    """Base of every error raised by `router`."""


class ApiError(RouterError):
    """A request ends without its answer. `code` refines the code of the kind; `param` names the field at fault."""

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        allow: str | None = None,
    ) -> None:
        super().__init__(message)
        self.kind: ErrorKind = kind
        self.message, self.param, self.code = message, param, code or FACES[kind].code
        self.retry_after_s, self.allow = retry_after_s, allow

    @property
    def status(self) -> int:
        return FACES[self.kind].status

    def body(self) -> dict[str, object]:
        """The OpenAI shape, for a JSON answer and for an error event alike."""
        error = {"message": self.message, "type": FACES[self.kind].type, "param": self.param, "code": self.code}
        return {"error": error}

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers that belong to the error: Retry-After in seconds, Allow."""
        pairs: list[tuple[bytes, bytes]] = []
        if self.retry_after_s is not None:
            pairs.append((b"retry-after", str(self.retry_after_s).encode()))
        if self.allow is not None:
            pairs.append((b"allow", self.allow.encode()))
        return pairs
