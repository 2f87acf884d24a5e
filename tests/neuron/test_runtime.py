"""The runtime finds the front end that is there, and calls it as it was recorded to be called."""

import importlib
import sys
import types
from pathlib import Path

import pytest
import torch
from nki_emulator.front_ends import RECORDED, fake, parameters
from nki_emulator.signatures import signature

import torch_paged_attn
from torch_paged_attn import environment
from torch_paged_attn.backends.neuron import BACKEND, reshape_and_cache, runtime

ROOT = Path(torch_paged_attn.__file__).parent.parent


@pytest.fixture
def front_end(monkeypatch):
    """Install recorded fakes by module name; the rest of Neuron's packages is not there."""
    log = []

    def install(*modules, **answers):
        monkeypatch.setattr(environment, "NEURON_EMULATE", False)
        runtime._compiled.cache_clear()
        runtime._wrap_nki.cache_clear()
        runtime._installed_platform.cache_clear()
        monkeypatch.delenv("NEURON_LOGICAL_NC_CONFIG", raising=False)
        monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE", raising=False)
        for name in (*RECORDED, "neuronxcc", "neuronxcc.nki", "torch_xla"):
            if name != "torch._C":
                monkeypatch.setitem(sys.modules, name, None)
        for name in modules:
            made = fake(name, log, **answers) if name in RECORDED else types.ModuleType(name)
            monkeypatch.setitem(sys.modules, name, made)
        return log

    yield install
    runtime._compiled.cache_clear()
    runtime._wrap_nki.cache_clear()
    runtime._installed_platform.cache_clear()


def device_named(monkeypatch, name):
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: name)


COMPILER = ("nki", "neuronxcc")


def test_xla_is_neurons_where_the_runtime_says_so(front_end):
    front_end(*COMPILER, "torch_xla.runtime", device_type="NEURON")
    assert BACKEND.unsupported() is None
    front_end(*COMPILER, "torch_xla.runtime", device_type="TPU")
    assert "torch_xla's runtime is TPU" in BACKEND.unsupported()
    front_end(*COMPILER)
    assert "torch_xla's runtime is not installed" in BACKEND.unsupported()


def test_privateuse1_is_neurons_where_it_is_called_so(front_end, monkeypatch):
    front_end(*COMPILER)
    device_named(monkeypatch, "neuron")
    assert BACKEND.unsupported() is None
    device_named(monkeypatch, "someone_elses")
    assert "the device of PrivateUse1 is someone_elses" in BACKEND.unsupported()


def test_compiler_and_version_are_asked_for(front_end, monkeypatch):
    front_end("nki")
    assert "neuronx-cc, the compiler" in BACKEND.unsupported()
    front_end(*COMPILER)
    monkeypatch.setattr(sys.modules["nki"], "__version__", "0.2.0")
    assert "nki 0.2.0 is installed; 0.3 or newer is needed" in BACKEND.unsupported()


@pytest.mark.parametrize("cores", [1, 2])
def test_launch_is_a_call_of_the_jitted_kernel(cores, front_end, monkeypatch):
    log = front_end(*COMPILER)
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", str(cores))
    x = torch.randn(3, 4).t()
    result = runtime.launch(lambda a, n: (a, n), n=7, a=x)
    assert log == [("nki.jit", cores)]
    assert result[0].is_contiguous() and torch.equal(result[0], x) and result[1] == 7


@pytest.mark.parametrize("platform, cores", [("inf2", 1), ("trn1", 1), ("trn2", 2), ("trn3", 2)])
def test_cores_of_a_logical_one_are_neurons_own_default(platform, cores, front_end, monkeypatch):
    front_end(*COMPILER, "torch_neuronx.utils", get_platform_target=platform)
    assert runtime.num_programs() == cores
    front_end(*COMPILER)
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", platform)
    assert runtime.num_programs() == cores
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", str(3 - cores))
    assert runtime.num_programs() == 3 - cores


def test_the_native_device_has_logical_cores_of_two(front_end, monkeypatch):
    front_end(*COMPILER)
    device_named(monkeypatch, "neuron")
    assert runtime.num_programs() == 2


@pytest.mark.parametrize("hop", runtime.NKI_HOPS)
def test_a_traced_launch_is_a_node(hop, front_end):
    log = front_end(*COMPILER, hop)
    assert runtime.can_trace()
    with runtime.traced():
        runtime.launch(lambda a: a, a=torch.ones(2))
    runtime.launch(lambda a: a, a=torch.ones(2))
    assert log == [("wrap_nki", (2,)), ("nki.jit", 2)]


def test_a_traced_cache_write_launches_nodes_and_attention_stays_opaque(front_end):
    log = front_end(*COMPILER, runtime.NKI_HOPS[0])
    write = BACKEND.traceable("reshape_and_cache.split")
    caches = torch.zeros(2, 4, 2, 8, 3).unbind(0)
    key = torch.randn(5, 2, 3)
    # the fake kernel returns what it is given
    with pytest.MonkeyPatch.context() as patch:
        kernel = lambda rows, index, cache, num_kv_heads, layout: cache  # noqa: E731
        patch.setattr(reshape_and_cache, "reshape_and_cache_kernel", kernel)
        write(key, key, *caches, torch.arange(5))
    assert log == [("wrap_nki", (2,))] * 2
    assert BACKEND.traceable("flash_varlen") is None and BACKEND.traceable("blocksparse") is None
    assert BACKEND.traceable("merge_states") is BACKEND.function("merge_states")


def test_only_a_lazy_tensor_is_written_back():
    memory = torch.zeros(3)
    runtime.write_back(memory, torch.ones(3))
    assert not memory.any()  # the kernel wrote the memory itself

    class Lazy:
        device, written = torch.device("xla"), None

        def copy_(self, value):
            self.written = value

    lazy, value = Lazy(), torch.ones(3)
    runtime.write_back(lazy, value)
    assert lazy.written is value


def test_installed_packages_still_have_what_was_recorded():
    compared = []
    for module, functions in RECORDED.items():
        try:
            found = importlib.import_module(module)
        except ImportError:
            continue
        for name, documented in functions.items():
            function = getattr(found, name)
            actual = parameters(function)
            if actual is None:  # a builtin: at least it takes no argument
                assert not documented and function()
            else:
                expected = [(p.name, p.kind) for p in signature(documented).parameters.values()]
                assert actual[: len(expected)] == expected, f"{module}.{name}{actual}"
            compared.append(name)
    assert "_get_privateuse1_backend_name" in compared  # torch itself is always there


def test_nothing_of_neurons_is_imported_by_name_elsewhere():
    for path in (ROOT / "torch_paged_attn").rglob("*.py"):
        names = ("torch_neuronx", "neuronxcc", "nki_hop")
        if path.name != "runtime.py" and "backends" in path.parts:
            lines = [line for line in path.read_text().splitlines() if "import" in line]
            assert not any(n in line for n in names for line in lines), path
