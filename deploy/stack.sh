#!/usr/bin/env bash
# Run the stack of docker-compose.yml from native binaries, on loopback, with the same rules, alerts and dashboards.
#
#   deploy/stack.sh              with the exporter of this machine
#   deploy/stack.sh --demo       with a simulated training instead
#
# Data and logs go to .stack/. Ctrl-C stops all processes. Other ports: EXPORTER_PORT, PROMETHEUS_PORT,
# ALERTMANAGER_PORT, GRAFANA_PORT. Restart it after a change of prometheus/prometheus.yml or prometheus/targets.
set -euo pipefail
cd "$(dirname "$0")/.."

TORCHMEM=${TORCHMEM:-torchmem}
EXPORTER_PORT=${EXPORTER_PORT:-9847} PROMETHEUS_PORT=${PROMETHEUS_PORT:-9090}
ALERTMANAGER_PORT=${ALERTMANAGER_PORT:-9093} GRAFANA_PORT=${GRAFANA_PORT:-3000}
SOURCE=exporter
case "${1:-}" in
    "") ;;
    --demo) SOURCE=demo; shift ;;
    *) echo "Unknown option $1: run deploy/stack.sh or deploy/stack.sh --demo." >&2; exit 2 ;;
esac

need() { # program, how to install it
    command -v "$1" >/dev/null || { echo "$1 is not on PATH: $2." >&2; exit 2; }
}
unused() { # variable with a port, program that needs it
    ! (exec 3<>"/dev/tcp/127.0.0.1/${!1}") 2>/dev/null ||
        { echo "$2 needs port ${!1}, which is in use: set $1 to another port." >&2; exit 2; }
}
status() { # port, path: prints the HTTP status
    local code=
    { exec 3<>"/dev/tcp/127.0.0.1/$1" && printf 'GET %s HTTP/1.0\r\n\r\n' "$2" >&3 && read -r -t 5 _ code _ <&3; } 2>/dev/null || true
    echo "$code"
}
link() { # port, paths: prints the URL of the first page that exists, because Debian's packages lack some
    local port=$1 path
    shift
    for path; do
        case "$(status "$port" "$path")" in
            2*|3*) echo "http://127.0.0.1:$port$path"; return ;;
        esac
    done
    return 1
}
configure() { # copies the configuration with the ports of this stack to .stack/config
    rm -rf .stack/config .stack/assets
    mkdir -p .stack/config/targets .stack/assets .stack/prometheus .stack/alertmanager
    ln -s "$PWD/prometheus/rules" .stack/config/rules
    ln -s "$PWD/docs" .stack/assets/docs
    local file
    for file in prometheus/prometheus.yml prometheus/targets/*.yml; do
        sed -e "s/127\.0\.0\.1:9847/127.0.0.1:$EXPORTER_PORT/" -e "s/127\.0\.0\.1:9090/127.0.0.1:$PROMETHEUS_PORT/" \
            -e "s/127\.0\.0\.1:9093/127.0.0.1:$ALERTMANAGER_PORT/" "$file" >".stack/config/${file#prometheus/}"
    done
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
start_grafana() { # command...
    unused GRAFANA_PORT "Grafana"
    # As in docker-compose.yml: viewing needs no login, and logging in needs GRAFANA_PASSWORD.
    export GF_SECURITY_ADMIN_PASSWORD="${GRAFANA_PASSWORD:-$(head -c 32 /dev/urandom | base64)}"
    export GF_AUTH_ANONYMOUS_ENABLED=true GF_AUTH_ANONYMOUS_ORG_ROLE=Viewer GF_SERVER_HTTP_ADDR=127.0.0.1
    export GF_SERVER_HTTP_PORT="$GRAFANA_PORT"
    export GF_PATHS_DATA="$PWD/.stack/grafana" GF_PATHS_LOGS="$PWD/.stack/grafana"
    export GF_PATHS_PROVISIONING="$PWD/dashboards/provisioning"
    export GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH="$PWD/dashboards/json/fleet.json"
    export PROMETHEUS_URL="http://127.0.0.1:$PROMETHEUS_PORT" TORCHMEM_DASHBOARDS="$PWD/dashboards/json"
    start grafana "$GRAFANA_PORT" "$@" --homepath="${GRAFANA_HOME:-/usr/share/grafana}"
    echo "Dashboards    http://127.0.0.1:$GRAFANA_PORT"
}
without_grafana() {
    cat <<END
Dashboards    Grafana is not on PATH. Install it (https://grafana.com/grafana/download) and start this again, or run
                docker run --rm --network host -v "$PWD/dashboards:/dashboards:ro" -e GF_AUTH_ANONYMOUS_ENABLED=true \\
                    -e GF_PATHS_PROVISIONING=/dashboards/provisioning -e TORCHMEM_DASHBOARDS=/dashboards/json \\
                    -e PROMETHEUS_URL=http://127.0.0.1:$PROMETHEUS_PORT -e GF_SERVER_HTTP_PORT=$GRAFANA_PORT $1
              and open port $GRAFANA_PORT of this machine. Or import dashboards/json/*.json into another Grafana.
END
}
end() {
    trap - EXIT INT TERM
    [ ${#PIDS[@]} -eq 0 ] || kill "${!PIDS[@]}" 2>/dev/null || true
    wait
}

need prometheus "run sudo apt-get install prometheus"
need prometheus-alertmanager "run sudo apt-get install prometheus-alertmanager"
need "$TORCHMEM" "run pip install '.[exporter]' in a clone of torchmem, or set TORCHMEM to the command"
unused EXPORTER_PORT "the exporter"
unused PROMETHEUS_PORT "Prometheus"
unused ALERTMANAGER_PORT "Alertmanager"

declare -A PIDS=()
trap end EXIT
trap 'exit 0' INT TERM
configure

[ "$SOURCE" = exporter ] || set -- --loop
start "$SOURCE" "$EXPORTER_PORT" "$TORCHMEM" "$SOURCE" --listen "127.0.0.1:$EXPORTER_PORT" "$@"
start alertmanager "$ALERTMANAGER_PORT" prometheus-alertmanager --config.file=alertmanager/alertmanager.yml \
    --storage.path=.stack/alertmanager --web.listen-address="127.0.0.1:$ALERTMANAGER_PORT" \
    --web.external-url="http://127.0.0.1:$ALERTMANAGER_PORT" --cluster.listen-address=
start prometheus "$PROMETHEUS_PORT" prometheus --config.file=.stack/config/prometheus.yml \
    --storage.tsdb.path=.stack/prometheus --web.listen-address="127.0.0.1:$PROMETHEUS_PORT" \
    --web.external-url="http://127.0.0.1:$PROMETHEUS_PORT" --web.user-assets=.stack/assets
until [ "$(status "$PROMETHEUS_PORT" /-/ready)" = 200 ]; do sleep 0.2; done
echo "Live page     http://127.0.0.1:$EXPORTER_PORT"
echo "Prometheus    $(link "$PROMETHEUS_PORT" /alerts /classic/alerts /api/v1/alerts)"
if link "$ALERTMANAGER_PORT" /script.js >/dev/null; then
    echo "Alertmanager  http://127.0.0.1:$ALERTMANAGER_PORT"
else
    echo "Alertmanager  amtool --alertmanager.url=http://127.0.0.1:$ALERTMANAGER_PORT alert (this package has no web interface)"
fi

if command -v grafana >/dev/null; then # since Grafana 9.4
    start_grafana grafana server
elif command -v grafana-server >/dev/null; then
    start_grafana grafana-server
else
    without_grafana "$(sed -n 's/^ *image: \(grafana.*\)/\1/p' docker-compose.yml)"
fi
echo "Logs and data are in .stack/. Ctrl-C stops all processes."

wait -n -p ended || true
echo "${PIDS[$ended]} ended: read .stack/${PIDS[$ended]}.log." >&2
unset "PIDS[$ended]"
exit 1
