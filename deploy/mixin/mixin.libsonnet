// The generated rules and dashboards as a monitoring mixin.
// For other thresholds, write prometheus/rules with `torchmem manifests rules`.
local groups(files) = std.flatMap(function(file) std.parseYaml(file).groups, files);

{
  prometheusAlerts+:: { groups+: groups([
    importstr '../../prometheus/rules/alerts-gpus.yml',
    importstr '../../prometheus/rules/alerts-memory.yml',
    importstr '../../prometheus/rules/alerts-monitoring.yml',
    importstr '../../prometheus/rules/alerts-ranks.yml',
    importstr '../../prometheus/rules/alerts-serving.yml',
  ]) },
  prometheusRules+:: { groups+: groups([
    importstr '../../prometheus/rules/recording-fleet.yml',
    importstr '../../prometheus/rules/recording-memory.yml',
    importstr '../../prometheus/rules/recording-nodes.yml',
    importstr '../../prometheus/rules/recording-prediction.yml',
    importstr '../../prometheus/rules/recording-processes.yml',
    importstr '../../prometheus/rules/recording-report.yml',
    importstr '../../prometheus/rules/recording-runs.yml',
    importstr '../../prometheus/rules/recording-trends.yml',
  ]) },
  grafanaDashboardFolder:: 'torchmem',
  grafanaDashboards+:: {
    'fleet.json': import '../../dashboards/json/fleet.json',
    'node.json': import '../../dashboards/json/node.json',
    'oom.json': import '../../dashboards/json/oom.json',
    'self.json': import '../../dashboards/json/self.json',
    'training-memory.json': import '../../dashboards/json/training-memory.json',
  },
}
