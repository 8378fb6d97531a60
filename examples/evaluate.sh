#!/bin/sh
# lm-eval on a folder of a model: examples/evaluate.sh FOLDER TASKS [options of lm_eval run]
set -eu
folder=${1:?name a folder} tasks=${2:?name tasks of lm-eval} port=${PORT:-8017} log=$(mktemp)
shift 2
megatron-hybrid serve "$folder" --served-model-name evaluated --port "$port" --dtype float32 > "$log" 2>&1 &
server=$!
trap 'kill $server 2> /dev/null; rm -f "$log"' EXIT
until python -c "import urllib.request as r; r.urlopen('http://127.0.0.1:$port/health')" 2> /dev/null; do
    kill -0 $server 2> /dev/null || { cat "$log"; exit 1; }
    sleep 1
done
lm_eval run --model local-completions --tasks "$tasks" "$@" --model_args \
    "model=evaluated,base_url=http://127.0.0.1:$port/v1/completions,tokenizer=$folder,num_concurrent=16"
