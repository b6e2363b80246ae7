# Sourced by the launch scripts: children that live together. When one ends, or the script is told to stop, all end.
#
#   trap pega_stop EXIT; trap 'exit 0' INT TERM HUP
#   pega_start "worker 1" python -m something
#   pega_watch     # returns when a child has ended: PEGA_ENDED is its name, PEGA_STATUS its exit status

declare -A PEGA_CHILDREN=()
# Seconds that children have to finish what they serve before they are killed.
PEGA_STOP_SECONDS=${PEGA_STOP_SECONDS:-60}

# Starts a child in a process group of its own, so that Ctrl-C reaches it through us, in order, and so that what it
# leaves behind can be killed. It is told to stop if this script is killed outright.
pega_start() {
  local name=$1
  shift
  setsid setpriv --pdeathsig TERM "$@" &
  PEGA_CHILDREN[$!]=$name
}

pega_watch() {
  local pid
  while :; do
    for pid in "${!PEGA_CHILDREN[@]}"; do
      if ! kill -0 "$pid" 2>/dev/null; then
        PEGA_ENDED=${PEGA_CHILDREN[$pid]}
        pega_reap "$pid"
        return
      fi
    done
    wait -n 2>/dev/null || true # without the shell's own note of what was killed
  done
}

# Ends every child: politely, then after PEGA_STOP_SECONDS, or on another signal, by force.
pega_stop() {
  local pid deadline=$((SECONDS + PEGA_STOP_SECONDS)) hurry=""
  trap 'hurry=1' INT TERM HUP
  # Not the groups: an engine has to outlive the streams that its worker still serves.
  for pid in "${!PEGA_CHILDREN[@]}"; do kill -TERM "$pid" 2>/dev/null || true; done
  for pid in "${!PEGA_CHILDREN[@]}"; do
    while kill -0 "$pid" 2>/dev/null && [[ -z $hurry ]] && ((SECONDS < deadline)); do sleep 0.1 || true; done
    kill -0 "$pid" 2>/dev/null && printf 'pega-omni: %s is killed\n' "${PEGA_CHILDREN[$pid]}" >&2
    pega_reap "$pid"
  done
}

# Kills what is left of a child's process group and takes its exit status.
pega_reap() {
  kill -KILL -- "-$1" 2>/dev/null || true
  PEGA_STATUS=0
  wait "$1" 2>/dev/null || PEGA_STATUS=$?
  unset "PEGA_CHILDREN[$1]"
}
