"""A model from the Hugging Face hub: weights as safetensors, config and tokenizer; never code, never a pickle."""

import shutil
from pathlib import Path

from cluster.config import HubSource
from workers.model.progress import Progress

WANTED = (
    "*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "tokenizer*",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template*",
)  # fmt: skip


class ModelUnavailable(RuntimeError):
    """The model could not be fetched or is not what was asked for; the text says what to do."""


def fetch_from_hub(source: HubSource, target: Path, progress: Progress) -> None:
    """The repository's files are in `target`. Raises `ModelUnavailable`. The user's own token and proxies hold."""
    from huggingface_hub import snapshot_download  # half a second that only a download pays
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    name = f"{source.repo}@{source.revision}"
    progress(f"downloading {name} from the hub", 0.0)
    disable_progress_bars()
    try:
        snapshot_download(
            source.repo,
            revision=source.revision,
            endpoint=source.endpoint,
            local_dir=target,
            allow_patterns=list(WANTED),
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ModelUnavailable(
            f"the hub does not give {name}: {reason[:300]}; check the name, the network, and a token for gated models"
        ) from None
    shutil.rmtree(target / ".cache", ignore_errors=True)
    if not (target / "config.json").is_file() or not any(target.glob("*.safetensors")):
        raise ModelUnavailable(f"{name} holds no config.json or no safetensors: Baton reads no other weights")
