"""The random numbers of requests: each draw has one, which depends on nothing else in a batch."""

import hashlib

NOISE_BITS = 63


def noise_seed(seed: int, index: int, position: int) -> int:
    """The noise of one draw: 63 bits that are uniform over requests, answers and positions."""
    text = f"{seed}/{index}/{position}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
