#!/usr/bin/env bash
# Run the stack of docker-compose.yml from native binaries, on loopback: the same rules, alerts and dashboards.
#
#   deploy/stack.sh [--demo]     --demo: simulated training instead of the exporter of this machine
#
# Data and logs go to .stack/. Ctrl-C ends everything that was started.
set -euo pipefail
cd "$(dirname "$0")/.."

TORCHMEM=${TORCHMEM:-torchmem}
SOURCE=exporter
case "${1:-}" in
    "") ;;
    --demo) SOURCE=demo; shift ;;
    *) echo "Unknown option $1: run deploy/stack.sh or deploy/stack.sh --demo." >&2; exit 2 ;;
esac

need() { # program, what to do
    command -v "$1" >/dev/null || { echo "$1 is not on PATH: $2." >&2; exit 2; }
}
unused() { # port, who wants it
    ! (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null ||
        { echo "Port $1 is in use, but $2 needs it: end what listens there (sudo ss -ltnp 'sport = :$1')." >&2; exit 2; }
}
start() { # name, port it answers on, command...
    local name=$1 port=$2
    shift 2
    "$@" >".stack/$name.log" 2>&1 &
    PIDS[$!]=$name
    until (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do
        kill -0 $! 2>/dev/null || { echo "$name did not start: read .stack/$name.log." >&2; exit 1; }
        sleep 0.2
    done
}
start_grafana() {
    unused 3000 "Grafana"
    # As in docker-compose.yml: everybody here may look; a login needs GRAFANA_PASSWORD.
    export GF_SECURITY_ADMIN_PASSWORD="${GRAFANA_PASSWORD:-$(head -c 32 /dev/urandom | base64)}"
    export GF_AUTH_ANONYMOUS_ENABLED=true GF_AUTH_ANONYMOUS_ORG_ROLE=Viewer GF_SERVER_HTTP_ADDR=127.0.0.1
    export GF_PATHS_DATA="$PWD/.stack/grafana" GF_PATHS_LOGS="$PWD/.stack/grafana"
    export GF_PATHS_PROVISIONING="$PWD/dashboards/provisioning"
    export GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH="$PWD/dashboards/json/fleet.json"
    export PROMETHEUS_URL=http://127.0.0.1:9090 TORCHMEM_DASHBOARDS="$PWD/dashboards/json"
    start grafana 3000 grafana-server --homepath="${GRAFANA_HOME:-/usr/share/grafana}"
    echo "Grafana       http://127.0.0.1:3000"
}
end() {
    trap - EXIT INT TERM
    [ ${#PIDS[@]} -eq 0 ] || kill "${!PIDS[@]}" 2>/dev/null || true
    wait
}

need prometheus "run sudo apt-get install prometheus"
need prometheus-alertmanager "run sudo apt-get install prometheus-alertmanager"
need "$TORCHMEM" "run pip install 'torchmem[exporter]', or set TORCHMEM to the command"
unused 9847 "the exporter"
unused 9090 "Prometheus"
unused 9093 "Alertmanager"

declare -A PIDS=()
trap end EXIT
trap 'exit 0' INT TERM
mkdir -p .stack/prometheus .stack/alertmanager

[ "$SOURCE" = exporter ] || set -- --loop
start "$SOURCE" 9847 "$TORCHMEM" "$SOURCE" --listen 127.0.0.1:9847 "$@"
start alertmanager 9093 prometheus-alertmanager --config.file=alertmanager/alertmanager.yml \
    --storage.path=.stack/alertmanager --web.listen-address=127.0.0.1:9093 --cluster.listen-address=
start prometheus 9090 prometheus --config.file=prometheus/prometheus.yml \
    --storage.tsdb.path=.stack/prometheus --web.listen-address=127.0.0.1:9090
echo "Metrics       http://127.0.0.1:9847/metrics"
echo "Prometheus    http://127.0.0.1:9090/alerts"
echo "Alertmanager  http://127.0.0.1:9093"

if command -v grafana-server >/dev/null; then
    start_grafana
else
    echo "Grafana is not installed: import the files of dashboards/json into any Grafana you have."
fi
echo "Logs and data are in .stack/. Ctrl-C ends everything."

wait -n -p ended || true
echo "${PIDS[$ended]} ended: read .stack/${PIDS[$ended]}.log." >&2
unset "PIDS[$ended]"
exit 1
