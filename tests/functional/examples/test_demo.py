"""Examples of the demo model: its corpus as files for preprocess, without fetching any; its curve's
held-out loss against cross entropies of torch."""

import demo_corpus
import demo_curve
import pytest
import torch
import torch.nn.functional as F
from index_folders import write_documents

import megatron_hybrid as mh
from megatron_hybrid.text.document_files import read_texts


def test_each_document_is_a_line_of_one_of_two_files(tmp_path):
    documents = [demo_corpus.Document("book", f"Chapter {i}.\n\nIt was late.") for i in range(64)]
    counts = demo_corpus.write_jsonl(documents, tmp_path / "text")
    train, held_out = (
        list(read_texts([tmp_path / "text" / f"{name}.jsonl"], "text")) for name in counts
    )
    assert (len(train), len(held_out)) == tuple(counts.values()) and len(held_out) > 0
    assert train == [each.text for each in documents if not each.held_out]
    assert held_out == [each.text for each in documents if each.held_out]


def test_the_documented_losses_are_read_from_the_table():
    assert [demo_curve.documented_loss(step) for step in (200, 1000, 2900)] == [4.375, 3.847, 3.388]
    with pytest.raises(SystemExit, match="has no step 2,000"):
        demo_curve.documented_loss(2000)


@torch.no_grad()
def test_a_document_is_read_whole_and_each_token_counts_alike(tmp_path, default_group):
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
