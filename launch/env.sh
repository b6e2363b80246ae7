# Sourced by the launch scripts: a Python environment in .venv that holds exactly the pinned packages, made once.
#
#   pega_setup        what serving needs (the list for this machine's device)
#   pega_setup dev    that for the CPU, and what the tests need
#
# Settings: PEGA_DEVICE=cpu|cuda, PEGA_PYTHON=<interpreter>, PEGA_MIN_FREE_GB=<number>. Package registries, proxies and
# caches are uv's and pip's own settings.

unset CDPATH # makes cd print
PEGA_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
PEGA_VENV=$PEGA_ROOT/.venv
PEGA_UV_MINIMUM=0.5.0

# Without bytecode on disk every engine process compiles its imports again, for 13 s.
unset PYTHONDONTWRITEBYTECODE PYTHONHOME
# One thread a process: programs thread for themselves, and several processes share the cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export VLLM_CPU_OMP_THREADS_BIND=${VLLM_CPU_OMP_THREADS_BIND:-nobind}
# Inside the clone, so that deleting the clone deletes everything but uv's and the model hub's caches.
export VLLM_CACHE_ROOT=${VLLM_CACHE_ROOT:-$PEGA_ROOT/.cache/vllm}
export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-180}

pega_say() { printf 'pega-omni: %s\n' "$*" >&2; }

pega_die() {
  pega_say "$@"
  exit 1
}

# Prints the interpreter to build on. Each candidate is asked itself: version managers leave stand-ins that start nothing.
pega_python() {
  local candidate found tried="" candidates=(python3.11 python3.12 python3 python)
  [[ -z ${PEGA_PYTHON:-} ]] || candidates=("$PEGA_PYTHON")
  local probe='import sys; print(sys.executable if (3, 11) <= sys.version_info < (3, 13) else "", sys.version.split()[0])'
  for candidate in "${candidates[@]}"; do
    found=$("$candidate" -c "$probe" 2>/dev/null) || continue
    if [[ $found == " "* ]]; then
      tried+=" $candidate is$found;"
    else
      printf '%s\n' "${found% *}"
      return
    fi
  done
  pega_die "Python 3.11 or 3.12 is needed and not found (${PEGA_PYTHON:-PATH}:${tried:- none}). Fix: install python3.11" \
    "with your package manager, or name one with PEGA_PYTHON=/path/to/python3.11."
}

# Prints a uv that is recent enough: the one on PATH, or a pinned one of our own in .uv.
pega_uv() {
  local python=$1 version own=$PEGA_ROOT/.uv
  if version=$(uv --version 2>/dev/null); then
    version=$(cut -d' ' -f2 <<<"$version")
    if [[ $(printf '%s\n' "$PEGA_UV_MINIMUM" "$version" | sort -V | head -n1) == "$PEGA_UV_MINIMUM" ]]; then
      command -v uv
      return
    fi
  fi
  if ! "$own/bin/uv" --version >/dev/null 2>&1; then
    pega_say "installing uv into .uv (60 MB)"
    rm -rf "$own"
    "$python" -m venv "$own" >&2 ||
      pega_die "$python cannot make virtual environments. Fix: install its venv module (python3.11-venv on Debian and" \
        "Ubuntu), or put uv on PATH."
    "$own/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes \
      -r "$PEGA_ROOT/requirements/uv.txt" >&2 ||
      pega_die "uv could not be installed, see above. Fix: check the network and pip's registry settings, then start again."
  fi
  printf '%s\n' "$own/bin/uv"
}

# Prints cpu or cuda.
pega_device() {
  case ${PEGA_DEVICE:-} in
    cpu | cuda) printf '%s\n' "$PEGA_DEVICE" ;;
    "") if timeout 20 nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then echo cuda; else echo cpu; fi ;;
    *) pega_die "PEGA_DEVICE=$PEGA_DEVICE: expected cpu or cuda." ;;
  esac
}

# Measured, in whole GB: what a finished .venv takes.
pega_list_gb() {
  case $1 in
    cuda) echo 10 ;;
    *) echo 8 ;;
  esac
}

# What a finished set-up is known by. It names the folder because scripts in .venv/bin carry its path.
pega_stamp() {
  local digest
  digest=$(cat "$PEGA_ROOT/requirements/$1.txt" "$PEGA_ROOT/pyproject.toml" | sha256sum) || return
  printf '%s %s %s\n' "$1" "${digest%% *}" "$PEGA_ROOT"
}

# Whether .venv already holds one of the given lists.
pega_is_set_up() {
  local list stamp
  stamp=$(cat "$PEGA_VENV/.pega-stamp" 2>/dev/null) || return
  for list in "$@"; do
    [[ $stamp == "$(pega_stamp "$list")" ]] && return
  done
  return 1
}

# Refuses when less is free than the list needs; in .venv, and in uv's cache too where that is another disk.
pega_check_space() {
  local need=$1 folder free
  shift
  for folder in "$@"; do
    while [[ ! -d $folder ]]; do folder=$(dirname "$folder"); done
    free=$(df -Pk "$folder" | awk 'NR == 2 { print int($4 * 1024 / 1e9) }')
    ((free >= need)) || pega_die "$need GB of free space are needed in $folder, $free GB are free. Fix: free some space, or" \
      "move the clone (or UV_CACHE_DIR, uv's cache) to a larger disk; PEGA_MIN_FREE_GB=<number> sets another limit."
  done
}

pega_setup() {
  local list accepted
  if [[ ${1:-} == dev ]]; then
    list=cpu-dev accepted=(cpu-dev)
  else
    list=$(pega_device) || return
    accepted=("$list" "$list-dev")
    [[ -f $PEGA_ROOT/requirements/$list-dev.txt ]] || accepted=("$list")
  fi
  pega_is_set_up "${accepted[@]}" && return
  mkdir -p "$PEGA_ROOT/.cache" || return
  (
    flock -n 9 || {
      pega_say "another set-up runs in this clone, waiting for it"
      flock 9
    }
    pega_is_set_up "${accepted[@]}" || pega_install "$list"
  ) 9>"$PEGA_ROOT/.cache/setup.lock"
}

pega_install() {
  local list=$1 python uv size cache venv_python=$PEGA_VENV/bin/python start=$SECONDS
  python=$(pega_python) || exit
  size=$(pega_list_gb "$list")
  pega_say "setting up .venv from requirements/$list.txt: about $size GB on disk, once"
  uv=$(pega_uv "$python") || exit
  cache=$("$uv" cache dir) || exit
  # With an older set-up in place most of it is there already.
  [[ ! -f $PEGA_VENV/.pega-stamp ]] || size=2
  pega_check_space "${PEGA_MIN_FREE_GB:-$size}" "$PEGA_ROOT" "$cache"

  rm -f "$PEGA_VENV/.pega-stamp"
  # An environment that was moved, or whose interpreter is gone, is made anew.
  if ! { "$venv_python" -c '' 2>/dev/null && grep -qF "$PEGA_VENV" "$PEGA_VENV/bin/activate"; }; then
    "$uv" venv --quiet --clear --python "$python" "$PEGA_VENV" || pega_die "could not make $PEGA_VENV, see above."
  fi

  pega_say "1/3 downloading and installing the pinned packages"
  pega_sync "$uv" "$list" || pega_die "the pinned packages were not installed, see above. Fix: check the network and uv's" \
    "registry settings, then start again; finished downloads are kept."
  pega_say "2/3 installing pega-omni-plugin itself (editable)"
  "$uv" pip install --quiet --python "$venv_python" --no-deps --editable "$PEGA_ROOT" ||
    pega_die "pega-omni-plugin was not installed, see above."
  pega_say "3/3 compiling bytecode"
  pega_compile "$venv_python" || pega_die "bytecode was not compiled, see above."
  pega_stamp "$list" >"$PEGA_VENV/.pega-stamp" || exit
  pega_say "set-up finished in $((SECONDS - start)) s"
}

pega_sync() {
  local sync=("$1" pip sync --python "$PEGA_VENV/bin/python" --require-hashes "$PEGA_ROOT/requirements/$2.txt")
  if [[ -t 2 ]]; then
    "${sync[@]}"
  else
    # A line per large download, but not one per package.
    "${sync[@]}" 2>&1 | sed -u '/^ [+~-] /d' >&2
    return "${PIPESTATUS[0]}"
  fi
}

# Compiles what start-up imports; all packages would take five times as long, and the first start compiles the rest.
pega_compile() {
  local packages
  packages=$("$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))') || return
  # torch.testing has files in the syntax of newer Pythons; transformers loads its models one by one when asked.
  "$1" -m compileall -q -j0 -x 'torch/testing/|transformers/models/' \
    "$packages"/{torch,transformers,vllm,vllm_omni,dynamo} "$PEGA_ROOT/pega_omni_plugin"
}
