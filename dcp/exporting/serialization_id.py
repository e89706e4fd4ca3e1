"""The identifier that torch writes into each of its archives, computed as torch computes it on Linux.

Twenty decimal digits of a hash over the records' names, then twenty of a hash over their CRC-32s. The
names are combined in the order in which libstdc++'s ``std::unordered_set<std::string>`` iterates, which
depends on the hash of each name, on the order of insertion and on when the table grew; so that container's
order is replayed here. Other C++ libraries iterate in another order: a file that torch wrote on macOS has
another identifier. Nothing that loads a file looks at it.
"""

from __future__ import annotations

from collections.abc import Iterable

_MASK = (1 << 64) - 1
_MULTIPLIER = 0xC6A4A7935BD1E995
_SEED = 0xC70F6907
# The primes that the table grows through when items come one by one.
_BUCKETS = (
    1, 13, 29, 59, 127, 257, 541, 1109, 2357, 5087, 10273, 20753, 42043, 85229, 172933, 351061, 712697,
    1447153, 2938679, 5967347, 12117689, 24607243, 49969847,
)  # fmt: skip
MAX_RECORDS = _BUCKETS[-1]
"""Most records for which the order is known."""


def combine(seed: int, value: int) -> int:
    """`c10::hash_combine`, on 64-bit unsigned numbers."""
    return seed ^ ((value + 0x9E3779B9 + (seed << 6) + (seed >> 2)) & _MASK)


def string_hash(text: bytes) -> int:
    """`std::hash<std::string>` of libstdc++ (64-bit MurmurHash2)."""
    hashed = _SEED ^ (len(text) * _MULTIPLIER & _MASK)
    whole = len(text) & ~7
    for at in range(0, whole, 8):
        word = int.from_bytes(text[at : at + 8], "little") * _MULTIPLIER & _MASK
        hashed = (hashed ^ (_mix(word) * _MULTIPLIER & _MASK)) * _MULTIPLIER & _MASK
    if len(text) > whole:
        hashed = (hashed ^ int.from_bytes(text[whole:], "little")) * _MULTIPLIER & _MASK
    return _mix(_mix(hashed) * _MULTIPLIER & _MASK)


def _mix(word: int) -> int:
    return word ^ (word >> 47)


def iteration_order(hashes: Iterable[int]) -> list[int]:
    """Hashes of distinct strings in the order in which an ``unordered_set`` filled in this order iterates.

    The container is one linked list in which each bucket's items stand together: a new item goes to the
    front of its bucket, a new bucket to the front of the list. Growing walks the list and inserts anew.
    """
    buckets: dict[int, list[int]] = {}
    sizes = iter(_BUCKETS)
    size = next(sizes)
    for count, hashed in enumerate(hashes, 1):
        if count > size:
            size = next(sizes)
            grown: dict[int, list[int]] = {}
            for moved in _walk(buckets):
                grown.setdefault(moved % size, []).append(moved)
            buckets = grown
        buckets.setdefault(hashed % size, []).append(hashed)
    return _walk(buckets)


def _walk(buckets: dict[int, list[int]]) -> list[int]:
    return [hashed for bucket in reversed(buckets.values()) for hashed in reversed(bucket)]


def serialization_id(names: Iterable[str], combined_crc: int) -> str:
    """The identifier: 40 decimal digits.

    Args:
        names: of the records in the order in which they were written, without the archive's own name.
        combined_crc: their CRC-32s, put together by `combine` in that order from 0.
    """
    combined = 0
    for hashed in iteration_order(string_hash(name.encode()) for name in names):
        combined = combine(combined, hashed)
    return f"{combined:020d}{combined_crc:020d}"
