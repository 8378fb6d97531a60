"""Prefix sharing in a script: a system prompt, a repeated prompt, a second turn.

Run it with `python examples/share_prefixes.py`.
"""

import megatron_hybrid as mh

SYSTEM = "The old man sat down by the fire, and the children gathered round to hear his story. "


def main() -> None:
    model, tokenizer = mh.load_pretrained("demo")
    engine = mh.DynamicInferenceEngine(model, tokenizer)
    params = mh.SamplingParams(top_k=1, num_tokens_to_generate=24)

    def ask(prompt, options=None):
        result = engine.generate([prompt], params, options)[0]
        prefix = result.prefix
        reason = prefix.miss_reason.value if prefix.miss_reason else ""
        print(
            f"{prefix.prompt_tokens:4} prompt tokens, {prefix.shared_tokens:4} shared, "
            f"{prefix.skipped_tokens:4} skipped  {reason}"
        )
        return result

    # The end of the system prompt is declared, so already the second question resumes there.
    end_of_system = mh.RequestOptions(cache_breakpoints=[len(tokenizer.tokenize(SYSTEM))])
    ask(SYSTEM + '"Was there a ship?" asked Tom.', end_of_system)
    first = ask(SYSTEM + '"Was there a bear?" asked Jane.', end_of_system)
    ask(SYSTEM + '"Was there a bear?" asked Jane.')  # the same again: no prefill at all
    history = first.prompt_tokens + first.token_ids
    next_turn = tokenizer.tokenize(' "And then?" said Jane.', add_special_tokens=False)
    ask(history + next_turn)  # resumes after the answer


if __name__ == "__main__":
    main()
