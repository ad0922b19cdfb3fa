"""Names of KV blocks that many requests may share: a chain of hashes over full blocks of token ids. Pure.

    root(tenant) -> hash(root, tokens of block 0) -> hash(that, tokens of block 1) -> ...

A name stands for every token from the first to the block's last and for the tenant: equal names mean equal KV in one
worker, whose model, adapter and cache type are fixed. 128 bits of BLAKE2b: nobody finds two texts of one name. Workers
name blocks by it, and an ingress finds by it who holds a prompt's beginning (CACHE in docs/protocol.md).
"""

import hashlib

from workers.protocol import NAME_BYTES, pack_tokens


def root_of(tenant: bytes) -> bytes:
    """The start of a tenant's chains; one tenant never finds what another one computed. b"" is everybody's."""
    return hashlib.blake2b(tenant, digest_size=NAME_BYTES, person=b"baton-prefix").digest()


def extend_chain(chain: list[bytes], root: bytes, tokens: list[int], block_tokens: int, num_blocks: int) -> None:
    """Append names until `chain` names the first `num_blocks` blocks of `tokens`; about 1.5 us a block of 32.

    The caller has that many full blocks. A chain that is long enough stays as it is.
    """
    name = chain[-1] if chain else root
    for first in range(len(chain) * block_tokens, num_blocks * block_tokens, block_tokens):
        block = tokens[first : first + block_tokens]
        assert len(block) == block_tokens, f"the block at token {first} is not full: {len(block)} tokens"
        name = hashlib.blake2b(name + pack_tokens(block), digest_size=NAME_BYTES).digest()
        chain.append(name)
