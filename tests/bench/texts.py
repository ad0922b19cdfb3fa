"""Fixed texts for quality, each known by its hash: a figure is of these bytes or of none.

`shipped` are in every checkout; `debian` are licence texts that Debian ships and one file of Python 3.11.7, on which
the engines of the field were measured before. A text that is absent or other is left out by name.
"""

import argparse
import hashlib
from dataclasses import dataclass
from pathlib import Path

from tests.bench.engines import ROOT

TEXTS = Path(__file__).with_name("texts")
LICENSES = Path("/usr/share/common-licenses")
TOKENS = 768
"""The first tokens of each."""


@dataclass(frozen=True, slots=True)
class Text:
    name: str
    path: Path
    sha256: str


SETS: dict[str, tuple[Text, ...]] = {
    "shipped": (
        Text("Apache-2.0", ROOT / "LICENSE", "aac73b3148f6d1d7111dbca32099f68d26c644c6813ae1e4f05f6579aa2663fe"),
        Text("prose", TEXTS / "prose.txt", "c962caeb7b8130102f7e00c3a6d061ab688639c2888641761d205b3626bf6121"),
        Text("code", TEXTS / "code.txt", "486bffb14a78d510fa1ada4b18807019ba698c629515683797c0acf095ac82d9"),
    ),
    "debian": (
        Text("GPL-3", LICENSES / "GPL-3", "3972dc9744f6499f0f9b2dbf76696f2ae7ad8af9b23dde66d6af86c9dfb36986"),
        Text("Artistic", LICENSES / "Artistic", "b7fd9b73ea99602016a326e0b62e6646060d18febdd065ceca8bb482208c3d88"),
        Text(
            "argparse.py of Python 3.11.7", Path(argparse.__file__),
            "dc1eba8adfdf615986421f981337458ba1072d3e718a0f76e3224940fd74118b",
        ),
    ),
}  # fmt: skip


def read_set(name: str, folder: Path, tokens: int = TOKENS) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Token ids by text, and the reasons of those that are left out. `folder` holds the tokenizer."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found, missing = {}, {}
    for text in SETS[name]:
        if not text.path.exists():
            missing[text.name] = "not on this machine"
            continue
        data = text.path.read_bytes()
        if hashlib.sha256(data).hexdigest() != text.sha256:
            missing[text.name] = "another version than the one the figures are of"
            continue
        found[text.name] = tokenizer.encode(data.decode()).ids[:tokens]
    return found, missing
