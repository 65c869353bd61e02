#!/usr/bin/env bash
# The whole recipe on the embedded default: a base model becomes a multi-agent system, in one command.
#
#   bash speedrun.sh                   about 42 minutes on 2 CPU cores; report in runs/demo
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
  local name=$1 result=$2 there="" status=0; shift 2
  [ ! -e "$result" ] || [ -n "${FRESH:-}" ] || there=1
  printf '\n== %s: %s\n' "$name" "$*"
  [ -n "$there" ] || seconds begin "$name" "$(dirname "$result")"
  "$@" || status=$?
  [ -n "$there" ] || seconds end "$name"
  return "$status"
}
seconds() {   # of a step that was killed: from its beginning to its last file
  python - "$RUN" "$@" <<'PY'
import json, os, sys, time
from pathlib import Path
run, what, name, *more = sys.argv[1:]
def put(path, value):
    path.with_suffix(".new").write_text(json.dumps(value))
    os.replace(path.with_suffix(".new"), path)
path, begun = Path(run, "seconds.json"), Path(run, ".begun.json")
table = json.loads(path.read_text()) if path.exists() else {}
step, start = json.loads(begun.read_text()) if begun.exists() else (None, 0)
spent = 0
if what == "add":
    spent = int(more[0])
elif what == "end":
    spent = time.time() - start
    begun.unlink()
else:
    if step == name:
        spent = max([start, *(file.stat().st_mtime for file in Path(more[0]).rglob("*") if file.is_file())]) - start
    put(begun, [name, time.time()])
if spent:
    put(path, {**table, name: round(table.get(name, 0) + spent)})
PY
}

[ -z "${FRESH:-}" ] || rm -f "$RUN/seconds.json" "$RUN/.begun.json"
[ "$INSTALL_SECONDS" -lt 2 ] || seconds add install "$INSTALL_SECONDS"
python sandbox.py ${unsafe[@]+"${unsafe[@]}"}                       # can model-written code be isolated here? Better known now than after minutes of training

step distill  "$RUN/distill/sft.jsonl"  python distill.py  --out "$RUN/distill" "${common[@]}" ${unsafe[@]+"${unsafe[@]}"} ${distill[@]+"${distill[@]}"}
step sft      "$RUN/sft/model"          python sft.py      --out "$RUN/sft" --tasks "$RUN/distill/sft.jsonl" "${common[@]}" ${sft[@]+"${sft[@]}"}
step rl       "$RUN/rl/model"           python rl.py       --out "$RUN/rl" --model "$RUN/sft/model" "${common[@]}" ${unsafe[@]+"${unsafe[@]}"} ${rl[@]+"${rl[@]}"}
step evaluate "$RUN/report.json"        python evaluate.py --out "$RUN/eval" --model "${models[@]}" "${common[@]}" ${unsafe[@]+"${unsafe[@]}"} ${evaluate[@]+"${evaluate[@]}"}
if [ "$SPEEDRUN" = quick ]; then
  python evaluate.py --check-report "$RUN"
  echo "(quick: three rounds of RL and 60 questions show that all of it runs, not what RL gains; the chain below may well be wrong)"
fi

printf '\n== one chain of the final model\n'
python evaluate.py --ask "What is the currency of the country whose capital is Kathmandu?" --model "rl=$RUN/rl/model" ${unsafe[@]+"${unsafe[@]}"}
printf '\nReport: %s   traces: %s   curves: %s\n' "$RUN/report.md" "$RUN/traces.html" "$RUN/curves.png"
