#!/bin/bash
# Trains on every host of a Cloud TPU slice, which it creates if there is none of that name:
#   NAME=ladder ZONE=us-east5-a TYPE=v5p-128 SHARE=10.0.0.2:/runs SOURCE='ladder-jax[tpu] @ git+https://...' \
#       experiments/launch/tpu_pod/gcloud.sh CONFIG run.dir=/runs/ladder [overrides]
# Run it again after an interruption: the run goes on from its last checkpoint. The slice stays until it is deleted:
#   gcloud compute tpus tpu-vm delete ladder --zone us-east5-a
set -eu
: "${NAME:?the slice to use or to create}" "${ZONE:?its zone, such as us-east5-a}" "${TYPE:?its type, such as v5p-128}"
: "${SHARE:?an NFS export (Filestore), HOST:/PATH, which becomes /runs on all hosts}"
: "${SOURCE:?what pip installs on the hosts: ladder-jax[tpu] @ git+https://... or file:///runs/....whl}"
version=${VERSION:-v2-alpha-tpuv5} # the VM's software: https://cloud.google.com/tpu/docs/runtimes
spot=${SPOT:+--spot}               # SPOT=1 is cheaper, and may be taken away
tpus="gcloud compute tpus tpu-vm"

if ! $tpus describe "$NAME" --zone="$ZONE" >/dev/null 2>&1; then
    $tpus create "$NAME" --zone="$ZONE" --accelerator-type="$TYPE" --version="$version" $spot
fi

everywhere() {
    $tpus ssh "$NAME" --zone="$ZONE" --worker=all --command="$1"
}

everywhere "set -e
if ! mountpoint -q /runs; then
    sudo apt-get install -y -qq nfs-common >/dev/null
    sudo mkdir -p /runs
    sudo mount -t nfs $(printf %q "$SHARE") /runs
fi
export PATH=\$HOME/.local/bin:\$PATH
command -v uv >/dev/null || curl -LsSf https://astral.sh/uv/install.sh | sh
[ -x ~/ladder/bin/python ] || uv venv --quiet --python 3.12 ~/ladder
uv pip install --quiet --python ~/ladder/bin/python $(printf %q "$SOURCE")"

# ladder-jax asks the metadata server which of how many hosts it runs on.
everywhere "~/ladder/bin/ladder-jax train$(printf ' %q' "$@")"
