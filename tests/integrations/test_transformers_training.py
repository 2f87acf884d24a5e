"""Models of every kind train on the op: parameters' gradients beside Transformers' SDPA.

Golden is SDPA in float64; what SDPA is off by in float32 is what ours may be off by.
"""

import copy

import model_sizes
import pytest
import torch
import transformers
from sampling import IS_THOROUGH

from torch_paged_attn import flash_varlen, reference
from torch_paged_attn.integrations import transformers as paged
from torch_paged_attn.testing import assert_as_right_as
from torch_paged_attn.testing.accuracy import Truth, assert_accurate

TEXT = model_sizes.TEXT | {"bos_token_id": 1, "eos_token_id": 2}
LLAMA = {**TEXT, "num_key_value_heads": 2}
WHISPER = {
    "vocab_size": 97,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_mel_bins": 8,
    "max_source_positions": 16,
    "max_target_positions": 32,
    "init_std": 0.6,
    "dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
T5 = model_sizes.T5 | {"dropout_rate": 0.0}
LENGTH, PREFIX = 9, 6


@pytest.fixture(scope="module", autouse=True)
def registered():
    paged.register()


def model_of(name, options, attention):
    config = getattr(transformers, f"{name}Config")(**copy.deepcopy(options))
    torch.manual_seed(0)
    model_class = getattr(transformers, f"{name}Model")
    return model_class._from_config(config, attn_implementation=attention).train()


def generator():
    return torch.Generator().manual_seed(1)


def tokens(*shape):
    return torch.randint(3, 97, shape, generator=generator())


def gradients(model, run):
    """Of a loss that weighs every number of the hidden states differently."""
    hidden = run(model).last_hidden_state
    (hidden * torch.linspace(-1.0, 1.0, hidden.numel()).view_as(hidden)).sum().backward()
    return {n: x.grad for n, x in model.named_parameters() if x.grad is not None}


def assert_trains(name, options, run, compiled=False, **how):
    """The gradients of the model on ours are as right as those on SDPA."""
    golden = gradients(model_of(name, options, "sdpa").double(), run)
    peer = gradients(model_of(name, options, "sdpa"), run)
    model = model_of(name, options, paged.NAME)
    if compiled:
        torch._dynamo.reset()
        model.compile(backend="aot_eager", **how)
    ours = gradients(model, run)
    assert ours.keys() == golden.keys() == peer.keys()
    # one draw of the peer's luck for all numbers: a bias alone has 32. Each in units of its largest
    assert_as_right_as(
        *(
            torch.cat([found[n].flatten() / golden[n].abs().max() for n in golden])
            for found in (ours, golden, peer)
        )
    )


def speech(model):
    """Fewer decoded tokens than the encoder has frames, none of them padding."""
    frames = torch.randn(3, 8, 32, generator=generator()).to(model.dtype)
    return model(input_features=frames, decoder_input_ids=tokens(3, LENGTH), use_cache=False)


def after_a_prefix(model):
    """Keys that were there before the tokens, as prefix tuning learns them."""
    cache = transformers.DynamicCache(config=model.config)
    draw = generator()
    for layer in range(2):
        shape = 2, 3, 2, PREFIX, 8
        k, v = torch.randn(shape, generator=draw).to(model.dtype).requires_grad_()
        cache.update(k, v, layer)
    seen = torch.ones(3, PREFIX + LENGTH, dtype=torch.long)
    return model(input_ids=tokens(3, LENGTH), past_key_values=cache, attention_mask=seen)


# T5, with cross-attention and a bias, is compiled below
@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["eager", "compiled"]
)
def test_cross_attention(compiled):
    assert_trains("Whisper", WHISPER, speech, compiled)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    "padded", [pytest.param(False, marks=pytest.mark.thorough), True], ids=["full", "padded"]
)
def test_a_bias_of_positions_is_learned(padded, compiled):
    seen = torch.ones(3, 13, dtype=torch.long)
    if padded:
        seen[0, 7:] = seen[1, :4] = 0

    def translate(model):
        ids = {"input_ids": tokens(3, 13), "decoder_input_ids": tokens(3, LENGTH)}
        return model(**ids, attention_mask=seen if padded else None, use_cache=False)

    one = {} if IS_THOROUGH or not compiled else {"num_decoder_layers": 1}
    assert_trains("T5", T5 | one, translate, compiled)


@pytest.mark.parametrize("name, window", [("Llama", {}), ("Mistral", {"sliding_window": 4})])
def test_keys_before_the_tokens(name, window):
    assert_trains(name, LLAMA | window, after_a_prefix)


@pytest.mark.parametrize(
    "lengths",
    [(9, 1, 5), pytest.param((15,), marks=pytest.mark.thorough)],
    ids=["packed", "one"],
)
def test_one_row_compiles_whole(lengths):
    positions = torch.cat([torch.arange(length) for length in lengths])[None]

    def packed(model):
        return model(input_ids=tokens(1, 15), position_ids=positions, use_cache=False)

    assert_trains("Llama", LLAMA, packed, compiled=True, fullgraph=True)


def test_a_mask_of_pairs_with_more_keys_than_queries():
    q = torch.randn(2, 4, 5, 8, generator=generator())
    k, v = torch.randn(2, 2, 2, 7, 8, generator=generator())
    mask = torch.rand(2, 1, 5, 7, generator=generator()) > 0.4
    mask[..., 0] = True
    module = torch.nn.Module()

    def found(attend, mask, *inputs):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out, _ = attend(module, *leaves, mask)
        return torch.autograd.grad(out.square().sum(), leaves)

    module.num_key_value_groups = 2
    sdpa = transformers.AttentionInterface()["sdpa"]
    added = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
    golden = found(sdpa, added.double(), *(x.double() for x in (q, k, v)))
    peer = found(sdpa, added, q, k, v)
    for seen in (mask, added):
        for ours, exact, theirs in zip(
            found(paged.attention_forward, seen, q, k, v), golden, peer, strict=True
        ):
            assert_as_right_as(ours, exact, theirs)


def test_dropout_draws_from_torchs_generator():
    q, k, v = torch.randn(3, 2, 4, 5, 8, generator=generator())
    module = torch.nn.Module()

    def attend():
        torch.manual_seed(3)
        return paged.attention_forward(module, q, k, v, None, dropout=0.5)[0]

    out = attend()
    assert torch.equal(out, attend())
    assert not torch.equal(out, paged.attention_forward(module, q, k, v, None, dropout=0.5)[0])
    torch.manual_seed(3)
    rng_state = torch.randint(2**62, (2,))
    rows = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    bounds = torch.tensor([0, 5, 10], dtype=torch.int32)
    options = {"causal": True, "dropout_p": 0.5, "rng_state": rng_state}
    truth = Truth.of(reference.flash_varlen, *rows, bounds, **options)
    _, lse = flash_varlen(*rows, bounds, **options)
    assert_accurate(out.flatten(0, 1), lse, truth)


# these models' default dropout
@pytest.mark.parametrize("name, options", [("Bert", TEXT), ("Whisper", WHISPER)])
def test_dropout_is_the_same_when_a_checkpoint_computes_again(name, options):
    if name == "Whisper":
        options, run = options | {"attention_dropout": 0.1}, speech
    else:
        keep = torch.tensor([[1] * LENGTH, [1] * 4 + [0] * (LENGTH - 4)])

        def run(model):
            return model(input_ids=tokens(2, LENGTH), attention_mask=keep)

    found = []
    for checkpointed in (False, True):
        model = model_of(name, options, paged.NAME)
        if checkpointed:
            model.gradient_checkpointing_enable()
        torch.manual_seed(5)
        found.append(gradients(model, run))
    for which, gradient in found[0].items():
        assert torch.equal(gradient, found[1][which]), which


def test_dropout_under_a_compiler():
    torch._dynamo.reset()
    one = {} if IS_THOROUGH else {"num_hidden_layers": 1}
    model = model_of("Bert", TEXT | one, paged.NAME)
    model.compile(backend="aot_eager", fullgraph=True)
    found = gradients(model, lambda model: model(input_ids=tokens(2, LENGTH)))
    assert all(x.isfinite().all() for x in found.values())
    model.eval()
    with torch.no_grad():
        a, b = (model(input_ids=tokens(2, LENGTH)).last_hidden_state for _ in range(2))
    assert torch.equal(a, b)
