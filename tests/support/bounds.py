"""The bounds that docs/models.md sets for each mode of fewer bits."""

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"


def read_bounds() -> dict[str, tuple[float, float, float]]:
    """mode -> (KL at most, top-1 at least, perplexity within, a share)."""
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) % \|", PAGE.read_text(), re.M)
    return {mode: (float(kl), float(top1), float(share) / 100) for mode, kl, top1, share in rows}
