// For each panel type: its own field options and its panel options, with the defaults of Grafana
// 12, and its color.

const hideFrom = { legend: false, tooltip: false, viz: false };
const legend = { showLegend: true, displayMode: "list", placement: "bottom", calcs: [] };
const tooltip = { mode: "single", sort: "none" };
const reduceOptions = { calcs: ["lastNotNull"], values: false };
const byThresholds = { mode: "thresholds" };

const axis = {
  axisPlacement: "auto",
  axisLabel: "",
  axisColorMode: "text",
  axisBorderShow: false,
  axisCenteredZero: false,
  axisWidth: undefined,
  axisGridShow: undefined,
  axisSoftMin: undefined,
  axisSoftMax: undefined,
  scaleDistribution: { type: "linear" },
};

const timeseries = {
  custom: {
    ...axis,
    drawStyle: "line",
    lineInterpolation: "linear",
    barAlignment: 0,
    barWidthFactor: 0.6,
    lineWidth: 1,
    fillOpacity: 0,
    gradientMode: "none",
    fillBelowTo: undefined,
    lineStyle: { fill: "solid" },
    lineColor: undefined,
    spanNulls: false,
    insertNulls: false,
    showPoints: "auto",
    showValues: false,
    pointSize: 5,
    stacking: { mode: "none", group: "A" },
    transform: undefined,
    hideFrom,
    thresholdsStyle: { mode: "off" },
  },
  options: { legend, tooltip },
  color: { mode: "palette-classic" },
};

const stat = {
  custom: {},
  options: {
    reduceOptions,
    orientation: "auto",
    textMode: "auto",
    wideLayout: true,
    colorMode: "value",
    graphMode: "area",
    justifyMode: "auto",
    showPercentChange: false,
    percentChangeColorMode: "standard",
  },
  color: byThresholds,
};

const bargauge = {
  custom: {},
  options: {
    reduceOptions,
    orientation: "auto",
    displayMode: "gradient",
    valueMode: "color",
    namePlacement: "auto",
    showUnfilled: true,
    sizing: "auto",
    minVizWidth: 8,
    minVizHeight: 16,
    maxVizHeight: 300,
    legend: { ...legend, showLegend: false },
  },
  color: byThresholds,
};

const table = {
  custom: {
    align: "auto",
    width: undefined,
    minWidth: undefined,
    cellOptions: { type: "auto" },
    inspect: false,
    filterable: undefined,
    hidden: undefined,
    hideFrom: undefined,
    wrapText: undefined,
    wrapHeaderText: undefined,
    footer: undefined,
    tooltip: undefined,
    styleField: undefined,
  },
  options: { showHeader: true, cellHeight: "sm", frameIndex: 0, showTypeIcons: false },
  color: byThresholds,
};

const rows = { showValue: "auto", rowHeight: 0.9, perPage: 20, legend, tooltip };

const stateTimeline = {
  custom: {
    ...axis,
    lineWidth: 0,
    fillOpacity: 70,
    spanNulls: false,
    insertNulls: false,
    hideFrom,
  },
  options: { ...rows, mergeValues: true, alignValue: "left" },
  color: { mode: "continuous-GrYlRd" },
};

const statusHistory = {
  custom: { ...axis, lineWidth: 1, fillOpacity: 70, hideFrom },
  options: { ...rows, colWidth: 0.9 },
  color: byThresholds,
};

const scheme = {
  mode: "scheme",
  scheme: "Oranges",
  fill: "dark-orange",
  scale: "exponential",
  exponent: 0.5,
  steps: 64,
};

const heatmap = {
  custom: { scaleDistribution: { type: "linear" }, hideFrom },
  options: {
    calculate: false,
    cellGap: 1,
    color: { ...scheme, reverse: false },
    filterValues: { le: 1e-9 },
    legend: { show: true },
    showValue: "auto",
    yAxis: { axisPlacement: "left", reverse: false },
  },
  color: byThresholds,
};

const text = { custom: {}, options: { mode: "markdown", content: "" }, color: byThresholds };

export const panelTypes = {
  timeseries,
  stat,
  bargauge,
  table,
  "state-timeline": stateTimeline,
  "status-history": statusHistory,
  heatmap,
  text,
};
