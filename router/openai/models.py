"""/v1/models: the one model that this cluster serves. Pure."""

from router.errors import ApiError


def describe_model(model_id: str, created: int, max_context_tokens: int) -> dict[str, object]:
    document: dict[str, object] = {"id": model_id, "object": "model", "created": created, "owned_by": "baton"}
    return document | {"max_model_len": max_context_tokens}


def check_model(asked: str, served: str) -> None:
    """Raises `ApiError` when another model is asked for than the one that is served."""
    if asked != served:
        message = f"The model '{asked[:128]}' does not exist; this server has '{served}'."
        raise ApiError("model_not_found", message, param="model")
