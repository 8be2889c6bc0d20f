#!/usr/bin/env bash
# Serve what examples/quickstart.sh has trained, on this host only: a page to chat with it, and OpenAI's API.
# CKPT names another model. Extra arguments are settings, such as server.port=8080 or my_settings.yaml.
set -euo pipefail
caller=$PWD
cd "$(dirname "$0")/.."
[[ -d .venv ]] && PATH="$PWD/.venv/bin:$PATH"
ckpt=${CKPT:-$PWD/runs/quickstart}
[[ $ckpt == /* ]] || ckpt=$caller/$ckpt
if [[ ! -d $ckpt ]]; then
  echo "error: $ckpt: there is no model; run examples/quickstart.sh first, or name one with CKPT=..." >&2
  exit 2
fi
settings=()
for setting in "$@"; do
  [[ $setting != *.yaml || $setting == *=* || $setting == /* ]] || setting=$caller/$setting
  settings+=("$setting")
done
exec python -m megabit serve "$ckpt" examples/serving/laptop.yaml "${settings[@]}"
