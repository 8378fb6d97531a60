"""examples/demo_curve.py: its held-out loss against cross entropies of torch."""

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from index_folders import write_documents

import megatron_hybrid as mh

PATH = Path(__file__).parents[3] / "examples" / "demo_curve.py"


@pytest.fixture
def demo_curve():
    spec = importlib.util.spec_from_file_location("demo_curve", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_documented_losses_are_read_from_the_table(demo_curve):
    assert [demo_curve.documented_loss(step) for step in (200, 1000, 2900)] == [4.375, 3.847, 3.388]
    with pytest.raises(SystemExit, match="has no step 2,000"):
        demo_curve.documented_loss(2000)


@torch.no_grad()
def test_a_document_is_read_whole_and_each_token_counts_alike(demo_curve, tmp_path, default_group):
    model, tokenizer = mh.load_pretrained("demo")
    generator = torch.Generator().manual_seed(0)
    documents = [
        torch.randint(3072, (length,), generator=generator).tolist() for length in (2, 40, 200)
    ]
    prefix = write_documents(tmp_path / "held_out", documents, tokenizer)
    losses = []
    for document in map(torch.tensor, documents):
        logits = model(document[None, :-1])[0].double()
        losses.append(F.cross_entropy(logits, document[1:], reduction="none"))
    expected = torch.cat(losses).mean().item()
    assert demo_curve.held_out_loss(model, prefix) == pytest.approx(expected, abs=1e-3)
