#compdef torchmem

# Completion of torchmem for zsh; installed as `torchmem manifests completion --help` says.
# Rendered by deploy/completion.py with shtab: do not edit.


_shtab_torchmem_commands() {
  local _commands=(
    capture:'record the memory history of a running process and save the snapshot'
    compare:'say what changed between two runs, and whether it is a regression'
    demo:'run a simulated training job and show the memory of its ranks; needs no GPU'
    doctor:'check everything between a training process and Prometheus, and say what to fix'
    exporter:'serve allocator and NVML metrics of this node to Prometheus'
    fleet:'report what GPU memory cost a fleet: lost, stranded and idle GPU-hours'
    manifests:'write rules, dashboards, shell completion, and files for Kubernetes, systemd, …'
    mcp:'serve read-only tools for AI assistants over the Model Context Protocol'
    preflight:'run a training script on a phantom GPU and report whether it fits'
    release:'make running processes return unused memory to the driver'
    run:'run a command unchanged, and monitor each of its processes that uses CUDA'
    top:'show the GPUs and ranks of a node in the terminal, live'
    whatif:'replay a memory snapshot'"'"'s allocations under other allocator settings'
    why:'explain an OutOfMemoryError, a rank, a snapshot, an error message or a log'
  )
  _describe 'torchmem commands' _commands
}

_shtab_torchmem_manifests_commands() {
  local _commands=(
    alertmanager:'routing and templates'
    completion:'print the completion script of a shell'
    compose:'Docker Compose: exporter, Prometheus, Alertmanager and Grafana'
    dashboards:'write Grafana'"'"'s dashboards to files, or save them in a Grafana'
    grafana:'dashboards and their provisioning'
    helm:'the same as a Helm chart'
    image:'the exporter'"'"'s container image'
    kubernetes:'kustomizations: the exporter, rules, dashboards, example jobs'
    mixin:'rules and dashboards as a monitoring mixin, for jsonnet'
    prometheus:'scrape configuration and rules'
    rules:'write recording and alerting rules for Prometheus from your thresholds'
    scale:'several Prometheus servers and a store, for large fleets'
    slurm:'job scripts, a prolog and an epilog'
    stack:'the same as compose, from native binaries'
    systemd:'the exporter as a service, its user and its run directory'
  )
  _describe 'torchmem manifests commands' _commands
}

_shtab_torchmem_options=(
  "(- : *)"{-h,--help}"[show this help message and exit]"
  "(- : *)--version[show program\'s version number and exit]"
)

# guard to ensure default positional specs are added only once per session
_shtab_torchmem_defaults_added=0

_shtab_torchmem_capture_options=(
  "(- : *)"{-h,--help}"[show this help message and exit]"
  "--rank[global rank of the process]:N:"
  "--run[name of its run\; of several launches, the newest]:NAME:"
  "--launch[its launch, as in the label \`launch\`]:ID:"
  "--pid[its process id]:N:"
  "--seconds[recording time (default 20)]:S:"
  "--max-entries[newest entries to keep of each GPU (default 100,000)]:N:"
  "--out[output file (default rankN-TIME.pickle)]:FILE:_files"
  "--run-dir[run directory (default TORCHMEM_RUN_DIR)]:DIR:_files -/"
)

# guard to ensure default positional specs are added only once per session
_shtab_torchmem_capture_defaults_added=0

_shtab_torchmem_compare_options=(
  "(- : *)"{-h,--help}"[show this help message and exit]"
  "--max-peak-increase[how much the peak may grow before it is a regression (default 2\%)]:PERCENT:"
  "--json[print one JSON document]"
  "--markdown[write the comparison for the comment of a pull request]:FILE:_files"
  "--list[list the summaries of your runs (root\: of all users)]"
  "--run-dir[run directory (default TORCHMEM_RUN_DIR)]:DIR:_files -/"
  ":file or directory of the older run:"
  ":file or directory of the newer run:"
)

# guard to ensure default positional specs are added only once per session
_shtab_torchmem_compare_defaults_added=0

_shtab_torchmem_demo_options=(
  "(- : *)"{-h,--help}"[show this help message and exit]"
  "--scenario[scenario to run\; see --list]:NAME:(colocated fragmentation healthy-slack imbalanced-ranks leak neighbor phase-change retry-storm rl-phases variable-length)"
  "--list[describe the scenarios and exit]"
  "--ranks[number of ranks, each on a simulated GPU (default 4)]:N:"
  "--duration[length of the scenario (default 300)]:SECONDS:"
  "--loop[repeat the scenario until Ctrl-C]"
  "--seed[seed of the allocations (default 0)]:N:"
  "--listen[address of the exporter\; a free port is used instead of 0 or of one in use]:HOST:PORT:"
)

# guard to ensure default positional specs are added only once per session
_shtab_torchmem_demo_defaults_added=0

_shtab_torchmem_doctor_options=(
  "(- : *)"{-h,--help}"[show this help message and exit]"
  "--exporter[address of the exporter, also with USER\:PASSWORD\@ before the host (default http\:\/\/127.0.0.1\:9847)]:URL:"
  "--prometheus[address of Prometheus (default\: not checked)]:URL:"
  "--run-dir[run directory (default TORCHMEM_RUN_DIR)]:DIR:_files -/"
  "--json[print the checks as one line of JSON]"
)

# guard to ensure default positional specs are added only once per session
_shtab_torchmem_doctor_defaults_added=0

_shtab_torchmem_exporter_options=(
  "(- : *)"{-h,--help}"[show this help message and exit]"
  {--listen,--web.listen-address}"[address to serve on (default\: 127.0.0.1\:9847)]:HOST:PORT:"
  "--web.config.file[TLS and passwords, in the format of Prometheus exporters]:FILE.yml:_files"
  "--web.systemd-socket[serve on the socket that systemd passes]"
  {--web-ui,--no-web-ui}"[serve the live page at \/ (default\: yes)]"
  "*--web.allowed-host[another host name by which local browsers may open the page\; can be repeated]:NAME:"
  {--otlp,--no-otlp}"[also send the metrics by OTLP, as set by the variables OTEL_EXPORTER_OTLP_\*]"
  "--run-dir[run directory that the training processes write to]:DIR:_files -/"
  "--ttl-seconds[how long to keep the last values of a process that ended (default\: 900)]:N:"
  "--scrape-deadline-seconds[how long to wait for the driver (default\: 5)]:N:"
  {--pcie-throughput,--no-pcie-throughput}"[measure PCIe throughput, which takes 40 ms for each GPU and scrape]"
  {--all-series,--no-all-series}"[also export the series of ranks that no rule or panel reads, and finer histograms]"
  "--processes-per-gpu[maximum number of processes to export for each GPU (default\: 32)]:N:"
  "--container-logs[where the kubelet links the logs of containers\; no log is read (default\: \/var\/log\/containers)]:DIR:_files -/"
  "--kubelet-socket[the kubelet\'s pod-resources socket\; needs permission to connect and the extra \`kubernetes\`]:PATH:"
  "--scontrol[Slurm\'s scontrol, to ask once for each job which GPUs it was given]:PATH:"
  "*--gpu-hour-price[what an hour of a GPU costs, by a part of its name, such as H100\=2.50\; can be repeated, the longest part counts (default\: unknown)]:MODEL=PRICE:"
  "--currency[the currency of the prices (default\: USD)]:CODE:"
  "--config[settings in YAML\; flags override them]:FILE.yml:_files"
  "--thresholds[thresholds of \`torchmem manifests rules\`, by which ranks are judged (default TORCHMEM_THRESHOLDS, else the shipped)]:FILE.yml:_files"
  "--print-config[print the effective settings as YAML and exit]"
  "--once[print the metrics once on stdout and exit]"
)

# guard to ensure default positional specs are added only once per session
_shtab_torchmem_exporter_defaults_added=0

_shtab_torchmem_fleet_options=(
  "(- : *)"{-h,--help}"[show this help message and exit]"
  "--prometheus[the store, also with USER\:PASSWORD\@ before the host]:URL:"
  "--since[such as 12h, 7d or 4w (default\: 30d)]:TIME:"
  "--until[such as 2026-03-02T06\:00Z (default\: now)]:TIME:"
  "--match[only these series\: \'cluster\=\"a\"\']:MATCHERS:"
  "--token-file[token (default\: PROMETHEUS_TOKEN)]:FILE:_files"
  "*--header[a header of each request, such as X-Scope-OrgID\:ml]:NAME:VALUE:"
  "--timeout[how long one query may take (default\: 60)]:SECONDS:"
  "--rows[rows of a table at most (default\: 20)]:N:"
  "--json[print everything as JSON]"
  "--csv[print GPU-hours and costs by run and owner as CSV]"
  "--html[write a page (- for stdout)]:FILE:_files"
)

# guard to ensure default positional specs are added only once per session
_shtab_torchmem_fleet_defaults_added=0

_shtab_torchmem_manifests_options=(
  "(- : *)"{-h,--help}"[show this help message and exit]"
)

# guard to ensure default positional specs are added only once per session
_shtab_torchmem_manifests_defaults_added=0

_shtab_torchmem_manifests_alertmanager_options=(
  "(- : *)"{-h,--help}"[show this help message and exit]"
  "--out[the directory to write to]:DIR:_files -/"
  "--force[replace files that you changed]"
)

# guard to ensure default positional specs are added only once per session
_shtab_torchmem_manifests_alertmanager_defaults_added=0

_shtab_torchmem_manifests_completion_options=(
  "(- : *)"{-h,--help}"[show this help message and exit]"
  ":the shell:(bash zsh fish)"
)

# guard to ensure default positional specs are added only once per session
_shtab_torchmem_manifests_completion_defaults_added=0

_shtab_torchmem_manifests_compose_options=(
  "(- : *)"{-h,--help}"[show this help message and exit]"
  "--out[the directory to write to]:DIR:_files -/"
  "--force[replace files that you changed]"
)

# guard to ensure default positional specs are added only once per session
_shtab_torchmem_manifests_compose_defaults_added=0

_shtab_torchmem_manifests_dashboards_options=(
  "(- : *)"{-h,--help}"[show this help message and exit]"
  "--out[the directory to write to]:DIR:_files -/"
  "--grafana[the Grafana to save them in]:URL:"
  "--token-file[the token (default\: GRAFANA_TOKEN)]:FILE:_files"
  "--folder[the folder in Grafana, made if it is missing (default\: torchmem)]:TITLE:"
  "--datasource[name or UID of the Prometheus data source (default\: Grafana\'s default)]:NAME:"
  "--show[variables that are hidden unless your series have such a label\: cluster, namespace, team, user]:LABELS:"
  "--force[replace dashboards that you may have changed]"
)

# guard to ensure default positional specs are added only once per session
_shtab_torchmem_manifests_dashboards_defaults_added=0

_shtab_torchmem_manifests_grafana_options=(
  "(- : *)"{-h,--help}"[show this help message and exit]"
  "--out[the directory to write to]:DIR:_files -/"
  "--force[replace files that you changed]"
)

# guard to ensure default positional specs are added only once per session
_shtab_torchmem_manifests_grafana_defaults_added=0

_shtab_torchmem_manifests_helm_options=(
  "(- : *)"{-h,--help}"[show this help message and exit]"
  "--out[the directory to write to]:DIR:_files -/"
  "--force[replace files that you changed]"
)

# guard to ensure default positional specs are added only once per session
_shtab_torchmem_manifests_helm_defaults_added=0

_shtab_torchmem_manifests_image_options=(
  "(- : *)"{-h,--help}"[show this help message and exit]"
  "--out[the directory to write to]:DIR:_files -/"
  "--force[replace files that you changed]"
)

# guard to ensure default positional specs are added only once per session
_shtab_torchmem_manifests_image_defaults_added=0

_shtab_torchmem_manifests_kubernetes_options=(
  "(- : *)"{-h,--help}"[show this help message and exit]"
  "--out[the directory to write to]:DIR:_files -/"
  "--force[replace files that you changed]"
)

# guard to ensure default positional specs are added only once per session
_shtab_torchmem_manifests_kubernetes_defaults_added=0

_shtab_torchmem_manifests_mixin_options=(
  "(- : *)"{-h,--help}"[show this help message and exit]"
  "--out[the directory to write to]:DIR:_files -/"
  "--force[replace files that you changed]"
)

# guard to ensure default positional specs are added only once per session
_shtab_torchmem_manifests_mixin_defaults_added=0

_shtab_torchmem_manifests_prometheus_options=(
  "(- : *)"{-h,--help}"[show this help message and exit]"
  "--out[the directory to write to]:DIR:_files -/"
  "--force[replace files that you changed]"
)

# guard to ensure default positional specs are added only once per session
_shtab_torchmem_manifests_prometheus_defaults_added=0

_shtab_torchmem_manifests_rules_options=(
  "(- : *)"{-h,--help}"[show this help message and exit]"
  "--thresholds[the file of your thresholds (default TORCHMEM_THRESHOLDS, else the shipped)]:FILE:_files"
  "--out[the directory to write to, one file for each subject\; or one .yml file]:DIR|FILE:_files"
  "--check[write nothing\; fail if the rules there differ]:DIR|FILE:_files"
  "--defaults[print the shipped thresholds, as a template for your file]"
  "--prometheus-rule[the one .yml file is a PrometheusRule of this namespace, for the Prometheus Operator]:NAMESPACE:"
  "--force[replace files of the same names that this command did not write]"
)

# guard to ensure default positional specs are added only once per session
_shtab_torchmem_manifests_rules_defaults_added=0

_shtab_torchmem_manifests_scale_options=(
  "(- : *)"{-h,--help}"[show this help message and exit]"
  "--out[the directory to write to]:DIR:_files -/"
  "--force[replace files that you changed]"
)

# guard to ensure default positional specs are added only once per session
_shtab_torchmem_manifests_scale_defaults_added=0

_shtab_torchmem_manifests_slurm_options=(
  "(- : *)"{-h,--help}"[show this help message and exit]"
  "--out[the directory to write to]:DIR:_files -/"
  "--force[replace files that you changed]"
)

# guard to ensure default positional specs are added only once per session
_shtab_torchmem_manifests_slurm_defaults_added=0

_shtab_torchmem_manifests_stack_options=(
  "(- : *)"{-h,--help}"[show this help message and exit]"
  "--out[the directory to write to]:DIR:_files -/"
  "--force[replace files that you changed]"
)

# guard to ensure default positional specs are added only once per session
_shtab_torchmem_manifests_stack_defaults_added=0

_shtab_torchmem_manifests_systemd_options=(
  "(- : *)"{-h,--help}"[show this help message and exit]"
  "--out[the directory to write to]:DIR:_files -/"
  "--force[replace files that you changed]"
)

# guard to ensure default positional specs are added only once per session
_shtab_torchmem_manifests_systemd_defaults_added=0

_shtab_torchmem_mcp_options=(
  "(- : *)"{-h,--help}"[show this help message and exit]"
  "--exporter[ask this exporter for ranks, also with USER\:PASSWORD\@ before the host (default\: read the run directory)]:URL:"
  "--run-dir[run directory (default TORCHMEM_RUN_DIR)]:DIR:_files -/"
)

# guard to ensure default positional specs are added only once per session
_shtab_torchmem_mcp_defaults_added=0

_shtab_torchmem_preflight_options=(
  "(- : *)"{-h,--help}"[show this help message and exit]"
  "--gpu-model[a name from --list-gpu-models, or a size\: 24GB (10\^9), 22.5GiB (2\^30)]:MODEL:(v100-16gb v100-32gb t4-16gb a10-24gb a10g-24gb a40-48gb a100-40gb a100-80gb l4-24gb l40s-48gb h20-96gb h100-80gb h100-nvl-94gb h200-141gb b200-180gb b300-288gb rtx-3090 rtx-4090 rtx-5090 rtx-a6000 rtx-6000-ada rtx-pro-6000)"
  "--list-gpu-models[list the GPU models known by name, and exit]"
  "--gpus[number of GPUs visible to the script (default\: one, or one per local rank)]:N:"
  "--steps[stop after N optimizer steps (default 20)]:N:"
  "--alloc-conf[PYTORCH_CUDA_ALLOC_CONF for the script (default\: from the environment)]:CONF:"
  "--beside-gpu[run even if this machine has a real NVIDIA GPU]"
  "--world-size[run as one rank of N, with the environment that torchrun sets]:N:"
  "--rank[the rank to run (default 0)]:R:"
  "--local-world-size[ranks on each node (default 8, or the world size if that is smaller)]:N:"
  "--find-batch[find the largest value of a script option that fits, such as batch-size\=1..64 for --batch-size]:NAME=LO..HI:"
  "*--matrix[run each combination, such as --matrix batch\=8,16 gpu_model\=24GB,a100-40gb\; NAME is \{NAME\} in the command, gpu_model, alloc_conf, world_size, rank, an environment VARIABLE, or an option of the script]:NAME=VALUES:"
  "*--setting[compare this allocator setting instead of the default ones\; can be repeated]:CONF:"
  "--gpu-models[compare these GPU models instead of the next larger and smaller ones]:LIST:"
  "--snapshot[keep the trace, for memory_viz and torchmem whatif]:FILE:_files"
  "--json[print one JSON document\; the script\'s output goes to stderr]"
  "--save-baseline[write what is used to a JSON file to be reviewed like a lock file]:FILE:_files"
  "--baseline[compare with such a file, and fail with what changed if more is used]:FILE:_files"
  "--tolerance[growth of a peak that is accepted, such as 2\% (default\: 1\%)]:PERCENT:"
  "--markdown[write the comparison for the comment of a pull request]:FILE:_files"
  "(-)*::the command to run:_torchmem_command"
)

# guard to ensure default positional specs are added only once per session
_shtab_torchmem_preflight_defaults_added=0

_shtab_torchmem_release_options=(
  "(- : *)"{-h,--help}"[show this help message and exit]"
  "--gpu[processes on this GPU\: NVML\'s index, or the start of its UUID]:N:"
  "--run[all ranks of this run\'s newest launch]:NAME:"
  "--launch[all ranks of this launch, as in the label \`launch\`]:ID:"
  "--rank[only this global rank]:N:"
  "--pid[only this process]:N:"
  "--hooks[also call the script\'s pressure hooks for this much memory (default 0)]:GIB:"
  "--timeout[seconds to wait for the processes (default 60)]:S:"
  "--run-dir[run directory (default TORCHMEM_RUN_DIR)]:DIR:_files -/"
)

# guard to ensure default positional specs are added only once per session
_shtab_torchmem_release_defaults_added=0

_shtab_torchmem_run_options=(
  "(- : *)"{-h,--help}"[show this help message and exit]"
  "--name[name of the run (default\: the scheduler\'s or the script\'s)]:NAME:"
  "--run-dir[run directory (default TORCHMEM_RUN_DIR)]:DIR:_files -/"
  "--apply-advice[if an earlier attempt ran out of memory and an allocator setting cures that, add the setting\; say why if not]"
  "(-)*::the command, after --:_torchmem_command"
)

# guard to ensure default positional specs are added only once per session
_shtab_torchmem_run_defaults_added=0

_shtab_torchmem_top_options=(
  "(- : *)"{-h,--help}"[show this help message and exit]"
  "--exporter[address of the exporter, also with USER\:PASSWORD\@ before the host (default http\:\/\/127.0.0.1\:9847)]:URL:"
  "--once[print one screen and exit]"
  "--interval[time between updates (default 1)]:SECONDS:"
)

# guard to ensure default positional specs are added only once per session
_shtab_torchmem_top_defaults_added=0

_shtab_torchmem_whatif_options=(
  "(- : *)"{-h,--help}"[show this help message and exit]"
  "--gpu[only cuda\:N (default\: all that have a trace)]:N:"
  "--gpu-model[a name from \`torchmem preflight --list-gpu-models\`, or a size\: 24GB (10\^9), 22.5GiB (2\^30) (default\: from an OOM in the trace, otherwise unlimited)]:MODEL:(v100-16gb v100-32gb t4-16gb a10-24gb a10g-24gb a40-48gb a100-40gb a100-80gb l4-24gb l40s-48gb h20-96gb h100-80gb h100-nvl-94gb h200-141gb b200-180gb b300-288gb rtx-3090 rtx-4090 rtx-5090 rtx-a6000 rtx-6000-ada rtx-pro-6000)"
  "*--setting[try this instead of the usual settings, such as \'max_split_size_mb\:256\'\; repeatable]:CONF:"
  "--json[print one line of JSON per device]"
  "(*):a file of torch.cuda.memory._dump_snapshot or \`torchmem capture\`:_files"
)

# guard to ensure default positional specs are added only once per session
_shtab_torchmem_whatif_defaults_added=0

_shtab_torchmem_why_options=(
  "(- : *)"{-h,--help}"[show this help message and exit]"
  "--list[list all of your OOM reports (root\: of all users)]"
  "--json[print JSON, for a snapshot one line per GPU]"
  "--html[write a page (- for stdout)]:FILE:_files"
  "--run-dir[run directory (default TORCHMEM_RUN_DIR)]:DIR:_files -/"
  "--exporter[ask this exporter instead, also on another machine\; USER\:PASSWORD\@ before the host]:URL:"
  "--rank[global rank of the process]:N:"
  "--run[name of its run\; of several launches, the newest]:NAME:"
  "--launch[its launch, as in the label \`launch\`]:ID:"
  "--pid[its process id]:N:"
  "--thresholds[your thresholds of \`torchmem manifests rules\` (default TORCHMEM_THRESHOLDS, else the shipped)]:FILE:_files"
  "--at[the moment to look at (default\: the OutOfMemoryError if there is one, else the end)]:at:(end peak oom)"
  "--leaks[show lines that allocate throughout the recording and never free]"
  "--gpu[only cuda\:N (default\: all)]:N:"
  "--top[rows of each table (default 12)]:N:"
  "(*)::an OOM report, a memory snapshot, the summary or sample of a run, or any text, such as an error message or logs (- for stdin):_files"
)

# guard to ensure default positional specs are added only once per session
_shtab_torchmem_why_defaults_added=0


_shtab_torchmem() {
  local context state line curcontext="$curcontext" one_or_more='(*)' remainder='(-)*:' default='*::: :->torchmem'

  # Add default positional/remainder specs only if none exist, and only once per session
  if (( ! _shtab_torchmem_defaults_added )); then
    if (( ${_shtab_torchmem_options[(I)${(q)one_or_more}*]} +          ${_shtab_torchmem_options[(I)${(q)remainder}*]} +          ${_shtab_torchmem_options[(I)${(q)default}]} == 0 )); then
      _shtab_torchmem_options+=(': :_shtab_torchmem_commands' '*::: :->torchmem')
    fi
    _shtab_torchmem_defaults_added=1
  fi
  _arguments -C -s $_shtab_torchmem_options

  case $state in
    torchmem)
      words=($line[1] "${words[@]}")
      (( CURRENT += 1 ))
      curcontext="${curcontext%:*:*}:_shtab_torchmem-$line[1]:"
      case $line[1] in
        capture) _arguments -C -s $_shtab_torchmem_capture_options ;;
        compare) _arguments -C -s $_shtab_torchmem_compare_options ;;
        demo) _arguments -C -s $_shtab_torchmem_demo_options ;;
        doctor) _arguments -C -s $_shtab_torchmem_doctor_options ;;
        exporter) _arguments -C -s $_shtab_torchmem_exporter_options ;;
        fleet) _arguments -C -s $_shtab_torchmem_fleet_options ;;
        manifests) _shtab_torchmem_manifests ;;
        mcp) _arguments -C -s $_shtab_torchmem_mcp_options ;;
        preflight) _arguments -C -s $_shtab_torchmem_preflight_options ;;
        release) _arguments -C -s $_shtab_torchmem_release_options ;;
        run) _arguments -C -s $_shtab_torchmem_run_options ;;
        top) _arguments -C -s $_shtab_torchmem_top_options ;;
        whatif) _arguments -C -s $_shtab_torchmem_whatif_options ;;
        why) _arguments -C -s $_shtab_torchmem_why_options ;;
      esac
  esac
}

_shtab_torchmem_manifests() {
  local context state line curcontext="$curcontext" one_or_more='(*)' remainder='(-)*:' default='*::: :->manifests'

  # Add default positional/remainder specs only if none exist, and only once per session
  if (( ! _shtab_torchmem_manifests_defaults_added )); then
    if (( ${_shtab_torchmem_manifests_options[(I)${(q)one_or_more}*]} +          ${_shtab_torchmem_manifests_options[(I)${(q)remainder}*]} +          ${_shtab_torchmem_manifests_options[(I)${(q)default}]} == 0 )); then
      _shtab_torchmem_manifests_options+=(': :_shtab_torchmem_manifests_commands' '*::: :->manifests')
    fi
    _shtab_torchmem_manifests_defaults_added=1
  fi
  _arguments -C -s $_shtab_torchmem_manifests_options

  case $state in
    manifests)
      words=($line[1] "${words[@]}")
      (( CURRENT += 1 ))
      curcontext="${curcontext%:*:*}:_shtab_torchmem_manifests-$line[1]:"
      case $line[1] in
        alertmanager) _arguments -C -s $_shtab_torchmem_manifests_alertmanager_options ;;
        completion) _arguments -C -s $_shtab_torchmem_manifests_completion_options ;;
        compose) _arguments -C -s $_shtab_torchmem_manifests_compose_options ;;
        dashboards) _arguments -C -s $_shtab_torchmem_manifests_dashboards_options ;;
        grafana) _arguments -C -s $_shtab_torchmem_manifests_grafana_options ;;
        helm) _arguments -C -s $_shtab_torchmem_manifests_helm_options ;;
        image) _arguments -C -s $_shtab_torchmem_manifests_image_options ;;
        kubernetes) _arguments -C -s $_shtab_torchmem_manifests_kubernetes_options ;;
        mixin) _arguments -C -s $_shtab_torchmem_manifests_mixin_options ;;
        prometheus) _arguments -C -s $_shtab_torchmem_manifests_prometheus_options ;;
        rules) _arguments -C -s $_shtab_torchmem_manifests_rules_options ;;
        scale) _arguments -C -s $_shtab_torchmem_manifests_scale_options ;;
        slurm) _arguments -C -s $_shtab_torchmem_manifests_slurm_options ;;
        stack) _arguments -C -s $_shtab_torchmem_manifests_stack_options ;;
        systemd) _arguments -C -s $_shtab_torchmem_manifests_systemd_options ;;
      esac
  esac
}

# Custom Preamble
_torchmem_command() {
  local separator=${words[(ie)--]}
  (( separator < CURRENT )) || return 1
  shift $separator words
  (( CURRENT -= separator ))
  _normal
}

# End Custom Preamble


typeset -A opt_args

if [[ $zsh_eval_context[-1] == eval ]]; then
  # eval/source/. command, register function for later
  compdef _shtab_torchmem -N torchmem
else
  # autoload from fpath, call function directly
  _shtab_torchmem "$@"
fi
