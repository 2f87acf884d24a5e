#!/usr/bin/env bash
# changed_devices.sh EVENT BASE: for each device whose suite is long, whether to run it: on a push or pull request where
# what it tests has changed since the commit BASE, otherwise (nightly, by hand, no BASE) always.
# changed_devices.sh here: the suites to run, since what they test differs from main; `make test` ran a sample.
set -euo pipefail
event=$1 base=${2:-}
cd "$(dirname "$0")/.."

if [ "$event" = here ]; then
  main=$(git rev-parse --verify --quiet origin/main || git rev-parse --verify --quiet main) 2>/dev/null || exit 0
  base=$(git merge-base "$main" HEAD)
fi

changed() { # PATTERN: whether a path that has changed matches
  case $event in push | pull_request | here) ;; *) return 0 ;; esac
  git cat-file -e "$base^{commit}" 2>/dev/null || return 0
  if [ "$event" = here ]; then git diff --name-only "$base"; else git diff --name-only "$base" HEAD; fi | grep -E "$1" >/dev/null
}

declare -A suites=([tpu]=test-tpu-interpreted [neuron]="test-neuron test-neuron-emulated" [triton]=test-triton-interpreted)
shared='^torch_paged_attn/(ops|testing|reference)/|^torch_paged_attn/[a-z_]*\.py$|^tests/backends/|^constraints\.txt$'
for device in tpu neuron triton; do
  own="^torch_paged_attn/backends/$device/|^tests/$device/"
  [ "$device" = neuron ] && own="$own|^tools/nki_emulator/"
  [ "$device" = tpu ] && own="$own|^tests/schedules/"
  is_changed=false
  if changed "$own|$shared"; then is_changed=true; fi
  if [ "$event" != here ]; then
    echo "$device=$is_changed"
  elif [ $is_changed = true ]; then
    echo "A sample of this ran, and its files differ from main: make ${suites[$device]}"
  fi
done
