# Completion of torchmem for fish; installed as `torchmem manifests completion --help` says.
# Rendered by deploy/completion.py with shtab: do not edit.

# Custom Preamble
function __torchmem_command
  set -l words (commandline -opc)
  set -l separator (contains -i -- -- $words)
  or return
  set -e words[1..$separator]
  complete -C (string join ' ' -- (string escape -- $words) (commandline -ct))
end

# End Custom Preamble

# Parse current commandline:
# - _shtab_torchmem_cmdpath=(sub)command path seen so far
# - _shtab_torchmem_npos=number of positional arguments given after it
# - options are skipped based on _shtab_torchmem_opts_with_value & _shtab_torchmem_commands lists
function _shtab_torchmem_scan
  set -g _shtab_torchmem_cmdpath ''
  set -g _shtab_torchmem_npos 0
  set -l tokens (commandline -opc)
  set -e tokens[1]
  set -l expect_value 0
  for t in $tokens
    if test $expect_value -eq 1
      set expect_value 0
      continue
    end
    switch "$t"
      case '--*=*'
        continue
      case '-*'
        if contains -- $t $_shtab_torchmem_opts_with_value
          set expect_value 1
        end
        continue
      case '*'
        if test $_shtab_torchmem_npos -eq 0
          set -l candidate $t
          if test -n "$_shtab_torchmem_cmdpath"
            set candidate "$_shtab_torchmem_cmdpath $t"
          end
          if contains -- $candidate $_shtab_torchmem_commands
            set -g _shtab_torchmem_cmdpath $candidate
            continue
          end
        end
        set -g _shtab_torchmem_npos (math $_shtab_torchmem_npos + 1)
    end
  end
end

# Condition helper: true if the current (sub)command path equals the given one.
function _shtab_torchmem_using
  _shtab_torchmem_scan
  test "$_shtab_torchmem_cmdpath" = "$argv"
end

set -g _shtab_torchmem_commands exporter run demo top why release capture whatif compare preflight mcp doctor fleet manifests 'manifests systemd' 'manifests kubernetes' 'manifests helm' 'manifests mixin' 'manifests slurm' 'manifests prometheus' 'manifests scale' 'manifests alertmanager' 'manifests grafana' 'manifests compose' 'manifests image' 'manifests stack' 'manifests rules' 'manifests dashboards' 'manifests completion'
set -g _shtab_torchmem_opts_with_value --alloc-conf --at --baseline --check --config --container-logs --currency --datasource --duration --exporter --find-batch --folder --gpu --gpu-hour-price --gpu-model --gpu-models --gpus --grafana --header --hooks --html --interval --kubelet-socket --launch --listen --local-world-size --markdown --match --matrix --max-entries --max-peak-increase --name --out --pid --processes-per-gpu --prometheus --prometheus-rule --rank --ranks --rows --run --run-dir --save-baseline --scenario --scontrol --scrape-deadline-seconds --seconds --seed --setting --show --since --snapshot --steps --thresholds --timeout --token-file --tolerance --top --ttl-seconds --until --web.allowed-host --web.config.file --web.listen-address --world-size

complete -c torchmem -e
complete -c torchmem -f

complete -c torchmem -n _shtab_torchmem_using -s h -l help -d 'show this help message and exit'
complete -c torchmem -n _shtab_torchmem_using -l version -d 'show program'"'"'s version number and exit'
complete -c torchmem -n '_shtab_torchmem_using; and test $_shtab_torchmem_npos -eq 0' -a exporter -d 'serve allocator and NVML metrics of this node to Prometheus'
complete -c torchmem -n '_shtab_torchmem_using exporter' -s h -l help -d 'show this help message and exit'
complete -c torchmem -n '_shtab_torchmem_using exporter' -l listen -l web.listen-address -x -d 'address to serve on (default: 127.0.0.1:9847)'
complete -c torchmem -n '_shtab_torchmem_using exporter' -l web.config.file -xka "(__fish_complete_path (commandline -ct))" -d 'TLS and passwords, in the format of Prometheus exporters'
complete -c torchmem -n '_shtab_torchmem_using exporter' -l web.systemd-socket -d 'serve on the socket that systemd passes'
complete -c torchmem -n '_shtab_torchmem_using exporter' -l web-ui -l no-web-ui -d 'serve the live page at / (default: yes)'
complete -c torchmem -n '_shtab_torchmem_using exporter' -l web.allowed-host -x -d 'another host name by which local browsers may open the page; can be repeated'
complete -c torchmem -n '_shtab_torchmem_using exporter' -l otlp -l no-otlp -d 'also send the metrics by OTLP, as set by the variables OTEL_EXPORTER_OTLP_*'
complete -c torchmem -n '_shtab_torchmem_using exporter' -l run-dir -xka "(__fish_complete_directories)" -d 'run directory that the training processes write to'
complete -c torchmem -n '_shtab_torchmem_using exporter' -l ttl-seconds -x -d 'how long to keep the last values of a process that ended (default: 900)'
complete -c torchmem -n '_shtab_torchmem_using exporter' -l scrape-deadline-seconds -x -d 'how long to wait for the driver (default: 5)'
complete -c torchmem -n '_shtab_torchmem_using exporter' -l pcie-throughput -l no-pcie-throughput -d 'measure PCIe throughput, which takes 40 ms for each GPU and scrape'
complete -c torchmem -n '_shtab_torchmem_using exporter' -l all-series -l no-all-series -d 'also export the series of ranks that no rule or panel reads, and finer histograms'
complete -c torchmem -n '_shtab_torchmem_using exporter' -l processes-per-gpu -x -d 'maximum number of processes to export for each GPU (default: 32)'
complete -c torchmem -n '_shtab_torchmem_using exporter' -l container-logs -xka "(__fish_complete_directories)" -d 'where the kubelet links the logs of containers; no log is read (default: /var/log/containers)'
complete -c torchmem -n '_shtab_torchmem_using exporter' -l kubelet-socket -x -d 'the kubelet'"'"'s pod-resources socket; needs permission to connect and the extra `kubernetes`'
complete -c torchmem -n '_shtab_torchmem_using exporter' -l scontrol -x -d 'Slurm'"'"'s scontrol, to ask once for each job which GPUs it was given'
complete -c torchmem -n '_shtab_torchmem_using exporter' -l gpu-hour-price -x -d 'what an hour of a GPU costs, by a part of its name, such as H100=2.50; can be repeated, the longest part counts (default: unknown)'
complete -c torchmem -n '_shtab_torchmem_using exporter' -l currency -x -d 'the currency of the prices (default: USD)'
complete -c torchmem -n '_shtab_torchmem_using exporter' -l config -xka "(__fish_complete_path (commandline -ct))" -d 'settings in YAML; flags override them'
complete -c torchmem -n '_shtab_torchmem_using exporter' -l thresholds -xka "(__fish_complete_path (commandline -ct))" -d 'thresholds of `torchmem manifests rules`, by which ranks are judged (default TORCHMEM_THRESHOLDS, else the shipped)'
complete -c torchmem -n '_shtab_torchmem_using exporter' -l print-config -d 'print the effective settings as YAML and exit'
complete -c torchmem -n '_shtab_torchmem_using exporter' -l once -d 'print the metrics once on stdout and exit'
complete -c torchmem -n '_shtab_torchmem_using; and test $_shtab_torchmem_npos -eq 0' -a run -d 'run a command unchanged, and monitor each of its processes that uses CUDA'
complete -c torchmem -n '_shtab_torchmem_using run' -s h -l help -d 'show this help message and exit'
complete -c torchmem -n '_shtab_torchmem_using run' -l name -x -d 'name of the run (default: the scheduler'"'"'s or the script'"'"'s)'
complete -c torchmem -n '_shtab_torchmem_using run' -l run-dir -xka "(__fish_complete_directories)" -d 'run directory (default TORCHMEM_RUN_DIR)'
complete -c torchmem -n '_shtab_torchmem_using run' -l apply-advice -d 'if an earlier attempt ran out of memory and an allocator setting cures that, add the setting; say why if not'
complete -c torchmem -n '_shtab_torchmem_using run; and test $_shtab_torchmem_npos -ge 0' -ka "(__torchmem_command)" -d 'the command, after --'
complete -c torchmem -n '_shtab_torchmem_using; and test $_shtab_torchmem_npos -eq 0' -a demo -d 'run a simulated training job and show the memory of its ranks; needs no GPU'
complete -c torchmem -n '_shtab_torchmem_using demo' -s h -l help -d 'show this help message and exit'
complete -c torchmem -n '_shtab_torchmem_using demo' -l scenario -xka "colocated fragmentation healthy-slack imbalanced-ranks leak neighbor phase-change retry-storm rl-phases variable-length" -d 'scenario to run; see --list'
complete -c torchmem -n '_shtab_torchmem_using demo' -l list -d 'describe the scenarios and exit'
complete -c torchmem -n '_shtab_torchmem_using demo' -l ranks -x -d 'number of ranks, each on a simulated GPU (default 4)'
complete -c torchmem -n '_shtab_torchmem_using demo' -l duration -x -d 'length of the scenario (default 300)'
complete -c torchmem -n '_shtab_torchmem_using demo' -l loop -d 'repeat the scenario until Ctrl-C'
complete -c torchmem -n '_shtab_torchmem_using demo' -l seed -x -d 'seed of the allocations (default 0)'
complete -c torchmem -n '_shtab_torchmem_using demo' -l listen -x -d 'address of the exporter; a free port is used instead of 0 or of one in use'
complete -c torchmem -n '_shtab_torchmem_using; and test $_shtab_torchmem_npos -eq 0' -a top -d 'show the GPUs and ranks of a node in the terminal, live'
complete -c torchmem -n '_shtab_torchmem_using top' -s h -l help -d 'show this help message and exit'
complete -c torchmem -n '_shtab_torchmem_using top' -l exporter -x -d 'address of the exporter, also with USER:PASSWORD@ before the host (default http://127.0.0.1:9847)'
complete -c torchmem -n '_shtab_torchmem_using top' -l once -d 'print one screen and exit'
complete -c torchmem -n '_shtab_torchmem_using top' -l interval -x -d 'time between updates (default 1)'
complete -c torchmem -n '_shtab_torchmem_using; and test $_shtab_torchmem_npos -eq 0' -a why -d 'explain an OutOfMemoryError, a rank, a snapshot, an error message or a log'
complete -c torchmem -n '_shtab_torchmem_using why' -s h -l help -d 'show this help message and exit'
complete -c torchmem -n '_shtab_torchmem_using why' -l list -d 'list all of your OOM reports (root: of all users)'
complete -c torchmem -n '_shtab_torchmem_using why' -l json -d 'print JSON, for a snapshot one line per GPU'
complete -c torchmem -n '_shtab_torchmem_using why' -l html -xka "(__fish_complete_path (commandline -ct))" -d 'write a page (- for stdout)'
complete -c torchmem -n '_shtab_torchmem_using why' -l run-dir -xka "(__fish_complete_directories)" -d 'run directory (default TORCHMEM_RUN_DIR)'
complete -c torchmem -n '_shtab_torchmem_using why' -l exporter -x -d 'ask this exporter instead, also on another machine; USER:PASSWORD@ before the host'
complete -c torchmem -n '_shtab_torchmem_using why' -l rank -x -d 'global rank of the process'
complete -c torchmem -n '_shtab_torchmem_using why' -l run -x -d 'name of its run; of several launches, the newest'
complete -c torchmem -n '_shtab_torchmem_using why' -l launch -x -d 'its launch, as in the label `launch`'
complete -c torchmem -n '_shtab_torchmem_using why' -l pid -x -d 'its process id'
complete -c torchmem -n '_shtab_torchmem_using why' -l thresholds -xka "(__fish_complete_path (commandline -ct))" -d 'your thresholds of `torchmem manifests rules` (default TORCHMEM_THRESHOLDS, else the shipped)'
complete -c torchmem -n '_shtab_torchmem_using why' -l at -xka "end peak oom" -d 'the moment to look at (default: the OutOfMemoryError if there is one, else the end)'
complete -c torchmem -n '_shtab_torchmem_using why' -l leaks -d 'show lines that allocate throughout the recording and never free'
complete -c torchmem -n '_shtab_torchmem_using why' -l gpu -x -d 'only cuda:N (default: all)'
complete -c torchmem -n '_shtab_torchmem_using why' -l top -x -d 'rows of each table (default 12)'
complete -c torchmem -n '_shtab_torchmem_using why; and test $_shtab_torchmem_npos -ge 0' -ka "(__fish_complete_path (commandline -ct))" -d 'an OOM report, a memory snapshot, the summary or sample of a run, or any text, such as an error message or logs (- for stdin)'
complete -c torchmem -n '_shtab_torchmem_using; and test $_shtab_torchmem_npos -eq 0' -a release -d 'make running processes return unused memory to the driver'
complete -c torchmem -n '_shtab_torchmem_using release' -s h -l help -d 'show this help message and exit'
complete -c torchmem -n '_shtab_torchmem_using release' -l gpu -x -d 'processes on this GPU: NVML'"'"'s index, or the start of its UUID'
complete -c torchmem -n '_shtab_torchmem_using release' -l run -x -d 'all ranks of this run'"'"'s newest launch'
complete -c torchmem -n '_shtab_torchmem_using release' -l launch -x -d 'all ranks of this launch, as in the label `launch`'
complete -c torchmem -n '_shtab_torchmem_using release' -l rank -x -d 'only this global rank'
complete -c torchmem -n '_shtab_torchmem_using release' -l pid -x -d 'only this process'
complete -c torchmem -n '_shtab_torchmem_using release' -l hooks -x -d 'also call the script'"'"'s pressure hooks for this much memory (default 0)'
complete -c torchmem -n '_shtab_torchmem_using release' -l timeout -x -d 'seconds to wait for the processes (default 60)'
complete -c torchmem -n '_shtab_torchmem_using release' -l run-dir -xka "(__fish_complete_directories)" -d 'run directory (default TORCHMEM_RUN_DIR)'
complete -c torchmem -n '_shtab_torchmem_using; and test $_shtab_torchmem_npos -eq 0' -a capture -d 'record the memory history of a running process and save the snapshot'
complete -c torchmem -n '_shtab_torchmem_using capture' -s h -l help -d 'show this help message and exit'
complete -c torchmem -n '_shtab_torchmem_using capture' -l rank -x -d 'global rank of the process'
complete -c torchmem -n '_shtab_torchmem_using capture' -l run -x -d 'name of its run; of several launches, the newest'
complete -c torchmem -n '_shtab_torchmem_using capture' -l launch -x -d 'its launch, as in the label `launch`'
complete -c torchmem -n '_shtab_torchmem_using capture' -l pid -x -d 'its process id'
complete -c torchmem -n '_shtab_torchmem_using capture' -l seconds -x -d 'recording time (default 20)'
complete -c torchmem -n '_shtab_torchmem_using capture' -l max-entries -x -d 'newest entries to keep of each GPU (default 100,000)'
complete -c torchmem -n '_shtab_torchmem_using capture' -l out -xka "(__fish_complete_path (commandline -ct))" -d 'output file (default rankN-TIME.pickle)'
complete -c torchmem -n '_shtab_torchmem_using capture' -l run-dir -xka "(__fish_complete_directories)" -d 'run directory (default TORCHMEM_RUN_DIR)'
complete -c torchmem -n '_shtab_torchmem_using; and test $_shtab_torchmem_npos -eq 0' -a whatif -d 'replay a memory snapshot'"'"'s allocations under other allocator settings'
complete -c torchmem -n '_shtab_torchmem_using whatif' -s h -l help -d 'show this help message and exit'
complete -c torchmem -n '_shtab_torchmem_using whatif' -l gpu -x -d 'only cuda:N (default: all that have a trace)'
complete -c torchmem -n '_shtab_torchmem_using whatif' -l gpu-model -xka "v100-16gb v100-32gb t4-16gb a10-24gb a10g-24gb a40-48gb a100-40gb a100-80gb l4-24gb l40s-48gb h20-96gb h100-80gb h100-nvl-94gb h200-141gb b200-180gb b300-288gb rtx-3090 rtx-4090 rtx-5090 rtx-a6000 rtx-6000-ada rtx-pro-6000" -d 'a name from `torchmem preflight --list-gpu-models`, or a size: 24GB (10^9), 22.5GiB (2^30) (default: from an OOM in the trace, otherwise unlimited)'
complete -c torchmem -n '_shtab_torchmem_using whatif' -l setting -x -d 'try this instead of the usual settings, such as '"'"'max_split_size_mb:256'"'"'; repeatable'
complete -c torchmem -n '_shtab_torchmem_using whatif' -l json -d 'print one line of JSON per device'
complete -c torchmem -n '_shtab_torchmem_using whatif; and test $_shtab_torchmem_npos -ge 0' -ka "(__fish_complete_path (commandline -ct))" -d 'a file of torch.cuda.memory._dump_snapshot or `torchmem capture`'
complete -c torchmem -n '_shtab_torchmem_using; and test $_shtab_torchmem_npos -eq 0' -a compare -d 'say what changed between two runs, and whether it is a regression'
complete -c torchmem -n '_shtab_torchmem_using compare' -s h -l help -d 'show this help message and exit'
complete -c torchmem -n '_shtab_torchmem_using compare' -l max-peak-increase -x -d 'how much the peak may grow before it is a regression (default 2%)'
complete -c torchmem -n '_shtab_torchmem_using compare' -l json -d 'print one JSON document'
complete -c torchmem -n '_shtab_torchmem_using compare' -l markdown -xka "(__fish_complete_path (commandline -ct))" -d 'write the comparison for the comment of a pull request'
complete -c torchmem -n '_shtab_torchmem_using compare' -l list -d 'list the summaries of your runs (root: of all users)'
complete -c torchmem -n '_shtab_torchmem_using compare' -l run-dir -xka "(__fish_complete_directories)" -d 'run directory (default TORCHMEM_RUN_DIR)'
complete -c torchmem -n '_shtab_torchmem_using; and test $_shtab_torchmem_npos -eq 0' -a preflight -d 'run a training script on a phantom GPU and report whether it fits'
complete -c torchmem -n '_shtab_torchmem_using preflight' -s h -l help -d 'show this help message and exit'
complete -c torchmem -n '_shtab_torchmem_using preflight' -l gpu-model -xka "v100-16gb v100-32gb t4-16gb a10-24gb a10g-24gb a40-48gb a100-40gb a100-80gb l4-24gb l40s-48gb h20-96gb h100-80gb h100-nvl-94gb h200-141gb b200-180gb b300-288gb rtx-3090 rtx-4090 rtx-5090 rtx-a6000 rtx-6000-ada rtx-pro-6000" -d 'a name from --list-gpu-models, or a size: 24GB (10^9), 22.5GiB (2^30)'
complete -c torchmem -n '_shtab_torchmem_using preflight' -l list-gpu-models -d 'list the GPU models known by name, and exit'
complete -c torchmem -n '_shtab_torchmem_using preflight' -l gpus -x -d 'number of GPUs visible to the script (default: one, or one per local rank)'
complete -c torchmem -n '_shtab_torchmem_using preflight' -l steps -x -d 'stop after N optimizer steps (default 20)'
complete -c torchmem -n '_shtab_torchmem_using preflight' -l alloc-conf -x -d 'PYTORCH_CUDA_ALLOC_CONF for the script (default: from the environment)'
complete -c torchmem -n '_shtab_torchmem_using preflight' -l beside-gpu -d 'run even if this machine has a real NVIDIA GPU'
complete -c torchmem -n '_shtab_torchmem_using preflight' -l world-size -x -d 'run as one rank of N, with the environment that torchrun sets'
complete -c torchmem -n '_shtab_torchmem_using preflight' -l rank -x -d 'the rank to run (default 0)'
complete -c torchmem -n '_shtab_torchmem_using preflight' -l local-world-size -x -d 'ranks on each node (default 8, or the world size if that is smaller)'
complete -c torchmem -n '_shtab_torchmem_using preflight' -l find-batch -x -d 'find the largest value of a script option that fits, such as batch-size=1..64 for --batch-size'
complete -c torchmem -n '_shtab_torchmem_using preflight' -l matrix -x -d 'run each combination, such as --matrix batch=8,16 gpu_model=24GB,a100-40gb; NAME is {NAME} in the command, gpu_model, alloc_conf, world_size, rank, an environment VARIABLE, or an option of the script'
complete -c torchmem -n '_shtab_torchmem_using preflight' -l setting -x -d 'compare this allocator setting instead of the default ones; can be repeated'
complete -c torchmem -n '_shtab_torchmem_using preflight' -l gpu-models -x -d 'compare these GPU models instead of the next larger and smaller ones'
complete -c torchmem -n '_shtab_torchmem_using preflight' -l snapshot -xka "(__fish_complete_path (commandline -ct))" -d 'keep the trace, for memory_viz and torchmem whatif'
complete -c torchmem -n '_shtab_torchmem_using preflight' -l json -d 'print one JSON document; the script'"'"'s output goes to stderr'
complete -c torchmem -n '_shtab_torchmem_using preflight' -l save-baseline -xka "(__fish_complete_path (commandline -ct))" -d 'write what is used to a JSON file to be reviewed like a lock file'
complete -c torchmem -n '_shtab_torchmem_using preflight' -l baseline -xka "(__fish_complete_path (commandline -ct))" -d 'compare with such a file, and fail with what changed if more is used'
complete -c torchmem -n '_shtab_torchmem_using preflight' -l tolerance -x -d 'growth of a peak that is accepted, such as 2% (default: 1%)'
complete -c torchmem -n '_shtab_torchmem_using preflight' -l markdown -xka "(__fish_complete_path (commandline -ct))" -d 'write the comparison for the comment of a pull request'
complete -c torchmem -n '_shtab_torchmem_using preflight; and test $_shtab_torchmem_npos -ge 0' -ka "(__torchmem_command)" -d 'the command to run'
complete -c torchmem -n '_shtab_torchmem_using; and test $_shtab_torchmem_npos -eq 0' -a mcp -d 'serve read-only tools for AI assistants over the Model Context Protocol'
complete -c torchmem -n '_shtab_torchmem_using mcp' -s h -l help -d 'show this help message and exit'
complete -c torchmem -n '_shtab_torchmem_using mcp' -l exporter -x -d 'ask this exporter for ranks, also with USER:PASSWORD@ before the host (default: read the run directory)'
complete -c torchmem -n '_shtab_torchmem_using mcp' -l run-dir -xka "(__fish_complete_directories)" -d 'run directory (default TORCHMEM_RUN_DIR)'
complete -c torchmem -n '_shtab_torchmem_using; and test $_shtab_torchmem_npos -eq 0' -a doctor -d 'check everything between a training process and Prometheus, and say what to fix'
complete -c torchmem -n '_shtab_torchmem_using doctor' -s h -l help -d 'show this help message and exit'
complete -c torchmem -n '_shtab_torchmem_using doctor' -l exporter -x -d 'address of the exporter, also with USER:PASSWORD@ before the host (default http://127.0.0.1:9847)'
complete -c torchmem -n '_shtab_torchmem_using doctor' -l prometheus -x -d 'address of Prometheus (default: not checked)'
complete -c torchmem -n '_shtab_torchmem_using doctor' -l run-dir -xka "(__fish_complete_directories)" -d 'run directory (default TORCHMEM_RUN_DIR)'
complete -c torchmem -n '_shtab_torchmem_using doctor' -l json -d 'print the checks as one line of JSON'
complete -c torchmem -n '_shtab_torchmem_using; and test $_shtab_torchmem_npos -eq 0' -a fleet -d 'report what GPU memory cost a fleet: lost, stranded and idle GPU-hours'
complete -c torchmem -n '_shtab_torchmem_using fleet' -s h -l help -d 'show this help message and exit'
complete -c torchmem -n '_shtab_torchmem_using fleet' -l prometheus -x -d 'the store, also with USER:PASSWORD@ before the host'
complete -c torchmem -n '_shtab_torchmem_using fleet' -l since -x -d 'such as 12h, 7d or 4w (default: 30d)'
complete -c torchmem -n '_shtab_torchmem_using fleet' -l until -x -d 'such as 2026-03-02T06:00Z (default: now)'
complete -c torchmem -n '_shtab_torchmem_using fleet' -l match -x -d 'only these series: '"'"'cluster="a"'"'"''
complete -c torchmem -n '_shtab_torchmem_using fleet' -l token-file -xka "(__fish_complete_path (commandline -ct))" -d 'token (default: PROMETHEUS_TOKEN)'
complete -c torchmem -n '_shtab_torchmem_using fleet' -l header -x -d 'a header of each request, such as X-Scope-OrgID:ml'
complete -c torchmem -n '_shtab_torchmem_using fleet' -l timeout -x -d 'how long one query may take (default: 60)'
complete -c torchmem -n '_shtab_torchmem_using fleet' -l rows -x -d 'rows of a table at most (default: 20)'
complete -c torchmem -n '_shtab_torchmem_using fleet' -l json -d 'print everything as JSON'
complete -c torchmem -n '_shtab_torchmem_using fleet' -l csv -d 'print GPU-hours and costs by run and owner as CSV'
complete -c torchmem -n '_shtab_torchmem_using fleet' -l html -xka "(__fish_complete_path (commandline -ct))" -d 'write a page (- for stdout)'
complete -c torchmem -n '_shtab_torchmem_using; and test $_shtab_torchmem_npos -eq 0' -a manifests -d 'write rules, dashboards, shell completion, and files for Kubernetes, systemd, …'
complete -c torchmem -n '_shtab_torchmem_using manifests' -s h -l help -d 'show this help message and exit'
complete -c torchmem -n '_shtab_torchmem_using manifests; and test $_shtab_torchmem_npos -eq 0' -a systemd -d 'the exporter as a service, its user and its run directory'
complete -c torchmem -n '_shtab_torchmem_using manifests systemd' -s h -l help -d 'show this help message and exit'
complete -c torchmem -n '_shtab_torchmem_using manifests systemd' -l out -xka "(__fish_complete_directories)" -d 'the directory to write to'
complete -c torchmem -n '_shtab_torchmem_using manifests systemd' -l force -d 'replace files that you changed'
complete -c torchmem -n '_shtab_torchmem_using manifests; and test $_shtab_torchmem_npos -eq 0' -a kubernetes -d 'kustomizations: the exporter, rules, dashboards, example jobs'
complete -c torchmem -n '_shtab_torchmem_using manifests kubernetes' -s h -l help -d 'show this help message and exit'
complete -c torchmem -n '_shtab_torchmem_using manifests kubernetes' -l out -xka "(__fish_complete_directories)" -d 'the directory to write to'
complete -c torchmem -n '_shtab_torchmem_using manifests kubernetes' -l force -d 'replace files that you changed'
complete -c torchmem -n '_shtab_torchmem_using manifests; and test $_shtab_torchmem_npos -eq 0' -a helm -d 'the same as a Helm chart'
complete -c torchmem -n '_shtab_torchmem_using manifests helm' -s h -l help -d 'show this help message and exit'
complete -c torchmem -n '_shtab_torchmem_using manifests helm' -l out -xka "(__fish_complete_directories)" -d 'the directory to write to'
complete -c torchmem -n '_shtab_torchmem_using manifests helm' -l force -d 'replace files that you changed'
complete -c torchmem -n '_shtab_torchmem_using manifests; and test $_shtab_torchmem_npos -eq 0' -a mixin -d 'rules and dashboards as a monitoring mixin, for jsonnet'
complete -c torchmem -n '_shtab_torchmem_using manifests mixin' -s h -l help -d 'show this help message and exit'
complete -c torchmem -n '_shtab_torchmem_using manifests mixin' -l out -xka "(__fish_complete_directories)" -d 'the directory to write to'
complete -c torchmem -n '_shtab_torchmem_using manifests mixin' -l force -d 'replace files that you changed'
complete -c torchmem -n '_shtab_torchmem_using manifests; and test $_shtab_torchmem_npos -eq 0' -a slurm -d 'job scripts, a prolog and an epilog'
complete -c torchmem -n '_shtab_torchmem_using manifests slurm' -s h -l help -d 'show this help message and exit'
complete -c torchmem -n '_shtab_torchmem_using manifests slurm' -l out -xka "(__fish_complete_directories)" -d 'the directory to write to'
complete -c torchmem -n '_shtab_torchmem_using manifests slurm' -l force -d 'replace files that you changed'
complete -c torchmem -n '_shtab_torchmem_using manifests; and test $_shtab_torchmem_npos -eq 0' -a prometheus -d 'scrape configuration and rules'
complete -c torchmem -n '_shtab_torchmem_using manifests prometheus' -s h -l help -d 'show this help message and exit'
complete -c torchmem -n '_shtab_torchmem_using manifests prometheus' -l out -xka "(__fish_complete_directories)" -d 'the directory to write to'
complete -c torchmem -n '_shtab_torchmem_using manifests prometheus' -l force -d 'replace files that you changed'
complete -c torchmem -n '_shtab_torchmem_using manifests; and test $_shtab_torchmem_npos -eq 0' -a scale -d 'several Prometheus servers and a store, for large fleets'
complete -c torchmem -n '_shtab_torchmem_using manifests scale' -s h -l help -d 'show this help message and exit'
complete -c torchmem -n '_shtab_torchmem_using manifests scale' -l out -xka "(__fish_complete_directories)" -d 'the directory to write to'
complete -c torchmem -n '_shtab_torchmem_using manifests scale' -l force -d 'replace files that you changed'
complete -c torchmem -n '_shtab_torchmem_using manifests; and test $_shtab_torchmem_npos -eq 0' -a alertmanager -d 'routing and templates'
complete -c torchmem -n '_shtab_torchmem_using manifests alertmanager' -s h -l help -d 'show this help message and exit'
complete -c torchmem -n '_shtab_torchmem_using manifests alertmanager' -l out -xka "(__fish_complete_directories)" -d 'the directory to write to'
complete -c torchmem -n '_shtab_torchmem_using manifests alertmanager' -l force -d 'replace files that you changed'
complete -c torchmem -n '_shtab_torchmem_using manifests; and test $_shtab_torchmem_npos -eq 0' -a grafana -d 'dashboards and their provisioning'
complete -c torchmem -n '_shtab_torchmem_using manifests grafana' -s h -l help -d 'show this help message and exit'
complete -c torchmem -n '_shtab_torchmem_using manifests grafana' -l out -xka "(__fish_complete_directories)" -d 'the directory to write to'
complete -c torchmem -n '_shtab_torchmem_using manifests grafana' -l force -d 'replace files that you changed'
complete -c torchmem -n '_shtab_torchmem_using manifests; and test $_shtab_torchmem_npos -eq 0' -a compose -d 'Docker Compose: exporter, Prometheus, Alertmanager and Grafana'
complete -c torchmem -n '_shtab_torchmem_using manifests compose' -s h -l help -d 'show this help message and exit'
complete -c torchmem -n '_shtab_torchmem_using manifests compose' -l out -xka "(__fish_complete_directories)" -d 'the directory to write to'
complete -c torchmem -n '_shtab_torchmem_using manifests compose' -l force -d 'replace files that you changed'
complete -c torchmem -n '_shtab_torchmem_using manifests; and test $_shtab_torchmem_npos -eq 0' -a image -d 'the exporter'"'"'s container image'
complete -c torchmem -n '_shtab_torchmem_using manifests image' -s h -l help -d 'show this help message and exit'
complete -c torchmem -n '_shtab_torchmem_using manifests image' -l out -xka "(__fish_complete_directories)" -d 'the directory to write to'
complete -c torchmem -n '_shtab_torchmem_using manifests image' -l force -d 'replace files that you changed'
complete -c torchmem -n '_shtab_torchmem_using manifests; and test $_shtab_torchmem_npos -eq 0' -a stack -d 'the same as compose, from native binaries'
complete -c torchmem -n '_shtab_torchmem_using manifests stack' -s h -l help -d 'show this help message and exit'
complete -c torchmem -n '_shtab_torchmem_using manifests stack' -l out -xka "(__fish_complete_directories)" -d 'the directory to write to'
complete -c torchmem -n '_shtab_torchmem_using manifests stack' -l force -d 'replace files that you changed'
complete -c torchmem -n '_shtab_torchmem_using manifests; and test $_shtab_torchmem_npos -eq 0' -a rules -d 'write recording and alerting rules for Prometheus from your thresholds'
complete -c torchmem -n '_shtab_torchmem_using manifests rules' -s h -l help -d 'show this help message and exit'
complete -c torchmem -n '_shtab_torchmem_using manifests rules' -l thresholds -xka "(__fish_complete_path (commandline -ct))" -d 'the file of your thresholds (default TORCHMEM_THRESHOLDS, else the shipped)'
complete -c torchmem -n '_shtab_torchmem_using manifests rules' -l out -xka "(__fish_complete_path (commandline -ct))" -d 'the directory to write to, one file for each subject; or one .yml file'
complete -c torchmem -n '_shtab_torchmem_using manifests rules' -l check -xka "(__fish_complete_path (commandline -ct))" -d 'write nothing; fail if the rules there differ'
complete -c torchmem -n '_shtab_torchmem_using manifests rules' -l defaults -d 'print the shipped thresholds, as a template for your file'
complete -c torchmem -n '_shtab_torchmem_using manifests rules' -l prometheus-rule -x -d 'the one .yml file is a PrometheusRule of this namespace, for the Prometheus Operator'
complete -c torchmem -n '_shtab_torchmem_using manifests rules' -l force -d 'replace files of the same names that this command did not write'
complete -c torchmem -n '_shtab_torchmem_using manifests; and test $_shtab_torchmem_npos -eq 0' -a dashboards -d 'write Grafana'"'"'s dashboards to files, or save them in a Grafana'
complete -c torchmem -n '_shtab_torchmem_using manifests dashboards' -s h -l help -d 'show this help message and exit'
complete -c torchmem -n '_shtab_torchmem_using manifests dashboards' -l out -xka "(__fish_complete_directories)" -d 'the directory to write to'
complete -c torchmem -n '_shtab_torchmem_using manifests dashboards' -l grafana -x -d 'the Grafana to save them in'
complete -c torchmem -n '_shtab_torchmem_using manifests dashboards' -l token-file -xka "(__fish_complete_path (commandline -ct))" -d 'the token (default: GRAFANA_TOKEN)'
complete -c torchmem -n '_shtab_torchmem_using manifests dashboards' -l folder -x -d 'the folder in Grafana, made if it is missing (default: torchmem)'
complete -c torchmem -n '_shtab_torchmem_using manifests dashboards' -l datasource -x -d 'name or UID of the Prometheus data source (default: Grafana'"'"'s default)'
complete -c torchmem -n '_shtab_torchmem_using manifests dashboards' -l show -x -d 'variables that are hidden unless your series have such a label: cluster, namespace, team, user'
complete -c torchmem -n '_shtab_torchmem_using manifests dashboards' -l force -d 'replace dashboards that you may have changed'
complete -c torchmem -n '_shtab_torchmem_using manifests; and test $_shtab_torchmem_npos -eq 0' -a completion -d 'print the completion script of a shell'
complete -c torchmem -n '_shtab_torchmem_using manifests completion' -s h -l help -d 'show this help message and exit'
complete -c torchmem -n '_shtab_torchmem_using manifests completion; and test $_shtab_torchmem_npos -eq 0' -ka "bash zsh fish" -d 'the shell'
