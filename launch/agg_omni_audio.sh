#!/usr/bin/env bash
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/env.sh"
source "$PEGA_ROOT/launch/processes.sh"

usage() {
  cat <<'EOF'
Serve speech behind the Dynamo frontend: POST /v1/audio/speech on one port, no etcd or NATS needed.

  launch/agg_omni_audio.sh [options] [further arguments for the workers]

  --model NAME|DIR             what to serve: piper (an embedded CPU voice, the default), sim (the simulator), a
                               checkpoint directory, or a name on the Hugging Face hub; or MODEL=...
  --host ADDRESS               where the frontend listens (default 127.0.0.1; 0.0.0.0 for every interface)
  --port NUMBER                (default 8000)
  --workers N                  worker processes, each with an engine of its own (default 1)
  --stage-configs-path FILE    a stage file, or the name of one in stage_configs/ (default: the model's own)
  --help

The first start installs the pinned packages into .venv. Ctrl-C or SIGTERM drains and ends everything; when one process
dies all are ended, and the exit status is 1.

Environment: PEGA_DEVICE=cpu|cuda chooses the packages (default: cuda where a GPU is found). DYN_DISCOVERY_BACKEND=etcd
and Dynamo's other variables join a cluster. DYN_SYSTEM_PORT=N serves the health and metrics of worker 1 there, of
worker 2 on N+1, and so on. PEGA_STOP_SECONDS (60) bounds the drain.
EOF
}

model=${MODEL:-piper} host=127.0.0.1 port=8000 workers=1 stage_file="" worker_arguments=() named=""
while (($#)); do
  option=$1
  shift
  case $option in
    --model | --host | --port | --workers | --stage-configs-path)
      (($#)) || pega_die "$option needs a value, see --help."
      value=$1
      shift
      ;;
    --model=* | --host=* | --port=* | --workers=* | --stage-configs-path=*)
      value=${option#*=} option=${option%%=*}
      ;;
  esac
  case $option in
    --help | -h) usage && exit ;;
    --model) model=$value ;;
    --host) host=$value ;;
    --port) port=$value ;;
    --workers) workers=$value ;;
    --stage-configs-path) stage_file=$value ;;
    *)
      worker_arguments+=("$option")
      [[ $option != --served-model-name ]] || named=${1:-}
      [[ $option != --served-model-name=* ]] || named=${option#*=}
      ;;
  esac
done

# What can be known to be wrong is said before anything is installed or started.
[[ $port =~ ^[0-9]{1,5}$ ]] && ((10#$port >= 1 && 10#$port <= 65535)) ||
  pega_die "--port $port: expected a number from 1 to 65535."
[[ $workers =~ ^[0-9]{1,3}$ ]] && ((10#$workers >= 1)) || pega_die "--workers $workers: expected a number from 1 to 999."
# A leading zero would make them octal.
port=$((10#$port)) workers=$((10#$workers)) system_port=${DYN_SYSTEM_PORT:-}
if [[ -n $system_port ]]; then
  # Dynamo 1.6.1 reads the number into a signed 16-bit one.
  [[ $system_port =~ ^[0-9]{1,5}$ ]] && ((10#$system_port + workers - 1 <= 32767)) ||
    pega_die "DYN_SYSTEM_PORT=$system_port: expected a number that leaves one per worker up to 32767."
  system_port=$((10#$system_port))
fi
programs=("$PEGA_ROOT"/pega_omni_plugin/models/*/checkpoint)
programs=("${programs[@]%/checkpoint}")
programs=("${programs[@]##*/}")
stage_files=("$PEGA_ROOT"/stage_configs/[!_]*.yaml)
stage_files=("${stage_files[@]##*/}")
if [[ " ${programs[*]} " == *" $model "* ]]; then
  served="" # asked for below, once there is an environment
elif [[ -d $model ]]; then
  [[ -f $model/config.json ]] || pega_die "--model $model: the directory has no config.json. Fix: name the directory" \
    "that holds the checkpoint's config.json and weights."
  served=$(basename "$(cd "$model" && pwd)")
elif [[ $model =~ ^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9._-]+$ ]]; then
  served=$model
  pega_say "there is no directory $model; taking it for a name on the Hugging Face hub"
else
  pega_die "--model $model: no such directory. Fix: name a checkpoint directory, a model on the Hugging Face hub as" \
    "owner/name, or one of: ${programs[*]}."
fi
if [[ -n $stage_file && ! -f $stage_file && " ${stage_files[*]} " != *" ${stage_file%.yaml}.yaml "* ]]; then
  pega_die "--stage-configs-path $stage_file: no such file, and none of that name in stage_configs/ (there are:" \
    "${stage_files[*]%.yaml})."
fi
discovery=${DYN_DISCOVERY_BACKEND:-file}
[[ $discovery != mem ]] || pega_die "DYN_DISCOVERY_BACKEND=mem works within one process only. Fix: unset it, or use etcd."

python=$(pega_python)
PYTHONPATH=$PEGA_ROOT "$python" -c '
import sys
from pega_omni_plugin.doctor import check_port
check = check_port(sys.argv[1], int(sys.argv[2]))
sys.exit(f"pega-omni: {check.text}. Fix: {check.fix}." if check.state == "fail" else 0)' "$host" "$port"

pega_setup
python=$PEGA_VENV/bin/python
[[ -n $served ]] || served=$("$PEGA_VENV/bin/pega-omni" path --name "$model")

private=""
trap 'exit 0' INT TERM HUP
trap 'pega_stop; rm -rf ${private:+"$private"}' EXIT
export DYN_DISCOVERY_BACKEND=$discovery
export DYN_REQUEST_PLANE=${DYN_REQUEST_PLANE:-tcp} DYN_EVENT_PLANE=${DYN_EVENT_PLANE:-zmq}
export DYN_SYSTEM_HOST=${DYN_SYSTEM_HOST:-127.0.0.1}
if [[ $discovery == file && -z ${DYN_FILE_KV:-} ]]; then
  # A private registry: nothing of another run is found, and nothing outside this machine can reach the workers.
  private=$(mktemp -d)
  export DYN_FILE_KV=$private DYN_TCP_RPC_HOST=${DYN_TCP_RPC_HOST:-127.0.0.1}
fi
[[ -t 2 ]] || export DYN_SDK_DISABLE_ANSI_LOGGING=${DYN_SDK_DISABLE_ANSI_LOGGING:-1}

# By default the frontend logs every answer, the polling below included.
frontend_log=${DYN_LOG:-info,dynamo_llm::http::service::service_v2=warn}
pega_start frontend env DYN_LOG="$frontend_log" "$python" -m dynamo.frontend \
  --http-host "$host" --http-port "$port" --discovery-backend "$discovery" --request-plane "$DYN_REQUEST_PLANE" \
  --router-mode least-loaded --frontend-route-extension pega_omni_plugin.dynamo.nodelay:provider

[[ -z $stage_file ]] || worker_arguments=(--stage-configs-path "$stage_file" "${worker_arguments[@]}")
for ((worker = 1; worker <= workers; worker++)); do
  [[ -z $system_port ]] || export DYN_SYSTEM_PORT=$((system_port + worker - 1))
  pega_start "worker $worker" "$python" -m pega_omni_plugin.dynamo --model "$model" "${worker_arguments[@]}"
done

case $host in
  0.0.0.0 | "") address=127.0.0.1 ;;
  ::) address="[::1]" ;;
  *:*) address="[$host]" ;;
  *) address=$host ;;
esac
wanted=()
# A shared registry lists other models too.
[[ -n $private ]] || wanted=(--model "${named:-$served}")
pega_start "readiness check" "$python" "$PEGA_ROOT/launch/wait_ready.py" --url "http://$address:$port" \
  --workers "$workers" "${wanted[@]}"

pega_watch
if [[ $PEGA_ENDED == "readiness check" && $PEGA_STATUS == 0 ]]; then
  pega_watch
fi
pega_say "$PEGA_ENDED ended with status $PEGA_STATUS; ending the others."
exit 1
