#!/usr/bin/env bash
# docs/first_run.md as one script: from a wheel and a text to a model that answers, in a new folder.
#
#     examples/newcomer.sh dist/megabit-0.9.0-py3-none-linux_x86_64.whl my_folder [my_texts/]
#
# The wheel is what `pip wheel . --no-deps -w dist/` makes of the repository, which is not needed beyond that. Without
# texts of your own it takes Python's manual. STEPS is how long it trains before the layout changes (100, and as many
# after it), PORT where the model is served (8000). The commands are those of the page, and a test holds that.
set -euo pipefail
if [[ $# -lt 2 || $# -gt 3 || ! -f $1 || -e $2 || ! -d ${3:-.} ]]; then
  echo "usage: examples/newcomer.sh WHEEL FOLDER [TEXTS] (a file, a folder that is not there yet, one of text files)" >&2
  exit 2
fi
wheel=$(realpath "$1") texts=${3:+$(realpath "$3")} steps=${STEPS:-100} port=${PORT:-8000}
mkdir -p "$2/dist" && cd "$2"
cp "$wheel" dist/
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT # no server stays behind
say() { printf '\n== %s\n' "$*"; }

say "1. A new environment with megabit in it"
python3 -m venv fresh
. fresh/bin/activate
pip install "$(ls dist/megabit-*.whl)[serve]"
export OMP_NUM_THREADS=1

say "2. Text"
if [[ -n $texts ]]; then ln -s "$texts" my_texts; else
python -c '
from pathlib import Path
from pydoc_data.topics import topics
Path("my_texts").mkdir()
for name, text in topics.items():
    Path("my_texts", name + ".txt").write_text(text)
'
fi

say "3. Settings; a tokenizer and a corpus"
cat > mine.yaml <<'END'
model:
  vocab_size: 1024
  hidden_size: 128
  intermediate_size: 384
  num_hidden_layers: 4
data:
  text: my_texts/
  dir: data/mine
  seq_length: 128
run:
  dir: runs/mine
  sample_prompt: "The "
END
megabit prepare mine.yaml

say "4. Train with four processes: TP=2 × PP=2"
megabit train mine.yaml train.steps=$steps parallel.tp=2 parallel.pp=2 --nproc-per-node 4

say "5. Go on with the same run at DP=4, and look at it"
megabit train mine.yaml train.steps=$((2 * steps)) --nproc-per-node 4
megabit report runs/mine
megabit eval runs/mine

say "6. Hand it to Hugging Face's format, and ask that for a line"
megabit export hf runs/mine exported/
megabit generate exported/ "The " --max-tokens 40 --seed 1

say "7. Serve it, chat, and end the server"
megabit serve exported/ server.port=$port &
curl --retry 60 --retry-delay 1 --retry-all-errors -fsS http://127.0.0.1:$port/ready
curl -fsS http://127.0.0.1:$port/v1/chat/completions -H 'Content-Type: application/json' \
    -d '{"model": "exported", "messages": [{"role": "user", "content": "What is a class?"}], "max_tokens": 20}'
kill %1
wait %1
