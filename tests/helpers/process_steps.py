"""A program that prints what each step of using the package changes in its process, as JSON."""

import copy
import json
import tempfile
from pathlib import Path

import httpx
import torch
import torch.distributed as dist
import transformers  # noqa: F401
import uvicorn  # noqa: F401
from megatron.core import parallel_state
from process_state import changes, snapshot
from torch.nn.parallel import DistributedDataParallel

FOUND = {}


def step(name, work):
    """Do the work and note what it changes."""
    before = snapshot()
    result = work()
    FOUND[name] = changes(before, snapshot())
    return result


def import_it():
    """Imports the package, of which all other imports are over."""
    global mh, Recipe, Trainer, training_device, running_server, write_documents
    from http_server import running_server
    from index_folders import write_documents

    import megatron_hybrid as mh
    from megatron_hybrid.training.recipe import Recipe
    from megatron_hybrid.training.trainer import Trainer, training_device


def build():
    """Builds a small model."""
    fields = {"layer_pattern": "M-*-", "hidden_size": 64, "num_attention_heads": 4}
    return mh.build_hybrid_model(mh.HybridConfig(vocab_size=256, **fields))


def generate():
    """The text after a prompt, by a new engine."""
    engine = mh.DynamicInferenceEngine(model, tokenizer, mh.InferenceConfig(cache_bytes=32 << 20))
    sampling = mh.SamplingParams(num_tokens_to_generate=3)
    return engine.generate(["Once"], sampling)[0].text


def own_group():
    """A group of the program's own, with torch's DDP around the model in it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tokens = torch.tensor([tokenizer.tokenize("Once upon a time there was")])
    wrapped = DistributedDataParallel(copy.deepcopy(model).train())
    wrapped(tokens[:, :-1], labels=tokens[:, 1:]).mean().backward()
    assert all(parameter.grad is not None for parameter in wrapped.parameters())
    assert generate() == alone


def own_core_groups():
    """Core's groups, by the program: models are built over them, and beside them."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    assert generate() == alone
    assert build().pg_collection.tp is parallel_state.get_tensor_model_parallel_group()


def serve():
    """A server in a thread answers a chat."""
    with running_server() as server:
        chat = {"messages": [{"role": "user", "content": "Once"}], "max_tokens": 2}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=chat, timeout=None)
        assert answer.status_code == 200


def train():
    """Two steps of a training run."""
    with tempfile.TemporaryDirectory() as folder, training_device() as device:
        text = write_documents(Path(folder) / "text", [[*[5] * 200, tokenizer.eod]] * 20, tokenizer)
        model = {"layer_pattern": "M*-", "hidden_size": 32, "num_attention_heads": 2}
        fields = {
            "model": {**model, "vocab_size": 3072},
            "tokenizer": "demo",
            "data": {"sequence_length": 32, "blend": [text], "split": "3,1"},
            "run": {"steps": 2, "global_batch_size": 2},
            "optimizer": {"learning_rate": 1e-3, "min_learning_rate": 1e-4},
        }
        trainer = Trainer(Recipe.of(fields), Path(folder) / "run", device)
        trainer.train()
        trainer.close()
        assert trainer.progress.step == 2


torch.manual_seed(0)
step("import", import_it)
step("build", build)
model, tokenizer = step("load", lambda: mh.load_pretrained("demo", dtype=torch.float32))
alone = step("generate", generate)
step("serve", serve)
assert not dist.is_initialized()
own_group()
dist.destroy_process_group()
own_core_groups()
parallel_state.destroy_model_parallel()
dist.destroy_process_group()
assert step("groups_end", generate) == alone
step("train", train)
assert not dist.is_initialized()
print(json.dumps(FOUND, default=str))
