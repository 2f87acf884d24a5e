#!/usr/bin/env bash
# test_aarch64.sh WHEEL [PYTEST ARGUMENTS]: the conformance suite on an aarch64 wheel, under QEMU: Debian's Python for
# arm64, PyPI's torch for aarch64 (with CUDA: 5 GB), and the wheel. Debian 12; needs qemu-user-static. What is downloaded
# is kept in .aarch64.
set -euo pipefail
wheel=$(realpath "$1")
shift
root=$(realpath "$(dirname "$0")/../..")
mkdir -p "$root/.aarch64"
cd "$root/.aarch64"
python=python3.11

if [ ! -e system/usr/bin/$python ]; then
  # a package manager's state of its own: this machine's stays as it is
  mkdir -p apt/state/lists/partial apt/cache/archives/partial
  touch apt/state/status
  options=(-o APT::Architecture=arm64 -o APT::Architectures::=arm64 -o "Dir::State=$PWD/apt/state"
    -o "Dir::State::status=$PWD/apt/state/status" -o "Dir::Cache=$PWD/apt/cache")
  apt-get -qq "${options[@]}" update
  apt-get -qq "${options[@]}" install --yes --no-install-recommends --download-only $python libstdc++6 libgomp1
  for package in apt/cache/archives/*.deb; do dpkg -x "$package" system; done
fi

# torch asks the system which processor this is; the machine below would answer for itself
processor=system/proc/cpuinfo
mkdir -p system/proc
rm -f $processor
for i in $(seq 0 $(($(nproc) - 1))); do
  printf 'processor\t: %d\nFeatures\t: fp asimd fphp asimdhp asimddp bf16\n' "$i" >> $processor
  printf 'CPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x3\nCPU part\t: 0xd0c\nCPU revision\t: 1\n\n' >> $processor
  identification=system/sys/devices/system/cpu/cpu$i/regs/identification
  mkdir -p $identification
  echo 0x00000000410fd0c0 > $identification/midr_el1
done

platforms=(--platform manylinux2014_aarch64)
for minor in $(seq 5 35); do platforms+=(--platform "manylinux_2_${minor}_aarch64"); done
install=(python3 -m pip install --quiet --target packages "${platforms[@]}" --only-binary :all: --python-version 311)
[ -e packages/torch ] || "${install[@]}" torch==2.13.0 numpy==2.3.5 pytest pytest-timeout hypothesis
rm -rf packages/torch_paged_attn*
"${install[@]}" --no-deps "$wheel"

rm -rf suite
mkdir suite
cp -r "$root/tests" "$root/pyproject.toml" suite
cd suite
emulated=(qemu-aarch64-static -cpu max -L "$root/.aarch64/system" -E "PYTHONPATH=$root/.aarch64/packages"
  -E PYTHONDONTWRITEBYTECODE=1 "$root/.aarch64/system/usr/bin/$python")
"${emulated[@]}" -c 'import torch_paged_attn; print(torch_paged_attn.__file__)' | grep "^$root/.aarch64/packages/"
"${emulated[@]}" -m torch_paged_attn --check
"${emulated[@]}" -m pytest -q -p no:cacheprovider tests/backends --backend cpu "$@"
