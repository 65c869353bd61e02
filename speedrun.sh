#!/usr/bin/env bash
# The whole recipe on the embedded default: a base model becomes a multi-agent system, in one command.
#
#   bash speedrun.sh                   about 40 minutes on 2 CPU cores; report in runs/demo
#   SPEEDRUN=quick bash speedrun.sh    under 5 minutes at reduced size, in runs/quick; fails unless SFT beats base
#   SEED=1 RUN=runs/seed1 bash speedrun.sh     another seed, its own folder
#
# Ctrl-C or kill -9 at any moment, then the same command: it goes on where it was. FRESH=1 starts over. UNSAFE_CODE=1 allows model-written
# code to run without isolation where the machine offers none.
set -euo pipefail
cd "$(dirname "$0")"
. ./env.sh

SPEEDRUN=${SPEEDRUN:-full}
case "$SPEEDRUN" in full) RUN=${RUN:-runs/demo} ;; quick) RUN=${RUN:-runs/quick} ;; *) echo "error: SPEEDRUN is full or quick, not '$SPEEDRUN'" >&2; exit 2 ;; esac
common=(--seed "${SEED:-0}"); [ -z "${FRESH:-}" ] || common+=(--fresh)
unsafe=(); [ -z "${UNSAFE_CODE:-}" ] || unsafe=(--unsafe-code)
models=(base=data/base "sft=$RUN/sft/model" "rl=$RUN/rl/model")
if [ "$SPEEDRUN" = quick ]; then
  distill=(--limit 600); sft=(--steps 280); rl=(--steps 3 --prompts 8 --refills 0 --eval-every 0); evaluate=(--limit 60 --subset 30)
else
  distill=(); sft=(); rl=(); evaluate=()
fi
mkdir -p "$RUN"

step() {   # step NAME RESULT COMMAND...: runs the command, adds its seconds to seconds.json unless its result was there before
  local name=$1 result=$2 there="" started=$SECONDS status=0; shift 2
  [ ! -e "$result" ] || [ -n "${FRESH:-}" ] || there=1
  printf '\n== %s: %s\n' "$name" "$*"
  "$@" || status=$?
  [ -n "$there" ] || seconds "$name" $((SECONDS - started))
  return "$status"
}
seconds() {
  python - "$RUN/seconds.json" "$1" "$2" <<'PY'
import json, os, sys
path, name, spent = sys.argv[1], sys.argv[2], int(sys.argv[3])
table = json.load(open(path)) if os.path.exists(path) else {}
table[name] = table.get(name, 0) + spent
with open(path + ".new", "w") as f:
    json.dump(table, f)
os.replace(path + ".new", path)
PY
}

[ -z "${FRESH:-}" ] || rm -f "$RUN/seconds.json"
[ "$INSTALL_SECONDS" -lt 2 ] || seconds install "$INSTALL_SECONDS"
python sandbox.py "${unsafe[@]}"                       # can model-written code be isolated here? Better known now than after minutes of training

step distill  "$RUN/distill/sft.jsonl"  python distill.py  --out "$RUN/distill" "${common[@]}" "${unsafe[@]}" "${distill[@]}"
step sft      "$RUN/sft/model"          python sft.py      --out "$RUN/sft" --tasks "$RUN/distill/sft.jsonl" "${common[@]}" "${sft[@]}"
step rl       "$RUN/rl/model"           python rl.py       --out "$RUN/rl" --model "$RUN/sft/model" "${common[@]}" "${unsafe[@]}" "${rl[@]}"
step evaluate "$RUN/report.json"        python evaluate.py --out "$RUN/eval" --model "${models[@]}" "${common[@]}" "${unsafe[@]}" "${evaluate[@]}"
[ "$SPEEDRUN" = full ] || python evaluate.py --check-report "$RUN"

printf '\n== one chain of the final model\n'
python evaluate.py --ask "What is the currency of the country whose capital is Kathmandu?" --model "rl=$RUN/rl/model" "${unsafe[@]}"
printf '\nReport: %s   traces: %s   curves: %s\n' "$RUN/report.md" "$RUN/traces.html" "$RUN/curves.png"
