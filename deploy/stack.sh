#!/usr/bin/env bash
# Run the stack of docker-compose.yml from native binaries, on loopback, with the same rules, alerts and dashboards.
#
#   deploy/stack.sh              with the exporter of this machine
#   deploy/stack.sh --demo       with a simulated training instead
#
# Data and logs go to .stack/. Ctrl-C stops all processes.
set -euo pipefail
cd "$(dirname "$0")/.."

TORCHMEM=${TORCHMEM:-torchmem}
SOURCE=exporter
case "${1:-}" in
    "") ;;
    --demo) SOURCE=demo; shift ;;
    *) echo "Unknown option $1: run deploy/stack.sh or deploy/stack.sh --demo." >&2; exit 2 ;;
esac

need() { # program, how to install it
    command -v "$1" >/dev/null || { echo "$1 is not on PATH: $2." >&2; exit 2; }
}
unused() { # port, program that needs it
    ! (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null ||
        { echo "$2 needs port $1, which is in use: find the process with sudo ss -ltnp 'sport = :$1' and stop it." >&2; exit 2; }
}
start() { # name, port, command...
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
    # As in docker-compose.yml: viewing needs no login, and logging in needs GRAFANA_PASSWORD.
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
    echo "Grafana is not installed: import the files of dashboards/json into another Grafana."
fi
echo "Logs and data are in .stack/. Ctrl-C stops all processes."

wait -n -p ended || true
echo "${PIDS[$ended]} ended: read .stack/${PIDS[$ended]}.log." >&2
unset "PIDS[$ended]"
exit 1
