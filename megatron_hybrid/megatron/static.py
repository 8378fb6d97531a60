"""Names of Megatron's static engine, which ends a whole batch before the next one: refused."""

from typing import Any


class StaticInferenceContext:
    """The memory of the static engine, which is refused.

    Raises:
        NotImplementedError: always; the message says what to call.
    """

    def __init__(self, *_: Any, **__: Any):
        raise NotImplementedError(
            f"{type(self).__name__} is not supported: build DynamicInferenceContext(model.config, "
            "InferenceConfig()), a GPTInferenceWrapper and a TextGenerationController with it, and "
            "call DynamicInferenceEngine(controller, context).generate(prompts, sampling_params), "
            "or MegatronLLM(model=model, tokenizer=tokenizer, use_coordinator=False).generate(...)"
        )


class StaticInferenceEngine(StaticInferenceContext):
    """The static engine, which is refused. `DynamicInferenceEngine.generate` gives the same
    answers, and begins requests as others end."""
