"""How many log-probabilities of `generate_batch` have the bits of a packed forward, as JSON, in
float32 and in bfloat16.

Prompts share prefixes and are cut in chunks; then all sequences are
one packed row. Linear layers compute blocks of ROWS rows, so that a token's bits do not depend on
how many there are.
"""

import json

import torch
from torch.nn.functional import linear, pad
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

from torch_paged_attn.integrations import transformers as paged

ROWS = 16


class BlockedLinear(torch.nn.Linear):
    def forward(self, x):
        rows = x.flatten(0, -2)
        filled = pad(rows, (0, 0, 0, -len(rows) % ROWS))
        done = torch.cat([linear(block, self.weight, self.bias) for block in filled.split(ROWS)])
        return done[: len(rows)].unflatten(0, x.shape[:-1])


def make_model(dtype):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    words = {"vocab_size": 97, "eos_token_id": None, "pad_token_id": 0}
    config = LlamaConfig(**sizes, **heads, **words)
    model = LlamaForCausalLM._from_config(config, attn_implementation=paged.NAME, dtype=dtype)
    for module in list(model.modules()):
        if type(module) is torch.nn.Linear:
            module.__class__ = BlockedLinear
    return model.eval()


def sampled(model, prompts):
    """Each prompt with the tokens sampled after it, and the log-probabilities of these."""
    fields = ContinuousBatchingConfig.__dataclass_fields__
    results = paged.use(model).generate_batch(
        prompts,
        generation_config=GenerationConfig(
            max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None, use_cache=False
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            **{"page_size" if "page_size" in fields else "block_size": 16},
            num_blocks=64,
            max_batch_tokens=24,
            return_logprobs=True,
        ),
    )
    found = list(results.values())
    tokens = [[*p, *x.generated_tokens] for p, x in zip(prompts, found, strict=True)]
    return tokens, [x for result in found for x in result.logprobs]


def packed(model, sequences, prompts):
    """The log-probabilities of the same tokens, from all sequences in one row."""
    model.set_attn_implementation(paged.NAME)
    positions = torch.cat([torch.arange(len(x)) for x in sequences])[None]
    row = torch.tensor([[token for x in sequences for token in x]])
    with torch.inference_mode():
        logits = model(input_ids=row, position_ids=positions, use_cache=False).logits[0]
    chosen = logits.float().softmax(-1)[:-1].gather(1, row[0, 1:, None])[:, 0].log()
    found, start = [], 0
    for sequence, prompt in zip(sequences, prompts, strict=True):
        found += chosen[start + len(prompt) - 1 : start + len(sequence) - 1].tolist()
        start += len(sequence)
    return found


def main():
    draw = torch.Generator().manual_seed(1)
    prefix = torch.randint(1, 97, (40,), generator=draw).tolist()
    prompts = [torch.randint(1, 97, (n,), generator=draw).tolist() for n in (1, 5, 33, 64)]
    prompts += [[*prefix, 3], [*prefix, 9, 9]]
    paged.register()
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        model = make_model(dtype)
        sequences, before = sampled(model, prompts)
        after = packed(model, sequences, prompts)
        equal = sum(a == b for a, b in zip(before, after, strict=True))
        found.append({"equal": equal, "total": len(before), "distinct": len(set(before))})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
