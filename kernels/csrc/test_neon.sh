#!/usr/bin/env bash
# Compiles the kernels for 64-bit ARM and runs them under emulation, on a machine that is not one.
# Debian, Ubuntu: apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT

compile() { # flags, sources
  (cd "$build" && aarch64-linux-gnu-gcc -std=c11 -O3 -ffp-contract=off -Wall -Wextra -c "$@")
}
sources=()
for source in "$PWD"/*.c; do
  case $source in
    *isa_neondot.c) compile -march=armv8.2-a+dotprod "$source" ;;
    *isa_avx*) ;;
    *) sources+=("$source") ;;
  esac
done
compile -DWITH_NEONDOT "${sources[@]}" "$PWD/test/exact.c"
aarch64-linux-gnu-gcc -static "$build"/*.o -lpthread -o "$build/exact"
qemu-aarch64 -cpu max "$build/exact"
