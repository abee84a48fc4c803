#!/bin/bash
# The same on a GKE cluster that xpk has made (xpk cluster create): a JobSet, restarted when a host is lost.
#   CLUSTER=pods ZONE=us-east5-a TYPE=v5p-128 IMAGE=REGISTRY/ladder-jax:TAG NAME=ladder \
#       experiments/launch/tpu_pod/xpk.sh CONFIG run.dir=/runs/ladder [overrides]
# The run's folder must be the same on all hosts: gs://..., or a Filestore that xpk storage attach mounts at /runs.
set -eu
: "${CLUSTER:?the cluster}" "${ZONE:?its zone}" "${TYPE:?the slice, such as v5p-128}"
: "${IMAGE:?an image of ../Dockerfile, with ACCELERATOR=tpu}" "${NAME:?the name of the workload}"

# GKE tells each pod the hosts of its slice, and of several slices (SLICES) their number: ladder-jax understands both.
# SIGTERM leaves five minutes to save. Of itself xpk starts again after the statuses from 127 on; 1 is another host's loss,
# and 2, a mistake of the user's, would come again.
xpk workload create --cluster "$CLUSTER" --zone "$ZONE" --workload "$NAME" --tpu-type "$TYPE" \
    --num-slices "${SLICES:-1}" --docker-image "$IMAGE" --max-restarts "${MAX_RESTARTS:-20}" \
    --restart-on-exit-codes 1 --termination-grace-period-seconds 300 \
    --command "ladder-jax train$(printf ' %q' "$@")"
