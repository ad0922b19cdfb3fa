"""POST /baton/scale: how many replicas a pool is to have. Who makes it so is given to the router; it knows no Ray."""

from collections.abc import Awaitable, Callable
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from router.openai.schemas import check_fields, parse_json_object

MAX_REPLICAS = 64
Resize = Callable[[str, int], Awaitable[None]]
"""(pool, replicas). Returns once the target is set, not once it is met. Raises `ApiError` for an unknown pool."""


class ScaleBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True)

    pool: Annotated[str, Field(min_length=1, max_length=64)]
    replicas: Annotated[int, Field(ge=1, le=MAX_REPLICAS)]


def read_resize(body: bytes) -> tuple[str, int]:
    """(pool, replicas) as the body asks. Raises `ApiError` that names the field at fault."""
    asked = check_fields(ScaleBody, parse_json_object(body))
    return asked.pool, asked.replicas
