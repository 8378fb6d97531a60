"""Tensors are asked for in huge pages, each of which is named once; their values stay."""

import torch

from megatron_hybrid.ops.linear import reordered
from megatron_hybrid.utils import huge_pages

PAGE = 2 << 20


def pages_of(asked):
    return [page for address, size, _ in asked for page in range(address, address + size, PAGE)]


def test_each_page_of_the_tensors_is_asked_for_once(monkeypatch):
    asked = []
    monkeypatch.setattr(huge_pages, "_advise", lambda *call: asked.append(call))
    memory = torch.zeros(9 * PAGE, dtype=torch.uint8)
    parts = [memory[:100], memory[50 : 3 * PAGE], memory[-100:], memory[3 * PAGE : 4 * PAGE]]
    huge_pages.use_huge_pages(parts)
    found = pages_of(asked)
    assert len(set(found)) == len(found) and not any(page % PAGE for page in found)
    for part in parts:
        begin = part.data_ptr()
        wanted = range(begin // PAGE * PAGE, begin + part.nbytes, PAGE)
        assert {*wanted} <= {*found}
    assert len(found) < 9  # not what lies between them


def test_values_stay():
    weight = torch.randn(1408, 512)
    packed = reordered(weight)
    huge_pages.use_huge_pages([weight, packed])
    assert torch.equal(reordered(weight).to_dense(), packed.to_dense())
