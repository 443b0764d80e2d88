# Completion of torchmem for bash; installed as `torchmem manifests completion --help` says.
# Rendered by deploy/completion.py with shtab: do not edit.

_shtab_torchmem_manifests_subparsers=(systemd kubernetes helm mixin slurm prometheus scale alertmanager grafana compose image stack rules dashboards completion)
_shtab_torchmem_subparsers=(exporter run demo top why release capture whatif compare preflight mcp doctor fleet manifests)

_shtab_torchmem_exporter_option_strings=(-h --help --listen --web.listen-address --web.config.file --web.systemd-socket --web-ui --no-web-ui --web.allowed-host --otlp --no-otlp --run-dir --ttl-seconds --scrape-deadline-seconds --pcie-throughput --no-pcie-throughput --all-series --no-all-series --processes-per-gpu --container-logs --kubelet-socket --scontrol --gpu-hour-price --currency --config --thresholds --print-config --once)
_shtab_torchmem_run_option_strings=(-h --help --name --run-dir --apply-advice)
_shtab_torchmem_demo_option_strings=(-h --help --scenario --list --ranks --duration --loop --seed --listen)
_shtab_torchmem_top_option_strings=(-h --help --exporter --once --interval)
_shtab_torchmem_why_option_strings=(-h --help --list --json --html --run-dir --exporter --rank --run --launch --pid --thresholds --at --leaks --gpu --top)
_shtab_torchmem_release_option_strings=(-h --help --gpu --run --launch --rank --pid --hooks --timeout --run-dir)
_shtab_torchmem_capture_option_strings=(-h --help --rank --run --launch --pid --seconds --max-entries --out --run-dir)
_shtab_torchmem_whatif_option_strings=(-h --help --gpu --gpu-model --setting --json)
_shtab_torchmem_compare_option_strings=(-h --help --max-peak-increase --json --markdown --list --run-dir)
_shtab_torchmem_preflight_option_strings=(-h --help --gpu-model --list-gpu-models --gpus --steps --alloc-conf --beside-gpu --world-size --rank --local-world-size --find-batch --matrix --setting --gpu-models --snapshot --json --save-baseline --baseline --tolerance --markdown)
_shtab_torchmem_mcp_option_strings=(-h --help --exporter --run-dir)
_shtab_torchmem_doctor_option_strings=(-h --help --exporter --prometheus --run-dir --json)
_shtab_torchmem_fleet_option_strings=(-h --help --prometheus --since --until --match --token-file --header --timeout --rows --json --csv --html)
_shtab_torchmem_manifests_systemd_option_strings=(-h --help --out --force)
_shtab_torchmem_manifests_kubernetes_option_strings=(-h --help --out --force)
_shtab_torchmem_manifests_helm_option_strings=(-h --help --out --force)
_shtab_torchmem_manifests_mixin_option_strings=(-h --help --out --force)
_shtab_torchmem_manifests_slurm_option_strings=(-h --help --out --force)
_shtab_torchmem_manifests_prometheus_option_strings=(-h --help --out --force)
_shtab_torchmem_manifests_scale_option_strings=(-h --help --out --force)
_shtab_torchmem_manifests_alertmanager_option_strings=(-h --help --out --force)
_shtab_torchmem_manifests_grafana_option_strings=(-h --help --out --force)
_shtab_torchmem_manifests_compose_option_strings=(-h --help --out --force)
_shtab_torchmem_manifests_image_option_strings=(-h --help --out --force)
_shtab_torchmem_manifests_stack_option_strings=(-h --help --out --force)
_shtab_torchmem_manifests_rules_option_strings=(-h --help --thresholds --out --check --defaults --prometheus-rule --force)
_shtab_torchmem_manifests_dashboards_option_strings=(-h --help --out --grafana --token-file --folder --datasource --show --force)
_shtab_torchmem_manifests_completion_option_strings=(-h --help)
_shtab_torchmem_manifests_option_strings=(-h --help)
_shtab_torchmem_option_strings=(-h --help --version)

_shtab_torchmem_exporter___web_config_file_COMPGEN=_shtab_compgen_files
_shtab_torchmem_exporter___run_dir_COMPGEN=_shtab_compgen_dirs
_shtab_torchmem_exporter___container_logs_COMPGEN=_shtab_compgen_dirs
_shtab_torchmem_exporter___config_COMPGEN=_shtab_compgen_files
_shtab_torchmem_exporter___thresholds_COMPGEN=_shtab_compgen_files
_shtab_torchmem_run_pos_0_COMPGEN=_torchmem_command
_shtab_torchmem_run___run_dir_COMPGEN=_shtab_compgen_dirs
_shtab_torchmem_why_pos_0_COMPGEN=_shtab_compgen_files
_shtab_torchmem_why___html_COMPGEN=_shtab_compgen_files
_shtab_torchmem_why___run_dir_COMPGEN=_shtab_compgen_dirs
_shtab_torchmem_why___thresholds_COMPGEN=_shtab_compgen_files
_shtab_torchmem_release___run_dir_COMPGEN=_shtab_compgen_dirs
_shtab_torchmem_capture___out_COMPGEN=_shtab_compgen_files
_shtab_torchmem_capture___run_dir_COMPGEN=_shtab_compgen_dirs
_shtab_torchmem_whatif_pos_0_COMPGEN=_shtab_compgen_files
_shtab_torchmem_compare___markdown_COMPGEN=_shtab_compgen_files
_shtab_torchmem_compare___run_dir_COMPGEN=_shtab_compgen_dirs
_shtab_torchmem_preflight_pos_0_COMPGEN=_torchmem_command
_shtab_torchmem_preflight___snapshot_COMPGEN=_shtab_compgen_files
_shtab_torchmem_preflight___save_baseline_COMPGEN=_shtab_compgen_files
_shtab_torchmem_preflight___baseline_COMPGEN=_shtab_compgen_files
_shtab_torchmem_preflight___markdown_COMPGEN=_shtab_compgen_files
_shtab_torchmem_mcp___run_dir_COMPGEN=_shtab_compgen_dirs
_shtab_torchmem_doctor___run_dir_COMPGEN=_shtab_compgen_dirs
_shtab_torchmem_fleet___token_file_COMPGEN=_shtab_compgen_files
_shtab_torchmem_fleet___html_COMPGEN=_shtab_compgen_files
_shtab_torchmem_manifests_systemd___out_COMPGEN=_shtab_compgen_dirs
_shtab_torchmem_manifests_kubernetes___out_COMPGEN=_shtab_compgen_dirs
_shtab_torchmem_manifests_helm___out_COMPGEN=_shtab_compgen_dirs
_shtab_torchmem_manifests_mixin___out_COMPGEN=_shtab_compgen_dirs
_shtab_torchmem_manifests_slurm___out_COMPGEN=_shtab_compgen_dirs
_shtab_torchmem_manifests_prometheus___out_COMPGEN=_shtab_compgen_dirs
_shtab_torchmem_manifests_scale___out_COMPGEN=_shtab_compgen_dirs
_shtab_torchmem_manifests_alertmanager___out_COMPGEN=_shtab_compgen_dirs
_shtab_torchmem_manifests_grafana___out_COMPGEN=_shtab_compgen_dirs
_shtab_torchmem_manifests_compose___out_COMPGEN=_shtab_compgen_dirs
_shtab_torchmem_manifests_image___out_COMPGEN=_shtab_compgen_dirs
_shtab_torchmem_manifests_stack___out_COMPGEN=_shtab_compgen_dirs
_shtab_torchmem_manifests_rules___thresholds_COMPGEN=_shtab_compgen_files
_shtab_torchmem_manifests_rules___out_COMPGEN=_shtab_compgen_files
_shtab_torchmem_manifests_rules___check_COMPGEN=_shtab_compgen_files
_shtab_torchmem_manifests_dashboards___out_COMPGEN=_shtab_compgen_dirs
_shtab_torchmem_manifests_dashboards___token_file_COMPGEN=_shtab_compgen_files

_shtab_torchmem_demo___scenario_choices=(colocated fragmentation healthy-slack imbalanced-ranks leak neighbor phase-change retry-storm rl-phases variable-length)
_shtab_torchmem_why___at_choices=(end peak oom)
_shtab_torchmem_whatif___gpu_model_choices=(v100-16gb v100-32gb t4-16gb a10-24gb a10g-24gb a40-48gb a100-40gb a100-80gb l4-24gb l40s-48gb h20-96gb h100-80gb h100-nvl-94gb h200-141gb b200-180gb b300-288gb rtx-3090 rtx-4090 rtx-5090 rtx-a6000 rtx-6000-ada rtx-pro-6000)
_shtab_torchmem_preflight___gpu_model_choices=(v100-16gb v100-32gb t4-16gb a10-24gb a10g-24gb a40-48gb a100-40gb a100-80gb l4-24gb l40s-48gb h20-96gb h100-80gb h100-nvl-94gb h200-141gb b200-180gb b300-288gb rtx-3090 rtx-4090 rtx-5090 rtx-a6000 rtx-6000-ada rtx-pro-6000)
_shtab_torchmem_manifests_completion_pos_0_choices=(bash zsh fish)
_shtab_torchmem_manifests_pos_0_choices=(systemd kubernetes helm mixin slurm prometheus scale alertmanager grafana compose image stack rules dashboards completion)
_shtab_torchmem_pos_0_choices=(exporter run demo top why release capture whatif compare preflight mcp doctor fleet manifests)

_shtab_torchmem_exporter__h_nargs=0
_shtab_torchmem_exporter___help_nargs=0
_shtab_torchmem_exporter___web_systemd_socket_nargs=0
_shtab_torchmem_exporter___web_ui_nargs=0
_shtab_torchmem_exporter___no_web_ui_nargs=0
_shtab_torchmem_exporter___otlp_nargs=0
_shtab_torchmem_exporter___no_otlp_nargs=0
_shtab_torchmem_exporter___pcie_throughput_nargs=0
_shtab_torchmem_exporter___no_pcie_throughput_nargs=0
_shtab_torchmem_exporter___all_series_nargs=0
_shtab_torchmem_exporter___no_all_series_nargs=0
_shtab_torchmem_exporter___print_config_nargs=0
_shtab_torchmem_exporter___once_nargs=0
_shtab_torchmem_run_pos_0_nargs=...
_shtab_torchmem_run__h_nargs=0
_shtab_torchmem_run___help_nargs=0
_shtab_torchmem_run___apply_advice_nargs=0
_shtab_torchmem_demo__h_nargs=0
_shtab_torchmem_demo___help_nargs=0
_shtab_torchmem_demo___list_nargs=0
_shtab_torchmem_demo___loop_nargs=0
_shtab_torchmem_top__h_nargs=0
_shtab_torchmem_top___help_nargs=0
_shtab_torchmem_top___once_nargs=0
_shtab_torchmem_why_pos_0_nargs='*'
_shtab_torchmem_why__h_nargs=0
_shtab_torchmem_why___help_nargs=0
_shtab_torchmem_why___list_nargs=0
_shtab_torchmem_why___json_nargs=0
_shtab_torchmem_why___leaks_nargs=0
_shtab_torchmem_release__h_nargs=0
_shtab_torchmem_release___help_nargs=0
_shtab_torchmem_capture__h_nargs=0
_shtab_torchmem_capture___help_nargs=0
_shtab_torchmem_whatif_pos_0_nargs=+
_shtab_torchmem_whatif__h_nargs=0
_shtab_torchmem_whatif___help_nargs=0
_shtab_torchmem_whatif___json_nargs=0
_shtab_torchmem_compare__h_nargs=0
_shtab_torchmem_compare___help_nargs=0
_shtab_torchmem_compare___json_nargs=0
_shtab_torchmem_compare___list_nargs=0
_shtab_torchmem_preflight_pos_0_nargs=...
_shtab_torchmem_preflight__h_nargs=0
_shtab_torchmem_preflight___help_nargs=0
_shtab_torchmem_preflight___list_gpu_models_nargs=0
_shtab_torchmem_preflight___beside_gpu_nargs=0
_shtab_torchmem_preflight___matrix_nargs=+
_shtab_torchmem_preflight___json_nargs=0
_shtab_torchmem_mcp__h_nargs=0
_shtab_torchmem_mcp___help_nargs=0
_shtab_torchmem_doctor__h_nargs=0
_shtab_torchmem_doctor___help_nargs=0
_shtab_torchmem_doctor___json_nargs=0
_shtab_torchmem_fleet__h_nargs=0
_shtab_torchmem_fleet___help_nargs=0
_shtab_torchmem_fleet___json_nargs=0
_shtab_torchmem_fleet___csv_nargs=0
_shtab_torchmem_manifests_systemd__h_nargs=0
_shtab_torchmem_manifests_systemd___help_nargs=0
_shtab_torchmem_manifests_systemd___force_nargs=0
_shtab_torchmem_manifests_kubernetes__h_nargs=0
_shtab_torchmem_manifests_kubernetes___help_nargs=0
_shtab_torchmem_manifests_kubernetes___force_nargs=0
_shtab_torchmem_manifests_helm__h_nargs=0
_shtab_torchmem_manifests_helm___help_nargs=0
_shtab_torchmem_manifests_helm___force_nargs=0
_shtab_torchmem_manifests_mixin__h_nargs=0
_shtab_torchmem_manifests_mixin___help_nargs=0
_shtab_torchmem_manifests_mixin___force_nargs=0
_shtab_torchmem_manifests_slurm__h_nargs=0
_shtab_torchmem_manifests_slurm___help_nargs=0
_shtab_torchmem_manifests_slurm___force_nargs=0
_shtab_torchmem_manifests_prometheus__h_nargs=0
_shtab_torchmem_manifests_prometheus___help_nargs=0
_shtab_torchmem_manifests_prometheus___force_nargs=0
_shtab_torchmem_manifests_scale__h_nargs=0
_shtab_torchmem_manifests_scale___help_nargs=0
_shtab_torchmem_manifests_scale___force_nargs=0
_shtab_torchmem_manifests_alertmanager__h_nargs=0
_shtab_torchmem_manifests_alertmanager___help_nargs=0
_shtab_torchmem_manifests_alertmanager___force_nargs=0
_shtab_torchmem_manifests_grafana__h_nargs=0
_shtab_torchmem_manifests_grafana___help_nargs=0
_shtab_torchmem_manifests_grafana___force_nargs=0
_shtab_torchmem_manifests_compose__h_nargs=0
_shtab_torchmem_manifests_compose___help_nargs=0
_shtab_torchmem_manifests_compose___force_nargs=0
_shtab_torchmem_manifests_image__h_nargs=0
_shtab_torchmem_manifests_image___help_nargs=0
_shtab_torchmem_manifests_image___force_nargs=0
_shtab_torchmem_manifests_stack__h_nargs=0
_shtab_torchmem_manifests_stack___help_nargs=0
_shtab_torchmem_manifests_stack___force_nargs=0
_shtab_torchmem_manifests_rules__h_nargs=0
_shtab_torchmem_manifests_rules___help_nargs=0
_shtab_torchmem_manifests_rules___defaults_nargs=0
_shtab_torchmem_manifests_rules___force_nargs=0
_shtab_torchmem_manifests_dashboards__h_nargs=0
_shtab_torchmem_manifests_dashboards___help_nargs=0
_shtab_torchmem_manifests_dashboards___force_nargs=0
_shtab_torchmem_manifests_completion__h_nargs=0
_shtab_torchmem_manifests_completion___help_nargs=0
_shtab_torchmem_manifests_pos_0_nargs=A...
_shtab_torchmem_manifests__h_nargs=0
_shtab_torchmem_manifests___help_nargs=0
_shtab_torchmem_pos_0_nargs=A...
_shtab_torchmem__h_nargs=0
_shtab_torchmem___help_nargs=0
_shtab_torchmem___version_nargs=0


# Custom Preamble
_torchmem_command() {
  if [[ ${COMP_WORDS[COMP_CWORD-1]} == -- ]]; then
    compgen -c -- "$1"
  else
    compgen -f -- "$1"
  fi
}

# End Custom Preamble

# $1=COMP_WORDS[1]
_shtab_compgen_files() {
  compgen -f -- $1  # files
}

# $1=COMP_WORDS[1]
_shtab_compgen_dirs() {
  compgen -d -- $1  # recurse into subdirs
}

# $1=COMP_WORDS[1]
_shtab_replace_nonword() {
  echo "${1//[^[:word:]]/_}"
}

# set default values (called for the initial parser & any subparsers)
_set_parser_defaults() {
  local subparsers_var="${prefix}_subparsers[@]"
  sub_parsers=${!subparsers_var-}

  local current_option_strings_var="${prefix}_option_strings[@]"
  current_option_strings=${!current_option_strings_var}

  completed_positional_actions=0

  _set_new_action "pos_$completed_positional_actions" true
}

# $1=action identifier
# $2=positional action (bool)
# set all identifiers for an action's parameters
_set_new_action() {
  current_action="${prefix}_$(_shtab_replace_nonword $1)"

  local current_action_compgen_var=${current_action}_COMPGEN
  current_action_compgen="${!current_action_compgen_var-}"

  local current_action_choices_var="${current_action}_choices[@]"
  current_action_choices="${!current_action_choices_var-}"

  local current_action_nargs_var="${current_action}_nargs"
  if [ -n "${!current_action_nargs_var-}" ]; then
    current_action_nargs="${!current_action_nargs_var}"
  else
    current_action_nargs=1
  fi

  current_action_args_start_index=$(( $word_index + 1 - $pos_only ))

  current_action_is_positional=$2
}

# Notes:
# `COMPREPLY`: what will be rendered after completion is triggered
# `completing_word`: currently typed word to generate completions for
# `${!var}`: evaluates the content of `var` and expand its content as a variable
#     hello="world"
#     x="hello"
#     ${!x} -> ${hello} -> "world"
_shtab_torchmem() {
  local completing_word="${COMP_WORDS[COMP_CWORD]}"
  local previous_word="${COMP_WORDS[COMP_CWORD-1]}"
  local completed_positional_actions
  local current_action
  local current_action_args_start_index
  local current_action_choices
  local current_action_compgen
  local current_action_is_positional
  local current_action_nargs
  local current_option_strings
  local sub_parsers
  COMPREPLY=()

  local prefix=_shtab_torchmem
  local word_index=0
  local pos_only=0 # "--" delimiter not encountered yet
  _set_parser_defaults
  word_index=1

  # determine what arguments are appropriate for the current state
  # of the arg parser
  while [ $word_index -ne $COMP_CWORD ]; do
    local this_word="${COMP_WORDS[$word_index]}"

    if [[ $pos_only = 1 || " $this_word " != " -- " ]]; then
      if [[ -n $sub_parsers && " ${sub_parsers[@]} " == *" $this_word "* ]]; then
        # valid subcommand: add it to the prefix & reset the current action
        prefix="${prefix}_$(_shtab_replace_nonword $this_word)"
        _set_parser_defaults
      fi

      if [[ " ${current_option_strings[@]} " == *" $this_word "* ]]; then
        # a new action should be acquired (due to recognised option string or
        # no more input expected from current action);
        # the next positional action can fill in here
        _set_new_action $this_word false
      fi

      if [[ "$current_action_nargs" != "*" ]] && \
         [[ "$current_action_nargs" != "+" ]] && \
         [[ "$current_action_nargs" != "?" ]] && \
         [[ "$current_action_nargs" != *"..." ]] && \
         (( $word_index + 1 - $current_action_args_start_index - $pos_only >= \
            $current_action_nargs )); then
        $current_action_is_positional && let "completed_positional_actions += 1"
        _set_new_action "pos_$completed_positional_actions" true
      fi
    else
      pos_only=1 # "--" delimiter encountered
    fi

    let "word_index+=1"
  done

  # Generate the completions

  COMPREPLY=()
  if [[ $pos_only = 0 && "$completing_word" == -* &&
        ( -z "$current_action_compgen" || "$current_action_is_positional" = true ) ]]; then
    # optional argument started: use option strings
    while IFS= read -r line; do COMPREPLY+=("$line"); done < <(
      compgen -W "${current_option_strings[*]}" -- "$completing_word")
  elif [[ "$previous_word" =~ ^[0-9\&]*[\<\>]\>?$ ]]; then
    # handle redirection operators
    compopt -o filenames 2>/dev/null || : # bash>=4
    while IFS= read -r line; do COMPREPLY+=("$line"); done < <(compgen -f -- "$completing_word")
  else
    # use choices & compgen
    local action_compgen_word="$completing_word"
    # handle tab-completing in the middle of a line (#248 <- #116)
    [[ -n "$current_action_compgen" && "$completing_word" == -* ]] && action_compgen_word=""
    [ -n "$current_action_compgen" ] && {
      [[ "$current_action_compgen" =~ _(file|dir|glob|FILE|DIR|GLOB)|File|Dir|Glob ]] &&
        compopt -o filenames 2>/dev/null || : # bash>=4
      while IFS= read -r line; do COMPREPLY+=("$line"); done < <(
        "$current_action_compgen" "$action_compgen_word")
    }
    while IFS= read -r line; do COMPREPLY+=("$line"); done < <(
      compgen -W "${current_action_choices[*]}" -- "$completing_word")
  fi

  if [[ ${#COMPREPLY[@]} = 0 ]]; then
    # native fallback matches are not necessarily filenames (e.g. variables)
    compopt +o filenames 2>/dev/null || : # bash>=4
  fi

  return 0
}

complete -o bashdefault -F _shtab_torchmem torchmem