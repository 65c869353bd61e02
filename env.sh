# Sourced by speedrun.sh and test.sh: makes .venv once, installs requirements.txt, puts .venv first on the PATH.
# A torch that is already in .venv is kept (GPU users install theirs first).
PYTHON=${PYTHON:-python3}
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: Python 3.11 or newer is needed; set PYTHON=/path/to/python3.x" >&2; exit 2; }
[ -x .venv/bin/python ] || "$PYTHON" -m venv .venv
INSTALL_STARTED=$SECONDS
stamp=.venv/installed-$(cksum < requirements.txt | cut -d' ' -f1)
if [ ! -e "$stamp" ]; then
  echo "installing requirements.txt into .venv (1 to 3 minutes) ..."
  if .venv/bin/python -c 'import torch' 2>/dev/null; then wanted=$(grep -v '^torch==' requirements.txt); else wanted=$(cat requirements.txt); fi
  echo "$wanted" | .venv/bin/python -m pip install --quiet --disable-pip-version-check -r /dev/stdin || { echo "error: pip could not install requirements.txt" >&2; exit 2; }
  touch "$stamp"
fi
INSTALL_SECONDS=$((SECONDS - INSTALL_STARTED))
export PATH="$PWD/.venv/bin:$PATH" TOKENIZERS_PARALLELISM=false
