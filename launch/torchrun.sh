#!/bin/bash
# A training whose ranks torchrun starts: on this machine, on several without Slurm, or inside `srun --ntasks-per-node=1`.
#
#   NPROC_PER_NODE=8 launch/torchrun.sh model=small data=text data.path=/data/text run.name=mine
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 launch/torchrun.sh … run.name=mine    # on the first machine
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 launch/torchrun.sh … run.name=mine    # on the second
#
# The words are those of llmtrain. Inside srun nothing has to be set. SIGTERM and SIGUSR1 let the ranks save and end; the exit
# code is the one that status.json names, not torchrun's, which is 1 whatever happened. PYTHON names the interpreter.
set -u

python=${PYTHON:-python}

say() { echo "torchrun.sh: $*" >&2; }

refuse() {
    say "$*"
    exit 2
}

if [[ -n ${SLURM_STEP_NODELIST:-} ]]; then
    [[ $SLURM_STEP_NUM_TASKS == "$SLURM_STEP_NUM_NODES" ]] || refuse "one task per node: srun --ntasks-per-node=1"
    nodes=${NNODES:-$SLURM_STEP_NUM_NODES}
    node_rank=${NODE_RANK:-$SLURM_NODEID}
    ranks=${NPROC_PER_NODE:-${SLURM_GPUS_ON_NODE:-}}
    port=${MASTER_PORT:-$((20000 + (SLURM_JOB_ID + 1009 * SLURM_STEP_ID) % 10000))}
    address=${MASTER_ADDR:-}
    if [[ -z $address && $nodes -gt 1 ]]; then
        # Node names need not resolve; Slurm knows the addresses it uses itself.
        first=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)
        address=$(scontrol show node "$first" -o | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
        address=${address:-$first}
    fi
else
    nodes=${NNODES:-1}
    node_rank=${NODE_RANK:-0}
    ranks=${NPROC_PER_NODE:-}
    port=${MASTER_PORT:-}
    address=${MASTER_ADDR:-}
    if [[ $nodes -gt 1 && (-z ${NODE_RANK:-} || -z $port || -z $address) ]]; then
        say "NNODES=$nodes needs NODE_RANK (0 … $((nodes - 1)), another on each machine)"
        refuse "and MASTER_ADDR and MASTER_PORT (the first machine's, the same on all)"
    fi
fi
address=${address:-127.0.0.1}
ranks=${ranks:-$("$python" -c 'import torch; print(max(1, torch.cuda.device_count()))')} || exit
port=${port:-$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')} || exit

# The value of a key=value word as llmtrain reads it; only what is plain text is understood.
value_of() {
    local value=${1#*=} special=$'\'"\\${}(),='
    [[ $value == \'*\' || $value == \"*\" ]] && value=${value:1:-1}
    if [[ -z $value || $value == *["$special"]* ]]; then
        refuse "$1: under torchrun run.name and run.dir are plain text, as run.name=mine"
    fi
    echo "$value"
}

name="" folder="" picked=""
for word in "$@"; do
    word=${word#+}
    case ${word#+} in
        run.name=null | run.dir=null) ;;
        run.name=*) name=$(value_of "$word") || exit ;;
        run.dir=*) folder=$(value_of "$word") || exit ;;
        sweep.only=*) picked=${word#*=} ;;
    esac
done
words=("$@")
if [[ -z $name ]]; then
    [[ $nodes -gt 1 && -z ${SLURM_JOB_ID:-} ]] && refuse "several machines need run.name=NAME, the same on all"
    name="torchrun-$(date -u +%Y%m%d-%H%M%S)-$$"
    [[ -n ${SLURM_JOB_ID:-} ]] && name="slurm-$SLURM_JOB_ID"
    words+=("run.name=$name")
fi
if [[ -z $folder ]]; then
    folder="$PWD/runs"
    words+=("run.dir='${folder//\'/\\\'}'")
fi
[[ $folder == \~/* ]] && folder=$HOME${folder#\~}
# The run's, or that of the chosen combination of a sweep, once it is there.
status_file() {
    local found
    if [[ -n $picked ]]; then
        for found in "$folder/$name/$picked" "$folder/$name/$picked"-*; do
            [[ -d $found ]] && echo "$found/status.json" && return
        done
    fi
    echo "$folder/$name/status.json"
}

# Changes whenever status.json is written.
mark() { stat --format='%i %.9Y' "$(status_file)" 2>/dev/null; }

before=$(mark)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # what torchrun sets too, with a warning; launch.threads decides
# torchrun dies of a SIGUSR1 that it does not ignore, and leaves its ranks behind; they set up their own handlers. After a
# SIGTERM it kills them when its time is over, 30 s unless told: too short for a large save. setsid: the Ctrl-C of a terminal
# comes to this script alone, which sends SIGTERM; two signals at once end torchrun in a traceback.
(
    trap '' USR1
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}
    exec setsid "$python" -m torch.distributed.run --nnodes="$nodes" --node-rank="$node_rank" --nproc-per-node="$ranks" \
        --master-addr="$address" --master-port="$port" -m llmtrain "${words[@]}"
) &
agent=$!

# For the trap. The ranks are torchrun's children; Slurm signals them by itself as well, which changes nothing.
# shellcheck disable=SC2317,SC2329
tell_ranks() {
    local -a ranks=()
    read -ra ranks <"/proc/$agent/task/$agent/children"
    [[ ${#ranks[@]} -gt 0 ]] && kill -s USR1 "${ranks[@]}"
} 2>/dev/null
trap 'signalled=yes; tell_ranks' USR1
trap 'signalled=yes; kill -TERM "$agent" 2>/dev/null' TERM INT HUP
signalled=yes code=127
while [[ -n $signalled ]]; do
    signalled=""
    wait "$agent"
    ended=$?
    [[ $ended -ne 127 ]] && code=$ended # 127: known already, the signal came just then
done

if [[ $code -ne 0 && $(mark) != "$before" && $(cat "$(status_file)") =~ \"code\":[[:space:]]*([0-9]+) ]]; then
    code=${BASH_REMATCH[1]}
fi
exit "$code"
