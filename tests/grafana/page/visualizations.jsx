// The panel types that Grafana's packages can draw, given what Grafana's panel plugins give them.
import {
  applyNullInsertThreshold,
  FieldType,
  formattedValueToString,
  getDisplayProcessor,
  getDisplayValueAlignmentFactors,
  getFieldDisplayName,
  getFieldDisplayValues,
  getFrameDisplayName,
  renderTextPanelMarkdown,
} from "@grafana/data";
import { BarGauge, BigValue, TimeSeries, useTheme2, VizRepeater } from "@grafana/ui";
import { TableNG } from "@grafana/ui/unstable";
import { Annotations } from "./annotations.jsx";
import { Heatmap } from "./heatmap.jsx";
import { StateTimeline, StatusHistory } from "./timelines.jsx";

const SELECT_HEIGHT = 40; // of the choice between several tables

function NoData({ fieldConfig }) {
  return <div className="message">{fieldConfig.defaults.noValue || "No data"}</div>;
}

function orNoData(Visualization, isFilled) {
  return (props) =>
    props.frames.some(isFilled) ? <Visualization {...props} /> : <NoData {...props} />;
}

const hasRows = (frame) => frame.fields.length > 0 && frame.length > 0;
const hasColumns = (frame) => frame.fields.length > 0;

function asNumbers(field) {
  if (field.type === FieldType.number) {
    return {
      ...field,
      values: field.values.map((value) => (Number.isFinite(value) ? value : null)),
    };
  }
  const number = (value) => (value === null ? null : Number(value));
  return { ...field, type: FieldType.number, values: field.values.map(number) };
}

const ON_A_GRAPH = [FieldType.time, FieldType.number, FieldType.boolean];

/** Return a frame with nulls where points are missing: a line has a gap there, as in Grafana. */
function withGaps(frame, range) {
  return applyNullInsertThreshold({
    frame,
    refFieldPseudoMin: range.from.valueOf(),
    refFieldPseudoMax: range.to.valueOf(),
  });
}

/** Return frames with the fields that a graph shows, numbered in the order of the palette. */
function graphs(frames, range, theme) {
  let seriesIndex = 0;
  const drawn = frames.filter(
    (frame) => hasRows(frame) && frame.fields.some(({ type }) => type === FieldType.time),
  );
  const numbered = drawn.map((frame) => {
    const known = frame.fields.filter(({ type }) => ON_A_GRAPH.includes(type));
    const fields = known.map((field) => {
      if (field.type === FieldType.time) return { ...field };
      const own = { ...asNumbers(field), state: { ...field.state, seriesIndex: seriesIndex++ } };
      return { ...own, display: getDisplayProcessor({ field: own, theme }) };
    });
    return withGaps({ ...frame, fields }, range);
  });
  return numbered.filter(({ fields }) => fields.length > 1);
}

function TimeSeriesPanel({ frames, range, width, height, options, timeZone, annotations, state }) {
  const theme = useTheme2();
  const drawn = graphs(frames, range, theme);
  const series = drawn.flatMap((frame) =>
    frame.fields.filter(({ type }) => type !== FieldType.time).map((field) => [field, frame]),
  );
  state.series = series.map(([field, frame]) => getFieldDisplayName(field, frame, drawn));
  const size = { width, height, timeZone };
  return (
    <TimeSeries
      frames={drawn}
      structureRev={1}
      timeRange={range}
      legend={options.legend}
      options={options}
      {...size}
    >
      {(config) => <Annotations config={config} events={annotations} theme={theme} />}
    </TimeSeries>
  );
}

/** Draw one value for each field; `state.values` keeps what is read there. */
function Values({ panelProps, hasSparkline, renderValue, ...more }) {
  const { frames, fieldConfig, options, replace, timeZone, width, height, state } = panelProps;
  const theme = useTheme2();
  const getValues = () =>
    getFieldDisplayValues({
      data: frames,
      fieldConfig,
      reduceOptions: options.reduceOptions,
      replaceVariables: replace,
      sparkline: hasSparkline,
      percentChange: options.showPercentChange,
      theme,
      timeZone,
    });
  state.values = getValues().map(({ display }) => ({
    title: display.title,
    text: formattedValueToString(display),
    number: Number.isFinite(display.numeric) ? display.numeric : null,
    color: display.color,
  }));
  const factors = {
    getAlignmentFactors: getDisplayValueAlignmentFactors,
    source: frames,
    renderCounter: 0,
  };
  const orientation = options.orientation;
  return (
    <VizRepeater
      {...{ getValues, renderValue, width, height, orientation }}
      {...factors}
      {...more}
    />
  );
}

function StatPanel(props) {
  const { options, fieldConfig, panel, timeZone } = props;
  const isNamed = options.textMode === "auto" && (fieldConfig.defaults.displayName || !panel.title);
  const renderValue = ({ value, orientation, ...rest }) => (
    <BigValue
      {...rest}
      value={value.display}
      sparkline={value.sparkline && { ...value.sparkline, timeZone }}
      parentOrientation={orientation}
      colorMode={options.colorMode}
      graphMode={options.graphMode}
      justifyMode={options.justifyMode}
      textMode={isNamed ? "value_and_name" : options.textMode}
      text={options.text}
      disableWideLayout={!options.wideLayout}
      percentChangeColorMode={options.percentChangeColorMode}
      theme={props.theme}
    />
  );
  return (
    <Values
      panelProps={props}
      hasSparkline={options.graphMode !== "none"}
      renderValue={renderValue}
      itemSpacing={3}
      autoGrid
    />
  );
}

function BarGaugePanel(props) {
  const { options } = props;
  const renderValue = ({ value, ...rest }) => (
    <BarGauge
      {...rest}
      value={value.display}
      field={value.field}
      display={value.view?.getFieldDisplayProcessor(value.colIndex)}
      text={options.text}
      itemSpacing={10}
      lcdCellWidth={12}
      displayMode={options.displayMode}
      valueDisplayMode={options.valueMode}
      namePlacement={options.namePlacement}
      showUnfilled={options.showUnfilled}
      theme={props.theme}
    />
  );
  const { minVizWidth, minVizHeight, maxVizHeight } = options;
  return (
    <Values
      panelProps={props}
      renderValue={renderValue}
      itemSpacing={10}
      {...{ minVizWidth, minVizHeight, maxVizHeight }}
    />
  );
}

const isBlank = (value) => value === null || value === undefined;

/** A unit turns a label that looks like a number into one: 4130 becomes "4.13 K". */
function isRewritten(field, value) {
  if (
    field.type !== FieldType.string ||
    isBlank(value) ||
    value === "" ||
    field.config.mappings?.length
  )
    return false;
  return formattedValueToString(field.display(value)) !== value;
}

function isFilledBlank(field, value) {
  return Boolean(field.config.noValue) && isBlank(value);
}

function columnsWith(test, frame, frames) {
  const found = frame.fields.filter(
    (field) => !field.config.custom?.hidden && field.values.some((value) => test(field, value)),
  );
  return found.map((field) => getFieldDisplayName(field, frame, frames));
}

function TablePanel({ frames, width, height, options, fieldConfig, range, state }) {
  const frame = frames[options.frameIndex] ?? frames[0];
  const hasSelect = frames.length > 1;
  const shown = frame.fields.filter(
    ({ config }) => !config.custom?.hidden && !config.custom?.hideFrom?.viz,
  );
  state.table = {
    tables: frames.length,
    columns: shown.map((field) => getFieldDisplayName(field, frame, frames)),
    rows: frame.length,
    filledBlanks: columnsWith(isFilledBlank, frame, frames),
    rewritten: columnsWith(isRewritten, frame, frames),
  };
  return (
    <>
      <TableNG
        data={frame}
        width={width}
        height={hasSelect ? height - SELECT_HEIGHT : height}
        noHeader={!options.showHeader}
        showTypeIcons={options.showTypeIcons}
        initialSortBy={options.sortBy}
        cellHeight={options.cellHeight}
        enablePagination={options.enablePagination}
        frozenColumns={options.frozenColumns?.left}
        maxRowHeight={options.maxRowHeight}
        fieldConfig={fieldConfig}
        timeRange={range}
        structureRev={1}
      />
      {hasSelect && <div className="frames">{getFrameDisplayName(frame)}</div>}
    </>
  );
}

function TextPanel({ options, replace }) {
  const text = replace(options.content ?? "", {}, "html");
  const html = options.mode === "markdown" ? renderTextPanelMarkdown(text) : text;
  return <div className="markdown-html" dangerouslySetInnerHTML={{ __html: html }} />;
}

export const visualizations = {
  timeseries: orNoData(TimeSeriesPanel, hasRows),
  stat: StatPanel,
  bargauge: BarGaugePanel,
  table: orNoData(TablePanel, hasColumns),
  text: TextPanel,
  "state-timeline": orNoData(StateTimeline, hasRows),
  "status-history": orNoData(StatusHistory, hasRows),
  heatmap: orNoData(Heatmap, hasRows),
};
