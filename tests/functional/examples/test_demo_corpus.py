"""examples/demo_corpus.py: its documents as files for preprocess, without fetching any."""

import importlib.util
import sys
from pathlib import Path

from megatron_hybrid.text.document_files import read_texts

PATH = Path(__file__).parents[3] / "examples" / "demo_corpus.py"


def test_each_document_is_a_line_of_one_of_two_files(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("demo_corpus", PATH)
    corpus = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "demo_corpus", corpus)  # dataclasses look it up
    spec.loader.exec_module(corpus)
    documents = [corpus.Document("book", f"Chapter {i}.\n\nIt was late.") for i in range(64)]
    counts = corpus.write_jsonl(documents, tmp_path / "text")
    train, held_out = (
        list(read_texts([tmp_path / "text" / f"{name}.jsonl"], "text")) for name in counts
    )
    assert (len(train), len(held_out)) == tuple(counts.values()) and len(held_out) > 0
    assert train == [each.text for each in documents if not each.held_out]
    assert held_out == [each.text for each in documents if each.held_out]
