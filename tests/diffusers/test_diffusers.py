"""diffusers' own models with `set_attention_backend("paged_attn")`, in an environment of their own.

Weights are random and small. Golden is the model in float64 on diffusers' native attention, and
what that is off by in float32 is what ours may be off by.
"""

import copy
import subprocess
import sys

import pytest
import torch
from diffusers import (
    FluxTransformer2DModel,
    QwenImageTransformer2DModel,
    UNet2DConditionModel,
    WanTransformer3DModel,
)
from diffusers.models import attention_dispatch as dispatch

from torch_paged_attn.integrations import diffusers as paged
from torch_paged_attn.testing import assert_as_right_as


def flux():
    model = FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    return model, dict(
        hidden_states=torch.randn(2, 16, 4),
        encoder_hidden_states=torch.randn(2, 7, 32),
        pooled_projections=torch.randn(2, 32),
        timestep=torch.tensor([0.5, 0.1]),
        img_ids=torch.randn(16, 3),
        txt_ids=torch.randn(7, 3),
    )


def qwen_image():
    """Prompts of two lengths: a mask over keys."""
    model = QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
    )
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, 4:] = False
    return model, dict(
        hidden_states=torch.randn(2, 16, 16),
        encoder_hidden_states=torch.randn(2, 7, 16),
        encoder_hidden_states_mask=mask,
        timestep=torch.tensor([0.5, 0.1]),
        img_shapes=[(1, 4, 4)] * 2,
    )


def wan():
    """Video, with cross attention."""
    model = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=256,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
    )
    return model, dict(
        hidden_states=torch.randn(2, 4, 2, 8, 8),
        timestep=torch.tensor([3, 5]),
        encoder_hidden_states=torch.randn(2, 7, 16),
    )


MODELS = {"flux": flux, "qwen_image": qwen_image, "wan": wan}


@pytest.fixture(autouse=True)
def registered():
    paged.register()
    yield
    dispatch._AttentionBackendRegistry.set_active_backend(dispatch.AttentionBackendName.NATIVE)


def doubled(inputs):
    def one(x):
        return x.double() if torch.is_tensor(x) and x.dtype == torch.float32 else x

    return {name: one(x) for name, x in inputs.items()}


@pytest.fixture
def taken(monkeypatch):
    calls = []
    op = paged.flash_varlen

    def counted(**options):
        calls.append(options)
        return op(**options)

    monkeypatch.setattr(paged, "flash_varlen", counted)
    return calls


@pytest.mark.parametrize("name", MODELS)
def test_a_model_answers_as_on_its_native_attention(name, taken):
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model.eval()
    with torch.no_grad():
        golden = copy.deepcopy(model).double()(**doubled(inputs)).sample
        native = model(**inputs).sample
        model.set_attention_backend(paged.NAME)
        ours = model(**inputs).sample
        count = len(taken)
        assert count >= 2
        model.set_attention_backend("native")
        assert torch.equal(model(**inputs).sample, native) and len(taken) == count
    assert_as_right_as(ours, golden, native)
    if name == "qwen_image":
        assert all("attn_bias" in call for call in taken)


def test_a_unet_takes_the_active_backend():
    """Older models have processors that go to SDPA by themselves."""
    model = UNet2DConditionModel(
        block_out_channels=(8, 16),
        norm_num_groups=4,
        layers_per_block=1,
        sample_size=8,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=8,
    )
    inputs = torch.randn(1, 4, 8, 8), torch.tensor([3]), torch.randn(1, 5, 16)
    with torch.no_grad():
        expected = model(*inputs).sample
        model.set_attention_backend(paged.NAME)
        assert torch.equal(model(*inputs).sample, expected)


def test_gradients(taken):
    torch.manual_seed(0)
    model, inputs = flux()
    golden = copy.deepcopy(model).double()
    golden(**doubled(inputs)).sample.sum().backward()
    native = copy.deepcopy(model)
    native(**inputs).sample.sum().backward()
    model.set_attention_backend(paged.NAME)
    model(**inputs).sample.sum().backward()
    assert taken
    name = "transformer_blocks.0.attn.to_q.weight"
    ours, theirs, exact = (m.get_parameter(name).grad for m in (model, native, golden))
    assert_as_right_as(ours, exact, theirs)


def test_the_context_manager(taken):
    q = torch.randn(1, 4, 2, 16)
    with dispatch.attention_backend(paged.NAME):
        ours = dispatch.dispatch_attention_fn(q, q, q)
    assert len(taken) == 1 and ours.shape == q.shape
    dispatch.dispatch_attention_fn(q, q, q)
    assert len(taken) == 1


def test_a_second_call_changes_nothing():
    names = list(dispatch.AttentionBackendName)
    paged.register()
    assert list(dispatch.AttentionBackendName) == names and paged.MEMBER in dir(
        dispatch.AttentionBackendName
    )


def test_another_owner_is_named():
    program = """
from diffusers.models import attention_dispatch as dispatch
from torch_paged_attn.integrations import diffusers as paged
def somebodys(query, key, value): pass
dispatch._AttentionBackendRegistry.register(paged._new_member(dispatch.AttentionBackendName))(somebodys)
try:
    paged.register()
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "has a backend 'paged_attn' of __main__ already" in done.stdout, done.stderr
