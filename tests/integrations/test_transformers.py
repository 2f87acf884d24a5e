"""Transformers' models give the tokens of their eager attention with ours, in every mode."""

import copy

import model_sizes
import pytest
import torch

pytest.importorskip("transformers")

import transformers
from small_models import MODELS, NEW_TOKENS, SIZES, generate_batch, make_model

from torch_paged_attn.integrations import transformers as paged
from torch_paged_attn.testing import assert_close_as_baseline


@pytest.fixture(scope="module", autouse=True)
def registered():
    paged.register()
    paged.register()


@pytest.fixture(scope="module", params=MODELS)
def models(request):
    eager, ours = (make_model(request.param, name) for name in ("eager", paged.NAME))
    ours.load_state_dict(eager.state_dict())
    return eager, ours


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 97, (n,), generator=generator).tolist() for n in (1, 5, 13, 30, 64)]


@pytest.fixture(scope="module")
def eager_tokens(models, prompts):
    return [generate(models[0], torch.tensor([prompt]))[0] for prompt in prompts]


def generate(model, input_ids, attention_mask=None, **options):
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    options |= {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    tokens = model.generate(input_ids, attention_mask=attention_mask, **options)
    return tokens[:, input_ids.shape[1] :].tolist()


def test_generate(models, prompts, eager_tokens):
    ours = [generate(models[1], torch.tensor([prompt]))[0] for prompt in prompts]
    assert ours == eager_tokens


def test_generate_static_cache(models, prompts, eager_tokens):
    """Most of a static cache is unwritten, and no mask says so when nothing is padded."""
    ours = [
        generate(models[1], torch.tensor([prompt]), cache_implementation="static")[0]
        for prompt in prompts
    ]
    assert ours == eager_tokens


def test_generate_left_padded(models, prompts, eager_tokens):
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    assert generate(models[1], padded, mask) == eager_tokens


@pytest.mark.parametrize(
    ("page_size", "max_batch_tokens"),
    [pytest.param(4, 256, marks=pytest.mark.thorough), (16, 24)],
    ids=["whole_prompts", "chunked_prefill"],
)
def test_generate_batch(models, prompts, eager_tokens, page_size, max_batch_tokens):
    model = paged.use(models[1])
    assert generate_batch(model, prompts, page_size, max_batch_tokens) == eager_tokens
    assert generate(model, torch.tensor([prompts[2]]))[0] == eager_tokens[2]


def last_hidden(model, prompts):
    with torch.inference_mode():
        return torch.cat([model.model(torch.tensor([p])).last_hidden_state[0] for p in prompts])


def assert_as_close(ours, theirs, golden):
    """Ours is as close to float64 as Transformers' own attention is."""
    golden = golden.double()
    assert_close_as_baseline(ours, golden, (theirs - golden).abs(), torch.zeros_like(golden))


@pytest.mark.parametrize("marked_by", ["cu_seq_lens", "position_ids"])
def test_packed_row(models, prompts, marked_by):
    eager, ours = models
    ours.set_attn_implementation(paged.NAME)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    row = {
        "input_ids": torch.tensor([[token for prompt in prompts for token in prompt]]),
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "use_cache": False,
    }
    if marked_by == "cu_seq_lens":
        cu_seqlens = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int()
        longest = int(lengths.max())
        row |= {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
        row |= {"max_length_q": longest, "max_length_k": longest}
    with torch.inference_mode():
        packed = ours.model(**row).last_hidden_state[0]
    precise = copy.deepcopy(eager).double()
    if hasattr(precise, "set_experts_implementation"):
        precise.set_experts_implementation("eager")  # the other ones refuse float64
    assert_as_close(packed, last_hidden(eager, prompts), last_hidden(precise, prompts))


@pytest.mark.parametrize("mask_dim", [2, 4])
def test_encoder(mask_dim):
    """A bidirectional model under a padding mask, and under a dense one."""
    sizes = {
        name: SIZES[name]
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    }
    config = transformers.BertConfig(**sizes, num_attention_heads=4, max_position_embeddings=64)
    torch.manual_seed(0)
    model = transformers.BertModel(config).eval()
    keep = torch.arange(20) < torch.tensor([20, 3, 11])[:, None]
    mask = (
        keep
        if mask_dim == 2
        else keep[:, None, None] & (torch.rand(3, 1, 20, 20) < 0.7).logical_or(torch.eye(20))
    )
    inputs = {"input_ids": torch.randint(1, 97, (3, 20)), "attention_mask": mask}
    hidden = []
    for name in (paged.NAME, "sdpa"):
        model.set_attn_implementation(name)
        with torch.inference_mode():
            hidden.append(model(**inputs).last_hidden_state[keep])
    with torch.inference_mode():
        golden = model.double()(**inputs).last_hidden_state[keep]
    assert_as_close(*hidden, golden)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_packed_row_of_an_encoder(compiled):
    """Every token sees all of its own sequence, and nothing of another."""
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**model_sizes.TEXT)).eval()
    lengths = torch.tensor([20, 3, 1, 11])
    rows = torch.randint(1, 97, (int(lengths.sum()),)).split(lengths.tolist())
    bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    packed = {
        "input_ids": torch.cat(rows)[None],
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
    }

    @torch.inference_mode()
    def one_by_one():
        return torch.cat([model(row[None]).last_hidden_state[0] for row in rows])

    model.set_attn_implementation("sdpa")
    theirs = one_by_one()
    model.set_attn_implementation(paged.NAME)
    torch._dynamo.reset()
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    with torch.inference_mode():
        ours = run(**packed).last_hidden_state[0]
    model.set_attn_implementation("sdpa")
    model.double()
    assert_as_close(ours, theirs, one_by_one())


@pytest.mark.parametrize("sliding_window", [0, -1])
@pytest.mark.parametrize("padded", [False, True])
def test_a_window_without_keys(sliding_window, padded):
    """Transformers' masks hide every key: SDPA answers 0, and so do we."""
    hidden = {}
    keep = torch.ones(2, 20, dtype=torch.long)
    keep[0, :5] = 0 if padded else 1
    tokens = torch.randint(1, 97, (2, 20), generator=torch.Generator().manual_seed(2))
    for name in ("sdpa", paged.NAME):
        config = transformers.MistralConfig(**SIZES, sliding_window=sliding_window)
        torch.manual_seed(0)
        model_class = transformers.MistralForCausalLM
        model = model_class._from_config(config, attn_implementation=name).eval()
        with torch.inference_mode():
            # with a cache Transformers' own attention fails: its sliding layers keep a key or more
            states = model.model(tokens, attention_mask=keep, use_cache=False)
        hidden[name] = states.last_hidden_state[keep.bool()]
    assert torch.equal(hidden[paged.NAME], hidden["sdpa"])


def test_refusals():
    query = torch.zeros(1, 2, 3, 4)
    bounds = torch.tensor([0, 3], dtype=torch.int32)
    seen = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    with pytest.raises(
        NotImplementedError, match="cu_seq_lens_q is not supported with a mask of keys"
    ):
        paged.attention_forward(
            torch.nn.Module(), query, query, query, seen, is_causal=False, cu_seq_lens_q=bounds
        )
    with pytest.raises(
        NotImplementedError, match="position_bias is not supported with packed rows"
    ):
        paged.attention_forward(torch.nn.Module(), query, query, query, bounds, position_bias=query)
