"""Names of other libraries for what has another name here. Errors, docs/reference/other_names.md
and tests are made from one table."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection
from difflib import get_close_matches
from typing import Any, TypeVar

T = TypeVar("T")
_VLLM, _SGLANG, _HF = "vLLM", "SGLang", "transformers"
_TRT, _MEGATRON = "TensorRT-LLM", "Megatron-LM"
_BOTH = f"{_VLLM}, {_SGLANG}"

OTHER_NAMES: dict[str, tuple[tuple[str, str, str], ...]] = {
    "SamplingParams": (
        ("max_tokens", f"{_VLLM}, {_TRT}", "use num_tokens_to_generate"),
        ("max_new_tokens", f"{_HF}, {_SGLANG}", "use num_tokens_to_generate"),
        ("max_completion_tokens", "OpenAI", "use num_tokens_to_generate"),
        ("max_length", _HF, "use num_tokens_to_generate, which counts the answer alone"),
        ("min_new_tokens", f"{_HF}, {_SGLANG}", "use min_tokens"),
        ("stop", f"{_BOTH}, OpenAI", "use stop_words"),
        ("stop_strings", _HF, "use stop_words"),
        ("eos_token_id", _HF, "use termination_id, or stop_token_ids for several"),
        ("end_id", _TRT, "use termination_id"),
        ("ignore_eos", f"{_BOTH}, {_TRT}", "use ignore_termination"),
        ("include_stop_str_in_output", _VLLM, "use detokenize_stop_sequence"),
        ("no_stop_trim", _SGLANG, "use detokenize_stop_sequence"),
        ("logprobs", _VLLM, "use return_log_probs, and top_n_logprobs for the likeliest tokens"),
        ("prompt_logprobs", _VLLM, "use return_log_probs, which has those of the prompt"),
        ("bad_words", f"{_VLLM}, {_TRT}", "use bad_words_ids, the tokens of each word"),
        ("thinking_token_budget", _VLLM, "use thinking_budget"),
        ("do_sample", _HF, "use top_k=1 for greedy decoding"),
        ("use_beam_search", _TRT, "leave it out: there is no beam search"),
        ("num_beams", _HF, "leave it out: there is no beam search"),
        ("random_seed", _TRT, "use seed"),
        ("sampling_seed", _SGLANG, "use seed"),
        ("n", f"{_BOTH}, {_TRT}", "use RequestOptions(n=...)"),
        ("num_return_sequences", _HF, "use RequestOptions(n=...)"),
        ("cache_salt", _VLLM, "use RequestOptions(salt=...)"),
        ("structured_outputs", _VLLM, "use RequestOptions(guide=Guide.json_schema(...))"),
        ("guided_decoding", f"{_VLLM}, {_TRT}", "use RequestOptions(guide=...)"),
        ("json_schema", _SGLANG, "use RequestOptions(guide=Guide.json_schema(...))"),
        ("regex", _SGLANG, "use RequestOptions(guide=Guide.regex(...))"),
    ),
    "RequestOptions": (
        ("cache_salt", _VLLM, "use salt"),
        ("extra_key", _SGLANG, "use salt"),
        ("structured_outputs", _VLLM, "use guide=Guide.json_schema(...)"),
        ("best_of", _TRT, "use n, and choose one yourself"),
        ("num_return_sequences", _HF, "use n"),
        ("lora_request", f"{_VLLM}, {_TRT}", "leave it out: merge the adapter into the weights"),
    ),
    "InferenceConfig": (
        ("max_model_len", _VLLM, "use max_sequence_length"),
        ("context_length", _SGLANG, "use max_sequence_length"),
        ("max_seq_len", _TRT, "use max_sequence_length"),
        ("max_num_seqs", _VLLM, "use max_requests"),
        ("max_running_requests", _SGLANG, "use max_requests"),
        ("max_batch_size", _TRT, "use max_requests"),
        ("max_num_batched_tokens", _VLLM, "use max_tokens"),
        ("chunked_prefill_size", _SGLANG, "use max_tokens, of prefill and decoding together"),
        ("max_num_tokens", _TRT, "use max_tokens"),
        ("gpu_memory_utilization", _VLLM, "use memory_fraction, of what the weights leave"),
        ("mem_fraction_static", _SGLANG, "use memory_fraction, of what the weights leave"),
        ("free_gpu_memory_fraction", _TRT, "use memory_fraction"),
        ("kv_cache_memory_bytes", _VLLM, "use cache_bytes"),
        ("buffer_size_gb", _MEGATRON, "use cache_bytes"),
        ("block_size", _VLLM, "use block_size_tokens"),
        ("page_size", _SGLANG, "use block_size_tokens"),
        ("tokens_per_block", _TRT, "use block_size_tokens"),
        ("enable_prefix_caching", f"{_VLLM}, {_MEGATRON}", "use prefix_caching='restore'"),
        ("disable_radix_cache", _SGLANG, "use prefix_caching='off'"),
        ("enable_block_reuse", _TRT, "use prefix_caching='restore'"),
        ("prefix_caching_mamba_gb", _MEGATRON, "use prefix_caching='restore' and cache_bytes"),
        ("enforce_eager", _VLLM, "leave it out: steps are eager unless cuda_graphs=True"),
        ("disable_cuda_graph", _SGLANG, "leave it out: steps are eager unless cuda_graphs=True"),
        ("swap_space", _VLLM, "use host_cache_bytes"),
        ("hicache_size", _SGLANG, "use host_cache_bytes"),
        ("host_cache_size", _TRT, "use host_cache_bytes"),
        ("speculative_config", f"{_VLLM}, {_TRT}", "use speculation and num_speculative_tokens"),
        ("speculative_algorithm", _SGLANG, "use speculation"),
        ("speculative_num_draft_tokens", _SGLANG, "use num_speculative_tokens"),
        ("seed", _VLLM, "use random_seed"),
        ("dtype", f"{_BOTH}, {_TRT}", "use load_pretrained(dtype=torch.bfloat16)"),
        (
            "tensor_parallel_size",
            f"{_VLLM}, {_TRT}",
            "start the program with torchrun, and use "
            "load_pretrained(tensor_model_parallel_size=...)",
        ),
    ),
    "load_pretrained": (
        ("tensor_parallel_size", f"{_VLLM}, {_TRT}", "use tensor_model_parallel_size"),
        ("tp_size", _SGLANG, "use tensor_model_parallel_size"),
        ("pipeline_parallel_size", f"{_VLLM}, {_TRT}", "use pipeline_model_parallel_size"),
        ("pp_size", _SGLANG, "use pipeline_model_parallel_size"),
        ("ep_size", _SGLANG, "use expert_model_parallel_size"),
        ("enable_expert_parallel", _VLLM, "use expert_model_parallel_size"),
        ("torch_dtype", _HF, "use dtype"),
        ("device_map", _HF, "use device, such as 'cuda'"),
        ("trust_remote_code", f"{_BOTH}, {_HF}", "leave it out: code of a folder never runs"),
        ("quantization", _BOTH, "leave it out: the folder's config.json says it"),
        ("quantization_config", _HF, "leave it out: the folder's config.json says it"),
        ("attn_implementation", _HF, "leave it out: `megatron-hybrid info` lists the backends"),
        ("revision", f"{_VLLM}, {_HF}", "leave it out: models are read from folders alone"),
        ("gpu_memory_utilization", _VLLM, "use InferenceConfig(memory_fraction=...)"),
        ("max_model_len", _VLLM, "use InferenceConfig(max_sequence_length=...)"),
    ),
    "megatron-hybrid serve": (
        ("--model-path", _SGLANG, "give the folder as MODEL"),
        ("--max-model-len", _VLLM, "use --context"),
        ("--context-length", _SGLANG, "use --context"),
        ("--max_seq_len", _TRT, "use --context"),
        ("--inference-max-seq-length", _MEGATRON, "use --context"),
        ("--max-num-seqs", _VLLM, "use --max-requests"),
        ("--max-running-requests", _SGLANG, "use --max-requests"),
        ("--max_batch_size", _TRT, "use --max-requests"),
        ("--max-num-queued-reqs", _VLLM, "use --max-waiting"),
        ("--max-queued-requests", _SGLANG, "use --max-waiting"),
        ("--max-num-batched-tokens", _VLLM, "use InferenceConfig(max_tokens=...) in Python"),
        ("--chunked-prefill-size", _SGLANG, "use InferenceConfig(max_tokens=...) in Python"),
        ("--gpu-memory-utilization", _VLLM, "use --memory-fraction, of what the weights leave"),
        ("--mem-fraction-static", _SGLANG, "use --memory-fraction, of what the weights leave"),
        ("--kv_cache_free_gpu_memory_fraction", _TRT, "use --memory-fraction"),
        ("--kv-cache-memory-bytes", _VLLM, "use --cache-mib"),
        ("--enable-prefix-caching", _VLLM, "leave it out: --mode restore is the default"),
        ("--no-enable-prefix-caching", _VLLM, "use --mode off"),
        ("--disable-radix-cache", _SGLANG, "use --mode off"),
        ("--mamba-cache-mode", _VLLM, "leave it out: prompts resume at any token"),
        ("--mamba-block-size", _VLLM, "leave it out: prompts resume at any token"),
        ("--block-size", _VLLM, "use InferenceConfig(block_size_tokens=...) in Python"),
        ("--page-size", _SGLANG, "use InferenceConfig(block_size_tokens=...) in Python"),
        ("--kv-cache-dtype", _BOTH, "use InferenceConfig(kv_cache_dtype=...) in Python"),
        ("--mamba-ssm-cache-dtype", _VLLM, "use --state-encoding"),
        ("--kv-offloading-size", _VLLM, "use --host-cache-mib, and --cache-dir"),
        ("--kv-transfer-config", _VLLM, "use --host-cache-mib, and --cache-dir"),
        ("--swap-space", _VLLM, "use --host-cache-mib"),
        ("--enable-hierarchical-cache", _SGLANG, "use --host-cache-mib"),
        ("--hicache-size", _SGLANG, "use --host-cache-mib"),
        ("--tensor-parallel-size", _VLLM, "use --tp"),
        ("--tensor-model-parallel-size", _MEGATRON, "use --tp"),
        ("--tp-size", _BOTH, "use --tp"),
        ("--tp_size", _TRT, "use --tp"),
        ("--pipeline-parallel-size", _VLLM, "use --pp"),
        ("--pipeline-model-parallel-size", _MEGATRON, "use --pp"),
        ("--pp-size", _SGLANG, "use --pp"),
        ("--pp_size", _TRT, "use --pp"),
        ("--enable-expert-parallel", _VLLM, "use --ep N"),
        ("--ep-size", _SGLANG, "use --ep"),
        ("--ep_size", _TRT, "use --ep"),
        ("--dp-size", _SGLANG, "start several servers with a router before them"),
        ("--data-parallel-size", _VLLM, "start several servers with a router before them"),
        ("--quantization", _BOTH, "leave it out: the folder's config.json says it"),
        ("--load-format", _BOTH, "leave it out: the folder says it"),
        ("--trust-remote-code", _BOTH, "leave it out: code of a folder never runs"),
        ("--tokenizer", _VLLM, "put tokenizer.json into the model's folder"),
        ("--tokenizer-path", _SGLANG, "put tokenizer.json into the model's folder"),
        ("--revision", _VLLM, "leave it out: models are read from folders alone"),
        ("--speculative-config", _VLLM, "use --speculation, and --num-speculative-tokens"),
        ("--speculative-algorithm", _SGLANG, "use --speculation"),
        ("--enforce-eager", _VLLM, "leave it out: steps are eager without --cuda-graphs"),
        ("--disable-cuda-graph", _SGLANG, "leave it out: steps are eager without --cuda-graphs"),
        ("--enable-auto-tool-choice", _VLLM, "leave it out: it is always on"),
        ("--enable-prompt-tokens-details", _VLLM, "leave it out: it is always on"),
        ("--enable-chunked-prefill", _VLLM, "leave it out: it is always on"),
        ("--enable-cache-report", _SGLANG, "leave it out: it is always on"),
        ("--enable-metrics", _SGLANG, "leave it out: it is always on"),
        ("--scheduling-policy", _VLLM, "leave it out: a request's priority always counts"),
        ("--grammar-backend", _SGLANG, "leave it out: guides are llguidance's"),
        ("--structured-outputs-config", _VLLM, "leave it out: guides are llguidance's"),
        ("--generation-config", _VLLM, "leave it out: the folder's generation_config.json counts"),
        ("--allowed-origins", _VLLM, "use --cors-origin"),
        ("--kv-events-config", _VLLM, "use --kv-events-endpoint"),
        ("--enable-sleep-mode", _VLLM, "use --take-weights"),
        ("--weight-transfer-config", _VLLM, "use --take-weights"),
        ("--seed", _VLLM, "give a seed with each request"),
        ("--random-seed", _SGLANG, "give a seed with each request"),
        ("--enable-lora", _VLLM, "leave it out: merge the adapter into the weights"),
        ("--lora-modules", _VLLM, "leave it out: merge the adapter into the weights"),
        ("--uvicorn-log-level", _VLLM, "leave it out: the log has one line for each request"),
        ("--disable-log-requests", _VLLM, "leave it out: prompts are not logged"),
    ),
}
"""Who has no such name -> (name, the libraries that have it, what to do here)."""


def advice(owner: str, name: str, known: Collection[str]) -> str | None:
    """Return what to do in place of an unknown name: by the table, or the one of the `known` names
    that it is likely to mean; None: neither has it."""
    for other, _, remedy in OTHER_NAMES.get(owner, ()):
        if name == other:
            return remedy
    near = get_close_matches(name, known, 1)
    return f"did you mean {near[0]}?" if near else None


def names_fields(owner: type[T]) -> type[T]:
    """Make a dataclass answer an unknown field with the right one, in a TypeError."""
    make = owner.__init__
    known = [name for name in inspect.signature(make).parameters if name != "self"]

    @functools.wraps(make)
    def checked(self: Any, *values: Any, **given: Any) -> None:
        for name in given.keys() - set(known):
            remedy = advice(owner.__name__, name, known) or f"its fields are {', '.join(known)}"
            raise TypeError(f"{owner.__name__} has no field {name!r}: {remedy}")
        make(self, *values, **given)

    owner.__init__ = checked  # type: ignore[method-assign]
    return owner


def table() -> str:
    """Return docs/reference/other_names.md's table."""
    lines = ["| name | of | here, for | do this |", "| --- | --- | --- | --- |"]
    for owner, rows in OTHER_NAMES.items():
        for name, libraries, remedy in rows:
            lines.append(f"| `{name}` | {libraries} | `{owner}` | {remedy} |")
    return "\n".join(lines)
