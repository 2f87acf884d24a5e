"""What is the TPU's own in gradients: `jax.grad`, checkpoints, either way of the DMAs, cores, the
way from torch. `tests/backends` has the named problems.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
import torch
from jax_arrays import rng_words, to_jax, to_torch
from pallas_oracle import watch
from same_bits import same_bits

from torch_paged_attn import environment, reference
from torch_paged_attn.backends.tpu.functions import (
    LSE,
    OUT,
    flash_varlen,
    flash_varlen_backward,
    merge_states,
    merge_states_backward,
)
from torch_paged_attn.backends.tpu.tile_sizes import Config
from torch_paged_attn.backends.tpu.torch_side import binding
from torch_paged_attn.testing import TRAINING, Gradients, assert_accurate_gradients, build

# tiles so small that short sequences have several
SMALL = Config(block_k=128, step_k=128, tile_rows=64)
INPUTS = ("q", "k", "v", "attn_bias", "sinks")
EVERYTHING = "training/everything/f32"


def case(name, **changes):
    """A call for JAX, what a loss hands back, and the truth of its gradients."""
    call = build(dataclasses.replace(TRAINING[name], **changes))
    out, lse = reference.flash_varlen(**call.args)
    g = torch.Generator().manual_seed(0)
    dout = torch.randn(out.shape, generator=g).to(out.dtype)
    dlse = torch.randn(lse.shape, generator=g)
    truth = Gradients.by_reference(call.op, call.args, dout, dlse)
    args = {name: to_jax(value) for name, value in call.args.items()}
    if args.get("rng_state") is not None:
        args["rng_state"] = rng_words(call.args["rng_state"])
    results = dict(dout=dout, dlse=dlse, out=out, softmax_lse=lse)
    return args, {name: to_jax(x) for name, x in results.items()}, truth


# the forward's alone
FORWARD_ONLY = ("out_dtype", "batch_invariant")


def backward(args, results, **changes):
    given = {name: x for name, x in args.items() if name not in FORWARD_ONLY} | results
    return lambda i: flash_varlen_backward(**{"config": SMALL, **given, **changes}, interpret=i)


def as_op(gradients):
    """As the op returns them."""
    return [torch.empty(0) if x is None else to_torch(x) for x in gradients]


@pytest.mark.device_suite
def test_either_way_of_the_dmas_and_two_cores_give_the_same_bits():
    args, results, truth = case(EVERYTHING)
    found = as_op(watch(backward(args, results), "on_wait"))
    assert_accurate_gradients(found, truth)
    two_cores = backward(args, results, config=dataclasses.replace(SMALL, num_cores=2))
    assert same_bits(found, as_op(watch(two_cores, "eager")))


def loss_of(args, results, interpret=True):
    """A loss by the inputs that have gradients, whose gradients by `out` and lse are given."""

    def loss(inputs):
        out, lse = flash_varlen(**{**args, **inputs}, config=SMALL, interpret=interpret)
        # rows that see no key have an lse of -inf, and may have any dout
        seen = ~jnp.isneginf(lse)
        dout = jnp.where(seen.T[..., None], results["dout"], 0)
        return jnp.sum(out * dout) + jnp.sum(jnp.where(seen, lse, 0) * results["dlse"])

    return loss, {name: args[name] for name in INPUTS if args.get(name) is not None}


@pytest.mark.device_suite
def test_jax_grad_is_the_backward():
    seqs = (9, 4), (5, 0), (3, -2)
    args, results, truth = case("training/gpt_oss/bf16", dtype=torch.float32, seqs=seqs)
    loss, inputs = loss_of(args, results)
    found = jax.grad(loss)({name: inputs.pop(name) for name in ("q", "sinks")})
    asked = Gradients({name: x for name, x in truth.of.items() if name in ("dq", "dsinks")})
    assert_accurate_gradients(as_op(found.get(name) for name in INPUTS), asked)


def kernels(jaxpr):
    """The names of the kernels that a jaxpr runs and whose results somebody takes."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation.params["name"]
        elif equation.outvars:
            for inner in jax.tree.leaves(
                equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
            ):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    yield from kernels(getattr(inner, "jaxpr", inner))


@pytest.mark.device_suite
def test_a_checkpoint_saves_what_its_policy_names():
    args, results, _ = case("training/gpt_oss/bf16")
    loss, inputs = loss_of(args, results, interpret=False)

    def count(function, name, inputs):
        found = kernels(jax.make_jaxpr(jax.grad(function))(inputs).jaxpr)
        return sum(name in kernel for kernel in found)

    named = jax.checkpoint_policies.save_only_these_names(OUT, LSE)
    once = count(loss, "varlen_q", inputs)
    assert once > 0
    assert count(jax.checkpoint(loss), "varlen_q", inputs) == 2 * once
    assert count(jax.checkpoint(loss, policy=named), "varlen_q", inputs) == once
    # and gradients that are not needed are not computed
    for asked, wanted in (("q", (1, 0)), ("v", (0, 1))):
        names = ("backward_dq", "backward_dk_dv")
        assert tuple(count(loss, name, {asked: inputs[asked]}) for name in names) == wanted


@pytest.mark.parametrize(
    ("changes", "of", "text"),
    [
        (
            {"paged": True},
            "q",
            "q requires grad, and there is no gradient for paged keys; supported: packed",
        ),
        ({"k": jnp.int8}, "q", "q requires grad, and k is int8; supported: float32"),
        ({}, "alibi_slopes", "alibi_slopes requires grad, and has no gradient"),
    ],
)
def test_what_has_no_gradient_is_refused(changes, of, text):
    shape = (4, 2, 16, 8) if "paged" in changes else (4, 2, 8)
    args = dict(q=jnp.zeros((4, 2, 8)), alibi_slopes=jnp.zeros(2), max_seqlen_q=4)
    args["k"] = args["v"] = jnp.zeros(shape, changes.get("k", jnp.float32))
    args["cu_seqlens_q"] = jnp.array([0, 4], jnp.int32)
    if "paged" in changes:
        args |= dict(seqused_k=jnp.array([4]), block_table=jnp.zeros((1, 1), jnp.int32))

    def loss(x):
        return flash_varlen(**{**args, of: x}, interpret=True)[0].sum()

    with pytest.raises(
        NotImplementedError, match=rf"flash_varlen\(\): not supported by the tpu backend: {text}"
    ):
        jax.eval_shape(jax.grad(loss), args[of])


def test_jax_grad_of_merged_states_is_their_backward():
    g = torch.Generator().manual_seed(0)
    parts = [to_jax(torch.randn(shape, generator=g)) for shape in ((6, 2, 3), (2, 6)) * 2]
    parts[1], parts[3] = parts[1].at[:, ::2].set(-jnp.inf), parts[3].at[:, ::3].set(-jnp.inf)
    dout, dlse = (to_jax(torch.randn(shape, generator=g)) for shape in ((6, 2, 3), (2, 6)))
    results, transpose = jax.vjp(merge_states, *parts)
    found = [to_torch(x) for x in transpose((dout, dlse))]
    wanted = merge_states_backward(dout, dlse, *parts, *results)
    assert same_bits(found, [to_torch(x) for x in wanted])


@pytest.mark.device_suite
def test_from_torch(monkeypatch):
    """The op's function on torch tensors, by a front end that copies them to JAX and back."""
    monkeypatch.setattr(environment, "TPU_INTERPRET", True)

    def run(function, tensors, outputs):
        found = function(*(to_jax(t) for t in tensors))
        assert outputs == (len(found) if isinstance(found, tuple) else 1)
        return jax.tree.map(to_torch, found)

    call = build(dataclasses.replace(TRAINING["training/one_bias/bf16"], seqs=((3, 5), (2, 0))))
    out, lse = reference.flash_varlen(**call.args)
    dout = torch.ones(1).to(out.dtype).expand(out.shape)
    # a kernel for two results, one that XLA has, and two that are not needed
    mask = False, True, True, False, True
    given = call.args | dict(dout=dout, dlse=None, out=out, softmax_lse=lse, output_mask=mask)
    for name in FORWARD_ONLY:
        given.pop(name, None)
    found = binding.flash_varlen_backward(**given, run=run)
    assert_accurate_gradients(found, Gradients.by_reference(call.op, call.args, dout, None, mask))
