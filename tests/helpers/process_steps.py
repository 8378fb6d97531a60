"""A program that prints what each step of using the package changes in its process, as JSON."""

import copy
import json

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from process_state import changes, snapshot
from torch.nn.parallel import DistributedDataParallel

import megatron_hybrid as mh
from megatron_hybrid.training.trainer import training_device

FOUND = {}


def step(name, work):
    """Do the work and note what it changes."""
    before = snapshot()
    result = work()
    FOUND[name] = changes(before, snapshot())
    return result


def build():
    """Builds a small model."""
    fields = {"layer_pattern": "M-*-", "hidden_size": 64, "num_attention_heads": 4}
    return mh.build_hybrid_model(mh.HybridConfig(vocab_size=256, **fields))


def generate():
    """The text after a prompt, by a new engine."""
    engine = mh.DynamicInferenceEngine(model, tokenizer, mh.InferenceConfig(cache_bytes=32 << 20))
    sampling = mh.SamplingParams(num_tokens_to_generate=3)
    return engine.generate(["Once"], sampling)[0].generated_text


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


def train_scope():
    """The groups that core trains with."""
    with training_device():
        assert dist.is_initialized()


torch.manual_seed(0)
step("build", build)
model, tokenizer = step("load", lambda: mh.load_pretrained("demo", dtype=torch.float32))
alone = step("generate", generate)
own_group()
dist.destroy_process_group()
own_core_groups()
parallel_state.destroy_model_parallel()
dist.destroy_process_group()
assert step("groups_end", generate) == alone
step("train_scope", train_scope)
print(json.dumps(FOUND, default=str))
