"""Serve a tiny model with vLLM's whole engine, in its processes, and print its answers as JSON.

    python engine.py MODEL_DIR BACKEND KV_CACHE_DTYPE

BACKEND is CUSTOM or stock. A prefix is shared, prompts are cut in chunks.
"""

import json
import os
import sys

os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

from vllm import LLM, SamplingParams

PREFIX = [(7 * i) % 61 + 1 for i in range(150)]
PROMPTS = [[5, 6, 7], PREFIX, [*PREFIX, 9, 9], [11] * 40, [*PREFIX[:130], 3, 1, 4, 1, 5, 9]]


def main(model: str, backend: str, kv_cache_dtype: str) -> None:
    options = {} if backend == "stock" else {"attention_backend": backend}
    engine = LLM(
        model,
        skip_tokenizer_init=True,
        dtype="float32",
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=256,
        max_num_batched_tokens=64,
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        enforce_eager=True,
        **options,
    )
    prompts = [{"prompt_token_ids": tokens} for tokens in PROMPTS]
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
    answers = [list(x.outputs[0].token_ids) for x in engine.generate(prompts, greedy)]
    print("ANSWERS", json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
