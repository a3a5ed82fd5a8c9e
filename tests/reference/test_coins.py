"""Hashed coins: published values of the hash, and what a coin is. The worker's own: tests/engine/test_sampling.py."""

from eagletwin.reference.sampling import murmur3, seeded_coins


def test_the_hash_has_the_published_values() -> None:
    """MurmurHash3_32, seed 0: of nothing, of "test", of four bytes of ones and of zeros."""
    assert murmur3([]) == 0
    assert murmur3([int.from_bytes(b"test", "little")]) == 0xBA6BD213
    assert murmur3([0xFFFFFFFF]) == 0x76293B50
    assert murmur3([0]) == 0x2362F9DE


def test_coins_depend_on_the_seed_the_length_and_the_node() -> None:
    coins = seeded_coins(7, 12, 4)
    assert len(coins) == 5
    assert all(0 <= coin < 1 for coin in coins)
    assert coins == seeded_coins(7, 12, 4)
    assert not set(coins) & set(seeded_coins(8, 12, 4)) & set(seeded_coins(7, 13, 4))
    assert coins[:3] == seeded_coins(7, 12, 2)  # column by column
    assert seeded_coins(7 + (1 << 40), 12, 4) != coins  # both halves of the seed count
