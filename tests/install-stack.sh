#!/bin/sh
# Install Prometheus, Alertmanager, VictoriaMetrics, Chromium, Open MPI and Valgrind for the tests if possible; otherwise
# their tests are skipped.
set -eu
all_installed() {
    for program in prometheus promtool prometheus-alertmanager amtool victoria-metrics chromium mpirun valgrind; do
        command -v "$program" >/dev/null 2>&1 || return 1
    done
}
all_installed && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    # One run at a time: the next one then finds everything installed.
    [ "${1:-}" = locked ] || exec flock --close "$0" "$0" locked
    apt-get update -qq
    export DEBIAN_FRONTEND=noninteractive
    apt-get install -y -qq --no-install-recommends prometheus prometheus-alertmanager chromium openmpi-bin valgrind \
        >/dev/null
    apt-get install -y -qq --no-install-recommends victoria-metrics >/dev/null ||
        echo "The test of remote write will be skipped: there is no package victoria-metrics." >&2
else
    echo "The tests with these programs will be skipped. To run them, install:" \
        "sudo apt-get install prometheus prometheus-alertmanager victoria-metrics chromium openmpi-bin valgrind" >&2
fi
