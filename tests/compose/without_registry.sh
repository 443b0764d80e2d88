#!/bin/bash
# Start the stack of Compose where no registry can be reached, with images of Debian's packages.
#
# Run it as root in a copy of the checkout: it changes docker-compose.yml. To end it:
#   DOCKER_HOST=unix:///tmp/d/sock docker-compose down -v; kill "$(cat /tmp/d/pid)"
set -eu

apt-get install -y --no-install-recommends docker.io iptables docker-compose debootstrap
dockerd --data-root /tmp/d/data --exec-root /tmp/d/exec --pidfile /tmp/d/pid -H unix:///tmp/d/sock &
export DOCKER_HOST=unix:///tmp/d/sock
debootstrap --variant=minbase --include=python3,python3-venv,python3-pip,wget,prometheus,prometheus-alertmanager \
    bookworm /tmp/d/root
pip download -d /tmp/d/root/wheels --require-hashes -r exporter/requirements.txt -r exporter/build-requirements.txt
ln -sf python3 /tmp/d/root/usr/bin/python
tar -C /tmp/d/root -c . | docker import -c 'ENV PIP_NO_INDEX=1 PIP_FIND_LINKS=/wheels' - python:3.12-slim
printf '%s\n' 'FROM python:3.12-slim' 'RUN install -d -o nobody /prometheus' 'USER nobody' 'VOLUME /prometheus' \
    'ENTRYPOINT ["/bin/prometheus"]' | docker build -t prom/prometheus:v3.5.1 -
printf '%s\n' 'FROM python:3.12-slim' 'RUN install -d -o nobody /alertmanager' 'USER nobody' \
    'VOLUME /alertmanager' 'ENTRYPOINT ["/bin/prometheus-alertmanager"]' | docker build -t prom/alertmanager:v0.28.1 -
sed -i 's/@sha256:[0-9a-f]*//' docker-compose.yml    # in a copy: these images have other digests
docker-compose build --build-arg PYTHON_IMAGE=python:3.12-slim exporter
TORCHMEM_DEMO=1 docker-compose up -d exporter prometheus alertmanager torchmem-demo
