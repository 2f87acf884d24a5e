#!/usr/bin/env bash
# Debian 13 in a folder, and in FOLDER/wrappers its compilers (GCC 12 to 14, clang 17 to 19), which
# run there as if they were here. As root:
#   tools/compilers.sh FOLDER && PATH=FOLDER/wrappers:$PATH make thorough-build
# apt-get install clang-16 brings the oldest clang on Debian 12. `umount FOLDER/REPOSITORY` when done.
set -euo pipefail
root=$(realpath -m "${1:?a folder}")
repository=$(realpath "$(dirname "$0")/..")
packages=(g++-12 g++-13 g++-14 clang-17 clang-18 clang-19)

if [ ! -e "$root/usr/bin/clang++-19" ]; then
  debootstrap --variant=minbase --include="$(IFS=,; echo "${packages[*]}")" trixie "$root"
fi
mkdir -p "$root$repository" "$root/wrappers"
if ! mountpoint -q "$root$repository"; then
  mount --bind "$repository" "$root$repository"
  mount -o remount,bind,ro "$root$repository"  # removing the folder leaves the repository
fi
for package in "${packages[@]}"; do
  compiler=${package/clang-/clang++-}
  cat >"$root/wrappers/$compiler" <<EOF
#!/bin/sh
exec chroot "$root" env --chdir="$repository" $compiler "\$@"
EOF
  chmod +x "$root/wrappers/$compiler"
done
