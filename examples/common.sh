# Sourced by the scripts beside it: go to the folder above, use its .venv if it has one, and make "$@" absolute.
caller=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ -d .venv ]] && PATH="$PWD/.venv/bin:$PATH"
if ! python -c 'import megabit' 2>/dev/null; then
  echo "error: python has no megabit here; run 'make setup' first, or activate the environment that has it" >&2
  exit 2
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # ranks share the cores

# Settings that come after those of the script. A text of the user's own is looked for where the user is,
# and gets folders of its own, unless they are named.
own_text=
extra=()
for setting in "$@"; do
  case $setting in
    data.text=*)
      own_text=${setting#data.text=}
      [[ $own_text == /* ]] || setting=data.text=$caller/$own_text
      ;;
    *.yaml) [[ $setting == /* ]] || setting=$caller/$setting ;;
  esac
  extra+=("$setting")
done
if [[ -n $own_text ]]; then
  extra=("data.dir=data/own" "run.dir=runs/own" "${extra[@]}")
else
  examples/fetch_shakespeare.sh
fi
