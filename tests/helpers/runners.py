"""Runners: how the conformance suite calls a backend. Tensors go in and come out on the CPU."""

import contextlib
import dataclasses
import faulthandler
import functools
import gc
import importlib
import importlib.util
import os
from unittest import mock

import torch
from dispatched import dispatched
from on_cpu import choose_cpu
from sampling import IS_THOROUGH

import torch_paged_attn
from torch_paged_attn import environment, reference
from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.ops import _library, selected_pages
from torch_paged_attn.ops.backend import serving_device
from torch_paged_attn.ops.lacking import refuse_lacking
from torch_paged_attn.testing import Call, build, inputs


def to_cpu(results):
    return tuple(t.cpu() for t in results)


def _padded(x, dim, count):
    """With zeros at the end of a dimension."""
    return torch.cat([x, x.new_zeros(*x.shape[:dim], count, *x.shape[dim + 1 :])], dim)


class Runner:
    """One way to run a backend; the defaults call the public functions on a device."""

    name = ""
    device = torch.device("cpu")
    # bits depend on `max_seqlen_*`, which choose tiles
    heeds_hints = False
    # an accelerator skips a slot that is not in the cache, where the CPU raises
    skips_slots = True
    # the last of two tokens for one slot wins, rather than any one
    last_wins = False
    # products of float8 are added up as Hopper does
    cuts_off = False
    # tokens of a write: more than Neuron's tile of 128
    write_tokens = 150
    # (what makes a call impossible, changes to a problem, what the error says)
    refusals = ()

    def missing(self):
        """Why it cannot run here, or None."""
        return None

    def prepare(self):
        """Called once, before a kernel is imported."""

    @contextlib.contextmanager
    def session(self):
        """Around each test."""
        yield

    @contextlib.contextmanager
    def batch_invariant(self):
        """Inside, a query's bits depend on its sequence alone."""
        yield

    def has_other_bits(self, case):
        """Whether only a kernel with other bits than those of a model's other calls could run a
        case there, so that it is refused."""
        return False

    def attend(self, call, **changes):
        call = dataclasses.replace(call, args=call.args | changes)
        return to_cpu(call.to(self.device).run())

    def attend_into(self, call, out, whole):
        """`whole`, of which `out` is a part, after `flash_varlen_out`, and softmax_lse."""
        call = call.to(self.device)
        out, whole = moved((out, whole), self.device)
        lse = torch_paged_attn.flash_varlen_out(out, **without_dtype(call))
        return to_cpu((whole, lse))

    def alone(self, call, b):
        """Sequence `b` of a call by itself."""
        return self.attend(call.alone(b))

    def backend(self):
        backend, _ = serving_device(self.device)
        return backend

    def has(self, op):
        """Whether the backend has an op, which it may lack where the op is of selected keys."""
        backend = self.backend()
        is_rare = "select" in op or "quantize" in op
        return not is_rare or backend.is_compiled or backend.has(op)

    def lacks(self):
        """The arguments of attention that it refuses."""
        return self.backend().lacks

    def refused(self, case):
        """Why it refuses a problem whose arguments it has, or None."""
        if case.op != "selected_attention" or not self.backend().selects_pages:
            return None
        return selected_pages.unsupported(attention_call(build(case)))

    def unsupported_backward(self, call):
        """Why the backend has no gradients of a call, or None."""
        return self.backend().unsupported_gradients(attention_call(call))

    def gradients(self, call, *given, **changes):
        """dq, dk, dv, dbias, dsinks; `given` are dout, dlse, out and softmax_lse."""
        return to_cpu(call.backward(*given, **changes).to(self.device).run())

    def gradients_alone(self, call, b, *given):
        """Those of sequence `b` by itself, of which `given` are."""
        return self.gradients(call.alone(b), *given)

    def by_autograd(self, call, dout, dlse):
        """The gradients that there are, by the inputs' names, and the results of the forward."""
        call = call.to(self.device).needs()
        results = call.run()
        leaves = {n: x for n, x in call.args.items() if getattr(x, "requires_grad", False)}
        given = [x.to(self.device) for x in (dout, dlse)]
        found = torch.autograd.grad(results, list(leaves.values()), given)
        return dict(zip(leaves, to_cpu(found), strict=True)), to_cpu(x.detach() for x in results)

    def merge_gradients(self, *given):
        """Gradients by the inputs of `merge_states`."""
        return to_cpu(torch_paged_attn.merge_states_backward(*moved(given, self.device)))

    def write(self, key, value, caches, slots, *scales):
        """The caches, one tensor or two, after a write; those that are given may be written."""
        caches, *others = moved((caches, slots, *scales), self.device)
        key, value = moved((key, value), self.device)
        torch_paged_attn.reshape_and_cache(key, value, caches, *others)
        return caches.cpu() if isinstance(caches, torch.Tensor) else to_cpu(caches)

    def quantize(self, key, value, caches, scales, slots):
        """The caches and the scales after `reshape_and_cache.quantize`, which may be written."""
        caches, scales, slots = moved((caches, scales, slots), self.device)
        key, value = moved((key, value), self.device)
        write = torch_paged_attn.reshape_and_cache
        write(key, value, caches, slots, *scales, quantize=True)
        return to_cpu((*caches, *scales))

    def merge(self, *states, **options):
        return to_cpu(torch_paged_attn.merge_states(*moved(states, self.device), **options))


def without_dtype(call):
    """The arguments of `flash_varlen_out` but `out`."""
    return {name: x for name, x in call.args.items() if name != "out_dtype"}


def attention_call(call):
    """As backends are asked about it."""
    return getattr(AttentionCall, call.op)(**call.args)


def moved(values, device):
    """Tensors on a device, with their strides; views of one storage stay views of one storage."""
    return inputs.moved(values, device, {})


class Cpu(Runner):
    name = "cpu"
    skips_slots = False
    last_wins = True


class TritonGpu(Runner):
    """The Triton kernels on a GPU, through the dispatcher."""

    name = "triton"
    device = torch.device("cuda")
    # on Hopper, of batches of few queries a sequence: whether one of them may be long
    heeds_hints = True

    def missing(self):
        return None if torch.cuda.is_available() else "no GPU"

    @property
    def cuts_off(self):
        return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)

    @contextlib.contextmanager
    def session(self):
        from torch_paged_attn.backends.triton.runtime import launch_cache

        # no plan of another test's is found
        launch_cache.clear()
        yield

    @contextlib.contextmanager
    def batch_invariant(self):
        with mock.patch.object(environment, "BATCH_INVARIANT", True):
            yield

    def has_other_bits(self, case):
        # heads of 112, which Hopper's kernel does not copy from pages of one token
        return self.cuts_off and case.name == "sglang/page1/f16"


class Functions(Runner):
    """A backend's functions, called as the dispatcher calls them, with tensors on the CPU."""

    folder = ""

    def attend(self, call, **changes):
        args, options = dispatched(call.op, call.args | changes)
        return self._function(call.op)(*args, **options)

    def attend_into(self, call, out, whole):
        args, options = dispatched("flash_varlen_out", without_dtype(call) | {"out": out})
        return whole, self._function("flash_varlen_out")(*args, **options)

    def gradients(self, call, *given, **changes):
        call = call.backward(*given, **changes)
        args, options = dispatched(call.op, call.args)
        return self._function(call.op)(*args, **options)

    def merge_gradients(self, *given):
        return _library._function(self.backend(), "merge_states_backward")(*given)

    def write(self, key, value, caches, slots, *scales):
        is_one = isinstance(caches, torch.Tensor)
        op = "reshape_and_cache" if is_one else "reshape_and_cache.split"
        self._function(op)(key, value, *([caches] if is_one else caches), slots, *scales)
        return caches

    def quantize(self, key, value, caches, scales, slots):
        self._function("reshape_and_cache.quantize")(key, value, *caches, *scales, slots)
        return *caches, *scales

    def merge(self, *states, **options):
        op = "merge_states" if len(states) == 4 else "merge_states.list"
        return self._function(op)(*states, **options)

    def _function(self, op):
        return _library._function(self.backend(), op)

    def backend(self):
        return importlib.import_module(f"torch_paged_attn.backends.{self.folder}").BACKEND


class TritonInterpreter(Functions, TritonGpu):
    """The Triton kernels in Triton's interpreter, which a process has to itself."""

    name, folder = "triton-interpreter", "triton"
    device = torch.device("cpu")
    heeds_hints = False
    cuts_off = False

    def missing(self):
        return None if importlib.util.find_spec("triton") else "triton is not installed"

    def prepare(self):
        os.environ["TRITON_INTERPRET"] = "1"
        importlib.import_module("quick_interpreter").use()
        importlib.import_module("same_pointers").watch()


class Reference(Runner):
    """The formulas, in the baseline's precision: whether the suite is right about gradients."""

    name = "reference"

    def attend(self, call, **changes):
        return getattr(reference, call.op)(**call.args | changes, precision=reference.BASELINE)

    def has(self, op):
        return True

    def attend_into(self, call, out, whole):
        lse = reference.flash_varlen_out(out, **without_dtype(call), precision=reference.BASELINE)
        return whole, lse

    def lacks(self):
        return ()

    def refused(self, case):
        return None

    def unsupported_backward(self, call):
        return None

    def gradients(self, call, *given, **changes):
        call = call.backward(*given, **changes)
        return getattr(reference, call.op)(**call.args, precision=reference.BASELINE)

    def merge(self, *states, **options):
        return reference.merge_states(*states, **options)

    def merge_gradients(self, *given):
        return reference.merge_states_backward(*given)

    def quantize(self, key, value, caches, scales, slots):
        reference.reshape_and_cache_quantize(key, value, *caches, *scales, slots)
        return *caches, *scales

    def write(self, key, value, caches, slots, *scales):
        is_one = isinstance(caches, torch.Tensor)
        write = reference.reshape_and_cache if is_one else reference.reshape_and_cache_split
        write(key, value, *([caches] if is_one else caches), slots, *scales)
        return caches


class Tpu(Runner):
    """The TPU kernels in Pallas' interpreter, watched for races and forgotten waits."""

    name = "tpu"
    heeds_hints = True
    last_wins = True
    # each is a run of its own, and its interpreter's clocks take the square of their number
    write_tokens = 70

    def missing(self):
        return None if importlib.util.find_spec("jax") else "jax is not installed"

    def prepare(self):
        choose_cpu()

    @contextlib.contextmanager
    def session(self):
        # a DMA that is waited for and never started blocks a thread of C++
        faulthandler.dump_traceback_later(3600 if IS_THOROUGH else 600, exit=True)
        yield
        faulthandler.cancel_dump_traceback_later()
        if IS_THOROUGH:
            import jax

            # a program maps memory in some 500 pieces, of which Linux grants a process 65,530:
            # one more, and LLVM ends by a segmentation fault
            jax.clear_caches()
            gc.collect()

    def attend(self, call, **changes):
        from jax_arrays import rng_words, to_jax

        from torch_paged_attn.backends.tpu.tile_sizes import Config

        if call.op == "selected_attention":
            return self._attend_pages(call.args | changes)
        args = {name: to_jax(value) for name, value in (call.args | changes).items()}
        if args.get("rng_state") is not None:
            args["rng_state"] = rng_words(call.args["rng_state"])
        # blocks and tiles so small that short sequences have several
        args["config"] = Config(block_k=256, step_k=128, tile_rows=64)
        return self._watch(call.op, **args)

    def _attend_pages(self, given):
        """As `torch_side/binding.py`: in torch, up to a call of `flash_varlen`."""
        call = AttentionCall.selected_attention(**given)
        refuse_lacking(call, "tpu", self.lacks())
        flash = functools.partial(Call, "flash_varlen")
        return selected_pages.attend_pages(call, "tpu", lambda x: self.attend(flash(x.given())))

    def alone(self, call, b):
        return self.attend(call.alone(b), max_seqlen_q=call.args["q"].shape[0])

    def backend(self):
        from torch_paged_attn.backends.tpu import BACKEND

        return BACKEND

    def gradients(self, call, *given, **changes):
        # a hint, which makes tiles smaller: the same for sequences alone and in a batch
        changes = {"max_seqlen_q": 64} | changes
        found = self.attend(call.backward(*given, **changes))
        return tuple(call.args["q"].new_empty(0) if x is None else x for x in found)

    def gradients_alone(self, call, b, *given):
        """In a batch with padding rows: outside of kernels, XLA's CPU adds up the numbers of fewer
        than 16 rows in another order.
        """
        alone = call.alone(b)
        count = len(alone.args["q"])
        padding = max(16 - count, 0)
        for name, dim in (("q", 0), ("attn_bias", 1)):
            if alone.args.get(name) is not None:
                alone.args[name] = _padded(alone.args[name], dim, padding)
        given = [_padded(x, dim, padding) for x, dim in zip(given, (0, 1, 0, 1), strict=True)]
        dq, dk, dv, dbias, dsinks = self.gradients(alone, *given)
        return dq[:count], dk, dv, dbias[:, :count] if dbias.numel() else dbias, dsinks

    def merge_gradients(self, *given):
        from jax_arrays import to_jax, to_torch

        from torch_paged_attn.backends.tpu.functions import merge_states_backward

        return tuple(to_torch(x) for x in merge_states_backward(*(to_jax(t) for t in given)))

    def write(self, key, value, caches, slots, *scales):
        from jax_arrays import to_jax

        is_one = isinstance(caches, torch.Tensor)
        op = "reshape_and_cache" if is_one else "reshape_and_cache_split"
        tensors = [key, value, *([caches] if is_one else caches)]
        slots = slots.clamp(-1, 2**31 - 1).int()  # JAX has no 64-bit integers unless asked to
        written = self._watch(op, *(to_jax(t) for t in (*tensors, slots, *scales)))
        return written[0] if is_one else written

    def merge(self, *states, out_dtype=None):
        from jax_arrays import to_jax, to_torch

        from torch_paged_attn.backends.tpu.functions import merge_states, merge_states_list

        if len(states) == 4:
            found = merge_states(*(to_jax(t) for t in states))
        else:
            dtype = None if out_dtype is None else str(out_dtype).removeprefix("torch.")
            parts = ([to_jax(t) for t in part] for part in states)
            found = merge_states_list(*parts, out_dtype=dtype)
        return tuple(to_torch(x) for x in found)

    def _watch(self, op, *args, **options):
        from jax_arrays import to_torch
        from pallas_oracle import watch

        file = "cache_write" if op.startswith("reshape") else "functions"
        module = importlib.import_module(f"torch_paged_attn.backends.tpu.{file}")
        function = getattr(module, op)
        results = watch(lambda i: function(*args, interpret=i, **options), "on_wait")
        results = results if isinstance(results, tuple) else [results]
        return tuple(None if x is None else to_torch(x) for x in results)


class Neuron(Functions):
    """The Neuron kernels in the emulator, on one generation of the chip."""

    folder = "neuron"
    last_wins = True
    refusals = (
        (
            "head_dim",
            {"head_dim": 1025, "head_dim_v": 8},
            "neuron backend: k has head_dim 1025; supported: ",
        ),
        (
            "head_dim_v",
            {"head_dim": 8, "head_dim_v": 513},
            "neuron backend: v has head_dim 513; supported: ",
        ),
    )

    def __init__(self, generation):
        self.generation = generation
        self.name = f"neuron-{generation}"

    def missing(self):
        # the emulator's bfloat16 and float8
        return None if importlib.util.find_spec("ml_dtypes") else "ml_dtypes is not installed"

    def prepare(self):
        # CPU tensors stay with the CPU kernels: only the backend sees the switch
        environment.NEURON_EMULATE = True

    @contextlib.contextmanager
    def session(self):
        emulator = importlib.import_module("nki_emulator")
        with emulator.emulated(self.generation) as machine:
            yield
            assert machine.live == {"sbuf": 0, "psum": 0}


RUNNERS = {
    runner.name: runner
    for runner in (
        Cpu(),
        Reference(),
        TritonGpu(),
        TritonInterpreter(),
        Tpu(),
        *(Neuron(generation) for generation in (2, 3, 4)),
    )
}
# what runs only where it is asked for, and why
ALONE = {
    "triton-interpreter": "it needs a process of its own",
    "reference": "it is what the others are judged by",
}
