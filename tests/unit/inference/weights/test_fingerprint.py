"""The hash of the weights: every change of a bit or of a place shows."""

import torch

from megatron_hybrid.inference.weights import fingerprint
from megatron_hybrid.inference.weights.fingerprint import weights_hash


def hash_of(values: torch.Tensor) -> str:
    module = torch.nn.Module()
    module.register_buffer("values", values)
    return weights_hash(module)


def test_every_bit_place_and_dtype_counts():
    values = torch.randn(64)
    hashes = {hash_of(values), hash_of(values.view(torch.int32)), hash_of(values.view(8, 8))}
    hashes |= {hash_of(values.flip(0)), hash_of(values[[1, 0, *range(2, 64)]])}
    for bit in range(31):
        changed = values.clone()
        changed.view(torch.int32)[5] ^= 1 << bit
        hashes.add(hash_of(changed))
    assert len(hashes) == 5 + 31
    assert hash_of(values.clone()) in hashes


def test_the_hash_is_that_of_splitmix_whatever_the_chunks(monkeypatch):
    values = torch.randint(-128, 128, (1000,), dtype=torch.int16)
    modulus, total = 2**64, 0
    for place, value in enumerate(values.tolist()):
        x = (place * 0x9E3779B97F4A7C15 + value) % modulus
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            signed = x - modulus if x >= modulus // 2 else x  # shifts keep the sign
            x = ((x ^ (signed >> shift)) % modulus) * factor % modulus
        total += x
    assert fingerprint.hash_of(values) == total % modulus
    monkeypatch.setattr(fingerprint, "_CHUNK", 7)
    assert fingerprint.hash_of(values) == total % modulus
    assert fingerprint.hash_of(values[:0]) == 0
