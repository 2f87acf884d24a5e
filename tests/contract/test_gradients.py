"""A call that needs a gradient is refused by name, however it asks for it; others are answered."""

import contextlib
import gc
from pathlib import Path

import pytest
import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functionalize, grad, jacfwd, jacrev, jvp, vjp, vmap
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import torch_paged_attn
from torch_paged_attn import flash_varlen, merge_states, reshape_and_cache

pytestmark = pytest.mark.usefixtures("no_backward")
CU_Q, CU_K = (torch.tensor([0, n], dtype=torch.int32) for n in (3, 5))
K, V = torch.randn(2, 5, 2, 16)
SLOTS = torch.tensor([1, 7, 3])


def query():
    return torch.randn(3, 2, 16)


def attend(q):
    return flash_varlen(q, K, V, CU_Q, CU_K)[0]


def refused(asked="requires grad", op="flash_varlen", name="q"):
    return pytest.raises(NotImplementedError, match=rf"^{op}\(\): {name} {asked}, ")


class Subclass(torch.Tensor):
    """One that only `__torch_function__` sees."""


class Seen(TorchDispatchMode):
    """Which operators pass."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def fake(q):
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    return mode.from_tensor(q).requires_grad_(q.requires_grad)


WRAPPERS = {
    "plain": lambda q: q,
    "view": lambda q: q.view(3, 32).view(3, 2, 16),
    "product": lambda q: q * 1,
    "parameter": lambda q: torch.nn.Parameter(q.detach(), q.requires_grad),
    "torch_function": lambda q: q.detach().as_subclass(Subclass).requires_grad_(q.requires_grad),
    "torch_dispatch": lambda q: TwoTensor(q.detach(), q.detach()).requires_grad_(q.requires_grad),
    "fake": fake,
}
OFF = {"no_grad": torch.no_grad, "inference": torch.inference_mode}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_reverse_mode(wrap):
    asking = wrap(query().requires_grad_())
    with refused():
        attend(asking)
    with Seen(), refused():
        attend(asking)
    for off in OFF.values():
        with off():
            assert not attend(asking).requires_grad
    answer = attend(wrap(query()))
    assert not answer.requires_grad and answer.shape == (3, 2, 16)


@pytest.mark.parametrize("wrap", ["plain", "torch_dispatch"])
def test_every_tensor_is_looked_at(wrap):
    out, lse = query(), torch.randn(2, 3)
    asking = WRAPPERS[wrap](torch.randn(2, 3).requires_grad_())
    merged, _ = merge_states(out, lse, out, asking)
    assert merged.requires_grad
    bias = torch.zeros(1, 3, 5).requires_grad_()
    with refused(name="attn_bias"):
        flash_varlen(query(), K, V, CU_Q, CU_K, attn_bias=bias)


TRANSFORMS = {
    "grad": ("requires grad", lambda q: grad(lambda q: attend(q).sum())(q)),
    "vjp": ("requires grad", lambda q: vjp(attend, q)),
    "jacrev": ("requires grad", lambda q: jacrev(attend)(q)),
    "jvp": ("has a tangent", lambda q: jvp(attend, (q,), (q,))),
    "jacfwd": ("has a tangent", lambda q: jacfwd(attend)(q)),
    "vmap(grad)": ("requires grad", lambda q: vmap(grad(lambda q: attend(q).sum()))(q[None])),
    "grad(vmap)": ("requires grad", lambda q: grad(lambda q: vmap(attend)(q).sum())(q[None])),
}


@pytest.mark.parametrize("asked, transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.no_grad])
def test_transforms(asked, transform, mode):
    with mode(), refused(asked):
        transform(query())


def test_dual_tensors():
    for off in (contextlib.nullcontext, torch.no_grad):
        with forward_ad.dual_level(), off(), refused("has a tangent"):
            attend(forward_ad.make_dual(query(), query()))
    with forward_ad.dual_level():
        attend(query())


def test_a_transform_over_something_else():
    q, x = query(), torch.tensor(2.0)
    answer = attend(q)
    assert torch.equal(grad(lambda x: (attend(q) * x).sum())(x), answer.sum())
    assert torch.equal(jvp(lambda x: attend(q) * x, (x,), (x,))[1], answer * 2)
    assert torch.equal(functionalize(attend)(q), answer)


def test_vmap_is_a_loop_over_the_calls():
    batch = torch.randn(4, 3, 2, 16)
    expected = torch.stack([attend(q) for q in batch])
    for mode in (contextlib.nullcontext, *OFF.values()):
        with mode():
            assert torch.equal(vmap(attend)(batch), expected)
    assert torch.equal(vmap(attend, in_dims=1)(batch.transpose(0, 1)), expected)
    with refused():
        vmap(attend)(batch.requires_grad_())


def test_vmap_of_a_write_is_refused():
    cache = torch.zeros(2, 2, 2, 4, 16)

    def write(key):
        reshape_and_cache(key, key, cache, SLOTS)
        return key

    with pytest.raises(NotImplementedError, match=r"^reshape_and_cache\(\): vmap is not supported"):
        vmap(write)(torch.randn(4, 3, 2, 16))
    assert not cache.any()


@pytest.mark.parametrize(
    ("fullgraph", "backend"),
    [(True, "eager"), (True, "aot_eager"), (False, "aot_eager")],
)
def test_compiled(fullgraph, backend):
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend=backend, fullgraph=fullgraph)
    q = query()
    assert torch.equal(compiled(q), attend(q))
    with pytest.raises(Exception, match=r"flash_varlen\(\): q requires grad"):
        compiled(q.requires_grad_())
    with torch.no_grad():
        assert torch.equal(compiled(q), attend(q))


def test_a_mode_sees_the_operator_and_not_its_twin():
    for mode in (contextlib.nullcontext, *OFF.values()):
        with Seen() as seen, mode():
            attend(query())
        assert "paged_attn.flash_varlen.default" in seen.names
        assert not any("gated" in name for name in seen.names)


def write(cache, key=None):
    key = query() if key is None else key
    reshape_and_cache(key, key, cache, SLOTS)


@pytest.mark.parametrize("mode", [contextlib.nullcontext, *OFF.values()])
def test_a_write_moves_the_version(mode):
    caches = [torch.zeros(2, 2, 2, 4, 16), torch.zeros(2, 2, 4, 16), torch.zeros(2, 2, 4, 16)]
    with mode():
        write(caches[0])
        write(tuple(caches[1:]))
    assert all(cache._version > 0 and cache.any() for cache in caches)


@pytest.mark.parametrize("mode", [contextlib.nullcontext, *OFF.values()])
def test_an_inference_tensor_is_written(mode):
    with torch.inference_mode():
        cache = torch.zeros(2, 2, 2, 4, 16)
    with mode():
        write(cache)
    assert cache.is_inference() and cache.any()


def test_a_write_is_seen_by_a_backward_pass():
    cache, weight = torch.zeros(2, 2, 2, 4, 16), torch.ones((), requires_grad=True)
    loss = (cache * weight).sum()
    with torch.no_grad():
        write(cache)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_refused_write_writes_nothing():
    cache = torch.zeros(2, 2, 2, 4, 16)
    with refused(op="reshape_and_cache", name="key"):
        write(cache, query().requires_grad_())
    with refused(op="reshape_and_cache", name="kv_cache"):
        write(cache.clone().requires_grad_())
    assert not cache.any() and cache._version == 0


def test_a_library_that_cannot_see_gradients_is_guarded_before_the_kernel(programs):
    # as where libtorch has renamed what csrc/ops/autograd.cpp looks for
    tests = "reverse_mode or every_tensor or dual or version or inference_tensor or vmap"
    code = f"""
import pytest, sys
from torch_paged_attn.ops import _library
for name, gate in _library.GATES.items():
    _library.LIBRARY.impl(name, gate.call_gated, "AutogradCPU")
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", {__file__!r}, "-k", {tests!r}]))
"""
    programs.run(code, str(Path(torch_paged_attn.__file__).parents[1]))


def test_arguments_are_given_back():
    tensors = (query(), K, V, CU_Q, CU_K)
    bad = (torch.randn(3, 2, 17), K, V, CU_Q, CU_K)
    asking = (query().requires_grad_(), K, V, CU_Q, CU_K)

    def references():
        gc.collect()
        return [t._use_count() for t in pytree.tree_leaves((tensors, bad, asking))]

    before = references()
    for call in (tensors, bad, asking):
        with contextlib.suppress(ValueError, NotImplementedError):
            flash_varlen(*call, softmax_scale=0.5, out_dtype=torch.float32)
    assert references() == before
