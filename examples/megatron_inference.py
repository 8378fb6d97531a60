"""A conversation in a script as Megatron's users write it.

Unchanged:                  python -m megatron_hybrid.megatron examples/megatron_inference.py
With our imports instead:   from megatron_hybrid.megatron import ..., then python SCRIPT

The model here is the demo's; a Megatron script has one from `get_model_for_inference()`.
"""

from megatron.core.inference.config import InferenceConfig
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
    GPTInferenceWrapper,
)
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)

from megatron_hybrid import load_pretrained

TURNS = [
    "Once upon a time there was a small garden behind the house.",
    "\nWho lived there?",
    "\nWhat did they find?",
]


def main() -> None:
    model, tokenizer = load_pretrained("demo")
    config = InferenceConfig(
        buffer_size_gb=0.25,
        max_requests=16,
        max_sequence_length=1024,
        enable_prefix_caching=True,
        prefix_caching_mamba_gb=0.125,
    )
    context = DynamicInferenceContext(model.config, config)
    wrapped_model = GPTInferenceWrapper(model, context)
    controller = TextGenerationController(wrapped_model, tokenizer)
    engine = DynamicInferenceEngine(controller, context)

    params = SamplingParams(top_k=1, num_tokens_to_generate=24)
    tokens: list[int] = []
    for turn, text in enumerate(TURNS):
        tokens += tokenizer.tokenize(text)
        engine.add_request(turn, tokens, params)
        while engine.has_unfinished_requests():
            for record in engine.step_modern()["finished_request_records"]:
                request = record.merge()
        print(
            f"turn {turn + 1}: {request.prompt_length} prompt tokens, "
            f"{request.num_cached_tokens} cached: {request.generated_text!r}"
        )
        tokens += request.generated_tokens
    print(f"{context.lifetime_prefill_token_count} prompt tokens were computed in all")


if __name__ == "__main__":
    main()
