// The generated rules and dashboards as a monitoring mixin.
// For other thresholds and for links, write prometheus/rules with `torchmem manifests rules`.
local opens(link) = !std.startsWith(link, '/') && !std.startsWith(link, '{{ $externalURL }}');
// Only docker-compose.yml has a Prometheus that serves the runbooks: elsewhere, links are whole URLs or left out.
local rule(each) = each {
  [if 'annotations' in each then 'annotations']: {
    [name]: each.annotations[name]
    for name in std.objectFields(each.annotations)
    if !std.endsWith(name, '_url') || opens(each.annotations[name])
  },
};
local groups(files) = [
  group { rules: [rule(each) for each in super.rules] }
  for file in files
  for group in std.parseYaml(file).groups
];

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
