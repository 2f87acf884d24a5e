"""Serve a tiny model with vLLM's whole engine, in its processes, and print its answers as JSON.

    python engine.py MODEL_DIR BACKEND KV_CACHE_DTYPE [KIND]

BACKEND is CUSTOM or stock. KIND is `text` (a prefix is shared, prompts are cut in chunks), `labels`
(an encoder's, one for each token), `audio` (a decoder's text, by cross attention to what an
encoder makes of noise) or `orders` (the log-probabilities of new tokens, with the prompts in order
and reversed).
"""

import json
import os
import sys

os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import numpy
from vllm import LLM, SamplingParams

PREFIX = [(7 * i) % 61 + 1 for i in range(150)]
PROMPTS = [[5, 6, 7], PREFIX, [*PREFIX, 9, 9], [11] * 40, [*PREFIX[:130], 3, 1, 4, 1, 5, 9]]


def text(model: str, **options: object) -> list[list[int]]:
    engine = LLM(
        model,
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_batched_tokens=64,
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        **options,
    )
    return generated(engine, prompts(), 12)


def labels(model: str, **options: object) -> list[list[int]]:
    engine = LLM(model, runner="pooling", skip_tokenizer_init=True, max_model_len=256, **options)
    found = engine.encode(prompts(), pooling_task="token_classify")
    return [x.outputs.data.argmax(-1).tolist() for x in found]


def audio(model: str, **options: object) -> list[list[int]]:
    engine = LLM(model, max_model_len=48, limit_mm_per_prompt={"audio": 1}, **options)
    draw = numpy.random.default_rng(0)
    pairs = [
        {
            "encoder_prompt": {
                "prompt": "",
                "multi_modal_data": {"audio": (draw.standard_normal(n, "float32"), 16000)},
            },
            "decoder_prompt": {"prompt_token_ids": [1, 2, 3, 5][:tokens]},
        }
        for n, tokens in ((32000, 4), (9000, 1), (20000, 3))
    ]
    return generated(engine, pairs, 20)


def orders(model: str, **options: object) -> list[list[list[float]]]:
    engine = LLM(
        model,
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_batched_tokens=64,
        enable_chunked_prefill=True,
        enable_prefix_caching=False,
        **options,
    )
    greedy = SamplingParams(
        temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False, logprobs=0
    )

    def found(given: list) -> list[list[float]]:
        return [
            [next(iter(step.values())).logprob for step in x.outputs[0].logprobs]
            for x in engine.generate(given, greedy)
        ]

    return [found(prompts()), found(prompts()[::-1])[::-1]]


def prompts() -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": tokens} for tokens in PROMPTS]


def generated(engine: LLM, given: list, tokens: int) -> list[list[int]]:
    greedy = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    return [list(x.outputs[0].token_ids) for x in engine.generate(given, greedy)]


KINDS = {"text": text, "labels": labels, "audio": audio, "orders": orders}


def main(model: str, backend: str, kv_cache_dtype: str, kind: str = "text") -> None:
    options = {} if backend == "stock" else {"attention_backend": backend}
    options |= {"dtype": "float32", "kv_cache_dtype": kv_cache_dtype, "enforce_eager": True}
    answers = KINDS[kind](model, **options)
    print("ANSWERS", json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
