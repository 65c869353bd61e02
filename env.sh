# Sourced by speedrun.sh and test.sh: makes .venv, installs requirements.txt once, puts .venv first on the PATH.
# A torch that is already in .venv is kept (README, "Which torch"). A .venv that was left half made is made again.
PYTHON=${PYTHON:-python3}
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: Python 3.11 or newer is needed; set PYTHON=/path/to/python3.x" >&2; exit 2; }
INSTALL_STARTED=$SECONDS
stamp() { echo ".venv/installed-$(.venv/bin/python -c 'import sys; print(*sys.version_info[:2], sep=".")' 2> /dev/null)-$(cksum < requirements.txt | cut -d' ' -f1)"; }
install() {
  .venv/bin/python -m pip --version > /dev/null 2>&1 || .venv/bin/python -m ensurepip > /dev/null 2>&1 || "$PYTHON" -m venv --clear .venv || { echo "error: $PYTHON cannot make a virtual environment (on Debian: apt install python3-venv)" >&2; return 2; }
  echo "installing requirements.txt into .venv (minutes; the download of torch is most of it) ..."
  if .venv/bin/python -c 'import torch' 2> /dev/null; then wanted=$(grep -v '^torch==' requirements.txt); else wanted=$(cat requirements.txt); fi
  echo "$wanted" | .venv/bin/python -m pip install --quiet --disable-pip-version-check -r /dev/stdin || { echo "error: pip could not install requirements.txt" >&2; return 2; }
  touch "$(stamp)"
}
if [ ! -e "$(stamp)" ]; then
  ( ! command -v flock > /dev/null || flock 9                # two scripts at once: one installs, the other waits
    [ -e "$(stamp)" ] || install ) 9> .venv.lock || exit 2
fi
INSTALL_SECONDS=$((SECONDS - INSTALL_STARTED))
export PATH="$PWD/.venv/bin:$PATH" TOKENIZERS_PARALLELISM=false
busy() {   # does another program compute at this moment?
  local running
  for _ in 1 2 3 4 5; do { read -r _ _ _ running _ < /proc/loadavg; } 2> /dev/null && [ "${running%%/*}" -ge 2 ] || return 1; sleep 0.1; done
}
# Threads that wait for each other spin: best on a quiet machine, many times slower beside a busy program, where they should sleep.
if [ -z "${OMP_WAIT_POLICY:-}" ] && busy; then export OMP_WAIT_POLICY=PASSIVE; echo "another program is busy here: OMP_WAIT_POLICY=PASSIVE"; fi
