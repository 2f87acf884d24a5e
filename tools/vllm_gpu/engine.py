"""One vLLM engine in this process, which carries out the lines of JSON on its standard input.

    python engine.py MODEL BACKEND [OPTIONS]

BACKEND is FLASH_ATTN, CUSTOM or TRITON_ATTN; OPTIONS is JSON, further arguments of LLM, and
`sinks`, which gives each layer a sink for each head, whatever the model is. An answer is a line
`ANSWER {json}` on standard output. compare.py and features.py run several of these side by side.
"""

import json
import os
import random
import sys
import time

ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # all that vLLM prints goes to the log
BEGIN = time.perf_counter()
for name, value in {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # flashinfer is not among the pieces; all is greedy here
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}.items():
    os.environ.setdefault(name, value)

import torch  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402

IMPORTED = time.perf_counter()
VOCABULARY = 32000


def answer(**found):
    print("ANSWER", json.dumps(found), file=ANSWERS, flush=True)


def workload(kind: str, seed: int) -> tuple[list[list[int]], list[int]]:
    """Prompts, and how many new tokens each gets."""
    draw = random.Random(f"{kind} {seed}")

    def length(least: int, most: int) -> int:
        return round(least * (most / least) ** draw.random())

    if kind == "mix":  # from one token to the longest
        shapes = [(length(1, 4096), draw.randint(1, 256)) for _ in range(256)]
    elif kind == "decode":
        shapes = [(draw.randint(1024, 3072), 128) for _ in range(128)]
    elif kind == "prefill":
        shapes = [(draw.randint(2048, 4096), 1) for _ in range(96)]
    elif kind == "few":  # a few requests at a time, short and long
        shapes = [(length(1, 4096), draw.randint(1, 24)) for _ in range(6)]
    elif kind == "check":
        shapes = [(length(64, 4096), 16) for _ in range(256)]
    elif kind == "repeats":  # words of 32 tokens again and again: n-grams are found in them
        shapes = [(length(64, 4096), 32) for _ in range(64)]
    else:
        raise ValueError(kind)
    prompts = [[draw.randrange(3, VOCABULARY) for _ in range(n)] for n, _ in shapes]
    if kind == "repeats":
        prompts = [[x[i % 32] for i in range(len(x))] for x in prompts]
    return prompts, [m for _, m in shapes]


def give_sinks() -> None:
    """Give each attention layer that is made from now on a sink for each head, as gpt-oss has."""
    from vllm.model_executor.layers.attention import Attention

    stock = Attention.__init__

    def init(self, num_heads: int, *args, **kwargs) -> None:
        sinks = torch.linspace(-2, 6, num_heads, dtype=torch.bfloat16, device="cuda")
        stock(self, num_heads, *args, sinks=sinks, **kwargs)

    Attention.__init__ = init


class Engine:
    def __init__(self, model: str, backend: str, options: dict) -> None:
        if options.pop("sinks", False):
            give_sinks()
        asked = dict(
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=4608,
            max_num_seqs=128,
            seed=0,
            disable_log_stats=True,
            attention_backend=backend,
        )
        self.llm = LLM(model, **asked | options)

    def generate(self, kind: str, seed: int, order: str = "given", logprobs: int | None = None):
        prompts, news = workload(kind, seed)
        places = list(range(len(prompts)))
        if order == "reversed":
            places.reverse()
        given = [{"prompt_token_ids": prompts[i]} for i in places]
        sampling = [
            SamplingParams(
                temperature=0.0,
                max_tokens=news[i],
                ignore_eos=True,
                detokenize=False,
                logprobs=logprobs,
            )
            for i in places
        ]
        torch.cuda.synchronize()
        start = time.perf_counter()
        found = self.llm.generate(given, sampling, use_tqdm=False)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        answers = [None] * len(prompts)
        for i, x in zip(places, found, strict=True):
            answers[i] = x.outputs[0]
        assert [len(x.token_ids) for x in answers] == news
        return seconds, sum(news), answers

    def turn(self, kind: str, seeds: list[int]):
        seconds, new = 0.0, 0
        for seed in seeds:
            one = self.generate(kind, seed)
            seconds, new = seconds + one[0], new + one[1]
        return dict(seconds=seconds, new=new)

    def check(self, seed: int, order: str, kind: str = "check"):
        """Tokens, and of each request's first ones the logarithms of the best five."""
        self.llm.reset_prefix_cache()
        seconds, _, answers = self.generate(kind, seed, order, logprobs=5)
        first = [{str(t): lp.logprob for t, lp in x.logprobs[0].items()} for x in answers]
        return dict(seconds=seconds, tokens=[list(x.token_ids) for x in answers], first=first)

    def drafts(self):
        """Tokens that were proposed, and those that were accepted (`disable_log_stats=False`)."""
        given = {x.name: x.value for x in self.llm.get_metrics() if hasattr(x, "value")}
        return {n: given[f"vllm:spec_decode_num_{n}_tokens"] for n in ("draft", "accepted")}

    def profile(self, kind: str, seed: int):
        """Milliseconds of the GPU, all kernels and the longest ones."""
        from torch.profiler import ProfilerActivity, profile

        if kind == "decode":  # its prompts come from the prefix cache
            given = [{"prompt_token_ids": x} for x in workload(kind, seed)[0]]
            one = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
            self.llm.generate(given, one, use_tqdm=False)
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            seconds, *_ = self.generate(kind, seed)
        kernels: dict[str, list] = {}
        for event in seen.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                entry = kernels.setdefault(event.name[:110], [0.0, 0])
                entry[0] += event.device_time_total / 1e3
                entry[1] += 1
        top = sorted(kernels.items(), key=lambda x: -x[1][0])[:8]
        busy = sum(ms for ms, _ in kernels.values())
        return dict(seconds=seconds, busy_ms=busy, top=top)


def main(model: str, backend: str, options: str = "{}") -> None:
    start = time.perf_counter()
    engine = Engine(model, backend, json.loads(options))
    answer(ready=True, import_seconds=IMPORTED - BEGIN, llm_seconds=time.perf_counter() - start)
    for line in sys.stdin:
        asked = json.loads(line)
        answer(**getattr(engine, asked.pop("do"))(**asked))


if __name__ == "__main__":
    main(*sys.argv[1:])
