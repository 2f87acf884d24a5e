#!/usr/bin/env bash
# changed_devices.sh EVENT BASE: for each device whose suite is long, whether to run it: on a push or pull request where
# what it tests has changed since the commit BASE, otherwise (nightly, by hand, no BASE) always.
set -euo pipefail
event=$1 base=${2:-}
cd "$(dirname "$0")/.."

changed() { # PATTERN: whether a path that has changed matches
  case $event in push | pull_request) ;; *) return 0 ;; esac
  git cat-file -e "$base^{commit}" 2>/dev/null || return 0
  git diff --name-only "$base" HEAD | grep -Eq "$1"
}

shared='^torch_paged_attn/(ops|testing|reference)/|^torch_paged_attn/[a-z_]*\.py$|^tests/backends/|^constraints\.txt$'
for device in tpu neuron triton; do
  own="^torch_paged_attn/backends/$device/|^tests/$device/"
  [ "$device" = neuron ] && own="$own|^tools/nki_emulator/"
  [ "$device" = tpu ] && own="$own|^tests/schedules/"
  if changed "$own|$shared"; then echo "$device=true"; else echo "$device=false"; fi
done
